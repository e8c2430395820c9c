"""Launcher: calls CUDA's driver with parameter memory that stays; a launch only replaces addresses in it.

Triton's own launcher converts every argument each time, a hundred for some kernels here, and takes longer for that than
the driver takes for the launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

DRIVER = "libcuda.so.1"
MAP = 128  # bytes of a tensor map, the driver's form of a descriptor
MAP_ALIGNED = 64
PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: see pdl.py
WARP = 32
_INTEGERS = {f"{sign}{width}" for sign in "iu" for width in (1, 8, 16, 32, 64)}


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint), ("_", ctypes.c_uint), ("value", ctypes.c_int), ("_rest", ctypes.c_byte * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class _ParameterMemory:
    """The kernel parameters of one call at a time. It keeps what the last call wrote: the next often has little to add.

    maps: where each tensor map lies, and the index of its address; launches: for each kernel its _Config and the
    arguments of the driver's launch function.
    """

    __slots__ = ("_addresses", "_maps", "_memory", "launches", "numbers", "stream", "written", "written_tuples")

    def __init__(
        self, addresses: Any, numbers: Any, maps: list[tuple[int, int]], launches: list[tuple[Any, ...]], memory: Any
    ) -> None:
        self._addresses, self._maps, self._memory = addresses, maps, memory
        self.numbers, self.launches = numbers, launches
        self.written: list[int] = [0] * len(addresses)
        self.stream: int | None = None
        self.written_tuples: dict[int, Any] = {}  # by index among the values of the call

    def set_addresses(self, found: list[int], replace: Callable[[int, int], int]) -> bool:
        """Write the addresses. False if the driver refuses one for a tensor map."""
        self._addresses[:] = found
        for a_map, n in self._maps:
            if self.written[n] != found[n] and replace(a_map, found[n]):
                return False
        self.written = found
        return True

    def set_stream(self, stream: int) -> None:
        for config, *_ in self.launches:
            config.stream = stream
        self.stream = stream


class _Kernel(NamedTuple):
    """parameters: for each one the memory that holds it, and its index there."""

    compiled: Any
    grid: tuple[int, int, int]
    parameters: list[tuple[str, int]]


class Launcher:
    """Compiled kernels, launched one after the other. Tensors and tuples may differ from call to call; all else stays.

    An address that several kernels take is written once. `numbers` has one entry for each scalar, each field of a tuple
    and each size and stride of a descriptor. Threads that launch at once have parameter memory of their own.
    """

    def __init__(self) -> None:
        self._kernels: list[_Kernel] = []
        self._addresses: list[tuple[int, int]] = []  # index among the values, and an offset in bytes
        self._numbers: list[int] = []
        self._maps: list[tuple[bytes, int]] = []  # and the index of its address
        self._tuples: dict[int, list[tuple[int, int]]] = {}  # by index among the values: a field, and its number

    def add(
        self,
        compiled: Any,
        grid: tuple[int, int, int],
        sources: list[tuple[int, int] | None],
        args: list[Any],
        kernel_args: list[Any],
    ) -> None:
        """Add a kernel. args: of its KernelLaunch; kernel_args: as the kernel takes them, without its constants.

        sources: for each argument the index of its value in a call and an offset in bytes; None if it stays.
        """
        found: list[tuple[str, int]] = []
        metas = iter(compiled.metadata.tensordesc_meta or ())
        kinds = compiled.src.signature.values()
        for kind, source, arg, x in zip(kinds, sources, args, kernel_args, strict=False):
            if isinstance(kind, tuple):
                fields = [(k, y) for k, (y, of) in enumerate(zip(x, kind, strict=True)) if of != "constexpr"]
                numbers = [(k, self._number(y)) for k, y in fields]
                found += [("numbers", number) for _, number in numbers]
                if source is not None and isinstance(arg, tuple):
                    self._tuples.setdefault(source[0], []).extend(numbers)
                elif source is not None:  # Rows that the KernelLaunch made of a tensor
                    found[-len(numbers)] = ("addresses", self._address(source))
            elif kind.startswith("tensordesc"):
                found += self._map(x, next(metas), source)
            elif kind != "constexpr":
                moves = source is not None and hasattr(x, "data_ptr")
                found.append(("addresses", self._address(source)) if moves else ("numbers", self._number(x)))
        for _ in ("global scratch", "profile scratch"):  # the last parameters of every kernel; these here use none
            found.append(("numbers", self._number(0)))
        self._kernels.append(_Kernel(compiled, grid, found))

    def _number(self, x: Any) -> int:
        self._numbers.append(_as_integer(x))
        return len(self._numbers) - 1

    def _address(self, source: Any) -> int:
        if source not in self._addresses:
            self._addresses.append(source)
        return self._addresses.index(source)

    def _map(self, descriptor: Any, meta: Any, source: Any) -> list[tuple[str, int]]:
        a_map, *sizes = _encode(descriptor, meta)
        inside = id(a_map) + type(a_map).__basicsize__ - MAP  # the end of the object, after CPython's header
        self._maps.append((ctypes.string_at(inside, MAP), self._address(source)))
        return [("maps", len(self._maps) - 1), *(("numbers", self._number(size)) for size in sizes)]

    def _allocate(self) -> _ParameterMemory:
        addresses = (ctypes.c_int64 * len(self._addresses))()
        numbers = (ctypes.c_int64 * len(self._numbers))(*self._numbers)
        memory = ctypes.create_string_buffer(MAP * len(self._maps) + MAP_ALIGNED)
        first = ctypes.addressof(memory)
        first += -first % MAP_ALIGNED
        maps = [first + MAP * n for n in range(len(self._maps))]
        for pointer, (a_map, _) in zip(maps, self._maps, strict=True):
            ctypes.memmove(pointer, a_map, MAP)
        begins = {"addresses": (ctypes.addressof(addresses), 8), "numbers": (ctypes.addressof(numbers), 8)}
        begins["maps"] = (first, MAP)
        launches: list[tuple[Any, ...]] = []
        for compiled, grid, parameters in self._kernels:
            pointers = [begins[memory_of][0] + begins[memory_of][1] * n for memory_of, n in parameters]
            warps, _, shared = compiled.packed_metadata
            attributes = (_Attribute * 1)(_Attribute(id=PROGRAMMATIC_SERIALIZATION, value=1))
            config = _Config(grid, (WARP * warps, 1, 1), shared, None, attributes, compiled.run.launch_pdl)
            launches.append((config, compiled.function, (ctypes.c_void_p * len(pointers))(*pointers), None))
        maps_of = [*zip(maps, (n for _, n in self._maps), strict=True)]
        return _ParameterMemory(addresses, numbers, maps_of, launches, memory)

    def build(self, device: int, stream_of: Callable[[int], int], fallback: Callable[..., None]) -> Callable[..., None]:
        """Return what launches all kernels for the values of a call, on the device's current stream.

        If the driver refuses, fallback(values, n) launches the kernels from the nth on: Triton's launcher provides what
        is missing, or reports it.
        """
        library = _library()
        launch, replace = library.cuLaunchKernelEx, library.cuTensorMapReplaceAddress
        sources, tuples = self._addresses, [*self._tuples.items()]
        free: list[_ParameterMemory] = []

        def run(values: tuple[Any, ...]) -> None:
            try:
                memory = free.pop()
            except IndexError:
                memory = self._allocate()
            found = [values[n].data_ptr() + offset for n, offset in sources]
            if found != memory.written and not memory.set_addresses(found, replace):
                return fallback(values)
            for n, fields in tuples:
                if values[n] is not memory.written_tuples.get(n):
                    memory.written_tuples[n] = _write(memory.numbers, fields, values[n])
            stream = stream_of(device)
            if stream != memory.stream:
                memory.set_stream(stream)
            for arguments in memory.launches:
                if launch(*arguments):
                    return fallback(values, memory.launches.index(arguments))
            free.append(memory)
            return None

        return run


def can_launch(compiled: Any, descriptors: int) -> bool:
    """Whether a Launcher can launch this kernel.

    It cannot provide scratch memory, clusters, cooperative grids, other vendors' drivers, or arguments of other types.
    """
    run = compiled.run
    return (
        type(run).__name__ == "CudaLauncher"
        and run.global_scratch_size == run.profile_scratch_size == 0
        and not run.launch_cooperative_grid
        and not getattr(run, "gsan_enabled", False)  # a sanitizer of Triton 3.8, with arguments of its own
        and compiled.packed_metadata[1] == 1  # programs of a cluster
        and len(compiled.metadata.tensordesc_meta or ()) == descriptors
        and all(map(_is_known, compiled.src.signature.values()))
        and _library() is not None
    )


def _is_known(kind: Any) -> bool:
    if isinstance(kind, tuple):
        return all(isinstance(x, str) and _is_known(x) and not x.startswith("tensordesc") for x in kind)
    return kind == "constexpr" or kind[0] == "*" or kind in _INTEGERS or kind.startswith("tensordesc")


def _as_integer(x: Any) -> int:
    return int(x.data_ptr()) if hasattr(x, "data_ptr") else int(x)


def _encode(descriptor: Any, meta: Any) -> list[Any]:
    """A descriptor as kernels take it: its map, sizes and strides."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    others = len(signature(make_tensordesc_arg).parameters) - 2  # from Triton 3.8 on, for other vendors' GPUs
    encoded: list[Any] = make_tensordesc_arg(descriptor, meta, *[None] * others)
    return encoded


def _write(numbers: Any, fields: Iterable[tuple[int, int]], given: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Write the numbers of a tuple. Return it so that it can be recognised, but not if it keeps a tensor alive."""
    recognised: tuple[Any, ...] | None = given
    for field, n in fields:
        x = given[field]
        if x.__class__ is not int:
            recognised = None
        numbers[n] = _as_integer(x)
    return recognised


@cache
def _library() -> Any:
    """CUDA's driver; None if there is none, or it lacks a function used here."""
    try:
        library: Any = ctypes.CDLL(DRIVER)
        # PyDLL keeps the GIL, which is faster. CDLL releases it, as a launch that may wait has to.
        library.cuTensorMapReplaceAddress = ctypes.PyDLL(DRIVER).cuTensorMapReplaceAddress
        library.cuLaunchKernelEx.argtypes = (ctypes.POINTER(_Config), *[ctypes.c_void_p] * 3)
        library.cuTensorMapReplaceAddress.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    except (OSError, AttributeError):
        return None
    return library
