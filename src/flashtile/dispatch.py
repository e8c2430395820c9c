"""One table: backend -> what it supports, and why not. auto = the first row that supports the Problem and suits it."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from flashtile.errors import UnsupportedError
from flashtile.host.arrays import NUMPY, Arrays
from flashtile.inputs import Inputs
from flashtile.options import OPTIONS
from flashtile.problem import Problem


def _nothing(problem: Problem) -> None:
    """Default hook: no objection."""


def _always(problem: Problem) -> bool:
    """For a backend that is as good as those after it, whatever the problem."""
    return True


_module = cache(importlib.import_module)  # a small call would notice the look-up


@dataclass(frozen=True, slots=True)
class Backend:
    """A row of the table. Its module has prepare(), and may have missing(), why_not(), suits() and tile().

    With gradients_by it also has differentiates().
    """

    name: str
    module: str
    device: str
    about: str
    generation: int | None = None  # of NVIDIA's GPUs, by their compute capability; None: any GPU, or none
    eight_bits: bool = False  # multiplies 8-bit tensors as they are; the others are given wider ones
    tensors_only: bool = False  # takes torch tensors and no NumPy arrays
    gradients_by: str | None = None  # the row that makes the gradients which this one does not, see differentiates()

    def load(self) -> ModuleType:
        return _module(self.module)

    def missing(self) -> str | None:
        """Why this backend cannot run on this machine at all; None where it can."""
        reason: str | None = getattr(self.load(), "missing", lambda: None)()
        return reason

    def objection(self, problem: Problem, device: str, tensors: bool = False) -> str | None:
        """Why this backend could not run this problem on any machine; None where it could. tensors: of torch's."""
        if device != self.device:
            return f"it runs on {self.device}, the tensors are on {device}"
        if self.tensors_only and not tensors:
            return "it takes torch tensors only"
        for name in problem.given:
            if self.name in OPTIONS[name].unsupported_by:
                return f"it takes no {name}"
        reason: str | None = getattr(self.load(), "why_not", _nothing)(problem)
        return reason

    def runs_on(self, capability: tuple[int, int] | None) -> bool:
        """Whether it runs on such a GPU; None: one of which nothing is known."""
        return self.generation is None or (capability is not None and capability[0] == self.generation)

    def suits(self, problem: Problem) -> bool:
        """Whether a problem that it supports is also one that it does better than those after it."""
        fit: bool = getattr(self.load(), "suits", _always)(problem)
        return fit

    def why_not(self, problem: Problem, device: str, tensors: bool = False) -> str | None:
        """Why this backend cannot run this problem here; None where it can."""
        asked = device == self.device and (tensors or not self.tensors_only)
        return (self.missing() if asked else None) or self.objection(problem, device, tensors)

    def prepare(self, problem: Problem, arrays: Arrays = NUMPY) -> tuple[Any, Inputs]:
        """What runs this problem, and its inputs; `runner.reusable`: and all that differ in their inputs alone.

        runner.forward(inputs, with_lse) gives output and lse, runner.backward(inputs, dout, out, lse, dlse) the Grads,
        as arrays of this library in the caller's layout. `arrays` counts on a CPU only.
        """
        runner, inputs = self.load().prepare(problem, arrays)
        if self.gradients_by is not None and not self.load().differentiates(problem):
            runner = _Joined(runner, named(self.gradients_by).prepare(problem, arrays)[0])
        return runner, inputs


class _Joined:
    """The forward pass of one backend and the backward pass of another."""

    __slots__ = ("alignment", "backward", "forward", "reusable")

    def __init__(self, forward: Any, backward: Any) -> None:
        self.reusable, self.alignment = forward.reusable and backward.reusable, forward.alignment
        self.forward, self.backward = forward.forward, backward.backward


TABLE = (
    Backend("native", "flashtile.backends.native", "cpu", "C++ core, queries in the SIMD lanes"),
    Backend(
        "sdpa", "flashtile.backends.sdpa", "cpu", "torch's own attention, where there is no core", tensors_only=True
    ),
    Backend("tiles", "flashtile.backends.tiles", "cpu", "NumPy, tile by tile: the one to read"),
    Backend("reference", "flashtile.backends.reference", "cpu", "NumPy, N x N, float64: the oracle"),
    Backend(
        "gluon",
        "flashtile.backends.gluon",
        "cuda",
        "Gluon kernels for Hopper",
        generation=9,
        eight_bits=True,
        gradients_by="triton",
    ),
    Backend("triton", "flashtile.backends.triton", "cuda", "Triton kernels for any GPU it knows"),
)
NAMES = ("auto", *(row.name for row in TABLE))


def named(name: str) -> Backend:
    """The row of this name."""
    return next(row for row in TABLE if row.name == name)


def check_name(backend: object) -> None:
    if not isinstance(backend, str) or backend not in NAMES:
        raise UnsupportedError(f"backend: expected one of {', '.join(NAMES)}, got {backend!r}")


def choose(problem: Problem, backend: str = "auto", device: str = "cpu", tensors: bool = False) -> Backend:
    """The row that will run this problem. An explicit backend never falls back silently.

    tensors: of torch's, also where the problem sees them as NumPy arrays.
    """
    check_name(backend)
    reasons: dict[str, str] = {}
    rows = [row for row in TABLE if backend in ("auto", row.name)]
    chosen = preferred(problem, _able(rows, problem, device, tensors, reasons))
    if chosen is not None:
        if chosen.name == "tiles" and backend == "auto":
            _warn_of_numpy(reasons)
        return chosen
    if backend == "auto":
        raise UnsupportedError(f"backend: none can run this on {device}: {_listed(reasons)}")
    able = [row.name for row in TABLE if row.why_not(problem, device, tensors) is None]
    could = f"could: {', '.join(able)}" if able else "no other backend could"
    raise UnsupportedError(f"backend: {backend} cannot run this: {reasons[backend]}; {could}")


def preferred(problem: Problem, able: Iterable[Backend]) -> Backend | None:
    """Of rows that support a problem, the first that suits it; the last where none does."""
    row = None
    for row in able:
        if row.suits(problem):
            break
    return row


def _able(
    rows: Iterable[Backend], problem: Problem, device: str, tensors: bool, reasons: dict[str, str]
) -> Iterator[Backend]:
    """Of these rows, those that can run a problem here; into reasons goes why the others cannot."""
    for row in rows:
        reason = row.why_not(problem, device, tensors)
        if reason is None:
            yield row
        else:
            reasons[row.name] = reason


_warned_of_numpy = False


def _warn_of_numpy(reasons: dict[str, str]) -> None:
    """Once a process: the answer is right, but takes many times as long as it has to."""
    global _warned_of_numpy
    if not _warned_of_numpy:
        _warned_of_numpy = True
        warnings.warn(
            f"flashtile: this call runs on NumPy, many times slower than on the C++ core ({_listed(reasons)}). To get "
            "the core, install a C++ compiler, then run: pip install --force-reinstall --no-deps --no-cache-dir "
            "--no-binary flashtile flashtile",
            RuntimeWarning,
            stacklevel=2,
        )


def _listed(reasons: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
