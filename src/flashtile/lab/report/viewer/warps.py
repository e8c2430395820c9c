"""Work split between warps: by keys, as in FlashAttention-1, or by queries, as in 2; executed and counted."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashtile.lab.report.viewer.scene import DIM, SCENES
from flashtile.lab.report.viewer.svg import axis, decimal, element, rectangle
from flashtile.numerics.dtypes import Array
from flashtile.numerics.softmax import OnlineSoftmax

WARPS = 4


def splits() -> dict[str, dict[str, Any]]:
    """Run the first scene as a single tile, its keys or its queries distributed over the warps.

    `states`: states (m, l, O) of a row, over all warps; `exchanged`: elements that pass between them through SRAM;
    `error`: the largest difference from a single warp.
    """
    x = SCENES[0].inputs()
    Q, K, V = (x[name].astype(np.float64) for name in ("Q", "K", "V"))
    whole = _state(Q, K, V).normalized()
    partial = [_state(Q, k, v) for k, v in zip(np.array_split(K, WARPS), np.array_split(V, WARPS), strict=True)]
    merged, *others = partial
    passed = sum(s.m.size + s.l.size + s.O.size for s in others)
    for other in others:
        merged.merge(other)
    own = [_state(q, K, V).normalized() for q in np.array_split(Q, WARPS)]
    tile = {"warps": WARPS, "rows": len(Q), "keys": len(K), "dim": DIM}
    by_keys, by_queries = (float(np.abs(out - whole).max()) for out in (merged.normalized(), np.concatenate(own)))
    return {
        "keys": {**tile, "states": len(partial), "exchanged": passed, "error": by_keys},
        "queries": {**tile, "states": 1, "exchanged": 0, "error": by_queries},
    }


def _state(Q: Array, K: Array, V: Array) -> OnlineSoftmax:
    state = OnlineSoftmax.empty(len(Q), V.shape[1], Q.dtype)
    P, _ = state.absorb(Q @ K.T * DIM**-0.5)
    state.O = state.O + P @ V
    return state


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
