"""Kernel arguments: named tuples of pointers, strides and numbers. A pointer of None compiles a feature out."""

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
ALIGNED = 16  # Triton compiles separate kernels for integers and addresses that are multiples of it


class Rows(NamedTuple):
    """A tensor [sequence, head, row, column] with contiguous columns: q, k, v, out, lse and their gradients."""

    ptr: Any
    sequence: int
    head: int
    row: int


class Pairs(NamedTuple):
    """A tensor [sequence, head, query, key] with any strides, 0 if broadcast: mask, bias and its gradient."""

    ptr: Any
    sequence: int
    head: int
    row: int
    column: int


class Lengths(NamedTuple):
    """Rows of a sequence, or of all packed ones, which begin at cu_q and cu_k. kv: the number of keys in use.

    cu_q, cu_k and kv are pointers to device memory, or None. The numbers go through plain().
    """

    n_q: int
    n_k: int
    sequences: int
    cu_q: Any
    cu_k: Any
    kv: Any


class Rule(NamedTuple):
    """What happens to q.k before the softmax, and to the weights after it. None compiles a feature out.

    The tuple is flat because Triton 3.6 loses constants in nested tuples. scale, softcap and keep_scale are the bits of
    doubles, because a float argument would be rounded to 32 bits. left and right are those of band.py; None means no
    limit. An offset of None aligns the last query of each sequence with its last key.
    """

    scale: int
    scale_first: int | None  # not None if scale <= 0: such a factor does not preserve the maximum
    softcap: int | None
    left: int | None  # unspecialized()
    right: int | None  # unspecialized()
    offset: int | None  # 0 if left and right count from the query's own index; None: see above
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
    alibi_offset: int  # of the band, if offset is not None; unspecialized()
    seed_low: Any  # of dropout, in two unspecialized() halves; or a pointer to the whole seed
    seed_high: int | None  # None if seed_low is a pointer
    threshold: int
    keep_scale: int  # of 1 / (1 - dropout)
    heads: int  # unspecialized()
    descale: Any  # of 8-bit q, k and v, [sequence, kv head, 3]
    descale_sequence: int
    descale_head: int
    spans: Any  # int32, [sequence, head, query, n, 2], begin and end side by side
    spans_sequence: int | None
    spans_head: int | None
    spans_row: int | None
    n_spans: Any  # a compile-time constant
    # Where dropout counts from, unspecialized(); all None if from 0 in steps of 1, with the head of the sequence alone.
    origin_head: int | None  # the first head of the first sequence
    origin_query: int | None
    query_step: int | None
    origin_key: int | None
    key_step: int | None  # None: 1, and origin_key is a multiple of 4


class Constants(NamedTuple):
    """Compile-time constants. Every field is a tl.constexpr, except under the interpreter, which has none."""

    GROUP: Any
    DIM: Any
    DIM_V: Any
    BLOCK_D: Any  # DIM padded to a power of two that matrix instructions take
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
    """Replace the tensors by those of this call."""
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
        drop = (
            *seed_halves(p.seed),
            dropout.threshold(p.dropout),
            bits(1 / (1 - p.dropout)),
            unspecialized(p.origin.heads),
        )
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
        *spans(p.spans),
        *origin(p),
    )


def is_fixed(p: Problem) -> bool:
    """Whether no call like this one needs another rule or other lengths."""
    tensors = (p.mask, p.bias, p.alibi, p.descale, p.spans, p.cu_q, p.kv_lengths)
    return not p.dropout and all(x is None for x in tensors)


def rule_of(a_rule: Rule, x: Inputs) -> Rule:
    """Replace the tensors and the seed by those of this call."""
    tensors = {"mask": x.mask, "bias": x.bias, "alibi": x.alibi, "descale": x.descale, "spans": x.spans}
    if a_rule.seed_low is None and all(tensor is None for tensor in tensors.values()):
        return a_rule
    low, high = (None, 0) if a_rule.seed_low is None else seed_halves(x.seed)
    return a_rule._replace(**tensors, seed_low=low, seed_high=high)


def descaling(x: Any) -> tuple[Any, int, int]:
    """The fields of a Rule for this tensor of descaling factors."""
    if x is None:
        return None, 0, 0
    return x, 0 if x.shape[0] == 1 else x.stride(0), 0 if x.shape[1] == 1 else x.stride(1)


def spans(x: Any) -> tuple[Any, int | None, int | None, int | None, Any]:
    """The fields of a Rule for these limits of spans. Without spans all are None, and kernels lack these parameters."""
    if x is None:
        return None, None, None, None, None
    strides = (0 if n == 1 else s for n, s in zip(x.shape[:3], x.stride()[:3], strict=True))
    return x, *strides, x.shape[3] if INTERPRETED else tl.constexpr(x.shape[3])


def origin(p: Problem) -> tuple[int | None, ...]:
    """The fields of a Rule for the origin of dropout. If it is the default all are None: kernels lack them."""
    x = p.origin
    head = x.sequence * x.heads + x.head
    if not p.dropout or (head, x.query, x.key, x.query_step, x.key_step) == (0, 0, 0, 1, 1):
        return (None,) * 5
    key_step = None if x.key_step == 1 and x.key % 4 == 0 else unspecialized(x.key_step)
    return (*map(unspecialized, (head, x.query, x.query_step, x.key)), key_step)


def constants(p: Problem, config: Config) -> Constants:
    real = tl.float64 if p.accumulator == "float64" else tl.float32
    sizes = (p.group, p.dim, p.dim_v, block(p.dim), block(p.dim_v), config.block_q, config.block_k)
    values = (*sizes, precision(p), real)
    return Constants(*values) if INTERPRETED else Constants(*map(tl.constexpr, values))


def precision(p: Problem) -> str:
    """The precision of products: float32 is exact, unless torch is set to use TF32 for its own."""
    if INTERPRETED:
        return "widened"
    return "tf32" if p.dtype == "float32" and gpu.tf32() else "ieee"


def block(dim: int) -> int:
    """The padded head dim of a tile."""
    return max(16, int(triton.next_power_of_2(dim)))


def unspecialized(n: int) -> int:
    """Encode a 32-bit number as an odd one of 41 bits; plain() decodes it.

    Triton specializes kernels on integers that are 1, on their width and on their alignment. do_not_specialize does not
    apply to fields of tuples.
    """
    return int(UNSPECIALIZED.value) + 2 * n + 1


def length(n: int) -> int:
    """Keep a multiple of ALIGNED as it is: its specialized kernel has fewer registers and wider loads."""
    return n if n % ALIGNED == 0 else unspecialized(n)


def seed_halves(seed: Any) -> tuple[Any, int | None]:
    """The low and the high half of a seed; a tensor is passed on as it is."""
    return (unspecialized(seed & 0xFFFFFFFF), unspecialized(seed >> 32)) if isinstance(seed, int) else (seed, None)


def bits(x: float) -> int:
    """The bits of x as a double; from_bits() decodes them."""
    found: int = struct.unpack("<q", struct.pack("<d", x))[0]
    return found


def limit(x: int, offset: int) -> int | None:
    """A band limit from a query's own index, unspecialized(); None if no sequence is long enough to reach it."""
    return None if x >= FAR or x + offset >= NEAR.value else unspecialized(max(x + offset, -NEAR.value))
