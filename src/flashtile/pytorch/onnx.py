"""ONNX: table() translates the operator to Attention of opset 23, for torch.onnx.export(..., dynamo=True).

Attention adds its mask after softcap, as we do. It aligns is_causal with the first key, and has no bands, lengths or
sinks: these become a mask, and a sink one more key of zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, reduce
from typing import Any

from flashtile.band import FAR
from flashtile.checks.numbers import check_integer
from flashtile.checks.options import combine_bands
from flashtile.errors import UnsupportedError
from flashtile.pytorch.operands import Operands
from flashtile.pytorch.operators import ATTENTION

_FIRST, _WITH_ATTENTION = 18, 23  # opsets
_LEAST = 2.0**-126  # a normal float32
_FLOAT, _INT32, _INT64, _BOOL = 1, 6, 7, 9  # ONNX's numbers of types
_UNSUPPORTED = {
    "dropout": "0, because ONNX has no dropout with a seed",
    "cu_q": "None, because ONNX has no packed sequences; spans in attention() keep documents apart",
    "descale": "None, because ONNX has no attention of 8-bit floats",
}


def table(opset: int = _WITH_ATTENTION) -> dict[Any, Callable[..., Any]]:
    """Return what torch.onnx.export(..., dynamo=True, opset_version=opset, custom_translation_table=...) takes.

    From opset 23 on, attention() becomes Attention; before, MatMul and Softmax, which store all scores.
    """
    opset = check_integer("opset", opset, _FIRST, None)

    def attention(*arguments: Any) -> tuple[Any, Any]:
        from onnxscript.values import Opset

        call = _Call(Opset("", opset), Operands(*arguments))
        return (call.attention() if opset >= _WITH_ATTENTION else call.matmuls()), call.lse()

    return {ATTENTION: attention}


class _Call:
    """A call of the operator as nodes of a graph, which `op` makes. torch removes those that nothing uses."""

    def __init__(self, op: Any, call: Operands) -> None:
        _check(call)
        self.op, self.call = op, call
        self.lead = [*range(4 - len(call.q.shape))]
        qkv = [op.Unsqueeze(x, self.lead) if self.lead else x for x in (call.q, call.k, call.v)]
        if call.out_dtype is not None and call.q.dtype.itemsize < 4:
            qkv = [op.Cast(x, to=_FLOAT) for x in qkv]
        self.n_q, self.n_k = (op.Shape(x, start=2, end=3) for x in qkv[:2])
        options = call._replace(seed_tensor=None, seed=0).options()
        self.band, self.align_end = combine_bands(call.causal, options.get("window"), options.get("band"))
        self.scale = float(call.q.shape[-1]) ** -0.5 if call.scale is None else call.scale
        if call.sink is not None:  # a key of zeros, whose score is that of the mask
            qkv[1:] = (op.Pad(x, [0, 0, 0, 0, 0, 0, 1, 0]) for x in qkv[1:])
        self.q, self.k, self.v = qkv

    def attention(self) -> Any:
        """The output, by Attention."""
        causal, q, scale = self._is_causal(), self.q, self.scale
        mask = None if causal else self._mask
        if scale < _LEAST:  # Attention takes its root, in float32
            factor = -1.0 if scale <= -_LEAST else scale / _LEAST
            q, scale = self.op.Mul(q, factor), max(-scale, _LEAST)
        out, *_ = self.op.Attention(
            q, self.k, self.v, mask, is_causal=int(causal), scale=scale, softcap=self.call.softcap
        )
        return self._result(out, 0.0)

    def matmuls(self) -> Any:
        """The output, by MatMul and Softmax."""
        op = self.op
        weights = op.Softmax(self._scores, axis=-1)
        out = op.MatMul(weights, self._of_query_heads(op.CastLike(self.v, weights), self.call.v))
        return self._result(op.CastLike(out, self.q), 0.0)

    def lse(self) -> Any:
        """The log-sum-exp of the scores."""
        return self.op.Squeeze(self._result(self.op.ReduceLogSumExp(self._scores, [-1]), -float("inf")), [-1])

    def _result(self, x: Any, of_empty_rows: float) -> Any:
        """A result with this value in rows that see no key, and with the axes of q."""
        op = self.op
        if self._has_empty_rows():
            x = op.Where(self._any(self._visible, 1), x, op.CastLike(op.Constant(value_float=of_empty_rows), x))
        return op.Squeeze(x, self.lead) if self.lead else x

    def _is_causal(self) -> bool:
        """Whether the pairs that are hidden are those of ONNX's is_causal, which aligns the first query and key."""
        call, band = self.call, self.band
        first_aligned = call.q.shape[-2] == call.k.shape[-2] if self.align_end else band.offset == 0
        others = (call.spans, call.mask, call.bias, call.alibi, call.sink, call.kv_lengths)
        return band.left >= FAR and band.right == 0 and bool(first_aligned) and all(x is None for x in others)

    def _has_empty_rows(self) -> bool:
        """Whether a row may see no key, as far as the graph knows."""
        if self._visible is None or self.call.sink is not None or self._is_causal():
            return False
        n_q, n_k = self.call.q.shape[-2], self.call.k.shape[-2]
        enough = n_q == n_k or (isinstance(n_q, int) and isinstance(n_k, int) and n_q <= n_k)
        return bool(self._restrictions) or not (self.align_end and enough)

    @cached_property
    def _keys(self) -> Any:
        """0, 1, ... for all keys."""
        return self.op.Range(0, self.op.Squeeze(self.n_k), 1)

    @cached_property
    def _length(self) -> Any:
        """How many keys are in use: one number, or one for each sequence."""
        if self.call.kv_lengths is None:
            return self.n_k
        return self.op.Unsqueeze(self.op.Cast(self.call.kv_lengths, to=_INT64), [1, 2, 3])

    @cached_property
    def _distance(self) -> Any:
        """How far each key is after the one that its query is aligned with."""
        op = self.op
        queries = op.Unsqueeze(op.Range(0, op.Squeeze(self.n_q), 1), [1])
        offset = op.Sub(self._length, self.n_q) if self.align_end else op.Constant(value_int=self.band.offset)
        return op.Sub(self._keys, op.Add(queries, offset))

    @cached_property
    def _restrictions(self) -> list[Any]:
        """Where pairs may be visible, by each option but the band."""
        op, call = self.op, self.call
        found = [] if call.mask is None else [call.mask]
        if call.kv_lengths is not None:
            found.append(op.Less(self._keys, self._length))
        if call.spans is not None:  # (batch, heads, queries, spans, 2)
            begin, end = (op.Unsqueeze(op.Gather(call.spans, n, axis=-1), [-2]) for n in (0, 1))
            key = op.Unsqueeze(op.Cast(self._keys, to=_INT32), [-1])
            found.append(self._any(op.And(op.LessOrEqual(begin, key), op.Less(key, end)), 0))
        return found

    @cached_property
    def _visible(self) -> Any:
        """Where pairs are visible, or None: everywhere."""
        op = self.op
        found = list(self._restrictions)
        if self.band.left < FAR:
            found.append(op.GreaterOrEqual(self._distance, -self.band.left))
        if self.band.right < FAR:
            found.append(op.LessOrEqual(self._distance, self.band.right))
        return op.Expand(reduce(op.And, found), op.Concat(self.n_q, self.n_k, axis=0)) if found else None

    @cached_property
    def _added(self) -> Any:
        """What is added to the scores of visible pairs, or None."""
        op, call = self.op, self.call
        found = [] if call.bias is None else [op.CastLike(call.bias, self.q)]
        if call.alibi is not None:
            slopes = op.Unsqueeze(op.CastLike(call.alibi, self.q), [-2, -1])
            found.append(op.Neg(op.Mul(slopes, op.CastLike(op.Abs(self._distance), self.q))))
        if call.sink is not None and not found:
            found.append(op.CastLike(op.Constant(value_float=0.0), self.q))
        return op.Expand(reduce(op.Add, found), op.Concat(self.n_q, self.n_k, axis=0)) if found else None

    @cached_property
    def _mask(self) -> Any:
        """The mask: booleans, or what is added to the scores; None if there is none."""
        op, added, visible = self.op, self._added, self._visible
        if added is None:
            return visible
        if visible is not None:
            added = op.Where(visible, added, op.CastLike(op.Constant(value_float=-float("inf")), added))
        if self.call.sink is None:
            return added
        sink = op.Unsqueeze(op.CastLike(self.call.sink, self.q), [0, 2, 3])
        rows = op.Concat(op.Shape(self.q, start=0, end=3), op.Constant(value_ints=[1]), axis=0)
        column = op.Expand(sink, rows)
        return op.Concat(op.Add(added, op.Expand(op.CastLike(0.0, column), rows)), column, axis=-1)

    @cached_property
    def _scores(self) -> Any:
        """The scores, in float32 at least, -inf where masked."""
        op = self.op
        q, k = (op.Cast(x, to=_FLOAT) if self.call.q.dtype.itemsize < 4 else x for x in (self.q, self.k))
        found = op.Mul(op.MatMul(q, op.Transpose(self._of_query_heads(k, self.call.k), perm=[0, 1, 3, 2])), self.scale)
        if self.call.softcap:
            found = op.Mul(op.Tanh(op.Div(found, self.call.softcap)), self.call.softcap)
        if self._mask is None:
            return found
        if self._added is None:
            return op.Where(self._mask, found, op.CastLike(op.Constant(value_float=-float("inf")), found))
        return op.Add(found, op.CastLike(self._mask, found))

    def _of_query_heads(self, x: Any, given: Any) -> Any:
        """Keys or values, repeated for the query heads of each group. given: as the caller gave them."""
        heads, kv_heads = (of.shape[-3] if len(of.shape) > 2 else 1 for of in (self.call.q, given))
        if heads == kv_heads:
            return x
        repeated = self.op.Expand(self.op.Unsqueeze(x, [2]), [1, 1, heads // kv_heads, 1, 1])
        return self.op.Reshape(repeated, [0, heads, -1, given.shape[-1]])

    def _any(self, x: Any, keepdims: int) -> Any:
        """Whether a boolean along the last axis is true."""
        op = self.op
        return op.Cast(op.ReduceMax(op.Cast(x, to=_INT32), [-1], keepdims=keepdims), to=_BOOL)


def _check(call: Operands) -> None:
    """Refuse by name what ONNX does not have, and sizes that are not known."""
    for name, what in _UNSUPPORTED.items():
        if (x := getattr(call, name)) is not None and x != 0:
            raise UnsupportedError(f"{name}: expected {what}, got {x}")
    if call.q.dtype.itemsize < 2:
        raise UnsupportedError(f"q: expected floats of 16 bits or more, for ONNX's Attention, got {call.q.dtype}")
    for name in ("q", "k", "v"):
        shape = getattr(call, name).shape
        if not all(isinstance(n, int) for n in (*shape[-3:-2], shape[-1])):
            raise UnsupportedError(f"{name}: expected a static number of heads and head dim, got {shape}")
