"""The grid of cases (sizes, dtypes, options, layouts), and the expected results and tolerances of each."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

import flashtile as ft
from flashtile.backends import reference
from flashtile.checks.shapes import check_gradients
from flashtile.numerics.dtypes import accumulator, carrier, name_of, narrow, widen
from flashtile.problem import Problem, describe

EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink")
FEW_ROWS = 256  # with fewer rows, the largest error depends on luck


@dataclass(frozen=True)
class Size:
    """The shape of a call. `lengths`: (queries, keys) of each packed sequence; n_q and n_k are then the longest."""

    batch: int
    heads: int
    kv_heads: int
    n_q: int
    n_k: int
    dim: int
    dim_v: int
    lengths: tuple[tuple[int, int], ...] = ()

    @classmethod
    def packed(cls, heads: int, kv_heads: int, dim: int, dim_v: int, *lengths: tuple[int, int]) -> Size:
        n_q, n_k = (max(n) for n in zip(*lengths, strict=True))
        return cls(len(lengths), heads, kv_heads, n_q, n_k, dim, dim_v, lengths)

    def __str__(self) -> str:
        span = "+".join(f"{q}x{k}" for q, k in self.lengths) or f"{self.batch}b{self.n_q}x{self.n_k}"
        return f"{span}h{self.heads}.{self.kv_heads}d{self.dim}.{self.dim_v}"


MakeOption = Callable[[np.random.Generator, Size, str], dict[str, Any]]


def _mask(rng: np.random.Generator, size: Size, *axes: int) -> Any:
    whole = (size.batch, size.heads, size.n_q, size.n_k)
    return rng.random([n if a else 1 for n, a in zip(whole, axes, strict=True)]) < 0.6


def _bias(rng: np.random.Generator, size: Size, dtype: str, *axes: int) -> Any:
    whole = (size.batch, size.heads, size.n_q, size.n_k)
    return narrow(rng.standard_normal([n if a else 1 for n, a in zip(whole, axes, strict=True)]), dtype)


def _spans(rng: np.random.Generator, size: Size, count: int, *axes: int) -> dict[str, Any]:
    """Rising spans with gaps; some are empty, and some end beyond the last key."""
    whole = [n if a else 1 for n, a in zip((size.batch, size.heads, size.n_q), axes, strict=True)]
    ends = np.sort(rng.integers(0, size.n_k + 4, (*whole, 2 * count)), axis=-1)
    begin, end = ends[..., ::2], ends[..., 1::2]
    return {"spans": ft.Spans(begin, np.where(rng.random(begin.shape) < 0.1, begin, end))}


def _documents(rng: np.random.Generator, size: Size, dtype: str) -> dict[str, Any]:
    """Neighbours share their span: rows of tiles have full tiles."""
    of = np.arange(size.n_q) // 19
    return {"spans": ft.Spans(of * 23, of * 23 + 31)}


def _empty_rows(rng: np.random.Generator, size: Size, dtype: str) -> dict[str, Any]:
    mask = _mask(rng, size, 1, 1, 1, 1)
    mask[:, :, ::3] = False
    return {"mask": mask}


def _kv_lengths(rng: np.random.Generator, size: Size, dtype: str) -> dict[str, Any]:
    room = np.array([k for _, k in size.lengths] or [size.n_k] * size.batch)
    lengths = rng.integers((room + 1) // 2, room + 1)
    lengths[1::3] = room[1::3]
    lengths[2::3] = 0
    return {"kv_lengths": lengths}


def _all_options(rng: np.random.Generator, size: Size, dtype: str) -> dict[str, Any]:
    names = ("causal window", "mask", "bias", "alibi", "softcap", "sink", "scale", "dropout", "origin", "kv_lengths")
    return {key: x for name in names for key, x in OPTIONS[name](rng, size, dtype).items()}


# The options of the grid. Windows are narrow enough to cut tiles at every size.
OPTIONS: dict[str, MakeOption] = {
    "plain": lambda rng, size, dtype: {},
    "causal": lambda rng, size, dtype: {"causal": True},
    "window": lambda rng, size, dtype: {"window": (5, 3)},
    "window left": lambda rng, size, dtype: {"window": (7, None)},
    "window right": lambda rng, size, dtype: {"window": (None, 2)},
    "window point": lambda rng, size, dtype: {"window": (0, 0)},
    "causal window": lambda rng, size, dtype: {"causal": True, "window": (30, 9)},
    "band": lambda rng, size, dtype: {"band": ft.Band(9, 14, -3)},
    "band far ahead": lambda rng, size, dtype: {"band": ft.Band(-2, 21, 1)},
    "band far behind": lambda rng, size, dtype: {"band": ft.Band(30, -3, 5)},
    "band of no width": lambda rng, size, dtype: {"band": ft.Band(-5, 3, 0)},
    "spans": lambda rng, size, dtype: _spans(rng, size, 3, 1, 1, 1),
    "spans of rows": _documents,
    "spans of batch": lambda rng, size, dtype: _spans(rng, size, 1, 1, 0, 0),
    "spans of heads": lambda rng, size, dtype: _spans(rng, size, 8, 0, 1, 1),
    "mask": lambda rng, size, dtype: {"mask": _mask(rng, size, 1, 1, 1, 1)},
    "mask of keys": lambda rng, size, dtype: {"mask": _mask(rng, size, 1, 0, 0, 1)},
    "mask of rows": lambda rng, size, dtype: {"mask": _mask(rng, size, 0, 1, 1, 0)},
    "mask with empty rows": _empty_rows,
    "bias": lambda rng, size, dtype: {"bias": _bias(rng, size, dtype, 1, 1, 1, 1)},
    "bias of heads": lambda rng, size, dtype: {"bias": _bias(rng, size, dtype, 0, 1, 1, 1)},
    "bias of keys": lambda rng, size, dtype: {"bias": _bias(rng, size, dtype, 1, 0, 0, 1)},
    "bias of rows": lambda rng, size, dtype: {"bias": _bias(rng, size, dtype, 0, 1, 1, 0)},
    "bias of batch": lambda rng, size, dtype: {"bias": _bias(rng, size, dtype, 1, 1, 0, 0)},
    "bias one number": lambda rng, size, dtype: {"bias": _bias(rng, size, dtype, 0, 0, 0, 0)},
    "bias wide": lambda rng, size, dtype: {"bias": _bias(rng, size, accumulator(dtype), 0, 1, 1, 1)},
    "alibi": lambda rng, size, dtype: {"alibi": narrow(rng.random(size.heads), dtype)},
    "alibi of batch": lambda rng, size, dtype: {
        "alibi": rng.random((size.batch, size.heads)).astype(accumulator(dtype))
    },
    "softcap": lambda rng, size, dtype: {"softcap": 1.5},
    "sink": lambda rng, size, dtype: {"sink": narrow(rng.standard_normal(size.heads), dtype)},
    "sink of nothing": lambda rng, size, dtype: {"sink": np.full(size.heads, -np.inf, accumulator(dtype))},
    "scale": lambda rng, size, dtype: {"scale": 0.37},
    "scale negative": lambda rng, size, dtype: {"scale": -0.2},
    "scale zero": lambda rng, size, dtype: {"scale": 0.0},
    "dropout": lambda rng, size, dtype: {"dropout": 0.3, "seed": 2**63 + 12345},
    "origin": lambda rng, size, dtype: {"origin": ft.Origin(5, 18, 1, 3, size.heads + 2, 2, 3)},
    "origin in fours": lambda rng, size, dtype: {"origin": ft.Origin(1000, 4000)},
    "kv_lengths": _kv_lengths,
    "everything": _all_options,
}
COMBINATIONS = (
    ("causal", "dropout"),
    ("dropout", "origin"),
    ("window", "dropout", "origin in fours"),
    ("causal", "mask", "bias"),
    ("spans", "causal", "dropout", "kv_lengths"),
    ("spans of rows", "window", "alibi", "sink", "softcap"),
    ("spans of batch", "mask of keys", "bias", "sink"),
    ("spans of heads", "everything"),
    ("window", "softcap", "sink"),
    ("causal", "alibi", "kv_lengths"),
    ("window", "bias of keys", "sink", "dropout"),
    ("band", "alibi of batch", "softcap", "mask of keys"),
    ("mask with empty rows", "sink", "bias of rows", "scale"),
    ("kv_lengths", "mask with empty rows", "bias", "dropout"),
)


@dataclass(frozen=True)
class Case:
    """A point of the grid: what determines one call. Hashable, and readable as a test's name."""

    size: Size
    dtype: str
    options: tuple[str, ...] = ("plain",)
    layout: str = "plain"
    wide_out: bool = False

    def __str__(self) -> str:
        extra = ("" if self.layout == "plain" else f"-{self.layout}") + ("-float32 out" if self.wide_out else "")
        return f"{'+'.join(self.options)}-{self.dtype}-{self.size}{extra}"


@dataclass(frozen=True, eq=False)
class Call:
    """The arrays and options of one call, and the gradients of its results."""

    q: Any
    k: Any
    v: Any
    options: dict[str, Any]
    dout: Any
    dlse: Any
    packed: dict[str, Any] = field(default_factory=dict)

    def problem(self) -> Problem:
        return describe(self.q, self.k, self.v, **self.packed, **self.options)

    def inputs(self) -> dict[str, Any]:
        """Every input array, by name."""
        everything = {"q": self.q, "k": self.k, "v": self.v, "dout": self.dout, "dlse": self.dlse}
        everything |= self.packed | self.options
        found = {name: x.limits if isinstance(x, ft.Spans) else x for name, x in everything.items()}
        return {name: x for name, x in found.items() if isinstance(x, np.ndarray)}


LAYOUTS = ("plain", "rows first", "backwards", "columns apart", "columns backwards", "transposed", "expanded")


def with_layout(x: Any, layout: str) -> Any:
    """The values of x in another memory layout: transposed, reversed or strided views (expanded: the first head)."""
    match layout:
        case "rows first":  # (batch, length, heads, dim), as flash_attn and transformers have it
            return np.ascontiguousarray(x.swapaxes(-2, -3)).swapaxes(-2, -3)
        case "backwards":
            every = (slice(None, None, -1),) * (x.ndim - 1)
            return np.ascontiguousarray(x[every])[every]
        case "columns apart":
            room = np.zeros((*x.shape[:-1], 3 * x.shape[-1]), x.dtype)
            room[..., ::3] = x
            return room[..., ::3]
        case "columns backwards":
            return np.ascontiguousarray(x[..., ::-1])[..., ::-1]
        case "transposed":
            return np.ascontiguousarray(x.T).T
        case "expanded":
            first = x[tuple(slice(0, 1) for _ in range(x.ndim - 2))]
            return np.broadcast_to(first, x.shape)
    return np.ascontiguousarray(x)


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, layout: str = "plain") -> Any:
    """Read-only normal numbers in the carrier of a dtype, in this memory layout."""
    x = with_layout(narrow(rng.standard_normal(shape), dtype), layout)
    assert x.shape == shape and x.dtype == carrier(dtype)
    x.flags.writeable = False
    return x


@lru_cache(maxsize=8)
def build(case: Case) -> Call:
    """Build the call of a case: the same numbers every time and for every dtype."""
    size, dtype = case.size, case.dtype
    rng = np.random.default_rng(zlib.crc32(f"{case.options} {size}".encode()))
    out_dtype = accumulator(dtype) if case.wide_out else dtype
    packed = {}
    if size.lengths:
        cu_q, cu_k = (np.cumsum([0, *n]).astype(np.int32) for n in zip(*size.lengths, strict=True))
        packed = {"cu_q": cu_q, "cu_k": cu_k}
        q_shape, k_shape = (int(cu_q[-1]), size.heads), (int(cu_k[-1]), size.kv_heads)
    else:
        q_shape, k_shape = (size.batch, size.heads, size.n_q), (size.batch, size.kv_heads, size.n_k)
    options = {key: x for name in case.options for key, x in OPTIONS[name](rng, size, dtype).items()}
    for name in ("mask", "bias"):
        if name in options:
            options[name] = with_layout(options[name], case.layout)
    if case.wide_out:
        options["out_dtype"] = "float32" if out_dtype == "float32" else np.dtype(out_dtype)
    return Call(
        random_array(rng, (*q_shape, size.dim), dtype, case.layout),
        random_array(rng, (*k_shape, size.dim), dtype, case.layout),
        random_array(rng, (*k_shape, size.dim_v), dtype, case.layout),
        options,
        random_array(rng, (*q_shape, size.dim_v), out_dtype, case.layout),
        random_array(rng, q_shape, accumulator(dtype)),
        packed,
    )


@dataclass(frozen=True, eq=False)
class Truth:
    """The oracle's results, and the errors of standard attention in the dtype of the inputs."""

    out: Any
    lse: Any
    grads: dict[str, Any]
    error: dict[str, float]  # of out, lse and each gradient

    def exact(self, name: str) -> Any:
        return self.grads[name] if name in GRADIENTS else getattr(self, name)


def truth_of(call: Call) -> Truth:
    """Compute the oracle's results in float64, and the errors of the same formula rounded at every step.

    The exact q.k does not depend on the order of columns, but in float32 its rounding does. So standard attention is
    computed with several orders, and its error is the largest of them, not the luck of one order. With few rows the
    largest error varies more, also between processors, so these get more orders.
    """
    dtype = call.problem().dtype
    exact = standard_attention(call, "float64")
    error = dict.fromkeys((name for name, x in exact.items() if x is not None), 0.0)
    rng = np.random.default_rng(0)
    orders = 1 if dtype != "float32" else 4 if exact["lse"].size > FEW_ROWS else 24
    for n in range(0 if dtype == "float64" else orders):
        order = rng.permutation(call.q.shape[-1]) if n else np.arange(call.q.shape[-1])
        found = standard_attention(replace(call, q=call.q[..., order], k=call.k[..., order]), dtype)
        for name in error:
            x = found[name] if name == "lse" else widen(narrow(found[name], dtype), np.float64)
            same_order = exact[name][..., order] if name in ("dq", "dk") else exact[name]
            error[name] = max(error[name], max_error(x, same_order))
    return Truth(exact["out"], exact["lse"], {name: exact[name] for name in GRADIENTS}, error)


def standard_attention(call: Call, precision: str) -> dict[str, Any]:
    problem = call.problem()
    out, lse = reference.forward(problem, precision)
    # The oracle reads neither out nor lse; arrays of their shapes are needed only to reshape dout to rank 4.
    like_out = problem.in_caller_layout(np.zeros(problem.out_shape(), carrier(problem.out_dtype)))
    like_lse = problem.in_caller_layout(np.zeros(problem.out_shape()[:-1], problem.accumulator))
    dout, like_out, like_lse, dlse = check_gradients(problem, call.dout, like_out, like_lse, call.dlse)
    grads = reference.backward(problem, dout, like_out, like_lse, dlse, precision)
    found = {"out": problem.in_caller_layout(out), "lse": problem.in_caller_layout(lse)}
    found |= {name: problem.in_caller_layout(x) for name, x in zip(GRADIENTS[:3], grads[:3], strict=True)}
    return found | {"dbias": grads.dbias, "dsink": grads.dsink}


@lru_cache(maxsize=8)
def truth(case: Case) -> Truth:
    return truth_of(build(case))


def max_error(x: Any, exact: Any) -> float:
    """The largest error; infinite where a value is not finite and the two are not the same."""
    x = widen(np.asarray(x), np.float64).reshape(exact.shape)
    if not x.size:
        return 0.0
    with np.errstate(invalid="ignore"):
        distance = np.abs(x - exact)
    same = (x == exact) | (np.isnan(x) & np.isnan(exact))
    distance = np.where(same, 0, np.where(np.isnan(distance), np.inf, distance))
    return float(distance.max())


def tolerance(name: str, against: Truth, problem: Problem, result_dtype: str) -> float:
    """The allowed error: 2 x that of standard attention in the same dtype, 3 x for gradients, 1e-12 for float64.

    It is at least one unit in the last place of the largest number, since where standard attention happens to be exact
    (with one key, say) a result must still be storable. The largest error of a few numbers depends on luck, also
    standard attention's, so this floor is higher for small results. With few rows (a decode step) it grows by three
    units of the accumulator and, for gradients, by the effect of the rounded lse on each recomputed weight. With few
    numbers in a gradient (of a sink, or of a broadcast bias) it grows by three units of the dtype, since D comes from
    the rounded output, and by one unit of the accumulator, for terms that cancel.
    """
    exact, standard_error = against.exact(name), against.error[name]
    largest = _largest(exact)
    if problem.dtype == "float64":
        return 1e-12 * max(1.0, largest)
    gradient = name in GRADIENTS
    floor = EPS[result_dtype]
    if np.isfinite(against.lse).sum() <= 64:
        largest = max(largest, 1.0) if gradient else largest  # dP - D cancels: its terms are as large as the inputs
        floor += EPS[problem.accumulator] * (3 + (_largest(against.lse) if gradient else 0))
    terms = 0.0
    if gradient and exact.size <= 64:
        floor += EPS[problem.dtype] * 3
        terms = EPS[problem.accumulator]
    return (3 if gradient else 2) * standard_error + floor * largest + terms


def _largest(x: Any) -> float:
    finite = np.abs(x[np.isfinite(x)])
    return float(finite.max()) if finite.size else 0.0


def check(name: str, found: Any, against: Truth, problem: Problem) -> None:
    """Check one result against the oracle."""
    exact = against.exact(name)
    assert found.shape == exact.shape or name == "dbias", f"{name} has shape {found.shape}, not {exact.shape}"
    bound, error = tolerance(name, against, problem, name_of(found.dtype)), max_error(found, exact)
    assert error <= bound, f"{name}: error {error:.3g} > {bound:.3g}; of standard attention: {against.error[name]:.3g}"


def check_forward(call: Call, against: Truth, out: Any, lse: Any) -> None:
    problem = call.problem()
    assert name_of(out.dtype) == problem.out_dtype
    assert name_of(lse.dtype) == problem.accumulator
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(against.lse), "which rows are empty")
    check("out", out, against, problem)
    check("lse", lse, against, problem)


def check_backward(call: Call, against: Truth, grads: Any) -> None:
    problem = call.problem()
    for name, like in zip(GRADIENTS, ("q", "k", "v", "bias", "sink"), strict=True):
        found = getattr(grads, name)
        given = getattr(call, like) if like in "qkv" else call.options.get(like)
        if given is None:
            assert found is None, f"{name} without {like}"
            continue
        assert found.shape == given.shape and found.dtype == given.dtype, f"{name} is not like {like}"
        check(name, found, against, problem)
