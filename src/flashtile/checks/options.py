"""The checks that options.py lists: (name, value, shapes) -> the value for the Problem.

shapes is None while torch.compile traces: arrays are then unchecked, and lengths have no limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flashtile.band import FAR, Band
from flashtile.checks.numbers import LARGEST, TEXT, check_flag, check_integer, check_real
from flashtile.checks.shapes import PADDING_HINT, broadcastable, dtype_of
from flashtile.errors import DTypeError, ShapeError
from flashtile.host.threads import MAX_THREADS
from flashtile.numerics.dtypes import EIGHT_BITS, FLOATS, accumulator, name_of
from flashtile.origin import Origin
from flashtile.spans import MAX_SPANS, Spans

INTEGERS = ("int32", "int64")
MAX_POSITION = 2**31 - 1  # of a query, a key, or a head of a sequence, in the whole that a call is a part of
_name_of = name_of.__wrapped__  # without its cache, about which torch.compile warns


class Shapes(NamedTuple):
    """The sizes and the dtype of a call, for the checks of its options."""

    q: Any
    dtype: str
    sequences: int
    heads: int
    kv_heads: int
    n_q: int
    n_k: int
    cu_q: Any
    cu_k: Any

    @property
    def pairs(self) -> tuple[int, ...]:
        return self.sequences, self.heads, self.n_q, self.n_k

    @property
    def lengths_known(self) -> bool:
        """Whether n_q and n_k are the largest lengths, not just upper bounds."""
        return self.cu_q is None or on_host(self.cu_q)


def unchecked(name: str, x: Any, shapes: Shapes | None) -> Any:
    """Default hook: checked elsewhere."""
    return x


def flag(name: str, x: Any, shapes: Shapes | None) -> bool:
    return check_flag(name, x)


def at_least_zero(name: str, x: Any, shapes: Shapes | None) -> float:
    return check_real(name, x, 0)


def real_or_none(name: str, x: Any, shapes: Shapes | None) -> float | None:
    return None if x is None else check_real(name, x)


def probability(name: str, x: Any, shapes: Shapes | None) -> float:
    number = check_real(name, x, 0)
    if number >= 1:
        raise ShapeError(f"{name}: expected a probability below 1, got {x}")
    return number


def threads(name: str, x: Any, shapes: Shapes | None) -> int | None:
    return None if x is None else check_integer(name, x, 1, MAX_THREADS)


def seed(name: str, x: Any, shapes: Shapes | None) -> Any:
    """Check a number of 64 bits, or, in a call of tensors, a tensor of one."""
    if shapes is None or not (is_tensor(x) and is_tensor(shapes.q)):
        return check_integer(name, x, 0, 2**64 - 1)
    check_seed_tensor(x, shapes.q)
    return x


def check_seed_tensor(seed: Any, q: Any) -> None:
    """Check that it is one int64, on the device of q or on the host."""
    if name_of(seed.dtype) != "int64":
        raise DTypeError(f"seed: expected int64, got {name_of(seed.dtype)}")
    if tuple(seed.shape) not in ((), (1,)):
        raise ShapeError(f"seed: expected shape () or (1,), got {tuple(seed.shape)}")
    if seed.device != q.device and seed.device.type != "cpu":
        raise DTypeError(f"seed: expected a tensor on {q.device} like q, or on a CPU, got one on {seed.device}")


def origin(name: str, x: Any, shapes: Shapes | None) -> Origin | None:
    """Return an Origin with the number of heads filled in; without shapes as it is."""
    if x is None:
        return None if shapes is None else Origin(heads=shapes.heads)
    if not isinstance(x, Origin):
        raise DTypeError(f"{name}: expected a flashtile.Origin, got {type(x).__name__}")

    def number(field: str, least: int) -> int:
        return check_integer(f"{name}.{field}", getattr(x, field), least, MAX_POSITION)

    numbers = {field: number(field, 0) for field in ("query", "key", "head", "sequence")}
    steps = {field: number(field, 1) for field in ("query_step", "key_step")}
    found = Origin(**numbers, heads=None if x.heads is None else number("heads", 1), **steps)
    return found if shapes is None else _within_whole(name, found, shapes)


def _within_whole(name: str, x: Origin, shapes: Shapes) -> Origin:
    """Check that every head is one of the whole, and that all positions fit the counters of dropout."""
    heads, needed = shapes.heads if x.heads is None else x.heads, x.head + shapes.heads
    if heads < needed:
        raise ShapeError(f"{name}.heads: expected at least {needed}, because heads begin at {x.head}, got {heads}")
    ends = {
        "query": x.query + max(shapes.n_q - 1, 0) * x.query_step,
        "key": x.key + max(shapes.n_k - 1, 0) * x.key_step,
        "sequence": (x.sequence + shapes.sequences) * heads,
    }
    for field, end in ends.items():
        if end > MAX_POSITION:
            what = "heads of all sequences" if field == "sequence" else "positions"
            raise ShapeError(f"{name}.{field}: expected {what} up to {MAX_POSITION}, got {end}")
    return Origin(x.query, x.key, x.head, x.sequence, heads, x.query_step, x.key_step)


def window(name: str, x: Any, shapes: Shapes | None) -> tuple[int | None, int | None] | None:
    if x is None:
        return None
    if not isinstance(x, Sequence) or isinstance(x, TEXT) or len(x) != 2:
        raise ShapeError(f"{name}: expected a pair (left, right), got {x!r}")
    most = None if shapes is None else FAR
    left, right = x
    return (
        None if left is None else check_integer(name, left, 0, most),
        None if right is None else check_integer(name, right, 0, most),
    )


def band(name: str, x: Any, shapes: Shapes | None) -> Band | None:
    if x is None:
        return None
    if not isinstance(x, Band):
        raise DTypeError(f"{name}: expected a flashtile.Band, got {type(x).__name__}")
    low, high = (None, None) if shapes is None else (-FAR, FAR)
    return Band(
        check_integer(f"{name}.left", x.left, low, high),
        check_integer(f"{name}.right", x.right, low, high),
        check_integer(f"{name}.offset", x.offset, low, high),
    )


def combine_bands(causal: bool, window: Any, band: Band | None) -> tuple[Band, bool]:
    """Combine checked options into one band; return it, and whether it aligns the last query with the last key."""
    if band is not None:
        if causal or window is not None:
            raise ShapeError("band: expected None with causal or window, got a Band, which can express both")
        return band, False
    left, right = (None, None) if window is None else window
    return Band(FAR if left is None else left, 0 if causal else FAR if right is None else right), True


def spans(name: str, x: Any, shapes: Shapes | None) -> Any:
    """Check the limits of Spans; attention() takes the Spans itself."""
    x = x.limits if isinstance(x, Spans) else x
    if x is None or shapes is None:
        return x
    if dtype_of(name, x) != "int32" or len(x.shape) != 5:
        raise DTypeError(f"{name}: expected a flashtile.Spans, got an array of {dtype_of(name, x)}")
    if not 1 <= x.shape[3] <= MAX_SPANS or x.shape[4] != 2:
        raise ShapeError(f"{name}: expected limits of 1 to {MAX_SPANS} spans per query, got shape {tuple(x.shape)}")
    found, wanted = tuple(x.shape[:3]), shapes.pairs[:3]
    exact = shapes.lengths_known
    for n, (axis, size, limit) in enumerate(zip(("batch", "heads", "queries"), found, wanted, strict=True)):
        if size not in (limit, 1) and (exact or n < 2 or size > limit):  # otherwise queries are an upper bound
            raise ShapeError(f"{name}: expected 1 or {limit} along {axis}, got {size}")
    return x


def mask(name: str, x: Any, shapes: Shapes | None) -> Any:
    if x is None or shapes is None:
        return x
    if (kind := dtype_of(name, x)) != "bool":
        more = "; numbers to be added to the scores are a bias" if kind in FLOATS else ""
        raise DTypeError(f"{name}: expected a boolean array, True where a query may attend, got {kind}{more}")
    shape, (batch, _, n_q, n_k) = tuple(getattr(x, "shape", ())), shapes.pairs
    if shapes.cu_q is None and isinstance(batch, int) and batch == n_q > 1 and shape == (n_q, n_k):
        raise ShapeError(
            f"{name}: expected four axes, because {shape} may be (queries, keys) or (batch, keys), got two; "
            f"{PADDING_HINT}, one of (queries, keys) is mask[None, None]"
        )
    return broadcastable(name, x, shapes.pairs, shapes.lengths_known)


def bias(name: str, x: Any, shapes: Shapes | None) -> Any:
    if x is None or shapes is None:
        return x
    _check_float_dtype(name, x, shapes.dtype)
    return broadcastable(name, x, shapes.pairs, shapes.lengths_known)


def alibi(name: str, x: Any, shapes: Shapes | None) -> Any:
    if x is None or shapes is None:
        return x
    _check_float_dtype(name, x, shapes.dtype)
    wanted, each = (shapes.heads,), (shapes.sequences, shapes.heads)
    if tuple(x.shape) not in (wanted, each):
        raise ShapeError(f"{name}: expected shape {wanted} or {each}, got {tuple(x.shape)}")
    return x if len(x.shape) == 2 else x[None]


def sink(name: str, x: Any, shapes: Shapes | None) -> Any:
    if x is None or shapes is None:
        return x
    _check_float_dtype(name, x, shapes.dtype)
    if tuple(x.shape) != (shapes.heads,):
        raise ShapeError(f"{name}: expected shape ({shapes.heads},), one logit per query head, got {tuple(x.shape)}")
    return x


def kv_lengths(name: str, x: Any, shapes: Shapes | None) -> Any:
    if x is None or shapes is None:
        return x
    _check_integers(name, x)
    if x.shape[0] != shapes.sequences:
        raise ShapeError(f"{name}: expected {shapes.sequences} entries, one per sequence, got {x.shape[0]}")
    if not on_host(x):
        return x
    lengths = x.astype(np.int64, copy=False)
    check_lengths(lengths, shapes.n_k if shapes.cu_k is None else np.diff(shapes.cu_k))
    return lengths


def check_lengths(lengths: Any, available: Any) -> None:
    """Check that no sequence uses more keys than it has."""
    if ((lengths < 0) | (lengths > available)).any():
        raise ShapeError(
            f"kv_lengths: expected values from 0 to the number of keys ({_brief(available)}), got {_brief(lengths)}"
        )


def starts(name: str, cu: Any, total: int) -> tuple[Any, int]:
    """Return the checked starts of packed sequences, and the largest length or, on a device, a bound of it."""
    if cu is None:
        raise ShapeError(f"{name}: expected the starts of the packed sequences, got None")
    _check_integers(name, cu)
    if cu.shape[0] < 1:
        raise ShapeError(f"{name}: expected at least one entry, 0, got none")
    if cu.shape[0] == 1 and total:
        raise ShapeError(f"{name}: expected to rise from 0 to {total}, the number of rows, got one entry")
    if not on_host(cu):
        return cu, total
    cu = cu.astype(np.int64, copy=False)
    if cu[0] != 0 or cu[-1] != total or (cu[1:] < cu[:-1]).any():  # differences could overflow
        raise ShapeError(f"{name}: expected to rise from 0 to {total}, the number of rows, got {_brief(cu)}")
    return cu, int(np.diff(cu).max(initial=0))


def descale(name: str, x: Any, shapes: Shapes | None) -> Any:
    """Check the stacked factors of q, k and v."""
    if x is None or shapes is None:
        return x
    if shapes.dtype != EIGHT_BITS:
        raise DTypeError(f"{name}: expected q of {EIGHT_BITS}, got {shapes.dtype}")
    shape, each = tuple(x.shape), (shapes.sequences, shapes.kv_heads)
    if len(shape) != 3 or shape[0] not in (1, each[0]) or shape[1] not in (1, each[1]) or shape[2] != 3:
        raise ShapeError(f"{name}: expected shape () or {each}, one per key head, got {shape[:-1]}")
    return x


def out_dtype(name: str, x: Any, shapes: Shapes | None) -> str | None:
    if shapes is None:
        return None if x is None else _name_of(x)
    dtype = shapes.dtype
    allowed: tuple[str, ...] = (dtype, accumulator(dtype))
    if dtype == EIGHT_BITS:
        allowed = ("bfloat16", "float16", "float32")
    if x is None:
        return allowed[0]
    found = name_of_any(x)
    if found not in allowed:
        raise DTypeError(f"{name}: expected {' or '.join(dict.fromkeys(allowed))} for {dtype} inputs, got {found}")
    return found


def check_scale_and_softcap(scale: float, softcap: float, real: str) -> None:
    """Check that scale, softcap and scale / softcap, the factor before tanh, are within this dtype."""
    most = LARGEST[real]
    if abs(scale) > most:
        raise ShapeError(f"scale: expected at most {most:.3g} for {real} scores, got {scale}")
    if softcap and not abs(scale) / most <= softcap <= most:
        least = abs(scale) / most
        raise ShapeError(f"softcap: expected 0, or {least:.3g} to {most:.3g} for {real} scores, got {softcap}")


def is_tensor(x: Any) -> bool:
    """Whether x is a torch tensor; does not import torch."""
    return hasattr(x, "__torch_function__")


def on_host(x: Any) -> bool:
    """Whether the values of x can be read without waiting for a device."""
    return isinstance(x, np.ndarray)


def name_of_any(dtype: Any) -> str:
    """Return the name of a dtype, or of the type of anything else."""
    try:
        return name_of(dtype)
    except TypeError:  # unhashable
        return type(dtype).__name__


def _check_integers(name: str, x: Any) -> None:
    kind = dtype_of(name, x)
    if kind not in INTEGERS:
        raise DTypeError(f"{name}: expected int32 or int64, got {kind}")
    if len(x.shape) != 1:
        raise ShapeError(f"{name}: expected one axis, got shape {tuple(x.shape)}")


def _check_float_dtype(name: str, x: Any, dtype: str) -> None:
    kind = dtype_of(name, x)
    allowed = (accumulator(dtype),) if dtype == EIGHT_BITS else (dtype, accumulator(dtype))
    if kind not in allowed:
        raise DTypeError(f"{name}: expected {' or '.join(dict.fromkeys(allowed))}, got {kind}")


def _brief(x: Any) -> str:
    return str(x) if np.ndim(x) == 0 else np.array2string(np.asarray(x), threshold=8)
