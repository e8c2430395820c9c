"""Tokens sharded over a cluster: what each method sends from GPU to GPU, and the speed that is left. Calculated."""

from dataclasses import dataclass
from itertools import pairwise

from flashtile.cost.parallel import Parallel, parallel
from flashtile.cost.stand_ins import stand_in
from flashtile.distributed import Shards
from flashtile.lab.catalogue import chips, clusters, models
from flashtile.lab.studies import canvas
from flashtile.lab.studies.study import Table
from flashtile.lab.units import seconds, short, size
from flashtile.problem import describe

TITLE = "One sequence on many GPUs"
QUESTION = "If tokens are sharded over many GPUs, what has to be sent, and how much of the ideal speed is left?"
MODEL, CLUSTER, DTYPE = "llama-3-70b", "dgx-h200", "bfloat16"
CONTEXTS = (128 << 10, 1 << 20, 10 << 20)
GPUS = (8, 16, 64, 256, 512)
SLOW = 0.5


@dataclass(frozen=True, slots=True)
class Point:
    """A causal layer of so many tokens on so many GPUs, by each method."""

    tokens: int
    gpus: int
    methods: tuple[Parallel, ...]

    @property
    def best(self) -> Parallel:
        return max(self.methods, key=lambda x: x.ideal or 0.0)

    def of(self, kind: str) -> Parallel | None:
        """The method of this kind: gather, ring, ulysses, or ulysses with a ring."""
        found = [x for x in self.methods if x.method == kind or (kind == "both" and " x ring" in x.method)]
        return found[0] if found else None


@dataclass(frozen=True, slots=True)
class Record:
    model: str
    cluster: str
    points: tuple[Point, ...]

    @property
    def holds(self) -> bool:
        """Whether zigzag shards have equal work, and a ring holds the least, which shrinks as GPUs are added."""
        rings = [x for point in self.points if (x := point.of("ring")) is not None]
        balanced = all(x.balance < 1.01 for point in self.points for x in point.methods)
        return balanced and all(a.held > b.held for a, b in pairwise(rings) if a.ranks < b.ranks)


def compute(quick: bool = False) -> Record:
    del quick  # always fast
    return Record(MODEL, clusters()[CLUSTER].name, tuple(_point(n, gpus) for n in CONTEXTS for gpus in GPUS))


def _point(tokens: int, gpus: int) -> Point:
    model, cluster = models()[MODEL], clusters()[CLUSTER]
    q, k = (stand_in(shape, DTYPE) for shape in model.shapes(tokens, tokens))
    hardware = chips()[cluster.chip].hardware(DTYPE)
    found = parallel(describe(q, k, k, causal=True), Shards.zigzag(tokens, ranks=gpus), hardware, cluster.links)
    return Point(tokens, gpus, found)


def tables(r: Record) -> list[Table]:
    rows = [
        (
            short(point.tokens),
            f"{point.gpus}",
            x.method,
            size(x.sent),
            size(x.sent_backward),
            size(x.held),
            seconds(x.seconds or 0.0),
            f"{x.ideal or 0.0:.0%}",
        )
        for point in r.points
        for x in point.methods
    ]
    heads = ("tokens", "GPUs", "method", "sent, forward", "sent, backward", "extra memory", "forward", "of ideal")
    return [Table(f"One causal layer of {r.model}, zigzag shards, {r.cluster}", heads, tuple(rows))]


def findings(r: Record) -> list[str]:
    largest = max(r.points, key=lambda point: (point.tokens, point.gpus))
    ring, gather = largest.of("ring"), largest.of("gather")
    slow = min((p for p in r.points if (p.best.ideal or 0.0) < SLOW), key=lambda p: p.gpus / p.tokens, default=None)
    found = [
        f"The best method for {short(largest.tokens)} tokens on {largest.gpus} GPUs is {largest.best.method}, at "
        f"{largest.best.ideal or 0.0:.0%} of the ideal speed."
    ]
    if ring and gather:
        found.append(
            f"There, a ring holds {size(ring.held)} more than its own tokens; gathering all keys would take "
            f"{size(gather.held)}."
        )
    if slow is not None:
        found.append(
            f"Short sequences do not fill many GPUs: {short(slow.tokens)} tokens on {slow.gpus} GPUs reach "
            f"{slow.best.ideal or 0.0:.0%} at best, since messages take longer than products."
        )
    return [
        *found,
        "Zigzag shards give each GPU tokens from the front and from the back: as many visible pairs as any other.",
    ]


def draw(r: Record) -> canvas.Figure:
    figure, axes = canvas.panels(1, len(CONTEXTS), width=13, height=3.8)
    styles = {
        "ring": ("ring", canvas.BLUE, "o"),
        "gather": ("gather", canvas.ORANGE, "s"),
        "both": ("ulysses x ring", canvas.GREEN, "^"),
    }
    for ax, tokens in zip(axes, CONTEXTS, strict=True):
        points = [point for point in r.points if point.tokens == tokens]
        for kind, (name, colour, marker) in styles.items():
            line = [(point.gpus, x.ideal or 0.0) for point in points if (x := point.of(kind)) is not None]
            ax.plot([x for x, _ in line], [y for _, y in line], color=colour, marker=marker, label=name)
        canvas.doubling(ax, GPUS)
        ax.set_ylim(0, 1.05)
        canvas.label(ax, f"{short(tokens)} tokens", "GPUs", "share of the ideal speed")
    canvas.legend(axes[0], loc="lower left")
    return figure
