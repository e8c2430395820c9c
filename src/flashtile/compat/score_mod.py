"""A score_mod of FlexAttention as options of attention(), or an error that says why options cannot express it.

The function is run on a Score, which stands for any score and records what is done to it. That shows the function's
form for all scores at once, where trying some scores could only suggest it. Its numbers for every batch, head, query
and key are then computed and checked, so the options are exact. This costs an evaluation of the function for all
pairs, some queries at a time: once, or in every call if it needs a gradient or could change unseen.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from flashtile.band import Band
from flashtile.compat.block_mask import BlockMask, Seen, seen_by, take
from flashtile.compat.mods import LARGEST, SLAB, Captured, UnknownError, at_pairs, on_pairs
from flashtile.errors import UnsupportedError

ScoreMod = Callable[..., Any]
Number = Any  # a float, or a scalar tensor that may depend on the positions
MOST_KNOWN = 8  # calls of one function
PROBES = 2048  # pairs at which the options are compared with the function itself
HINT = (
    "flashtile.attention() takes scores of the form softcap(score * scale) + bias, with scale=, softcap=, bias= and "
    "alibi=, and spans= or mask= for hidden pairs"
)


class RefusedError(Exception):
    """No option expresses what a score_mod does."""


@dataclass(frozen=True, eq=False)
class Score:
    """factor * score + bias, or factor * tanh(inner * score) + bias; -inf where not visible.

    Claims are conditions under which this is so, each with the reason to refuse where it does not hold. Its tensors
    are scalars while a score_mod runs. Tracer.on_pairs() gives them four axes, of length 1 where they do not matter.
    """

    dtype: torch.dtype
    device: torch.device
    factor: Number = 1.0
    inner: Number = None
    bias: Number = 0.0
    visible: Tensor | None = None
    claims: tuple[tuple[Tensor | bool, str], ...] = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.removeprefix("__").removesuffix("__")
        operation = _OPERATIONS.get(name)
        if operation is None:
            _refuse(name)
        return operation(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        """A method of tensors."""
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _OPERATIONS:
            return lambda *args, **kwargs: _OPERATIONS[name](self, *args, **kwargs)
        if name.startswith("new_"):
            return getattr(torch.empty((), dtype=self.dtype, device=self.device), name)
        return _refuse(name)

    def __add__(self, other: Any) -> Score:
        return _add(self, other)

    def __sub__(self, other: Any) -> Score:
        return _sub(self, other)

    def __rsub__(self, other: Any) -> Score:
        return _sub(other, self)

    def __mul__(self, other: Any) -> Score:
        return _mul(self, other)

    def __truediv__(self, other: Any) -> Score:
        return _div(self, other)

    def __neg__(self) -> Score:
        return _mul(self, -1.0)

    def __eq__(self, other: object) -> bool:
        _refuse("a comparison")

    __radd__, __rmul__ = __add__, __mul__
    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __hash__ = object.__hash__
    shape = torch.Size([])
    ndim = 0
    requires_grad = False

    def claiming(self, claim: Any, reason: str) -> Score:
        return self if claim is True else replace(self, claims=(*self.claims, (claim, reason)))


def _refuse(what: str) -> NoReturn:
    raise RefusedError(f"they do not include {what} of scores")


def _number(x: Any, dtype: torch.dtype) -> Number:
    """A number that is combined with a score: as a float, or in the dtype of scores if that is wider."""
    if isinstance(x, Score):
        raise RefusedError("it combines the score with itself")
    if isinstance(x, Tensor):
        if x.ndim:
            raise RefusedError(f"a tensor of shape {tuple(x.shape)} is not a number")
        if x.is_complex():
            raise RefusedError("they do not include complex numbers")
        return x.to(torch.promote_types(x.dtype, dtype))
    return float(x)


def _add(a: Any, b: Any, alpha: Any = 1) -> Score:
    if not isinstance(a, Score):
        if alpha != 1:
            _refuse("add with alpha")
        a, b = b, a
    x = _number(b, a.dtype)
    x = x if alpha == 1 else x * alpha
    if a.visible is not None:
        a = a.claiming(a.visible | (x < math.inf), "it adds inf or NaN to a hidden score")
    found: Score = replace(a, bias=a.bias + x)
    return found


def _sub(a: Any, b: Any, alpha: Any = 1) -> Score:
    if isinstance(a, Score):
        x = _number(b, a.dtype)
        return _add(a, -x, alpha)
    if alpha != 1:
        _refuse("sub with alpha")
    negated: Score = _mul(b, -1.0)
    return _add(negated, a)


def _mul(a: Any, b: Any) -> Score:
    if not isinstance(a, Score):
        a, b = b, a
    x = _number(b, a.dtype)
    return _scaled(a, a.factor * _wide(x), a.bias * x, x)


def _div(a: Any, b: Any, *, rounding_mode: Any = None) -> Score:
    if not isinstance(a, Score) or rounding_mode is not None:
        raise RefusedError("it divides by a score, or rounds to integers")
    x = _number(b, a.dtype)
    if isinstance(x, float) and x == 0:
        raise RefusedError("it divides by zero")
    return _scaled(a, a.factor / _wide(x), a.bias / x, x)


def _scaled(score: Score, factor: Number, bias: Number, x: Number) -> Score:
    if score.visible is not None:
        score = score.claiming(score.visible | (x > 0), "it multiplies hidden scores by a number not above 0")
    return replace(score, factor=factor, bias=bias)


def _tanh(score: Score) -> Score:
    if score.inner is not None:
        raise RefusedError("it applies two tanh, and softcap is one")
    score = score.claiming(score.bias == 0, "it adds to the score before tanh, but softcap comes before bias")
    if score.visible is not None:
        score = score.claiming(score.visible, "it hides pairs before tanh, which makes -1 of -inf")
    return replace(score, factor=1.0, inner=score.factor, bias=0.0)


def _where(condition: Tensor, a: Any, b: Any) -> Score:
    if isinstance(a, Score) and isinstance(b, Score):
        return _either(condition, a, b)
    score, x, chosen = (a, b, condition) if isinstance(a, Score) else (b, a, ~condition)
    hidden = _number(x, score.dtype) == -math.inf
    score = score.claiming(chosen | hidden, "it replaces scores by another number than -inf")
    return replace(score, visible=chosen if score.visible is None else chosen & score.visible)


def _either(condition: Tensor, a: Score, b: Score) -> Score:
    if (a.inner is None) != (b.inner is None):
        raise RefusedError("it has tanh for some pairs only")
    claims = [(condition | x, why) for x, why in b.claims] + [(~condition | x, why) for x, why in a.claims]
    visible = None
    if a.visible is not None or b.visible is not None:
        yes = torch.ones((), dtype=torch.bool, device=a.device)
        of_a, of_b = (yes if x.visible is None else x.visible for x in (a, b))
        visible = torch.where(condition, of_a, of_b)

    def chosen(x: Number, y: Number) -> Number:
        same = not isinstance(x, Tensor) and not isinstance(y, Tensor) and x == y
        if same or x is None:
            return x
        kind = torch.promote_types(*(n.dtype if isinstance(n, Tensor) else a.dtype for n in (x, y)))
        x, y = (torch.as_tensor(n, dtype=kind, device=a.device) for n in (x, y))
        return torch.where(condition, x, y)

    numbers = [chosen(_wide(x), _wide(y)) for x, y in ((a.factor, b.factor), (a.inner, b.inner))]
    return replace(
        a, factor=numbers[0], inner=numbers[1], bias=chosen(a.bias, b.bias), visible=visible, claims=tuple(claims)
    )


def _to(score: Score, *args: Any, **kwargs: Any) -> Score:
    for x in (*args, *kwargs.values()):
        dtype = x.dtype if isinstance(x, Tensor | Score) else x
        if isinstance(dtype, torch.dtype) and dtype not in (score.dtype, torch.float64):
            raise RefusedError(f"it rounds scores to {dtype}")
    return score


def _wide(x: Number) -> Number:
    return x.double() if isinstance(x, Tensor) else x


def _like(value: float) -> Callable[..., Tensor]:
    def make(score: Score, *args: Any, **kwargs: Any) -> Tensor:
        fill, options = (args[0] if args else kwargs.pop("fill_value")) if value != value else value, kwargs
        options = {"dtype": score.dtype, "device": score.device, **options}
        return torch.full((), fill, **options)

    return make


_OPERATIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("add", "radd"), _add),
    **dict.fromkeys(("sub", "subtract"), _sub),
    **dict.fromkeys(("rsub",), lambda a, b, alpha=1: _sub(b, a) if alpha == 1 else _refuse("rsub with alpha")),
    **dict.fromkeys(("mul", "multiply", "rmul"), _mul),
    **dict.fromkeys(("div", "divide", "true_divide", "truediv"), _div),
    **dict.fromkeys(("neg", "negative"), lambda x: _mul(x, -1.0)),
    "tanh": _tanh,
    "where": lambda x, y, z: _where(y, x, z) if isinstance(x, Score) or x.dtype is not torch.bool else _where(x, y, z),
    "masked_fill": lambda score, mask, value: _where(~mask, score, value),
    **dict.fromkeys(("to", "type_as"), _to),
    "float": lambda x: _to(x, torch.float32),
    "double": lambda x: _to(x, torch.float64),
    **dict.fromkeys(("clone", "contiguous", "positive"), lambda x, **options: x),
    "zeros_like": _like(0.0),
    "ones_like": _like(1.0),
    "full_like": _like(math.nan),
    **dict.fromkeys(("dim", "ndimension"), lambda x: 0),
    "size": lambda x: x.shape,
    "numel": lambda x: 1,
    "is_floating_point": lambda x: True,
}


class Tracer:
    """Runs a score_mod on Scores."""

    def __init__(self, score_mod: ScoreMod, dtype: torch.dtype, device: torch.device) -> None:
        self.score_mod, self.dtype, self.device = score_mod, dtype, device

    def on_pairs(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Score:
        """For all combinations of these positions."""
        template: list[Any] = []

        def run(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, ...]:
            score = self._run(b, h, i, j)
            template[:] = [score.factor, score.inner, score.bias, score.visible]
            template.extend(x for x, _ in score.claims)
            template.append(tuple(reason for _, reason in score.claims))
            # vmap must return something
            return (*(x for x in template if isinstance(x, Tensor)), torch.zeros((), device=self.device))

        tensors = iter(on_pairs(run, b, h, i, j))
        *found, reasons = [next(tensors) if isinstance(x, Tensor) else x for x in template]
        factor, inner, bias, visible, *claims = found
        claimed = tuple(zip(claims, reasons, strict=True))
        return Score(self.dtype, self.device, factor, inner, bias, visible, claimed)

    def bias(self, *at: Tensor) -> tuple[Tensor, Tensor]:
        """The bias of one pair, and whether it is visible."""
        score = self._run(*at)
        bias = score.bias if isinstance(score.bias, Tensor) else torch.full((), score.bias, dtype=self.dtype)
        yes = torch.ones((), dtype=torch.bool, device=self.device)
        return bias.to(self.device), yes if score.visible is None else score.visible

    def _run(self, *at: Tensor) -> Score:
        found = self.score_mod(Score(self.dtype, self.device), *at)
        if not isinstance(found, Score):
            raise RefusedError("its result does not depend on the score")
        return found


_KNOWN: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def recognized(
    score_mod: ScoreMod, block_mask: BlockMask | None, query: Tensor, key: Tensor, scale: float
) -> dict[str, Any]:
    """Options of attention() for this score_mod and block mask.

    They are kept with the function until something it has captured changes, unless gradients flow to them.
    """
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    sizes = (*query.shape[:3], key.shape[2])
    seen = Seen(*sizes[2:]) if block_mask is None else block_mask.seen
    known, call = _known(score_mod), (sizes, dtype, query.device, torch.is_grad_enabled())
    options = None
    if call in known:
        of_mask, captured, found = known[call]
        same = of_mask is (None if block_mask is None else seen)
        options = found if same and captured.is_unchanged(score_mod) else None
    if options is None:
        options = _recognize(Tracer(score_mod, dtype, query.device), seen, sizes)
        if not any(isinstance(x, Tensor) and x.requires_grad for x in options.values()):
            if len(known) >= MOST_KNOWN:
                known.clear()
            try:
                known[call] = None if block_mask is None else seen, Captured(score_mod), options
            except UnknownError:
                known.pop(call, None)
    return {**options, "scale": scale * options["scale"]}


def _known(score_mod: ScoreMod) -> dict[Any, Any]:
    """What is known of this function."""
    try:
        return _KNOWN.setdefault(score_mod, {})
    except TypeError:  # it has no hash, or cannot be referred to
        return {}


def _recognize(tracer: Tracer, seen: Seen, sizes: tuple[int, int, int, int]) -> dict[str, Any]:
    """The options; their scale is a factor of that of the call."""
    if 0 in sizes:
        return {"scale": 1.0, **seen.options()}
    probe = Probe(tracer, sizes)  # the function's own errors come first
    try:
        options, now_seen = _options(tracer, seen, sizes)
        probe.check(options, seen, now_seen)
    except RefusedError as refused:
        reason, cause = str(refused), None
    except (TypeError, AttributeError, RuntimeError, AssertionError) as error:
        reason, cause = f"it could not be followed ({error})", error
    else:
        return options
    raise UnsupportedError(f"score_mod: expected one that options can express, but {reason}; {HINT}") from cause


def _options(tracer: Tracer, seen: Seen, sizes: tuple[int, int, int, int]) -> tuple[dict[str, Any], Seen]:
    b, h, i, j = (torch.arange(n, device=tracer.device) for n in sizes)
    first = tracer.on_pairs(b, h, i[:2], j)
    for x in (first.factor, first.inner):
        if isinstance(x, Tensor) and x.requires_grad:
            raise RefusedError(
                "it multiplies the score by a number that requires a gradient, and scale and softcap have no gradient"
            )
    # The rest is evaluated for one batch, and one head, if it does not depend on them.
    tensors = [x for x in (first.factor, first.inner, first.bias, first.visible) if isinstance(x, Tensor)]
    tensors += [x for x, _ in first.claims if isinstance(x, Tensor)]
    b, h = (x if any(t.shape[n] > 1 for t in tensors) else x[:1] for n, x in enumerate((b, h)))
    lead = [max(len(x), n) for x, n in zip((b, h), seen.rows(i[:1]).shape[:2], strict=True)]
    rows = torch.split(i, max(SLAB // (lead[0] * lead[1] * len(j)), 1))
    learned = isinstance(first.bias, Tensor) and first.bias.requires_grad

    with torch.no_grad():
        slopes = None if learned else _slopes(tracer, seen, b, h, i, j)
        checked = _Checked(slopes)
        for some in rows:
            checked.add(tracer.on_pairs(b, h, some, j), seen.rows(some), some, j)
    factor, inner = checked.constants.get("factor", 1.0), checked.constants.get("inner")
    if not all(math.isfinite(x) and x for x in (factor, 1.0 if inner is None else inner)):
        raise RefusedError("it multiplies the score by 0, inf or NaN")
    options: dict[str, Any] = {"scale": factor}
    if inner is not None:
        options = {"scale": inner * factor, "softcap": abs(factor)}
    if checked.hides:
        old = seen

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            part, found = tracer.on_pairs(b, h, i, j), old.rows(i)
            if part.visible is not None:
                found = found & part.visible
            return found & (part.bias != -math.inf) if isinstance(part.bias, Tensor) else found

        with torch.no_grad():
            seen = seen_by(visible, lead[0], lead[1], len(i), len(j), i.device)
    options |= seen.options()
    if checked.slopes is None:
        options["bias"] = _bias(tracer, b, h, i, j, len(rows[0]))
    elif bool((checked.slopes != 0).any()):
        slopes = checked.slopes.to(tracer.dtype)
        slopes = slopes.expand(sizes[0] if len(slopes) > 1 else 1, sizes[1]).contiguous()
        options["alibi"] = slopes if len(slopes) > 1 else slopes[0]
        options.setdefault("band", Band())  # the first query stands at the first key
    return options, seen


class _Checked:
    """What the numbers of all visible pairs have shown so far."""

    def __init__(self, slopes: Tensor | None) -> None:
        self.slopes = slopes  # as long as the bias is ALiBi's
        self.constants: dict[str, float] = {}
        self.hides = False  # pairs that the block mask does not hide

    def add(self, part: Score, visible: Tensor, i: Tensor, j: Tensor) -> None:
        for claim, reason in part.claims:
            if not _holds(claim, visible):
                raise RefusedError(reason)
        for hidden in (part.visible, part.bias != -math.inf if isinstance(part.bias, Tensor) else None):
            if hidden is not None:
                self.hides = self.hides or not _holds(hidden, visible)
                visible = visible & hidden
        self._constant("factor", part.factor, visible)
        self._constant("inner", part.inner, visible)
        if self.slopes is not None:
            alibi = -self.slopes[..., None, None] * (i[:, None] - j).abs()
            if not _holds(part.bias == alibi, visible):
                self.slopes = None

    def _constant(self, name: str, x: Number, visible: Tensor) -> None:
        if isinstance(x, Tensor):
            x, visible = torch.broadcast_tensors(x, visible)  # type: ignore[no-untyped-call]
            values = x[visible]
            if not len(values):
                return
            x = float(values[0])
            if not bool((values == x).all()):
                x = math.nan
        if x is not None and self.constants.setdefault(name, x) != x:
            raise RefusedError("it multiplies scores by different numbers (multiply the query instead)")


def _slopes(tracer: Tracer, seen: Seen, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor | None:
    """The slopes that ALiBi would have, (batch or 1, heads or 1), from the neighbours of each query; 0 without any."""
    slopes = torch.zeros(1, 1, dtype=tracer.dtype, device=i.device)
    for step in (-1, 1):
        at = i[(i + step >= 0) & (i + step < len(j))]
        if not len(at):
            continue
        bias, visible = on_pairs(lambda b, h, i, j, step=step: tracer.bias(b, h, i, i + step), b, h, at, j[:1])
        leads = (bias.shape[:2], visible.shape[:2], seen.rows(at[:1]).shape[:2])
        lead = [max(n) for n in zip(*leads, strict=True)]
        bias, visible = (x.expand(*lead, len(at), 1)[..., 0] for x in (bias, visible))
        grid = torch.meshgrid(*(torch.arange(n, device=i.device) for n in lead), at, indexing="ij")
        of_b, of_h, of_i = (x.flatten() for x in grid)
        visible = visible & (bias != -math.inf) & seen.at(of_b, of_h, of_i, of_i + step).reshape(visible.shape)
        first = visible.to(torch.int8).argmax(-1, keepdim=True)
        found = torch.where(visible.any(-1), -bias.gather(-1, first)[..., 0], 0)
        slopes = torch.where(slopes == 0, found, slopes)
    return slopes


def _holds(claim: Tensor | bool, visible: Tensor) -> bool:
    """Whether it holds for all pairs that are visible."""
    return bool((claim | ~visible).all())


def _bias(tracer: Tracer, b: Tensor, h: Tensor, i: Tensor, j: Tensor, at_once: int) -> Tensor:
    """The bias of all pairs, with an axis of length 1 where it does not matter."""

    def of(i: Tensor) -> Tensor:
        x = torch.as_tensor(tracer.on_pairs(b, h, i, j).bias, device=j.device).to(tracer.dtype)
        return x if x.ndim else x.expand(1, 1, 1, 1)

    first = of(i[:2])
    if first.shape[2] == 1:  # all queries have the same, or there is one query
        return first
    pairs = first.shape[0] * first.shape[1] * len(i) * first.shape[3]
    if pairs > LARGEST:
        raise RefusedError(f"its bias has {pairs:.1e} numbers for all pairs (at most {LARGEST:.1e} are stored)")
    return torch.cat([of(some) for some in torch.split(i, at_once)], 2)


class Probe:
    """The function's own results for some scores and pairs, with which the options are compared: a second check."""

    def __init__(self, tracer: Tracer, sizes: tuple[int, int, int, int]) -> None:
        self.tracer = tracer
        source = torch.Generator().manual_seed(0)
        at = [torch.randint(n, (PROBES,), generator=source) for n in sizes]
        for x, n in zip(at, sizes, strict=True):  # the first pair, the last, and those at the other corners
            x[0], x[1] = 0, n - 1
        at[2][2], at[3][2], at[2][3], at[3][3] = 0, sizes[3] - 1, sizes[2] - 1, 0
        self.at = [x.to(tracer.device) for x in at]
        self.scores = 5 * torch.randn(PROBES, generator=source, dtype=tracer.dtype).to(tracer.device)
        with torch.no_grad():
            self.results: Tensor = at_pairs(tracer.score_mod, self.scores, *self.at)

    def check(self, options: dict[str, Any], before: Seen, after: Seen) -> None:
        """Raise RefusedError where options and function differ; pairs are visible before and after the function."""
        b, h, i, j = self.at
        found = self.scores * options["scale"]
        if cap := options.get("softcap"):
            found = cap * torch.tanh(found / cap)
        if (bias := options.get("bias")) is not None:
            found = found + take(bias.detach(), b, h, i, j)
        if (slopes := options.get("alibi")) is not None:
            found = found - take(slopes if slopes.ndim == 2 else slopes[None], b, h) * (i - j).abs()
        found = torch.where(after.at(b, h, i, j), found, -math.inf)
        tolerance = 1e-10 if self.tracer.dtype is torch.float64 else 1e-4
        close = torch.isclose(found.to(self.results.dtype), self.results, tolerance, tolerance, equal_nan=True)
        if not bool((close | ~before.at(b, h, i, j)).all()):
            raise RefusedError("its results differ from those of the operations that it applied to a score")
