"""Run a problem by every public function that takes it, and check each result against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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


single = partial(oracle.attention, kind=torch.float32)


@dataclass
class Exact:
    """The oracle's results in float64, and what the bounds on errors are made of."""

    results: Results
    in_float32: dict[str, float]  # the error of each result in float32
    of_delta: dict[str, float]  # the largest change of each gradient in with_random_delta()


def exact(p: RandomProblem) -> Exact:
    found = results_of(p, oracle.attention, torch.float64)
    changes = [results_of(moved, single, torch.float32) for moved in with_random_delta(p, found["out"])]
    of_delta = {name: max(largest(x[name]) for x in changes) for name in found if name not in ("out", "lse")}
    return Exact(found, errors_in_float32(p, found), of_delta)


def errors_in_float32(p: RandomProblem, wanted: Results, samples: int = 3) -> dict[str, float]:
    """The largest error of each of the oracle's results in float32, with the columns of a row in several orders.

    In one order, a result of one number, such as the gradient of a bias for all pairs, can have no error by chance.
    """
    random, errors = torch.Generator().manual_seed(0), dict.fromkeys(wanted, 0.0)
    for _ in range(samples):
        of_q, of_v = (torch.randperm(x.shape[-1], generator=random) for x in (p.q, p.v))
        shuffled = replace(p, q=p.q[..., of_q], k=p.k[..., of_q], v=p.v[..., of_v], dout=p.dout[..., of_v])
        columns = {"dq": of_q, "dk": of_q, "dv": of_v, "out": of_v}
        for name, x in results_of(shuffled, single, torch.float32).items():
            same = wanted[name][..., columns[name]] if name in columns else wanted[name]
            errors[name] = max(errors[name], distance(x, same))
    return errors


def with_random_delta(p: RandomProblem, out: Tensor, samples: int = 3) -> list[RandomProblem]:
    """Problems whose gradients are the changes that errors of D = rowsum(dO * out) - dL (eq. 12) make, per rounding.

    D enters the gradients as -dL does. The terms of its sum are rounded independently, in the stored output or in the
    sum, so its error in a row is about the root of the sum of their squares times a rounding, with either sign. The
    results' sizes do not show how much that is: where one key has all the weight of a row, dP - D is 0, but its error
    is not, and is multiplied by q and k. With dropout, D is 1 / (1 - p) times as large. Measured errors are less than
    half the bound with half this size.
    """
    size = (p.dout.double() * out).norm(dim=-1) / 2
    random = torch.Generator().manual_seed(0)
    signs = (torch.randint(0, 2, size.shape, generator=random) * 2 - 1 for _ in range(samples))
    return [replace(p, dout=torch.zeros_like(p.dout), dlse=size * sign) for sign in signs]


def largest(x: Tensor) -> float:
    """The largest finite absolute value."""
    return float(x[x.isfinite()].abs().max()) if x.isfinite().any() else 0.0


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


def check(p: RandomProblem, found: Results, wanted: Exact) -> None:
    """Check each result against the oracle, within the rounding of its dtype."""
    assert found.keys() == wanted.results.keys()
    rounding = {torch.float64: 1e-12, torch.float32: 2e-6}.get(p.q.dtype, 2 * torch.finfo(p.q.dtype).eps)
    sizes = {name: largest(x) for name, x in wanted.results.items()}
    scale = max(
        1.0, *(x for name, x in sizes.items() if name != "lse")
    )  # terms that cancel are as large as the other results
    for name, x in wanted.results.items():
        error, size = distance(found[name], x), max(1.0, sizes[name]) if name == "lse" else scale
        size += wanted.of_delta.get(name, 0.0)
        of_weights = wanted.in_float32["lse"] * scale  # an error of the lse is a relative error of a row's weights
        in_float32 = 10 * wanted.in_float32[name] + (0 if name == "lse" else of_weights)
        bound = (0 if p.q.dtype is torch.float64 else in_float32) + rounding * size
        assert error <= bound, f"{name}: {error:.3g} from the oracle, expected at most {bound:.3g}"
