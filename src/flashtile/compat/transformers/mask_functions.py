"""The keys that a mask function of transformers makes visible, found without evaluating it for all pairs.

The function is called once, with symbols for all queries and all keys. What it computes from queries alone, or from
keys alone, is an array. Where it compares the two, a binary search finds the keys. A function that does anything else
has to be evaluated for all pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashtile.masks import complement, intersected
from flashtile.spans import FARTHEST, MAX_SPANS, Spans

QUERY, KEY = 2, 3  # axes of (batch, head, query, key)
MOST = 1 << 22  # spans of all queries while a mask is found
LOWEST, HIGHEST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
# Functions that treat each element by itself; names are without the underscores of operators.
_ELEMENTWISE = """
abs add and bitwise_and bitwise_not bitwise_or bool clamp div eq floor_divide floordiv ge gt int invert le logical_and
logical_not logical_or long lt maximum minimum mod mul ne neg or remainder rsub sub to where
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
EXCHANGED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}  # comparisons, sides exchanged
BOTH = ("and", "bitwise_and", "logical_and")
EITHER = ("or", "bitwise_or", "logical_or")
OPPOSITE = ("invert", "bitwise_not", "logical_not")
KEPT = ("to", "bool")  # what is already boolean


class NotSimpleError(Exception):
    """The function has to be evaluated for all pairs."""


class TooManyRunsError(Exception):
    """A query sees more runs of keys than a query can have spans."""


def spans_of(function: Callable[..., Any], batch: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return limits of spans: which of these keys, (n,), the function makes visible to each of these queries, (n,)."""
    head = batch.new_zeros(1, 1, 1, 1)
    at = (batch.view(-1, 1, 1, 1), head, queries.view(1, 1, -1, 1), keys.view(1, 1, 1, -1))
    found = function(*(Numbers(x, axis) for x, axis in zip(at, (None, None, QUERY, KEY), strict=True)))
    begin, end = _visible(found, head).settled(len(keys))
    if begin.shape[-1] > MAX_SPANS:
        raise TooManyRunsError
    limits: Tensor = Spans(begin, end).limits
    return limits


class Symbol:
    """Stands for an array in a mask function."""

    device: torch.device

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, arguments: Any = (), options: Any = None) -> Any:
        return _apply(function, arguments, options or {})

    def __bool__(self) -> NoReturn:
        raise NotSimpleError


def _method(function: Any) -> Any:
    return lambda *arguments, **options: _apply(function, arguments, options)


def _reflected(function: Any) -> Any:
    return lambda right, left: _apply(function, (left, right), {})


OPERATORS = {
    **{"add": torch.add, "sub": torch.sub, "mul": torch.mul, "floordiv": torch.floor_divide, "mod": torch.remainder},
    **{"and": torch.bitwise_and, "or": torch.bitwise_or},
}
for _name, _function in OPERATORS.items():
    setattr(Symbol, f"__{_name}__", _method(_function))
    setattr(Symbol, f"__r{_name}__", _reflected(_function))
for _name in (*EXCHANGED, "neg", "abs", "invert"):
    setattr(Symbol, f"__{_name}__", _method(getattr(Tensor, f"__{_name}__")))
for _name in ("to", "bool", "int", "long", "abs"):
    setattr(Symbol, _name, _method(getattr(Tensor, _name)))


class Numbers(Symbol):
    """An array of rank 4 with a value for each query, or for each key (`axis`), or for neither."""

    def __init__(self, values: Tensor, axis: int | None) -> None:
        if values.ndim != 4 or any(values.shape[n] != 1 for n in {1, QUERY, KEY} - {axis}):
            raise NotSimpleError
        self.values, self.axis, self.device, self.dtype = values, axis, values.device, values.dtype

    def new_ones(self, size: tuple[int, ...], **options: Any) -> Tensor:
        return self.values.new_ones(size, **options)

    def new_zeros(self, size: tuple[int, ...], **options: Any) -> Tensor:
        return self.values.new_zeros(size, **options)


class Difference(Symbol):
    """sign * (values of keys) + (values of queries), or the absolute value of that."""

    def __init__(self, sign: int, keys: Tensor, queries: Any, absolute: bool = False) -> None:
        self.sign, self.keys, self.queries, self.absolute = sign, keys, queries, absolute
        self.device = keys.device

    def compared(self, name: str, limit: Any) -> Visible:
        if self.absolute:
            near = {"lt": "lt", "le": "le", "ge": "lt", "gt": "le"}.get(name)
            if near is None:
                raise NotSimpleError
            signed = Difference(self.sign, self.keys, self.queries)
            within = signed.compared(near, limit).both(signed.compared(EXCHANGED[near], -limit))
            return within if near == name else within.opposite()
        if self.sign < 0:
            return _compared(self.keys, EXCHANGED[name], self.queries - limit)
        return _compared(self.keys, name, limit - self.queries)


class Visible(Symbol):
    """The keys that each query sees: those in its spans that meet all conditions.

    Spans, (batch or 1, 1, queries or 1, spans), rise and do not touch; empty ones are at FARTHEST. A condition is
    (values, low, high): the value of the key, (batch or 1, 1, 1, keys), is in [low, high) of the query.
    """

    def __init__(self, begin: Tensor, end: Tensor, *conditions: tuple[Tensor, Any, Any]) -> None:
        self.begin, self.end, self.conditions, self.device = begin, end, conditions, begin.device

    def both(self, other: Visible) -> Visible:
        spans = _intersection(self.begin, self.end, other.begin, other.end)
        return Visible(*spans, *self.conditions, *other.conditions)

    def either(self, other: Visible) -> Visible:
        return self.opposite().both(other.opposite()).opposite()

    def opposite(self) -> Visible:
        return Visible(*_compact(*complement(*self.settled())))

    def settled(self, count: int = FARTHEST) -> tuple[Tensor, Tensor]:
        """Return the spans of the keys below count that meet the conditions."""
        begin, end = self.begin, self.end.clamp(max=count)
        rising = [_rising_runs(values) for values, _, _ in self.conditions]
        # Those that rise throughout come first: the spans are shorter then, and others split fewer of them.
        for n in sorted(range(len(rising)), key=lambda n: rising[n][1].shape[-1]):
            begin, end = _restricted(begin, end, *self.conditions[n], *rising[n])
        begin, end = _compact(begin, end)
        if begin.shape[-1] > 1:  # those that touch become one
            begin, end = _compact(*complement(*_compact(*complement(begin, end))))
        return begin, end


def _apply(function: Any, arguments: Any, options: dict[str, Any]) -> Any:
    name = function.__name__.strip("_")
    if name == "getitem":
        return _looked_up(*arguments)
    if name not in ELEMENTWISE:
        raise NotSimpleError
    first: Any = arguments[0]
    second: Any = arguments[1] if len(arguments) == 2 else None
    if any(isinstance(x, Visible) for x in arguments):
        if name in KEPT and all(x == torch.bool for x in (*arguments, *options.values()) if isinstance(x, torch.dtype)):
            return first
        if name in OPPOSITE:
            return first.opposite()
        return _combined(name, first, second)
    if any(isinstance(x, Difference) for x in arguments):
        return _with_difference(name, first, second)
    axes = {x.axis for x in arguments if isinstance(x, Numbers)} - {None}
    if len(axes) < 2:
        values = [_values(x) for x in arguments]
        first = next(x for x in values if isinstance(x, Tensor))
        values = [torch.as_tensor(x, device=first.device) if name == "where" else x for x in values]
        return Numbers(function(*values, **options), axes.pop() if axes else None)
    if name in EXCHANGED:
        if first.axis == KEY:
            return _compared(first.values, name, second.values)
        return _compared(second.values, EXCHANGED[name], first.values)
    if name in ("add", "sub") and not options:
        if first.axis == KEY:
            return Difference(1, first.values, -second.values if name == "sub" else second.values)
        return Difference(-1 if name == "sub" else 1, second.values, first.values)
    return _combined(name, first, second)


def _values(x: Any) -> Any:
    """The array of Numbers, or a number as it is."""
    if isinstance(x, Symbol | list | tuple) or (isinstance(x, Tensor) and x.ndim):
        if not isinstance(x, Numbers):
            raise NotSimpleError
        return x.values
    return x


def _looked_up(table: Any, index: Any) -> Numbers:
    """A value of a table for each query or each key."""
    index = index if isinstance(index, tuple) else (index,)
    axes = {x.axis for x in index if isinstance(x, Numbers)} - {None}
    if not isinstance(table, Tensor) or len(axes) > 1:
        raise NotSimpleError
    return Numbers(table[tuple(map(_values, index))], axes.pop() if axes else None)


def _combined(name: str, first: Any, second: Any) -> Visible:
    if name not in BOTH + EITHER:
        raise NotSimpleError
    like = next(x for x in (first, second) if isinstance(x, Symbol))
    a, b = (_visible(x, like.begin if isinstance(like, Visible) else like.values) for x in (first, second))  # type: ignore[attr-defined]
    return a.both(b) if name in BOTH else a.either(b)


def _with_difference(name: str, first: Any, second: Any) -> Any:
    if isinstance(first, Difference) and second is None and not first.absolute:
        if name == "neg":
            return Difference(-first.sign, first.keys, -first.queries)
        if name == "abs":
            return Difference(first.sign, first.keys, first.queries, absolute=True)
    a, b = (x if isinstance(x, Difference) else None for x in (first, second))
    other = second if a is not None else first
    if (a is not None) == (b is not None) or (isinstance(other, Numbers) and other.axis == KEY):
        raise NotSimpleError
    values = _values(other)
    if name in EXCHANGED:
        return a.compared(name, values) if a is not None else b.compared(EXCHANGED[name], values)  # type: ignore[union-attr]
    if a is None or a.absolute or name not in ("add", "sub"):
        raise NotSimpleError
    return Difference(a.sign, a.keys, a.queries + values if name == "add" else a.queries - values)


def _visible(found: Any, like: Tensor) -> Visible:
    begin = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=like.device)
    end = torch.full_like(begin, FARTHEST)
    if isinstance(found, Visible):
        return found
    axis = found.axis if isinstance(found, Numbers) else None
    seen = torch.as_tensor(_values(found), device=like.device)
    if seen.dtype != torch.bool:
        raise NotSimpleError
    if axis == KEY:
        return Visible(begin, end, (seen.long(), 1, 2))
    return Visible(torch.where(seen, begin, FARTHEST), torch.where(seen, end, FARTHEST))


def _compared(values: Tensor, name: str, limit: Any) -> Visible:
    """The keys whose value is less than the query's limit, or equal to it, and so on."""
    for x in (values, limit):
        if isinstance(x, float) or (isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())):
            raise NotSimpleError
    limit = torch.as_tensor(limit, device=values.device).long()
    low = limit + 1 if name == "gt" else LOWEST if name in ("lt", "le") else limit
    high = limit if name == "lt" else HIGHEST if name in ("gt", "ge") else limit + 1
    everything = _visible(True, values)
    found = Visible(everything.begin, everything.end, (values.long(), low, high))
    return found.opposite() if name == "ne" else found


def _rising_runs(values: Tensor) -> tuple[Tensor, Tensor]:
    """The run of each key in which values never fall, (batch or 1, keys), and where the runs begin, (.., runs)."""
    values = values.flatten(0, 2)
    falls = pad(values[:, 1:] < values[:, :-1], (1, 0))
    run = falls.cumsum(-1)
    count = int(run[:, -1].max()) + 1
    begins = torch.searchsorted(run, torch.arange(count, device=run.device).expand(len(run), -1).contiguous())
    return run, begins


def _restricted(
    begin: Tensor, end: Tensor, values: Tensor, low: Any, high: Any, run: Tensor, begins: Tensor
) -> tuple[Tensor, Tensor]:
    """Spans of the keys whose values are in [low, high), where these are the runs of rising values."""
    last = run.shape[-1] - 1
    end = end.clamp(max=last + 1)
    if begins.shape[-1] > 1:
        mine = _at(run, begin.clamp(max=last))
        if bool(((begin < end) & (mine != _at(run, (end - 1).clamp(0, last)))).any()):
            ends = pad(begins[:, 1:], (0, 1), value=last + 1)
            begin, end = _intersection(begin, end, begins[:, None, None], ends[:, None, None])
    rows = values.flatten(0, 2)
    least = rows.min()
    room = rows.max() - least + 2  # values of a run, and one more
    rising = (rows - least) + run * room
    mine = _at(run, begin.clamp(max=last)) * room
    found = []
    for limit in (low, high):
        x = torch.as_tensor(limit, device=rows.device).clamp(least, least + room - 1) - least
        found.append(_first(rising, mine + x))
    begin, end = (x.clamp(begin, end.clamp(min=begin)) for x in found)
    return _compact(begin, end)


def _at(rows: Tensor, where: Tensor) -> Tensor:
    """rows, (batch or 1, keys), at these keys, (batch or 1, 1, queries or 1, spans)."""
    batch = torch.arange(len(rows), device=rows.device).view(-1, 1, 1, 1)
    return rows[batch, where]


def _first(rows: Tensor, x: Tensor) -> Tensor:
    """The first key whose value is not below x."""
    if len(rows) == 1:
        return torch.searchsorted(rows[0], x)
    x = x.expand(len(rows), *x.shape[1:])
    return torch.searchsorted(rows, x.reshape(len(rows), -1)).view(x.shape)


def _intersection(begin: Tensor, end: Tensor, other_begin: Tensor, other_end: Tensor) -> tuple[Tensor, Tensor]:
    rows = math.prod(map(max, begin.shape[:-1], other_begin.shape[:-1]))
    if rows * begin.shape[-1] * other_begin.shape[-1] > MOST:
        raise NotSimpleError
    return _compact(*intersected(begin, end, other_begin, other_end))


def _compact(begin: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Put empty spans last, and drop those that no query has."""
    some = begin < end
    begin, end = (torch.where(some, x, FARTHEST) for x in (begin, end))
    if begin.shape[-1] > 1:
        most = max(int(some.sum(-1).max()), 1)
        begin, end = (x.sort(-1).values[..., :most] for x in (begin, end))
    return begin, end
