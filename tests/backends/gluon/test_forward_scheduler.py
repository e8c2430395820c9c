"""The tasks of a forward pass, compared with the band; without a GPU."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton.experimental.gluon")

from flashtile.backends.gluon import forward_scheduler, tuning
from flashtile.backends.gluon.forward import constants
from flashtile.backends.gluon.forward_scheduler import Work
from flashtile.backends.gluon.tuning import ROWS
from flashtile.backends.gpu.arguments import lengths, rule
from flashtile.backends.gpu.tensors import count_tiles
from flashtile.problem import Problem
from tests.backends.gluon.emulator.language import python
from tests.backends.gluon.emulator.registers import Number, argument
from tests.backends.gluon.shapes import check_cuts, dense_problems, packed_problems, visible

find_task, key_tiles = map(python, (forward_scheduler.find_task, forward_scheduler.key_tiles))


def check(p: Problem, section: int) -> None:
    """Check that each row of each head is in one task, which visits all keys that it sees; full tiles hide nothing."""
    shared = tuning.packed_heads(p)  # heads that share the rows of a tile
    config = tuning.forward_of(p, shared)
    tiles = count_tiles(p, p.n_q * shared, p.q.shape[2], ROWS * config.consumers)
    heads, sequences = p.heads // shared, p.q.shape[0]
    counts = map(Number, (tiles, heads, min(section, heads * sequences), tiles * heads * sequences))
    work = Work(argument(rule(p)), argument(lengths(p)), *counts)
    C = argument(constants(p, config, shared))
    taken = Counter[tuple[int, int, int]]()
    for number in range(work.tasks):
        task = find_task(Number(number), work, C)
        sees = visible(p, task.q_len, task.k_len)
        for warpgroup in range(config.consumers):
            first = task.row + warpgroup * ROWS
            assert first % ROWS == 0  # tuning.one_right_cut() relies on it
            rows = [row for row in range(first, first + ROWS) if 0 <= row < task.q_len * shared]
            taken.update((task.sequence, task.head, row) for row in rows)
            if rows:
                cut = key_tiles(task, first, ROWS, work, C)
                check_cuts(sees[sorted({row // shared for row in rows})], cut, config.block_k)
                assert cut[2] * config.block_k <= task.k_len or cut[1] == cut[2]  # all keys of a full tile exist
    assert set(taken.values()) <= {1}
    assert len(taken) == heads * shared * sum(p.q_lengths)


@given(dense_problems(), st.integers(1, 6))
def test_every_row_is_in_one_task(p: Problem, section: int) -> None:
    check(p, section)


@given(packed_problems(), st.integers(1, 3))
def test_every_packed_row(p: Problem, section: int) -> None:
    check(p, section)
