"""Raw arguments -> Problem, a frozen, checked description of one call; with checks/ all that rejects input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flashtile.band import FAR, Band
from flashtile.checks.arguments import (
    INTEGERS,
    LARGEST,
    check_ends,
    check_numbers,
    check_seed,
    dtype_of,
    is_tensor,
    name_of_any,
)
from flashtile.errors import DTypeError, ShapeError
from flashtile.numerics.dtypes import EIGHT_BITS, FLOATS, accumulator, name_of

MAX_DIM = 512
_PADDING = "a mask of (batch, keys) is key_padding_mask"


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention call. Arrays are views of rank 4, (batch, heads, length, dim); packed ones have batch 1.

    mask and bias have rank 4 too, each axis 1 or whole; alibi has shape (sequences or 1, heads), sink (heads,).
    """

    q: Any
    k: Any
    v: Any
    mask: Any
    bias: Any
    alibi: Any
    sink: Any
    kv_lengths: Any
    cu_q: Any  # packed: where sequence s begins among the rows of q; None otherwise
    cu_k: Any
    descale: Any  # of 8-bit q, k and v: (sequences or 1, kv_heads or 1, 3); None: all 1
    sequences: int  # batch, or how many sequences are packed
    heads: int
    kv_heads: int
    n_q: int  # queries of the longest sequence
    n_k: int
    dim: int
    dim_v: int
    dtype: str
    out_dtype: str
    rank: int  # of q as it came
    band: Band  # its offset counts only where align_end is False
    align_end: bool  # the last query of a sequence stands at its last key
    scale: float
    softcap: float
    dropout: float
    seed: Any  # a number; or a tensor of one, beside tensors of a GPU
    deterministic: bool
    threads: int | None

    @property
    def packed(self) -> bool:
        return self.cu_q is not None

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def accumulator(self) -> str:
        return accumulator(self.dtype)

    @property
    def q_lengths(self) -> list[int]:
        """Queries of each sequence."""
        return [self.n_q] * self.sequences if self.cu_q is None else np.diff(self.cu_q).tolist()

    @property
    def k_lengths(self) -> list[int]:
        """Keys in use of each sequence."""
        if self.kv_lengths is not None:
            return [int(n) for n in self.kv_lengths]
        return [self.n_k] * self.sequences if self.cu_k is None else np.diff(self.cu_k).tolist()

    def band_for(self, n_q: int, n_k: int) -> Band:
        """The band of a sequence of n_q queries and n_k keys."""
        return Band(self.band.left, self.band.right, n_k - n_q) if self.align_end else self.band

    def out_shape(self) -> tuple[int, ...]:
        """The rank-4 shape of the output; the lse has it without the last axis."""
        return (*self.q.shape[:3], self.dim_v)

    def as_given(self, x: Any) -> Any:
        """A rank-4 result, or a rank-3 lse, in the layout the caller used."""
        if self.packed:
            return x[0].swapaxes(0, 1)
        for _ in range(4 - self.rank):
            x = x[0]
        return x


def describe(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    band: Band | None = None,
    mask: Any = None,
    bias: Any = None,
    alibi: Any = None,
    softcap: float = 0.0,
    sink: Any = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Any = 0,
    kv_lengths: Any = None,
    out_dtype: Any = None,
    deterministic: bool = False,
    threads: int | None = None,
    descale: Any = None,
    cu_q: Any = None,
    cu_k: Any = None,
) -> Problem:
    """Check one call and describe it. Works on NumPy arrays, and by shape alone on torch and fake tensors."""
    dtype = _check_dtypes(q, k, v)
    rank = len(q.shape)
    packed = cu_q is not None or cu_k is not None
    if packed or not rank == len(k.shape) == len(v.shape) == 4:
        q, k, v = (_rank4(name, x, rank, packed) for name, x in (("q", q), ("k", k), ("v", v)))
    batch, heads, n_q, dim = q.shape
    _, kv_heads, n_k, dim_v = v.shape
    _check_shapes(q, k, v, packed)
    sequences = batch
    if packed:
        cu_q, n_q = _cumulative("cu_q", cu_q, n_q)
        cu_k, n_k = _cumulative("cu_k", cu_k, n_k)
        sequences = cu_q.shape[0] - 1
        if cu_k.shape[0] != cu_q.shape[0]:
            raise ShapeError(f"cu_k: expected as many entries as cu_q ({cu_q.shape[0]}), got {cu_k.shape[0]}")
    pairs = (sequences, heads, n_q, n_k)
    known = not packed or _on_host(cu_q)
    causal, left, right, offset = check_ends(causal, window, band)
    given_band = Band(FAR if left is None else left, 0 if causal else FAR if right is None else right, offset or 0)
    unread = seed if is_tensor(seed) and is_tensor(q) else None
    if unread is not None:
        check_seed(unread, q)
    scale, softcap, dropout, seed, deterministic, threads = check_numbers(
        scale, softcap, dropout, 0 if unread is not None else seed, deterministic, threads
    )
    scale = dim**-0.5 if scale is None else scale
    _check_factors(scale, softcap, accumulator(dtype))
    if mask is not None:
        if (kind := dtype_of("mask", mask)) != "bool":
            more = "; numbers to be added to the scores are a bias" if kind in FLOATS else ""
            raise DTypeError(f"mask: expected a boolean array, True where a query may attend, got {kind}{more}")
        if not packed:
            _check_meaning(mask, pairs)
        mask = broadcastable("mask", mask, pairs, known)
    if bias is not None:
        _like_q("bias", bias, dtype)
        bias = broadcastable("bias", bias, pairs, known)
    if alibi is not None:
        _like_q("alibi", alibi, dtype)
        if tuple(alibi.shape) not in ((heads,), (sequences, heads)):
            raise ShapeError(f"alibi: expected shape ({heads},) or ({sequences}, {heads}), got {tuple(alibi.shape)}")
        alibi = alibi if len(alibi.shape) == 2 else alibi[None]
    if sink is not None:
        _like_q("sink", sink, dtype)
        if tuple(sink.shape) != (heads,):
            raise ShapeError(f"sink: expected shape ({heads},), one logit a query head, got {tuple(sink.shape)}")
    if kv_lengths is not None:
        kv_lengths = _kv_lengths(kv_lengths, sequences, n_k, cu_k)
    if descale is not None:
        descale = _descale(descale, dtype, sequences, kv_heads)
    return Problem(
        q,
        k,
        v,
        mask,
        bias,
        alibi,
        sink,
        kv_lengths,
        cu_q,
        cu_k,
        descale,
        sequences,
        heads,
        kv_heads,
        n_q,
        n_k,
        dim,
        dim_v,
        dtype,
        _out_dtype(out_dtype, dtype),
        rank,
        given_band,
        offset is None,
        scale,
        softcap,
        dropout,
        seed if unread is None else unread,
        deterministic,
        threads,
    )


def check_gradients(problem: Problem, dout: Any, out: Any, lse: Any, dlse: Any) -> tuple[Any, Any, Any, Any]:
    """What attention_backward takes besides the inputs, as views of rank 4 (lse, dlse: rank 3)."""
    lead = 1 if problem.packed else 4 - problem.rank
    shape = problem.out_shape()
    given = [shape[2], shape[1], shape[3]] if problem.packed else list(shape[lead:])
    checked: list[Any] = []
    for name, x, dtype in (
        ("dout", dout, problem.out_dtype),
        ("out", out, problem.out_dtype),
        ("lse", lse, problem.accumulator),
        ("dlse", dlse, problem.accumulator),
    ):
        if x is None and name == "dlse":
            checked.append(None)
            continue
        wanted = tuple(given if name in ("dout", "out") else given[:-1])
        if not hasattr(x, "shape"):
            raise DTypeError(f"{name}: expected an array of shape {wanted}, got {type(x).__name__}")
        if tuple(x.shape) != wanted:
            raise ShapeError(f"{name}: expected shape {wanted}, got {tuple(x.shape)}")
        if name_of(x.dtype) != dtype:
            raise DTypeError(f"{name}: expected {dtype}, got {name_of(x.dtype)}")
        if problem.packed:
            x = x.swapaxes(0, 1)
        for _ in range(lead):
            x = x[None]
        checked.append(x)
    return checked[0], checked[1], checked[2], checked[3]


def _check_dtypes(q: Any, k: Any, v: Any) -> str:
    dtype = dtype_of("q", q)
    if dtype not in FLOATS and dtype != EIGHT_BITS:
        raise DTypeError(f"q: expected one of {', '.join((*FLOATS, EIGHT_BITS))}, got {dtype}")
    for name, x in (("k", k), ("v", v)):
        if dtype_of(name, x) != dtype:
            raise DTypeError(f"{name}: expected {dtype} like q, got {name_of(x.dtype)}")
    return dtype


def _rank4(name: str, x: Any, rank: int, packed: bool) -> Any:
    shape = x.shape
    if packed:
        if len(shape) != 3:
            raise ShapeError(f"{name}: expected a packed shape (total, heads, dim), got {tuple(shape)}")
        return x.swapaxes(0, 1)[None]
    if len(shape) != rank or not 2 <= rank <= 4:
        wanted = "2, 3 or 4 axes, (batch, heads, length, dim)" if name == "q" else f"{rank} axes like q"
        raise ShapeError(f"{name}: expected {wanted}, got shape {tuple(shape)}")
    for _ in range(4 - rank):
        x = x[None]
    return x


def _check_shapes(q: Any, k: Any, v: Any, packed: bool) -> None:
    batch, heads, _, dim = q.shape
    if k.shape[0] != batch or v.shape[0] != batch:
        name, x = ("k", k) if k.shape[0] != batch else ("v", v)
        raise ShapeError(f"{name}: expected batch {batch} like q, got {x.shape[0]}")
    if k.shape[3] != dim:
        raise ShapeError(f"k: expected head dim {dim} like q, got {k.shape[3]}")
    for name, x in (("q", q), ("v", v)):
        if not 1 <= x.shape[3] <= MAX_DIM:
            raise ShapeError(f"{name}: expected a head dim from 1 to {MAX_DIM}, got {x.shape[3]}")
    if k.shape[1] < 1 or heads < 1 or heads % k.shape[1]:
        # Most often these are lengths: heads and lengths were given in each other's place.
        call, axes = ("attention_packed", "total, heads, dim") if packed else ("attention", "batch, heads, length, dim")
        hint = "" if packed else ', or (batch, length, heads, dim) with layout="bnhd"'
        raise ShapeError(
            f"k: expected a number of heads that divides q's {heads}, got {k.shape[1]}; "
            f"in {call}() axes are ({axes}){hint}"
        )
    if v.shape[1] != k.shape[1]:
        raise ShapeError(f"v: expected {k.shape[1]} heads like k, got {v.shape[1]}")
    if v.shape[2] != k.shape[2]:
        raise ShapeError(f"v: expected {k.shape[2]} keys like k, got {v.shape[2]}")


def _on_host(x: Any) -> bool:
    """Values are looked at only where that costs no device synchronisation."""
    return isinstance(x, np.ndarray)


def _integers(name: str, x: Any) -> None:
    kind = dtype_of(name, x)
    if kind not in INTEGERS:
        raise DTypeError(f"{name}: expected int32 or int64, got {kind}")
    if len(x.shape) != 1:
        raise ShapeError(f"{name}: expected one axis, got shape {tuple(x.shape)}")


def _cumulative(name: str, cu: Any, total: int) -> tuple[Any, int]:
    """A checked array of starts, and the longest sequence (as far as the host can know it)."""
    if cu is None:
        raise ShapeError(f"{name}: expected the starts of the packed sequences, got None")
    _integers(name, cu)
    if cu.shape[0] < 1:
        raise ShapeError(f"{name}: expected at least one entry, 0, got none")
    if cu.shape[0] == 1 and total:
        raise ShapeError(f"{name}: expected to rise from 0 to {total}, the rows given, got one entry")
    if not _on_host(cu):
        return cu, total
    cu = cu.astype(np.int64, copy=False)
    if cu[0] != 0 or cu[-1] != total or (cu[1:] < cu[:-1]).any():  # not by differences, which may wrap around
        raise ShapeError(f"{name}: expected to rise from 0 to {total}, the rows given, got {_short(cu)}")
    return cu, int(np.diff(cu).max(initial=0))


def _kv_lengths(lengths: Any, sequences: int, n_k: int, cu_k: Any) -> Any:
    _integers("kv_lengths", lengths)
    if lengths.shape[0] != sequences:
        raise ShapeError(f"kv_lengths: expected {sequences} entries, one a sequence, got {lengths.shape[0]}")
    if not _on_host(lengths):
        return lengths
    lengths = lengths.astype(np.int64, copy=False)
    check_lengths(lengths, n_k if cu_k is None else np.diff(cu_k))
    return lengths


def check_lengths(lengths: Any, room: Any) -> None:
    """That no sequence uses more keys than it has."""
    if ((lengths < 0) | (lengths > room)).any():
        raise ShapeError(
            f"kv_lengths: expected values from 0 to the keys given ({_short(room)}), got {_short(lengths)}"
        )


def _short(x: Any) -> str:
    return str(x) if np.ndim(x) == 0 else np.array2string(np.asarray(x), threshold=8)


def broadcastable(name: str, x: Any, pairs: tuple[int, ...], known: bool) -> Any:
    """x with rank 4, every axis 1 or that of pairs, (sequences, heads, n_q, n_k).

    Unless the lengths of packed sequences are known, n_q and n_k are only what the longest cannot exceed.
    """
    if not hasattr(x, "shape"):
        raise DTypeError(f"{name}: expected an array, got {type(x).__name__}")
    shape = tuple(x.shape)
    whole = pairs[4 - len(shape) :] if len(shape) <= 4 else ()
    exact = len(shape) if known else len(shape) - 2
    if len(shape) > 4 or any(
        not _fits(n, m) and (axis < exact or n > m) for axis, (n, m) in enumerate(zip(shape, whole, strict=True))
    ):
        hint = f"; {_PADDING}" if name == "mask" and known and shape == (pairs[0], pairs[3]) else ""
        raise ShapeError(f"{name}: expected a shape that broadcasts to {tuple(pairs)}, got {shape}{hint}")
    for _ in range(4 - len(shape)):
        x = x[None]
    return x


def _fits(n: Any, m: Any) -> bool:
    """Whether an axis of n broadcasts to m. Of lengths that depend on data torch.export can only tell that it is m."""
    return (type(n) is int and n == 1) or bool(n == m or n == 1)


def _check_meaning(mask: Any, pairs: tuple[int, ...]) -> None:
    """That a mask of two axes cannot be (batch, keys) as well as (queries, keys)."""
    batch, _, n_q, n_k = pairs
    shape = tuple(getattr(mask, "shape", ()))
    if len(shape) == 2 and isinstance(batch, int) and batch == n_q > 1 and shape == (n_q, n_k):
        raise ShapeError(
            f"mask: expected four axes, because {shape} may be (queries, keys) or (batch, keys), got two; "
            f"{_PADDING}, one of (queries, keys) is mask[None, None]"
        )


def _check_factors(scale: float, softcap: float, real: str) -> None:
    """Scores are multiplied with both, and before softcap with the quotient; each has to be a number in their dtype."""
    most = LARGEST[real]
    if abs(scale) > most:
        raise ShapeError(f"scale: expected at most {most:.3g} beside scores of {real}, got {scale}")
    if softcap and not abs(scale) / most <= softcap <= most:
        least = abs(scale) / most
        raise ShapeError(f"softcap: expected 0, or {least:.3g} to {most:.3g} beside scores of {real}, got {softcap}")


def _descale(descale: Any, dtype: str, sequences: int, kv_heads: int) -> Any:
    """The factors of q, k and v side by side."""
    if dtype != EIGHT_BITS:
        raise DTypeError(f"descale: expected q of {EIGHT_BITS} beside it, got {dtype}")
    shape = tuple(descale.shape)
    if len(shape) != 3 or shape[0] not in (1, sequences) or shape[1] not in (1, kv_heads) or shape[2] != 3:
        raise ShapeError(f"descale: expected shape () or ({sequences}, {kv_heads}), one a key head, got {shape[:-1]}")
    return descale


def _like_q(name: str, x: Any, dtype: str) -> None:
    kind = dtype_of(name, x)
    beside = (accumulator(dtype),) if dtype == EIGHT_BITS else (dtype, accumulator(dtype))
    if kind not in beside:
        raise DTypeError(f"{name}: expected {' or '.join(dict.fromkeys(beside))}, got {kind}")


def _out_dtype(out_dtype: Any, dtype: str) -> str:
    allowed: tuple[str, ...] = (dtype, accumulator(dtype))
    if dtype == EIGHT_BITS:
        allowed = ("bfloat16", "float16", "float32")
    if out_dtype is None:
        return allowed[0]
    name = name_of_any(out_dtype)
    if name not in allowed:
        raise DTypeError(f"out_dtype: expected {' or '.join(dict.fromkeys(allowed))} for {dtype} inputs, got {name}")
    return name
