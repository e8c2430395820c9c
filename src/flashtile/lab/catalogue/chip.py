"""Named GPUs: their published rates, and their memory hierarchy."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from flashtile.cost.hardware import Hardware, Level, Rates
from flashtile.numerics.dtypes import EIGHT_BITS

OTHER_CARDS = {"pcie", "nvl", "laptop", "mig", "d"}  # slower cards of the same name
SRAM_BYTES_PER_CLOCK = 128  # per processor: 32 banks of 4 bytes, on every GPU listed


@dataclass(frozen=True, slots=True)
class Chip:
    """A GPU in the units of its datasheet. A processor is an SM of NVIDIA or a CU of AMD."""

    name: str
    target: str  # for compilers
    processors: int
    clock_mhz: int  # at which the 16-bit rate holds
    tflops: Mapping[str, float]  # dense, by type; 16-bit ones by the matrix units, accumulated in float32
    memory: str  # HBM or GDDR
    memory_gib: int
    memory_gb_s: float
    l2_mib: int
    sram_kib: int  # per processor, shared memory and L1 together if they are one
    block_kib: int  # the part of it that one tile may use
    registers_kib: int  # per processor
    l2_bytes_per_clock: int | None = None  # None: not published
    l3_mib: int | None = None
    l3_gb_s: float | None = None

    @property
    def capability(self) -> tuple[int, int] | None:
        """(9, 0) for sm_90; None for other vendors."""
        kind, _, number = self.target.partition("_")
        return (int(number[:-1]), int(number[-1])) if kind == "sm" else None

    def rates(self, dtype: str = "bfloat16") -> Rates:
        """Peak rates for elements of this type; 8-bit ones count as widened if no rate is known for them."""
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
    """The catalogue name for a driver's name such as "NVIDIA A100-SXM4-40GB"; None if it is not listed."""
    words = set("".join(c if c.isalnum() else " " for c in device.lower()).split())
    if not OTHER_CARDS.isdisjoint(words):
        return None
    # 40 matches 40gb; l4 does not match l40s.
    matching = [name for name in chips() if all(words & {part, f"{part}gb"} for part in name.split("-"))]
    return max(matching, key=len, default=None)
