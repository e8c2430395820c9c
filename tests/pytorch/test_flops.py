"""FlopCounterMode counts our calls, by its own convention; a profiler sees their names."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.profiler import ProfilerActivity, profile  # noqa: E402

import flashtile as ft  # noqa: E402
from tests.pytorch.samples import randn  # noqa: E402


def qkv(grad: bool = False, dim_v: int = 8) -> list[Any]:
    shapes = ((2, 4, 9, 8), (2, 2, 11, 8), (2, 2, 11, dim_v))
    return [randn(*shape, dtype=torch.float32, requires_grad=grad) for shape in shapes]


def counted(run: Any) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("dim_v", [8, 6])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (2, 0)}], ids=str)
def test_forward_and_backward_as_torch_counts_its_own(dim_v: int, options: dict[str, Any]) -> None:
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    given = qkv(True, dim_v)
    shapes = [x.shape for x in given]
    forward, backward = sdpa_flop_count(*shapes), sdpa_backward_flop_count((*shapes[0][:-1], dim_v), *shapes)
    assert counted(lambda: ft.attention(*(x.detach() for x in given), **options)) == forward
    assert counted(lambda: ft.attention(*given, **options).sum().backward()) == forward + backward
    assert counted(lambda: ft.attention(*(x[0, 0].detach() for x in given), **options)) == forward // 8


def test_packed_sequences() -> None:
    q, k = randn(9, 4, 8), randn(11, 2, 8)
    starts = torch.tensor([0, 4, 9]), torch.tensor([0, 2, 11])
    assert counted(lambda: ft.attention_packed(q, k, k, *starts)) == 4 * 8 * 4 * (4 * 2 + 5 * 9)


def test_without_values() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, starts = torch.empty(9, 4, 8), torch.empty(3, dtype=torch.int32)
        assert counted(lambda: ft.attention_packed(q, q, q, starts, starts)) == 4 * 8 * 4 * 81
    q, *_ = (x.to("meta") for x in qkv())
    assert counted(lambda: ft.attention(q, q, q)) == 4 * 8 * 8 * 81


FIRST_CALL = """
import sys, torch, flashtile
assert "flashtile.pytorch" not in sys.modules
x = torch.randn(2, 9, 8)
{before}
from torch.utils.flop_counter import FlopCounterMode
counter = FlopCounterMode(display=False)
{between}
with counter:
    flashtile.attention(x, x, x)
assert counter.get_total_flops() == 4 * 8 * 2 * 81, counter.get_total_flops()
"""
CALL = "flashtile.attention(x, x, x); assert 'torch.utils.flop_counter' not in sys.modules"


@pytest.mark.parametrize(("before", "between"), [("", ""), (CALL, ""), ("", "flashtile.attention(x, x, x)")])
def test_counters_from_before_the_first_call(before: str, between: str) -> None:
    code = FIRST_CALL.format(before=before, between=between)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("grad", [False, True])
def test_names_in_a_profile(grad: bool) -> None:
    given, names = qkv(grad), []
    for _ in range(2):  # a new call, and a cached one
        with torch.set_grad_enabled(grad), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
            out = ft.attention(*given, scale=0.123)
            if grad:
                out.sum().backward()
        names.append({e.key: e.input_shapes for e in found.key_averages(group_by_input_shape=True)})
    for seen in names:
        if grad:
            assert {"Attention", "AttentionBackward"} <= {*seen}
        else:
            assert seen["flashtile::attention"] == [[2, 4, 9, 8], [2, 2, 11, 8], [2, 2, 11, 8]]
