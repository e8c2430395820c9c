"""Run Python in a separate process that can import flashtile and these tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python(
    *arguments: str, before: tuple[str, ...] = (), timeout: float | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run it with these arguments and environment variables; `before`: a command that runs it, such as a checker.

    After `timeout` seconds it is killed, and subprocess.TimeoutExpired is raised.
    """
    paths = (str(ROOT), str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)} | variables
    command = [*before, sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=timeout)
