"""Fair timing: contenders take turns in one process, in a fixed or shuffled order; medians and quartiles."""

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Call = Callable[[], Any]
Clock = Callable[[Call], float]  # makes the call and returns its seconds


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one contender, one sample per round."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        return quartiles(self.samples)

    def over(self, calls: int) -> "Timing":
        """Seconds per call, if a sample was several calls."""
        return Timing(tuple(t / calls for t in self.samples))

    def to_dict(self) -> dict[str, Any]:
        q1, q3 = self.quartiles
        return {"median_s": self.median, "q1_s": q1, "q3_s": q3, "rounds": len(self.samples)}


def host_seconds(call: Call) -> float:
    """Time a call by wall clock."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def repeated(call: Call, times: int) -> Call:
    """That many calls in one."""

    def run() -> None:
        for _ in range(times):
            call()

    return run


def alternate(
    contenders: Mapping[str, Call],
    *,
    seconds: float,
    min_rounds: int = 3,
    max_rounds: int = 1000,
    warm_up: int = 1,
    before: Call | None = None,
    clock: Clock = host_seconds,
    shuffle: random.Random | None = None,
) -> dict[str, Timing]:
    """Time contenders in turns for about `seconds` in total. `before` runs ahead of every sample and is not timed.

    `shuffle` shuffles each round, so that no contender always runs after the same one.
    """
    for _ in range(warm_up):
        for call in contenders.values():
            call()
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    collecting = gc.isenabled()
    gc.disable()
    try:
        end = time.perf_counter() + seconds
        for done in range(max_rounds):
            if done >= min_rounds and time.perf_counter() > end:
                break
            order = list(contenders.items())
            if shuffle is not None:
                shuffle.shuffle(order)
            for name, call in order:
                if before is not None:
                    before()
                samples[name].append(clock(call))
    finally:
        if collecting:
            gc.enable()
    return {name: Timing(tuple(times)) for name, times in samples.items()}


@dataclass(frozen=True, slots=True)
class Ratio:
    """Our time over theirs: the ratio of medians, with quartiles of the ratio in each round."""

    value: float
    q1: float
    q3: float

    @classmethod
    def of(cls, ours: Timing, theirs: Timing) -> "Ratio":
        each = [a / b for a, b in zip(ours.samples, theirs.samples, strict=True)]
        return cls(ours.median / theirs.median, *quartiles(each))


def quartiles(values: Iterable[float]) -> tuple[float, float]:
    ordered = list(values)
    if len(ordered) < 2:
        return ordered[0], ordered[0]
    q1, _, q3 = statistics.quantiles(ordered, n=4, method="inclusive")
    return q1, q3


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))
