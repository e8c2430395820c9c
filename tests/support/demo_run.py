"""One real run of `flashtile demo --quick` in a terminal, shared by all tests of its output."""

from __future__ import annotations

import fcntl
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.terminal import in_terminal

# The command; it also pickles what it computed.
CODE = """
import pickle, sys
from flashtile.lab.report import content
path, collect = sys.argv.pop(), content.collect
def kept(*given, **more):
    found = collect(*given, **more)
    with open(path, "wb") as file:
        pickle.dump(found, file)
    return found
content.collect = kept
from flashtile.lab.cli import main
main()
"""
# The same command on the pickled content, without computing it: for testing its options.
REPLAY = """
import pickle, sys, time
from flashtile.lab.report import content
kept = sys.argv.pop()
def load(quick=False, progress=None, artist=None):
    with open(kept, "rb") as file:
        found = pickle.load(file)
    for done in range(3):
        progress("something with a very long name " * 5, done, 3)
        time.sleep(0.15)
    for result in found.results if artist else ():
        artist.draw(result.study.name, result.record)
    return found
content.collect = load
from flashtile.lab.cli import main
main()
"""
# Other tests run at the same time: two threads that wait for each other would take several times as long.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Run(NamedTuple):
    """The results of a run."""

    folder: Path
    terminal: str  # its output on the terminal, control codes included
    seconds: float
    kept: Path

    @property
    def page(self) -> Path:
        return self.folder / "index.html"

    @property
    def content(self) -> Any:
        return pickle.loads(self.kept.read_bytes())

    def replay(self, *options: str) -> list[str]:
        """A command that shows the same content, with these options."""
        return [sys.executable, "-c", REPLAY, "demo", *options, str(self.kept)]


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run once, even if several processes share the tests."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    record = base / "demo-run.pickle"
    with open(base / "demo-run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not record.exists():
            folder, kept = base / "demo-run", base / "demo-run.content"
            start = time.perf_counter()
            command = [sys.executable, "-c", CODE, "demo", "--quick", "--out", str(folder), str(kept)]
            terminal = in_terminal(command, **ONE_THREAD)
            record.write_bytes(pickle.dumps((folder, terminal, time.perf_counter() - start, kept)))
    return Run(*pickle.loads(record.read_bytes()))
