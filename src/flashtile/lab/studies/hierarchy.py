"""The memory hierarchy: small and fast to large and slow, for the GPU of the papers and for this machine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from flashtile.cost.hardware import Hardware, Level, Rates
from flashtile.host import machine
from flashtile.lab.bench import rates
from flashtile.lab.catalogue import chips, known_as
from flashtile.lab.studies import canvas
from flashtile.lab.studies.study import Table
from flashtile.lab.units import quantity, size

TITLE = "The memory hierarchy"
QUESTION = "How much faster and smaller is the memory close to the arithmetic units?"
PAPER = "a100-40"
TRIES = 3  # each with new arrays, because their place in memory affects their speed


@dataclass(frozen=True, slots=True)
class Record:
    """Machines by published figures or as measured; the first is the GPU of the papers."""

    machines: tuple[Hardware, ...]

    @property
    def paper(self) -> Hardware:
        return self.machines[0]

    @property
    def here(self) -> Hardware:
        return self.machines[1]


@cache
def this_machine(quick: bool = False) -> Hardware:
    """This machine's CPU, the best of several tries; once per process, so that every chart has the same roof."""
    return best([rates.this_machine(seconds=0.1 if quick else 0.4) for _ in range(1 if quick else TRIES)])


def best(tries: Sequence[Hardware]) -> Hardware:
    """Combine several measurements of one machine: each rate at its highest."""
    found = [hardware.rates for hardware in tries]
    levels = tuple(
        max(same, key=lambda level: level.rate or 0) for same in zip(*(h.levels for h in tries), strict=True)
    )
    return replace(tries[0], rates=Rates(max(r.flops for r in found), max(r.bytes for r in found)), levels=levels)


def compute(quick: bool = False) -> Record:
    found = [known_as(device["name"]) for device in machine.devices() if device["device"] != "cpu"]
    gpus = dict.fromkeys(name for name in found if name is not None and name != PAPER)
    catalogue = chips()
    return Record((catalogue[PAPER].hardware(), this_machine(quick), *(catalogue[name].hardware() for name in gpus)))


def fast(hardware: Hardware) -> Level | None:
    """The fastest level whose rate is known."""
    return next((level for level in hardware.levels if level.rate is not None), None)


def slow(hardware: Hardware) -> Level:
    return hardware.levels[-1]


def tables(r: Record) -> list[Table]:
    return [
        Table(
            f"{h.name}, {'measured here' if h.measured else 'as published'}",
            ("memory", "size", "bytes per second"),
            tuple((level.name, size(level.bytes), _rate(level)) for level in h.levels),
        )
        for h in r.machines
    ]


def _rate(level: Level) -> str:
    return "not published" if level.rate is None else quantity(level.rate, "B/s")


def findings(r: Record) -> list[str]:
    return [sentence for h in r.machines if (sentence := _compared(h)) is not None]


def _compared(h: Hardware) -> str | None:
    near, far = fast(h), slow(h)
    if near is None or far.rate is None or near.rate is None or near is far:
        return None
    return (
        f"{h.name}: {near.name} of {size(near.bytes)} at {quantity(near.rate, 'B/s')}, and {far.name} of "
        f"{size(far.bytes)} at {quantity(far.rate, 'B/s')}. {near.name} is {near.rate / far.rate:.0f} times as fast "
        f"and {far.bytes / near.bytes:,.0f} times smaller."
    )


def draw(r: Record) -> canvas.Figure:
    figure, (ax,) = canvas.panels(1, 1, height=3.8)
    styles = zip(r.machines, (canvas.BLUE, canvas.ORANGE, canvas.GREEN, canvas.PURPLE), "os^D", strict=False)
    for h, colour, marker in styles:
        known = [level for level in h.levels if level.rate is not None]
        ax.plot(
            [level.bytes for level in known],
            [level.rate or 0 for level in known],
            color=colour,
            marker=marker,
            label=h.name + (", measured" if h.measured else ""),
        )
        for level in known:
            near: dict[str, Any] = {"xytext": (6, 6), "textcoords": "offset points"}
            ax.annotate(level.name, (level.bytes, level.rate or 0), **near, fontsize=9, color=canvas.MUTED)
    ax.set_xscale("log", base=2)
    ticks = [1 << bits for bits in range(10, 45, 5)]
    ax.set_xticks(ticks, [size(n) for n in ticks])
    ax.minorticks_off()
    ax.set_yscale("log")
    ax.margins(y=0.15)
    ax.yaxis.set_major_formatter(lambda value, _: quantity(value, "B/s"))
    canvas.label(ax, "Every memory by its size and its speed", "size", "bytes per second")
    canvas.legend(ax, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
