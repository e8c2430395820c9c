"""Processes of one torch.distributed group, started once for many tests."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SECONDS = 120  # for one function


class Processes:
    """A group of gloo processes of one thread each; `with Processes(2) as two: two(function, ...)` runs it on all."""

    def __init__(self, size: int) -> None:
        context: Any = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._running = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, self._folder.name, rank, size), daemon=True)
            process.start()
            there.close()
            self._running.append((process, here))

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process, _ in self._running:  # which are idle, unless one has failed; an orderly end takes seconds
            process.kill()
        self._folder.cleanup()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function of a module in every process, and return its results, or raise with the first traceback."""
        for _, pipe in self._running:
            pipe.send((function, arguments))
        found = []
        for rank, (_, pipe) in enumerate(self._running):
            if not pipe.poll(SECONDS):
                raise TimeoutError(f"rank {rank} of {len(self._running)}: no result within {SECONDS} s")
            found.append(pipe.recv())
        for rank, (_, error) in enumerate(found):
            if error is not None:
                raise AssertionError(f"rank {rank} of {len(found)}:\n{error}")
        return [result for result, _ in found]


def _serve(pipe: Connection, folder: str, rank: int, size: int) -> None:
    """Run functions from the pipe."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's own, for prototype features
    store = distributed.FileStore(str(Path(folder) / "store"), size)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    while True:
        function, arguments = pipe.recv()
        try:
            result, error = function(*arguments), None
        except BaseException:
            result, error = None, traceback.format_exc()
        pipe.send((result, error))
