"""Fit: the SRAM that a tile of a real head needs, block by block, and which GPUs have room for it."""

from typing import Any

from flashtile.band import Band
from flashtile.cost.traffic import Layout, count
from flashtile.lab.catalogue import chips
from flashtile.lab.report.viewer.run import BLOCKS
from flashtile.numerics.schedule import Grid, fa2_forward

DIMS = (64, 128, 256)
TILES = ((32, 32), (64, 64), (128, 64), (128, 128), (256, 128))
STATISTICS = ("m", "l", "factor")


def fit() -> dict[str, Any]:
    """Every GPU with the bytes of SRAM that one tile may use there, and what each tile needs."""
    rooms = [{"name": name, "title": chip.name, "bytes": chip.block_kib << 10} for name, chip in chips().items()]
    return {"rooms": rooms, "needs": [_need(dim, br, bc, rooms) for dim in DIMS for br, bc in TILES]}


def _need(dim: int, br: int, bc: int, rooms: list[dict[str, Any]]) -> dict[str, Any]:
    """Bytes of each block of one tile, in float16, with the statistics of its rows in float32, and where they fit."""
    grid, layout = Grid(br, bc, br, bc), Layout(dim, dim, "float16")
    held = count(fa2_forward(Band(), grid), grid, layout).sram_bytes
    blocks = {name: held[name] for name in BLOCKS if name in held and name not in STATISTICS}
    blocks["m, l"] = sum(held[name] for name in STATISTICS)
    total = sum(blocks.values())
    fits = {room["name"]: total <= room["bytes"] for room in rooms}
    return {"dim": dim, "br": br, "bc": bc, "blocks": blocks, "bytes": total, "fits": fits}
