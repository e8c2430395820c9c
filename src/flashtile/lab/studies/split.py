"""Splitting the keys: attention over each share, as if on separate GPUs, merged exactly."""

from dataclasses import dataclass

import numpy as np

import flashtile
from flashtile.lab.studies import canvas
from flashtile.lab.studies.comparison import largest
from flashtile.lab.studies.study import Table, samples
from flashtile.numerics.dtypes import Array

TITLE = "Keys split between GPUs"
QUESTION = "If no GPU holds all keys, can each attend to its own keys with an exact result?"
HEADS, N, DIM = 2, 1024, 64
PARTS = (1, 2, 3, 4, 8, 16)
LIMITS = {"float64": 1e-12, "float32": 1e-5}


@dataclass(frozen=True, slots=True)
class Merged:
    """Merged shares of the keys: the largest difference from standard attention over all keys in float64."""

    parts: int
    dtype: str
    error: float
    sent: int  # bytes of out and lse that one share sends


@dataclass(frozen=True, slots=True)
class Record:
    n: int
    dim: int
    heads: int
    limits: dict[str, float]
    merged: tuple[Merged, ...]
    order: float  # largest difference between merging first to last and last to first
    identity: float  # largest difference after merging with an empty share: (0, -inf)
    cache: int  # bytes of keys and values that each of two GPUs keeps and never sends

    def of(self, dtype: str) -> tuple[Merged, ...]:
        return tuple(m for m in self.merged if m.dtype == dtype)

    @property
    def holds(self) -> bool:
        return all(m.error < self.limits[m.dtype] for m in self.merged) and self.identity == 0


def compute(quick: bool = False) -> Record:
    exact = {dtype: flashtile.standard_attention(*_arrays(dtype)) for dtype in LIMITS}
    merged = tuple(_merged(parts, dtype, exact[dtype]) for dtype in LIMITS for parts in PARTS)
    shares = _shares(2, "float64")
    forth, back = _merge(shares), _merge(shares[::-1])
    empty = (np.zeros_like(forth[0]), np.full_like(forth[1], -np.inf))
    identity = largest(flashtile.merge(*forth, *empty)[0] - forth[0])
    _, k, v = _arrays("float64")
    return Record(N, DIM, HEADS, LIMITS, merged, largest(forth[0] - back[0]), identity, (k.nbytes + v.nbytes) // 2)


def _arrays(dtype: str) -> tuple[Array, ...]:
    return samples(*((HEADS, N, DIM),) * 3, dtype=dtype)


def _shares(parts: int, dtype: str) -> list[tuple[Array, Array]]:
    q, k, v = _arrays(dtype)
    cut = [slice(part[0], part[-1] + 1) for part in np.array_split(np.arange(N), parts)]
    return [flashtile.attention(q, k[:, keys], v[:, keys], return_lse=True) for keys in cut]


def _merge(shares: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    whole = shares[0]
    for share in shares[1:]:
        whole = flashtile.merge(*whole, *share)
    return whole


def _merged(parts: int, dtype: str, exact: Array) -> Merged:
    shares = _shares(parts, dtype)
    return Merged(parts, dtype, largest(_merge(shares)[0] - exact), sum(x.nbytes for x in shares[0]))


def tables(r: Record) -> list[Table]:
    return [
        Table(
            f"Split keys, {r.heads} heads, N = {r.n:,}, d = {r.dim}: largest difference from all keys at once",
            ("shares", *r.limits),
            tuple(
                (str(first.parts), *(f"{m.error:.1e}" for m in (first, *others)))
                for first, *others in zip(*(r.of(dtype) for dtype in r.limits), strict=True)
            ),
        )
    ]


def findings(r: Record) -> list[str]:
    exact = r.of("float64")
    two = next(m for m in exact if m.parts == 2)
    return [
        f"Two halves of the keys, merged, differ from the whole by {two.error:.1e} in float64; "
        f"{exact[-1].parts} shares by {exact[-1].error:.1e}.",
        f"Merged in the other order, the two halves give {_same(r.order)}. Merging with a share without keys gives "
        f"{_same(r.identity)}.",
        "A GPU that holds half of the keys sends its output and one number per row, never its keys and values.",
    ]


def _same(difference: float) -> str:
    return f"the same result up to {difference:.1e}" if difference else "exactly the same result"


def draw(r: Record) -> canvas.Figure:
    figure, (ax,) = canvas.panels(1, 1, height=3.4)
    styles = {"float64": (canvas.BLUE, "o"), "float32": (canvas.ORANGE, "s")}
    for dtype, (colour, marker) in styles.items():
        merged = r.of(dtype)
        x, y = [m.parts for m in merged], [m.error for m in merged]
        ax.plot(x, y, color=colour, marker=marker, label=f"{dtype}, merged")
        eps = float(np.finfo(dtype).eps)
        ax.axhline(eps, color=colour, linestyle=":", linewidth=1.2, label=f"{dtype} epsilon")
    canvas.doubling(ax, [m.parts for m in r.of("float64")])
    ax.set_yscale("log")
    canvas.label(ax, "Merged shares against all keys at once", "shares of the keys", "largest difference")
    canvas.legend(ax, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
