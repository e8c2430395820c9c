"""Raw arguments -> Problem, a frozen, checked description of one call; the only place that rejects input."""

from __future__ import annotations

import math
import numbers
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashtile.band import FAR, Band
from flashtile.dtypes import EIGHT_BITS, FLOATS, accumulator, name_of
from flashtile.errors import DTypeError, ShapeError
from flashtile.hardware import Hardware
from flashtile.threads import MOST as MOST_THREADS

MAX_DIM = 512
LARGEST = {"float32": float(np.finfo(np.float32).max), "float64": sys.float_info.max}
MOST_ELEMENTS = 1 << 60  # NumPy counts bytes by 63 bits
TEXT = (str, bytes, bytearray)  # sequences all of them, but never of numbers that somebody meant
INTEGERS = ("int32", "int64")
ARRAYS = ("mask", "bias", "alibi", "sink", "kv_lengths")  # among the options


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
    seed: int
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
    seed: int = 0,
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
    _check_shapes(q, k, v)
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
    scale, softcap, dropout, seed, deterministic, threads = check_numbers(
        scale, softcap, dropout, seed, deterministic, threads
    )
    scale = dim**-0.5 if scale is None else scale
    _check_factors(scale, softcap, accumulator(dtype))
    if mask is not None:
        if name_of(_dtype("mask", mask)) != "bool":
            raise DTypeError(f"mask: expected a boolean array, True where a query may attend, got {_dtype_name(mask)}")
        mask = _broadcastable("mask", mask, pairs, known)
    if bias is not None:
        _like_q("bias", bias, dtype)
        bias = _broadcastable("bias", bias, pairs, known)
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
        seed,
        deterministic,
        threads,
    )


def library(q: Any, first: str = "q", /, **others: Any) -> str:
    """'numpy' or 'torch', whichever q belongs to; every other array must belong to it too, on the same device.

    first: what the caller knows q by.
    """
    if isinstance(q, np.ndarray):
        kind = "numpy"
        if q.__class__ is not np.ndarray:
            _reject_kin(first, q)
        if name_of(q.dtype) == EIGHT_BITS:
            got = f"a NumPy array of {EIGHT_BITS}, which NumPy cannot read"
            raise DTypeError(f"{first}: expected a torch tensor, got {got}")
    elif hasattr(q, "__torch_function__") or type(q).__module__.partition(".")[0] == "torch":
        kind = "torch"
    else:
        raise DTypeError(f"{first}: expected a NumPy array or a torch tensor, got {type(q).__name__}")
    numpy, device = kind == "numpy", None if kind == "numpy" else q.device
    for name, x in others.items():
        if x.__class__ is q.__class__ and (numpy or x.device == device):
            continue
        if x is None and name not in ("k", "v"):
            continue
        if isinstance(x, np.ndarray) != numpy or not hasattr(x, "shape"):
            wanted = "a NumPy array" if numpy else "a torch tensor"
            raise DTypeError(f"{name}: expected {wanted} like {first}, got {type(x).__name__}")
        _reject_kin(name, x)
        if device is not None and x.device != device:
            raise DTypeError(f"{name}: expected a tensor on {device} like {first}, got one on {x.device}")
    return kind


def _reject_kin(name: str, x: Any) -> None:
    """Of NumPy's: arrays that mean something else by the same operations."""
    if isinstance(x, np.ma.MaskedArray):
        raise DTypeError(f"{name}: expected a plain NumPy array, got a masked one, whose mask nobody looks at")
    if isinstance(x, np.matrix):
        raise DTypeError(f"{name}: expected a plain NumPy array, got a matrix, whose axes are always two")


def check_dense(tensors: Mapping[str, Any]) -> None:
    """Of torch's: that none is sparse or nested."""
    for name, x in tensors.items():
        if x.is_nested or str(x.layout) != "torch.strided":
            raise DTypeError(f"{name}: expected a dense tensor, got {'a nested one' if x.is_nested else x.layout}")


def check_numpy(q: Any, options: Mapping[str, Any], /, **others: Any) -> None:
    """That all of them, and those among the options, are NumPy arrays."""
    if library(q, **others, **{name: options.get(name) for name in ARRAYS}) != "numpy":
        raise DTypeError(f"q: expected a NumPy array, got {type(q).__name__}")


def check_unpacked(options: Mapping[str, Any]) -> None:
    """That no sequences are packed, for a function that takes none."""
    for name in ("cu_q", "cu_k"):
        if options.get(name) is not None:
            raise ShapeError(f"{name}: expected none here, where sequences cannot be packed")


def check_merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> str:
    """That these are two results of the same queries; what library() says of them."""
    kind = library(out_a, "out_a", lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    if kind == "torch":
        given = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
        check_dense({name: x for name, x in given.items() if x is not None})
    whole = tuple(out_a.shape)
    if not whole:
        raise ShapeError("out_a: expected at least one axis, got shape ()")
    for name, x, shape in (
        ("out_a", out_a, whole),
        ("lse_a", lse_a, whole[:-1]),
        ("out_b", out_b, whole),
        ("lse_b", lse_b, whole[:-1]),
    ):
        if x is None:
            raise DTypeError(f"{name}: expected an array of shape {shape}, got None")
        if tuple(x.shape) != shape:
            raise ShapeError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")
        # By the tensor itself: torch.compile traces this, and does not take name_of() for a dtype of torch.
        if not (x.is_floating_point() and x.element_size() > 1 if kind == "torch" else name_of(x.dtype) in FLOATS):
            raise DTypeError(f"{name}: expected one of {', '.join(FLOATS)}, got {x.dtype}")
    return kind


def check_starts(cu_q: Any, cu_k: Any) -> None:
    """That there are any; describe() looks at them."""
    for name, x in (("cu_q", cu_q), ("cu_k", cu_k)):
        if x is None:
            raise ShapeError(f"{name}: expected the starts of the sequences, got None")


def check_head(**arrays: Any) -> None:
    """That each is one head, (n, d)."""
    for name, x in arrays.items():
        if x.ndim != 2:
            raise ShapeError(f"{name}: expected one head, (n, d), got shape {x.shape}")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ShapeError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def check_rows_of_floats(name: str, x: Any) -> None:
    """That x is a NumPy array with columns to go through."""
    if not isinstance(x, np.ndarray):
        raise DTypeError(f"{name}: expected a NumPy array, got {type(x).__name__}")
    _reject_kin(name, x)
    if name_of(x.dtype) not in FLOATS:
        raise DTypeError(f"{name}: expected one of {', '.join(FLOATS)}, got {x.dtype}")
    if not x.ndim:
        raise ShapeError(f"{name}: expected at least one axis, got shape ()")


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
            raise DTypeError(f"{name}: expected {dtype}, got {_dtype_name(x)}")
        if problem.packed:
            x = x.swapaxes(0, 1)
        for _ in range(lead):
            x = x[None]
        checked.append(x)
    return checked[0], checked[1], checked[2], checked[3]


def check_size(name: str, value: Any) -> int:
    """A block or chunk size: an integer of at least 1."""
    return _integer(name, value, 1, FAR)


def check_shape(name: str, shape: Any) -> tuple[int, ...]:
    if isinstance(shape, TEXT) or not isinstance(shape, Sequence):
        raise DTypeError(f"{name}: expected a sequence of lengths, got {type(shape).__name__}")
    lengths = tuple(_integer(name, n, 0, FAR) for n in shape)
    if len(lengths) > 4:
        raise ShapeError(f"{name}: expected at most 4 axes, got {lengths}")
    if math.prod(lengths) >= MOST_ELEMENTS:
        raise ShapeError(f"{name}: expected fewer than 2^60 elements, got {lengths}")
    return lengths


def check_dtype(dtype: Any) -> str:
    """The name of a dtype that arrays of a call may have."""
    name = _name(dtype)
    if name not in (*FLOATS, EIGHT_BITS):
        raise DTypeError(f"dtype: expected one of {', '.join((*FLOATS, EIGHT_BITS))}, got {name}")
    return name


def check_hardware(hardware: Any) -> None:
    if not isinstance(hardware, Hardware):
        raise DTypeError(f"hardware: expected a flashtile.hardware.Hardware, got {type(hardware).__name__}")


def to_host(name: str, x: Any) -> Any:
    """Starts or lengths that may be in a tensor on any device, where describe() looks at their values."""
    if not hasattr(x, "cpu") or _dtype_name(x) not in INTEGERS:
        return x
    if x.device.type == "meta":
        raise DTypeError(f"{name}: expected a tensor with values, got one on {x.device}")
    return x.cpu().numpy()


def check_rows(rows: Any, n_q: int) -> Any:
    """Query rows by index, as probabilities() takes them; negative ones count from the end."""
    _reject_kin("rows", rows)
    rows = np.asarray(rows)
    if rows.shape == (0,):  # an empty list has no dtype of its own
        rows = rows.astype(np.int64)
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise DTypeError(f"rows: expected a sequence of integers, got shape {rows.shape} of {rows.dtype}")
    if rows.size and (rows.min() < -n_q or rows.max() >= n_q):
        raise ShapeError(f"rows: expected indices within {n_q} queries, got {rows.min()} to {rows.max()}")
    rows = rows.astype(np.int64)
    return np.where(rows < 0, rows + n_q, rows)


def _dtype(name: str, x: Any) -> Any:
    try:
        return x.dtype
    except AttributeError:
        raise DTypeError(f"{name}: expected an array, got {type(x).__name__}") from None


def _dtype_name(x: Any) -> str:
    return name_of(x.dtype)


def _check_dtypes(q: Any, k: Any, v: Any) -> str:
    dtype = name_of(_dtype("q", q))
    if dtype not in FLOATS and dtype != EIGHT_BITS:
        raise DTypeError(f"q: expected one of {', '.join((*FLOATS, EIGHT_BITS))}, got {dtype}")
    for name, x in (("k", k), ("v", v)):
        if name_of(_dtype(name, x)) != dtype:
            raise DTypeError(f"{name}: expected {dtype} like q, got {_dtype_name(x)}")
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


def _check_shapes(q: Any, k: Any, v: Any) -> None:
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
        raise ShapeError(f"k: expected a number of heads that divides q's {heads}, got {k.shape[1]}")
    if v.shape[1] != k.shape[1]:
        raise ShapeError(f"v: expected {k.shape[1]} heads like k, got {v.shape[1]}")
    if v.shape[2] != k.shape[2]:
        raise ShapeError(f"v: expected {k.shape[2]} keys like k, got {v.shape[2]}")


def _on_host(x: Any) -> bool:
    """Values are looked at only where that costs no device synchronisation."""
    return isinstance(x, np.ndarray)


def _integers(name: str, x: Any) -> None:
    kind = name_of(_dtype(name, x))
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
    room = n_k if cu_k is None else np.diff(cu_k)
    if ((lengths < 0) | (lengths > room)).any():
        raise ShapeError(
            f"kv_lengths: expected values from 0 to the keys given ({_short(room)}), got {_short(lengths)}"
        )
    return lengths


def _short(x: Any) -> str:
    return str(x) if np.ndim(x) == 0 else np.array2string(np.asarray(x), threshold=8)


def check_ends(causal: Any, window: Any, band: Any, most: int | None = FAR) -> tuple[Any, ...]:
    """causal, and the left, right and offset of a band; a window has no offset, and None where it has no end.

    most: None in a graph of torch's, where lengths that have a limit would not be of any length.
    """
    causal = check_flag("causal", causal)
    if band is not None:
        if not isinstance(band, Band):
            raise DTypeError(f"band: expected a flashtile.Band, got {type(band).__name__}")
        if causal or window is not None:
            raise ShapeError("band: expected no causal or window beside it, the band says it all")
        ends = (("left", band.left), ("right", band.right), ("offset", band.offset))
        return causal, *(_integer(f"band.{name}", x, None if most is None else -most, most) for name, x in ends)
    if window is None:
        return causal, None, None, None
    if not isinstance(window, Sequence) or isinstance(window, TEXT) or len(window) != 2:
        raise ShapeError(f"window: expected a pair (left, right), got {window!r}")
    return causal, *(None if x is None else _integer("window", x, 0, most) for x in window), None


def check_numbers(
    scale: Any, softcap: Any, dropout: Any, seed: Any, deterministic: Any, threads: Any
) -> tuple[float | None, float, float, int, bool, int | None]:
    """All of them, as numbers of Python's own."""
    return (
        None if scale is None else _number("scale", scale),
        _at_least_zero("softcap", softcap),
        _probability(dropout),
        _integer("seed", seed, 0, 2**64 - 1),
        check_flag("deterministic", deterministic),
        None if threads is None else _integer("threads", threads, 1, MOST_THREADS),
    )


def _broadcastable(name: str, x: Any, pairs: tuple[int, ...], known: bool) -> Any:
    """x with rank 4, every axis 1 or that of pairs, (sequences, heads, n_q, n_k).

    Unless the lengths of packed sequences are known, n_q and n_k are only what the longest cannot exceed.
    """
    if not hasattr(x, "shape"):
        raise DTypeError(f"{name}: expected an array, got {type(x).__name__}")
    shape = tuple(x.shape)
    whole = pairs[4 - len(shape) :] if len(shape) <= 4 else ()
    exact = len(shape) if known else len(shape) - 2
    if len(shape) > 4 or any(
        n not in (1, m) and (axis < exact or n > m) for axis, (n, m) in enumerate(zip(shape, whole, strict=True))
    ):
        raise ShapeError(f"{name}: expected a shape that broadcasts to {tuple(pairs)}, got {shape}")
    for _ in range(4 - len(shape)):
        x = x[None]
    return x


def _check_factors(scale: float, softcap: float, real: str) -> None:
    """Scores are multiplied with both, and before softcap with the quotient; each has to be a number in their dtype."""
    most = LARGEST[real]
    if abs(scale) > most:
        raise ShapeError(f"scale: expected at most {most:.3g} beside scores of {real}, got {scale}")
    if softcap and not abs(scale) / most <= softcap <= most:
        least = abs(scale) / most
        raise ShapeError(f"softcap: expected 0, or {least:.3g} to {most:.3g} beside scores of {real}, got {softcap}")


def check_descale(descale: Any, q: Any) -> tuple[Any, Any, Any]:
    """The factors of q, k and v, each a number or a float32 tensor of no axes or two."""
    if not isinstance(descale, Sequence) or isinstance(descale, TEXT) or len(descale) != 3:
        raise ShapeError(f"descale: expected three factors, of q, k and v, got {descale!r}")
    checked: list[Any] = []
    whole = None
    for x in descale:
        if x is None or isinstance(x, numbers.Real):
            factor = _number("descale", x)
            if abs(factor) > LARGEST["float32"]:
                raise ShapeError(f"descale: expected a number within float32, got {factor}")
            checked.append(factor)
            continue
        library(q, descale=x)
        if str(x.dtype) != "torch.float32":
            raise DTypeError(f"descale: expected float32, got {x.dtype}")
        shape = tuple(x.shape)
        whole = whole or shape
        if len(shape) not in (0, 2) or (shape and shape != whole):
            raise ShapeError(f"descale: expected shape () or (batch, kv_heads), got {shape}")
        checked.append(x)
    return checked[0], checked[1], checked[2]


def _descale(descale: Any, dtype: str, sequences: int, kv_heads: int) -> Any:
    """The factors of q, k and v side by side."""
    if dtype != EIGHT_BITS:
        raise DTypeError(f"descale: expected q of {EIGHT_BITS} beside it, got {dtype}")
    shape = tuple(descale.shape)
    if len(shape) != 3 or shape[0] not in (1, sequences) or shape[1] not in (1, kv_heads) or shape[2] != 3:
        raise ShapeError(f"descale: expected shape () or ({sequences}, {kv_heads}), one a key head, got {shape[:-1]}")
    return descale


def _like_q(name: str, x: Any, dtype: str) -> None:
    kind = name_of(_dtype(name, x))
    beside = (accumulator(dtype),) if dtype == EIGHT_BITS else (dtype, accumulator(dtype))
    if kind not in beside:
        raise DTypeError(f"{name}: expected {' or '.join(dict.fromkeys(beside))}, got {kind}")


def _out_dtype(out_dtype: Any, dtype: str) -> str:
    allowed: tuple[str, ...] = (dtype, accumulator(dtype))
    if dtype == EIGHT_BITS:
        allowed = ("bfloat16", "float16", "float32")
    if out_dtype is None:
        return allowed[0]
    name = _name(out_dtype)
    if name not in allowed:
        raise DTypeError(f"out_dtype: expected {' or '.join(dict.fromkeys(allowed))} for {dtype} inputs, got {name}")
    return name


def _name(dtype: Any) -> str:
    """Also of what is no dtype at all."""
    try:
        return name_of(dtype)
    except TypeError:  # it cannot be hashed
        return type(dtype).__name__


def check_flag(name: str, value: Any) -> bool:
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise DTypeError(f"{name}: expected True or False, got {value!r}")


def _number(name: str, value: Any) -> float:
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise DTypeError(f"{name}: expected a number, got {type(value).__name__}")
        most = LARGEST["float64"]
        if isinstance(value, numbers.Rational) and (value < -most or not value <= most):
            raise ShapeError(f"{name}: expected a finite number, got one too large for a float")
    number = float(value)
    if not -math.inf < number < math.inf:  # math.isfinite() of a symbol is beyond torch.compile
        raise ShapeError(f"{name}: expected a finite number, got {value}")
    return number


def _at_least_zero(name: str, value: Any) -> float:
    number = _number(name, value)
    if number < 0:
        raise ShapeError(f"{name}: expected a number of at least 0, got {value}")
    return number


def _probability(value: Any) -> float:
    number = _at_least_zero("dropout", value)
    if number >= 1:
        raise ShapeError(f"dropout: expected a probability below 1, got {value}")
    return number


def _integer(name: str, value: Any, low: int | None, high: int | None) -> int:
    """None: no limit that way."""
    if type(value).__name__ == "SymInt":  # in a graph of torch's: the operator checks it when it has a value
        return value  # type: ignore[no-any-return]
    number: int | None = value
    if type(value) is not int:  # so it seems to be while torch.compile traces, and index() of a symbol would settle it
        try:
            number = None if isinstance(value, bool) else operator.index(value)
        except TypeError:  # of a fraction, or of an array of several
            number = None
    if number is None:
        raise DTypeError(f"{name}: expected an integer, got {type(value).__name__}")
    if (low is not None and number < low) or (high is not None and number > high):
        wanted = f"of at least {low}" if high is None else f"from {low} to {high}"
        got = value if abs(number) < 1 << 128 else "a number of very many digits"  # Python refuses to write some
        raise ShapeError(f"{name}: expected an integer {wanted}, got {got}")
    return number
