"""How many pairs the queries of each rank see among the keys of each rank: (ranks, ranks)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from flashtile.band import Band
from flashtile.distributed import segments
from flashtile.distributed.shards import Shards
from flashtile.distributed.visible import Visible
from flashtile.numerics.dtypes import Array

ROWS = 64  # query runs at a time: intermediate arrays stay in the cache


def pairs_by_band(shards: Shards, band: Band) -> Array:
    """By closed forms for pairs of runs. The band counts within documents, which see only themselves."""
    counts = np.zeros((shards.ranks, shards.ranks), np.int64)
    documents: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    for rank, runs in enumerate(shards.runs):
        for run in runs:
            documents[run.document].append((rank, run.start, run.step, run.n))
    for found in documents.values():
        runs = np.array(found, np.int64).T[:, None]
        ranks, starts = np.unique(runs[0], return_index=True)  # the runs of a rank follow one another
        for first in range(0, len(found), ROWS):
            queries = runs[..., first : first + ROWS].transpose(0, 2, 1)
            seen = np.add.reduceat(_run_pairs(queries, runs, band), starts, axis=1)
            for rank, row in zip(queries[0, :, 0], seen, strict=True):
                counts[rank, ranks] += row
    return counts


def pairs_by_ends(shards: Shards, visible: Visible) -> Array:
    """By what each query sees: on average over the batch and the heads."""
    counts = np.zeros((shards.ranks, shards.ranks), np.int64)
    held = [segments.of_rank(shards, rank) for rank in range(shards.ranks)]
    for rank, queries in enumerate(held):
        begin, end = visible.ends(segments.tokens(queries))
        planes = begin.shape[0] * begin.shape[1]
        for source, keys in enumerate(held):
            seen = sum((int((s.first(end) - s.first(begin)).sum()) for s in keys), 0)
            counts[rank, source] = round(seen / planes)
    return counts


def _run_pairs(queries: Array, keys: Array, band: Band) -> Array:
    """The visible pairs between runs; each array has rank, start, step and n first. All runs have one step."""
    _, first, step, n = queries
    _, key, key_step, m = keys
    if (step != key_step).any():
        raise ValueError("runs of one document have one step")
    ahead = first - key + band.offset
    last = (ahead + band.right) // step  # query i sees the keys up to i + last of the run
    begin = -((band.left - ahead) // step)  # and from i + begin
    seen: Array = np.maximum(_clipped_sum(last + 1, n, m) - _clipped_sum(begin, n, m), 0)
    return seen


def _clipped_sum(start: Any, n: Any, m: Any) -> Any:
    """The sum over i < n of clip(start + i, 0, m)."""
    low, high = np.clip(-start, 0, n), np.clip(m - start, 0, n)
    rising = high - low
    return rising * (start + low) + rising * (rising - 1) // 2 + (n - high) * m
