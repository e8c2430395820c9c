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
from flashtile.backends.gluon.work_counters import MAX_FLAGS, acquire_counters
from flashtile.backends.gpu import device as gpu
from flashtile.backends.gpu.arguments import block, is_fixed, lengths, lengths_of, rule, rule_of
from flashtile.backends.gpu.kernel_launch import Argument, BoundLaunch, KernelLaunch, LaunchSequence, Maker
from flashtile.backends.gpu.nonfinite import RecomputeForward
from flashtile.backends.gpu.pdl import pdl_options, supports_pdl
from flashtile.backends.gpu.tensors import Result, count_tiles, empty, strides
from flashtile.band import FAR
from flashtile.inputs import Inputs
from flashtile.numerics.dtypes import EIGHT_BITS, ITEMSIZE
from flashtile.problem import Problem

MAX_KEYS_AHEAD = 64  # of a query: with an alibi slope of 1, weights stay under 2^93
# The values of a forward pass.
Q, K, V, OUT, LSE, FLAGS, COUNTERS, SINK, RULE, LENGTHS, TRANSPOSED = map(Argument, range(11))


class Constants(NamedTuple):
    """Compile-time constants of the kernel; every field is a constexpr."""

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
    SKIP_MAX: Any  # search only the first tile and cut tiles for their maximum; see softmax.py
    ALL_FULL: Any  # no band, length or ragged end cuts a tile of keys
    MAY_BE_EMPTY: Any  # a warpgroup may have no rows of a task
    ONE_RIGHT_CUT: Any  # only the first tile of a warpgroup is cut on the right, and every row sees some of it


class Forward:
    """The launches of a forward pass."""

    def __init__(self, p: Problem, device: Any) -> None:
        self._device, self._packed = device, p.packed
        packed_heads = tuning.packed_heads(p)
        config = tuning.forward_of(p, packed_heads)
        n_rows, batch, heads = p.q.shape[2], p.q.shape[0], p.heads // packed_heads
        self._out = Result(p, p.heads, n_rows, p.dim_v, p.out_dtype, device, p.q)
        self._lse = Result(p, p.heads, n_rows, None, p.accumulator, device)
        tiles, flag_tiles = (count_tiles(p, p.n_q * packed_heads, n_rows, n) for n in (ROWS * config.consumers, ROWS))
        tasks = tiles * heads * batch
        use_pdl = supports_pdl(device)
        recompute = RecomputeForward(p, device, self._out, self._lse, ROWS, packed_heads, use_pdl)
        self._make_flags, self._flags = recompute.make, recompute.count
        self._rule, self._lengths, self._is_fixed = rule(p), lengths(p), is_fixed(p)
        self._index = gpu.index_of(device)
        self._transpose = Transpose(p, device) if p.dtype == EIGHT_BITS else None
        kernel = KernelLaunch(
            forward_kernel,
            min(tasks, gpu.processors(device)),
            {"num_warps": 4} | pdl_options(use_pdl and self._transpose is not None),
            {"out": self._out.strides, "lse": self._lse.strides},
            self._descriptors(p, config, packed_heads),
            C=constants(p, config, packed_heads),
        )
        common = {"out": OUT, "lse": LSE, "flags": FLAGS, "rule": RULE, "lengths": LENGTHS}
        bound = kernel.bind(
            **common,
            q_desc=Q,
            k_desc=K,
            v_desc=V if self._transpose is None else TRANSPOSED,
            out_desc=OUT,
            flag_tiles=flag_tiles,
            counter=COUNTERS,
            sink=SINK,
            tiles=tiles,
            heads=heads,
            section=_section(p, heads * batch),
            tasks=tasks,
        )
        transpose = [] if self._transpose is None else [self._transpose.launch]
        self._launch = LaunchSequence(*transpose, bound, recompute.bind(**common, q=Q, k=K, v=V, p_sink=SINK))

    def _descriptors(self, p: Problem, config: tuning.Config, packed_heads: int) -> dict[str, Maker | None]:
        """What makes the descriptors of q, k, v and out; None for an output that the copy engine cannot take."""
        width, width_v = _width(p), block(p.dim_v)
        rows_box = [1, 1, ROWS // packed_heads, packed_heads]
        if self._transpose is None:
            v = descriptor_maker(p.v, [1, 1, config.block_k, width_v])
        else:
            v = descriptor_maker(self._transpose.outline, [1, 1, width_v, config.block_k])
        out = None
        if ITEMSIZE[p.out_dtype] == 2 and p.dim_v % 8 == 0:
            outline = outline_of(self._out, p.q.shape[0], p.heads, p.q.shape[2], p.dim_v)
            out = descriptor_maker(outline, [*rows_box, width_v // config.out_parts], packed_heads)
        q = descriptor_maker(p.q, [*rows_box, width], packed_heads)
        k = descriptor_maker(p.k, [1, 1, config.block_k, width])
        return {"q_desc": q, "k_desc": k, "v_desc": v, "out_desc": out}

    def __call__(self, x: Inputs, with_lse: bool = True) -> tuple[Any, Any]:
        if not (self._index is None or self._index == gpu.current()):
            return gpu.on_device(self._index, self, x, with_lse)
        out, lse = self._out.empty(), self._lse.empty() if with_lse else self._lse.discarded
        if lse is None:
            lse = self._lse.discard_buffer()
        work = acquire_counters(self._device)
        flags = self._make_flags() if work.flags is None or self._flags > MAX_FLAGS else work.flags
        if self._packed:  # flags of tiles that belong to no sequence are never written
            flags[: self._flags].zero_()
        a_rule, a_lengths = self._rule, self._lengths
        if not self._is_fixed:
            a_rule, a_lengths = rule_of(a_rule, x), lengths_of(a_lengths, x)
        transposed = None if self._transpose is None else self._transpose.empty()
        self._launch(x.q, x.k, x.v, out, lse, flags, work.counters, x.sink, a_rule, a_lengths, transposed)
        work.release()
        return out, lse


class Transpose:
    """The launch that transposes 8-bit values; the copy engine then fetches them with contiguous keys."""

    def __init__(self, p: Problem, device: Any) -> None:
        batch, keys = p.v.shape[0], int(KEYS.value)
        tiles = -(-p.n_k // keys)
        shape = (batch, p.kv_heads, p.dim_v, tiles * keys)
        self.empty = empty(shape, p.v.dtype, device)
        self.outline = torch.empty(shape, dtype=p.v.dtype, device="meta")
        rows = {"v": strides(p.v, p), "transposed": strides(self.outline, p)}
        programs = batch * p.kv_heads * tiles * -(-p.dim_v // int(WIDTH.value))
        launch = KernelLaunch(transpose_kernel, programs, {"num_warps": 1}, rows, DIM_V=p.dim_v)
        self.launch: BoundLaunch = launch.bind(
            v=V, transposed=TRANSPOSED, rule=RULE, lengths=LENGTHS, tiles=tiles, heads=p.kv_heads
        )


def constants(p: Problem, config: tuning.Config, packed_heads: int) -> Constants:
    limited = p.band.right < FAR or p.band.left < FAR or p.kv_lengths is not None or p.packed
    all_full = not limited and p.n_k % config.block_k == 0
    # Weights of float16 overflow at 2^16. Those of bfloat16 overflow where alibi rises from tile to tile, as it does
    # ahead of a query, because tiles come in falling order.
    skip_max = p.dtype == "bfloat16" and (p.alibi is None or p.band.right <= MAX_KEYS_AHEAD)
    may_be_empty = p.packed or -(-p.n_q * packed_heads // ROWS) % config.consumers != 0
    sizes = (p.group, packed_heads, p.dim_v, _width(p), block(p.dim_v))
    flags = (skip_max, all_full, may_be_empty, tuning.one_right_cut(p))
    return Constants(*map(gl.constexpr, (*sizes, *config, *flags)))


def _width(p: Problem) -> int:
    """The width of a query or key in a tile: at least the 32 bytes that one product takes."""
    return max(block(p.dim), 32 // ITEMSIZE[p.dtype])


def _section(p: Problem, heads: int) -> int:
    """How many heads, a power of two or all, run side by side so that their keys and values stay in the L2."""
    fit = max(1, tuning.L2_SECTION // (p.n_k * (p.dim + p.dim_v) * ITEMSIZE[p.dtype]))
    return min(heads, 1 << fit.bit_length() - 1)
