"""parallel.py: counts of sharded calls; test_processes.py compares the bytes with those that processes send."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashtile
from flashtile import Band, ShapeError, Spans, UnsupportedError
from flashtile.cost import parallel
from flashtile.cost.hardware import Hardware, Rates
from flashtile.cost.parallel import Links
from flashtile.cost.shard_pairs import pairs_by_band, pairs_by_ends
from flashtile.distributed import Shards
from flashtile.distributed.visible import Visible

MAKERS = {"contiguous": Shards.contiguous, "zigzag": Shards.zigzag, "striped": Shards.striped}
SHAPES = (1, 8, 512, 16), (1, 4, 512, 16)
GPU = Hardware("one", Rates(1e12, 1e12))
LINKS = Links(4, 1e9, 1e8)


@given(st.data())
def test_pairs_between_shards(data):
    lengths = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=4))
    shards = MAKERS[data.draw(st.sampled_from([*MAKERS]))](documents=lengths, ranks=data.draw(st.integers(1, 6)))
    band = Band(*(data.draw(st.integers(-3, 30)) for _ in range(2)), data.draw(st.integers(-9, 9)))
    document = np.repeat(np.arange(len(lengths)), lengths)
    at = np.arange(len(document)) - shards.starts[document]
    seen = (document[:, None] == document) & band.keep(at[:, None], at)
    rows = [shards.indices(rank) for rank in range(shards.ranks)]
    wanted = [[seen[np.ix_(i, j)].sum() for j in rows] for i in rows]
    assert pairs_by_band(shards, band).tolist() == wanted
    if band.offset == 0:
        assert pairs_by_ends(shards, Visible(len(document), shards.starts, band)).tolist() == wanted


def by_method(shards, **options):
    return {x.method: x for x in flashtile.plan(*SHAPES, "bfloat16", shards=shards, **options).parallel}


def test_the_methods_that_fit():
    assert [*by_method(Shards.zigzag(512, ranks=4), links=LINKS)] == ["gather", "ring", "ulysses"]
    assert [*by_method(Shards.zigzag(512, ranks=8), links=LINKS)] == ["gather", "ring", "ulysses", "ulysses 4 x ring 2"]
    assert [*by_method(Shards.zigzag(512, ranks=16), links=LINKS)] == ["gather", "ring", "ulysses 4 x ring 4"]
    assert flashtile.plan(*SHAPES).parallel == ()


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("causal", [False, True])
def test_the_bound_for_many_ranks_is_reached(monkeypatch, ranks, causal):
    shards = Shards.zigzag(512, ranks=ranks)
    planned = by_method(shards, causal=causal, hardware=GPU, links=LINKS)
    monkeypatch.setattr(parallel, "PLANNED", 0)
    bounded = by_method(shards, causal=causal, hardware=GPU, links=LINKS)
    for name, x in planned.items():
        y = bounded[name]
        assert x.exact and not y.exact
        assert (x.sent, x.balance, x.pairs) == (y.sent, y.balance, y.pairs)
        assert x.sent_backward <= y.sent_backward and x.held <= y.held
        if name == "ring":
            assert x.seconds == y.seconds


def test_a_window_bounds_what_is_gathered(monkeypatch):
    shards = Shards.contiguous(512, ranks=8)
    planned = by_method(shards, window=(9, 0))["gather"]
    monkeypatch.setattr(parallel, "PLANNED", 0)
    assert planned.sent == by_method(shards, window=(9, 0))["gather"].sent == 9 * 4 * 32 * 2


def test_spans_and_documents():
    documents = flashtile.masks.documents(lengths=[256, 256])
    apart = by_method(Shards.contiguous(512, ranks=2), spans=documents)
    assert apart["gather"].sent == apart["ring"].sent_backward == 0
    same = by_method(Shards.contiguous(documents=[256, 256], ranks=2))
    assert same["gather"] == apart["gather"]
    prefix = by_method(Shards.contiguous(512, ranks=2), spans=Spans(0, 64))
    assert prefix["gather"].sent == 64 * 4 * 32 * 2 and prefix["gather"].pairs == 256 * 64 * 8


def test_lengths_move_a_causal_band():
    """The last query stands at the last key in use, as in attention()."""
    found = by_method(Shards.contiguous(512, ranks=2), causal=True, kv_lengths=[100])["gather"]
    seen = np.maximum(np.arange(512) + 1 - 412, 0)
    assert found.pairs == 8 * seen[256:].sum() and found.balance == pytest.approx(2)
    assert found.sent == 100 * 4 * 32 * 2


def test_times():
    """Products of the busiest rank at the peak rate, beside or after the messages."""
    found = by_method(Shards.contiguous(512, ranks=2), causal=True, hardware=GPU, links=Links(2, 1e9, 1.0))
    first, last = (256 * 257 // 2, 256 * 257 // 2 + 256 * 256)
    product, message = 8 * 64 / 1e12, 256 * 4 * 32 * 2 / 1e9
    assert found["gather"].balance == pytest.approx(2 * last / (first + last))
    assert found["gather"].seconds == pytest.approx(last * product + message)
    assert found["ring"].seconds == pytest.approx(max(first * product, message) + 256 * 256 * product)
    across = by_method(Shards.contiguous(512, ranks=2), causal=True, hardware=GPU, links=Links(1, 1.0, 1e6))
    assert across["ring"].seconds == pytest.approx(message * 1e3 + 256 * 256 * product)
    assert 0 < across["ring"].ideal < found["ring"].ideal < 1


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"shards": Shards.zigzag(8, ranks=2)}, ShapeError, "shards: expected those of 512 tokens, got 8"),
        (
            {"shards": Shards.contiguous(512, ranks=33), "spans": Spans(0, 9)},
            UnsupportedError,
            "shards: expected at most 32 ranks with spans",
        ),
    ],
)
def test_what_does_not_apply_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        flashtile.plan(*SHAPES, **options)
    with pytest.raises(UnsupportedError, match="shards: expected one row of as many queries"):
        flashtile.plan((1, 8, 4, 16), SHAPES[1], shards=Shards.zigzag(512, ranks=2))


def test_runs_of_several_steps():
    shards = Shards((((0, 0, 2, 3),), ((0, 1, 1, 1), (0, 3, 1, 1))), (5,))
    found = flashtile.plan((1, 2, 5, 8), (1, 2, 5, 8), causal=True, shards=shards).parallel
    assert {x.pairs for x in found if x.method == "ring"} == {2 * (1 + 3 + 5)}
    with pytest.raises(flashtile.DTypeError, match="shards: expected"):
        flashtile.plan((1, 2, 5, 8), (1, 2, 5, 8), shards=3)
    with pytest.raises(flashtile.DTypeError, match="links: expected"):
        flashtile.plan((1, 2, 5, 8), (1, 2, 5, 8), shards=shards, links=3)
