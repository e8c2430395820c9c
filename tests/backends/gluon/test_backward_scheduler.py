"""The tasks of a backward pass and their turns, compared with the band; without a GPU."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("triton.experimental.gluon")

import torch

from flashtile.backends.gluon import backward_scheduler, tuning
from flashtile.backends.gluon.backward import constants
from flashtile.backends.gluon.backward_scheduler import Work
from flashtile.backends.gpu.arguments import block, lengths, rule
from flashtile.backends.gpu.tensors import count_tiles
from flashtile.problem import Problem
from tests.backends.gluon.emulator.language import python
from tests.backends.gluon.emulator.registers import Number, Pointer, argument
from tests.backends.gluon.shapes import check_cuts, dense_problems, packed_problems, visible

find_key_tile, query_tiles, turn_of = map(
    python, (backward_scheduler.find_key_tile, backward_scheduler.query_tiles, backward_scheduler.turn_of)
)


def check(p: Problem, section: int, in_order: bool, same_starts: bool = False) -> None:
    """Check that each tile of keys is a task of each head and visits all queries that see it; full tiles hide nothing.

    in_order: at each tile of queries, tasks with something to add have consecutive turns, and none waits for a task
    with a larger number.
    """
    config, width = tuning.backward(p.dim), max(64, block(p.dim))
    tiles = count_tiles(p, p.n_k, p.k.shape[2], config.keys)
    heads = p.kv_heads * p.q.shape[0]
    padded = count_tiles(p, p.n_q, p.q.shape[2], config.keys) * config.keys
    counts = map(Number, (tiles, p.kv_heads, min(section, heads), padded, 0, tiles * heads))
    work = Work(argument(rule(p)), argument(lengths(p)), *counts)
    C = argument(constants(p, config, width, same_starts))
    turns = Pointer(torch.empty(0)) if in_order else None
    taken = set()
    added = defaultdict(list)
    for number in range(tiles * heads):
        key_tile = find_key_tile(Number(number), turns, work, C)
        at, key = key_tile.at, key_tile.tile * config.keys
        if p.packed and key >= at.k_rows:
            continue
        assert (key_tile.sequence, key_tile.head, key_tile.tile) not in taken
        taken.add((key_tile.sequence, key_tile.head, key_tile.tile))
        *cut, seen = query_tiles(key, at, work, C)
        sees = visible(p, at.q_len, at.k_len)[:, key : key + config.keys]
        if seen:
            check_cuts(sees.T, cut, config.block_q)
        else:
            assert not sees.any()
        visited = range(cut[0] * config.block_q, min(cut[3] * config.block_q, at.q_len), config.block_q)
        for row in visited if in_order else ():
            turn = turn_of(key_tile, Number(row), work, C) * seen + seen - 1
            assert turn >= 0 or not sees[row : row + config.block_q].any()
            if turn >= 0:
                added[key_tile.sequence, key_tile.head, row].append((int(turn), number))
    rooms = np.diff(p.cu_k) if p.packed else [p.n_k] * p.sequences
    assert len(taken) == p.kv_heads * sum(-(-int(room) // config.keys) for room in rooms)
    for found in added.values():
        assert [turn for turn, _ in sorted(found)] == list(range(len(found)))
        assert sorted(found) == sorted(found, key=lambda x: x[1])


@given(dense_problems(), st.integers(1, 6))
@pytest.mark.parametrize("in_order", [False, True], ids=["any order", "in order"])
def test_every_tile_of_keys_is_a_task(in_order: bool, p: Problem, section: int) -> None:
    check(p, section, in_order)


@given(packed_problems(), st.integers(1, 3))
@pytest.mark.parametrize("in_order", [False, True], ids=["any order", "in order"])
def test_every_tile_of_packed_keys(in_order: bool, p: Problem, section: int) -> None:
    check(p, section, in_order)


@given(packed_problems(same_starts=True), st.integers(1, 3))
@pytest.mark.parametrize("in_order", [False, True], ids=["any order", "in order"])
def test_every_tile_of_packed_sequences_that_are_their_own_keys(in_order: bool, p: Problem, section: int) -> None:
    check(p, section, in_order, same_starts=True)
