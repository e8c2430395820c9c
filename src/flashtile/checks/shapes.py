"""Checks of shapes and dtypes: q, k and v, arrays that broadcast to scores, and gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashtile.errors import DTypeError, ShapeError
from flashtile.numerics.dtypes import EIGHT_BITS, FLOATS, name_of

if TYPE_CHECKING:
    from flashtile.problem import Problem

MAX_DIM = 512
PADDING_HINT = "a mask of (batch, keys) is key_padding_mask"


def dtype_of(name: str, x: Any) -> str:
    try:
        return name_of(x.dtype)
    except AttributeError:
        raise DTypeError(f"{name}: expected an array, got {type(x).__name__}") from None


def check_dtypes(q: Any, k: Any, v: Any) -> str:
    """Return the common dtype of q, k and v."""
    dtype = dtype_of("q", q)
    if dtype not in FLOATS and dtype != EIGHT_BITS:
        raise DTypeError(f"q: expected one of {', '.join((*FLOATS, EIGHT_BITS))}, got {dtype}")
    for name, x in (("k", k), ("v", v)):
        if dtype_of(name, x) != dtype:
            raise DTypeError(f"{name}: expected {dtype} like q, got {name_of(x.dtype)}")
    return dtype


def rank4(name: str, x: Any, rank: int, packed: bool) -> Any:
    """View x as (batch, heads, length, dim); packed sequences have batch 1. rank: that of q."""
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


def check_shapes(q: Any, k: Any, v: Any, packed: bool) -> None:
    """Check that the shapes of q, k and v, of rank 4, match."""
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
        # Most often the axes of heads and lengths are swapped.
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


def broadcastable(name: str, x: Any, pairs: tuple[int, ...], known: bool) -> Any:
    """View x with rank 4, if it broadcasts to pairs, (sequences, heads, n_q, n_k).

    Unless the lengths of packed sequences are known, n_q and n_k are upper bounds.
    """
    if not hasattr(x, "shape"):
        raise DTypeError(f"{name}: expected an array, got {type(x).__name__}")
    shape = tuple(x.shape)
    whole = pairs[4 - len(shape) :] if len(shape) <= 4 else ()
    exact = len(shape) if known else len(shape) - 2
    if len(shape) > 4 or any(
        not _fits(n, m) and (axis < exact or n > m) for axis, (n, m) in enumerate(zip(shape, whole, strict=True))
    ):
        hint = f"; {PADDING_HINT}" if name == "mask" and known and shape == (pairs[0], pairs[3]) else ""
        raise ShapeError(f"{name}: expected a shape that broadcasts to {tuple(pairs)}, got {shape}{hint}")
    for _ in range(4 - len(shape)):
        x = x[None]
    return x


def _fits(n: Any, m: Any) -> bool:
    """Whether an axis of n broadcasts to m. Of data-dependent lengths torch.export may only know that n equals m."""
    return (type(n) is int and n == 1) or bool(n == m or n == 1)


def check_gradients(problem: Problem, dout: Any, out: Any, lse: Any, dlse: Any) -> tuple[Any, Any, Any, Any]:
    """Check dout, out, lse and dlse; return views of rank 4 (lse, dlse: rank 3)."""
    lead = 1 if problem.packed else 4 - problem.rank
    shape = problem.out_shape()
    caller_shape = [shape[2], shape[1], shape[3]] if problem.packed else list(shape[lead:])
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
        wanted = tuple(caller_shape if name in ("dout", "out") else caller_shape[:-1])
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
