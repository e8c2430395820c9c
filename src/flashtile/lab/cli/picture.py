"""The score matrix that is never built, drawn to scale in text and enlarged until one tile is visible."""

from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple

from flashtile.band import cuts
from flashtile.numerics.visibility import Visibility, Visible

SIDE = 10  # cells along the longer side of a picture; the next picture is one cell of it
COLUMNS = 80
HIDDEN, SEEN, CELL, TILE = ".", "-", "+", "#"
SHADES = {HIDDEN: "·", SEEN: "░", CELL: "▓", TILE: "█"}  # if the terminal has them


class Picture(NamedTuple):
    """The last queries and keys of a head, as rows of cells."""

    queries: int
    keys: int
    lines: tuple[str, ...]


def pictures(visible: Visible, n_q: int, n_k: int, tile: tuple[int, int]) -> list[Picture]:
    """Draw the matrix, then its last cell, then the last cell of that, until a tile is about one cell or more."""
    tile = max(1, min(tile[0], n_q)), max(1, min(tile[1], n_k))
    queries, keys, found = n_q, n_k, []
    while True:
        cell = max(queries, keys, 1) / SIDE
        last = cell < 1.5 * max(tile)
        marked = tile if last else (cell, cell)
        found.append(
            Picture(queries, keys, _lines(visible, (n_q, n_k), (queries, keys), marked, TILE if last else CELL))
        )
        if last:
            return found
        queries, keys = min(queries, -int(-cell // 1)), min(keys, -int(-cell // 1))


def _lines(
    visible: Visible, whole: tuple[int, int], part: tuple[int, int], marked: tuple[float, float], mark: str
) -> tuple[str, ...]:
    cell = max(*part, 1) / SIDE
    high, wide = (max(1, round(n / cell)) for n in part)
    rows, columns = (max(1, round(n / cell)) for n in marked)
    lines = []
    for i in range(high):
        first, after = (whole[0] - part[0] + part[0] * n // high for n in (i, i + 1))
        seen = _seen(visible, first, max(after, first + 1), *whole)
        ends = [whole[1] - part[1] + part[1] * n // wide for n in range(wide + 1)]
        cells = [SEEN if any(a < end and b > begin for begin, end in seen) else HIDDEN for a, b in pairwise(ends)]
        if i >= high - rows:
            cells[-columns:] = mark * min(columns, wide)
        lines.append("".join(c * 2 for c in cells))  # a character is about twice as high as wide
    return tuple(lines)


def _seen(visible: Visible, first: int, after: int, n_q: int, n_k: int) -> list[tuple[int, int]]:
    """The intervals of keys that some of these queries see."""
    if not isinstance(visible, Visibility):
        seen = cuts(visible, first, after, n_k, 1)
        return [(seen.begin, seen.end)]
    begin, end = (x[first:after].ravel() for x in visible.ends(n_q, n_k))
    return sorted(set(zip(begin[begin < end].tolist(), end[begin < end].tolist(), strict=True)))


def side_by_side(found: Sequence[Picture], shades: bool) -> str:
    """Lay the pictures side by side, as many as fit on a line, each with its size below."""
    gap, width = "   ", 2 * SIDE
    per_line = (COLUMNS + len(gap)) // (width + len(gap))
    text = []
    for n in range(0, len(found), per_line):
        captioned = [[*p.lines, f"{p.queries} x {p.keys}"] for p in found[n : n + per_line]]
        text += [gap.join(f"{part:{width}}" for part in row).rstrip() for row in zip_longest(*captioned, fillvalue="")]
    drawn = "\n".join(text)
    for plain, shade in SHADES.items() if shades else ():
        drawn = drawn.replace(plain, shade)
    return drawn


def legend(found: Sequence[Picture], shades: bool) -> str:
    drawn = "".join(line for picture in found for line in picture.lines)
    meanings = {
        TILE: "one tile",
        CELL: "enlarged in the next picture",
        SEEN: "computed tile by tile",
        HIDDEN: "skipped",
    }
    return ", ".join(f"{SHADES[c] if shades else c} {about}" for c, about in meanings.items() if c in drawn)
