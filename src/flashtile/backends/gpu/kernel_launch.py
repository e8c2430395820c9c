"""Kernel launches bound to named arguments, and sequences of them that go straight to the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any, NamedTuple

import triton
from triton.runtime import driver

from flashtile.backends.gpu.arguments import INTERPRETED, Rows
from flashtile.backends.gpu.device import bind_context
from flashtile.backends.gpu.launcher import Launcher, can_launch

Strides = tuple[int, int, int]
Maker = Callable[[Any], Any]
_HOOKS: Any = triton.knobs.runtime
FUSED = {"enable_fp_fusion": True}  # round a * b + c once; Triton does so by default only until 3.9


class Argument(NamedTuple):
    """A value of the call, by its position, or the part of its memory that begins `offset` bytes on.

    `view` makes the tensor of that part from the value.
    """

    position: int
    offset: int = 0
    view: Maker | None = None

    def of(self, value: Any) -> Any:
        return value if self.view is None else self.view(value)


class KernelLaunch:
    """A kernel with its grid, options and constants.

    Parameters in `strides` take Rows and those in `descriptors` take descriptors: a call gives the tensor alone. A
    descriptor maker of None passes None. `compiled` is the kernel that the last launch through Triton used.
    """

    __slots__ = ("compiled", "constants", "descriptors", "grid", "kernel", "nulls", "options", "parameters", "rows")

    def __init__(
        self,
        kernel: Any,
        programs: int,
        options: dict[str, Any] | None = None,
        strides: Mapping[str, Strides | None] | None = None,
        descriptors: Mapping[str, Maker | None] | None = None,
        **constants: Any,
    ) -> None:
        """Strides of None belong to a parameter that is absent from this launch."""
        names = signature(kernel.fn).parameters
        constant_names = [name for name, x in names.items() if "constexpr" in str(x.annotation)]
        self._check(kernel, "constants", constant_names, constants)
        self.parameters = [*names][: len(names) - len(constants)]
        index = {name: n for n, name in enumerate(self.parameters)}
        strides, descriptors = strides or {}, descriptors or {}
        if unknown := [name for name in (*strides, *descriptors) if name not in index]:
            raise TypeError(f"{_name(kernel)}: unknown parameters {', '.join(unknown)}")
        self.kernel = kernel
        self.grid = (programs, 1, 1)
        self.constants = {name: constants[name] for name in constant_names}
        self.options = FUSED | (options or {})
        self.rows = {index[name]: x for name, x in strides.items() if x is not None}
        self.descriptors = {index[name]: make for name, make in descriptors.items() if make is not None}
        self.nulls = [index[name] for name, make in descriptors.items() if make is None]
        self.compiled: Any = None

    def bind(self, **arguments: Any) -> BoundLaunch:
        """Bind every parameter but the constants, by name; an Argument stands for a value of the call."""
        self._check(self.kernel, "arguments", self.parameters, arguments)
        return BoundLaunch(self, tuple(arguments[name] for name in self.parameters))

    @staticmethod
    def _check(kernel: Any, kind: str, expected: list[str], given: Mapping[str, Any]) -> None:
        """Check that exactly the expected names are given."""
        found = {"missing": [x for x in expected if x not in given], "unknown": [x for x in given if x not in expected]}
        if faults := [f"{word} {kind} {', '.join(names)}" for word, names in found.items() if names]:
            raise TypeError(f"{_name(kernel)}: {'; '.join(faults)}")

    def __call__(self, *args: Any) -> None:
        """Launch through Triton's JIT, which compiles the kernel if it has to."""
        self.compiled = self.kernel[self.grid](*self.kernel_args(args), **self.constants, **self.options)

    def relaunch(self, args: Iterable[Any], stream: int) -> None:
        """Launch the compiled kernel by Triton's launcher, without the JIT's inspection of every argument."""
        run, before = self.compiled.run, (self.compiled.packed_metadata, None, None, None)
        run(*self.grid, stream, self.compiled.function, *before, *self.kernel_args(args), *self.constants.values())

    def kernel_args(self, args: Iterable[Any]) -> list[Any]:
        """The arguments as the kernel takes them, with Rows and descriptors made of tensors."""
        found = [*args]
        for n, strides in self.rows.items():
            found[n] = Rows(found[n], *strides)
        if self.descriptors:
            bind_context()
        for n, make in self.descriptors.items():
            found[n] = make(found[n])
        for n in self.nulls:
            found[n] = None
        return found


def _name(kernel: Any) -> str:
    return str(kernel.fn.__name__)


class BoundLaunch(NamedTuple):
    """A launch with its arguments, in the order of the kernel's parameters."""

    launch: KernelLaunch
    args: tuple[Any, ...]


class LaunchSequence:
    """Launches that run one after the other, on the values of a call.

    The values are tensors and tuples of the same types and alignments in every call; only pointers and numbers differ.
    Triton's JIT inspects every argument to find the compiled kernel, and encodes every descriptor again; for a small
    call that takes longer than the kernels do. So only the first call goes through the JIT. Later ones give the driver
    the addresses of their values.
    """

    __slots__ = ("_direct", "launches")

    def __init__(self, *launches: BoundLaunch) -> None:
        self.launches = launches
        self._direct: Callable[[tuple[Any, ...]], None] | None = None

    def __call__(self, *values: Any) -> None:
        if self._direct is None or _HOOKS.launch_enter_hook.calls or _HOOKS.launch_exit_hook.calls:
            # A profiler's launch hooks are called by Triton's JIT alone.
            for launch, args in self.launches:
                launch(*resolve(args, values))
            self._direct = self._find_direct(values)
        else:
            self._direct(values)

    def _find_direct(self, values: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], None] | None:
        """Return what launches all of them with as little of Triton as possible."""
        if INTERPRETED or not self.launches or any(launch.compiled is None for launch, _ in self.launches):
            return None
        stream_of, device = driver.active.get_current_stream, driver.active.get_current_device()

        def by_triton(values: tuple[Any, ...], first: int = 0) -> None:
            for launch, args in self.launches[first:]:
                launch.relaunch(resolve(args, values), stream_of(device))

        if not all(can_launch(launch.compiled, len(launch.descriptors)) for launch, _ in self.launches):
            return by_triton
        launcher = Launcher()
        for launch, args in self.launches:
            sources = [(x.position, x.offset) if isinstance(x, Argument) else None for x in args]
            given = resolve(args, values)
            launcher.add(launch.compiled, launch.grid, sources, given, launch.kernel_args(given))
        return launcher.build(device, stream_of, by_triton)


def resolve(args: tuple[Any, ...], values: tuple[Any, ...]) -> list[Any]:
    """The arguments of a bound launch in a call of these values."""
    return [x.of(values[x.position]) if isinstance(x, Argument) else x for x in args]
