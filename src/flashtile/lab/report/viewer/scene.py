"""The scenes: small attention problems, one for each way in which a band, spans or a shape can cut the tiles."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from flashtile import masks
from flashtile.band import Band
from flashtile.cost.traffic import Layout
from flashtile.numerics.dtypes import Array
from flashtile.numerics.schedule import Grid
from flashtile.numerics.visibility import Visibility, Visible
from flashtile.spans import Spans

SEED, DIM = 42, 4


@dataclass(frozen=True, slots=True)
class Scene:
    """One attention head, and how it is cut into tiles."""

    name: str
    title: str
    about: str  # a template for the numbers below
    grid: Grid
    band: Band
    spans: Spans | None = None

    @property
    def visible(self) -> Visible:
        return self.band if self.spans is None else Visibility(self.band, self.spans.limits[0, 0])

    @property
    def options(self) -> dict[str, Any]:
        """The options of a call of attention()."""
        return {"band": self.band} | ({} if self.spans is None else {"spans": self.spans})

    @property
    def layout(self) -> Layout:
        return Layout(DIM, DIM, "float32")

    @property
    def description(self) -> str:
        return self.about.format(**asdict(self.grid), **asdict(self.band), late=-self.band.offset)

    def inputs(self) -> dict[str, Array]:
        """Q, K, V and dO, with two decimals each, so that their record is short and exact."""
        rng = np.random.default_rng(SEED)
        lengths = {"Q": self.grid.n_q, "K": self.grid.n_k, "V": self.grid.n_k, "dO": self.grid.n_q}
        return {name: rng.standard_normal((n, DIM)).round(2).astype(np.float32) for name, n in lengths.items()}


SCENES = (
    Scene(
        "full", "Full", "Each of {n_q} queries sees all {n_k} keys. No tile needs a mask.", Grid(16, 16, 4, 4), Band()
    ),
    Scene(
        "causal",
        "Causal",
        "A query sees keys up to its own. Tiles right of the diagonal are never touched; those on it need a mask.",
        Grid(16, 16, 4, 4),
        Band(right=0),
    ),
    Scene(
        "window",
        "Window",
        "A query sees {left} keys before its own, its own, and {right} after it. The work grows with the window, not "
        "with the square of the length.",
        Grid(24, 24, 4, 4),
        Band(7, 2),
    ),
    Scene(
        "offset",
        "Offset",
        "{n_q} new queries follow a cache of {offset} keys: causal, but the diagonal starts at key {offset}.",
        Grid(8, 24, 4, 4),
        Band(right=0, offset=16),
    ),
    Scene(
        "oblong",
        "Oblong tiles",
        "Also causal, in tiles of {br} queries by {bc} keys. The diagonal crosses more than one tile of a row.",
        Grid(24, 24, 6, 3),
        Band(right=0),
    ),
    Scene(
        "ragged",
        "Ragged",
        "{n_q} queries and {n_k} keys in tiles of {br} x {bc}: neither is a multiple. The last tiles are smaller.",
        Grid(18, 22, 5, 4),
        Band(right=0, offset=4),
    ),
    Scene(
        "empty",
        "Empty rows",
        "The diagonal starts {late} queries late, so the first {late} see no key at all: their output is 0.",
        Grid(16, 16, 4, 4),
        Band(right=0, offset=-6),
    ),
    Scene(
        "padding",
        "Padding",
        "The first 6 of {n_k} keys are padding, which no query sees. Their tiles are not even loaded.",
        Grid(16, 16, 4, 4),
        Band(right=0),
        masks.padding(np.array([10]), 16, "left"),
    ),
    Scene(
        "prefix",
        "Prefix",
        "Every query sees the first 6 keys, a prompt, and the keys up to its own.",
        Grid(16, 16, 4, 4),
        Band(),
        masks.prefix_lm(6, 16),
    ),
    Scene(
        "documents",
        "Documents",
        "Three documents of 9, 6 and 9 tokens share a row. Each is causal by itself, and none sees another.",
        Grid(24, 24, 4, 4),
        Band(right=0),
        masks.documents(lengths=[9, 6, 9]),
    ),
    Scene(
        "sinks",
        "Sinks and a window",
        "A query sees the first 2 keys, and itself with the 5 keys before it: two spans, and nothing between them.",
        Grid(24, 24, 4, 4),
        Band(),
        masks.sink_window(left=5, sinks=2, n_q=24),
    ),
)
QUICK = ("full", "causal", "ragged")
