"""Launcher: a compiled kernel whose parameters lie in memory as CUDA's driver reads them; a launch replaces addresses.

Triton's own launcher makes numbers of all its arguments each time, a hundred for some kernels here, and takes longer
over that than the driver over the launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

DRIVER = "libcuda.so.1"
MAP = 128  # bytes of a tensor map, what the driver knows a descriptor by
MAP_ALIGNED = 64
FOLLOWS = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: see chain.py
WARP = 32
_WHOLE_NUMBERS = {f"{sign}{width}" for sign in "iu" for width in (1, 8, 16, 32, 64)}


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


class _Room(NamedTuple):
    """The memory of one launch at a time. `at`: the addresses in the tensor maps; `seen`: the tuples in the words."""

    words: Any
    maps: list[int]
    at: list[int]
    seen: list[Any]
    config: Any
    parameters: Any
    memory: Any  # of the maps


class Launcher:
    """A kernel as it was started once: from then on tensors and tuples may be others, but all else stays.

    Words hold a number or an address each; a field of a tuple has one, and so has a descriptor for each of its sizes
    and strides. Threads that launch at once have a room each.
    """

    def __init__(self, compiled: Any, grid: tuple[int, int, int], args: tuple[Any, ...], whole: list[Any]) -> None:
        """args: those of a call; whole: the same as the kernel takes them, without its constants."""
        self._compiled, self._grid, self._count = compiled, grid, len(args)
        self._words: list[int] = []
        self._order: list[tuple[bool, int]] = []  # of each parameter: whether it is a map, and which one or which word
        self._maps: list[bytes] = []
        self._addresses: list[tuple[int, int]] = []  # argument and word
        self._mapped: list[int] = []  # arguments
        self._tuples: list[tuple[int, list[tuple[int, int]]]] = []  # argument, and field and word of each
        metas = iter(compiled.metadata.tensordesc_meta or ())
        for n, (kind, x) in enumerate(zip(compiled.src.signature.values(), whole, strict=False)):
            if isinstance(kind, tuple):
                fields = [(k, self._add(y)) for k, (y, of) in enumerate(zip(x, kind, strict=True)) if of != "constexpr"]
                if isinstance(args[n], tuple):
                    self._tuples.append((n, fields))
                else:  # Rows that a Start made of a tensor
                    self._addresses.append((n, fields[0][1]))
            elif kind.startswith("tensordesc"):
                self._add_map(x, next(metas))
                self._mapped.append(n)
            elif kind != "constexpr":
                word = self._add(x)
                if hasattr(x, "data_ptr"):
                    self._addresses.append((n, word))
        for _ in ("global scratch", "profile scratch"):  # the last parameters of every kernel; these here use none
            self._add(0)

    def _add(self, x: Any) -> int:
        self._words.append(_number(x))
        self._order.append((False, len(self._words) - 1))
        return len(self._words) - 1

    def _add_map(self, descriptor: Any, meta: Any) -> None:
        a_map, *sizes = _encode(descriptor, meta)
        inside = id(a_map) + type(a_map).__basicsize__ - MAP  # the end of the object, after CPython's own
        self._order.append((True, len(self._maps)))
        self._maps.append(ctypes.string_at(inside, MAP))
        for size in sizes:
            self._add(size)

    def _room(self) -> _Room:
        words = (ctypes.c_int64 * len(self._words))(*self._words)
        memory = ctypes.create_string_buffer(MAP * len(self._maps) + MAP_ALIGNED)
        first = ctypes.addressof(memory)
        first += -first % MAP_ALIGNED
        maps = [first + MAP * n for n in range(len(self._maps))]
        for place, a_map in zip(maps, self._maps, strict=True):
            ctypes.memmove(place, a_map, MAP)
        at = [ctypes.addressof(words) + 8 * n for n in range(len(words))]
        parameters = (ctypes.c_void_p * len(self._order))(*(maps[n] if is_map else at[n] for is_map, n in self._order))
        warps, _, shared = self._compiled.packed_metadata
        attributes = (_Attribute * 1)(_Attribute(id=FOLLOWS, value=1))
        config = _Config(self._grid, (WARP * warps, 1, 1), shared, None, attributes, self._compiled.run.launch_pdl)
        return _Room(words, maps, [0] * len(maps), [None] * self._count, config, parameters, memory)

    def on(self, device: int, stream_of: Callable[[int], int], otherwise: Callable[..., None]) -> Callable[..., None]:
        """What launches for the arguments of a Start, on the stream that is current on this device.

        Where the driver refuses, otherwise(*args) is called: Triton's launcher knows what may be missing, or says so.
        """
        library = _library()
        launch, replace, function = library.cuLaunchKernelEx, library.cuTensorMapReplaceAddress, self._compiled.function
        addresses, tuples, mapped = self._addresses, self._tuples, [*enumerate(self._mapped)]
        rooms: list[_Room] = []

        def start(*args: Any) -> None:
            try:
                room = rooms.pop()
            except IndexError:
                room = self._room()
            words, maps, at, seen, config, parameters, _ = room
            for n, word in addresses:
                words[word] = args[n].data_ptr()
            for m, n in mapped:
                address = args[n].data_ptr()
                if at[m] != address:
                    if replace(maps[m], address):
                        return otherwise(*args)
                    at[m] = address
            for n, fields in tuples:
                if args[n] is not seen[n]:
                    seen[n] = _write(words, fields, args[n])
            config.stream = stream_of(device)
            if launch(config, function, parameters, None):
                return otherwise(*args)
            rooms.append(room)
            return None

        return start


def can_launch(compiled: Any, descriptors: int) -> bool:
    """Whether a Launcher can, or it takes more than that: scratch memory, clusters, other drivers, other arguments."""
    run = compiled.run
    return (
        type(run).__name__ == "CudaLauncher"
        and run.global_scratch_size == run.profile_scratch_size == 0
        and not run.launch_cooperative_grid
        and not getattr(run, "gsan_enabled", False)  # a sanitizer that Triton 3.8 has, with arguments of its own
        and compiled.packed_metadata[1] == 1  # programs together
        and len(compiled.metadata.tensordesc_meta or ()) == descriptors
        and all(map(_known, compiled.src.signature.values()))
        and _library() is not None
    )


def _known(kind: Any) -> bool:
    if isinstance(kind, tuple):
        return all(isinstance(x, str) and _known(x) and not x.startswith("tensordesc") for x in kind)
    return kind == "constexpr" or kind[0] == "*" or kind in _WHOLE_NUMBERS or kind.startswith("tensordesc")


def _number(x: Any) -> int:
    return int(x.data_ptr()) if hasattr(x, "data_ptr") else int(x)


def _encode(descriptor: Any, meta: Any) -> list[Any]:
    """A descriptor as kernels take it: its map, sizes and strides."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    others = len(signature(make_tensordesc_arg).parameters) - 2  # from Triton 3.8 on, for the GPUs of others
    encoded: list[Any] = make_tensordesc_arg(descriptor, meta, *[None] * others)
    return encoded


def _write(words: Any, fields: Iterable[tuple[int, int]], given: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The words of a tuple. Given back to be known again, but not where it holds a tensor, and with it memory."""
    known: tuple[Any, ...] | None = given
    for field, word in fields:
        x = given[field]
        if x.__class__ is not int:
            known = None
        words[word] = _number(x)
    return known


@cache
def _library() -> Any:
    """CUDA's driver; None where there is none, or none that has what is needed."""
    try:
        library: Any = ctypes.CDLL(DRIVER)
        # By the other, threads may run meanwhile, as they have to where a launch waits; here that would take longer.
        library.cuTensorMapReplaceAddress = ctypes.PyDLL(DRIVER).cuTensorMapReplaceAddress
        library.cuLaunchKernelEx.argtypes = (ctypes.POINTER(_Config), *[ctypes.c_void_p] * 3)
        library.cuTensorMapReplaceAddress.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    except (OSError, AttributeError):
        return None
    return library
