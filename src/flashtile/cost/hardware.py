"""Hardware: what a machine can do at best a second, and its levels of memory, fastest first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine can do at best, per second: for the floor under a call's time."""

    flops: float
    bytes: float

    @property
    def ridge(self) -> float:
        """FLOPs a byte at which a call stops being bound by memory."""
        return self.flops / self.bytes


@dataclass(frozen=True, slots=True)
class Level:
    """One kind of memory, that of all processors together."""

    name: str
    bytes: int
    rate: float | None  # bytes a second; None: nobody says


@dataclass(frozen=True, slots=True)
class Hardware:
    """A GPU by its maker's figures, or this machine as measured."""

    name: str
    rates: Rates
    measured: bool = False
    memory: int | None = None  # bytes for keys and values and everything else; None: not said
    levels: tuple[Level, ...] = ()
    capability: tuple[int, int] | None = None  # of NVIDIA's GPUs
    sram_a_tile: int | None = None  # bytes that one tile may have
