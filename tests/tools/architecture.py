"""Draw the files that calls pass through, as they run: python -m tests.tools.architecture.

Writes docs/architecture.svg. Its colours follow the reader's light or dark scheme.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

import flashtile as ft
from tests.tools.tree import ROOT

PICTURE = ROOT / "docs" / "architecture.svg"
PACKAGE = os.path.dirname(ft.__file__)
FOLDERS = ("checks", "numerics", "host")  # one box each in the picture
Way = dict[str, list[str]]  # the functions of each file, in the order in which they are first called


def way_of(run: Callable[[], Any]) -> Way:
    """Return the files that a call passes through, and their functions."""
    found: Way = {}

    def enter(frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<":
            names = found.setdefault(os.path.relpath(code.co_filename, PACKAGE), [])
            if code.co_name not in names:
                names.append(code.co_name)

    sys.setprofile(enter)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def ways() -> dict[str, Way]:
    """Return the way of each kind of call on a CPU: the first of its kind, and cached ones."""
    import torch

    from flashtile import calls

    x = np.zeros((2, 4, 8, 16), np.float32)
    t = torch.zeros(x.shape)
    leaf = torch.zeros(x.shape, requires_grad=True)
    ft.attention(x[:1], x[:1], x[:1], causal=True)  # finishes all imports
    calls.KNOWN.clear()
    first = way_of(lambda: ft.attention(x, x, x, causal=True))
    found = {"first call of its kind": first, "NumPy": way_of_cached(lambda: ft.attention(x, x, x, causal=True))}
    found["torch"] = way_of_cached(lambda: ft.attention(t, t.clone(), t.clone(), causal=True))
    given = [leaf, *(leaf.detach().clone().requires_grad_() for _ in range(2))]
    found["torch, to be trained"] = way_of_cached(lambda: ft.attention(*given, causal=True))
    out = ft.attention(*given, causal=True)
    found["its backward pass"] = way_of_cached(
        lambda: torch.autograd.grad(out, given, torch.ones(x.shape), retain_graph=True)
    )
    return found


def way_of_cached(run: Callable[[], Any]) -> Way:
    """Return the way of a cached call."""
    run()
    run()
    return way_of(run)


WIDTH, BOX, GAP, ROW = 1190, 150, 20, 72  # in pixels
COLUMNS = 7
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1b1f24 }
  .name { font-weight: 600; font-size: 11px } .title { font-weight: 600; font-size: 13px }
  .small { font-size: 10px; fill: #57606a }
  rect { fill: #eef4fb; stroke: #4c86c6 } .core rect { fill: #fdf1e3; stroke: #c98a3a }
  path { stroke: #57606a; fill: none } marker path { fill: #57606a; stroke: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9aa5b1 } rect { fill: #16263a; stroke: #6ea8e6 }
    .core rect { fill: #3a2a14; stroke: #d9a35a } path { stroke: #9aa5b1 } marker path { fill: #9aa5b1 }
  }
"""


def svg(found: dict[str, Way]) -> str:
    """Draw a lane for each call, with a box for each file that it passes through."""
    lanes, y = [], 8
    for title, way in found.items():
        boxes = _boxes(way)
        lanes.append(f'<text class="title" x="8" y="{y + 14}">{escape(title)}</text>')
        y += 24
        for at, (name, functions) in enumerate(boxes):
            column, row = at % COLUMNS, at // COLUMNS
            x, top = 8 + column * (BOX + GAP), y + row * ROW
            lanes.append(_box(x, top, name, functions))
            if at + 1 < len(boxes):
                lanes.append(_arrow(x, top, column))
        y += ((len(boxes) - 1) // COLUMNS + 1) * ROW
    defs = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z"/></marker></defs>'
    )
    body = "\n".join(lanes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img" '
        f'aria-label="The files that a call passes through"><style>{STYLE}</style>{defs}\n{body}\n</svg>\n'
    )


def _boxes(way: Way) -> list[tuple[str, list[str]]]:
    """Return a box for each file, one for some folders, and the C++ core, which Python's profiler does not see."""
    found: Way = {}
    for file, functions in way.items():
        folder = file.split("/")[0]
        if folder in FOLDERS:
            found.setdefault(f"{folder}/", []).append(Path(file).name)
        else:
            found[file] = functions
    entry_point = "ft_backward" if next(iter(way)) == "pytorch/autograd.py" else "ft_forward"
    return [*found.items(), ("the C++ core", [entry_point])]


def _box(x: int, y: int, name: str, functions: list[str]) -> str:
    names = ", ".join(functions)
    names = names if len(names) < 28 else f"{names[:25].rsplit(',', 1)[0]}, ..."
    kind = ' class="core"' if "core" in name else ""
    return (
        f'<g{kind}><rect x="{x}" y="{y}" width="{BOX}" height="46" rx="6"/>'
        f'<text class="name" x="{x + 8}" y="{y + 19}">{escape(name.removeprefix("backends/"))}</text>'
        f'<text class="small" x="{x + 8}" y="{y + 36}">{escape(names)}</text></g>'
    )


def _arrow(x: int, y: int, column: int) -> str:
    right = x + BOX
    if column < COLUMNS - 1:
        return f'<path d="M{right} {y + 23} h{GAP - 2}" marker-end="url(#tip)"/>'
    return f'<path d="M{right - 20} {y + 46} v10 H18 v14" marker-end="url(#tip)"/>'


if __name__ == "__main__":
    PICTURE.write_text(svg(ways()))
