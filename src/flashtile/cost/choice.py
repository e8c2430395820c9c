"""Which backend would run a planned call, which would on other hardware, and with which tile."""

from dataclasses import replace

from flashtile import dispatch
from flashtile.backends import tiles
from flashtile.cost.tiling import Tiling
from flashtile.numerics.dtypes import EIGHT_BITS, fallback_dtype
from flashtile.problem import Problem


def choose(
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


def choose_for_hardware(
    problem: Problem, device: str, tensors: bool, capability: tuple[int, int] | None
) -> dispatch.Backend | None:
    """The row that would run on such a GPU, if everything it needs were here."""
    able = (
        row for row in dispatch.TABLE if row.runs_on(capability) and row.objection(problem, device, tensors) is None
    )
    return dispatch.preferred(problem, able)


def as_given_to(owner: dispatch.Backend | None, problem: Problem, device: str) -> Problem:
    """The problem as the backend gets it: 8-bit tensors are widened unless it multiplies them as they are."""
    if problem.dtype != EIGHT_BITS or (owner is not None and owner.eight_bits):
        return problem
    return replace(problem, dtype=fallback_dtype(device))


def tile_of(problem: Problem, owner: dispatch.Backend | None, capability: tuple[int, int] | None) -> Tiling:
    """The backend's tile, or that of the NumPy tiles if it has none."""
    tile_of = None if owner is None else getattr(owner.load(), "tile", None)
    if tile_of is None:
        return Tiling(tiles.BLOCK, tiles.BLOCK)
    tile: Tiling = tile_of(problem, capability)
    return tile
