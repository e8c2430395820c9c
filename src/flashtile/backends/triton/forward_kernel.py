"""The forward kernel: a tile of queries walks the keys it sees. With SPLITS, each program walks a share of them."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.blocks import locate, sequence_bounds
from flashtile.backends.gpu.forward_rows import cuts_of_rows, forward_rows, recompute_forward_rows
from flashtile.backends.gpu.pdl import launch_dependents


@triton.jit(do_not_specialize=["tiles", "heads", "lse_split"])
def forward_kernel(
    q,
    k,
    v,
    k_desc,
    v_desc,
    out,
    lse,
    p_sink,
    flags,
    rule,
    lengths,
    tiles,
    heads,
    out_split,
    lse_split,
    PACKED_HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    C: tl.constexpr,
    RECOMPUTE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program makes BLOCK_Q rows of the output. PACKED_HEADS query heads of a group share the rows of a tile.

    The grid counts tiles, then `heads` (of them packed), then shares of the keys, then sequences. Spoiled rows are
    flagged for recompute_forward_kernel; without flags the program recomputes them itself, by the constants RECOMPUTE.
    """
    launch_dependents(PDL)
    program = tl.program_id(0)
    head = program // tiles % heads
    split = program // tiles // heads % SPLITS
    sequence = program // tiles // heads // SPLITS
    tile = tiles - 1 - program % tiles  # under a causal band the last rows see the most keys: they start first
    tile_number = (sequence * heads + head) * tiles + tile
    sequence, tile = locate(lengths.cu_q, lengths.n_q, tile, sequence, lengths, C.BLOCK_Q)
    at = sequence_bounds(lengths, rule.offset, sequence)
    first = tile * C.BLOCK_Q
    if first < at.q_len * PACKED_HEADS:
        share = 0, at.k_len
        if SPLITS > 1:
            share = share_of(
                cuts_of_rows(rule, at, first, PACKED_HEADS, C.BLOCK_Q, C.BLOCK_K), split, SPLITS, C.BLOCK_K
            )
        bad = forward_rows(
            *(q, k, v, k_desc, v_desc, out, lse, p_sink, rule, at, head, first, split, share, out_split, lse_split),
            *(PACKED_HEADS, SPLITS, C),
            CAREFUL=False,
        )
        if flags is not None:
            tl.store(flags + tile_number, bad.to(tl.int32))
        elif bad:
            tl.debug_barrier()
            recompute_forward_rows(
                *(q, k, v, out, lse, p_sink, rule, at, head, first, split, share, out_split, lse_split),
                *(C.BLOCK_Q, PACKED_HEADS, SPLITS, RECOMPUTE),
            )
    elif flags is not None:
        tl.store(flags + tile_number, 0)


@triton.jit
def share_of(cut, split, SPLITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """The keys, from and to, that one of SPLITS programs walks: whole tiles."""
    share = tl.cdiv(cut[3] - cut[0], SPLITS)
    begin = tl.minimum(cut[0] + split * share, cut[3])
    return begin * BLOCK_K, tl.minimum(begin + share, cut[3]) * BLOCK_K
