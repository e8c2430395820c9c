"""Run a command in a real terminal of 80 columns, to test its output and control codes."""

from __future__ import annotations

import os
import re
import struct
import subprocess
from collections.abc import Sequence

import pytest

pytest.importorskip("termios")  # Unix only

import fcntl
import pty
import termios

COLUMNS = 80
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[(?:[0-9]+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[0-9]+)*m")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")  # what a file should not hold


def in_terminal(command: Sequence[str], **environment: str) -> str:
    """Run a command, check that it succeeds, and return all it printed on the terminal, stderr included."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    variables |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environment}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables) as process:
        os.close(theirs)
        text = _all(ours)
    assert process.returncode == 0, text
    return text.replace("\r\n", "\n")


def _all(terminal: int) -> str:
    text = b""
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # the other side has closed
            part = b""
        if not part:
            os.close(terminal)
            return text.decode()
        text += part
