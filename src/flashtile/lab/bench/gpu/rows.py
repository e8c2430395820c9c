"""The rows of the GPU suites, and the work that each of them counts as."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from flashtile import dispatch
from flashtile.cost.plan import Plan, plan
from flashtile.lab.bench.cases import CAUSAL, FORWARD, Case
from flashtile.lab.bench.memory import BACKWARD
from flashtile.numerics.dtypes import EIGHT_BITS

TRAIN, DECODE, SMALL, MEMORY = "train", "decode", "small", "memory"
SUITES = (TRAIN, DECODE, SMALL, MEMORY)
TOKENS, HIDDEN = 16384, 2048
STEP = "step"  # of training: a forward pass, then its backward pass, as one call
FLOPS = {FORWARD: 1.0, BACKWARD: 2.5, STEP: 3.5}  # a backward pass has five products, a forward pass two
DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class Row:
    """One case of a suite. With lengths, packed sequences of these lengths in a batch of one."""

    suite: str
    case: Case
    lengths: tuple[int, ...] = ()
    extra: bool = False  # outside the grid of head dims, masks and lengths

    @property
    def words(self) -> tuple[str, ...]:
        """The parts of the name, for filters."""
        options = self.case.options
        window = (f"window{options['window'][0] + 1}",) if "window" in options else ()
        packed = (f"packed{len(self.lengths)}",) if self.lengths else ()
        mask = "causal" if self.causal else "full"
        return (self.suite, self.case.direction, *self.case.name.split(), mask, *window, *packed)

    @property
    def name(self) -> str:
        return " ".join(self.words)

    @property
    def causal(self) -> bool:
        return bool(self.case.options.get("causal"))

    @property
    def window(self) -> int | None:
        """The most keys that a query sees, including its own."""
        return self.case.options["window"][0] + 1 if "window" in self.case.options else None

    @property
    def supports_backward(self) -> bool:
        """Whether its results are gradients."""
        return self.case.direction != FORWARD

    @property
    def eight_bits(self) -> bool:
        return self.case.dtype == EIGHT_BITS

    @property
    def starts(self) -> list[int]:
        """Where packed sequences start, and where the last one ends."""
        return list(accumulate(self.lengths, initial=0))

    @property
    def flops(self) -> float:
        """4 H N^2 D per sequence, half of it if causal, by convention; in a window, visible pairs only."""
        c = self.case
        if self.window is not None:
            forward = float(c.plan().flops)
        else:
            squares = sum(n * n for n in self.lengths) if self.lengths else c.batch * c.n_q * c.n_k
            forward = 4.0 * c.heads * squares * c.dim * (0.5 if self.causal else 1.0)
        return forward * FLOPS[c.direction]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values, which a decoding step reads once."""
        c = self.case
        return 2 * c.batch * c.kv_heads * c.n_k * c.dim * 2  # K and V, two bytes per element

    def backend(self, device: str) -> str | None:
        """Our default backend for it on this device."""
        return self._plan(device).backend

    def objection(self, device: str) -> str | None:
        """Why it is not measured there: 8-bit tensors that are widened first show nothing new."""
        planned, able = self._plan(device), [row.name for row in dispatch.TABLE if row.eight_bits]
        if not self.eight_bits or planned.backend in able:
            return None
        return "; ".join(f"{name}: {planned.reasons[name]}" for name in able)

    def _plan(self, device: str) -> Plan:
        if not self.lengths:
            return self.case.plan(device)
        q, k = ((n, heads, dim) for _, heads, n, dim in self.case.shapes)
        cu = np.array(self.starts)
        return plan(q, k, self.case.dtype, device, cu_q=cu, cu_k=cu, **self.case.options)

    def unwindowed(self) -> "Row":
        """The same shape without a mask."""
        return replace(self, case=replace(self.case, options={}))

    def to_dict(self) -> dict[str, Any]:
        case = {k: x for k, x in self.case.to_dict().items() if k not in ("case", "entry", "beside_torch")}
        return {"suite": self.suite, "case": self.name, **case, "lengths": list(self.lengths), "extra": self.extra}


def _grid(direction: str, dtype: str = DTYPE) -> Iterable[Row]:
    """All combinations of head dim, mask and length, with constant hidden size and number of tokens."""
    for dim in (64, 128, 256):
        heads = HIDDEN // dim
        for masked in ({}, CAUSAL):
            for n in (1024, 4096, 16384):
                yield Row(TRAIN, Case(n, n, dim, heads, heads, TOKENS // n, dtype, direction, masked))


def _pass(direction: str) -> Iterable[Row]:
    """The training rows of one pass: the grid, and some others."""

    def case(n: int, heads: int = HIDDEN // 128, kv_heads: int = HIDDEN // 128, **options: Any) -> Case:
        return Case(n, n, 128, heads, kv_heads, TOKENS // n, DTYPE, direction, options)

    yield from _grid(direction)
    yield Row(TRAIN, case(8192, heads=32, kv_heads=8, causal=True), extra=True)
    yield Row(TRAIN, case(16384, causal=True, window=(1023, None)), extra=True)
    yield from (Row(TRAIN, case(5000, **masked), extra=True) for masked in ({}, CAUSAL))
    yield Row(TRAIN, case(TOKENS, causal=True), (512, 1000, 1024, 1536, 2048, 2560, 3072, 4632), extra=True)


# In the order of the tables.
ROWS = (
    # The second is large enough for the Hopper kernels.
    *(Row(SMALL, Case(128, 128, 64, 8, 8, batch, DTYPE)) for batch in (1, 16)),
    *(
        Row(DECODE, Case(1, cache, 128, 32, 8, batch, DTYPE))
        for batch, cache in ((1, 8192), (1, 131072), (16, 8192), (64, 4096))
    ),
    *(Row(MEMORY, Case(16384, 16384, 128, 16, 16, 1, DTYPE, direction, CAUSAL)) for direction in (FORWARD, BACKWARD)),
    *(Row(TRAIN, Case(n, n, 128, 16, 16, TOKENS // n, DTYPE, STEP, CAUSAL)) for n in (4096, 16384)),
    *_pass(FORWARD),
    *_pass(BACKWARD),
    *_grid(FORWARD, EIGHT_BITS),
)


def run_order(rows: Iterable[Row]) -> list[Row]:
    """The order of a run: first rows outside the grid, then those with the least work, since time may run out."""
    return sorted(rows, key=lambda row: (row.suite == TRAIN and not row.extra, row.flops))


def measurable(rows: Iterable[Row], device: str) -> tuple[list[Row], dict[str, str]]:
    """The rows to measure on this device, and why not the others, by their names."""
    rows = list(rows)
    unfit = {row.name: reason for row in rows if (reason := row.objection(device)) is not None}
    return [row for row in rows if row.name not in unfit], unfit


def select(suites: Collection[str] = (), only: Iterable[str] = (), quick: bool = False) -> list[Row]:
    """Select the rows of these suites (all if none is named) whose name has all words of at least one filter.

    `quick` omits long sequences.
    """
    filters = [set(words.lower().split()) for words in only]
    return [
        row
        for row in ROWS
        if (not suites or row.suite in suites)
        and (not filters or any(f <= {word.lower() for word in row.words} for f in filters))
        and not (quick and row.case.n_k > 8192)
    ]
