"""Problems drawn at random on a GPU: thirty-four kinds of kernel, and any lengths, numbers and masks for each.

Ten of each kind; with -m "gpu and slow" a thousand more.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import flashtile as ft
from flashtile.numerics.dtypes import accumulator, narrow
from tests import test_random_problems
from tests.backends.triton.test_spans import rising
from tests.gpu.placement import FENCE, UNALIGNED
from tests.gpu.runner import each_backend, on
from tests.support.grid import Call, with_layout
from tests.support.runners import Runner

pytestmark = [pytest.mark.gpu, *each_backend]

RUNNERS = {"plain": on("cuda"), "fenced": on("cuda", FENCE), "unaligned": on("cuda", UNALIGNED)}


@dataclass(frozen=True)
class Kind:
    """What Triton compiles for: problems of one kind run the same kernels."""

    dtype: str
    dims: tuple[int, int]
    group: int
    options: tuple[str, ...] = ()
    packed: bool = False
    layout: str = "plain"
    place: str = "plain"

    def __str__(self) -> str:
        shape = "packed" if self.packed else "batched"
        width = "x".join(str(n) for n in self.dims)
        return "-".join((self.dtype, width, f"group {self.group}", shape, *self.options, self.layout, self.place))


KINDS = (
    Kind("bfloat16", (64, 64), 1),
    Kind("bfloat16", (64, 64), 2, ("band",), place="fenced"),
    Kind("bfloat16", (64, 64), 4, ("window", "sink"), layout="rows first"),
    Kind("bfloat16", (64, 64), 2, ("window", "kv_lengths"), place="fenced"),
    Kind("bfloat16", (64, 64), 2, ("window",), packed=True, place="fenced"),
    Kind("bfloat16", (64, 64), 1, ("band", "kv_lengths", "alibi"), packed=True),
    Kind("bfloat16", (64, 64), 3, ("mask", "bias", "kv_lengths"), packed=True),
    Kind("bfloat16", (128, 128), 1, ("window",), place="fenced"),
    Kind("bfloat16", (128, 128), 4, ("band", "softcap"), layout="rows first"),
    Kind("bfloat16", (128, 128), 8, ("kv_lengths",), packed=True),
    Kind("bfloat16", (128, 128), 2, ("mask", "bias"), layout="transposed"),
    Kind("bfloat16", (128, 64), 2, ("window", "dropout")),
    Kind("bfloat16", (80, 80), 1, ("band",), place="unaligned"),
    Kind("bfloat16", (192, 128), 1, ("window", "softcap")),
    Kind("bfloat16", (256, 256), 2, ("band", "sink"), packed=True),
    Kind("bfloat16", (33, 17), 2, ("window", "mask", "scale"), place="fenced"),
    Kind("bfloat16", (512, 512), 1, ("window",)),
    Kind("float16", (64, 64), 1, ("window", "alibi", "softcap")),
    Kind("float16", (128, 128), 2, ("band", "dropout", "kv_lengths")),
    Kind("float16", (96, 96), 4, ("mask", "sink"), packed=True),
    Kind("float16", (128, 128), 1, ("window", "bias"), packed=True, place="unaligned"),
    Kind("float32", (64, 64), 1, ("band",), place="fenced"),
    Kind("float32", (64, 64), 2, ("window", "mask", "bias", "alibi", "softcap", "sink", "dropout", "kv_lengths")),
    Kind("float32", (128, 128), 1, ("window", "kv_lengths"), packed=True),
    Kind("float32", (33, 65), 5, ("band", "scale"), layout="columns apart"),
    Kind("float32", (1, 1), 1, ("window", "sink")),
    Kind("float32", (256, 256), 1, ("window",)),
    Kind("float64", (64, 64), 2, ("band", "bias", "alibi")),
    Kind("float64", (40, 24), 1, ("window", "mask", "dropout", "kv_lengths"), packed=True),
    Kind("float64", (128, 128), 1, ("band",), place="unaligned"),
    Kind("bfloat16", (64, 64), 2, ("spans 1",), place="fenced"),
    Kind("bfloat16", (128, 128), 1, ("spans 3", "band"), place="unaligned"),
    Kind("bfloat16", (64, 64), 4, ("spans 2", "kv_lengths"), packed=True, place="fenced"),
    Kind("float32", (64, 64), 2, ("spans 8", "mask", "bias", "sink", "dropout")),
)


def spans(rng: np.random.Generator, heads: tuple[int, int], n_q: int, n_k: int, count: int) -> ft.Spans:
    """Shared by up to ninety neighbours; of all heads or each."""
    limits = rising(rng, (heads[0], int(rng.choice([1, heads[1]]))), n_q, n_k, count, alike=int(rng.integers(1, 90)))
    return ft.Spans.of(limits)


def shares(rng: np.random.Generator, total: int) -> Any:
    """Six lengths with this sum, some of them 0; the last is the longest and odd."""
    few = rng.integers(0, 70, 5) * (rng.random(5) < 0.7)
    few[0] += (total - few.sum() + 1) % 2
    return np.append(few, total - few.sum())


def problem(kind: Kind, rng: np.random.Generator, lengths: tuple[int, int] = (131, 239)) -> Call:
    """A problem of a kind.

    Lengths and edges are odd, and of at least two tiles; other ones would be of another kind.
    """

    def odd(low: int, high: int) -> int:
        return 2 * int(rng.integers(low // 2, high // 2)) + 1

    def array(*shape: int, dtype: str = kind.dtype) -> Any:
        x = narrow(rng.standard_normal(shape), dtype)
        return with_layout(x, kind.layout) if len(shape) > 2 and x.size else x

    kv_heads, (dim, dim_v) = 2, kind.dims
    heads = kv_heads * kind.group
    if kind.packed:
        order = rng.permutation(6)
        q_lengths, k_lengths = shares(rng, odd(561, 639))[order], shares(rng, odd(561, 639))[order]
        cu_q, cu_k = (np.cumsum([0, *n]).astype(np.int32) for n in (q_lengths, k_lengths))
        packed, room = {"cu_q": cu_q, "cu_k": cu_k}, k_lengths
        n_q, n_k = int(q_lengths.max()), int(k_lengths.max())
        q_shape, k_shape = (int(cu_q[-1]), heads), (int(cu_k[-1]), kv_heads)
        sequences = len(order)
    else:
        n_q, n_k, sequences, packed = odd(*lengths), odd(*lengths), int(rng.integers(2, 4)), {}
        room = np.full(sequences, n_k)
        q_shape, k_shape = (sequences, heads, n_q), (sequences, kv_heads, n_k)
    pairs = (sequences, heads, n_q, n_k)
    options: dict[str, Any] = {}
    for name in kind.options:
        match name:
            case "window":
                options["window"] = (odd(3, 199), odd(3, 199))
            case "band":
                options["band"] = ft.Band(odd(-99, 199), odd(-99, 199), odd(-149, 149) - 1)
            case "mask":
                options["mask"] = with_layout(rng.random(pairs) < rng.choice([0.1, 0.6, 0.95]), kind.layout)
            case "bias":
                options["bias"] = array(*pairs)
            case "alibi":
                options["alibi"] = rng.random((sequences, heads)).astype(accumulator(kind.dtype))
            case "sink":
                options["sink"] = array(heads, dtype=accumulator(kind.dtype))
            case "softcap":
                options["softcap"] = float(rng.choice([0.5, 3.0, 50.0]))
            case "scale":
                options["scale"] = float(rng.uniform(0.01, 1))
            case "dropout":
                options |= {"dropout": 0.3, "seed": int(rng.integers(0, 2**64, dtype=np.uint64))}
            case "kv_lengths":
                options["kv_lengths"] = rng.integers(0, room + 1)
            case _:
                options["spans"] = spans(rng, (sequences, heads), n_q, n_k, int(name.removeprefix("spans ")))
    q, k, v = array(*q_shape, dim), array(*k_shape, dim), array(*k_shape, dim_v)
    return Call(q, k, v, options, array(*q_shape, dim_v), array(*q_shape, dtype=accumulator(kind.dtype)), packed)


def try_some(
    kind: Kind,
    seed: int,
    count: int,
    lengths: tuple[int, int] = (131, 239),
    agree: Callable[[Call, Runner], None] = test_random_problems.agree,
) -> None:
    rng = np.random.default_rng([zlib.crc32(str(kind).encode()), seed])
    wrong = []
    runner = RUNNERS[kind.place]
    for n in range(count):
        call = problem(kind, rng, lengths)
        if not n and (reason := runner.refusal(call)):
            pytest.skip(reason)
        try:
            agree(call, runner)
        except AssertionError as error:
            wrong.append(f"number {n}, q {call.q.shape}, k {call.k.shape}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_some_problems(kind: Kind) -> None:
    try_some(kind, 0, 10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_more_problems(kind: Kind) -> None:
    try_some(kind, 1, 34)
