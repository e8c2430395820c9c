"""Twelve masks in common use, each as options of attention(), with the bytes that other formats need for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashtile import masks
from flashtile.band import FAR, Band, Kind, ceil_div
from flashtile.cost.traffic import tile_counts, visible_pairs
from flashtile.numerics.visibility import Visibility, Visible
from flashtile.spans import Spans

BLOCK = 128  # the side of FlexAttention's blocks, and of the tiles counted beside them


@dataclass(frozen=True, slots=True)
class Cost:
    """The share of pairs that are visible, the share of tiles that are computed, and bytes of the mask by format."""

    share: float
    tiles: float
    spans: int
    block_mask: int
    flashmask: int | None
    dense: int


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask of n queries and keys."""

    name: str
    code: str  # how a user writes it
    options: Callable[[int], dict[str, Any]]
    flashmask: int | None  # rows that FlashMask keeps for each key; None: it cannot express this mask

    def visible(self, n: int) -> Visible:
        options = self.options(n)
        left, right = options.get("window", (FAR, FAR))
        band = Band(left, 0 if options.get("causal") else right)
        return Visibility(band, options["spans"].limits[0, 0]) if "spans" in options else band

    def cost(self, n: int) -> Cost:
        visible, options, rows = self.visible(n), self.options(n), ceil_div(n, BLOCK)
        skipped = tile_counts(visible, n, n, BLOCK, BLOCK)[Kind.SKIPPED]
        return Cost(
            share=visible_pairs(visible, n, n) / n**2,
            tiles=(rows**2 - skipped) / rows**2,
            spans=options["spans"].limits.nbytes if "spans" in options else 0,
            # A count for each row of blocks and an index for each block, in both orientations, partial and full.
            block_mask=4 * 2 * 2 * (rows + rows**2),
            flashmask=None if self.flashmask is None else 4 * n * self.flashmask,
            dense=n * n,
        )


def _documents(n: int) -> list[int]:
    """Five documents of different lengths."""
    parts = np.array([5, 1, 3, 2, 5])
    ends = np.cumsum(parts) * n // parts.sum()
    return [int(n) for n in np.diff(ends, prepend=0)]


def _images(n: int) -> Any:
    """Blocks of image tokens among text: ids of blocks, -1 for text."""
    ids = np.full(n, -1)
    for block, first in enumerate((n // 8, n // 2)):
        ids[first : first + n // 4] = block
    return ids


def _global(n: int) -> Any:
    """A window, and a few tokens that see and are seen by all."""
    few = n // 16
    local = masks.sink_window(n // 8, few, n)
    rows = np.arange(n) < few
    return local | Spans(0, np.where(rows, n, 0))


MASKS = (
    Mask("causal", "causal=True", lambda n: {"causal": True}, 1),
    Mask("sliding window", "window=(n // 8, 0)", lambda n: {"window": (n // 8, 0)}, 2),
    Mask("right padding", "spans=masks.padding(lengths)", lambda n: {"spans": masks.padding([n * 5 // 8])}, 1),
    Mask(
        "left padding",
        'spans=masks.padding(lengths, n, "left"), causal=True',
        lambda n: {"spans": masks.padding([n * 5 // 8], n, "left"), "causal": True},
        2,
    ),
    Mask(
        "documents",
        "spans=masks.documents(ids)",
        lambda n: {"spans": masks.documents(lengths=_documents(n))},
        2,
    ),
    Mask(
        "causal documents",
        "spans=masks.documents(ids), causal=True",
        lambda n: {"spans": masks.documents(lengths=_documents(n)), "causal": True},
        1,
    ),
    Mask("prefix LM", "spans=masks.prefix_lm(prefix, n)", lambda n: {"spans": masks.prefix_lm(n * 3 // 8, n)}, 2),
    Mask(
        "image blocks",
        "spans=masks.causal_with_blocks(ids)",
        lambda n: {"spans": masks.causal_with_blocks(_images(n))},
        2,
    ),
    Mask(
        "sinks and a window",
        "spans=masks.sink_window(left, sinks, n)",
        lambda n: {"spans": masks.sink_window(n // 8, n // 16, n)},
        2,
    ),
    Mask(
        "chunks",
        "spans=masks.chunks(size, n), causal=True",
        lambda n: {"spans": masks.chunks(n // 4, n), "causal": True},
        1,
    ),
    Mask(
        "block local",
        "spans=masks.block_local(size, 1, 1, n)",
        lambda n: {"spans": masks.block_local(n // 8, 1, 1, n)},
        4,
    ),
    Mask("global tokens", "spans=masks.sink_window(...) | Spans(...)", lambda n: {"spans": _global(n)}, 4),
)
