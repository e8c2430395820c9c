"""Masks as spans: each maker against its definition pair by pair, on arrays and on tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashtile as ft
from flashtile import masks

N, KEYS = 13, 17
AT = KEYS - N  # the key at which query 0 stands
IDS = np.array([[0, 0, 0, 1, 1, 4, 4, 4, 4, 2, 3, 3, 3], [5] * 13])
BLOCKS = np.array([-1, -1, 0, 0, 0, -1, 1, 1, -1, -1, 2, 2, 2])
LENGTHS = np.array([5, 0, 17])
Seen = Callable[[int, int, int], bool]
MAKERS: dict[str, tuple[Callable[[Any], ft.Spans], int, int, Seen]] = {
    "documents": (lambda to: masks.documents(to(IDS)), N, N, lambda b, i, j: IDS[b, i] == IDS[b, j]),
    "documents of one row": (lambda to: masks.documents(to(IDS[0])), N, N, lambda b, i, j: IDS[0, i] == IDS[0, j]),
    "documents of lengths": (
        lambda to: masks.documents(lengths=to(np.array([3, 0, 6, 4]))),
        N,
        N,
        lambda b, i, j: (i < 3) == (j < 3) and (i < 9) == (j < 9),
    ),
    "right padding": (lambda to: masks.padding(to(LENGTHS)), N, KEYS, lambda b, i, j: j < LENGTHS[b]),
    "left padding": (
        lambda to: masks.padding(to(LENGTHS), KEYS, "left"),
        N,
        KEYS,
        lambda b, i, j: j >= KEYS - LENGTHS[b],
    ),
    "prefix": (
        lambda to: masks.prefix_lm(to(LENGTHS), N, KEYS),
        N,
        KEYS,
        lambda b, i, j: j <= i + AT or j < LENGTHS[b],
    ),
    "blocks": (
        lambda to: masks.causal_with_blocks(to(BLOCKS)),
        N,
        N,
        lambda b, i, j: j <= i or (BLOCKS[i] >= 0 and BLOCKS[i] == BLOCKS[j]),
    ),
    "flashmask": (
        lambda to: masks.flashmask(
            to(np.array([4, 4, 4, 13, 9, 9, 9, 9, 9, 13, 13, 13, 13])[None, None, :, None]), True
        ),
        N,
        N,
        lambda b, i, j: j <= i < [4, 4, 4, 13, 9, 9, 9, 9, 9, 13, 13, 13, 13][j],
    ),
}
NUMBERS: dict[str, tuple[Callable[[Any], ft.Spans], Seen]] = {
    "prefix of all": (lambda device: masks.prefix_lm(6, N, KEYS, device), lambda b, i, j: j <= i + AT or j < 6),
    "sinks and a window": (
        lambda device: masks.sink_window(3, 2, N, KEYS, device),
        lambda b, i, j: j <= i + AT and (j < 2 or j >= i + AT - 3),
    ),
    "chunks": (lambda device: masks.chunks(5, N, KEYS, device), lambda b, i, j: (i + AT) // 5 == j // 5),
    "block local": (
        lambda device: masks.block_local(4, 1, 2, N, KEYS, device),
        lambda b, i, j: (i + AT) // 4 - 1 <= j // 4 <= (i + AT) // 4 + 2,
    ),
    "dilated": (
        lambda device: masks.dilated(4, 3, N, KEYS, device),
        lambda b, i, j: j <= i + AT and (i + AT - j) % 3 == 0 and i + AT - j < 12,
    ),
}


def dense(spans: ft.Spans, batch: int, n_q: int, n_k: int) -> Any:
    """The mask, (batch, queries, keys), as an array."""
    found = np.asarray(spans.to_mask(n_k))
    return np.broadcast_to(found, (batch, 1, n_q, n_k))[:, 0]


def wanted(seen: Seen, batch: int, n_q: int, n_k: int) -> Any:
    return np.array([[[bool(seen(b, i, j)) for j in range(n_k)] for i in range(n_q)] for b in range(batch)])


def to_tensor(x: Any) -> Any:
    return pytest.importorskip("torch").from_numpy(x)


@pytest.mark.parametrize("to", [lambda x: x, to_tensor], ids=["arrays", "tensors"])
@pytest.mark.parametrize("name", MAKERS)
def test_makers(name: str, to: Callable[[Any], Any]) -> None:
    make, n_q, n_k, seen = MAKERS[name]
    spans = make(to)
    batch = max(spans.limits.shape[0], 1)
    np.testing.assert_array_equal(dense(spans, batch, n_q, n_k), wanted(seen, batch, n_q, n_k))
    assert (to is to_tensor) == hasattr(spans.limits, "__torch_function__")


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("name", NUMBERS)
def test_makers_of_numbers(name: str, device: str | None) -> None:
    if device is not None:
        pytest.importorskip("torch")
    make, seen = NUMBERS[name]
    np.testing.assert_array_equal(dense(make(device), 1, N, KEYS), wanted(seen, 1, N, KEYS))


@pytest.mark.parametrize("n_q", [7, 4])
@pytest.mark.parametrize(("causal", "count"), [(True, 1), (True, 2), (False, 2), (False, 4)])
def test_flashmask(causal: bool, count: int, n_q: int) -> None:
    """Against its definition: a key is hidden from the rows of one or two intervals, wherever the diagonal is."""
    rng = np.random.default_rng(count)
    rows = rng.integers(0, 8, (2, 1, 7, count))
    rows[0, 0, 2] = 0 if count < 4 else (0, 7, 0, 0)  # from all rows
    found = dense(masks.flashmask(rows, causal, None if n_q == 7 else n_q), 2, n_q, 7)
    for b, i, j in np.ndindex(2, n_q, 7):
        x = [int(n) for n in rows[b, 0, j]]
        hidden = x[0] <= i < (x[1] if count == 4 or (causal and count == 2) else n_q)
        if causal:
            hidden |= j > i + 7 - n_q
        else:
            hidden |= (x[2] if count == 4 else 0) <= i < x[-1]
        assert found[b, i, j] == (not hidden), (b, i, j, x)


masks_of = st.integers(0, 2**32 - 1).map(
    lambda seed: np.random.default_rng(seed).random((2, 2, 5, 11)) < np.random.default_rng(seed + 1).random()
)


@settings(deadline=None, max_examples=60)
@given(masks_of, masks_of)
def test_any_mask(a: Any, b: Any) -> None:
    """From a mask and from a function, and their intersection and union, on arrays and tensors."""
    spans_a, spans_b = ft.Spans.from_mask(a), ft.Spans.from_mask(b)
    np.testing.assert_array_equal(spans_a.to_mask(11), a)
    of_function = ft.Spans.from_function(lambda b, h, i, j: a[b, h, i, j], *a.shape)
    np.testing.assert_array_equal(of_function.limits, spans_a.limits)
    np.testing.assert_array_equal((spans_a & spans_b).to_mask(11), a & b)
    np.testing.assert_array_equal((spans_a | spans_b).to_mask(11), a | b)


def test_any_mask_of_tensors() -> None:
    torch = pytest.importorskip("torch")
    a, b = torch.rand(2, 2, 3, 5, 11) < 0.6
    spans = ft.Spans.from_mask(a)
    assert torch.equal(spans.to_mask(11), a)
    assert torch.equal((spans & ft.Spans.from_mask(b)).to_mask(11), a & b)
    assert torch.equal((spans | ft.Spans.from_mask(b)).to_mask(11), a | b)
    document = torch.tensor([0, 0, 1, 1, 1])
    of_function = ft.Spans.from_function(lambda b, h, i, j: document[i] == document[j], 2, 3, 5, 5, "cpu")
    assert of_function.limits.shape == (1, 1, 5, 1, 2)  # the function does not look at batch and head
    assert torch.equal(of_function.to_mask(5)[0, 0], document[:, None] == document)


def test_functions_are_evaluated_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never for all pairs at once; with another number of spans in each part, and none at the end."""
    monkeypatch.setattr(masks, "SLAB", 64)
    sizes = []

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        sizes.append(i.size * j.size)
        return (j % (i // 4 + 2) == 0) & (i < 9)

    found = ft.Spans.from_function(visible, 1, 1, 11, 16).to_mask(16)[0, 0]
    i, j = np.arange(11)[:, None], np.arange(16)
    np.testing.assert_array_equal(found, (j % (i // 4 + 2) == 0) & (i < 9))
    assert max(sizes) <= 64 and len(sizes) == 3


def test_too_many_runs_name_the_query() -> None:
    mask = np.zeros((2, 1, 4, 20), bool)
    mask[1, 0, 2, ::2] = True
    with pytest.raises(ft.ShapeError, match=r"at most 8 runs.*got 10 for batch 1, head 0, query 2"):
        ft.Spans.from_mask(mask)
    with pytest.raises(ft.ShapeError, match=r"batch 0, head 0, query 0"):
        ft.Spans.from_function(lambda b, h, i, j: j % 2 == 0, 1, 1, 3, 40)
    even, odd = (ft.Spans(np.arange(5) * 4 + n, np.arange(5) * 4 + n + 1) for n in (0, 2))
    even, odd = (ft.Spans(x.begin.reshape(1, 1, 1, 5), x.end.reshape(1, 1, 1, 5)) for x in (even, odd))
    with pytest.raises(ft.ShapeError, match="got 10"):
        even | odd


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: masks.documents(), ft.ShapeError, "ids or lengths"),
        (lambda: masks.documents([0.5]), ft.DTypeError, "ids: .*integers"),
        (lambda: masks.documents([True, False]), ft.DTypeError, "ids: .*integers"),
        (lambda: masks.documents(np.zeros((2, 2, 2), int)), ft.ShapeError, "ids: expected 1 axis or 2 axes"),
        (lambda: masks.documents(lengths=[3, -1]), ft.ShapeError, "lengths: expected none below 0, got -1"),
        (lambda: masks.documents(lengths=[[3], [1]]), ft.ShapeError, "lengths: expected 1 axis"),
        (lambda: masks.padding(3), ft.ShapeError, "lengths: expected 1 axis"),
        (lambda: masks.padding(LENGTHS, 17.5, "left"), ft.DTypeError, "n_k"),
        (lambda: masks.prefix_lm(0.5, 4), ft.DTypeError, "prefix"),
        (lambda: masks.prefix_lm([[1]], 4), ft.ShapeError, "prefix: expected 0 axes or 1 axis"),
        (lambda: masks.prefix_lm(2, -4), ft.ShapeError, "n_q"),
        (lambda: masks.sink_window(-1, 2, 4), ft.ShapeError, "left"),
        (lambda: masks.sink_window(1, -2, 4), ft.ShapeError, "sinks"),
        (lambda: masks.chunks(0, 4), ft.ShapeError, "size"),
        (lambda: masks.chunks(-2, 4), ft.ShapeError, "size"),
        (lambda: masks.block_local(2, -1, 0, 4), ft.ShapeError, "before"),
        (lambda: masks.block_local(2, 0, 0.5, 4), ft.DTypeError, "after"),
        (lambda: masks.dilated(2, 0, 4), ft.ShapeError, "rate"),
        (lambda: masks.intersection(ft.Spans(0, 1), 3), ft.DTypeError, "flashtile.Spans"),
        (lambda: ft.Spans(0, 1) & 3, TypeError, "unsupported operand"),
        (lambda: masks.chunks(2, 4) | masks.chunks(2, 5), ft.ShapeError, r"broadcast.*\(1, 1, 4\) and \(1, 1, 5\)"),
        (lambda: masks.padding(LENGTHS, side="left"), ft.ShapeError, "n_k"),
        (lambda: masks.padding(LENGTHS, 5, "top"), ft.ShapeError, "side"),
        (lambda: masks.dilated(9, 2, 4), ft.ShapeError, "steps"),
        (lambda: masks.flashmask(np.zeros((1, 1, 4, 4), int), True), ft.ShapeError, "1 or 2"),
        (lambda: masks.flashmask(np.zeros((1, 1, 4, 1), int)), ft.ShapeError, "2 or 4"),
        (lambda: masks.flashmask(np.zeros((1, 4, 1), int), True), ft.ShapeError, "rows: expected 4 axes"),
        (lambda: ft.Spans.from_mask(np.zeros((4, 4))), ft.DTypeError, "boolean"),
        (lambda: ft.Spans.from_mask(np.zeros(4, bool)), ft.DTypeError, "2 to 4 axes"),
        (lambda: ft.Spans.from_function(lambda b, h, i, j: i + j, 1, 1, 2, 2), ft.DTypeError, "booleans"),
        (lambda: ft.Spans.from_function(True, 1, 1, 2, 2), ft.DTypeError, "visible: expected a function"),  # type: ignore[arg-type]
        (lambda: ft.Spans.from_function(lambda b, h, i, j: i < j, 1, 1, 2, -2), ft.ShapeError, "n_k"),
        (
            lambda: ft.Spans.from_function(lambda b, h, i, j: np.ones((3, 2), bool), 1, 1, 2, 2),
            ft.ShapeError,
            r"visible: expected shape \(1, 1, 2, 2\)",
        ),
    ],
)
def test_wrong_arguments(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_makers_of_tensors_and_numbers() -> None:
    """A prefix is moved to the device that is named; other spans do not change libraries in silence."""
    torch = pytest.importorskip("torch")
    for prefix in (3, [3], np.array([3]), torch.tensor(3), torch.tensor([3])):
        found = masks.prefix_lm(prefix, N, device="cpu").limits
        assert torch.equal(found, masks.prefix_lm(3, N, device="cpu").limits)
    assert masks.prefix_lm([3, 4], N).limits.shape == (2, 1, N, 1, 2)
    ids = torch.tensor(IDS)
    with pytest.raises(ft.DTypeError, match=r"NumPy arrays and tensors on cpu; .* device is named"):
        masks.chunks(3, N) & masks.documents(ids)
    with pytest.raises(ft.DTypeError, match="tensors on meta and tensors on cpu"):
        masks.chunks(3, N, device="meta") | masks.documents(ids)
    assert (masks.chunks(3, N, device="cpu") & masks.documents(ids)).limits.shape == (2, 1, N, 1, 2)
    for wrong in (ids.bool(), ids.float(), ids * 1j):
        with pytest.raises(ft.DTypeError, match="ids: expected integers"):
            masks.documents(wrong)
    with pytest.raises(ft.ShapeError, match="lengths: expected none below 0"):
        masks.documents(lengths=torch.tensor([2, -1]))
