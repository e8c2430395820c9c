"""What a kernel is given: named tuples of pointers, strides and numbers. A pointer of None compiles a feature out."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.gpu import device as gpu
from flashtile.backends.gpu.config import Config
from flashtile.backends.gpu.cuts import NEAR
from flashtile.backends.gpu.unspecialized import UNSPECIALIZED
from flashtile.band import FAR
from flashtile.inputs import Inputs
from flashtile.numerics import dropout
from flashtile.problem import Problem

INTERPRETED = bool(triton.knobs.runtime.interpret)
ALIGNED = 16  # Triton compiles for integers and addresses that are multiples of it, and for others


class Rows(NamedTuple):
    """[sequence, head, row, column], columns contiguous: q, k, v, out, lse and their gradients."""

    ptr: Any
    sequence: int
    head: int
    row: int


class Pairs(NamedTuple):
    """[sequence, head, query, key] with any strides, 0 where broadcast: mask, bias and its gradient."""

    ptr: Any
    sequence: int
    head: int
    row: int
    column: int


class Lengths(NamedTuple):
    """Rows of a sequence, or of all packed ones, which begin at cu_q and cu_k; kv: the keys in use. For plain().

    The pointers are to device memory, or None.
    """

    n_q: int
    n_k: int
    sequences: int
    cu_q: Any
    cu_k: Any
    kv: Any


class Rule(NamedTuple):
    """What happens to q.k before the softmax, and to the weights after it. None compiles a feature out.

    Flat, because Triton 3.6 loses constants in nested tuples. scale, softcap and keep_scale are the bits of doubles: a
    float argument would be rounded to 32 bits. left and right are band.py's; None means no limit. No offset means that
    each sequence's last query stands at its last key.
    """

    scale: int
    scale_first: int | None  # not None where scale <= 0: a maximum does not survive such a factor
    softcap: int | None
    left: int | None  # unspecialized()
    right: int | None  # unspecialized()
    offset: int | None  # 0, left and right being counted from the query's own number; None: see above
    mask: Any
    mask_sequence: int
    mask_head: int
    mask_row: int
    mask_column: int
    bias: Any
    bias_sequence: int
    bias_head: int
    bias_row: int
    bias_column: int
    alibi: Any
    alibi_sequence: int
    alibi_head: int
    alibi_offset: int  # of the band, where it is not None; unspecialized()
    seed_low: Any  # of dropout, in two unspecialized() halves; or a pointer to all of it
    seed_high: int | None  # None beside a pointer
    threshold: int
    keep_scale: int  # of 1 / (1 - dropout)
    heads: int  # unspecialized()
    descale: Any  # of 8-bit q, k and v, [sequence, kv head, 3]
    descale_sequence: int
    descale_head: int


class Constants(NamedTuple):
    """What a kernel is compiled for; every field is a tl.constexpr, but for the interpreter, which has none."""

    GROUP: Any
    DIM: Any
    DIM_V: Any
    BLOCK_D: Any  # DIM padded to a power of two that the matrix units take
    BLOCK_DV: Any
    BLOCK_Q: Any
    BLOCK_K: Any
    PRECISION: Any
    REAL: Any


def pairs(x: Any) -> Pairs:
    if x is None:
        return Pairs(None, 0, 0, 0, 0)
    return Pairs(x, *(0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)))


def lengths(p: Problem) -> Lengths:
    n_q, n_k = (p.q.shape[2], p.k.shape[2]) if p.packed else (p.n_q, p.n_k)
    return Lengths(length(n_q), length(n_k), unspecialized(p.sequences), p.cu_q, p.cu_k, p.kv_lengths)


def lengths_of(some: Lengths, x: Inputs) -> Lengths:
    """The lengths with the tensors of this call."""
    if x.cu_q is None and x.kv_lengths is None:
        return some
    return some._replace(cu_q=x.cu_q, cu_k=x.cu_k, kv=x.kv_lengths)


def rule(p: Problem) -> Rule:
    offset = 0 if p.align_end else p.band.offset
    alibi: tuple[Any, int, int, int] = (None, 0, 0, 0)
    if p.alibi is not None:
        at = max(-NEAR.value, min(offset, NEAR.value))
        alibi = (p.alibi, 0 if p.alibi.shape[0] == 1 else p.alibi.stride(0), p.alibi.stride(1), unspecialized(at))
    drop: tuple[Any, Any, int, int, int] = (None, 0, 0, 0, 0)
    if p.dropout:
        drop = (*parts(p.seed), dropout.threshold(p.dropout), bits(1 / (1 - p.dropout)), unspecialized(p.heads))
    return Rule(
        bits(p.scale),
        None if p.scale > 0 else 0,
        bits(p.softcap) if p.softcap else None,
        limit(p.band.left, -offset),
        limit(p.band.right, offset),
        None if p.align_end else 0,
        *pairs(p.mask),
        *pairs(p.bias),
        *alibi,
        *drop,
        *descaling(p.descale),
    )


def rule_of(a_rule: Rule, x: Inputs) -> Rule:
    """The rule with the tensors and the seed of this call."""
    if x.mask is None and x.bias is None and x.alibi is None and x.descale is None and a_rule.seed_low is None:
        return a_rule
    low, high = (None, 0) if a_rule.seed_low is None else parts(x.seed)
    return a_rule._replace(mask=x.mask, bias=x.bias, alibi=x.alibi, seed_low=low, seed_high=high, descale=x.descale)


def descaling(x: Any) -> tuple[Any, int, int]:
    """What a Rule has of it."""
    if x is None:
        return None, 0, 0
    return x, 0 if x.shape[0] == 1 else x.stride(0), 0 if x.shape[1] == 1 else x.stride(1)


def constants(p: Problem, config: Config) -> Constants:
    real = tl.float64 if p.accumulator == "float64" else tl.float32
    sizes = (p.group, p.dim, p.dim_v, block(p.dim), block(p.dim_v), config.block_q, config.block_k)
    values = (*sizes, precision(p), real)
    return Constants(*values) if INTERPRETED else Constants(*map(tl.constexpr, values))


def precision(p: Problem) -> str:
    """float32 products are exact to float32, unless torch was told that its own need not be."""
    if INTERPRETED:
        return "widened"
    return "tf32" if p.dtype == "float32" and gpu.tf32() else "ieee"


def block(dim: int) -> int:
    """A head dim in a tile."""
    return max(16, int(triton.next_power_of_2(dim)))


def unspecialized(n: int) -> int:
    """A number of 32 bits as an odd one of 41 bits.

    Triton compiles anew for an integer that is 1, or of another width or alignment; do_not_specialize does not reach
    into tuples.
    """
    return int(UNSPECIALIZED.value) + 2 * n + 1


def length(n: int) -> int:
    """As it is where it is a multiple, which is worth a kernel of its own: of fewer registers and wider loads."""
    return n if n % ALIGNED == 0 else unspecialized(n)


def parts(seed: Any) -> tuple[Any, int | None]:
    """The low and the high half of a seed; or the tensor that it is in."""
    return (unspecialized(seed & 0xFFFFFFFF), unspecialized(seed >> 32)) if isinstance(seed, int) else (seed, None)


def bits(x: float) -> int:
    found: int = struct.unpack("<q", struct.pack("<d", x))[0]
    return found


def limit(x: int, offset: int) -> int | None:
    """A limit of the band counted from a query's own number, unspecialized(), or None where no sequence is so long."""
    return None if x >= FAR or x + offset >= NEAR.value else unspecialized(max(x + offset, -NEAR.value))
