"""The launches of a forward pass on Hopper."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl

from flashtile.backends.gluon import tuning
from flashtile.backends.gluon.descriptors import descriptor_maker, outline_of
from flashtile.backends.gluon.forward_kernel import forward_kernel
from flashtile.backends.gluon.transpose_kernel import KEYS, WIDTH, transpose_kernel
from flashtile.backends.gluon.tuning import ROWS
from flashtile.backends.gluon.work_counters import MOST_FLAGS, acquire_counters
from flashtile.backends.gpu import device as gpu
from flashtile.backends.gpu.arguments import block, lengths, lengths_of, rule, rule_of
from flashtile.backends.gpu.kernel_launch import Argument, BoundLaunch, KernelLaunch, LaunchSequence, Maker
from flashtile.backends.gpu.nonfinite import RecomputeForward
from flashtile.backends.gpu.pdl import pdl_options, supports_pdl
from flashtile.backends.gpu.tensors import Result, count_tiles, empty, strides
from flashtile.band import FAR
from flashtile.inputs import Inputs
from flashtile.numerics.dtypes import EIGHT_BITS, ITEMSIZE
from flashtile.problem import Problem

MOST_RISING = 64  # keys: with an alibi slope of 1, less than 2^93
# The values of a forward pass.
Q, K, V, OUT, LSE, FLAGS, COUNTERS, SINK, RULE, LENGTHS, TURNED = map(Argument, range(11))


class Constants(NamedTuple):
    """What the kernel is compiled for; every field is a constexpr."""

    GROUP: Any
    PACKED_HEADS: Any
    DIM_V: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    BLOCK_K: Any
    STAGES: Any
    CONSUMERS: Any
    REGISTERS: Any
    LOAD_REGISTERS: Any
    OUT_PARTS: Any
    WEIGHTS_SHARED: Any
    SKIP_MAX: Any  # see softmax.py
    ALL_FULL: Any  # no band, no length and no ragged end cuts a tile of keys
    MAY_BE_EMPTY: Any  # of some tasks a warpgroup has no rows
    ONE_RIGHT_CUT: (
        Any  # the first tile that a warpgroup takes is the only one cut on the right, and all its rows see it
    )


class Forward:
    """The launches of a forward pass."""

    def __init__(self, p: Problem, device: Any) -> None:
        self._device, self._packed = device, p.packed
        packed_heads = tuning.packed_heads(p)
        config = tuning.forward_of(p, packed_heads)
        n_rows, batch, heads = p.q.shape[2], p.q.shape[0], p.heads // packed_heads
        self._out = Result(p, p.heads, n_rows, p.dim_v, p.out_dtype, device)
        self._lse = Result(p, p.heads, n_rows, None, p.accumulator, device)
        tiles, flag_tiles = (count_tiles(p, p.n_q * packed_heads, n_rows, n) for n in (ROWS * config.consumers, ROWS))
        tasks = tiles * heads * batch
        counts = (tiles, heads, _section(p, heads * batch), tasks)
        use_pdl = supports_pdl(device)
        recompute = RecomputeForward(p, device, self._out, self._lse, ROWS, packed_heads, use_pdl)
        self._own_flags, self._flags = recompute.make, recompute.count
        self._rule, self._lengths = rule(p), lengths(p)
        self._turn = Transpose(p, device) if p.dtype == EIGHT_BITS else None
        start = KernelLaunch(
            forward_kernel,
            min(tasks, gpu.processors(device)),
            {"num_warps": 4} | pdl_options(use_pdl and self._turn is not None),
            {4: self._out.strides, 5: self._lse.strides},
            dict(enumerate(self._blocks(p, config, packed_heads))),
            C=constants(p, config, packed_heads),
        )
        values = V if self._turn is None else TURNED
        self._launch = LaunchSequence(
            *([] if self._turn is None else [self._turn.step]),
            (start, (Q, K, values, OUT, OUT, LSE, FLAGS, flag_tiles, COUNTERS, SINK, RULE, LENGTHS, *counts)),
            recompute.step(Q, K, V, OUT, LSE, SINK, FLAGS, RULE, LENGTHS),
        )

    def _blocks(self, p: Problem, config: tuning.Config, packed_heads: int) -> list[Maker | None]:
        """What makes the descriptors of q, k, v and out; None for an output that the copy engine cannot take."""
        width, width_v = _width(p), block(p.dim_v)
        rows_block = [1, 1, ROWS // packed_heads, packed_heads]
        if self._turn is None:
            v = descriptor_maker(p.v, [1, 1, config.block_k, width_v])
        else:
            v = descriptor_maker(self._turn.outline, [1, 1, width_v, config.block_k])
        out = None
        if ITEMSIZE[p.out_dtype] == 2 and p.dim_v % 8 == 0:
            whole = outline_of(self._out, p.q.shape[0], p.heads, p.q.shape[2], p.dim_v)
            out = descriptor_maker(whole, [*rows_block, width_v // config.out_parts], packed_heads)
        q = descriptor_maker(p.q, [*rows_block, width], packed_heads)
        return [q, descriptor_maker(p.k, [1, 1, config.block_k, width]), v, out]

    def __call__(self, x: Inputs, with_lse: bool) -> tuple[Any, Any]:
        out, lse = self._out.empty(), self._lse.empty() if with_lse else self._lse.discard_buffer()
        shared = acquire_counters(self._device)
        flags = self._own_flags() if shared.flags is None or self._flags > MOST_FLAGS else shared.flags
        if self._packed:  # tiles that no sequence has are never written
            flags[: self._flags].zero_()
        a_rule, a_lengths = rule_of(self._rule, x), lengths_of(self._lengths, x)
        turned = None if self._turn is None else self._turn.empty()
        self._launch(x.q, x.k, x.v, out, lse, flags, shared.counters, x.sink, a_rule, a_lengths, turned)
        shared.release()
        return out, lse


class Transpose:
    """The launch that turns 8-bit values, which the copy engine then fetches with keys side by side."""

    def __init__(self, p: Problem, device: Any) -> None:
        batch, keys = p.v.shape[0], int(KEYS.value)
        counts = (-(-p.n_k // keys), p.kv_heads)
        shape = (batch, p.kv_heads, p.dim_v, counts[0] * keys)
        self.empty = empty(shape, p.v.dtype, device)
        self.outline = torch.empty(shape, dtype=p.v.dtype, device="meta")
        rows = dict(enumerate(strides(x, p) for x in (p.v, self.outline)))
        programs = batch * p.kv_heads * counts[0] * -(-p.dim_v // int(WIDTH.value))
        start = KernelLaunch(transpose_kernel, programs, {"num_warps": 1}, rows, DIM_V=p.dim_v)
        self.step: BoundLaunch = (start, (V, TURNED, RULE, LENGTHS, *counts))


def constants(p: Problem, config: tuning.Config, packed_heads: int) -> Constants:
    limited = p.band.right < FAR or p.band.left < FAR or p.kv_lengths is not None or p.packed
    whole = not limited and p.n_k % config.block_k == 0
    # Weights of float16 overflow at 2^16. Those of bfloat16 do where alibi rises from tile to tile, as it does before a
    # query: tiles come in falling order.
    trust = p.dtype == "bfloat16" and (p.alibi is None or p.band.right <= MOST_RISING)
    short = p.packed or -(-p.n_q * packed_heads // ROWS) % config.consumers != 0
    sizes = (p.group, packed_heads, p.dim_v, _width(p), block(p.dim_v))
    return Constants(*map(gl.constexpr, (*sizes, *config, trust, whole, short, tuning.one_right_cut(p))))


def _width(p: Problem) -> int:
    """Of a query or key in a tile: at least the 32 bytes that one product takes."""
    return max(block(p.dim), 32 // ITEMSIZE[p.dtype])


def _section(p: Problem, columns: int) -> int:
    """Heads that are worked on side by side, a power of two: their keys and values stay in the L2."""
    fit = max(1, tuning.L2_SECTION // (p.n_k * (p.dim + p.dim_v) * ITEMSIZE[p.dtype]))
    return min(columns, 1 << fit.bit_length() - 1)
