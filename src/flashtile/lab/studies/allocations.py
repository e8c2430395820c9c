"""Track every array that NumPy allocates in a block of code, temporaries included, through NumPy's allocator.

NumPy lets a program replace the functions that allocate the data of arrays (PyDataMem_SetHandler, NEP 49). Those here
record each request and forward it to the previous ones; afterwards they are uninstalled. Memory outside arrays is not
tracked: Python objects, buffers inside a BLAS.
"""

import ctypes
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from flashtile.numerics.dtypes import Array

SET_HANDLER, GET_HANDLER = 304, 305  # indices in NumPy's table of C functions, the same since NumPy 1.22
CAPSULE = b"mem_handler"

_address, _bytes = ctypes.c_void_p, ctypes.c_size_t
# NumPy calls them, and they call NumPy's, with the GIL held, which PYFUNCTYPE keeps.
_KINDS = {
    "malloc": ctypes.PYFUNCTYPE(_address, _address, _bytes),
    "calloc": ctypes.PYFUNCTYPE(_address, _address, _bytes, _bytes),
    "realloc": ctypes.PYFUNCTYPE(_address, _address, _address, _bytes),
    "free": ctypes.PYFUNCTYPE(None, _address, _address, _bytes),
}


class _Handler(ctypes.Structure):
    """PyDataMem_Handler of numpy/ndarraytypes.h."""

    _fields_ = (
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("context", _address),
        *((kind, _address) for kind in _KINDS),
    )


@dataclass(slots=True)
class Allocations:
    """The bytes of every array allocated while tracking."""

    sizes: list[int] = field(default_factory=list)  # of all arrays, in order
    peak: int = 0  # the most that was alive at once
    live: int = 0
    places: dict[int, int] = field(default_factory=dict)  # address -> index in sizes

    def allocated(self, address: int, size: int) -> None:
        self.places[address] = len(self.sizes)
        self.sizes.append(size)
        self.live += size
        self.peak = max(self.peak, self.live)

    def freed(self, address: int) -> None:
        if address in self.places:  # else it was allocated before
            self.live -= self.sizes[self.places.pop(address)]

    def without(self, *results: Array) -> list[int]:
        """The sizes of all but these arrays, which must have been allocated while tracking and be alive."""
        kept = {self.places[x.ctypes.data] for x in results}
        return [size for n, size in enumerate(self.sizes) if n not in kept]


@contextmanager
def tracked() -> Iterator[Allocations]:
    """Track the arrays that this thread allocates."""
    tracker = _tracker()
    if tracker.seen is not None:
        raise RuntimeError("allocations are being tracked already")
    tracker.seen = seen = Allocations()
    tracker.install()
    try:
        yield seen
    finally:
        tracker.uninstall()
        tracker.seen = None


class _Tracker:
    """A handler in front of NumPy's. It lives as long as the process, because arrays keep pointing to it."""

    def __init__(self) -> None:
        table = _c_functions()
        self.swap = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(table[SET_HANDLER])
        current = ctypes.PYFUNCTYPE(ctypes.py_object)(table[GET_HANDLER])()
        self.numpy = _Handler.from_address(_pointer(current, CAPSULE))
        self.handler = _Handler.from_buffer_copy(self.numpy)
        self.handler.name = b"flashtile_tracker"
        self.capsule = _capsule(self.handler)
        self.before: Any = None
        self.seen: Allocations | None = None
        self.functions = self._functions()

    def install(self) -> None:
        for kind, function in self.functions.items():
            setattr(self.handler, kind, ctypes.cast(function, _address))
        self.before = self.swap(self.capsule)

    def uninstall(self) -> None:
        """Restore NumPy's handler. Its own function will free the arrays that are still alive, without any Python."""
        self.swap(self.before)
        for kind in self.functions:
            setattr(self.handler, kind, getattr(self.numpy, kind))

    def _functions(self) -> dict[str, Any]:
        malloc, calloc, realloc, free = (kind(getattr(self.numpy, name)) for name, kind in _KINDS.items())

        def noted(address: int | None, size: int) -> int | None:
            if address is not None and self.seen is not None:
                self.seen.allocated(address, size)
            return address

        def moved(context: int, old: int | None, size: int) -> int | None:
            new = realloc(context, old, size)
            if old is not None and new is not None and self.seen is not None:
                self.seen.freed(old)
            return noted(new, size)

        def freed(context: int, address: int, size: int) -> None:
            if self.seen is not None:
                self.seen.freed(address)
            free(context, address, size)

        bodies: dict[str, Callable[..., Any]] = {
            "malloc": lambda context, size: noted(malloc(context, size), size),
            "calloc": lambda context, n, each: noted(calloc(context, n, each), n * each),
            "realloc": moved,
            "free": freed,
        }
        return {name: _KINDS[name](body) for name, body in bodies.items()}


_tracker = cache(_Tracker)


def numpy_core() -> str:
    """The module with NumPy's C extension."""
    return "numpy._core" if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else "numpy.core"


def _c_functions() -> Any:
    """NumPy's table of C functions, as C extensions import it."""
    api = importlib.import_module(f"{numpy_core()}._multiarray_umath")._ARRAY_API
    return ctypes.cast(_pointer(api, None), ctypes.POINTER(_address))


def _pointer(capsule: Any, name: bytes | None) -> Any:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = _address, (ctypes.py_object, ctypes.c_char_p)
    return get(capsule, name)


def _capsule(handler: _Handler) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (_address, ctypes.c_char_p, _address)
    return new(ctypes.addressof(handler), CAPSULE, None)
