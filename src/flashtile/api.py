"""attention(), attention_packed(), attention_backward(), merge(), probabilities(), standard_attention()."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from flashtile import calls, dispatch
from flashtile.band import Band
from flashtile.checks import layout as axes
from flashtile.checks.arguments import (
    ARRAYS,
    check_flag,
    check_merge,
    check_numpy,
    check_rows,
    check_starts,
    check_unpacked,
    library,
    library_of,
    listed,
)
from flashtile.checks.keywords import check_keywords
from flashtile.errors import ShapeError, UnsupportedError
from flashtile.numerics.dtypes import BFLOAT16, accumulator, name_of, narrow, widen
from flashtile.numerics.softmax import merge_normalized
from flashtile.problem import Problem, check_gradients, describe
from flashtile.results import Grads

if TYPE_CHECKING:
    from typing_extensions import Never, Unpack


_NO_SEED = 0


class Options(TypedDict, total=False):
    """What every function here takes besides its arrays; attention() says what each one means."""

    causal: bool
    window: tuple[int | None, int | None] | None
    band: Band | None
    mask: Any
    bias: Any
    alibi: Any
    softcap: float
    sink: Any
    scale: float | None
    dropout: float
    seed: Any
    kv_lengths: Any
    descale: Any
    out_dtype: Any
    deterministic: bool
    threads: int | None


class Laid(Options, total=False):
    """The same, and what is said of axes and of padding by those who have a batch."""

    layout: str | None
    key_padding_mask: Any


_PACKED, _LAID = frozenset(Options.__annotations__), frozenset(Laid.__annotations__)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    band: Band | None = None,
    mask: Any = None,
    bias: Any = None,
    alibi: Any = None,
    softcap: float = 0.0,
    sink: Any = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Any = 0,
    kv_lengths: Any = None,
    descale: Any = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    backend: str = "auto",
    deterministic: bool = False,
    threads: int | None = None,
    layout: str | None = None,
    key_padding_mask: Any = None,
    **unknown: Never,
) -> Any:
    """softmax(q k^T * scale) v, exactly, without ever storing the scores.

    q is (batch, heads, queries, dim), or (heads, queries, dim), or (queries, dim); k and v may have fewer heads (each
    serves a group of query heads) and v another width. NumPy arrays give a NumPy array; torch tensors give a tensor on
    their device, with gradients for q, k, v, bias and sink, and through the lse.

    causal       the last query sees every key, the one before it all but the last, and so on
    window       (left, right): how many keys before and after its own position a query sees; None is no limit
    band         the general form, a flashtile.Band: query i sees key j iff -left <= j - (i + offset) <= right
    mask         boolean, True = may attend, broadcast to (batch, heads, queries, keys)
    bias         added to the scaled scores, broadcast likewise
    alibi        slopes, (heads,) or (batch, heads): adds -slope * |i + offset - j|
    softcap      c > 0: scores become c * tanh(score / c)
    sink         (heads,): one more logit a row, which takes probability and gives no value
    scale        dim ** -0.5 unless given
    dropout      probability of dropping a weight
    seed         decides which weights are dropped, the same on every backend: give another one at every training step.
                 64 bits: a number, or an int64 tensor of one, whose negative values stand for the large numbers of the
                 same bits. Of a tensor on a GPU only the kernels read the value: for torch.compile and CUDA graphs
    kv_lengths   (batch,): how many keys of each sequence are in use; causal and window align to their end
    key_padding_mask  boolean, (batch, keys), True = may be attended, for keys that all queries of a sequence ignore.
                 (That of torch.nn.MultiheadAttention means the opposite.) It moves nothing: causal and window align to
                 the last key there is, padded or not
    layout       "bhnd", as above, or "bnhd": q, k, v and the output are (batch, length, heads, dim), or
                 (length, heads, dim), and so is the lse without its last axis; mask and bias are as ever
    descale      of torch.float8_e4m3fn inputs, the factors of q, k and v: numbers, or float32 tensors of shape () or
                 (batch, kv_heads); what counts is q * descale[0], and so on. Such inputs have no gradient
    return_lse   also return the log-sum-exp of each row's scores, shaped like the output without its last axis
    out_dtype    float32 keeps the partial result of 16-bit inputs unrounded, for merge(); 8-bit ones give bfloat16
                 unless this says float16 or float32
    backend      "auto", or one of those that `flashtile doctor` lists
    deterministic  the same bits on every run, also where that costs time; torch.use_deterministic_algorithms() asks too
    threads      how many CPU threads to use at most

    The order of operations on a score: scale, softcap, bias, alibi, mask, softmax, dropout. A row that sees no key
    gives output 0 and lse -inf. What is masked has no effect, NaN and Inf included.
    """
    if unknown:
        check_keywords("attention", unknown, {*_LAID, "return_lse", "backend"})
    options: dict[str, Any] = {}  # only what is given: every look through them counts in a small call
    if causal is not False:
        options["causal"] = causal
    if window is not None:
        options["window"] = window
    if band is not None:
        options["band"] = band
    if mask is not None:
        options["mask"] = mask
    if bias is not None:
        options["bias"] = bias
    if alibi is not None:
        options["alibi"] = alibi
    if softcap.__class__ is not float or softcap:
        options["softcap"] = softcap
    if sink is not None:
        options["sink"] = sink
    if scale is not None:
        options["scale"] = scale
    if dropout.__class__ is not float or dropout:
        options["dropout"] = dropout
    if seed is not _NO_SEED:  # it may be a number of which torch.compile cannot say whether it is 0
        options["seed"] = seed
    if kv_lengths is not None:
        options["kv_lengths"] = listed("kv_lengths", kv_lengths, q)
    if descale is not None:
        options["descale"] = descale
    if out_dtype is not None:
        options["out_dtype"] = out_dtype
    if deterministic is not False:
        options["deterministic"] = deterministic
    if threads is not None:
        options["threads"] = threads
    if return_lse is not False:
        return_lse = check_flag("return_lse", return_lse)
    if layout is not None and layout != "bhnd" and axes.rows_first(layout):
        try:
            q, k, v = axes.swapped(q, k, v)
        except RuntimeError:  # torch's, which does not say of which
            axes.check_held(q=q, k=k, v=v)
            raise
        more: dict[str, Any] = {"backend": backend, "layout": "bhnd", "key_padding_mask": key_padding_mask}
        return axes.result(attention(q, k, v, return_lse=return_lse, **more, **options), return_lse)
    if key_padding_mask is not None:
        options["mask"] = axes.with_padding(q, k, mask, key_padding_mask)
    if library_of(q) == "torch":
        import flashtile.pytorch  # not "from": that is one call more each time

        return flashtile.pytorch.attention(q, k, v, backend, return_lse, options, layout is None)
    key = calls.key_of(q, k, v, backend, options)
    found = None if key is None else calls.attention(key, q, k, v, return_lse, options)
    if found is not None:
        return found
    library(q, k=k, v=v, **{name: x for name, x in options.items() if name in ARRAYS})
    problem = describe(q, k, v, **options)
    if layout is None:
        axes.doubt(q, k, causal, 3)
    return _numpy_forward(problem, backend, return_lse, key)


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
    """attention() over sequences laid back to back: q is (total, heads, dim), sequence s has rows cu_q[s]:cu_q[s+1].

    Takes every option of attention(). mask and bias broadcast to (sequences, heads, longest q, longest k), counted
    within each sequence; alibi may be (sequences, heads); kv_lengths is (sequences,). The lse is (total, heads).
    """
    check_keywords("attention_packed", options, _PACKED)
    return_lse = check_flag("return_lse", return_lse)
    check_starts(cu_q, cu_k)
    given = _with_arrays(q, {"cu_q": cu_q, "cu_k": cu_k, **options})
    if library_of(q) == "torch":
        from flashtile import pytorch

        return pytorch.attention(q, k, v, backend, return_lse, given)
    library(q, k=k, v=v, cu_q=given["cu_q"], cu_k=given["cu_k"], **{name: given.get(name) for name in ARRAYS})
    return _numpy_forward(describe(q, k, v, **given), backend, return_lse)


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
    backend: str = "auto",
    **options: Unpack[Laid],
) -> Grads:
    """Gradients for NumPy users: out and lse are what attention(..., return_lse=True) gave for the same options.

    Takes cu_q and cu_k for packed sequences. torch users call .backward() on the output of attention() instead.
    """
    check_keywords("attention_backward", options, _LAID)
    given, rows_first = _unlaid(q, k, {"cu_q": cu_q, "cu_k": cu_k, **options})
    if rows_first:
        q, k, v, dout, out, lse, dlse = *axes.swapped(q, k, v, dout, out), *axes.swapped_lse(lse, dlse)
    arrays = {name: given.get(name) for name in ("cu_q", "cu_k", *ARRAYS)}
    if library(q, k=k, v=v, dout=dout, out=out, lse=lse, dlse=dlse, **arrays) == "torch":
        raise UnsupportedError(
            "q: expected NumPy arrays; torch tensors have gradients through autograd, call backward()"
        )
    problem = describe(q, k, v, **given)
    dout, out, lse, dlse = check_gradients(problem, dout, out, lse, dlse)
    grads = dispatch.choose(problem, backend).backward(problem, dout, out, lse, dlse)

    dq, dk, dv = (problem.as_given(_rounded(x, problem.dtype, problem.q.dtype)) for x in grads[:3])
    if rows_first:
        dq, dk, dv = axes.swapped(dq, dk, dv)
    dbias, dsink = (
        None if x is None or like is None else _rounded(x, name_of(like.dtype), like.dtype).reshape(like.shape)
        for x, like in ((grads.dbias, options.get("bias")), (grads.dsink, options.get("sink")))
    )
    return Grads(dq, dk, dv, dbias, dsink)


def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *more: Any) -> tuple[Any, Any]:
    """Results of the same queries over disjoint keys -> the result over their union, exactly.

    Two or any number, each as out and lse: merge(*a, *b, *c). (0, -inf) is the identity. Give it float32 outputs
    (out_dtype) to lose nothing to rounding on the way, and many results at once: merged one after the other, each step
    rounds, and a thousand of them come ten times as far from the truth.
    """
    results = (out_a, lse_a, out_b, lse_b, *more)
    if check_merge(*results) == "torch":
        from flashtile import pytorch

        merged: tuple[Any, Any] = pytorch.merge(*results)
        return merged
    wide = [widen(x, accumulator(name_of(x.dtype))) for x in results]
    out, lse = merge_normalized(*wide)
    return _rounded(out, name_of(out_a.dtype), out_a.dtype), narrow(lse, np.result_type(*wide[1::2]).name)


def probabilities(q: Any, k: Any, *, rows: Any, **options: Unpack[Laid]) -> Any:
    """The softmax weights of chosen query rows, (batch, heads, rows, keys) in float64; nothing else is built.

    For looking at attention, not for computing with it: weights are before dropout. NumPy arrays only.
    """
    from flashtile.backends import reference

    check_unpacked(options)
    check_keywords("probabilities", options, {*_LAID, "cu_q", "cu_k"})
    given, rows_first = _unlaid(q, k, dict(options))
    if rows_first:
        q, k = axes.swapped(q, k)
    check_numpy(q, given, k=k)
    problem = describe(q, k, k, **given)
    P = reference.probabilities(problem, check_rows(rows, problem.n_q))
    return problem.as_given(P)


def standard_attention(
    q: Any, k: Any, v: Any, *, return_lse: bool = False, cu_q: Any = None, cu_k: Any = None, **options: Unpack[Laid]
) -> Any:
    """The oracle: scores stored whole, everything in float64, and a float64 result whatever the inputs."""
    from flashtile.backends import reference

    check_keywords("standard_attention", options, _LAID)
    given, rows_first = _unlaid(q, k, {"cu_q": cu_q, "cu_k": cu_k, **options})
    if rows_first:
        q, k, v = axes.swapped(q, k, v)
    check_numpy(q, given, k=k, v=v, cu_q=given["cu_q"], cu_k=given["cu_k"])
    problem = describe(q, k, v, **given)
    out, lse = reference.forward(problem)
    out, lse = problem.as_given(out), problem.as_given(lse)
    if rows_first:
        out, lse = *axes.swapped(out), *axes.swapped_lse(lse)
    return (out, lse) if check_flag("return_lse", return_lse) else out


def _numpy_forward(problem: Problem, backend: str, return_lse: bool, key: Any = None) -> Any:
    row = dispatch.choose(problem, backend)
    if key is not None:
        calls.remember(key, problem, row)
    out, lse = row.forward(problem)
    out = problem.as_given(_rounded(out, problem.out_dtype, problem.q.dtype))
    return (out, problem.as_given(narrow(lse, problem.accumulator))) if return_lse else out


def _with_arrays(q: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options with arrays in place of lists."""
    for name in ("cu_q", "cu_k", "kv_lengths"):
        if isinstance(options.get(name), list | tuple):
            options[name] = listed(name, options[name], q)
    return options


def _unlaid(q: Any, k: Any, options: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The options of a call of (batch, heads, length, dim), and whether its arrays have to become that first."""
    layout, padding = options.pop("layout", None), options.pop("key_padding_mask", None)
    packed = options.get("cu_q") is not None or options.get("cu_k") is not None
    if packed and (layout is not None or padding is not None):
        name = "layout" if padding is None else "key_padding_mask"
        raise ShapeError(f"{name}: expected None, because sequences are packed (cu_q, cu_k), got another value")
    rows_first = axes.rows_first(layout)
    if padding is not None:
        q, k = axes.swapped(q, k) if rows_first else (q, k)
        options["mask"] = axes.with_padding(q, k, options.get("mask"), padding)
    return _with_arrays(q, options), rows_first


def _rounded(x: Any, name: str, carrier: Any) -> Any:
    """x in the named dtype; bfloat16 in the carrier that the caller's arrays use."""
    x = narrow(x, name)
    return x.view(carrier) if x.dtype == BFLOAT16 else x
