"""The kernels that make spoiled rows anew, with care: those of the tiles that the kernels before them marked.

A mark is an int32, 1 where NaN or Inf spoiled a tile, of number (sequence * heads + head) * tiles + tile. Tiles are
counted upwards from the first rows; in packed layouts as locate() counts them, and the sequence is 0. Ordinary data has
no mark set, and a program is done when it has seen that of its share.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.triton.backward_kernels import dkdv_rows, dq_rows
from flashtile.backends.triton.blocks import locate, measure
from flashtile.backends.triton.forward_kernel import forward_rows_again

MARKS = tl.constexpr(128)  # that a program looks at together


@triton.jit
def any_set(marks, first, step, count):
    """Whether any of MARKS marks is set, `step` apart from `first` on, so that neighbours have different programs."""
    o_n = first + tl.arange(0, MARKS) * step
    return tl.max(tl.load(marks + o_n, mask=o_n < count, other=0), 0) > 0


@triton.jit(do_not_specialize=["count", "tiles", "heads"])
def mend_forward_kernel(
    q,
    k,
    v,
    out,
    lse,
    p_sink,
    marks,
    count,
    rule,
    lengths,
    tiles,
    heads,
    ROWS: tl.constexpr,
    PACKED_HEADS: tl.constexpr,
    C: tl.constexpr,
):
    """Output and lse of marked tiles of ROWS rows, which are forward_kernel's or another's."""
    step = tl.num_programs(0)
    for begin in range(tl.program_id(0), count, step * MARKS):
        if any_set(marks, begin, step, count):
            for n in range(begin, tl.minimum(begin + step * MARKS, count), step):
                if tl.load(marks + n) != 0:
                    head = n // tiles % heads
                    sequence, tile = locate(lengths.cu_q, lengths.n_q, n % tiles, n // tiles // heads, lengths, ROWS)
                    at = measure(lengths, rule.offset, sequence)
                    forward_rows_again(
                        *(q, k, v, out, lse, p_sink, rule, at, head, tile * ROWS, 0, (0, at.k_len), 0, 0),
                        *(ROWS, PACKED_HEADS, 1, C),
                    )


@triton.jit(do_not_specialize=["count", "first_of_queries", "k_tiles", "kv_heads", "q_tiles", "heads"])
def mend_backward_kernel(
    q,
    k,
    v,
    dout,
    log2,
    delta,
    dq,
    dk,
    dv,
    marks,
    count,
    first_of_queries,
    rule,
    lengths,
    k_tiles,
    kv_heads,
    q_tiles,
    heads,
    K_ROWS: tl.constexpr,
    Q_ROWS: tl.constexpr,
    OF_KEYS: tl.constexpr,
    OF_QUERIES: tl.constexpr,
):
    """dK and dV of marked tiles of K_ROWS keys, whose marks come first, and dQ of tiles of Q_ROWS queries."""
    step = tl.num_programs(0)
    for begin in range(tl.program_id(0), count, step * MARKS):
        if any_set(marks, begin, step, count):
            for n in range(begin, tl.minimum(begin + step * MARKS, count), step):
                if tl.load(marks + n) != 0:
                    if n < first_of_queries:
                        head = n // k_tiles % kv_heads
                        sequence = n // k_tiles // kv_heads
                        sequence, tile = locate(lengths.cu_k, lengths.n_k, n % k_tiles, sequence, lengths, K_ROWS)
                        at = measure(lengths, rule.offset, sequence)
                        for j0 in range(tile * K_ROWS, tl.minimum((tile + 1) * K_ROWS, at.k_room), OF_KEYS.BLOCK_K):
                            dkdv_rows(
                                *(q, k, v, dout, None, None, log2, delta, dk, dv, rule, at, head, j0, OF_KEYS),
                                CAREFUL=True,
                            )
                    else:
                        n_q = n - first_of_queries
                        head = n_q // q_tiles % heads
                        sequence = n_q // q_tiles // heads
                        sequence, tile = locate(lengths.cu_q, lengths.n_q, n_q % q_tiles, sequence, lengths, Q_ROWS)
                        at = measure(lengths, rule.offset, sequence)
                        for i0 in range(tile * Q_ROWS, tl.minimum((tile + 1) * Q_ROWS, at.q_len), OF_QUERIES.BLOCK_Q):
                            dq_rows(
                                *(q, k, v, dout, None, None, log2, delta, dq, rule, at, head, i0, OF_QUERIES),
                                CAREFUL=True,
                            )
