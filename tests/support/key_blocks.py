"""A call divided into blocks of keys, as the ranks of context parallelism see it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

import flashtile as ft
from flashtile.band import FAR


class KeyBlock:
    """Keys first .. last-1 of a call without packed sequences: k, v and the options that belong to them."""

    def __init__(self, k: Any, v: Any, options: dict[str, Any], n_q: int, first: int, last: int) -> None:
        self.keys = slice(first, last)
        self.k, self.v = k[..., self.keys, :], v[..., self.keys, :]
        self.options = {name: x for name, x in options.items() if name not in ("causal", "window", "band")}
        left, right = (FAR if x is None else x for x in options.get("window", (None, None)))
        band = options.get("band", ft.Band(left, 0 if options.get("causal") else right, k.shape[-2] - n_q))
        self.options["band"] = band.shifted(-first)
        for name in ("mask", "bias"):
            if name in options and options[name].shape[-1] > 1:
                self.options[name] = options[name][..., self.keys]
        if "kv_lengths" in options:  # a band of the whole would end with the keys in use
            self.options["kv_lengths"] = np.clip(options["kv_lengths"] - first, 0, last - first)
        if "spans" in options:
            self.options["spans"] = ft.Spans.of(np.clip(options["spans"].limits - first, 0, last - first))


def key_blocks(k: Any, v: Any, options: dict[str, Any], n_q: int, cuts: list[int]) -> Iterator[KeyBlock]:
    for first, last in pairwise([0, *cuts, k.shape[-2]]):
        yield KeyBlock(k, v, options, n_q, first, last)
        options = {name: x for name, x in options.items() if name != "sink"}  # counted once
