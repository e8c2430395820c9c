"""Speed and utilisation on this machine, compared with torch and NumPy, and the roofline."""

from collections.abc import Callable

from flashtile.lab.bench import showcase
from flashtile.lab.bench.cases import FORWARD
from flashtile.lab.bench.showcase import Row, Side, Speed
from flashtile.lab.bench.workload import NAIVE_NUMPY, NAIVE_TORCH, OURS, SDPA
from flashtile.lab.studies import canvas, hierarchy
from flashtile.lab.studies.study import Table
from flashtile.lab.units import quantity, seconds, size

TITLE = "Speed and utilisation"
QUESTION = "How well does each way use this machine, and how long does it take?"
STYLES = {
    OURS: (canvas.BLUE, "o"),
    SDPA: (canvas.GREEN, "^"),
    NAIVE_TORCH: (canvas.PURPLE, "D"),
    NAIVE_NUMPY: (canvas.ORANGE, "s"),
}
UNSTEADY = 1.5  # the largest ratio of the third to the first quartile


def compute(quick: bool = False) -> Speed:
    return showcase.run(hierarchy.this_machine(quick).rates, quick)


def standard_of(row: Row) -> str:
    """The slowest way that stores the scores, with which ours is compared."""
    return max((name for name in row.runs if name in showcase.STANDARD), key=lambda name: row.runs[name].seconds)


def unsteady(side: Side, row: Row, name: str) -> bool:
    """Whether its rounds vary widely, or a longer sequence took less time: then something else interfered."""
    run = row.runs[name]
    longer = [x.runs[name] for x in side.rows if name in x.runs and x.n > row.n and x.direction == row.direction]
    return run.q3 > UNSTEADY * run.q1 or any(run.seconds > other.seconds for other in longer)


def marked(text: str, side: Side, row: Row, name: str) -> str:
    """Mark a name or a time as unsteady if it is."""
    return f"{text} (unsteady)" if unsteady(side, row, name) else text


def longest(side: Side) -> Row:
    """The longest forward pass that standard attention had the memory for."""
    rows = (row for row in side.rows if row.direction == FORWARD and set(row.runs) & set(showcase.STANDARD))
    return max(rows, key=lambda row: row.n)


def tables(r: Speed) -> list[Table]:
    return [table for side in r.sides for table in _tables(side)]


def _tables(side: Side) -> list[Table]:
    shape = f"{side.device}, {side.rows[0].heads} heads, d = {side.rows[0].dim}, {side.rows[0].dtype}"
    found = [
        _table(
            f"{shape}: median time",
            side,
            lambda row, name: marked(seconds(row.runs[name].seconds), side, row, name),
        ),
        _table(
            f"{shape}: utilisation, of {quantity(side.rates.flops, 'FLOP/s')}, the best rate measured",
            side,
            lambda row, name: f"{row.runs[name].utilisation:.0%}",
        ),
    ]
    if any(run.grown is not None for row in side.rows for run in row.runs.values()):
        title = f"{shape}: memory beyond inputs and results"
        found.append(_table(title, side, lambda row, name: size(row.runs[name].grown or 0)))
    return found


def _table(title: str, side: Side, cell: Callable[[Row, str], str]) -> Table:
    """A row per case, a column per contender; some contenders have no backward pass."""
    names = list(dict.fromkeys(name for row in side.rows for name in row.runs))
    rows = (
        (f"N = {row.n:,}, {row.direction}", *(cell(row, name) if name in row.runs else "" for name in names))
        for row in side.rows
    )
    return Table(title, ("case", *names), tuple(rows))


def findings(r: Speed) -> list[str]:
    found = []
    for side in r.sides:
        row = longest(side)
        name = standard_of(row)
        before, after = row.runs[name], row.runs[OURS]
        found.append(
            f"{side.device}, N = {row.n:,}: {marked(name, side, row, name)} reaches {before.utilisation:.0%} of the "
            f"best rate measured, flashtile {after.utilisation:.0%}. It takes {seconds(after.seconds)} instead of "
            f"{seconds(before.seconds)}."
        )
        found.append(
            f"{side.device}: the best rates measured are {quantity(side.rates.flops, 'FLOP/s')} and "
            f"{quantity(side.rates.bytes, 'B/s')}. Above {side.rates.ridge:.3g} FLOPs per byte, it is compute-bound."
        )
        if SDPA in row.runs:
            ratios = [x.runs[OURS].seconds / x.runs[SDPA].seconds for x in side.rows if SDPA in x.runs]
            found.append(
                f"{side.device}: flashtile takes {min(ratios):.2f} to {max(ratios):.2f} of the time of torch's "
                "scaled_dot_product_attention over these cases."
            )
    for reason in dict.fromkeys(r.absent.values()):
        peers = [peer for peer, why in r.absent.items() if why == reason]
        found.append(f"{' and '.join(peers)} {'was' if len(peers) == 1 else 'were'} not timed: {reason}.")
    if SDPA in r.absent:
        found.append("To compare with torch: pip install 'flashtile[torch]', then run flashtile demo.")
    if r.no_gpu:
        found.append(f"There are no GPU times: {r.no_gpu}.")
    return found


def draw(r: Speed) -> canvas.Figure:
    figure, axes = canvas.panels(len(r.sides), 2, width=12, height=4.2 * len(r.sides))
    for side, times, roof in zip(r.sides, axes[::2], axes[1::2], strict=True):
        _draw_times(times, side)
        _draw_roofline(roof, side)
    return figure


def _draw_times(ax: canvas.Axes, side: Side) -> None:
    rows = [row for row in side.rows if row.direction == FORWARD]
    for name, (colour, marker) in STYLES.items():
        timed = [row for row in rows if name in row.runs]
        # A way that stores the scores is a baseline: a spike in it would look like our gain.
        left = [row.n for row in timed if name in showcase.STANDARD and unsteady(side, row, name)]
        drawn = [row for row in timed if row.n not in left]
        if timed:
            label = f"{name}, unsteady at {', '.join(f'{n:,}' for n in left)}" if left else name
            taken = [row.runs[name].seconds for row in drawn]
            ax.plot([row.n for row in drawn], taken, color=colour, marker=marker, label=label)
    ideal = [row.flops / side.rates.flops for row in rows]
    ax.plot([row.n for row in rows], ideal, ":", color=canvas.MUTED, label="at the best rate measured")
    canvas.doubling(ax, [row.n for row in rows])
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(lambda value, _: seconds(value))
    ax.yaxis.set_minor_formatter(lambda value, _: "")
    canvas.label(ax, f"{side.device}: forward, median time", "N", "time")
    canvas.legend(ax, loc="lower right")


def _draw_roofline(ax: canvas.Axes, side: Side) -> None:
    row = longest(side)
    rates, right = side.rates, 4 * max(side.rates.ridge, *(run.intensity for run in row.runs.values()))
    roof = ([1, rates.ridge, right], [rates.bytes, rates.flops, rates.flops])
    ax.plot(*roof, color=canvas.INK, label="roof: memory, then arithmetic")
    for name, run in row.runs.items():
        colour, marker = STYLES[name]
        ax.vlines(
            run.intensity, run.flops_per_second, min(rates.flops, rates.bytes * run.intensity), color=colour, alpha=0.5
        )
        label = marked(name, side, row, name)
        ax.plot([run.intensity], [run.flops_per_second], marker, color=colour, markersize=9, label=label, linestyle="")
    canvas.doubling(ax, [4**power for power in range(8) if 4**power <= right])
    ax.set_yscale("log")
    ax.set_ylim(rates.flops / 100, rates.flops * 2)
    ax.yaxis.set_major_formatter(lambda value, _: quantity(value, ""))
    canvas.label(ax, f"{side.device}: roofline, N = {row.n:,}", "FLOPs per byte moved", "FLOPs per second")
    canvas.legend(ax, loc="lower right")
