"""The backward pass by recomputation: the same gradients, from one number per row instead of the weights."""

from dataclasses import dataclass
from typing import Any

import flashtile
from flashtile import dispatch
from flashtile.cost import traffic
from flashtile.lab.studies import canvas
from flashtile.lab.studies.comparison import largest
from flashtile.lab.studies.study import Table, samples
from flashtile.lab.units import size
from flashtile.numerics.dtypes import ITEMSIZE

TITLE = "Gradients without the matrix"
QUESTION = "Does the backward pass need the weights that were never stored?"
N, DIM, LIMIT = 256, 64, 1e-10
LENGTHS = tuple(1 << bits for bits in range(10, 18))
DTYPE = "float32"


@dataclass(frozen=True, slots=True)
class Compared:
    """The largest difference of each gradient from that of standard attention, in float64."""

    backend: str
    causal: bool
    errors: dict[str, float]


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that a forward pass of one head keeps for its backward pass, besides Q, K, V and the output."""

    n: int
    weights: int
    lse: int


@dataclass(frozen=True, slots=True)
class Record:
    n: int
    dim: int
    limit: float
    compared: tuple[Compared, ...]
    kept: tuple[Kept, ...]
    forward_flops: int  # per pair of query and key
    backward_flops: int
    recompute_flops: int  # the part of them that recomputes the scores

    @property
    def worst(self) -> float:
        return max(error for c in self.compared for error in c.errors.values())

    @property
    def holds(self) -> bool:
        return self.worst < self.limit


def compute(quick: bool = False) -> Record:
    ours = (row for row in dispatch.TABLE if row.device == "cpu" and row.name != "reference" and not row.tensors_only)
    ways = [row.name for row in ours if not row.missing()]
    return Record(
        N,
        DIM,
        LIMIT,
        tuple(_compare(backend, causal) for backend in ways for causal in (False, True)),
        tuple(Kept(n, n * n * ITEMSIZE[DTYPE], n * ITEMSIZE[DTYPE]) for n in LENGTHS),
        traffic.forward_flops_per_pair(DIM, DIM),
        traffic.backward_flops_per_pair(DIM, DIM),
        2 * DIM,
    )


def _compare(backend: str, causal: bool) -> Compared:
    exact, found = _gradients("reference", causal), _gradients(backend, causal)
    return Compared(backend, causal, {name: largest(found[name] - exact[name]) for name in exact})


def _gradients(backend: str, causal: bool) -> dict[str, Any]:
    q, k, v, dout = samples(*((N, DIM),) * 4)
    out, lse = flashtile.attention(q, k, v, causal=causal, return_lse=True, backend=backend)
    grads = flashtile.attention_backward(dout, q, k, v, out, lse, causal=causal, backend=backend)
    return {name: getattr(grads, name) for name in ("dq", "dk", "dv")}


def tables(r: Record) -> list[Table]:
    return [
        Table(
            f"Gradients: largest difference from standard attention, N = {r.n}, d = {r.dim}, float64",
            ("backend", "mask", "dQ", "dK", "dV"),
            tuple(
                (c.backend, "causal" if c.causal else "none", *(f"{c.errors[x]:.1e}" for x in ("dq", "dk", "dv")))
                for c in r.compared
            ),
        ),
        Table(
            "Kept by one head for its backward pass, float32",
            ("N", "the weights P", "the log-sum-exp L", "P / L"),
            tuple((f"{k.n:,}", size(k.weights), size(k.lse), f"{k.weights // k.lse:,}") for k in r.kept),
        ),
    ]


def findings(r: Record) -> list[str]:
    last = r.kept[-1]
    return [
        f"The gradients are those of standard attention: the largest difference is {r.worst:.1e}.",
        f"At {last.n:,} tokens the weights would take {size(last.weights)} per head until the backward pass; "
        f"L takes {size(last.lse)}.",
        f"Recomputing the scores costs {r.recompute_flops} of the backward pass's {r.backward_flops} FLOPs per pair, "
        f"{r.recompute_flops / r.backward_flops:.0%}. The forward pass takes {r.forward_flops}.",
    ]


def draw(r: Record) -> canvas.Figure:
    figure, (ax,) = canvas.panels(1, 1, height=3.6)
    lengths = [k.n for k in r.kept]
    ax.plot(lengths, [k.weights for k in r.kept], "s-", color=canvas.ORANGE, label="standard: the weights P, N x N")
    ax.plot(lengths, [k.lse for k in r.kept], "o-", color=canvas.BLUE, label="tiled: L, one number per row")
    canvas.doubling(ax, lengths)
    canvas.in_bytes(ax, 2**11, 2**38)
    canvas.label(ax, "Kept from the forward pass for the backward pass, one head", "N", "bytes")
    canvas.legend(ax, loc="upper left")
    return figure
