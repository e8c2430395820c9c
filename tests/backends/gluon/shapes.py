"""Random problems with any band and short lengths, and what the cuts of their tiles must satisfy."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from flashtile.band import FAR, Band
from flashtile.problem import Problem, describe

LIMITS = st.one_of(st.just(FAR), st.integers(-70, 300), st.sampled_from([-64, 0, 64, 128]))
LENGTHS = st.one_of(st.integers(1, 400), st.sampled_from([64, 128, 192, 256, 384]))
DIMS = st.sampled_from([64, 128, 256])
BANDS = st.one_of(
    st.sampled_from([{}, {"causal": True}, {"window": (100, 0)}]),
    st.builds(lambda *limits: {"band": Band(*limits)}, LIMITS, LIMITS, st.integers(-200, 200)),
)
PAIRS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=4)


@st.composite
def dense_problems(draw: Any) -> Problem:
    """Two sequences; all keys are in use, or only some of the second sequence's."""
    n_q, n_k, dim, options = draw(LENGTHS), draw(LENGTHS), draw(DIMS), draw(BANDS)
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    if draw(st.booleans()):
        options = options | {"kv_lengths": np.array([n_k, draw(st.integers(0, n_k))], np.int32)}
    shapes = (kv_heads * group, n_q), (kv_heads, n_k), (kv_heads, n_k)
    return describe(*(np.zeros((2, *shape, dim), np.float16) for shape in shapes), **options)


@st.composite
def packed_problems(draw: Any, same_starts: bool = False) -> Problem:
    """Up to four sequences, some without queries or keys. same_starts: each has as many queries as keys."""
    pairs = draw(PAIRS.filter(lambda pairs: all(map(sum, zip(*pairs, strict=True)))))
    if same_starts:
        pairs = [(n_q, n_q) for n_q, _ in pairs]
    dim, options = draw(DIMS), draw(BANDS)
    cu_q, cu_k = (np.cumsum([0, *lengths]).astype(np.int32) for lengths in zip(*pairs, strict=True))
    totals = (cu_q[-1], cu_k[-1], cu_k[-1])
    return describe(*(np.zeros((n, 2, dim), np.float16) for n in totals), cu_q=cu_q, cu_k=cu_k, **options)


def visible(p: Problem, n_q: int, n_k: int) -> Any:
    """[n_q, n_k] of a sequence: which query sees which key."""
    return p.band_for(int(n_q), int(n_k)).keep(np.arange(n_q)[:, None], np.arange(n_k)[None, :])


def check_cuts(sees: Any, cut: tuple[int, ...], block: int) -> None:
    """Check that tiles that are not visited are hidden, and that full ones hide nothing. sees: [rows, columns]."""
    begin, full_begin, full_end, end = cut
    assert 0 <= begin <= full_begin <= full_end <= end
    for n in range(-(-sees.shape[1] // block)):
        tile = sees[:, n * block : (n + 1) * block]
        assert begin <= n < end or not tile.any()
        assert not full_begin <= n < full_end or tile.all()
