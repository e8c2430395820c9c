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
FOLLOWS = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: see pdl.py
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


class _Room:
    """The memory of one call at a time, and what was written there by the last one: often the next has little to write.

    maps: where tensor maps lie, and which of the addresses is in each; launches: of each kernel its _Config, and what
    the driver is given.
    """

    __slots__ = ("_addresses", "_maps", "_memory", "at", "launches", "seen", "stream", "words")

    def __init__(
        self, addresses: Any, words: Any, maps: list[tuple[int, int]], launches: list[tuple[Any, ...]], memory: Any
    ) -> None:
        self._addresses, self._maps, self._memory = addresses, maps, memory
        self.words, self.launches = words, launches
        self.at: list[int] = [0] * len(addresses)
        self.stream: int | None = None
        self.seen: dict[int, Any] = {}  # by place among the values, the tuples in the words

    def move(self, found: list[int], replace: Callable[[int, int], int]) -> bool:
        """Writes the addresses; whether the driver took those that are in its maps."""
        self._addresses[:] = found
        for a_map, n in self._maps:
            if self.at[n] != found[n] and replace(a_map, found[n]):
                return False
        self.at = found
        return True

    def turn_to(self, stream: int) -> None:
        for config, *_ in self.launches:
            config.stream = stream
        self.stream = stream


class _Kernel(NamedTuple):
    """parameters: in which memory each one lies, and at which place there."""

    compiled: Any
    grid: tuple[int, int, int]
    parameters: list[tuple[str, int]]


class Launcher:
    """Kernels as they were started once, one after the other: from then on tensors and tuples may be others, but all
    else stays.

    An address that several of them take is written once. Words hold a number each; a field of a tuple has one, and so
    has a descriptor for each of its sizes and strides. Threads that launch at once have a room each.
    """

    def __init__(self) -> None:
        self._kernels: list[_Kernel] = []
        self._addresses: list[tuple[int, int]] = []  # place among the values, and bytes from where that one begins
        self._words: list[int] = []
        self._maps: list[tuple[bytes, int]] = []  # and of which address
        self._tuples: dict[int, list[tuple[int, int]]] = {}  # place among the values: a field, and its word

    def add(
        self,
        compiled: Any,
        grid: tuple[int, int, int],
        places: list[tuple[int, int] | None],
        args: list[Any],
        whole: list[Any],
    ) -> None:
        """args: of a KernelLaunch; whole: the same as the kernel takes them, without its constants.

        places: which values of a call args are, and how many bytes on from where those begin; None of what stays.
        """
        found: list[tuple[str, int]] = []
        metas = iter(compiled.metadata.tensordesc_meta or ())
        kinds = compiled.src.signature.values()
        for kind, place, arg, x in zip(kinds, places, args, whole, strict=False):
            if isinstance(kind, tuple):
                fields = [(k, y) for k, (y, of) in enumerate(zip(x, kind, strict=True)) if of != "constexpr"]
                words = [(k, self._word(y)) for k, y in fields]
                found += [("words", word) for _, word in words]
                if place is not None and isinstance(arg, tuple):
                    self._tuples.setdefault(place[0], []).extend(words)
                elif place is not None:  # Rows that a KernelLaunch made of a tensor
                    found[-len(words)] = ("addresses", self._address(place))
            elif kind.startswith("tensordesc"):
                found += self._map(x, next(metas), place)
            elif kind != "constexpr":
                moves = place is not None and hasattr(x, "data_ptr")
                found.append(("addresses", self._address(place)) if moves else ("words", self._word(x)))
        for _ in ("global scratch", "profile scratch"):  # the last parameters of every kernel; these here use none
            found.append(("words", self._word(0)))
        self._kernels.append(_Kernel(compiled, grid, found))

    def _word(self, x: Any) -> int:
        self._words.append(_number(x))
        return len(self._words) - 1

    def _address(self, place: Any) -> int:
        if place not in self._addresses:
            self._addresses.append(place)
        return self._addresses.index(place)

    def _map(self, descriptor: Any, meta: Any, place: Any) -> list[tuple[str, int]]:
        a_map, *sizes = _encode(descriptor, meta)
        inside = id(a_map) + type(a_map).__basicsize__ - MAP  # the end of the object, after CPython's own
        self._maps.append((ctypes.string_at(inside, MAP), self._address(place)))
        return [("maps", len(self._maps) - 1), *(("words", self._word(size)) for size in sizes)]

    def _room(self) -> _Room:
        addresses = (ctypes.c_int64 * len(self._addresses))()
        words = (ctypes.c_int64 * len(self._words))(*self._words)
        memory = ctypes.create_string_buffer(MAP * len(self._maps) + MAP_ALIGNED)
        first = ctypes.addressof(memory)
        first += -first % MAP_ALIGNED
        maps = [first + MAP * n for n in range(len(self._maps))]
        for place, (a_map, _) in zip(maps, self._maps, strict=True):
            ctypes.memmove(place, a_map, MAP)
        begins = {"addresses": (ctypes.addressof(addresses), 8), "words": (ctypes.addressof(words), 8)}
        begins["maps"] = (first, MAP)
        launches: list[tuple[Any, ...]] = []
        for compiled, grid, lies in self._kernels:
            at = [begins[where][0] + begins[where][1] * n for where, n in lies]
            warps, _, shared = compiled.packed_metadata
            attributes = (_Attribute * 1)(_Attribute(id=FOLLOWS, value=1))
            config = _Config(grid, (WARP * warps, 1, 1), shared, None, attributes, compiled.run.launch_pdl)
            launches.append((config, compiled.function, (ctypes.c_void_p * len(at))(*at), None))
        return _Room(addresses, words, [*zip(maps, (n for _, n in self._maps), strict=True)], launches, memory)

    def on(self, device: int, stream_of: Callable[[int], int], otherwise: Callable[..., None]) -> Callable[..., None]:
        """What launches all of them for the values of a call, on the stream that is current on this device.

        Where the driver refuses, otherwise(values, n) is called, to start the kernels from the nth on: Triton's
        launcher knows what may be missing, or says so.
        """
        library = _library()
        launch, replace = library.cuLaunchKernelEx, library.cuTensorMapReplaceAddress
        places, tuples = self._addresses, [*self._tuples.items()]
        rooms: list[_Room] = []

        def start(values: tuple[Any, ...]) -> None:
            try:
                room = rooms.pop()
            except IndexError:
                room = self._room()
            found = [values[n].data_ptr() + offset for n, offset in places]
            if found != room.at and not room.move(found, replace):
                return otherwise(values)
            for n, fields in tuples:
                if values[n] is not room.seen.get(n):
                    room.seen[n] = _write(room.words, fields, values[n])
            stream = stream_of(device)
            if stream != room.stream:
                room.turn_to(stream)
            for told in room.launches:
                if launch(*told):
                    return otherwise(values, room.launches.index(told))
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
