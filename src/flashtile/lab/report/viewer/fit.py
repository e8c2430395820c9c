"""Fit: the SRAM that a tile of a real head needs, block by block, and which GPUs have room for it."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.band import Band
from flashtile.cost.traffic import Layout, count
from flashtile.lab.catalogue import chips
from flashtile.lab.report.viewer.run import BLOCKS
from flashtile.numerics.schedule import Grid, fa2_forward

DIMS = (64, 128, 256)
TILES = ((32, 32), (64, 64), (128, 64), (128, 128), (256, 128))
STATISTICS = ("m", "l", "factor")


@dataclass(frozen=True, slots=True)
class Room:
    """A GPU, and the bytes of SRAM that one tile may use there."""

    name: str
    title: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of each block of one tile, in float16, with the statistics of its rows in float32."""

    dim: int
    br: int
    bc: int
    blocks: dict[str, int]
    bytes: int
    fits: dict[str, bool]  # by GPU name


@dataclass(frozen=True, slots=True)
class Fit:
    """Every GPU, and every tile with every head width."""

    rooms: list[Room]
    needs: list[Need]


def fit() -> Fit:
    rooms = [Room(name, chip.name, chip.block_kib << 10) for name, chip in chips().items()]
    return Fit(rooms, [_need(dim, br, bc, rooms) for dim in DIMS for br, bc in TILES])


def _need(dim: int, br: int, bc: int, rooms: list[Room]) -> Need:
    grid, layout = Grid(br, bc, br, bc), Layout(dim, dim, "float16")
    held = count(fa2_forward(Band(), grid), grid, layout).sram_bytes
    blocks = {name: held[name] for name in BLOCKS if name in held and name not in STATISTICS}
    blocks["m, l"] = sum(held[name] for name in STATISTICS)
    total = sum(blocks.values())
    return Need(dim, br, bc, blocks, total, {room.name: total <= room.bytes for room in rooms})
