"""The launches of a backward pass on Hopper."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl

from flashtile.backends.gluon import tuning
from flashtile.backends.gluon.backward_kernel import backward_kernel
from flashtile.backends.gluon.descriptors import descriptors, outline_of
from flashtile.backends.gluon.finish_kernel import finish_kernel
from flashtile.backends.gluon.tuning import ROWS
from flashtile.backends.gluon.wide_backward_kernel import wide_backward_kernel
from flashtile.backends.triton import launch as portable
from flashtile.backends.triton.arguments import Rows, bits, block, lengths, rule
from flashtile.backends.triton.start import Start
from flashtile.backends.triton.tensors import Result, strides
from flashtile.inputs import Inputs
from flashtile.problem import Problem
from flashtile.results import Gradients


class Constants(NamedTuple):
    """What the kernel is compiled for; every field is a constexpr."""

    GROUP: Any
    DIM: Any
    BLOCK_D: Any
    BLOCK_Q: Any
    KEYS: Any  # of a program
    DOUT_STAGES: Any
    DQ_TILES: Any  # of 64 x 64, in a tile of queries
    LATE: Any
    ALWAYS_CUT: Any  # the first so many tiles of queries are cut, in every column of keys
    CUT_AT_BEGIN: Any  # tiles may be cut by the right of the band, or see keys that are not in use
    CUT_AT_END: Any  # tiles may be cut by the left of the band, or by the end of queries


class Backward:
    """Statistics of rows, the kernel, dQ in its dtype, and what is to be mended.

    given: outlines of dout, out, lse and dlse.
    """

    def __init__(self, p: Problem, device: Any, given: tuple[Any, ...]) -> None:
        self._device = device
        dout = given[0]
        config, width = tuning.backward(max(p.dim, p.dim_v)), max(64, block(max(p.dim, p.dim_v)))
        n_rows, n_keys, batch = p.q.shape[2], p.k.shape[2], p.q.shape[0]
        self._rule, self._lengths, self._scale = rule(p), lengths(p), bits(p.scale)
        self._given_strides = tuple(None if x is None else strides(x, p) for x in given)
        self._row_counts = (n_rows, p.heads)
        # lse in base 2 and delta, side by side for one copy; rows padded so that heads begin at 16 bytes
        padded = -(-n_rows // 4) * 4
        self._rows = (2, batch, p.heads, padded)
        self._rows_strides = (p.heads * padded, padded, 1)
        self._dq = Result(p, p.heads, n_rows, p.dim, p.dtype, device)
        self._dk = Result(p, p.kv_heads, n_keys, p.dim, p.dtype, device)
        self._dv = Result(p, p.kv_heads, n_keys, p.dim_v, p.dtype, device)
        q_tiles = int(triton.cdiv(p.n_q, config.block_q)) * (config.block_q // 64)
        k_tiles, marks_k = (int(triton.cdiv(p.n_k, n)) for n in (config.keys, ROWS))
        marks_q = int(triton.cdiv(p.n_q, ROWS))
        self._total = q_tiles * p.heads * batch * 64 * width
        self._mend = portable.MendBackward(p, device, ROWS, ROWS)
        q_box, k_box = ([1, 1, n, width] for n in (config.block_q, config.keys))
        out_box = [1, 1, ROWS, min(width, 128)]  # what a warpgroup has
        self._q, self._do = descriptors(p.q, q_box), descriptors(dout, q_box)
        self._k, self._v = descriptors(p.k, k_box), descriptors(p.v, k_box)
        self._dk_desc = descriptors(outline_of(self._dk, batch, p.kv_heads, n_keys, p.dim), out_box)
        self._dv_desc = descriptors(outline_of(self._dv, batch, p.kv_heads, n_keys, p.dim_v), out_box)
        rows = torch.empty(self._rows, dtype=torch.float32, device="meta")
        self._rows_desc = descriptors(rows, [2, 1, 1, config.block_q], swizzled=False)
        total = torch.empty((self._total // 256, 256), dtype=torch.float32, device="meta")
        self._total_desc = descriptors(total, [16, 256], swizzled=False)
        ends = p.kv_lengths is not None
        always_cut = tuning.always_cut(p)
        cut_at_begin = (self._rule.right is not None or ends) and not always_cut
        cut_at_end = self._rule.left is not None or ends or p.n_q % config.block_q != 0
        dq_tiles = config.block_q * width // 64**2
        sizes = (p.group, p.dim, width, config.block_q, config.keys, config.dout_stages, dq_tiles)
        constants = (*sizes, config.late, always_cut, cut_at_begin, cut_at_end)
        self._counts = (k_tiles, p.kv_heads, q_tiles, marks_k)
        self._start = Start(
            backward_kernel if config.keys > ROWS else wide_backward_kernel,
            k_tiles * p.kv_heads * batch,
            {"num_warps": 4},
            C=Constants(*map(gl.constexpr, constants)),
        )
        self._statistics = portable.statistics(p)
        self._finish_counts = (p.n_q, marks_q, p.heads, q_tiles)
        self._finish = Start(
            finish_kernel,
            marks_q * p.heads * batch,
            DIM=p.dim,
            BLOCK_D=width,
        )

    def __call__(self, x: Inputs, *given: Any) -> Gradients:
        dout, out, lse, dlse = (
            None if y is None or s is None else Rows(y, *s) for y, s in zip(given, self._given_strides, strict=True)
        )
        dq, dk, dv = self._dq.make(), self._dk.make(), self._dv.make()
        rows = torch.empty(self._rows, dtype=torch.float32, device=self._device)
        log2, delta = (Rows(half, *self._rows_strides) for half in rows)
        total = torch.zeros(self._total, dtype=torch.float32, device=self._device)
        marks = self._mend.make()
        of_queries = marks[self._mend.first_of_queries :]
        a_rule, a_lengths = portable.rule_of(self._rule, x), portable.lengths_of(self._lengths, x)
        self._statistics(dout, out, lse, dlse, log2, delta, *self._row_counts)
        self._start(
            self._q(x.q),
            self._k(x.k),
            self._v(x.v),
            self._do(given[0]),
            self._rows_desc(rows),
            self._total_desc(total),
            self._dk_desc(dk.ptr),
            self._dv_desc(dv.ptr),
            marks,
            a_rule,
            a_lengths,
            *self._counts,
        )
        self._finish(total, dq, of_queries, self._scale, *self._finish_counts)
        self._mend(x, dout, log2, delta, dq, dk, dv, marks)
        dsink = None
        if x.sink is not None:
            n_rows, heads = self._row_counts
            dsink = portable.sink_gradient(x.sink, given[2].reshape(-1, heads, n_rows), delta.ptr[..., :n_rows], 1)
        return Gradients(dq.ptr, dk.ptr, dv.ptr, None, dsink)
