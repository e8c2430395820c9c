"""8-bit tensors where no kernel multiplies them directly: widened to float32 on a CPU. Also errors and layouts."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import flashtile as ft
from flashtile import dispatch
from flashtile.cost.plan import plan
from flashtile.pytorch.eight_bits import DTYPE, widened
from tests.support.eight_bits import EightBitCall

EACH = torch.tensor([[0.5, 2.0], [1.25, 0.0625]])  # (batch, kv_heads)
ONE = torch.tensor(0.75)
Q, K = (2, 4, 33, 32), (2, 2, 45, 32)
CALLS = {
    "plain": {},
    "causal": {"causal": True},
    "numbers": {"descale": (0.5, 3.0, 0.01)},
    "one tensor each": {"descale": (ONE, ONE, ONE)},
    "factors per head": {"descale": (EACH, 2 * EACH, 3 * EACH), "causal": True},
    "mixed": {"descale": (1, EACH, ONE)},
    "large": {"descale": (8.0, 4.0, 1000.0)},
    "small": {"descale": (2.0**-20, 2.0**-20, 2.0**-20)},
    "not positive": {"descale": (0.0, -2.0, -1.0)},
    "float16": {"out_dtype": torch.float16},
    "float32": {"out_dtype": torch.float32, "descale": (EACH, EACH, EACH)},
    "softcap sink": {"softcap": 5.0, "sink": torch.arange(4.0), "descale": (EACH, 1.0, 1.0)},
    "alibi window": {"alibi": torch.rand(4), "window": (9, 3)},
    "kv_lengths": {"kv_lengths": torch.tensor([45, 7])},
}


@pytest.mark.parametrize("name", CALLS)
def test_widened_on_the_cpu(name: str) -> None:
    """In float32, so that rounding the output is nearly the only error."""
    call = EightBitCall.draw(Q, K, 16, **CALLS[name])
    out, lse = call.run()
    exact, exact_lse = call.exact()
    wanted = call.options.get("out_dtype", torch.bfloat16)
    assert out.dtype == wanted and lse.dtype == torch.float32
    room = 1e-5 * np.abs(exact).max()
    error = np.abs(out.double().numpy() - exact).max()
    assert error <= 2 * np.abs(torch.from_numpy(exact).to(wanted).double().numpy() - exact).max() + room
    np.testing.assert_allclose(lse.numpy(), exact_lse, rtol=1e-5, atol=1e-5)
    if name != "not positive":
        call.check()  # the wider bound for 8-bit kernels


@pytest.mark.parametrize("row", [row.name for row in dispatch.TABLE if row.device == "cpu" and row.missing() is None])
def test_every_cpu_backend(row: str) -> None:
    EightBitCall.draw(Q, K, causal=True, descale=(EACH, EACH, EACH)).check(backend=row)


def test_fewer_axes_and_packed_sequences() -> None:
    call = EightBitCall.draw((1, 4, 30, 32), (1, 2, 30, 32))
    each = EACH[:1]
    q, k, v = (x[0] for x in (call.q, call.k, call.v))
    whole = ft.attention(call.q, call.k, call.v, descale=(each, each, each))
    assert torch.equal(ft.attention(q, k, v, descale=(each, each, each)), whole[0])
    starts = torch.tensor([0, 13, 30], dtype=torch.int32)
    packed = [x.transpose(0, 1) for x in (q, k, v)]
    found = ft.attention_packed(*packed, starts, starts, causal=True, descale=(EACH, EACH, EACH))
    for n, (a, b) in enumerate(((0, 13), (13, 30))):
        part = (x[a:b].transpose(0, 1) for x in packed)
        alone = ft.attention(*part, causal=True, descale=(EACH[n : n + 1],) * 3)
        torch.testing.assert_close(found[a:b], alone.transpose(0, 1))


@pytest.mark.parametrize("cu", [[0, 3, 7], [0, 9, 8], [1, 3, 8], [0, -2, 8], [0, 3, 2**62]])
def test_wrong_starts(cu: list[int]) -> None:
    x, right, wrong = EightBitCall.draw((8, 2, 4), (8, 2, 4)).q, torch.tensor([0, 3, 8]), torch.tensor(cu)
    for name, starts in (("cu_q", (wrong, right)), ("cu_k", (right, wrong))):
        words = []
        for q, options in ((x, {"descale": (EACH, EACH, EACH)}), (x.float(), {})):
            with pytest.raises(ft.ShapeError, match=f"^{name}: ") as caught:
                ft.attention_packed(q, q, q, *starts, **options)
            words.append(str(caught.value))
        assert words[0] == words[1]


def test_unchecked_starts_index_within_the_factors() -> None:
    """As on a GPU, where an index out of bounds could not be reported."""
    from flashtile.problem import describe

    call = EightBitCall.draw((8, 2, 4), (8, 2, 4))
    for cu in ([0, 3, 7], [0, 9, 8], [0, -2, -1]):
        starts, factors = torch.tensor(cu), torch.stack([EACH] * 3, -1)
        wide, _ = widened(describe(call.q, call.k, call.v, cu_q=starts, cu_k=starts, descale=factors))
        assert [x.shape for x in wide] == [call.q.shape] * 3


def test_widening_by_powers_of_two_is_exact() -> None:
    from flashtile.problem import describe

    call = EightBitCall.draw(Q, K)
    factors = torch.stack([EACH.exp2().round(), EACH * 0 + 1, EACH * 0 + 0.5], -1)
    wide, more = widened(describe(call.q, call.k, call.v, descale=factors))
    assert {x.dtype for x in wide} == {torch.float32} and more["descale"] is None
    assert torch.equal(wide[2], call.v.float() * 0.5)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"descale": (1, 2)}, ft.ShapeError, "descale: expected three factors"),
        ({"descale": (1, 10**400, 1)}, ft.ShapeError, "descale: expected a finite number"),
        ({"descale": (1, 1, -1e300)}, ft.ShapeError, "descale: expected a number within float32"),
        ({"descale": b"abc"}, ft.ShapeError, "descale: expected three factors"),
        ({"descale": 2.0}, ft.ShapeError, "descale: expected three factors"),
        ({"descale": (1, 1, torch.ones(3, 2))}, ft.ShapeError, r"descale: expected shape \(\) or \(2, 2\)"),
        ({"descale": (EACH, 1, torch.ones(3, 2))}, ft.ShapeError, r"descale: expected shape \(\) or \(batch"),
        ({"descale": (1, torch.ones(2), 1)}, ft.ShapeError, "descale: expected shape"),
        ({"descale": (1, 1, EACH.double())}, ft.DTypeError, "descale: expected float32"),
        ({"descale": (1, 1, np.ones((2, 2), np.float32))}, ft.DTypeError, "descale: expected a torch tensor"),
        ({"descale": (1, float("nan"), 1)}, ft.ShapeError, "descale: expected a finite number"),
        ({"descale": (1, None, 1)}, ft.DTypeError, "descale"),
        ({"out_dtype": torch.float64}, ft.DTypeError, "out_dtype: expected bfloat16 or float16 or float32"),
        ({"bias": torch.zeros(33, 45).to(DTYPE)}, ft.DTypeError, "bias: expected float32"),
    ],
)
def test_errors(options: dict[str, Any], error: type[Exception], words: str) -> None:
    call = EightBitCall.draw(Q, K)
    with pytest.raises(error, match=words):
        ft.attention(call.q, call.k, call.v, **options)


def test_descale_requires_8_bits() -> None:
    call = EightBitCall.draw(Q, K)
    with pytest.raises(ft.DTypeError, match="descale: expected q of float8_e4m3fn"):
        ft.attention(call.q.float(), call.k.float(), call.v.float(), descale=(1, 1, 1))
    with pytest.raises(ft.DTypeError, match="descale: expected q of float8_e4m3fn"):
        ft.attention(*(np.zeros((1, 1, 4, 8), np.float32) for _ in range(3)), descale=(1, 1, 1))
    with pytest.raises(ft.DTypeError, match="k: expected float8_e4m3fn like q"):
        ft.attention(call.q, call.k.float(), call.v)


@pytest.mark.parametrize("needs", ["q", "sink"])
def test_gradients_are_refused(needs: str) -> None:
    call = EightBitCall.draw(Q, K)
    q, sink = call.q.clone(), torch.zeros(4)
    (q if needs == "q" else sink).requires_grad_()
    with pytest.raises(ft.UnsupportedError, match="need no gradient"):
        ft.attention(q, call.k, call.v, sink=sink)
    with torch.no_grad():
        ft.attention(q, call.k, call.v, sink=sink)


def test_compile_and_vmap() -> None:
    call = EightBitCall.draw(Q, K)

    def run(q: Any, each: Any) -> Any:
        return ft.attention(q, call.k, call.v, descale=(each, 2.0, each), causal=True)

    found = torch.compile(run, fullgraph=True, backend="aot_eager")(call.q, EACH)
    assert torch.equal(found, run(call.q, EACH))
    several = torch.stack([EACH, 2 * EACH])
    mapped = torch.func.vmap(run, (None, 0))(call.q, several)
    assert torch.equal(mapped, torch.stack([run(call.q, each) for each in several]))


def test_plan() -> None:
    shape = (4, 16, 4096, 128)
    here = plan(shape, shape, "float8_e4m3fn", descale=(1, 1, 1))
    assert here.backend == plan(shape, shape, "float32").backend and here.tile == plan(shape, shape).tile
    rows, keys = 4 * 16 * 4096 * (128 + 2 * 128 + 4), 4 * 16 * 4096 * 256
    assert here.least_bytes == rows + keys  # the output has 16 bits


def test_vmap_of_single_factors() -> None:
    """Three key heads share a number in each example."""
    x = torch.randn(4, 2, 3, 5, 16).to(torch.float8_e4m3fn)
    attend = partial(_attend_itself, descale=(2.0, 0.5, 1.0))
    assert torch.equal(torch.vmap(attend)(x), torch.stack([attend(a) for a in x]))


def _attend_itself(x: Any, **options: Any) -> Any:
    return ft.attention(x, x, x, **options)
