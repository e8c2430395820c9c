"""What the host guarantees to the Hopper kernels about a band, compared with the band itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtile.backends.gluon import tuning
from flashtile.band import Band
from flashtile.numerics.dtypes import EIGHT_BITS
from flashtile.problem import Problem, describe
from tests.backends.gluon.shapes import DIMS, LENGTHS, LIMITS, visible


def problem(n_q: int, n_k: int, dim: int = 64, **options: Any) -> Problem:
    return describe(*(np.zeros((1, 2, n, dim), np.float16) for n in (n_q, n_k, n_k)), **options)


def check_one_right_cut(p: Problem) -> None:
    """Check that all rows of a 64-row tile that see anything see the last key tile that any of them sees."""
    if not tuning.one_right_cut(p):
        return
    block_k = tuning.forward(p.dim).block_k
    sees = visible(p, p.n_q, p.n_k)
    ends = np.where(sees.any(1), p.n_k - np.argmax(sees[:, ::-1], 1), 0)  # beyond the last key that a row sees
    for row in range(0, p.n_q, tuning.ROWS):
        rows = ends[row : row + tuning.ROWS]
        last = -(-rows.max() // block_k)
        assert ((rows > (last - 1) * block_k) | (rows == 0)).all(), (p.band, p.n_q, p.n_k, row)


@given(LENGTHS, LENGTHS, LIMITS, LIMITS, st.integers(-200, 200), DIMS)
def test_rows_see_their_first_tile(n_q: int, n_k: int, left: int, right: int, offset: int, dim: int) -> None:
    check_one_right_cut(problem(n_q, n_k, dim, band=Band(left, right, offset)))


@given(LENGTHS, LENGTHS, DIMS, st.booleans())
def test_rows_see_their_first_tile_when_the_ends_meet(n_q: int, n_k: int, dim: int, windowed: bool) -> None:
    options: dict[str, Any] = {"window": (10, 0)} if windowed else {"causal": True}
    check_one_right_cut(problem(n_q, n_k, dim, **options))


def test_when_it_is_guaranteed() -> None:
    assert tuning.one_right_cut(problem(256, 256)) and tuning.one_right_cut(problem(100, 256))
    assert tuning.one_right_cut(problem(256, 256, causal=True)) and tuning.one_right_cut(problem(64, 256, causal=True))
    assert tuning.one_right_cut(problem(256, 256, window=(100, 0)))
    assert not tuning.one_right_cut(problem(256, 255, causal=True))
    assert not tuning.one_right_cut(problem(256, 256, window=(100, None)))
    assert not tuning.one_right_cut(problem(256, 256, causal=True, kv_lengths=np.array([3], np.int32)))


@given(LENGTHS, LENGTHS, LIMITS, LIMITS, st.integers(-200, 200), DIMS)
def test_the_diagonal_cuts_as_many_tiles_for_all_keys(
    n_q: int, n_k: int, left: int, right: int, offset: int, dim: int
) -> None:
    check_always_cut(problem(n_q, n_k, dim, band=Band(left, right, offset)))


@given(LENGTHS, LENGTHS, DIMS, st.booleans())
def test_the_diagonal_when_the_ends_meet(n_q: int, n_k: int, dim: int, causal: bool) -> None:
    p = problem(n_q, n_k, dim, causal=causal)
    check_always_cut(p)
    assert tuning.always_cut(p) == 0 or causal
    assert tuning.always_cut(p) or not (causal and n_q == n_k)


def check_always_cut(p: Problem) -> None:
    """Check that as many tiles are cut for all keys, none beyond the padded rows, and that full tiles follow."""
    cut = tuning.always_cut(p)
    if not cut:
        return
    config = tuning.backward(p.dim)
    padded = -(-p.n_q // config.keys) * config.keys
    sees = np.concatenate([visible(p, p.n_q, p.n_k), np.zeros((padded - p.n_q, p.n_k), bool)])
    for key in range(0, p.n_k, config.keys):
        column = sees[:, key : key + config.keys]
        tiles = [column[row : row + config.block_q] for row in range(0, padded, config.block_q)]
        begin = next(n for n, tile in enumerate(tiles) if tile.any())
        assert begin + cut <= len(tiles), (p.band, p.n_q, p.n_k, key)
        for n, tile in enumerate(tiles[begin + cut :], begin + cut):
            assert tile[: max(p.n_q - n * config.block_q, 0)].all(), (p.band, p.n_q, p.n_k, key, n)


@pytest.mark.parametrize(("tiles", "heads_in_all"), [(1, 1), (8, 256), (32, 64), (128, 16), (64, 3), (0, 4), (500, 2)])
def test_the_last_heads_have_tasks_for_all_processors(tiles: int, heads_in_all: int) -> None:
    x = np.zeros((100, 2, 64), np.float16)
    packed = describe(x, x, x, cu_q=np.array([0, 40, 100]), cu_k=np.array([0, 40, 100]))
    for p, waves in ((problem(64, 64), tuning.WAVES), (packed, tuning.PACKED_WAVES)):
        heads = tuning.section(p, tiles, heads_in_all, 100)
        assert 1 <= heads <= heads_in_all
        assert heads == heads_in_all or tiles * heads >= waves * 100 > tiles * (heads - 1)
        p = replace(p, deterministic=True)
        orders = {tuning.section(p, tiles, heads_in_all, processors) for processors in (1, 78, 114, 132)}
        assert orders == {tuning.section(problem(64, 64), tiles, heads_in_all, 132)}


@pytest.mark.parametrize(
    ("dim", "dtype", "rows", "consumers"),
    [
        *((64, "bfloat16", n, 2) for n in (1, 128, 200, 256)),
        *((64, "float16", n, 3) for n in (129, 192, 320, 512, 640, 1024, 16384)),
        *((64, EIGHT_BITS, n, c) for n, c in ((256, 2), (512, 3), (1024, 3))),
        *((128, EIGHT_BITS, n, c) for n, c in ((256, 2), (384, 3), (512, 3), (1024, 3), (16384, 3))),
        *((dim, "bfloat16", n, 2) for dim in (128, 256) for n in (128, 1024)),
        *((64, "bfloat16", None, 3), (128, EIGHT_BITS, None, 3)),
    ],
)
def test_few_rows_leave_no_warpgroup_idle(dim: int, dtype: str, rows: int | None, consumers: int) -> None:
    """Three warpgroups of 64 rows are for heads that fill their tiles."""
    config = tuning.forward(dim, dtype, rows)
    assert config.consumers == consumers
    assert config.block_k == tuning.forward(dim, dtype).block_k  # one_right_cut() relies on it


def test_heads_that_share_tiles_count_together() -> None:
    q, k = np.zeros((1, 16, 8, 64), np.float16), np.zeros((1, 2, 4096, 64), np.float16)
    p = describe(q, k, k)
    assert tuning.packed_heads(p) == 8
    assert tuning.forward_of(p, 8) == tuning.forward(64, "float16", 64)
    q, k = q[0].swapaxes(0, 1), k[0].swapaxes(0, 1)
    packed = describe(q, k, k, cu_q=np.array([0, 8]), cu_k=np.array([0, 4096]))
    assert tuning.forward_of(packed, 1) == tuning.forward(64, "float16")
