"""The public call on a GPU against the oracle: every option, dtype, head dim, ragged size, group and layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import flashtile as ft
from tests import test_agreement, test_random_problems
from tests.gpu.placement import UNALIGNED
from tests.gpu.runner import CUDA, Given, agree, check, each_backend, on
from tests.gpu.sizes import DECODE, LONG, PACKED, RAGGED
from tests.support.grid import COMBINATIONS, OPTIONS, Call, Case, Size, build, truth

pytestmark = [pytest.mark.gpu, *each_backend]

each_dtype = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
two_dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])


@pytest.mark.parametrize("option", OPTIONS)
def test_options(option: str) -> None:
    agree(Case(LONG, "bfloat16", (option,)))
    agree(Case(DECODE, "bfloat16", (option,)), backward=False)


# One of each way to compute a score, a weight or a tile.
WAYS = (
    *("plain", "causal", "window", "band", "mask", "bias", "bias of keys", "alibi", "softcap", "sink"),
    *("scale negative", "dropout", "kv_lengths", "everything", "spans", "spans of rows"),
)


@pytest.mark.parametrize("option", WAYS)
def test_options_in_float32(option: str) -> None:
    agree(Case(RAGGED, "float32", (option,)))
    agree(Case(DECODE, "float32", (option,)), backward=False)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("option", ["causal", "window", "mask with empty rows", "bias", "everything", "spans"])
def test_options_in_other_dtypes(option: str, dtype: str) -> None:
    agree(Case(RAGGED, dtype, (option,)))
    agree(Case(DECODE, dtype, (option,)), backward=False)


@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_options_together(names: tuple[str, ...]) -> None:
    agree(Case(RAGGED, "bfloat16", names))


@pytest.mark.parametrize("option", ["causal", "everything", "spans"])
def test_gradients_of_decode(option: str) -> None:
    agree(Case(DECODE, "bfloat16", (option,)))


@two_dtypes
@pytest.mark.parametrize(
    "option", ["plain", "causal", "window", "mask", "bias", "alibi of batch", "kv_lengths", "spans", "spans of rows"]
)
def test_packed(option: str, dtype: str) -> None:
    agree(Case(PACKED, dtype, (option,)))


@each_dtype
def test_packed_everything(dtype: str) -> None:
    agree(Case(PACKED, dtype, ("everything",)))


def test_packed_decode() -> None:
    """One row per sequence, each of another length."""
    size = Size.packed(8, 2, 64, 64, (1, 301), (1, 17), (1, 0), (1, 65), (1, 1), (1, 640))
    agree(*(Case(size, "bfloat16", (option,)) for option in ("plain", "causal", "kv_lengths", "spans")))


# One row, one more and one less than a tile, many tiles; a sequence longer than the other, either way.
PAIRS = {
    "as many": [(n, n) for n in (1, 2, 63, 64, 65, 127, 128, 129)],
    "more keys": [(1, 64), (1, 129), (63, 64), (64, 65), (127, 129), (17, 300)],
    "more queries": [(64, 1), (129, 1), (64, 63), (65, 64), (129, 127), (300, 17)],
    "many": [(300, 1000), (1000, 300), (1024, 1024)],
}


@pytest.mark.parametrize("lengths", PAIRS)
def test_lengths(lengths: str) -> None:
    sizes = [Size(1, 2, 1, n_q, n_k, 64, 64) for n_q, n_k in PAIRS[lengths]]
    agree(*(Case(size, "bfloat16", ("causal",)) for size in sizes))


def test_lengths_without_a_mask() -> None:
    agree(*(Case(Size(1, 2, 1, *lengths, 64, 64), "bfloat16") for lengths in ((63, 65), (65, 63), (1024, 1024))))


def test_lengths_in_float32() -> None:
    agree(*(Case(Size(1, 2, 1, n, n, 64, 64), "float32", ("causal",)) for n in (1, 64, 65, 129)))


def test_lengths_of_split_keys() -> None:
    sizes = [Size(1, 2, 1, *lengths, 64, 64) for lengths in ((1, 1025), (1, 4097), (2, 2048), (65, 1500))]
    agree(*(Case(size, "bfloat16", ("causal",)) for size in sizes), backward=False)


@pytest.mark.parametrize("lengths", [(4097, 4097), (4097, 513), (513, 4097)], ids=str)
def test_long(lengths: tuple[int, int]) -> None:
    agree(Case(Size(1, 1, 1, *lengths, 128, 128), "bfloat16", ("causal",)))


SQUARE = (8, 33, 80, 96, 128, 192, 256, 512)
OBLONG = ((64, 128), (128, 64), (192, 128), (33, 17), (1, 128), (128, 1), (100, 256), (512, 64))


@pytest.mark.parametrize("dims", [*((n, n) for n in SQUARE), *OBLONG], ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    agree(Case(Size(2, 2, 1, 577, 641, *dims), "bfloat16", ("causal",)))
    agree(Case(Size(1, 2, 1, 1, 701, *dims), "bfloat16", ("causal",)), backward=False)


@pytest.mark.parametrize("dims", [(33, 33), (128, 128), (128, 64), (256, 256), (512, 512)], ids=str)
def test_head_dims_in_float32(dims: tuple[int, int]) -> None:
    agree(Case(Size(2, 2, 1, 65, 129, *dims), "float32", ("causal",)))
    agree(Case(Size(1, 2, 1, 1, 701, *dims), "float32", ("causal",)), backward=False)


@pytest.mark.parametrize("dims", [(80, 80), (128, 128), (256, 192), (512, 512)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_head_dims_with_everything(dims: tuple[int, int], dtype: str) -> None:
    agree(Case(Size(2, 2, 1, 65, 129, *dims), dtype, ("everything",)))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (512, 512)], ids=str)
def test_head_dims_with_dropout(dims: tuple[int, int]) -> None:
    """Dropout has tiles of its own."""
    agree(Case(Size(2, 2, 1, 130, 257, *dims), "bfloat16", ("causal", "dropout")))


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (512, 512)], ids=str)
def test_head_dims_with_spans(dims: tuple[int, int]) -> None:
    size = Size(2, 2, 1, 577, 641, *dims)
    agree(Case(size, "bfloat16", ("spans of rows", "causal")), Case(size, "bfloat16", ("spans of heads",)))


@each_dtype
def test_one_column(dtype: str) -> None:
    """q.k is one product: standard attention has nothing to sum, so the dtype's own precision is the bound."""
    test_random_problems.agree(build(Case(Size(2, 4, 2, 65, 129, 1, 1), dtype, ("causal",))), CUDA)


@pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 8, 16])
def test_groups(group: int) -> None:
    """Query heads that share a key head; with few queries they share a tile too, cut at its end or not."""
    few = [Case(Size(2, 2 * group, 2, n, 301, 64, 64), "bfloat16", ("causal",)) for n in (1, 3, 7, 33)]
    agree(*few, Case(Size(2, group, 1, 5, 1999, 64, 64), "bfloat16", ("kv_lengths",)), backward=False)
    agree(Case(Size(2, 2 * group, 2, 65, 129, 64, 64), "bfloat16", ("causal",)))


@two_dtypes
def test_unrounded_output(dtype: str) -> None:
    agree(*(Case(size, dtype, ("causal",), wide_out=True) for size in (LONG, PACKED)))
    agree(Case(DECODE, dtype, ("causal",), wide_out=True), backward=False)


@pytest.mark.parametrize("layout", ["rows first", "columns apart", "transposed", "expanded"])
def test_strides(layout: str) -> None:
    agree(Case(LONG, "bfloat16", ("causal",), layout), Case(RAGGED, "bfloat16", ("everything",), layout))
    agree(Case(RAGGED, "float32", ("causal",), layout))


@pytest.mark.parametrize("layout", ["rows first", "expanded"])
def test_strides_of_packed_and_decode(layout: str) -> None:
    agree(Case(PACKED, "bfloat16", ("causal",), layout))
    agree(Case(DECODE, "bfloat16", ("causal",), layout), backward=False)


def sliced(call: Call) -> Call:
    """q, k, v, dout as parts of larger arrays, whose other rows and columns must not be read."""

    def part(x: Any) -> Any:
        room = np.zeros((*x.shape[:-2], x.shape[-2] + 3, x.shape[-1] + 16), x.dtype)
        inside = room[..., 1 : 1 + x.shape[-2], 8 : 8 + x.shape[-1]]
        inside[...] = x
        return inside

    return replace(call, **{name: part(getattr(call, name)) for name in ("q", "k", "v", "dout")})


@pytest.mark.parametrize("option", ["causal", "everything"])
def test_slices(option: str) -> None:
    for size in (LONG, DECODE):
        case = Case(size, "bfloat16", (option,))
        check(sliced(build(case)), truth(case), backward=size is LONG)


@each_dtype
def test_unaligned_pointers(dtype: str) -> None:
    """Every tensor begins one element after an aligned address."""
    agree(Case(RAGGED, dtype, ("everything" if dtype == "bfloat16" else "causal",)), runner=on("cuda", UNALIGNED))
    agree(Case(DECODE, dtype, ("causal",)), runner=on("cuda", UNALIGNED), backward=False)


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_lengths_of_either_width_and_any_stride(kind: Any) -> None:
    """kv_lengths, cu_q and cu_k may be views, and so may slopes and sinks."""

    def apart(x: Any) -> Any:
        room = np.full((*x.shape, 3), 7, x.dtype)
        room[..., 1] = x
        return room[..., 1]

    for case in (Case(RAGGED, "bfloat16", ("everything",)), Case(PACKED, "bfloat16", ("everything",))):
        call, exact = build(case), truth(case)
        small = {name: call.options[name] for name in ("alibi", "sink")}
        small["kv_lengths"] = call.options["kv_lengths"].astype(kind)
        call = replace(
            call,
            options=call.options | {name: apart(x) for name, x in small.items()},
            packed={name: apart(x.astype(kind)) for name, x in call.packed.items()},
        )
        check(call, exact)


def test_one_length_for_all() -> None:
    """An expanded tensor: three sequences, one number."""
    q = torch.randn(3, 2, 65, 64, device="cuda")
    lengths = torch.tensor([40], device="cuda")
    shared, own = (ft.attention(q, q, q, kv_lengths=x) for x in (lengths.expand(3), lengths.repeat(3)))
    assert torch.equal(shared, own)


def test_bands_that_begin_far_away() -> None:
    """Only the sums of a band's numbers matter, not their sizes."""
    q = torch.randn(1, 2, 65, 64, device="cuda")
    near = ft.attention(q, q, q, band=ft.Band(3, 2, 0))
    for far in (1 << 20, 1 << 31, 1 << 35, 1 << 39):
        assert torch.equal(ft.attention(q, q, q, band=ft.Band(far + 3, 2 - far, far)), near), far


@two_dtypes
@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [((0, 2, 5, 64), (0, 2, 7, 64)), ((2, 2, 0, 64), (2, 2, 7, 64)), ((2, 2, 5, 64), (2, 2, 0, 64))],
    ids=["no batch", "no queries", "no keys"],
)
@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
def test_sizes_of_zero(q_shape: Any, k_shape: Any, sink: bool, dtype: str) -> None:
    """Empty results; rows with no key: output 0, lse -inf (or the sink), gradients 0."""
    q, k = (torch.ones(s, dtype=getattr(torch, dtype), device="cuda", requires_grad=True) for s in (q_shape, k_shape))
    logits = torch.tensor([0.5, -2], device="cuda", requires_grad=True) if sink else None
    out, lse = ft.attention(q, k, k, sink=logits, return_lse=True)
    assert out.shape == q_shape and not out.any()
    expected = torch.full((2, 1), -torch.inf, device="cuda") if logits is None else logits[:, None]
    assert torch.equal(lse, expected.expand(q_shape[:3]))
    leaves = [x for x in (q, k, logits) if x is not None]
    grads = torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))
    assert [x.shape for x in grads] == [x.shape for x in leaves]
    assert not grads[0].any() and not grads[1].any()
    if sink:  # lse is the sink itself here, so its gradient is that of the lse
        torch.testing.assert_close(grads[2], torch.full((2,), float(q_shape[0] * q_shape[2]), device="cuda"))


def test_rows_that_see_no_key() -> None:
    """Exactly 0 and -inf, not only close to it."""
    test_agreement.test_rows_that_see_no_key(CUDA)


def test_gradients_without_dlse() -> None:
    """dlse=None is dlse=0."""
    call = build(Case(RAGGED, "bfloat16", ("everything",)))
    none = Given(replace(call, dlse=None), "cuda").step()
    zero = Given(replace(call, dlse=np.zeros_like(call.dlse)), "cuda").step()
    assert all(torch.equal(x, y) for x, y in zip(none, zero, strict=True))


@pytest.mark.parametrize("rank", [2, 3])
def test_lower_ranks(rank: int) -> None:
    whole = [torch.randn(1, 1, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (65, 129, 129)]
    lower = [x.detach()[(0,) * (4 - rank)].requires_grad_() for x in whole]
    results = []
    for tensors in (whole, lower):
        out, lse = ft.attention(*tensors, causal=True, return_lse=True)
        assert lse.shape == out.shape[:-1]
        results.append([out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), tensors)])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x.reshape(y.shape), y)
