"""The C++ core as a separate program, by another compiler or in an emulator: memory is sent there and back."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from flashtile import calls
from flashtile.backends import native
from flashtile.host.address import address
from tests.tools.tree import SOURCE

CORE = SOURCE / "backends" / "native" / "core"
SERVER = Path(__file__).with_name("serve.cpp")
# Offsets of the addresses in ft_problem: three vectors, eight tensors, sink, six tensors, dsink.
FIELDS = (160, 168, 176, *range(184, 504, 40), 504, *range(512, 752, 40), 752)


def build(compiler: str, folder: Path, isa: str, more: list[str]) -> Path:
    """Build the core for a processor, with serve.cpp, as a program."""
    program = folder / "serve"
    flags = ["-std=c++17", "-O2", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-static", *more]
    sources = [*map(str, sorted(CORE.glob("*.cpp"))), str(SERVER)]
    command = [compiler, *flags, f'-DFT_ISA="{isa}"', f"-I{CORE}", *sources, "-o", str(program), "-lpthread"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


class Library:
    """Replaces the library that native.load() returns."""

    def __init__(self, command: list[str], isa: str) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._isa = isa
        self._seen: dict[int, tuple[int, int]] = {}  # address of an array: the bounds of its memory

    def ft_isa(self) -> bytes:
        return self._isa.encode()

    def address(self, x: Any) -> int:
        at = address(x)
        self._seen[at] = np.lib.array_utils.byte_bounds(x) if x.size else (at, at)
        return at

    def ft_forward(self, packed: bytes) -> int:
        return self._call(0, packed)

    def ft_backward(self, packed: bytes) -> int:
        return self._call(1, packed)

    def _call(self, which: int, packed: bytes) -> int:
        found = {field: at for field in FIELDS if (at := struct.unpack_from("Q", packed, field)[0])}
        regions = _merged(self._seen[at] for at in found.values())
        places = []
        for field, at in found.items():
            low, high = self._seen[at]
            n = next(n for n, (first, last) in enumerate(regions) if first <= low and high <= last)
            places += [field, n, at - regions[n][0]]
        sizes = [high - low for low, high in regions]
        message = struct.pack(f"{2 + len(sizes)}Q", which, len(sizes), *sizes) + packed
        message += struct.pack(f"{1 + len(places)}Q", len(places) // 3, *places)
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None and pipe_out is not None
        pipe_in.write(message + b"".join(ctypes.string_at(low, high - low) for low, high in regions))
        pipe_in.flush()
        (status,) = struct.unpack("q", pipe_out.read(8))
        for (low, _), size in zip(regions, sizes, strict=True):
            ctypes.memmove(low, pipe_out.read(size), size)
        self._seen.clear()
        return int(status)

    def close(self) -> None:
        self._process.communicate(timeout=60)


def _merged(bounds: Any) -> list[tuple[int, int]]:
    """Merge overlapping ranges of memory."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(set(bounds)):
        if merged and low < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


@contextmanager
def emulated(command: list[str], isa: str) -> Iterator[None]:
    """In this context, backend="native" runs the program."""
    library = Library(command, isa)
    try:
        with (
            mock.patch.object(native.library, "load", lambda: library),
            mock.patch.object(native, "address", library.address),
            mock.patch.object(native, "small", lambda problem: None),  # it passes addresses that Library does not know
            mock.patch.object(calls, "_known", {}),
        ):
            yield
    finally:
        library.close()
