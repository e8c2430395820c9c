"""Checks of the dtype that gradients are wanted in, and of the buffers that they are added to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashtile.checks.memory import overlap, overlaps_itself
from flashtile.errors import DTypeError, ShapeError
from flashtile.numerics.dtypes import EIGHT_BITS, Array, accumulator, name_of, wider
from flashtile.results import Grads, Target

_name_of: Any = name_of.__wrapped__  # without its cache, about which torch.compile warns


def check_target(dtype: str, grad_dtype: Any, into: Any, inputs: Mapping[str, Any]) -> Target:
    """Return the checked target of a call of this dtype. inputs: what each gradient belongs to, by its name.

    check_buffer() checks what a traced tensor does not have.
    """
    if dtype == EIGHT_BITS:
        raise DTypeError(f"q: expected a dtype that has gradients, got {dtype}")
    name = dtype if grad_dtype is None else _name_of(grad_dtype)
    if name not in (dtype, accumulator(dtype)):
        allowed = " or ".join(dict.fromkeys((dtype, accumulator(dtype))))
        raise DTypeError(f"grad_dtype: expected {allowed} for {dtype} inputs, got {name}")
    buffers = check_buffers(into)
    for label, x in buffers.items():
        like = inputs[label]
        if like is None:
            raise DTypeError(f"into.{label}: expected None, because there is no {label[1:]}, got an array")
        if tuple(x.shape) != tuple(like.shape):
            raise ShapeError(f"into.{label}: expected shape {tuple(like.shape)}, got {tuple(x.shape)}")
        wanted = wider(_name_of(like.dtype), name)
        if (found := _name_of(x.dtype)) != wanted:
            raise DTypeError(f"into.{label}: expected {wanted}, got {found}")
    return Target(name, Grads(*(buffers.get(label) for label in Grads._fields)))


def check_buffers(into: Any) -> dict[str, Any]:
    """Return the buffers by their names, as in a message: into.dq."""
    if into is None:
        return {}
    if not isinstance(into, Grads):
        raise DTypeError(f"into: expected flashtile.Grads of buffers, got {type(into).__name__}")
    found = {label: x for label, x in zip(Grads._fields, into, strict=True) if x is not None}
    for label, x in found.items():
        if not hasattr(x, "shape"):
            raise DTypeError(f"into.{label}: expected an array, got {type(x).__name__}")
    return found


def check_buffer(label: str, x: Any, strides: tuple[int, ...], unit: int, at: int, size: int) -> None:
    """Check that a buffer can be added to in place. strides: in units, of which an element has `unit`; size: bytes."""
    if not x.shape or 0 in x.shape:
        return
    if label in ("dq", "dk", "dv") and strides[-1] != unit and x.shape[-1] > 1:
        raise ShapeError(f"into.{label}: expected contiguous elements along its last axis, got strides {strides}")
    if at % size or any(n % unit for n in strides):
        raise ShapeError(f"into.{label}: expected an address and strides that are multiples of {size} bytes")
    if overlaps_itself(x.shape, strides, unit):
        raise ShapeError(f"into.{label}: expected elements that do not share memory, got strides {strides}")


def check_distinct(inputs: Mapping[str, Array], buffers: Mapping[str, Array]) -> None:
    """Check that no buffer shares memory with an input or another buffer."""
    seen = dict(inputs)
    for name, x in buffers.items():
        for other, y in seen.items():
            if overlap(x, y):
                raise ShapeError(f"into.{name}: expected memory of its own, got that of {other}")
        seen[f"into.{name}"] = x
