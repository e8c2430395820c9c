"""Run the GPU suites row by row, flashtile and its peers in turns, and make the record."""

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from flashtile.lab.bench import records
from flashtile.lab.bench.gpu import bars, ceilings
from flashtile.lab.bench.gpu.ceilings import COPY, PRODUCT, Ceiling
from flashtile.lab.bench.gpu.device import Device
from flashtile.lab.bench.gpu.peers import OURS, PORTABLE, Contender, Peer, UnfitError, short_error, tensors
from flashtile.lab.bench.gpu.rows import DECODE, MEMORY, SMALL, TRAIN, Row, run_order
from flashtile.lab.bench.records import Record
from flashtile.lab.bench.suite import Progress
from flashtile.lab.bench.timing import Call, Ratio, Timing, alternate, repeated

SEED = 42
SAMPLE = 0.010  # least seconds of device time per sample, so that its ends do not count
GRAPH_CALLS = 64  # most calls in one graph: the gap between two replays is that of several calls
ENQUEUED = 50  # most calls in a sample of host time: fewer than a stream can hold
UNWINDOWED = {name: f"{name}, no window" for name in (OURS, PORTABLE)}

Calls = dict[str, Callable[[int], Call]]  # name -> (n -> a call that does it n times)


@dataclass
class Bench:
    """One run: the device, the peers timed on it, and the number of rounds."""

    device: Device
    peers: Sequence[Peer]
    rounds: int = 15
    sample: float = SAMPLE
    rng: random.Random = field(default_factory=lambda: random.Random(SEED))

    @cached_property
    def product(self) -> Ceiling:
        return ceilings.product(self.device.name)

    @cached_property
    def copy(self) -> Ceiling:
        return ceilings.copy(self.device.name)

    def measure(self, row: Row) -> dict[str, Any]:
        """Measure everything about one row, as plain values."""
        kinds = {TRAIN: self._train, DECODE: self._decode, SMALL: self._small, MEMORY: self._memory}
        return {**row.to_dict(), "backend": row.backend(self.device.name), **kinds[row.suite](row)}

    def _train(self, row: Row) -> dict[str, Any]:
        contenders, absent = self._contenders(row)
        calls: Calls = {name: contender.repeated for name, contender in contenders.items()}
        calls[PRODUCT] = partial(repeated, self.product.call)
        if row.window is not None:
            ours = [peer for peer in self.peers if peer.name in (OURS, PORTABLE)]
            plain, _ = self._contenders(row.unwindowed(), ours)
            calls |= {UNWINDOWED[name]: contender.repeated for name, contender in plain.items()}
        times = self.device_times(calls)
        found = _compared(contenders, absent, times)
        product = times.pop(PRODUCT)
        found |= {"flops": row.flops, "ceiling": self.product.amount / product.median}
        if row.window is not None:
            whole = {name: times.pop(UNWINDOWED[name]) for name in plain}
            found |= {"unwindowed": _to_dicts(whole), "window": row.window}
        found["rates"] = {name: row.flops / timing.median for name, timing in times.items()}
        return found

    def _decode(self, row: Row) -> dict[str, Any]:
        """Time graphs, so that the host does not hide the kernel, and the host time of a call separately."""
        contenders, absent = self._contenders(row, sets=input_sets(row.kv_bytes, self.device.cache))
        calls: Calls = {COPY: partial(repeated, self.copy.call)}
        sizes, eager = {COPY: 1}, {}
        for name, contender in contenders.items():
            enough = self._filling(contender.repeated, GRAPH_CALLS, samples=2)
            n = max(1, enough // len(contender.calls)) * len(contender.calls)
            try:
                calls[name], sizes[name] = partial(repeated, self.device.captured(contender.repeated(n))), n
            except Exception as error:
                calls[name], sizes[name], eager[name] = contender.repeated, 1, short_error(error)
        times = {name: timing.over(sizes[name]) for name, timing in self.device_times(calls).items()}
        found = _compared(contenders, absent, times)
        ceiling = self.copy.amount / times.pop(COPY).median
        rates = {name: row.kv_bytes / timing.median for name, timing in times.items()}
        return found | {
            "bytes": row.kv_bytes,
            "ceiling": ceiling,
            "rates": rates,
            "shares": {name: rate / ceiling for name, rate in rates.items()},
            "eager": eager,  # contenders that could not be captured, and why
            "host": _to_dicts(self._host_times(contenders)),
        }

    def _small(self, row: Row) -> dict[str, Any]:
        """Measure the host time of a call, and the time until its result is available."""
        contenders, absent = self._contenders(row)
        host = self._host_times(contenders)
        whole = {name: self._then_wait(contender.repeated(1)) for name, contender in contenders.items()}
        waited = alternate(whole, seconds=0, min_rounds=self.rounds, max_rounds=self.rounds, shuffle=self.rng)
        return _compared(contenders, absent, waited) | {"host": _to_dicts(host)}

    def _memory(self, row: Row) -> dict[str, Any]:
        contenders, absent = self._contenders(row)
        grown = {}
        for name, contender in contenders.items():
            with contender.context():
                grown[name] = self.device.growth(contender.calls[0])
        c = row.case
        n = c.batch * c.heads * c.n_q
        statistics, queries = 4 * n, 4 * n * c.dim  # lse or delta; dQ accumulated in float32
        # A forward pass may keep the lse; a backward pass one such vector, and an unfinished dQ.
        needed = statistics + (queries if row.supports_backward else 0)
        return {"absent": absent, "grown": grown, "needed": needed, "scores": 2 * n * c.n_k}

    def _contenders(
        self, row: Row, peers: Sequence[Peer] | None = None, sets: int = 1
    ) -> tuple[dict[str, Contender], dict[str, str]]:
        """Return the peers that can run this row, warmed up, and why the others cannot."""
        inputs = [tensors(row, self.device.name, SEED + n) for n in range(sets)]
        found, absent = {}, {}
        for peer in self.peers if peers is None else peers:
            try:
                contender = peer.prepare(row, inputs)
                contender.repeated(len(contender.calls))()
                self.device.synchronize()
            except Exception as error:
                absent[peer.name] = str(error) if isinstance(error, UnfitError) else short_error(error)
            else:
                found[peer.name] = contender
        return found, absent

    def device_times(self, calls: Calls) -> dict[str, Timing]:
        """Device time per call, from samples long enough to fill `self.sample`. Counting the calls also warms up."""
        sizes = {name: self._filling(repeated, 1000) for name, repeated in calls.items()}
        return self._times(calls, sizes, clock=self.device.seconds)

    def _host_times(self, contenders: Mapping[str, Contender]) -> dict[str, Timing]:
        """Seconds until a call returns to the host, which does not wait for the device."""
        calls: Calls = {name: contender.repeated for name, contender in contenders.items()}
        sizes = {name: self._filling(repeated, ENQUEUED, samples=2) for name, repeated in calls.items()}
        return self._times(calls, sizes, before=self.device.synchronize)

    def _times(self, calls: Calls, sizes: Mapping[str, int], **more: Any) -> dict[str, Timing]:
        """Seconds per call, one sample of `sizes` calls in each round, in random order."""
        samples = {name: repeated(sizes[name]) for name, repeated in calls.items()}
        more |= {"min_rounds": self.rounds, "max_rounds": self.rounds, "shuffle": self.rng}
        times = alternate(samples, seconds=0, warm_up=0, **more)
        return {name: timing.over(sizes[name]) for name, timing in times.items()}

    def _filling(self, repeated: Callable[[int], Call], most: int, samples: int = 1) -> int:
        """The number of calls that fill so many samples of device time; at least one."""
        once = min(self.device.seconds(repeated(1)) for _ in range(2))
        return max(1, min(most, round(samples * self.sample / max(once, 1e-9))))

    def _then_wait(self, call: Call) -> Call:
        def run() -> None:
            call()
            self.device.synchronize()

        return run


def run(
    bench: Bench,
    rows: Sequence[Row],
    *,
    absent: Mapping[str, str] | None = None,
    unfit: Mapping[str, str] | None = None,
    quick: bool = False,
    seconds: float | None = None,
    earlier: Record | None = None,
    progress: Progress = lambda what, done, total: None,
    save: Callable[[Record], None] = lambda record: None,
    now: Callable[[], float] = time.monotonic,
) -> Record:
    """Measure rows until all are done or `seconds` have passed, and list the rest. `save` gets every step's record.

    `absent` are peers, and `unfit` rows, that this machine cannot run, each with its reason. Rows that were measured
    `earlier`, by the same code on the same machine, are kept.
    """
    record = empty_record(bench, quick) | {"absent": dict(absent or {}), "unfit": dict(unfit or {})}
    places = {row.name: n for n, row in enumerate(rows)}
    if earlier is not None:  # keep what it has of other rows
        records.check_alike(record, earlier)
        record["measurements"] = list(earlier["measurements"])
        for found in ("failed", "unfit"):
            record[found] |= {name: reason for name, reason in earlier[found].items() if name not in places}
        record["left_out"] = [name for name in earlier["left_out"] if name not in places]
    end = None if seconds is None else now() + seconds
    turns = run_order(unmeasured(rows, earlier))
    for done, row in enumerate(turns):
        if end is not None and now() >= end:
            record["left_out"] += sorted((left.name for left in turns[done:]), key=lambda name: places[name])
            break
        progress(row.name, done, len(turns))
        try:
            record["measurements"].append(bench.measure(row))
            record["measurements"].sort(key=lambda found: places.get(found["case"], -1))
        except Exception as error:
            record["failed"][row.name] = short_error(error)
        save(with_summary(record))
    save(with_summary(record))
    progress("done", len(turns), len(turns))
    return record


def empty_record(bench: Bench, quick: bool) -> Record:
    """A record of the conditions of a run, without measurements."""
    record = records.new("gpu", quick, rounds=bench.rounds, device=bench.device.describe())
    return record | {"peers": [peer.name for peer in bench.peers], "failed": {}, "unfit": {}, "left_out": []}


def with_summary(record: Record) -> Record:
    """Update the record's comparison with its bars."""
    record["summary"] = bars.judge(record["measurements"], record["failed"])
    return record


def unmeasured(rows: Sequence[Row], record: Record | None) -> list[Row]:
    """The rows that are not in a record."""
    there = set() if record is None else {found["case"] for found in record["measurements"]}
    return [row for row in rows if row.name not in there]


def absences(record: Record) -> dict[tuple[str, str], list[str]]:
    """The rows from which a peer is absent, by its name and the reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in record["measurements"]:
        for peer in row["absent"].items():
            found.setdefault(peer, []).append(row["case"])
    return found


def input_sets(size: int, cache: int) -> int:
    """The number of input sets to cycle through, so that none is still in the cache at its next turn."""
    return max(1, min(GRAPH_CALLS, -(-4 * cache // size)))


def _compared(
    contenders: Mapping[str, Contender], absent: Mapping[str, str], times: Mapping[str, Timing]
) -> dict[str, Any]:
    """The times of all contenders, their time over ours, and the difference of their results from ours."""
    found: dict[str, Any] = {"absent": dict(absent), "times": _to_dicts({name: times[name] for name in contenders})}
    found |= {"ratios": {}, "differences": {}}
    if OURS not in contenders:
        return found
    ours = contenders[OURS].result()
    for name in contenders:
        if name != OURS:
            ratio = Ratio.of(times[name], times[OURS])
            found["ratios"][name] = {"value": ratio.value, "q1": ratio.q1, "q3": ratio.q3}
            found["differences"][name] = difference(ours, contenders[name].result())
    return found


def difference(ours: Iterable[Any], theirs: Iterable[Any]) -> float:
    """The largest of ||a - b|| / ||b||; infinite if it is NaN."""
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        relative = float((a.float() - b.float()).norm() / b.float().norm())
        worst = max(worst, relative if relative == relative else float("inf"))
    return worst


def _to_dicts(times: Mapping[str, Timing]) -> dict[str, Any]:
    return {name: timing.to_dict() for name, timing in times.items()}
