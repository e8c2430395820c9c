"""gpu/precompile.py: peers with a disk cache are compiled ahead, and failures are reported."""

from __future__ import annotations

from typing import Any

import pytest

from flashtile.lab.bench import workers
from flashtile.lab.bench.gpu import peers, precompile
from flashtile.lab.bench.gpu.peers import FA4, FA4_CACHE, FLEX, NAMES, OURS, OURSELVES, PEERS, PORTABLE
from flashtile.lab.bench.gpu.rows import ROWS, run_order


def test_only_peers_with_a_disk_cache_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiling() -> list[str]:
        return [job["peer"] for job in precompile.jobs(ROWS[:1], PEERS)]

    monkeypatch.setenv(FA4_CACHE, "0")
    precompile.keep_on_disk()  # the user's word stands
    assert compiling() == [OURS, *OURSELVES, FLEX]
    monkeypatch.delenv(FA4_CACHE)
    precompile.keep_on_disk()
    assert compiling() == [OURS, *OURSELVES, FLEX, FA4]


def test_jobs_are_in_the_order_of_the_run() -> None:
    ours = [job["row"] for job in precompile.jobs(ROWS, PEERS) if job["peer"] == OURS]
    assert ours == [row.name for row in run_order(ROWS)] != [row.name for row in ROWS]


def test_failures_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Any] = []

    def run(target: str, jobs: Any, *, workers: int, done: Any, **_: Any) -> list[dict[str, Any]]:
        assert target == "flashtile.lab.bench.gpu.precompile:compile_one" and workers == 3
        for n, job in enumerate(jobs, 1):
            done(job, n)
        reasons = {FLEX: {"failed": "no memory"}, PORTABLE: {"failed": "no time was left"}}
        return [reasons.get(job["peer"], {"seconds": 1}) for job in jobs]

    monkeypatch.setattr(workers, "run", run)
    those = PEERS[: NAMES.index(FLEX) + 1]
    failed = precompile.compile_ahead(ROWS[:2], those, count=3, progress=lambda *step: steps.append(step))
    assert failed == {f"{FLEX}: {row.name}": "no memory" for row in ROWS[:2]}
    total = 2 * sum(peer.compiles() for peer in those)
    assert [step[1:] for step in steps] == [(n, total) for n in range(1, total + 1)]


def test_a_worker_finds_its_row_and_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    made: list[Any] = []
    monkeypatch.setattr(precompile, "tensors", lambda row, device, seed: (row.name, device))

    def prepare(self: peers.Peer, row: Any, sets: Any) -> Any:
        made.append((self.name, sets))
        return peers.Contender((), self.context, lambda: ())

    monkeypatch.setattr(peers.Peer, "prepare", prepare)
    assert precompile.compile_one({"row": ROWS[5].name, "peer": FLEX})["seconds"] >= 0
    assert made == [(FLEX, [(ROWS[5].name, "cuda")])]


def test_an_unsupported_row_is_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "tensors", lambda row, device, seed: None)
    assert precompile.compile_one({"row": ROWS[0].name, "peer": PORTABLE}) == {"unfit": "flashtile runs the same here"}
