"""Equal chunks of tokens are assigned to ranks so that each has as many chunks, and as many visible pairs."""

from __future__ import annotations

import numpy as np

from flashtile.numerics.dtypes import Array

ENOUGH = 1.01  # pairs of the busiest rank over the mean
MOST_CHUNKS = 64  # of a rank


def assign(counts: Array, ranks: int) -> tuple[list[list[int]], int]:
    """The chunks of each rank, in order, and the number of chunks. counts: the keys that each token sees.

    One chunk for each rank is tried first, then 2, 4, ...: fewer chunks make fewer and larger calls.
    """
    sums = np.concatenate([[0.0], np.cumsum(counts, dtype=np.float64)])
    tokens, mean = len(counts), sums[-1] / ranks
    best: tuple[float, list[list[int]], int] | None = None
    each = 1
    while best is None or (each <= MOST_CHUNKS and each * ranks <= tokens):
        chunks = each * ranks
        bounds = chunk_bounds(tokens, chunks)
        costs = sums[bounds[1:]] - sums[bounds[:-1]]
        chosen = [[r] for r in range(ranks)] if each == 1 else _spread(costs, ranks, each)
        busiest = max(costs[rank].sum() for rank in chosen)
        if best is None or busiest < best[0] * (1 - 1e-9):
            best = busiest, chosen, chunks
        if busiest <= ENOUGH * mean:
            break
        each *= 2
    return [sorted(rank) for rank in best[1]], best[2]


def chunk_bounds(tokens: int, chunks: int) -> list[int]:
    """The bounds of equal chunks, whose lengths differ by at most one token."""
    return [tokens * c // chunks for c in range(chunks + 1)]


def _spread(costs: Array, ranks: int, each: int) -> list[list[int]]:
    """Give the most expensive chunk left to the rank with the least so far, then exchange chunks while that helps."""
    held: list[list[int]] = [[] for _ in range(ranks)]
    load = np.zeros(ranks)
    for c in np.argsort(-costs, kind="stable").tolist():
        rank = int(np.argmin(np.where([len(x) < each for x in held], load, np.inf)))
        held[rank].append(c)
        load[rank] += costs[c]
    for _ in range(16 * ranks):
        if not _exchange(costs, held, load):
            break
    return held


def _exchange(costs: Array, held: list[list[int]], load: Array) -> bool:
    """Exchange a chunk of the busiest rank for one of another, so that the busier of both has least; or do nothing."""
    busiest = int(np.argmax(load))
    best: float = load[busiest] * (1 - 1e-9)
    found: tuple[int, int, int] | None = None
    mine = costs[held[busiest]]
    for other in range(len(held)):
        if other == busiest:
            continue
        moved = mine[:, None] - costs[held[other]][None, :]
        after = np.maximum(load[busiest] - moved, load[other] + moved)
        at = int(np.argmin(after))
        if after.flat[at] < best:
            best, found = after.flat[at], (other, *divmod(at, after.shape[1]))
    if found is None:
        return False
    other, i, j = found
    a, b = held[busiest][i], held[other][j]
    held[busiest][i], held[other][j] = b, a
    load[busiest] += costs[b] - costs[a]
    load[other] += costs[a] - costs[b]
    return True
