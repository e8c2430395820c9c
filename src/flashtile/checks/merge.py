"""Checks of the arguments of merge()."""

from __future__ import annotations

from typing import Any

from flashtile.checks.arguments import check_library, check_tensors
from flashtile.checks.memory import overlap, overlaps_itself
from flashtile.checks.options import is_tensor
from flashtile.errors import DTypeError, ShapeError, UnsupportedError
from flashtile.numerics.dtypes import FLOATS, Array, name_of

SUMS = ("float32", "float64")  # dtypes of an lse that is written


def check_merge(results: tuple[Any, ...], into: Any) -> str:
    """Check that the arguments of merge() are results of the same queries; return their library."""
    if len(results) % 2:
        raise ShapeError(f"merge: expected an lse for each out, got {len(results)} arrays")
    letters = ("a", "b", *range(2, len(results)))
    arrays = {f"{('out', 'lse')[n % 2]}_{letters[n // 2]}": x for n, x in enumerate(results)}
    written = _written(into)
    out_a = results[0]
    kind = check_library(out_a, "out_a", **{name: x for name, x in (arrays | written).items() if name != "out_a"})
    check_tensors(**arrays, **written)
    whole = tuple(out_a.shape)
    if not whole:
        raise ShapeError("out_a: expected at least one axis, got shape ()")
    for name, x in (arrays | written).items():
        shape = whole if name.startswith("out") or name == "into[0]" else whole[:-1]
        if x is None:
            raise DTypeError(f"{name}: expected an array of shape {shape}, got None")
        if tuple(x.shape) != shape:
            raise ShapeError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")
        # Ask the tensor: torch.compile traces this, and cannot trace name_of() of a torch dtype.
        if not (x.is_floating_point() and x.element_size() > 1 if kind == "torch" else name_of(x.dtype) in FLOATS):
            raise DTypeError(f"{name}: expected one of {', '.join(FLOATS)}, got {x.dtype}")
    if written:
        _check_written(arrays, written)
    return kind


def _written(into: Any) -> dict[str, Any]:
    if into is None:
        return {}
    if not isinstance(into, tuple | list) or len(into) != 2:
        raise ShapeError(f"into: expected two arrays, (out, lse), got {type(into).__name__}")
    return {"into[0]": into[0], "into[1]": into[1]}


def _check_written(arrays: dict[str, Any], written: dict[str, Any]) -> None:
    """Check what can be known without the memory of the arrays: layouts, dtypes, gradients."""
    out, lse = written.values()
    if name_of(lse.dtype) not in SUMS if not is_tensor(lse) else lse.element_size() < 4:
        raise DTypeError(f"into[1]: expected one of {', '.join(SUMS)}, got {lse.dtype}")
    if is_tensor(out):
        _check_no_gradients(arrays | written)
    elif not (out.flags.writeable and lse.flags.writeable):
        name = "into[0]" if not out.flags.writeable else "into[1]"
        raise ShapeError(f"{name}: expected an array that can be written, got a read-only one")
    last = out.stride()[-1] if is_tensor(out) else out.strides[-1] / out.itemsize
    if out.shape[-1] > 1 and last != 1 and 0 not in out.shape:
        raise ShapeError(f"into[0]: expected a contiguous last axis, got a stride of {last:g} elements")


def _check_no_gradients(tensors: dict[str, Any]) -> None:
    import torch

    if torch.is_grad_enabled():
        for name, x in tensors.items():
            if x.requires_grad:
                raise UnsupportedError(
                    f"{name}: expected a tensor that needs no gradient, because into= is written in place; call "
                    "merge() without into, or under torch.no_grad()"
                )


def check_memory(results: tuple[Array, ...], into: tuple[Array, Array]) -> None:
    """Check that each array written has its memory to itself, or is exactly one of the results.

    The arrays may be views of any device's memory, which is not read.
    """
    for n, x in enumerate(into):
        if overlaps_itself(x.shape, x.strides, x.itemsize):
            raise ShapeError(f"into[{n}]: expected elements with memory of their own, got strides {x.strides}")
        for m, other in enumerate((*results, into[1 - n])):
            has_same_role = m < len(results) and m % 2 == n
            if overlap(x, other) and not (has_same_role and _is_same(x, other)):
                raise ShapeError(f"into[{n}]: expected one of the results, or memory apart from all of them")


def _is_same(x: Array, y: Array) -> bool:
    def place(x: Array) -> Any:
        steps = (s for n, s in zip(x.shape, x.strides, strict=True) if n > 1)
        return x.__array_interface__["data"][0], name_of(x.dtype), *steps

    return bool(place(x) == place(y))
