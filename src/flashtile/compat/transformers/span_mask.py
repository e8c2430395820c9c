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
    whole: Tensor | None  # once it is written out

    @staticmethod
    def __new__(cls, limits: Tensor, shape: Any) -> SpanMask:
        found: SpanMask = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=torch.bool, device=limits.device)
        found.limits, found.whole = limits, None
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
        if any(_is_written(x) for x in zip(function._schema.arguments, arguments, strict=False)):
            raise UnsupportedError(f"attention_mask: expected no changes in place, got {function}; clone() it first")
        arguments, options = tree_map_only(SpanMask, written_out, (arguments, options))
        return function(*arguments, **options)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["limits"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _about: Any, shape: Any, _strides: Any) -> SpanMask:
        return SpanMask(inner["limits"], shape)

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        return f"SpanMask({self.limits!r}, {tuple(self.shape)})"


def _is_written(given: tuple[Any, Any]) -> bool:
    """Whether a function changes this mask: its description of the argument, and the argument."""
    about = given[0].alias_info
    return isinstance(given[1], SpanMask) and about is not None and about.is_write


def written_out(mask: SpanMask) -> Tensor:
    """The same mask as plain booleans."""
    if mask.whole is None:
        keys = torch.arange(mask.shape[-1], device=mask.device)[:, None]
        mask.whole = torch.zeros(mask.shape, dtype=torch.bool, device=mask.device)
        for n in range(mask.limits.shape[-2]):  # all spans at once would take as many times the memory
            mask.whole |= within(mask.limits[..., None, n : n + 1, :], keys)
    return mask.whole


def _same(mask: Any, *_arguments: Any, dtype: Any = torch.bool, device: Any = None, **_options: Any) -> SpanMask | None:
    """The same mask, maybe on another device."""
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
    aten._to_copy.default: _same,
    aten.slice.Tensor: _slice,
}
