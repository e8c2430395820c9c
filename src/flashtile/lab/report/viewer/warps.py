"""Work split between warps: by keys, as in FlashAttention-1, or by queries, as in 2; executed and counted."""

from typing import Any

import numpy as np

from flashtile.lab.lessons.fa1_vs_fa2 import WARPS, absorbed, split
from flashtile.lab.report.viewer.scene import DIM, SCENES
from flashtile.lab.report.viewer.svg import axis, decimal, element, rectangle


def splits() -> dict[str, dict[str, Any]]:
    """Run the first scene as a single tile, its keys or its queries distributed over the warps.

    `states`: states (m, l, O) of a row, over all warps; `exchanged`: elements that pass between them through SRAM;
    `error`: the largest difference from a single warp.
    """
    x = SCENES[0].inputs()
    Q, K, V = (x[name].astype(np.float64) for name in ("Q", "K", "V"))
    whole = absorbed(Q @ K.T * DIM**-0.5, V).normalized()
    *outs, exchanged = split(Q, K, V)
    by_keys, by_queries = (float(np.abs(out - whole).max()) for out in outs)
    tile = {"warps": WARPS, "rows": len(Q), "keys": len(K), "dim": DIM}
    return {
        "keys": {**tile, "states": WARPS, "exchanged": exchanged, "error": by_keys},
        "queries": {**tile, "states": 1, "exchanged": 0, "error": by_queries},
    }


def drawing(by: str, warps: int) -> str:
    """Draw the tile, split by columns (keys) or rows (queries), and the rows of O that each warp holds."""
    side, x, y, thick, apart = 84.0, 30.0, 20.0, 12.0, 18.0
    share, beside = side / warps, x + side + 26
    parts = [axis("keys", x, y - 6), axis("queries", -y, x - 6, transform="rotate(-90)", text_anchor="end")]
    parts.append(axis("O", beside, y - 6))
    for w in range(warps):
        if by == "keys":
            tile, held = (x + w * share, y, share, side), (beside + w * apart, y, thick, side)
        else:
            tile, held = (x, y + w * share, side, share), (beside, y + w * share, thick, share)
        parts += [element("rect", class_=f"warp w{w}", **rectangle(*box)) for box in (tile, held)]
        middle = {"x": decimal(tile[0] + tile[2] / 2), "y": decimal(tile[1] + tile[3] / 2 + 4)}
        parts.append(element("text", f"{w}", class_="warp-name", **middle, text_anchor="middle"))
    if by == "keys":
        end = beside + warps * apart + 20
        parts.append(
            element("path", class_="arrow", d=f"M{decimal(end - 20)} {decimal(y + side / 2)}h14m-5 -5l5 5l-5 5")
        )
        parts.append(axis("O", end, y - 6))
        parts.append(element("rect", class_="warp sum", **rectangle(end, y, thick, side)))
    label = f"A tile whose {by} are split between {warps} warps."
    return element("svg", "".join(parts), viewBox="0 0 262 112", role="img", aria_label=label, class_="stage warps")
