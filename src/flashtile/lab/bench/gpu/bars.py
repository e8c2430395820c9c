"""The bars of the GPU suites: a table of bars, and the comparison of measured rows with them."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from flashtile.lab.bench.cases import FORWARD
from flashtile.lab.bench.gpu import measures
from flashtile.lab.bench.gpu.measures import Measure, Row
from flashtile.lab.bench.gpu.peers import ORDERED, OURS, PORTABLE
from flashtile.lab.bench.gpu.rows import DECODE, DTYPE, MEMORY, SMALL, STEP, TRAIN
from flashtile.lab.bench.memory import BACKWARD
from flashtile.lab.bench.records import goal
from flashtile.lab.bench.timing import geometric_mean
from flashtile.numerics.dtypes import EIGHT_BITS

HOPPER = "gluon"  # the backend that some bars are for
SHORT_CACHE = 8192  # with one sequence, too little work to compare with the copy
SAME = 0.02  # in bfloat16, where each result is off by a few thousandths
SAME_IN_8_BITS = 0.05  # weights of 3 bits are off by 0.026 (root mean square), and so are their sums

Condition = Callable[[Row], object]  # true of the rows that a bar is for


@dataclass(frozen=True)
class Bar:
    """The bar for a set of rows: on their geometric mean, and on each of them."""

    group: str
    title: str  # a template: {n} rows, the first of which is {row}
    about: Condition
    measure: Measure
    mean: float | None = None
    each: float | None = None

    def line(self, rows: Sequence[Row]) -> Row:
        """Compare the rows with the bar. A row that we could not run is a failure."""
        more = self.measure.more_is_better
        title = self.title.format(n=len(rows), row=rows[0])
        line = goal(self.group, title, self.measure.title, self.mean, worst_bar=self.each, at_least=more)
        values = [value for row in rows if (value := self.measure.of(row)) is not None]
        failed = any(OURS in row["absent"] for row in rows)
        if not values:
            return line | {"holds": False if failed else None}
        mean = geometric_mean(values) if min(values) > 0 else sum(values) / len(values)
        worst = min(values) if more else max(values)
        barred = [(x, bar) for x, bar in ((mean, self.mean), (worst, self.each)) if bar is not None]
        clear = all(x >= bar if more else x <= bar for x, bar in barred)
        return line | {"value": mean, "worst": worst, "holds": clear and not failed if barred else None}


def judge(rows: Sequence[Row], failed: Collection[str] = ()) -> list[Row]:
    """The line of every bar that applies to some of these rows, and the number of rows that failed."""
    found = [bar.line(mine) for bar in BARS if (mine := [row for row in rows if bar.about(row)])]
    if failed:
        line = goal("failed", "rows that failed", "rows", worst_bar=0, at_least=False)
        found.append(line | {"value": len(failed), "worst": len(failed), "holds": False})
    return found


def _where(*also: Condition, **fields: Any) -> Condition:
    """Select rows with these field values, for which all conditions hold."""
    return lambda row: all(row.get(key) == x for key, x in fields.items()) and all(true(row) for true in also)


def _train(direction: str, *also: Condition, dtype: str = DTYPE, **fields: Any) -> Condition:
    return _where(*also, suite=TRAIN, direction=direction, dtype=dtype, **fields)


def _has(name: str) -> Condition:
    return lambda row: row.get(name)


def _timed(name: str) -> Condition:
    return lambda row: name in row["times"]


def _eight_bits(dim: int, mean: float | None = None) -> Bar:
    """The gain from 8 bits if the Hopper kernels multiply them as they are."""
    title = f"forward in 8 bits, head dim {dim}, {{n}} shapes"
    about = _train(FORWARD, lambda row: row["shape"]["dim"] == dim, dtype=EIGHT_BITS, backend=HOPPER)
    return Bar(f"eight-bits-{dim}", title, about, measures.OVER_WIDE, mean)


def _elsewhere(row: Row) -> bool:
    return bool(row["backend"] != HOPPER)


def _dense(row: Row) -> bool:
    """Whether there is so much work that the matrix units are the bound."""
    return not row["options"] and row["shape"]["n_k"] == 16384 and row["shape"]["dim"] >= 128


def _short(row: Row) -> bool:
    return bool(row["shape"]["batch"] == 1 and row["shape"]["n_k"] <= SHORT_CACHE)


def _pass(direction: str, mean: float, each: float) -> tuple[Bar, ...]:
    """The bars of one pass. `mean` and `each` are for the Hopper kernels on the grid, against the best peer."""
    d, plain, other = direction, f"{direction}, {{n}} shapes", f"{direction}, {{n}} other shapes"
    by_triton, narrow = f"{d} by Triton", "window {row[window]} of {row[shape][n_k]} keys"
    windowed, portable = _has("window"), _timed(PORTABLE)
    return (
        Bar(f"{d}-flex", plain, _train(d), measures.OVER_FLEX, each=1.05),
        Bar(f"{d}-portable", f"{by_triton}, {{n}} shapes", _train(d, portable), measures.PORTABLE_OVER_FLEX, each=1.05),
        Bar(f"{d}-best", plain, _train(d, _elsewhere), measures.OVER_BEST),
        Bar(f"{d}-grid", plain, _train(d, backend=HOPPER, extra=False), measures.OVER_BEST, mean, each),
        Bar(f"{d}-extra", other, _train(d, backend=HOPPER, extra=True), measures.OVER_BEST, each=1.0),
        Bar(f"{d}-window", f"{d}, {narrow}", _train(d, windowed), measures.OF_WINDOW, each=1.3),
        Bar(
            f"{d}-window-portable",
            f"{by_triton}, {narrow}",
            _train(d, portable, windowed),
            measures.PORTABLE_OF_WINDOW,
            each=1.3,
        ),
    )


ONE_CACHE, MEMORY_OF = "decode, one sequence of {row[shape][n_k]} keys", "memory of {row[direction]}"
DENSE, STEPS = "forward, full, 16384 keys, {n} head dims", "a training step, {n} shapes"
IN_8_BITS = "forward in 8 bits, {n} shapes"
IN_ORDER = "backward, the same bits every time, {n} shapes"
SMALL_CALL, BY_HOPPER = "a small call", "a small call, by the Hopper kernels"
BARS = (
    *_pass(FORWARD, mean=1.06, each=1.00),
    Bar("forward-product", DENSE, _train(FORWARD, _dense, backend=HOPPER, extra=False), measures.OF_PRODUCT, each=0.95),
    *_pass(BACKWARD, mean=1.05, each=0.97),
    Bar("backward-ordered", IN_ORDER, _train(BACKWARD, _timed(ORDERED)), measures.IN_ORDER, each=1.15),
    *(_eight_bits(dim, mean) for dim, mean in ((64, None), (128, 1.4), (256, None))),
    Bar("eight-bits-best", IN_8_BITS, _train(FORWARD, measures.best_peer, dtype=EIGHT_BITS), measures.OVER_BEST),
    Bar("step-best", STEPS, _train(STEP, _elsewhere), measures.OVER_BEST),
    Bar("step-hopper", STEPS, _train(STEP, backend=HOPPER), measures.OVER_BEST, each=1.05),
    Bar("decode", "decode, {n} shapes", _where(lambda row: not _short(row), suite=DECODE), measures.OF_COPY, each=0.90),
    Bar("decode-short", ONE_CACHE, _where(_short, suite=DECODE), measures.OVER_CUDNN, each=1.0),
    Bar("host", SMALL_CALL, _where(_elsewhere, suite=SMALL), measures.HOST, each=40.0),
    Bar("host-hopper", BY_HOPPER, _where(suite=SMALL, backend=HOPPER), measures.HOST, each=25.0),
    Bar("memory-forward", MEMORY_OF, _where(suite=MEMORY, direction=FORWARD), measures.FORWARD_MEMORY, each=1.0),
    Bar("memory-backward", MEMORY_OF, _where(suite=MEMORY, direction=BACKWARD), measures.BACKWARD_MEMORY, each=1.0),
    Bar("agreement", "results, {n} shapes", _where(_has("differences"), dtype=DTYPE), measures.DIFFERENCE, each=SAME),
    Bar(
        "agreement-eight-bits",
        "results in 8 bits, {n} shapes",
        _where(_has("differences"), dtype=EIGHT_BITS),
        measures.DIFFERENCE,
        each=SAME_IN_8_BITS,
    ),
)
