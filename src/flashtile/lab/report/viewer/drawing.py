"""The drawings of a scene in its final state; the page animates them only by setting classes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from typing import Any

import numpy as np

from flashtile.band import Kind
from flashtile.lab.report.viewer.scene import Scene
from flashtile.lab.report.viewer.svg import axis, decimal, element, rectangle
from flashtile.numerics.schedule import Grid
from flashtile.numerics.visibility import Visible

SIDE = 200.0  # length of the longer side of S
THICK, THIN, GAP = 18.0, 7.0, 6.0  # a strip of an array, a strip of a vector, the space between strips
LEFT, TOP, RIGHT = 14.0, 2.0, 60.0  # margins left of and above the strips, and right of S
NAMES = 12.0  # above S, for the names of the strips beside it

Box = tuple[float, float, float, float]  # x, y, width, height


@dataclass(frozen=True, slots=True)
class Strips:
    """The arrays along each side of S."""

    left: tuple[str, ...]
    top: tuple[str, ...]
    right: tuple[str, ...]
    bottom: tuple[str, ...] = ()


STRIPS = {
    "standard": Strips(("Q",), ("K", "V"), ("O",)),
    "fa1": Strips(("Q",), ("K", "V"), ("O", "m", "l")),
    "fa2": Strips(("Q",), ("K", "V"), ("O", "L")),
    "backward": Strips(("Q", "dO", "L", "D"), ("K", "V"), ("dQ",), ("dK", "dV")),
}
COUNTED = ("O", "dQ")  # strips that show how often each block was written


@dataclass(frozen=True, slots=True)
class End:
    """The last frame: how often each block was written, which blocks lie in SRAM, and which one was stored last."""

    written: dict[tuple[str, int], int]
    held: set[tuple[str, int]]
    last: tuple[str, int]


@dataclass(slots=True)
class Canvas:
    """The position of S, and what was drawn so far."""

    grid: Grid
    x: float
    y: float
    parts: list[str] = field(default_factory=list)

    @property
    def unit(self) -> float:
        return SIDE / max(self.grid.n_q, self.grid.n_k)

    @property
    def right(self) -> float:
        return self.x + self.grid.n_k * self.unit

    @property
    def bottom(self) -> float:
        return self.y + self.grid.n_q * self.unit

    def add(self, tag: str, text: str = "", **attributes: Any) -> None:
        self.parts.append(element(tag, text, **attributes))

    def pairs(self, rows: slice, cols: slice) -> dict[str, str]:
        """The rectangle of some pairs of S."""
        u = self.unit
        x, y = self.x + cols.start * u, self.y + rows.start * u
        return rectangle(x, y, (cols.stop - cols.start) * u, (rows.stop - rows.start) * u)

    def svg(self, width: float, height: float, label: str, name: str) -> str:
        body = "".join(self.parts)
        return element(
            "svg",
            body,
            viewBox=f"0 0 {decimal(width)} {decimal(height)}",
            role="img",
            aria_label=label,
            class_=f"stage {name}",
        )


def stage(scene: Scene, order: str, label: str, end: End, row: int) -> str:
    """Draw S and the arrays around it in the final state; `row` is the one under the lens."""
    whole = order == "standard"
    grid = replace(scene.grid, bc=scene.grid.n_k) if whole else scene.grid
    strips = STRIPS[order]
    c = Canvas(grid, LEFT + _across(strips.left) + 2, TOP + _across(strips.top) + NAMES)
    _beams(c)
    _score_blocks(c, scene, whole)
    _hidden_pairs(c, scene.visible)
    _draw_strips(c, strips.left, LEFT, _draw_column, end)
    width = _draw_strips(c, strips.right, c.right + GAP + 2, _draw_column, end)
    _draw_strips(c, strips.top, TOP, _draw_row, end)
    height = _draw_strips(c, strips.bottom, c.bottom + GAP + 2, _draw_row, end)
    moved = f"translate(0 {decimal(row * float(decimal(c.unit)))})"
    box = rectangle(c.x, c.y, c.right - c.x, c.unit)
    c.add("rect", class_="lens-row", data_unit=decimal(c.unit), **box, transform=moved)
    return c.svg(max(width, c.x + SIDE + RIGHT), height + 2, label, order)


def tile_map(scene: Scene, cuts: list[list[dict[str, int]]], label: str) -> str:
    """Draw S by kind of tile, the hidden pairs, and the four cuts of every row of tiles, for each span."""
    around = STRIPS["fa2"]  # so that S is at the same place as in the orders
    c = Canvas(scene.grid, LEFT + _across(around.left) + 2, TOP + _across(around.top) + NAMES)
    _score_blocks(c, scene, whole=False)
    _hidden_pairs(c, scene.visible)
    for j in range(scene.grid.shape[1] + 1):
        x = c.x + min(j * scene.grid.bc, scene.grid.n_k) * c.unit
        c.add("text", f"{j}", class_="tick", x=decimal(x), y=decimal(c.y - 6), text_anchor="middle")
    c.parts.append(axis("tiles of keys", c.x - 3, c.y - 20))
    c.parts.append(axis("queries", -c.y, c.x - 10, transform="rotate(-90)", text_anchor="end"))
    ends = enumerate(("begin", "full_begin", "full_end", "end"))
    for (n, name), span in product(ends, range(len(cuts[0]))):
        points = []
        for i, row in enumerate(cuts):
            rows = scene.grid.rows(i)
            x = c.x + min(row[span][name] * scene.grid.bc, scene.grid.n_k) * c.unit + (n - 1.5) * 1.6
            points += [
                f"{decimal(x)},{decimal(c.y + rows.start * c.unit)}",
                f"{decimal(x)},{decimal(c.y + rows.stop * c.unit)}",
            ]
        c.add("polyline", class_=f"cut {name.partition('_')[0]}", points=" ".join(points))
    return c.svg(c.x + SIDE + RIGHT, c.bottom + 10, label, "map")


def _beams(c: Canvas) -> None:
    """Add a highlight for every row and column of blocks, off until a tile there is active."""
    for i in range(c.grid.shape[0]):
        c.add("rect", class_="beam", data_row=i, **c.pairs(c.grid.rows(i), slice(0, c.grid.n_k)))
    for j in range(c.grid.shape[1]):
        c.add("rect", class_="beam", data_col=j, **c.pairs(slice(0, c.grid.n_q), c.grid.cols(j)))


def _score_blocks(c: Canvas, scene: Scene, whole: bool) -> None:
    """Draw a rectangle per tile. If S is computed as a whole, a tile is a block of rows, and P ends up in HBM."""
    rows, cols = c.grid.shape
    for i in range(rows):
        kinds = dict(c.grid.across(scene.visible, i))
        for j in range(cols):
            kind = kinds.get(j, Kind.SKIPPED).name.lower()
            state = "stored P" if whole else kind if kind == "skipped" else f"{kind} done"
            box = _inset(c.pairs(c.grid.rows(i), c.grid.cols(j)))
            c.add("rect", class_=f"tile {state}", data_i=i, data_j=j, **box)


def _hidden_pairs(c: Canvas, visible: Visible) -> None:
    """Cover the hidden pairs."""
    d = "".join(
        f"M{decimal(c.x + begin * c.unit)} {decimal(c.y + i * c.unit)}"
        f"h{decimal((end - begin) * c.unit)}v{decimal(c.unit)}h{decimal((begin - end) * c.unit)}z"
        for i in range(c.grid.n_q)
        for begin, end in _hidden(visible, i, c.grid.n_k)
    )
    if d:
        c.add("path", class_="hidden-pairs", d=d)


def _hidden(visible: Visible, i: int, n_k: int) -> Iterator[tuple[int, int]]:
    """The runs of keys that are hidden from query i."""
    seen = visible.keep(np.array([[i]]), np.arange(n_k)[None])[0]
    for is_seen, run in groupby(range(n_k), key=seen.__getitem__):
        if not is_seen:
            first, *others = run
            yield first, first + 1 + len(others)


def _draw_strips(c: Canvas, names: tuple[str, ...], at: float, draw: Callable[..., None], end: End) -> float:
    """Draw strips side by side from `at` on; return the position after the last."""
    for name in names:
        draw(c, name, at, end)
        at += _thickness(name) + GAP
    return at


def _draw_column(c: Canvas, name: str, x: float, end: End) -> None:
    wide = _thickness(name)
    c.add("text", name, class_="name", x=decimal(x + wide / 2), y=decimal(c.y - 5), text_anchor="middle")
    for n in range(c.grid.shape[0]):
        rows = c.grid.rows(n)
        top, tall = c.y + rows.start * c.unit, (rows.stop - rows.start) * c.unit
        _block(c, name, n, (x, top, wide, tall), end)


def _draw_row(c: Canvas, name: str, y: float, end: End) -> None:
    tall = _thickness(name)
    c.add("text", name, class_="name", x=decimal(c.x - 5), y=decimal(y + tall / 2 + 3.5), text_anchor="end")
    for n in range(c.grid.shape[1]):
        cols = c.grid.cols(n)
        left, wide = c.x + cols.start * c.unit, (cols.stop - cols.start) * c.unit
        _block(c, name, n, (left, y, wide, tall), end)


def _block(c: Canvas, name: str, n: int, box: Box, end: End) -> None:
    x, y, wide, tall = box
    at = name, n
    states = {"written": at in end.written, "in": at in end.held, "out": at == end.last}
    c.add("rect", class_=_classes("block", states), data_a=name, data_n=n, **_inset(rectangle(*box)))
    if name in COUNTED:
        times = f"{end.written[at]}\u00d7" if at in end.written else ""
        middle = {"x": decimal(x + wide / 2), "y": decimal(y + tall / 2 + 3.5), "text_anchor": "middle"}
        c.add("text", times, class_=_classes("times", {"on": at == end.last}), data_a=name, data_n=n, **middle)


def _classes(name: str, states: dict[str, bool]) -> str:
    return " ".join([name, *(state for state, on in states.items() if on)])


def _across(strips: tuple[str, ...]) -> float:
    return sum(_thickness(name) + GAP for name in strips)


def _thickness(name: str) -> float:
    return THIN if name in ("m", "l", "L", "D") else THICK


def _inset(box: dict[str, str], by: float = 0.75) -> dict[str, str]:
    x, y, width, height = (float(box[name]) for name in ("x", "y", "width", "height"))
    return {**rectangle(x + by, y + by, max(width - 2 * by, 0.5), max(height - 2 * by, 0.5)), "rx": "1.5"}
