"""Forward and backward passes by torch's kernel, which supports full and causal attention, without grouped heads.

The NumPy tiles run calls with non-finite numbers, and backward passes for which the lse is not exact enough.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from flashtile.backends import tiles
from flashtile.host import threads
from flashtile.numerics.dtypes import BFLOAT16, Array, wider
from flashtile.numerics.softmax import COARSE
from flashtile.problem import Problem
from flashtile.pytorch.bridge import to_numpy
from flashtile.pytorch.merge import merge
from flashtile.results import Grads, Target

_forward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def forward(p: Problem) -> tuple[Array, Array]:
    """Return output in the problem's out_dtype, and lse."""
    with torch.no_grad(), _threads(p):
        call = Call(p, p.out_dtype)
        if call.finite():
            out, lse = call.forward()
            merged = len(call.parts) > 1
            if bool((lse < torch.inf).all()) and not (merged and _coarse(lse)):
                # A sum may have overflowed although the mean is finite.
                return to_numpy(out) if _finite(out) else tiles.forward(p)[0], to_numpy(lse)
    return tiles.forward(p)


def backward(
    p: Problem,
    dout: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    *,
    bias_grad: bool = True,
    target: Target | None = None,
) -> Grads:
    """Return dq, dk and dv in the target's dtype or the problem's out_dtype, whichever has more bits."""
    with torch.no_grad(), _threads(p):
        call = Call(p, p.out_dtype if target is None else wider(p.out_dtype, target.dtype))
        rows = [_tensor(out).to(call.kind), _tensor(lse), _tensor(dout).to(call.kind)]
        others = [] if dlse is None else [_tensor(dlse)]
        exact = not (p.bias is not None and bias_grad) and not _coarse(rows[1])
        if exact and call.finite() and _finite(rows[0], rows[2], *others):
            grads = call.backward(*rows, *others)
            if _finite(*grads):
                dq, dk, dv = map(to_numpy, grads)
                return Grads(dq, dk, dv, None, None)
    return tiles.backward(p, dout, out, lse, dlse, bias_grad=bias_grad, target=target)


class KeyRange(NamedTuple):
    """Keys of one kernel call. causal: the first query sees the first of these keys, the next one the second too."""

    keys: slice
    causal: bool


class Call:
    """The tensors of a problem, and the kernel calls that they take."""

    def __init__(self, p: Problem, dtype: str) -> None:
        self.p, self.kind = p, getattr(torch, dtype)
        self.q, self.k, self.v = (_tensor(x).to(self.kind) for x in (p.q, p.k, p.v))
        self.width = max(p.dim, p.dim_v)  # the kernel takes one width only
        self.mask, self.bias = (None if x is None else _tensor(x) for x in (p.mask, p.bias))
        band = p.band_for(p.n_q, p.n_k)
        ahead = band.offset + band.right  # the last key that query 0 sees
        self.first = max(-ahead, 0)  # the first query that sees a key
        self.parts = [KeyRange(slice(0, p.n_k), False)]
        if ahead < p.n_k - 1:
            before = [KeyRange(slice(0, ahead), False)] if ahead > 0 else []
            self.parts = [*before, KeyRange(slice(max(ahead, 0), p.n_k), True)]
        # Grouped heads: fold queries into rows of one head if all see the same keys, else copy the keys.
        same = all(x is None or x.shape[1] == x.shape[2] == 1 for x in (p.mask, p.bias))
        self.folded = same and not self.parts[-1].causal

    def finite(self) -> bool:
        return _finite(self.q, self.k, self.v, *(() if self.bias is None else (self.bias,)))

    def forward(self) -> tuple[Tensor, Tensor]:
        p, q, results = self.p, self._padded(self._queries(self.q)), []
        for part in self.parts:
            out, lse = _forward(q, self._keys(self.k, part), self._keys(self.v, part), **self._options(part))
            out = out[..., : p.dim_v]
            if self.mask is not None:  # torch gives rows that see no key output 0 and lse 0
                lse = lse.masked_fill(self._empty(part), -torch.inf)
            results.append((out, lse))
        result = results[0] if len(results) == 1 else merge((*results[0], *results[1]))
        out, lse = self.q.new_zeros(p.out_shape()), result[1].new_full(p.out_shape()[:-1], -torch.inf)
        for total, x in zip((out, lse), result, strict=True):
            total[:, :, self.first :] = x.reshape(total[:, :, self.first :].shape)
        return out, lse

    def backward(self, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None = None) -> tuple[Tensor, ...]:
        # 0 for empty rows: their weights exp(-inf - 0) are 0.
        statistics = self._queries(lse.masked_fill(lse == -torch.inf, 0)[..., None])[..., 0].contiguous()
        q, out, dout = (self._padded(self._queries(x)) for x in (self.q, out, dout))
        if dlse is not None:  # one more column subtracts dlse from D, the row sums of dO * O
            q, out, dout = _with_column(q, 0), _with_column(out, 1), _with_column(dout, -self._queries(dlse[..., None]))
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype) for x in (self.q, self.k, self.v))
        for part in self.parts:
            k, v = (self._keys(x, part) for x in (self.k, self.v))
            if dlse is not None:
                k, v = _with_column(k, 0), _with_column(v, 0)
            grads = _backward(dout, q, k, v, out, statistics, **self._options(part))
            for total, x in zip((dq[:, :, self.first :], dk[:, :, part.keys], dv[:, :, part.keys]), grads, strict=True):
                x = x[..., : total.shape[3]]
                # Gradients of copied keys are summed over their heads; folded queries get their shape back.
                shared = x.shape[1] > total.shape[1]
                total += x.unflatten(1, (total.shape[1], -1)).sum(2) if shared else x.reshape(total.shape)
        return dq, dk, dv

    def _queries(self, x: Tensor) -> Tensor:
        x = x[:, :, self.first :]
        return x.reshape(x.shape[0], self.p.kv_heads, -1, x.shape[-1]) if self.folded else x

    def _keys(self, x: Tensor, part: KeyRange) -> Tensor:
        x = x[:, :, part.keys]
        return self._padded(x if self.folded else x.repeat_interleave(self.p.group, 1) if self.p.group > 1 else x)

    def _padded(self, x: Tensor) -> Tensor:
        """Pad x with zero columns up to the width; make its columns contiguous and its rows not overlap."""
        if x.shape[3] < self.width:
            return pad(x, (0, self.width - x.shape[3]))
        contiguous = x.stride(3) == 1 or x.shape[3] == 1
        return x if contiguous and (x.stride(2) >= x.shape[3] or x.shape[2] == 1) else x.contiguous()

    def _options(self, part: KeyRange) -> dict[str, Any]:
        return {
            "dropout_p": 0.0,
            "is_causal": part.causal,
            "attn_mask": self._additive_mask(part),
            "scale": self.p.scale,
        }

    def _additive_mask(self, part: KeyRange) -> Tensor | None:
        """Combine bias and mask into one additive mask, rank 4."""
        real = getattr(torch, self.p.accumulator)
        mask, bias = (self._part_of(x, part) for x in (self.mask, self.bias))
        if mask is None:
            return None if bias is None else bias.to(real)
        return torch.where(mask, torch.zeros((), dtype=real) if bias is None else bias.to(real), -torch.inf)

    def _empty(self, part: KeyRange) -> Tensor:
        """Return which rows see none of these keys."""
        mask: Tensor = self._part_of(self.mask, part).expand(-1, -1, -1, part.keys.stop - part.keys.start)
        sees, first = mask.max(-1)
        late = first > torch.arange(self.p.n_q - self.first) if part.causal else False
        return ~sees | late

    def _part_of(self, x: Any, part: KeyRange) -> Any:
        """Slice the rows and keys of this part from a mask or bias."""
        if x is None:
            return None
        x = x[:, :, self.first :] if x.shape[2] > 1 else x
        return x[..., part.keys] if x.shape[3] > 1 else x


def _with_column(x: Tensor, column: Any) -> Tensor:
    """Append a column to x."""
    wider = pad(x, (0, 1))
    wider[..., -1:] = column
    return wider


def _finite(*tensors: Tensor) -> bool:
    """Whether the sum of each tensor is finite, and so all its numbers."""
    return all(bool(x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).isfinite()) for x in tensors)


def _coarse(lse: Tensor) -> bool:
    return bool((lse.masked_fill(lse == -torch.inf, 0).abs() >= COARSE).any())


def _tensor(x: Array) -> Tensor:
    """View an array as a tensor."""
    return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16) if x.dtype == BFLOAT16 else torch.from_numpy(x)


@contextmanager
def _threads(p: Problem) -> Iterator[None]:
    """Limit torch to the threads of the call, or to those that FLASHTILE_THREADS asks for."""
    previous, wanted = torch.get_num_threads(), p.threads or threads.from_environment()
    if wanted in (None, previous):
        yield
        return
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(previous)
