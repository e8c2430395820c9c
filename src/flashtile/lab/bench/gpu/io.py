"""Bytes that a forward pass moves on a GPU, counted by ncu, compared with traffic.py's count for its tiles."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import flashtile
from flashtile.lab.bench import records
from flashtile.lab.bench.cases import CAUSAL, Case
from flashtile.lab.bench.gpu import ncu
from flashtile.lab.bench.gpu.device import Device
from flashtile.lab.bench.gpu.ncu import Kernel, ProfilerError
from flashtile.lab.bench.gpu.peers import OURS, Tensors, tensors
from flashtile.lab.bench.gpu.rows import DTYPE, HIDDEN, TOKENS, Row
from flashtile.lab.bench.records import Record
from flashtile.lab.bench.timing import Call
from flashtile.numerics.dtypes import ITEMSIZE

IO = "io"
STANDARD = "standard"  # attention in three torch calls
# Both directions between memory and L2, and between L2 and processors.
METRICS = {
    "memory_read": "dram__bytes_read.sum",
    "memory_written": "dram__bytes_write.sum",
    "cache_read": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "cache_written": "l1tex__m_l1tex2xbar_write_bytes.sum",
}


@dataclass(frozen=True)
class Entry:
    """One shape, computed in one way."""

    row: Row
    way: str

    def call(self, given: Tensors) -> Call:
        q, k, v = given[:3]
        if self.way == STANDARD:
            return lambda: (q @ k.mT).softmax(-1) @ v  # scores, weights and output: one kernel each
        options = self.row.case.options
        return lambda: flashtile.attention(q, k, v, **options)

    def predicted(self, device: str) -> dict[str, int]:
        """The bytes if memory delivers everything once, and the L2 the rest; unknown for standard attention."""
        p = self.row.case.plan(device)
        out = p.lse_bytes // 4 * p.v_shape[-1] * ITEMSIZE[p.dtype]
        if self.way == STANDARD:
            written = 2 * p.score_bytes + out
            return {"memory_read": p.standard_bytes - written, "memory_written": written}
        written = out + p.lse_bytes
        least, tiles = p.least_bytes - written, p.tile_bytes - written
        return {"memory_read": least, "memory_written": written, "cache_read": tiles, "cache_written": written}

    def to_dict(self, device: str) -> dict[str, Any]:
        p = self.row.case.plan(device)
        tile = {"backend": p.backend, "tile": p.tile} if self.way == OURS else {}
        return {**self.row.to_dict(), "way": self.way, **tile}


ENTRIES = tuple(
    Entry(Row(IO, Case(n, n, dim, HIDDEN // dim, HIDDEN // dim, TOKENS // n, DTYPE, options=options)), way)
    for dim in (64, 128)
    for n in (4096, 16384)
    for options in ({}, CAUSAL)
    for way in ((OURS, STANDARD) if n == 4096 and not options else (OURS,))
)


def run(
    device: Device,
    program: str,
    profile: Callable[..., tuple[list[Kernel], str]] = ncu.profile,
) -> Record:
    """Profile every entry once, in a separate process."""
    kernels, printed = profile(program, __name__, tuple(METRICS.values()))
    failed: dict[str, str] = json.loads(printed.strip().splitlines()[-1])
    done = [entry for entry in ENTRIES if f"{entry.way}: {entry.row.name}" not in failed]
    groups = ncu.by_mark(kernels)
    if len(groups) != len(done) or not all(groups):
        raise ProfilerError(f"it profiled {len(groups)} calls, expected {len(done)} with at least one kernel each")
    record = records.new(IO, quick=False, device=device.describe()) | {"failed": failed}
    record["measurements"] = [_measured(entry, group, device) for entry, group in zip(done, groups, strict=True)]
    return record


def _measured(entry: Entry, kernels: list[Kernel], device: Device) -> dict[str, Any]:
    counts = {
        key: int(sum(kernel.counts[metric] for kernel in kernels))
        for key, metric in METRICS.items()
        if all(metric in kernel.counts for kernel in kernels)
    }
    predicted = entry.predicted(device.name)
    ratios = {key: counts[key] / expected for key, expected in predicted.items() if key in counts}
    found = {"kernels": [kernel.name for kernel in kernels], "measured": counts, "predicted": predicted}
    return {**entry.to_dict(device.name), **found, "ratios": ratios}


def run_profiled(entries: Iterable[Entry] = ENTRIES, device: str = "cuda") -> dict[str, str]:
    """Run every entry after a mark, warmed up, in the profiled process; return what cannot run here."""
    import torch

    cuda: Any = torch.cuda
    failed, calls = {}, []
    for entry in entries:
        try:
            call = entry.call(tensors(entry.row, device, 0))
            call()
            cuda.synchronize()
        except torch.OutOfMemoryError as error:
            failed[f"{entry.way}: {entry.row.name}"] = str(error).splitlines()[0]
        else:
            calls.append(call)
    cuda.profiler.start()
    for call in calls:
        cuda._sleep(1)
        call()
    cuda.synchronize()
    cuda.profiler.stop()
    return failed


if __name__ == "__main__":
    print(json.dumps(run_profiled()))
