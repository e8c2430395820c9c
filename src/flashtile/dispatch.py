"""The table of backends. "auto" chooses the first row that supports a Problem and suits it."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Protocol

from flashtile.errors import UnsupportedError
from flashtile.host.arrays import NUMPY, Arrays
from flashtile.inputs import Inputs
from flashtile.options import OPTIONS
from flashtile.problem import Problem
from flashtile.results import Grads, Target

_module = cache(importlib.import_module)  # a look-up in sys.modules shows in small calls


class Runner(Protocol):
    """What a backend prepares: both passes of a call, in the caller's library and layout.

    reusable: it also runs calls with other inputs whose layouts and dtypes are the same. alignment: in bytes; modulo
    it, addresses must be those that the runner was prepared for.
    """

    reusable: bool
    alignment: int

    def forward(self, x: Inputs, with_lse: bool = True) -> tuple[Any, Any]:
        """Return output and lse, contiguous. The lse may be anything if it is not asked for."""

    def backward(
        self,
        x: Inputs,
        dout: Any,
        out: Any,
        lse: Any,
        dlse: Any,
        *,
        bias_grad: bool = True,
        target: Target | None = None,
    ) -> Grads:
        """Return dq, dk and dv like q, k and v, dbias (of rank 4, if asked for) and dsink in accumulator precision.

        out and lse are those of forward(). With a target, see there.
        """


@dataclass(frozen=True, slots=True)
class Backend:
    """A row of the table. Its module has prepare(), and may have missing(), why_not(), suits() and tile().

    With gradients_by it also has supports_backward().
    """

    name: str
    module: str
    device: str
    about: str
    generation: int | None = None  # major compute capability of NVIDIA GPUs; None: any GPU, or none
    eight_bits: bool = False  # multiplies 8-bit tensors directly; other backends get wider ones
    tensors_only: bool = False  # takes no NumPy arrays
    gradients_by: str | None = None  # the row for backward passes that this one lacks, see supports_backward()

    def load(self) -> ModuleType:
        return _module(self.module)

    def missing(self) -> str | None:
        """Why this backend cannot run on this machine at all; None if it can."""
        reason: str | None = getattr(self.load(), "missing", lambda: None)()
        return reason

    def objection(self, problem: Problem, device: str, tensors: bool = False) -> str | None:
        """Why this backend supports this problem on no machine; None if it does. tensors: torch tensors."""
        if device != self.device:
            return f"it runs on {self.device}, the tensors are on {device}"
        if self.tensors_only and not tensors:
            return "it takes torch tensors only"
        for name in problem.changed:
            if self.name in OPTIONS[name].unsupported_by:
                return f"it takes no {name}"
        reason: str | None = getattr(self.load(), "why_not", lambda problem: None)(problem)
        return reason

    def runs_on(self, capability: tuple[int, int] | None) -> bool:
        """Whether it runs on a GPU of this compute capability; None: unknown."""
        return self.generation is None or (capability is not None and capability[0] == self.generation)

    def suits(self, problem: Problem) -> bool:
        """Whether it is a better choice for this supported problem than the rows after it."""
        suits: bool = getattr(self.load(), "suits", lambda problem: True)(problem)
        return suits

    def why_not(self, problem: Problem, device: str, tensors: bool = False) -> str | None:
        """Why this backend cannot run this problem here; None if it can."""
        eligible = device == self.device and (tensors or not self.tensors_only)
        return (self.missing() if eligible else None) or self.objection(problem, device, tensors)

    def prepare(self, problem: Problem, arrays: Arrays = NUMPY) -> tuple[Runner, Inputs]:
        """Return a runner for this problem, and its inputs. `arrays` matters on a CPU only."""
        runner: Runner
        runner, inputs = self.load().prepare(problem, arrays)
        if self.gradients_by is not None and not self.load().supports_backward(problem):
            runner = _CombinedRunner(runner, named(self.gradients_by).prepare(problem, arrays)[0])
        return runner, inputs


class _CombinedRunner:
    """The forward pass of one backend and the backward pass of another."""

    __slots__ = ("alignment", "backward", "forward", "reusable")

    def __init__(self, forward: Runner, backward: Runner) -> None:
        self.reusable, self.alignment = forward.reusable and backward.reusable, forward.alignment
        self.forward, self.backward = forward.forward, backward.backward


TABLE = (
    Backend("native", "flashtile.backends.native", "cpu", "C++ core, queries in the SIMD lanes"),
    Backend("sdpa", "flashtile.backends.sdpa", "cpu", "torch's own attention, if there is no core", tensors_only=True),
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
    return next(row for row in TABLE if row.name == name)


def check_name(backend: object) -> None:
    if not isinstance(backend, str) or backend not in NAMES:
        raise UnsupportedError(f"backend: expected one of {', '.join(NAMES)}, got {backend!r}")


def choose(problem: Problem, backend: str = "auto", device: str = "cpu", tensors: bool = False) -> Backend:
    """Choose the row that runs this problem. An explicit backend never falls back silently.

    tensors: the caller passed torch tensors, even if the problem views them as NumPy arrays.
    """
    check_name(backend)
    reasons: dict[str, str] = {}
    rows = [row for row in TABLE if backend in ("auto", row.name)]
    chosen = preferred(problem, _runnable(rows, problem, device, tensors, reasons))
    if chosen is not None:
        if chosen.name == "tiles" and backend == "auto":
            _warn_of_numpy(reasons)
        return chosen
    if backend == "auto":
        raise UnsupportedError(f"backend: none can run this on {device}: {_format(reasons)}")
    able = [row.name for row in TABLE if row.why_not(problem, device, tensors) is None]
    could = f"could: {', '.join(able)}" if able else "no other backend could"
    raise UnsupportedError(f"backend: {backend} cannot run this: {reasons[backend]}; {could}")


def preferred(problem: Problem, able: Iterable[Backend]) -> Backend | None:
    """Return the first of these rows that suits the problem, or else the last."""
    row = None
    for row in able:
        if row.suits(problem):
            break
    return row


def _runnable(
    rows: Iterable[Backend], problem: Problem, device: str, tensors: bool, reasons: dict[str, str]
) -> Iterator[Backend]:
    """Yield the rows that can run the problem here; add to `reasons` why the others cannot."""
    for row in rows:
        reason = row.why_not(problem, device, tensors)
        if reason is None:
            yield row
        else:
            reasons[row.name] = reason


_warned_of_numpy = False


def _warn_of_numpy(reasons: dict[str, str]) -> None:
    """Warn once per process: the result is right, but slow."""
    global _warned_of_numpy
    if not _warned_of_numpy:
        _warned_of_numpy = True
        warnings.warn(
            f"flashtile: this call runs on NumPy, many times slower than on the C++ core ({_format(reasons)}). To get "
            "the core, install a C++ compiler, then run: pip install --force-reinstall --no-deps --no-cache-dir "
            "--no-binary flashtile flashtile",
            RuntimeWarning,
            stacklevel=2,
        )


def _format(reasons: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
