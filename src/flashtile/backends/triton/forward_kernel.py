"""The forward kernel: a tile of queries walks the keys that it sees, or with SPLITS a share of them."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.blocks import locate, sequence_bounds
from flashtile.backends.gpu.cuts import stretch_of, tile_at
from flashtile.backends.gpu.forward_rows import forward_rows, recompute_forward_rows
from flashtile.backends.gpu.pdl import launch_dependents
from flashtile.backends.gpu.spans import cuts_of_rows


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
    """Compute BLOCK_Q rows of the output per program. PACKED_HEADS query heads of a group share the rows of a tile.

    The grid counts tiles, then `heads` (packed heads count as one), then shares of the keys, then sequences. Spoiled
    tiles are flagged for recompute_forward_kernel; without flags the program recomputes its rows itself, with the
    constants RECOMPUTE.
    """
    launch_dependents(PDL)
    program = tl.program_id(0)
    head = program // tiles % heads
    split = program // tiles // heads % SPLITS
    sequence = program // tiles // heads // SPLITS
    tile = tiles - 1 - program % tiles  # the last rows start first: under a causal band they see the most keys
    tile_number = (sequence * heads + head) * tiles + tile
    sequence, tile = locate(lengths.cu_q, lengths.n_q, tile, sequence, lengths, C.BLOCK_Q)
    at = sequence_bounds(lengths, rule.offset, sequence)
    first = tile * C.BLOCK_Q
    if first < at.q_len * PACKED_HEADS:
        share = 0, at.k_len
        if SPLITS > 1:
            share = share_of(
                cuts_of_rows(rule, at, head, first, PACKED_HEADS, C.BLOCK_Q, C.BLOCK_K), split, SPLITS, C.BLOCK_K
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
    """The range of keys that one of SPLITS programs walks, in whole tiles."""
    first, last = stretch_of(cut, 2, True)
    share = tl.cdiv(last - first, SPLITS)
    begin = tl.minimum(first + split * share, last)
    return tile_at(cut, begin, 2, True) * BLOCK_K, tile_at(cut, tl.minimum(begin + share, last), 2, True) * BLOCK_K
