"""Checks of arguments other than options: library, device, shapes and dtypes."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flashtile.band import FAR
from flashtile.checks.numbers import LARGEST, TEXT, check_integer, check_real
from flashtile.checks.options import INTEGERS, is_tensor, name_of_any
from flashtile.cost.hardware import Hardware
from flashtile.errors import DTypeError, ShapeError
from flashtile.numerics.dtypes import EIGHT_BITS, FLOATS, name_of
from flashtile.options import PLAIN_ARRAYS

MAX_ELEMENTS = 1 << 60  # NumPy counts bytes in 63 bits


def library_of(q: Any, first: str = "q") -> str:
    """Return "numpy" or "torch", the library of q. first: the caller's name of q."""
    if isinstance(q, np.ndarray):
        if q.__class__ is not np.ndarray:
            _reject_masked_or_matrix(first, q)
        if name_of(q.dtype) == EIGHT_BITS:
            got = f"a NumPy array of {EIGHT_BITS}, which NumPy cannot read"
            raise DTypeError(f"{first}: expected a torch tensor, got {got}")
        return "numpy"
    if hasattr(q, "__torch_function__"):
        return "torch"
    raise DTypeError(f"{first}: expected a NumPy array or a torch tensor, got {type(q).__name__}")


def check_library(q: Any, first: str = "q", /, **others: Any) -> str:
    """Return library_of(q); check that all other arrays belong to it and are on the device of q."""
    kind = library_of(q, first)
    numpy, device = kind == "numpy", None if kind == "numpy" else q.device
    for name, x in others.items():
        if x.__class__ is q.__class__ and (numpy or x.device == device):
            continue
        if x is None and name not in ("k", "v"):
            continue
        if isinstance(x, np.ndarray) != numpy or not (numpy or hasattr(x, "__torch_function__")):
            wanted = "a NumPy array" if numpy else "a torch tensor"
            raise DTypeError(f"{name}: expected {wanted} like {first}, got {type(x).__name__}")
        _reject_masked_or_matrix(name, x)
        if device is not None and x.device != device:
            raise DTypeError(f"{name}: expected a tensor on {device} like {first}, got one on {x.device}")
    return kind


def _reject_masked_or_matrix(name: str, x: Any) -> None:
    """Reject NumPy arrays whose operations mean something else."""
    if isinstance(x, np.ma.MaskedArray):
        raise DTypeError(f"{name}: expected a plain NumPy array, got a masked one, whose mask would be ignored")
    if isinstance(x, np.matrix):
        raise DTypeError(f"{name}: expected a plain NumPy array, got a matrix, which always has two axes")


def check_numpy(q: Any, options: Mapping[str, Any], /, **others: Any) -> None:
    """Check that all arrays, also those among the options, are NumPy arrays."""
    if check_library(q, **others, **{name: options.get(name) for name in PLAIN_ARRAYS}) != "numpy":
        raise DTypeError(f"q: expected a NumPy array, got {type(q).__name__}")


def check_unpacked(options: Mapping[str, Any]) -> None:
    """Check that there are no packed sequences, for a function that takes none."""
    for name in ("cu_q", "cu_k"):
        if options.get(name) is not None:
            raise ShapeError(
                f"{name}: expected None, because this function takes no packed sequences, got another value"
            )


def check_tensors(**arrays: Any) -> None:
    """Check tensors that are used before the call itself checks them: dense, with all of their storage."""
    tensors = {name: x for name, x in arrays.items() if is_tensor(x)}
    if tensors:
        from flashtile.pytorch import subclasses

        subclasses.check_plain(tensors)
        subclasses.check_storage_if_eager(tensors)


def check_starts(cu_q: Any, cu_k: Any) -> None:
    """Check that neither is None; describe() checks their values."""
    for name, x in (("cu_q", cu_q), ("cu_k", cu_k)):
        if x is None:
            raise ShapeError(f"{name}: expected the starts of the sequences, got None")


def as_array(name: str, x: Any, like: Any) -> Any:
    """Convert a list of starts or lengths to an array of the library of `like`, on its device."""
    if not isinstance(x, list | tuple):
        return x
    integers = [check_integer(name, n, 0, FAR) for n in x]
    if library_of(like) == "numpy":
        return np.array(integers, np.int64)
    import torch

    return torch.tensor(integers, dtype=torch.int64, device=like.device)


def check_head(**arrays: Any) -> None:
    """Check that each array is one head, (n, d)."""
    for name, x in arrays.items():
        if x.ndim != 2:
            raise ShapeError(f"{name}: expected one head, (n, d), got shape {x.shape}")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ShapeError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def check_rows_of_floats(name: str, x: Any) -> None:
    """Check that x is a NumPy array of floats with at least one axis."""
    if not isinstance(x, np.ndarray):
        raise DTypeError(f"{name}: expected a NumPy array, got {type(x).__name__}")
    _reject_masked_or_matrix(name, x)
    if name_of(x.dtype) not in FLOATS:
        raise DTypeError(f"{name}: expected one of {', '.join(FLOATS)}, got {x.dtype}")
    if not x.ndim:
        raise ShapeError(f"{name}: expected at least one axis, got shape ()")


def check_rows(rows: Any, n_q: int) -> Any:
    """Return checked query indices for probabilities(); negative ones count from the end."""
    _reject_masked_or_matrix("rows", rows)
    rows = np.asarray(rows)
    if rows.shape == (0,):  # an empty list has no dtype of its own
        rows = rows.astype(np.int64)
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise DTypeError(f"rows: expected a sequence of integers, got shape {rows.shape} of {rows.dtype}")
    if rows.size and (rows.min() < -n_q or rows.max() >= n_q):
        raise ShapeError(f"rows: expected indices within {n_q} queries, got {rows.min()} to {rows.max()}")
    rows = rows.astype(np.int64)
    return np.where(rows < 0, rows + n_q, rows)


def check_size(name: str, value: Any) -> int:
    """Check a block or chunk size: an integer of at least 1."""
    return check_integer(name, value, 1, FAR)


def check_shape(name: str, shape: Any) -> tuple[int, ...]:
    if isinstance(shape, TEXT) or not isinstance(shape, Sequence):
        raise DTypeError(f"{name}: expected a sequence of lengths, got {type(shape).__name__}")
    lengths = tuple(check_integer(name, n, 0, FAR) for n in shape)
    if len(lengths) > 4:
        raise ShapeError(f"{name}: expected at most 4 axes, got {lengths}")
    if math.prod(lengths) >= MAX_ELEMENTS:
        raise ShapeError(f"{name}: expected fewer than 2^60 elements, got {lengths}")
    return lengths


def check_dtype(dtype: Any) -> str:
    """Return the name of a dtype that q, k and v may have."""
    name = name_of_any(dtype)
    if name not in (*FLOATS, EIGHT_BITS):
        raise DTypeError(f"dtype: expected one of {', '.join((*FLOATS, EIGHT_BITS))}, got {name}")
    return name


def check_hardware(hardware: Any) -> None:
    if not isinstance(hardware, Hardware):
        raise DTypeError(f"hardware: expected a flashtile.cost.hardware.Hardware, got {type(hardware).__name__}")


def to_host(name: str, x: Any) -> Any:
    """Copy starts or lengths to the host, from a tensor on any device, so that describe() checks their values."""
    if isinstance(x, list | tuple):
        return np.array([check_integer(name, n, 0, FAR) for n in x], np.int64)
    if not hasattr(x, "cpu") or name_of(x.dtype) not in INTEGERS:
        return x
    if x.device.type == "meta":
        raise DTypeError(f"{name}: expected a tensor with values, got one on {x.device}")
    from flashtile.pytorch.interception import check_storage

    check_storage({name: x})
    return x.to("cpu", copy=True).numpy()  # numpy() makes a storage unresizable: not the caller's


def check_descale(descale: Any, q: Any) -> tuple[Any, Any, Any]:
    """Return the checked factors of q, k and v, each a number or a float32 tensor of rank 0 or 2."""
    if not isinstance(descale, Sequence) or isinstance(descale, TEXT) or len(descale) != 3:
        raise ShapeError(f"descale: expected three factors, for q, k and v, got {descale!r}")
    checked: list[Any] = []
    whole = None
    for x in descale:
        if x is None or isinstance(x, numbers.Real):
            factor = check_real("descale", x)
            if abs(factor) > LARGEST["float32"]:
                raise ShapeError(f"descale: expected a number within float32, got {factor}")
            checked.append(factor)
            continue
        check_library(q, descale=x)
        if str(x.dtype) != "torch.float32":
            raise DTypeError(f"descale: expected float32, got {x.dtype}")
        shape = tuple(x.shape)
        whole = whole or shape
        if len(shape) not in (0, 2) or (shape and shape != whole):
            raise ShapeError(f"descale: expected shape () or (batch, kv_heads), got {shape}")
        checked.append(x)
    return checked[0], checked[1], checked[2]
