"""The memories of this machine, fastest first: sizes from the system, rates from copies that fit in them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from flashtile.backends.native.blocks import LANES
from flashtile.cost.hardware import Level
from flashtile.host import machine
from flashtile.host.threads import cores
from flashtile.lab.bench.timing import alternate
from flashtile.numerics.dtypes import Array

SYSTEM = Path("/sys/devices/system/cpu/cpu0/cache")
LINE = 64  # bytes
BATCH = 1 << 23  # bytes that a thread copies per task
LARGE = 1 << 26  # bytes: more than most caches hold


class Cache(NamedTuple):
    """One cache, as Linux reports it."""

    name: str
    bytes: int
    shared: int  # cores that share it


def measure(memory_rate: float, seconds: float = 0.3) -> tuple[Level, ...]:
    """Measure registers and caches of the cores that this process may use, and the memory behind them."""
    threads, isa, memory = cores(), machine.isa(), machine.memory()
    found = [] if isa is None else [Level("registers", threads * LANES[isa].register_bytes, None)]
    known = list(caches())
    copies = {c.name: Copies(c.bytes // min(c.shared, threads) // 4, threads) for c in known}  # to and from: half of it
    times = alternate({name: copy.run for name, copy in copies.items()}, seconds=seconds)
    rates = {name: copies[name].moved / min(timing.samples) for name, timing in times.items()}
    found += [Level(c.name, c.bytes * max(1, threads // c.shared), rates[c.name]) for c in known]
    return (*found, *([] if memory is None else [Level("memory", memory, memory_rate)]))


def caches(folder: Path = SYSTEM) -> Iterator[Cache]:
    """The data caches of the first core; none if the system does not report them."""
    for index in sorted(folder.glob("index*")):
        level, kind, size, shared = ((index / name).read_text().strip() for name in _FILES)
        if kind != "Instruction" and size.endswith("K"):
            yield Cache(f"L{level}", int(size[:-1]) << 10, _count(shared))


_FILES = ("level", "type", "size", "shared_cpu_list")


def _count(cores: str) -> int:
    """Count the cores of a list: 4 for "0-2,8"."""
    ends = ([int(n) for n in part.split("-")] for part in cores.split(","))
    return sum(end[-1] - end[0] + 1 for end in ends)


class Copies:
    """Every thread repeatedly copies a few bytes of its own."""

    def __init__(self, size: int, threads: int) -> None:
        self.pairs = [(_overlapping(size), _overlapping(size)) for _ in range(threads)]
        each = self.pairs[0][0].nbytes
        self.times = max(1, BATCH // each)
        self.moved = 2 * each * self.times * threads  # read and written
        self.pool = ThreadPoolExecutor(threads)

    def run(self) -> None:
        list(self.pool.map(self._copy, self.pairs))

    def _copy(self, pair: tuple[Array, Array]) -> None:
        for _ in range(self.times):
            np.copyto(*pair)


def _overlapping(size: int) -> Array:
    """Rows that start one cache line apart, so that one call passes over the same bytes many times."""
    size = max(size, 2 * LINE)
    steps = max(1, min(size // 2 // LINE, BATCH // size))
    block = np.zeros(size + LINE, np.uint8)
    block = block[-block.ctypes.data % LINE :]
    return as_strided(block, (steps, size - (steps - 1) * LINE), (LINE, 1))
