"""Formulas of the operators for torch's FlopCounterMode, by its convention: every pair counts, masked or not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from flashtile.pytorch.operands import Operands
from flashtile.pytorch.operators import ATTENTION, ATTENTION_BACKWARD

MODULE = "torch.utils.flop_counter"  # it imports Triton, so it is not imported here


def add_to_counters() -> None:
    """Add the formulas to torch's registry and to active counters, each of which has a copy of it."""
    if (module := sys.modules.get(MODULE)) is None:
        return
    registries: list[Any] = [module.flop_registry]
    for mode in _get_current_dispatch_mode_stack():
        registries.append(getattr(getattr(mode, "counter", mode), "flop_registry", {}))
    for registry in registries:
        for operator, formula in FORMULAS.items():
            registry.setdefault(operator.overloadpacket, formula)


def _forward(*args: Any, **_: Any) -> int:
    call = Operands(*args)
    return of_forward(_pairs(call), call)


def _backward(dout: Any, dlse: Any, out: Any, lse: Any, bias_grad: Any, *args: Any, **_: Any) -> int:
    call = Operands(*args)
    return of_backward(_pairs(call), call)


def of_forward(pairs: int, call: Operands) -> int:
    """Two products: q k^T and P v."""
    return 2 * pairs * int(call.q.shape[-1] + call.v.shape[-1])


def of_backward(pairs: int, call: Operands) -> int:
    """Five products: the scores again, dP and dV, dQ and dK."""
    return 2 * pairs * int(3 * call.q.shape[-1] + 2 * call.v.shape[-1])


def _pairs(call: Operands) -> int:
    """Queries times keys of every sequence and head. Starts without values count as one sequence, the worst case."""
    q, k = call.q.shape, call.k.shape
    if call.cu_q is None:
        return int(prod(q[:-1]) * k[-2])
    lengths = _lengths(call.cu_q, q[0]), _lengths(call.cu_k, k[0])
    return int(q[1] * sum(a * b for a, b in zip(*lengths, strict=True)))


def _lengths(starts: Tensor, total: int) -> list[int]:
    if type(starts) is not Tensor or starts.is_meta:
        return [total]
    return starts.diff().tolist()


FORMULAS: dict[Any, Callable[..., int]] = {ATTENTION: _forward, ATTENTION_BACKWARD: _backward}  # by operator
