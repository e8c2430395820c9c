"""plan(): what a call would do, from its shapes alone: backend, tiles, FLOPs, bytes, and its least time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flashtile import dispatch
from flashtile.backends import tiles
from flashtile.band import FAR, Band, Kind, ceil_div, cuts
from flashtile.checks.arguments import check_dtype, check_hardware, check_shape, to_host
from flashtile.checks.keywords import check_keywords
from flashtile.checks.options import is_tensor
from flashtile.cost import traffic
from flashtile.cost.hardware import Hardware, Rates
from flashtile.cost.tiling import Tiling
from flashtile.numerics.dtypes import EIGHT_BITS, ITEMSIZE, Array, accumulator, carrier, fallback_dtype
from flashtile.options import DEFAULTS, OPTIONS, Options
from flashtile.problem import Problem, describe

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, slots=True)
class Floor:
    """No schedule on a machine of these rates can be faster than `seconds`."""

    seconds: float
    bound: str  # "compute" or "memory"
    rates: Rates

    @classmethod
    def under(cls, flops: int, least_bytes: int, rates: Rates) -> Floor:
        compute, memory = flops / rates.flops, least_bytes / rates.bytes
        return cls(max(compute, memory), "compute" if compute >= memory else "memory", rates)


@dataclass(frozen=True, slots=True)
class Plan:
    """One forward call, over all sequences and heads. Bytes and FLOPs are counts, not measurements."""

    backend: str | None  # None: no row of the dispatch table can run it
    reasons: dict[str, str]  # why not, for every other row
    device: str
    dtype: str
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    tile: tuple[int, int]  # query rows and keys
    tile_heads: int  # query heads that share a tile, each with its own rows
    rows_at_once: int  # rows of scores that exist at a time
    tile_of: str | None  # the backend with this tile, or the one that would run on the hardware given; None: no one
    blocks: dict[str, int]  # bytes of the blocks of a tile: Q, K and V as they travel, S and O as accumulated
    tiles: dict[str, int]  # skipped, partial, full
    band: Band  # of the longest sequence
    pairs: int  # visible pairs of query and key
    flops: int
    backward_flops: int
    tile_bytes: int  # moved between memory and tiles in FlashAttention-2 order, without a cache
    least_bytes: int  # q, the visible keys and values, out and lse, each moved once
    standard_bytes: int  # moved by standard attention: scores and weights written and read
    score_bytes: int  # the score matrix that is never built
    lse_bytes: int
    kv_bytes: int  # keys and values: this call's share of a KV cache
    floor: Floor | None

    @property
    def intensity(self) -> float:
        """FLOPs per byte, if every byte is moved once."""
        return self.flops / self.least_bytes if self.least_bytes else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an unlimited side of the band is None."""
        band = {key: None if n == FAR else n for key, n in asdict(self.band).items()}
        return {**asdict(self), "band": band, "intensity": self.intensity}


def plan(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    dtype: Any = "float32",
    device: Any = "cpu",
    *,
    v_shape: Sequence[int] | None = None,
    cu_q: Any = None,
    cu_k: Any = None,
    backend: str = "auto",
    hardware: Hardware | None = None,
    **options: Unpack[Options],
) -> Plan:
    """Return what attention() would do with arrays of these shapes, without the arrays.

    Takes every option of attention(); mask, bias, alibi and sink may be given as shapes. With `hardware`, the plan also
    has the least time there, and the tile of that GPU. A device is "cpu", "cuda" or a torch device, whose index is
    ignored. On a CPU, a torch device or dtype means tensors, any other NumPy arrays.
    """
    check_keywords("plan", options, DEFAULTS.keys() - {"layout", "key_padding_mask"})
    tensors = any(type(x).__module__.partition(".")[0] == "torch" for x in (dtype, device))
    name, device = check_dtype(dtype), str(device).partition(":")[0]
    given = {"q_shape": q_shape, "k_shape": k_shape, "v_shape": k_shape if v_shape is None else v_shape}
    shapes = [check_shape(key, shape) for key, shape in given.items()]
    stand_ins = _stand_ins({**options, "cu_q": cu_q, "cu_k": cu_k}, name)
    if hardware is not None:
        check_hardware(hardware)
    problem = describe(*(stand_in(shape, name) for shape in shapes), **stand_ins)
    capability = None if hardware is None else hardware.capability
    asked = problem if device == "cpu" else _outlined(problem)
    tensors = tensors or device != "cpu"
    chosen, reasons = _choose(asked, backend, device, tensors)
    owner = chosen
    if chosen is None or (backend == "auto" and device != "cpu" and capability is not None):
        owner = _but_for_this_machine(asked, device, tensors, capability)
    tile = _tile(_as_given_to(owner, problem, device), owner, capability)
    counts = _Counts.of(problem, tile)
    flops = counts.pairs * traffic.forward_flops_per_pair(problem.dim, problem.dim_v)
    return Plan(
        backend=None if chosen is None else chosen.name,
        reasons=reasons,
        device=device,
        dtype=name,
        q_shape=shapes[0],
        k_shape=shapes[1],
        v_shape=shapes[2],
        tile=(tile.rows, tile.keys),
        tile_heads=tile.heads,
        rows_at_once=tile.rows_at_once,
        tile_of=None if owner is None else owner.name,
        blocks=_blocks(problem, tile),
        tiles={kind.name.lower(): n for kind, n in counts.tiles.items()},
        band=problem.band_for(problem.n_q, problem.n_k),
        pairs=counts.pairs,
        flops=flops,
        backward_flops=counts.pairs * traffic.backward_flops_per_pair(problem.dim, problem.dim_v),
        tile_bytes=counts.tile_bytes,
        least_bytes=counts.least_bytes,
        standard_bytes=counts.standard_bytes,
        score_bytes=counts.scores * ITEMSIZE[name],
        lse_bytes=counts.rows * ITEMSIZE[problem.accumulator],
        kv_bytes=counts.kv_bytes,
        floor=None if hardware is None else Floor.under(flops, counts.least_bytes, hardware.rates),
    )


def _stand_ins(options: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The options of a call of this dtype, shapes replaced by arrays that have them."""
    like_q = accumulator(dtype) if dtype == EIGHT_BITS else dtype
    found: dict[str, Any] = {}
    for name, x in options.items():
        kind = OPTIONS[name].array
        if kind == "factors" or (name == "seed" and is_tensor(x)):
            continue  # values that change nothing in a plan, and may be on a GPU
        if kind in ("bool", "like q") and isinstance(x, tuple | list):
            x = stand_in(check_shape(name, x), "bool" if kind == "bool" else like_q)
        elif kind == "integers":
            x = to_host(name, x)
        found[name] = x
    return found


def stand_in(shape: Sequence[int], dtype: str) -> Array:
    """An array of any size in a few bytes: every element is the same zero."""
    zero: Array = np.zeros((), np.bool_ if dtype == "bool" else carrier(dtype))
    return np.broadcast_to(zero, tuple(shape))


@dataclass(slots=True)
class _Counts:
    """Sums over the sequences and heads of a problem."""

    tiles: Counter[Kind]
    pairs: int = 0
    scores: int = 0
    rows: int = 0
    tile_bytes: int = 0
    least_bytes: int = 0
    standard_bytes: int = 0
    kv_bytes: int = 0

    @classmethod
    def of(cls, p: Problem, tile: Tiling) -> _Counts:
        counts = cls(Counter(dict.fromkeys(Kind, 0)))
        size, wide, width = ITEMSIZE[p.dtype], ITEMSIZE[p.accumulator], p.dim + p.dim_v
        # Sequences of the same length cost the same: each length is counted once.
        for (n_q, n_k), times in Counter(zip(p.q_lengths, p.k_lengths, strict=True)).items():
            band, heads, kv_heads = p.band_for(n_q, n_k), times * p.heads, times * p.kv_heads
            grids = kv_heads * ceil_div(p.group, tile.heads)
            for kind, n in traffic.tile_counts(band, n_q, n_k, tile.rows, tile.keys).items():
                counts.tiles[kind] += grids * n
            counts.pairs += heads * traffic.visible_pairs(band, n_q, n_k)
            counts.scores += heads * n_q * n_k
            counts.rows += heads * n_q
            rows = heads * n_q * (p.dim * size + p.dim_v * ITEMSIZE[p.out_dtype] + wide)  # Q, O and L
            seen = cuts(band, 0, n_q, n_k, 1) if n_q else None
            kv_seen = 0 if seen is None else (seen.end - seen.begin) * width * size
            loaded = grids * traffic.keys_visited(band, n_q, n_k, tile.rows, tile.keys)
            counts.tile_bytes += rows + loaded * width * size
            counts.least_bytes += rows + kv_heads * kv_seen
            counts.standard_bytes += heads * (4 * n_q * n_k + n_q * width) * size + kv_heads * n_k * width * size
            counts.kv_bytes += kv_heads * n_k * width * size
        return counts


@dataclass(frozen=True, slots=True)
class _Outline:
    """A contiguous tensor without memory, for backends that inspect tensors through torch's methods."""

    shape: tuple[int, ...]
    itemsize: int

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return self.itemsize

    def stride(self, axis: int | None = None) -> Any:
        strides = tuple(math.prod(self.shape[n + 1 :]) for n in range(len(self.shape)))
        return strides if axis is None else strides[axis]

    def data_ptr(self) -> int:
        return 0


def _outlined(problem: Problem) -> Problem:
    """The problem with outlines of tensors for q, k and v."""
    q, k, v = (_Outline(x.shape, ITEMSIZE[problem.dtype]) for x in (problem.q, problem.k, problem.v))
    return replace(problem, q=q, k=k, v=v)


def _choose(
    problem: Problem, backend: str, device: str, tensors: bool
) -> tuple[dispatch.Backend | None, dict[str, str]]:
    """The row that would run, and the reason against every other row."""
    dispatch.check_name(backend)
    reasons = {row.name: row.why_not(problem, device, tensors) for row in dispatch.TABLE}
    able = [row for row in dispatch.TABLE if reasons[row.name] is None]
    chosen = (
        dispatch.preferred(problem, able) if backend == "auto" else dispatch.choose(problem, backend, device, tensors)
    )
    later = False
    for row in able:
        later = later or row is chosen
        why = "comes later in the table" if later else "another suits this better"
        reasons[row.name] = f"it could, but {why if backend == 'auto' else 'another was requested'}"
    return chosen, {name: str(reason) for name, reason in reasons.items() if chosen is None or name != chosen.name}


def _but_for_this_machine(
    problem: Problem, device: str, tensors: bool, capability: tuple[int, int] | None
) -> dispatch.Backend | None:
    """The row that would run on such a GPU, if everything it needs were here."""
    able = (
        row for row in dispatch.TABLE if row.runs_on(capability) and row.objection(problem, device, tensors) is None
    )
    return dispatch.preferred(problem, able)


def _as_given_to(owner: dispatch.Backend | None, problem: Problem, device: str) -> Problem:
    """The problem as the backend gets it: 8-bit tensors are widened unless it multiplies them as they are."""
    if problem.dtype != EIGHT_BITS or (owner is not None and owner.eight_bits):
        return problem
    return replace(problem, dtype=fallback_dtype(device))


def _tile(problem: Problem, owner: dispatch.Backend | None, capability: tuple[int, int] | None) -> Tiling:
    """The backend's tile, or that of the NumPy tiles if it has none."""
    tile_of = None if owner is None else getattr(owner.load(), "tile", None)
    if tile_of is None:
        return Tiling(tiles.BLOCK, tiles.BLOCK)
    tile: Tiling = tile_of(problem, capability)
    return tile


def _blocks(p: Problem, tile: Tiling) -> dict[str, int]:
    rows, size, wide = tile.rows * tile.heads, ITEMSIZE[p.dtype], ITEMSIZE[p.accumulator]
    moved = {"Q": rows * p.dim * size, "K": tile.keys * p.dim * size, "V": tile.keys * p.dim_v * size}
    return moved | {"S": tile.rows_at_once * tile.keys * wide, "O": rows * p.dim_v * wide}
