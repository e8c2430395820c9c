"""Named GPUs: what their makers say they can do, and the hierarchy of memories they do it with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from flashtile.cost.hardware import Hardware, Level, Rates
from flashtile.numerics.dtypes import EIGHT_BITS

OTHER_CARDS = {"pcie", "nvl", "laptop", "mig", "d"}  # slower ones of the same name
SRAM_BYTES_PER_CLOCK = 128  # that one processor can read: 32 banks of 4 bytes, on every GPU listed


@dataclass(frozen=True, slots=True)
class Chip:
    """A GPU in the units of its datasheet. A processor is what NVIDIA calls an SM and AMD a CU."""

    name: str
    target: str  # as compilers call it
    processors: int
    clock_mhz: int  # at which the 16-bit rate holds
    tflops: Mapping[str, float]  # dense, by type; 16-bit ones by the matrix units, with sums in float32
    memory: str  # what kind: HBM or GDDR
    memory_gib: int
    memory_gb_s: float
    l2_mib: int
    sram_kib: int  # a processor, shared memory and L1 together where they are one
    block_kib: int  # of it that one tile may have
    registers_kib: int  # a processor
    l2_bytes_per_clock: int | None = None  # None: the maker does not say
    l3_mib: int | None = None
    l3_gb_s: float | None = None

    @property
    def capability(self) -> tuple[int, int] | None:
        """(9, 0) for sm_90; None for a GPU that is not NVIDIA's."""
        kind, _, number = self.target.partition("_")
        return (int(number[:-1]), int(number[-1])) if kind == "sm" else None

    def rates(self, dtype: str = "bfloat16") -> Rates:
        """At best, a second, for elements of this type; 8-bit ones are widened where no rate is known for them."""
        widened = dtype == "bfloat16" or (dtype == EIGHT_BITS and dtype not in self.tflops)
        key = "float16" if widened else dtype
        return Rates(self.tflops[key] * 1e12, self.memory_gb_s * 1e9)

    @property
    def levels(self) -> tuple[Level, ...]:
        hertz = self.clock_mhz * 1e6
        l2_rate = None if self.l2_bytes_per_clock is None else self.l2_bytes_per_clock * hertz
        found = [
            Level("registers", self.processors * self.registers_kib << 10, None),
            Level("SRAM", self.processors * self.sram_kib << 10, self.processors * SRAM_BYTES_PER_CLOCK * hertz),
            Level("L2", self.l2_mib << 20, l2_rate),
        ]
        if self.l3_mib is not None:
            found.append(Level("L3", self.l3_mib << 20, None if self.l3_gb_s is None else self.l3_gb_s * 1e9))
        return (*found, Level(self.memory, self.memory_gib << 30, self.memory_gb_s * 1e9))

    def hardware(self, dtype: str = "bfloat16") -> Hardware:
        return Hardware(
            name=self.name,
            rates=self.rates(dtype),
            memory=self.memory_gib << 30,
            levels=self.levels,
            capability=self.capability,
            sram_a_tile=self.block_kib << 10,
        )


@cache
def chips() -> dict[str, Chip]:
    text = files("flashtile.lab.catalogue").joinpath("chips.json").read_text()
    return {name: Chip(**values) for name, values in json.loads(text).items()}


def known_as(device: str) -> str | None:
    """The name here of a GPU that a driver calls, say, "NVIDIA A100-SXM4-40GB"; None where it is not listed."""
    spoken = "".join(c if c.isalnum() else " " for c in device.lower()).split()
    if not OTHER_CARDS.isdisjoint(spoken):
        return None
    matching = [name for name in chips() if all(any(_same(part, w) for w in spoken) for part in name.split("-"))]
    return max(matching, key=len, default=None)


def _same(part: str, word: str) -> bool:
    """40 is 40gb; l4 is not l40s."""
    return word in (part, f"{part}gb")
