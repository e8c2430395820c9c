"""attention(), attention_packed(), attention_backward(), merge(), probabilities(), standard_attention()."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np

from flashtile import calls, dispatch, partials
from flashtile.checks import layout as axes
from flashtile.checks.arguments import (
    as_array,
    check_library,
    check_numpy,
    check_rows,
    check_starts,
    check_unpacked,
    library_of,
)
from flashtile.checks.keywords import check_keywords
from flashtile.checks.merge import check_memory, check_merge
from flashtile.checks.numbers import check_flag
from flashtile.checks.shapes import check_gradients
from flashtile.checks.target import check_buffer, check_buffers, check_distinct, check_target
from flashtile.errors import ShapeError, UnsupportedError
from flashtile.host.address import address
from flashtile.host.arrays import add
from flashtile.numerics.dtypes import BFLOAT16, name_of, narrow, wider
from flashtile.options import DEFAULTS, INTEGER_ARRAYS, PLAIN_ARRAYS, documented
from flashtile.problem import describe
from flashtile.results import Grads
from flashtile.spans import limits_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flashtile.options import LayoutOptions, Options

X = TypeVar("X")  # a NumPy array or a torch tensor

_PACKED = frozenset(DEFAULTS) - {"layout", "key_padding_mask"}


@overload
def attention(
    q: X, k: X, v: X, *, return_lse: Literal[False] = False, backend: str = "auto", **options: Unpack[LayoutOptions]
) -> X: ...
@overload
def attention(
    q: X, k: X, v: X, *, return_lse: Literal[True], backend: str = "auto", **options: Unpack[LayoutOptions]
) -> tuple[X, X]: ...
@overload
def attention(
    q: X, k: X, v: X, *, return_lse: bool, backend: str = "auto", **options: Unpack[LayoutOptions]
) -> X | tuple[X, X]: ...
@documented
def attention(q: Any, k: Any, v: Any, *, return_lse: bool = False, backend: str = "auto", **options: Any) -> Any:
    """Compute softmax(q k^T * scale) v exactly, without ever storing the scores.

    q is (batch, heads, queries, dim), or (heads, queries, dim), or (queries, dim); k and v may have fewer heads (each
    serves a group of query heads), and v may have another width. NumPy arrays give a NumPy array; torch tensors give a
    tensor on their device, with gradients for q, k, v, bias and sink, and through the lse.

    return_lse  also return the log-sum-exp of each row's scores, shaped like the output without its last axis
    backend     "auto", or one that `flashtile doctor` lists
    {options}

    The order of operations on a score: scale, softcap, bias, alibi, mask, softmax, dropout. A row that sees no key
    gives output 0 and lse -inf. Masked values have no effect, NaN and Inf included.
    """
    changed: dict[str, Any] = {}  # options that differ from their defaults
    if options:
        try:
            for name, x in options.items():
                if x is not DEFAULTS[name]:
                    changed[name] = x
        except KeyError:
            check_keywords("attention", options, {*DEFAULTS, "return_lse", "backend"})
            raise
    if return_lse is not False:
        return_lse = check_flag("return_lse", return_lse)
    layout_unspecified = True
    if changed:
        if "layout" in changed or "key_padding_mask" in changed:
            if axes.is_bnhd(changed.get("layout")):
                return _attention_bnhd(q, k, v, return_lse, backend, changed)
            layout_unspecified = changed.pop("layout", None) is None
            if (padding := changed.pop("key_padding_mask", None)) is not None:
                changed["mask"] = axes.with_padding(q, k, changed.get("mask"), padding)
        if "spans" in changed:
            changed["spans"] = limits_of(changed["spans"])
    if q.__class__ is not np.ndarray and hasattr(q, "__torch_function__"):
        import flashtile.pytorch  # "from ... import" costs one more function call each time

        if "kv_lengths" in changed:
            changed["kv_lengths"] = as_array("kv_lengths", changed["kv_lengths"], q)
        return flashtile.pytorch.attention(q, k, v, backend, return_lse, changed, layout_unspecified)
    key = calls.key_of(q, k, v, backend, changed)
    runner = calls.KNOWN.get(key)
    if runner is None:
        runner, inputs = _prepare(q, k, v, backend, changed, key)
        if layout_unspecified:
            axes.warn_if_axes_swapped(q, k, bool(changed.get("causal")), 3)
    else:
        inputs = calls.inputs_of(q, k, v, changed)
    results = runner.forward(inputs, return_lse)
    return results if return_lse else results[0]


def _attention_bnhd(q: Any, k: Any, v: Any, return_lse: bool, backend: str, options: dict[str, Any]) -> Any:
    """Run attention() on arrays of (batch, length, heads, dim)."""
    try:
        q, k, v = axes.swap_axes(q, k, v)
    except RuntimeError:  # torch does not name the tensor
        axes.check_tensors(q=q, k=k, v=v)
        raise
    options["layout"] = "bhnd"
    results: Any = attention(q, k, v, return_lse=return_lse, backend=backend, **options)
    return axes.swap_results(results, return_lse)


def _prepare(q: Any, k: Any, v: Any, backend: str, options: dict[str, Any], key: Any = None) -> tuple[Any, Any]:
    """Return a runner for an uncached call of NumPy arrays, and its inputs."""
    options = _with_arrays(q, options)
    check_library(q, k=k, v=v, **{name: x for name, x in options.items() if name in PLAIN_ARRAYS})
    problem = describe(q, k, v, **options)
    runner, inputs = dispatch.choose(problem, backend).prepare(problem)
    calls.store(key, runner)
    return runner, inputs


def attention_packed(
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    *,
    return_lse: bool = False,
    backend: str = "auto",
    **options: Unpack[Options],
) -> Any:
    """Attention over packed (varlen) sequences: q is (total, heads, dim), sequence s has rows cu_q[s]:cu_q[s+1].

    Takes every option of attention(). mask and bias broadcast to (sequences, heads, longest q, longest k), indexed
    within each sequence; alibi may be (sequences, heads); kv_lengths is (sequences,). The lse is (total, heads).
    """
    check_keywords("attention_packed", options, _PACKED)
    return_lse = check_flag("return_lse", return_lse)
    check_starts(cu_q, cu_k)
    all_options = _with_arrays(q, _with_limits({"cu_q": cu_q, "cu_k": cu_k, **options}))
    if library_of(q) == "torch":
        from flashtile import pytorch

        return pytorch.attention(q, k, v, backend, return_lse, all_options)
    runner, inputs = _prepare(q, k, v, backend, all_options)
    out, lse = runner.forward(inputs, return_lse)
    return (out, lse) if return_lse else out


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    cu_q: Any = None,
    cu_k: Any = None,
    grad_dtype: Any = None,
    into: Grads | None = None,
    backend: str = "auto",
    **options: Unpack[LayoutOptions],
) -> Grads:
    """Compute gradients from out and lse of attention(..., return_lse=True) with the same options.

    For a loss on tensors, call .backward() on the output of attention() instead. This function is for keys in blocks:
    k and v may be a block of those that out and lse belong to, and the gradients are then the block's share, so that
    shares add up to the whole. Options count positions within the block; a sink goes with one of the blocks alone.

    dlse        the gradient of lse, if it has one
    cu_q, cu_k  the starts of packed sequences, as in attention_packed()
    grad_dtype  None for the dtype of q, or float32 (float64 for float64 inputs): gradients are not rounded to 16 bits
    into        Grads of buffers of that dtype, None for those to be allocated. Gradients are added to the buffers, and
                these are returned. Rows need contiguous elements; other strides may be any
    backend     as in attention(), which also explains the options

    Without grad_dtype, or with one of fewer bits, dbias and dsink have the dtypes of bias and sink.
    """
    check_keywords("attention_backward", options, DEFAULTS)
    all_options, bnhd = _resolve_layout(q, k, {"cu_q": cu_q, "cu_k": cu_k, **options})
    if bnhd:
        q, k, v, dout, out, lse, dlse = *axes.swap_axes(q, k, v, dout, out), *axes.swap_lse_axes(lse, dlse)
    arrays = {name: all_options.get(name) for name in PLAIN_ARRAYS}
    buffers = {f"into.{name}": x for name, x in check_buffers(into).items()}
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse}
    others = {name: x for name, x in given.items() if name != "q"}
    library = check_library(q, **{**others, **arrays, **buffers})
    swapped = into
    if bnhd and into is not None:
        swapped = into._replace(**dict(zip(("dq", "dk", "dv"), axes.swap_axes(*into[:3]), strict=True)))
    if library == "torch":
        from flashtile import pytorch

        grads = pytorch.attention_backward(given, backend, all_options, grad_dtype, swapped)
    else:
        grads = _backward(given, backend, all_options, grad_dtype, swapped)
    dq, dk, dv = axes.swap_axes(*grads[:3]) if bnhd else grads[:3]
    found = Grads(dq, dk, dv, *grads[3:])
    return found if into is None else Grads(*(x if y is None else y for x, y in zip(found, into, strict=True)))


def _backward(given: dict[str, Any], backend: str, options: dict[str, Any], grad_dtype: Any, into: Any) -> Grads:
    """Run attention_backward() on NumPy arrays. given: dout, q, k, v, out, lse and dlse."""
    dout, q, k, v, out, lse, dlse = given.values()
    problem = describe(q, k, v, **options)
    check_gradients(problem, dout, out, lse, dlse)
    inputs = {"dq": q, "dk": k, "dv": v, "dbias": options.get("bias"), "dsink": options.get("sink")}
    target = check_target(problem.dtype, grad_dtype, into, inputs)
    buffers = {name: x for name, x in zip(Grads._fields, target.into, strict=True) if x is not None}
    for name, x in buffers.items():
        if not x.flags.writeable:
            raise UnsupportedError(f"into.{name}: expected an array that can be written to, got a read-only one")
        check_buffer(name, x, x.strides, x.itemsize, address(x), x.itemsize)
    check_distinct({name: x for name, x in given.items() if x is not None}, buffers)
    runner, prepared = dispatch.choose(problem, backend).prepare(problem)
    grads = runner.backward(prepared, dout, out, lse, dlse, target=target)
    dbias, dsink = (
        _finished(x, buffer, inputs[name], target.dtype)
        for name, x, buffer in zip(Grads._fields[3:], grads[3:], target.into[3:], strict=True)
    )
    return Grads(*grads[:3], dbias, dsink)


def _finished(x: Any, buffer: Any, like: Any, dtype: str) -> Any:
    """Return a gradient shaped like `like`, in its dtype or this one, if that has more bits; or add it to a buffer."""
    if x is None or like is None or x is buffer:
        return x
    x = x.reshape(like.shape)
    return _rounded(x, wider(name_of(like.dtype), dtype), like.dtype) if buffer is None else add(buffer, x)


def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *more: Any, into: Any = None) -> tuple[Any, Any]:
    """Merge results of the same queries over disjoint keys into the exact result over their union.

    Takes two or more results, each as out and lse: merge(*a, *b, *c). (0, -inf) is the identity; the out of a row with
    lse -inf may be anything. Pass float32 outputs (out_dtype) to avoid rounding on the way, and all results at once:
    each separate merge rounds, and the error of a thousand merges in a row is ten times as large.

    into  (out, lse), written in one pass and returned: they may be views with a contiguous last axis, and may be
          out_a and lse_a themselves, which accumulates in place. Each has a dtype of its own: in float32 or float64
          they are not rounded to that of 16-bit results. Without gradients.
    """
    results: tuple[Any, ...] = (out_a, lse_a, out_b, lse_b, *more)
    if check_merge(results, into) == "torch":
        from flashtile import pytorch

        merged: tuple[Any, Any] = pytorch.merge(results, into)
        return merged
    out, lse = partials.empty_like(results) if into is None else into
    if into is not None:
        check_memory(results, (out, lse))
    partials.merge_arrays(results, (out, lse))
    return out, lse


def probabilities(q: Any, k: Any, *, rows: Any, **options: Unpack[LayoutOptions]) -> Any:
    """Compute the softmax weights of chosen query rows only, (batch, heads, rows, keys) in float64.

    For inspection, not for further computation: the weights are those before dropout. NumPy arrays only.
    """
    from flashtile.backends import reference

    check_unpacked(options)
    check_keywords("probabilities", options, {*DEFAULTS, "cu_q", "cu_k"})
    all_options, bnhd = _resolve_layout(q, k, dict(options))
    if bnhd:
        q, k = axes.swap_axes(q, k)
    check_numpy(q, all_options, k=k)
    problem = describe(q, k, k, **all_options)
    P = reference.probabilities(problem, check_rows(rows, problem.n_q))
    return problem.in_caller_layout(P)


def standard_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    return_lse: bool = False,
    cu_q: Any = None,
    cu_k: Any = None,
    **options: Unpack[LayoutOptions],
) -> Any:
    """Compute attention with all scores stored, in float64: the oracle. The result is float64 for any inputs."""
    from flashtile.backends import reference

    check_keywords("standard_attention", options, DEFAULTS)
    all_options, bnhd = _resolve_layout(q, k, {"cu_q": cu_q, "cu_k": cu_k, **options})
    if bnhd:
        q, k, v = axes.swap_axes(q, k, v)
    check_numpy(q, all_options, k=k, v=v)
    problem = describe(q, k, v, **all_options)
    out, lse = reference.forward(problem)
    out, lse = problem.in_caller_layout(out), problem.in_caller_layout(lse)
    if bnhd:
        out, lse = *axes.swap_axes(out), *axes.swap_lse_axes(lse)
    return (out, lse) if check_flag("return_lse", return_lse) else out


def _with_arrays(q: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Replace lists among the options by arrays."""
    for name in INTEGER_ARRAYS:
        if isinstance(options.get(name), list | tuple):
            options[name] = as_array(name, options[name], q)
    return options


def _with_limits(options: dict[str, Any]) -> dict[str, Any]:
    """Replace Spans by their limits."""
    if "spans" in options:
        options["spans"] = limits_of(options["spans"])
    return options


def _resolve_layout(q: Any, k: Any, options: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the options for (batch, heads, length, dim), and whether the arrays are (batch, length, heads, dim)."""
    layout, padding = options.pop("layout", None), options.pop("key_padding_mask", None)
    packed = options.get("cu_q") is not None or options.get("cu_k") is not None
    if packed and (layout is not None or padding is not None):
        name = "layout" if padding is None else "key_padding_mask"
        raise ShapeError(f"{name}: expected None, because sequences are packed (cu_q, cu_k), got another value")
    bnhd = axes.is_bnhd(layout)
    if padding is not None:
        q, k = axes.swap_axes(q, k) if bnhd else (q, k)
        options["mask"] = axes.with_padding(q, k, options.get("mask"), padding)
    return _with_arrays(q, _with_limits(options)), bnhd


def _rounded(x: Any, name: str, dtype: Any) -> Any:
    """Round x to the named dtype; bfloat16 results have the NumPy dtype of the caller's arrays."""
    x = narrow(x, name)
    return x.view(dtype) if x.dtype == BFLOAT16 else x
