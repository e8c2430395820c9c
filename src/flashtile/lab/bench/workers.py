"""Worker processes for jobs that may crash or hang: one line of JSON in, one out; a dead process is replaced."""

import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import IO, Any

Job = dict[str, Any]
FAILED = "failed"  # in an answer: the reason for the failure
LEFT_OUT = "no time was left"


class Worker:
    """One process, started for its first job, that runs module:function on every job."""

    def __init__(self, target: str, seconds: float, environment: Mapping[str, str]) -> None:
        self.target, self.seconds = target, seconds
        # The worker can import what this process can.
        paths = os.pathsep.join(path for path in sys.path if path)
        self.environment = {**os.environ, "PYTHONPATH": paths, **environment}
        self.process: subprocess.Popen[bytes] | None = None
        self.errors: IO[bytes] | None = None

    def run(self, job: Job) -> Job:
        """Return the answer; after a crash or a timeout the next job gets a fresh process."""
        process = self.process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return {FAILED: self._end("it died")}
        if not select.select([process.stdout], [], [], self.seconds)[0]:
            return {FAILED: self._end(f"no answer in {self.seconds:.0f} s")}
        line = process.stdout.readline()
        if not line:
            return {FAILED: self._end("it died")}
        answer: Job = json.loads(line)
        if FAILED in answer:  # after a CUDA error the process is unusable
            self._end("")
        return answer

    def close(self) -> None:
        if self.process is not None:
            self._end("")

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "flashtile.lab.bench.workers", self.target]
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - _end() closes it
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, env=self.environment, bufsize=0
        )
        return self.process

    def _end(self, reason: str) -> str:
        """End the process and return the reason, with its last line of output."""
        process, errors = self.process, self.errors
        assert process is not None and errors is not None
        self.process = self.errors = None
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
        errors.close()
        return f"{reason}: {lines[-1]}"[:200] if lines else reason


def run(
    target: str,
    jobs: Sequence[Job],
    *,
    workers: int | None = None,
    seconds: float,
    environment: Mapping[str, str] | None = None,
    done: Callable[[Job, int], None] = lambda job, count: None,
    end: float | None = None,
) -> list[Job]:
    """Return the answers in the order of the jobs, from `workers` processes, by default one per core.

    `seconds`: the limit per job. None starts after `end`. `done` gets each finished job, and how many are finished.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for n in range(len(jobs)):
        waiting.put(n)
    answers: list[Job] = [{FAILED: LEFT_OUT} for _ in jobs]
    finished: list[int] = []

    def serve() -> None:
        worker = Worker(target, seconds, environment or {})
        try:
            while end is None or time.monotonic() < end:
                n = waiting.get_nowait()
                answers[n] = worker.run(jobs[n])
                finished.append(n)
                done(jobs[n], len(finished))
        except queue.Empty:
            pass
        finally:
            worker.close()

    count = min(os.cpu_count() or 1 if workers is None else workers, len(jobs))
    if count:
        with ThreadPoolExecutor(count) as pool:
            for each in [pool.submit(serve) for _ in range(count)]:
                each.result()
    return answers


def main(target: str) -> None:
    """Answer jobs until there are no more; stop after the first that fails."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not look like an answer
    module, _, name = target.partition(":")
    function = getattr(import_module(module), name)
    for line in sys.stdin:
        try:
            answer = function(json.loads(line))
        except Exception as error:
            message = str(error).strip().partition("\n")[0]
            answer = {FAILED: f"{type(error).__name__}: {message}"[:200]}
        print(json.dumps(answer), file=answers, flush=True)
        if FAILED in answer:
            break


if __name__ == "__main__":
    main(sys.argv[1])
