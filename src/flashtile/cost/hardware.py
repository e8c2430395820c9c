"""Hardware: a machine's peak rates, and its levels of memory, fastest first."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """A machine's peak rates per second, which bound the time of a call from below."""

    flops: float
    bytes: float

    @property
    def ridge(self) -> float:
        """The FLOPs per byte above which a call is not bound by memory."""
        return self.flops / self.bytes


@dataclass(frozen=True, slots=True)
class Level:
    """One kind of memory, over all processors."""

    name: str
    bytes: int
    rate: float | None  # bytes per second; None: unknown


@dataclass(frozen=True, slots=True)
class Hardware:
    """A GPU by published figures, or this machine as measured."""

    name: str
    rates: Rates
    measured: bool = False
    memory: int | None = None  # total bytes; None: unknown
    levels: tuple[Level, ...] = ()
    capability: tuple[int, int] | None = None  # of NVIDIA's GPUs
    sram_a_tile: int | None = None  # bytes that one tile may use
