"""attention() on tensors: autocast, then autograd or the operator, then the answer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.checks.arguments import check_descale, library
from flashtile.checks.layout import doubt
from flashtile.options import PLAIN_ARRAYS
from flashtile.problem import describe
from flashtile.pytorch import autocast, calls, eight_bits, operators, run, subclasses
from flashtile.pytorch.autograd import record, reject_forward_mode, reject_gradients
from flashtile.pytorch.interception import left_alone, reject_shards, unwatched
from flashtile.pytorch.operands import operands, settled_seed, tensors_among


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    backend: str,
    return_lse: bool,
    options: dict[str, Any],
    unsaid: bool = False,
) -> Any:
    """The torch side of flashtile.attention() and flashtile.attention_packed(). The options become its own.

    unsaid: the caller does not say in which layout the tensors are.
    """
    if torch.are_deterministic_algorithms_enabled() and options.get("deterministic", False) is False:
        options["deterministic"] = True
    if torch.compiler.is_compiling():
        q, k, v, options = _as_operators_take_them(q, k, v, options)
        subclasses.check_plain({"q": q, "k": k, "v": v, **{name: options[name] for name in tensors_among(options)}})
        # operands() checks the numbers, the operator's fake the tensors
        out, lse = operators.ATTENTION(*operands(q, k, v, backend, options))
        return (out, lse) if return_lse else out
    if "seed" in options:
        options["seed"] = settled_seed(options["seed"])
    entry = calls.recall(q, k, v, backend, options)
    if entry is None:
        return _for_the_first_time(q, k, v, backend, return_lse, options, unsaid)
    return _run(entry, q, k, v, return_lse, options)


@left_alone
def _run(entry: calls.Entry, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, options: dict[str, Any]) -> Any:
    """A call like one before."""
    if entry.needs_gradients and torch.is_grad_enabled():
        results = _recorded(q, k, v, entry.backend, options, entry)
    else:
        results = entry.runner.forward(entry.inputs(q, k, v, options), return_lse)
    return results if return_lse else results[0]


def _as_operators_take_them(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Arguments that belong together, factors in one tensor, everything cast as autocast has it."""
    arrays = {name: x for name, x in options.items() if name in PLAIN_ARRAYS} if options else options
    library(q, k=k, v=v, **arrays)
    if options and options.get("descale") is not None:
        options["descale"] = eight_bits.side_by_side(check_descale(options["descale"], q), q.device)
    if autocast.enabled(q):
        options = autocast.cast(q.device.type, {"q": q, "k": k, "v": v, **options})
        q, k, v = options.pop("q"), options.pop("k"), options.pop("v")
    return q, k, v, options


@left_alone
def _for_the_first_time(
    q: Tensor, k: Tensor, v: Tensor, backend: str, return_lse: bool, options: dict[str, Any], unsaid: bool
) -> Any:
    """Of a call that is not known; one that is watched never is."""
    reject_shards()
    q, k, v, options = _as_operators_take_them(q, k, v, options)
    names = tensors_among(options)
    tensors = [q, k, v, *(options[name] for name in names)]
    if not unwatched(tensors):
        subclasses.check_plain(dict(zip(("q", "k", "v", *names), tensors, strict=True)))
        describe(q, k, v, **options)  # a wrong call should meet our words before torch's
        out, lse = operators.ATTENTION(*operands(q, k, v, backend, options))
        return (out, lse) if return_lse else out
    if unsaid:
        doubt(q, k, bool(options.get("causal")), 5)
    reject_forward_mode(tensors)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
        results = _recorded(q, k, v, backend, options)
    else:
        results = run.forward(q, k, v, backend, options, return_lse)
    return results if return_lse else results[0]


@left_alone
def _recorded(
    q: Tensor, k: Tensor, v: Tensor, backend: str, options: dict[str, Any], entry: calls.Entry | None = None
) -> tuple[Tensor, Tensor]:
    """Output and lse for autograd, of a call that nobody else watches."""
    if q.dtype is eight_bits.DTYPE or options:  # before anything is computed
        slopes = options.get("alibi")
        reject_gradients(q, slopes is not None and slopes.requires_grad)
    if entry is None:
        entry, given = calls.find(q, k, v, backend, options)
        assert entry is not None, "8-bit tensors have no gradients"
    else:
        given = entry.inputs(q, k, v, options)
    results: tuple[Tensor, Tensor] = record(entry, given, q, k, v, *map(options.get, entry.names))
    return results
