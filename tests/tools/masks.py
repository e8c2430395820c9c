"""Draw the masks of docs/masks.md: python -m tests.tools.masks. Writes docs/masks.svg."""

from __future__ import annotations

from itertools import groupby

import numpy as np

from flashtile.band import Kind
from flashtile.lab.catalogue.masks import MASKS, Mask
from flashtile.lab.report.viewer.svg import decimal, element
from flashtile.numerics.schedule import Grid
from tests.tools.tree import ROOT

PICTURE = ROOT / "docs" / "masks.svg"
TOKENS, TILE = 64, 4
SIDE, GAP, ACROSS, TITLE = 160, 24, 4, 20
STYLE = """
  text { font: 600 13px system-ui, sans-serif; fill: #1b1f24 }
  .skipped { fill: #f3f4f6 } .partial { fill: #f6d9a8 } .full { fill: #b9d5f2 } .seen { fill: #2f5f94 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .skipped { fill: #1c2128 } .partial { fill: #6b4d1d } .full { fill: #24466d }
    .seen { fill: #8db9ea }
  }
"""


def svg() -> str:
    """All masks: tiles by kind, and in them the pairs that are visible."""
    rows = -(-len(MASKS) // ACROSS)
    width, height = ACROSS * (SIDE + GAP) - GAP, rows * (SIDE + TITLE + GAP) - GAP
    panels = "\n".join(_panel(mask, n % ACROSS, n // ACROSS) for n, mask in enumerate(MASKS))
    label = "Twelve masks: which tiles are skipped, partial and full, and which pairs are visible"
    body = f"<style>{STYLE}</style>\n{panels}\n"
    tags = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width} {height}", "role": "img"}
    return element("svg", body, **tags, aria_label=label) + "\n"


def _panel(mask: Mask, column: int, row: int) -> str:
    x, y, unit = column * (SIDE + GAP), row * (SIDE + TITLE + GAP) + TITLE, SIDE / TOKENS
    visible, grid = mask.visible(TOKENS), Grid(TOKENS, TOKENS, TILE, TILE)
    paths = dict.fromkeys(("skipped", "partial", "full", "seen"), "")
    for i in range(grid.shape[0]):
        kinds = dict(grid.across(visible, i))
        for j in range(grid.shape[1]):
            kind = kinds.get(j, Kind.SKIPPED).name.lower()
            paths[kind] += _box(x + j * TILE * unit, y + i * TILE * unit, TILE * unit - 0.5, TILE * unit - 0.5)
    seen = visible.keep(np.arange(TOKENS)[:, None], np.arange(TOKENS)[None])
    for i in range(TOKENS):
        at = 0
        for is_seen, run in groupby(seen[i].tolist()):
            length = len(list(run))
            if is_seen:
                paths["seen"] += _box(x + at * unit, y + (i + 0.3) * unit, length * unit, unit * 0.3)
            at += length
    drawn = "".join(element("path", class_=name, d=d) for name, d in paths.items())
    return element("text", mask.name, x=x, y=y - 7) + drawn


def _box(x: float, y: float, width: float, height: float) -> str:
    return f"M{decimal(x)} {decimal(y)}h{decimal(width)}v{decimal(height)}h{decimal(-width)}z"


if __name__ == "__main__":
    PICTURE.write_text(svg())
