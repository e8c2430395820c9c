"""plan(): what a call would do, from its shapes alone: backend, tiles, FLOPs, bytes, and its least time."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from flashtile.band import FAR, Band
from flashtile.checks.arguments import check_dtype, check_hardware, check_shape
from flashtile.checks.keywords import check_keywords
from flashtile.cost import traffic
from flashtile.cost.choice import as_given_to, choose, choose_for_hardware, tile_of
from flashtile.cost.counts import Counts, block_bytes
from flashtile.cost.hardware import Hardware, Rates
from flashtile.cost.stand_ins import outlined, stand_in, stand_ins
from flashtile.numerics.dtypes import ITEMSIZE
from flashtile.options import DEFAULTS, Options
from flashtile.problem import Problem, describe

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flashtile.cost.parallel import Links, Parallel
    from flashtile.distributed import Shards


@dataclass(frozen=True, slots=True)
class Floor:
    """No schedule on a machine of these rates can be faster than `seconds`."""

    seconds: float
    bound: str  # "compute" or "memory"
    rates: Rates

    @classmethod
    def under(cls, flops: int, least_bytes: int, rates: Rates) -> "Floor":
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
    span_bytes: int  # limits of spans; 0 without
    cut_bytes: int  # of spans: four numbers each for a row of tiles, worked out once before a backward pass
    kv_bytes: int  # keys and values: this call's share of a KV cache
    floor: Floor | None
    parallel: tuple["Parallel", ...]  # each method of flashtile.distributed, if shards were given

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
    shards: "Shards | None" = None,
    links: "Links | None" = None,
    **options: "Unpack[Options]",
) -> Plan:
    """Return what attention() would do with arrays of these shapes, without the arrays.

    Takes every option of attention(); mask, bias, alibi and sink may be given as shapes. With `hardware`, the plan also
    has the least time there, and the tile of that GPU. With `shards`, q and k have the tokens of all ranks, and the
    plan also has what each method of flashtile.distributed sends and holds; with `links` and `hardware` also its time.
    A device is "cpu", "cuda" or a torch device, whose index is ignored. On a CPU, a torch device or dtype means
    tensors, any other NumPy arrays.
    """
    check_keywords("plan", options, DEFAULTS.keys() - {"layout", "key_padding_mask"})
    tensors = any(type(x).__module__.partition(".")[0] == "torch" for x in (dtype, device))
    name, device = check_dtype(dtype), str(device).partition(":")[0]
    given = {"q_shape": q_shape, "k_shape": k_shape, "v_shape": k_shape if v_shape is None else v_shape}
    shapes = [check_shape(key, shape) for key, shape in given.items()]
    planned = stand_ins({**options, "cu_q": cu_q, "cu_k": cu_k}, name)
    if hardware is not None:
        check_hardware(hardware)
    problem = describe(*(stand_in(shape, name) for shape in shapes), **planned)
    capability = None if hardware is None else hardware.capability
    asked = problem if device == "cpu" else outlined(problem)
    tensors = tensors or device != "cpu"
    chosen, reasons = choose(asked, backend, device, tensors)
    owner = chosen
    if chosen is None or (backend == "auto" and device != "cpu" and capability is not None):
        owner = choose_for_hardware(asked, device, tensors, capability)
    tile = tile_of(as_given_to(owner, problem, device), owner, capability)
    counts = Counts.of(problem, tile)
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
        blocks=block_bytes(problem, tile),
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
        span_bytes=0 if problem.spans is None else problem.spans.nbytes,
        cut_bytes=counts.cut_bytes,
        kv_bytes=counts.kv_bytes,
        floor=None if hardware is None else Floor.under(flops, counts.least_bytes, hardware.rates),
        parallel=_parallel(problem, shards, hardware, links),
    )


def _parallel(
    problem: Problem, shards: "Shards | None", hardware: Hardware | None, links: "Links | None"
) -> tuple["Parallel", ...]:
    if shards is None:
        return ()
    from flashtile.cost.parallel import parallel  # most plans need nothing of flashtile.distributed

    return parallel(problem, shards, hardware, links)
