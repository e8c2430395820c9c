"""Run a problem by every public function that takes it, and check each result against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashtile as ft
from flashtile.pytorch.bridge import to_numpy, to_torch
from tests.fuzz import oracle
from tests.fuzz.problems import RandomProblem

Results = dict[str, Tensor]
GRADIENTS = ("q", "k", "v", "bias", "sink")


def differentiable(p: RandomProblem, kind: torch.dtype | None = None) -> dict[str, Tensor]:
    """The inputs with gradients, as leaf tensors of the same layout; in another dtype for the oracle."""
    given = {name: getattr(p, name, None) if name in "qkv" else p.options.get(name) for name in GRADIENTS}
    found = {name: x for name, x in given.items() if x is not None}
    return {name: (x.detach() if kind is None else x.detach().to(kind)).requires_grad_() for name, x in found.items()}


def results_of(
    p: RandomProblem, call: Callable[..., tuple[Tensor, Tensor]], kind: torch.dtype | None = None
) -> Results:
    """Output, lse and gradients of a call on tensors."""
    x = differentiable(p, kind)
    out, lse = call(x["q"], x["k"], x["v"], **p.options | {name: x[name] for name in ("bias", "sink") if name in x})
    seen = torch.isfinite(lse)
    loss = (out * p.dout.to(out.dtype)).sum() + (lse.masked_fill(~seen, 0) * p.dlse.to(lse.dtype)).sum()
    loss.backward()
    grads = {f"d{name}": torch.zeros_like(each) if each.grad is None else each.grad for name, each in x.items()}
    return {"out": out.detach(), "lse": lse.detach(), **grads}


def exact(p: RandomProblem) -> tuple[Results, dict[str, float]]:
    """The oracle's results in float64, and the errors of its results in float32."""
    found, single = (
        results_of(p, partial(oracle.attention, kind=kind), kind) for kind in (torch.float64, torch.float32)
    )
    return found, {name: distance(single[name], x) for name, x in found.items()}


def distance(x: Tensor, y: Tensor) -> float:
    """The largest difference; infinite where a value is not finite and the two are not the same."""
    x, y = x.double().reshape(y.shape), y.double()
    apart = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs())
    return float(apart.nan_to_num(nan=torch.inf).max()) if apart.numel() else 0.0


def with_numpy(p: RandomProblem, **more: Any) -> Results:
    """attention() and attention_backward() on NumPy arrays."""
    q, k, v, dout, dlse = (to_numpy(x) for x in (p.q, p.k, p.v, p.dout, p.dlse))
    options = {name: to_numpy(x) if isinstance(x, Tensor) else x for name, x in p.options.items()} | more
    out, lse = ft.attention(q, k, v, return_lse=True, **options)
    grads = ft.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    found = {"out": out, "lse": lse, **grads._asdict()}
    return {name: to_torch(x) for name, x in found.items() if x is not None}


def with_tensors(p: RandomProblem, **more: Any) -> Results:
    return results_of(p, lambda q, k, v, **o: ft.attention(q, k, v, return_lse=True, **o, **more))


def with_packing(p: RandomProblem, **more: Any) -> Results:
    """attention_packed() on the sequences, packed."""
    (batch, _, n_q, _), n_k = p.q.shape, p.k.shape[2]

    def call(q: Tensor, k: Tensor, v: Tensor, **o: Any) -> tuple[Tensor, Tensor]:
        rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        starts = [torch.arange(batch + 1) * n for n in (n_q, n_k)]
        out, lse = ft.attention_packed(*rows, *starts, return_lse=True, **o, **more)
        return out.unflatten(0, (batch, n_q)).transpose(1, 2), lse.unflatten(0, (batch, n_q)).transpose(1, 2)

    return results_of(p, call)


ENTRY_POINTS = {"numpy": with_numpy, "tensors": with_tensors, "packed": with_packing}


def check(p: RandomProblem, found: Results, wanted: Results, single: dict[str, float]) -> None:
    """Check each result against the oracle, within the rounding of its dtype."""
    assert found.keys() == wanted.keys()
    rounding = {torch.float64: 1e-12, torch.float32: 2e-6}.get(p.q.dtype, 8 * torch.finfo(p.q.dtype).eps)
    largest = {name: float(x[x.isfinite()].abs().max()) if x.isfinite().any() else 0.0 for name, x in wanted.items()}
    scale = max(
        1.0, *(x for name, x in largest.items() if name != "lse")
    )  # terms that cancel are as large as the other results
    for name, x in wanted.items():
        error, size = distance(found[name], x), max(1.0, largest[name]) if name == "lse" else scale
        bound = (0 if p.q.dtype is torch.float64 else 10 * single[name]) + rounding * size
        assert error <= bound, f"{name}: {error:.3g} from the oracle, expected at most {bound:.3g}"
