"""Figures that are readable on light and dark pages: a light panel, dark ink, colour-blind-safe colours.

matplotlib is imported when something is drawn, and only its object API is used: no pyplot, no global state. Its types
canvas.Axes and canvas.Figure are known to type checkers only.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flashtile.lab.units import short as short
from flashtile.lab.units import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
else:
    Axes = Figure = Any

# Okabe and Ito's palette.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
INK, MUTED, LINE, PANEL = "#1a1a1a", "#555555", "#d9d9d4", "#fbfbf9"
SKIPPED, PARTIAL, FULL = "#e4e4e0", ORANGE, SKY
TILES = {"skipped": SKIPPED, "partial": PARTIAL, "full": FULL}
ON_TILE = "#111111"  # text on a coloured tile: dark on light and dark pages
WEIGHTS = "cividis"  # colour-blind-safe


def panels(rows: int, cols: int, *, width: float = 10.0, height: float = 4.0) -> tuple[Figure, list[Axes]]:
    """Create a figure of rows x cols axes, in reading order."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained", facecolor=PANEL)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr, call-arg]
    axes = [figure.add_subplot(rows, cols, n + 1) for n in range(rows * cols)]
    for ax in axes:
        ax.set_facecolor(PANEL)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(MUTED)
        ax.tick_params(colors=INK, labelsize=9)
        ax.grid(True, color=LINE, linewidth=0.7)
        ax.set_axisbelow(True)
    return figure, axes


def label(ax: Axes, title: str, x: str = "", y: str = "") -> None:
    ax.set_title(title, loc="left", fontsize=10.5, color=INK, fontweight="bold")
    ax.set_xlabel(x, fontsize=9.5, color=INK)
    ax.set_ylabel(y, fontsize=9.5, color=INK)


def legend(ax: Axes, **more: Any) -> None:
    style = {"fontsize": 8.5, "labelcolor": INK, "facecolor": PANEL, "edgecolor": "none", "framealpha": 0.9}
    ax.legend(**{**style, **more})


def doubling(ax: Axes, values: Sequence[int]) -> None:
    """Make the horizontal axis logarithmic, with ticks at these values."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(values), [short(value) for value in values])
    ax.minorticks_off()


def in_bytes(ax: Axes, low: float, high: float) -> None:
    """Make the vertical axis logarithmic, from low to high bytes."""
    ax.set_yscale("log", base=2)
    ax.set_ylim(low, high)
    step = next(step for step in (4, 32, 1024) if high / low < step**8)
    ticks = [step**power for power in range(26) if low <= step**power <= high]
    ax.set_yticks(ticks, [size(tick) for tick in ticks])
    ax.minorticks_off()


def square(ax: Axes, n: int, block: int = 0, colour: str = INK) -> None:
    """Set up n x n pairs with row 0 at the top and, given a block, its tile borders."""
    ax.set(xlim=(0, n), ylim=(n, 0), aspect="equal")
    ax.grid(False)
    ax.spines[:].set_visible(False)
    borders = list(range(0, n + 1, block or n))
    ax.set_xticks(borders)
    ax.set_yticks(borders)
    for at in borders:
        ax.axhline(at, color=colour, linewidth=1.0)
        ax.axvline(at, color=colour, linewidth=1.0)
