"""The kernels around the backward kernel on Hopper, under Triton's interpreter; the kernel itself needs a GPU.

In its place, all of dQ is spoiled and all tiles of keys are flagged, so that everything is recomputed.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashtile as ft

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from flashtile.backends.gluon import passes  # noqa: E402
from flashtile.backends.gluon.backward import DQ, Backward, _Workspace  # noqa: E402
from flashtile.backends.gluon.backward_kernel import backward_kernel  # noqa: E402
from flashtile.backends.gpu.arguments import INTERPRETED  # noqa: E402
from flashtile.backends.gpu.kernel_launch import KernelLaunch  # noqa: E402
from flashtile.backends.gpu.tensors import (  # noqa: E402
    Result,
    aligned,
    results,
)
from flashtile.checks.shapes import check_gradients  # noqa: E402
from flashtile.inputs import Inputs  # noqa: E402
from flashtile.numerics.dtypes import name_of, narrow  # noqa: E402
from flashtile.problem import describe  # noqa: E402
from tests.backends.triton import kernels  # noqa: E402
from tests.support.grid import Call, Case, Size, build, check_backward, truth  # noqa: E402
from tests.support.runners import api_runner  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),
    pytest.mark.skipif(not INTERPRETED, reason="on a GPU there is the kernel itself"),
]
LONG = Size(1, 2, 1, 131, 70, 64, 64)
CASES = {
    "in dQ": Case(LONG, "bfloat16", ("causal", "sink")),
    "of another width": Case(Size(1, 2, 1, 150, 40, 128, 64), "float16", ("window",)),
    "too few queries": Case(Size(1, 2, 2, 3, 70, 64, 64), "bfloat16", ("sink",)),
    "empty rows": Case(LONG, "bfloat16", ("band far behind", "sink")),
    "packed": Case(Size.packed(2, 2, 64, 64, (150, 90), (0, 5), (7, 0), (64, 64)), "bfloat16", ("causal", "sink")),
    "packed, short": Case(Size.packed(2, 2, 64, 64, *9 * [(5, 9)]), "bfloat16", ("sink",)),
}


@pytest.mark.parametrize("name", CASES)
def test_everything_is_recomputed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the saved lse and delta; statistics in the memory of dQ are gone by then."""
    call, against = build(CASES[name]), truth(CASES[name])
    out, lse = api_runner("tiles").forward(call)
    problem = kernels.problem_of(call)
    given = tuple(kernels.tensor(x) for x in (call.dout, out, lse, call.dlse))
    run = Backward(problem, problem.q.device, check_gradients(problem, *given))
    borrowed = []

    def spoil(launch: KernelLaunch, *args: Any) -> None:
        named = dict(zip(launch.parameters, args, strict=True))
        rows, total, flags = named["rows_desc"], named["dq_desc"], named["flags"]
        check_statistics(call, lse, rows.flatten(), total.reshape(problem.heads * len(problem.q), -1), run)
        borrowed.append(len(rows) != 2)
        total.fill_(torch.nan)
        recompute = run._launch[False].launches[-1]
        flags[: recompute.args[recompute.launch.parameters.index("first_of_queries")]] = 1  # the flags of keys

    launch = KernelLaunch.__call__

    def unless_it_needs_a_gpu(self: KernelLaunch, *args: Any) -> None:
        (spoil if self.kernel is backward_kernel else launch)(self, *args)

    monkeypatch.setattr(KernelLaunch, "__call__", unless_it_needs_a_gpu)
    found = run(Inputs.of(problem), *given)
    dq, dk, dv = (kernels.array(x) for x in found[:3])
    dsink = None if found.dsink is None else narrow(kernels.array(found.dsink), name_of(call.options["sink"].dtype))
    check_backward(call, against, ft.Grads(dq, dk, dv, None, dsink))
    assert borrowed == ["too few" not in name and "short" not in name]


def check_statistics(call: Call, lse: Any, rows: Any, total: Any, run: Backward) -> None:
    """Check what the kernel finds: lse in base 2 and delta of each row, +inf and 0 beyond the last; and a dQ of 0."""
    (begin, _), *_ = run._launch[False].launches
    pad, width = (begin.constants[name] for name in ("PAD", "BLOCK_D"))
    columns, padded = len(total), total.shape[1] // width
    log2, delta = rows[: 2 * columns * padded].numpy().reshape(2, columns, padded)
    lse, cu = np.moveaxis(lse, 0, -1) if call.packed else lse, call.packed.get("cu_q", [0, lse.shape[-1]])
    lse = lse.reshape(columns, -1)
    for s, (start, end) in enumerate(pairwise(cu)):
        first = (start // pad + s) * pad
        last = first + -(-(end - start) // pad) * pad
        want = np.full((columns, last - first), np.inf, np.float32)
        of_rows = lse[:, start:end]
        want[:, : end - start] = np.where(np.isneginf(of_rows), np.inf, of_rows * np.log2(np.e))
        np.testing.assert_allclose(log2[:, first:last], want, rtol=1e-6, atol=1e-6)
        assert not delta[:, first:last][np.isinf(want)].any() and delta[:, first:last][np.isfinite(want)].all()
        assert not total[:, first * width : last * width].any()


@given(
    heads=st.integers(1, 40),
    group=st.sampled_from([1, 2, 8]),
    n_q=st.integers(1, 5000),
    dims=st.sampled_from([(64, 64), (64, 128), (128, 64), (256, 256)]),
    use_pdl=st.booleans(),
)
def test_heads_wait_if_their_memory_is_borrowed(
    heads: int, group: int, n_q: int, dims: tuple[int, int], use_pdl: bool
) -> None:
    """finish_kernel begins with the other heads while the backward kernel still reads statistics there."""
    dim, dim_v = dims
    shapes = (heads * group, n_q, dim), (heads, 70, dim), (heads, 70, dim_v)
    q, k, v = (torch.empty(2, *shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    p = describe(q, k, v)
    dq, *_ = results(p, q.device)
    space = _Workspace(p, q.device, dq, Result(p, p.heads, n_q, None, "float32", q.device), 1, use_pdl)
    if not use_pdl:
        assert space.complete is None and space.waiting_heads == space.all_heads
        return
    borrowed = prod(space.rows_shape) * 4 if space.rows.position == DQ.position else 0
    of_head = n_q * dim * 2
    assert space.waiting_heads == max(1, -(-borrowed // of_head)) or not borrowed


def test_tensors_that_are_not_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need other kernels than aligned ones. dout, which the copy engine fetches, is copied."""
    x = torch.randn(1, 2, 128, 64, dtype=torch.bfloat16)
    rows = torch.randn(1, 2, 128)
    prepared = passes.Runner(describe(x, x, x))
    made, seen = [], []

    class Listener:
        def __init__(self, *_: Any) -> None:
            made.append(self)

        def __call__(self, inputs: Inputs, *given: Any) -> None:
            seen.append((self, given))

    monkeypatch.setattr(passes, "Backward", Listener)

    def backward(dout: Any, dlse: Any) -> None:
        prepared.backward(Inputs.of(describe(x, x, x)), dout, x, rows, dlse)

    backward(x, rows)
    backward(beside(x), rows)
    backward(x, beside(rows))
    backward(x, beside(rows))
    assert [run for run, _ in seen] == [made[0], made[0], made[1], made[1]]
    for _, (dout, *_) in seen:
        assert aligned(dout) and torch.equal(dout, x)


def beside(x: Any) -> Any:
    """The same numbers, one element beyond an aligned address."""
    room = x.new_empty(x.numel() + 1)
    return room[1:].view(x.shape).copy_(x)
