"""Compile every row's kernels ahead in worker processes, so that the run finds them on disk."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from flashtile.lab.bench import workers
from flashtile.lab.bench.gpu.peers import FA4_CACHE, PEERS, Peer, UnfitError, tensors
from flashtile.lab.bench.gpu.rows import ROWS, Row, run_order

LONGEST = 180.0  # seconds for one row of one peer
# Each worker compiles in one process; there are as many workers as cores.
ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}


def keep_on_disk() -> None:
    """Let peers keep compiled kernels on disk, unless the user decides otherwise. Call it before their import."""
    os.environ.setdefault(FA4_CACHE, "1")


def jobs(rows: Sequence[Row], peers: Sequence[Peer]) -> list[workers.Job]:
    """One job for each row of each peer that keeps compiled kernels on disk.

    The order is that of the run, so rows that differ only in length, and share kernels, are not compiled concurrently.
    """
    return [{"row": row.name, "peer": peer.name} for row in run_order(rows) for peer in peers if peer.compiles()]


def compile_ahead(
    rows: Sequence[Row],
    peers: Sequence[Peer],
    *,
    count: int | None = None,
    end: float | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> dict[str, str]:
    """Compile everything in `count` processes (default: one per core), and return what failed, and why."""
    work = jobs(rows, peers)

    def name(job: workers.Job) -> str:
        return f"{job['peer']}: {job['row']}"

    def done(job: workers.Job, n: int) -> None:
        progress(f"compiled {name(job)}", n, len(work))

    answers = workers.run(
        f"{__name__}:compile_one", work, workers=count, seconds=LONGEST, environment=ALONE, done=done, end=end
    )
    reasons = {name(job): answer.get(workers.FAILED) for job, answer in zip(work, answers, strict=True)}
    return {what: reason for what, reason in reasons.items() if reason not in (None, workers.LEFT_OUT)}


def compile_one(job: workers.Job) -> dict[str, Any]:
    """Run one row of one peer once, in a worker. An unsupported row is not a failure, which would end the worker."""
    row = next(row for row in ROWS if row.name == job["row"])
    peer = next(peer for peer in PEERS if peer.name == job["peer"])
    start = time.perf_counter()
    try:
        peer.prepare(row, [tensors(row, "cuda", 0)]).result()
    except UnfitError as error:
        return {"unfit": str(error)}
    return {"seconds": time.perf_counter() - start}
