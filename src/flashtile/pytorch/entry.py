"""attention() on tensors: autocast, then autograd, the operator or a runner."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from flashtile.checks.arguments import check_descale, check_library
from flashtile.checks.layout import warn_if_axes_swapped
from flashtile.options import PLAIN_ARRAYS
from flashtile.problem import describe
from flashtile.pytorch import (
    autocast,
    calls,
    context_parallel,
    eight_bits,
    flops,
    operators,
    run,
    sharding,
    subclasses,
)
from flashtile.pytorch.autograd import record, reject_forward_mode, reject_gradients
from flashtile.pytorch.interception import can_skip_dispatcher, context_parallel_mesh, skip_dynamo
from flashtile.pytorch.operands import operands, resolve_seed, tensor_names


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    backend: str,
    return_lse: bool,
    options: dict[str, Any],
    layout_unspecified: bool = False,
) -> Any:
    """Run flashtile.attention() or flashtile.attention_packed() on tensors. It may modify the options.

    layout_unspecified: the caller did not pass a layout.
    """
    if torch.are_deterministic_algorithms_enabled() and options.get("deterministic", False) is False:
        options["deterministic"] = True
    if torch.compiler.is_compiling():
        q, k, v, options = _normalize(q, k, v, options)
        subclasses.check_plain({"q": q, "k": k, "v": v, **{name: options[name] for name in tensor_names(options)}})
        # operands() checks the numbers, the operator's fake checks the tensors.
        out, lse = operators.ATTENTION(*operands(q, k, v, backend, options))
        return (out, lse) if return_lse else out
    if "seed" in options:
        options["seed"] = resolve_seed(options["seed"])
    entry = calls.lookup(q, k, v, backend, options)
    if entry is None:
        return _run_uncached(q, k, v, backend, return_lse, options, layout_unspecified)
    return _run_cached(entry, q, k, v, return_lse, options)


@skip_dynamo
def _run_cached(entry: calls.Entry, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, options: dict[str, Any]) -> Any:
    if entry.needs_gradients and torch.is_grad_enabled():
        results = _run_recorded(q, k, v, entry.backend, options, entry)
    else:
        run_forward: Any = entry.runner.forward
        if profiler._is_profiler_enabled:
            run_forward = _named(run_forward, q, k, v)
        results = run_forward(entry.inputs(q, k, v, options), return_lse)
    return results if return_lse else results[0]


def _named(run_forward: Any, *tensors: Tensor) -> Any:
    """The same function under the operator's name, which a profiler sees though the call skips the dispatcher."""

    def forward(*args: Any) -> Any:
        with torch._C._profiler._RecordFunctionFast("flashtile::attention", tensors, {}):
            return run_forward(*args)

    return forward


def _normalize(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Check that the arguments belong together, stack the factors, and apply autocast."""
    arrays = {name: x for name, x in options.items() if name in PLAIN_ARRAYS} if options else options
    check_library(q, k=k, v=v, **arrays)
    if options and options.get("descale") is not None:
        options["descale"] = eight_bits.stack_factors(check_descale(options["descale"], q), q.device)
    if autocast.enabled(q):
        options = autocast.cast(q.device.type, {"q": q, "k": k, "v": v, **options})
        q, k, v = options.pop("q"), options.pop("k"), options.pop("v")
    return q, k, v, options


@skip_dynamo
def _run_uncached(
    q: Tensor, k: Tensor, v: Tensor, backend: str, return_lse: bool, options: dict[str, Any], layout_unspecified: bool
) -> Any:
    """Run a call that is not in the cache. Calls that must go through the dispatcher never are."""
    if (mesh := context_parallel_mesh()) is not None:
        return context_parallel.attention(mesh, q, k, v, backend, return_lse, options)
    q, k, v, options = _normalize(q, k, v, options)
    names = tensor_names(options)
    tensors = [q, k, v, *(options[name] for name in names)]
    if not can_skip_dispatcher(tensors):
        named = dict(zip(("q", "k", "v", *names), tensors, strict=True))
        subclasses.check_plain(named)
        describe(q, k, v, **options)  # raise our error, not torch's
        flops.add_to_counters()
        split = sharding.check(named)
        if split is not None and any(split.by) and options.get("dropout"):

            def on_shard(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
                return attention(q, k, v, backend, True, options)

            out, lse = sharding.run_on_shards(split, named, options, on_shard)
        else:
            out, lse = operators.ATTENTION(*operands(q, k, v, backend, options))
        return (out, lse) if return_lse else out
    if layout_unspecified:
        warn_if_axes_swapped(q, k, bool(options.get("causal")), 5)
    reject_forward_mode(tensors)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
        results = _run_recorded(q, k, v, backend, options)
    else:
        run_forward = _named(run.forward, q, k, v) if profiler._is_profiler_enabled else run.forward
        results = run_forward(q, k, v, backend, options, return_lse)
    return results if return_lse else results[0]


@skip_dynamo
def _run_recorded(
    q: Tensor, k: Tensor, v: Tensor, backend: str, options: dict[str, Any], entry: calls.Entry | None = None
) -> tuple[Tensor, Tensor]:
    """Return output and lse, recorded for autograd."""
    if q.dtype is eight_bits.DTYPE or options:  # before computing anything
        slopes = options.get("alibi")
        reject_gradients(q, slopes is not None and slopes.requires_grad)
    if entry is None:
        entry, inputs = calls.find_or_prepare(q, k, v, backend, options)
        assert entry is not None, "8-bit tensors have no gradients"
    else:
        inputs = entry.inputs(q, k, v, options)
    results: tuple[Tensor, Tensor] = record(entry, inputs, q, k, v, *map(options.get, entry.names))
    return results
