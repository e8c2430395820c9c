"""A boolean mask that stores only spans, for models that pass their mask on to the layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from flashtile.errors import UnsupportedError
from flashtile.spans import within

aten: Any = torch.ops.aten


class SpanMask(Tensor):
    """(batch, 1, queries, keys), True where a query may attend. Any function but a few gets it written out."""

    limits: Tensor  # as those of Spans

    @staticmethod
    def __new__(cls, limits: Tensor, shape: Any) -> SpanMask:
        found: SpanMask = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=torch.bool, device=limits.device)  # type: ignore[attr-defined]
        found.limits = limits
        return found

    def __init__(self, limits: Tensor, shape: Any) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        kept = KEPT.get(function)
        found = None if kept is None else kept(*arguments, **options)
        if found is not None:
            return found
        if any(_is_written(x) and isinstance(y, SpanMask) for x, y in zip(function._schema.arguments, arguments)):
            raise UnsupportedError(
                f"attention_mask: expected no changes in place of a mask stored as spans, got {function}; clone it first"
            )
        return function(*tree_map_only(SpanMask, written_out, arguments), **tree_map_only(SpanMask, written_out, options))

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["limits"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _about: Any, shape: Any, _strides: Any) -> SpanMask:
        return SpanMask(inner["limits"], shape)

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        return f"SpanMask({self.limits!r}, {tuple(self.shape)})"


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def written_out(mask: SpanMask) -> Tensor:
    """The same mask as plain booleans."""
    keys = torch.arange(mask.shape[-1], device=mask.device)[:, None]
    found = torch.zeros(mask.shape, dtype=torch.bool, device=mask.device)
    for n in range(mask.limits.shape[-2]):  # not all spans at once, which would take as many times the memory
        found |= within(mask.limits[..., None, n : n + 1, :], keys)
    return found


def _same(mask: Any, *_arguments: Any, dtype: Any = torch.bool, device: Any = None, **_options: Any) -> SpanMask | None:
    """A copy, maybe on another device."""
    if dtype is not None and dtype != torch.bool:
        return None
    return SpanMask(mask.limits if device is None else mask.limits.to(device), mask.shape)


def _slice(mask: Any, axis: int = 0, first: Any = None, last: Any = None, step: int = 1) -> SpanMask | None:
    """Some sequences, queries or first keys."""
    axis %= 4
    first, last, _ = slice(first, last).indices(mask.shape[axis])
    if step != 1 or (axis == 3 and first):
        return None
    shape, limits = list(mask.shape), mask.limits
    shape[axis] = max(last - first, 0)
    if axis != 3 and limits.shape[axis] > 1:
        limits = limits.narrow(axis, first, shape[axis])
    return SpanMask(limits, shape)


# They make another mask of spans, or nothing if they cannot.
KEPT: dict[Any, Callable[..., SpanMask | None]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten._to_copy.default: _same,
    aten.slice.Tensor: _slice,
}
