"""CUDA C at run time: NVRTC compiles it, the driver loads and launches it; both through ctypes.

NVRTC comes with the CUDA builds of torch, as the package nvidia-cuda-nvrtc, or with the CUDA toolkit. nvcc is not used.
"""

import ctypes
import importlib.util
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from ctypes.util import find_library
from functools import cache
from pathlib import Path
from typing import Any

from flashtile.lab.lessons.lesson import Unavailable

MAJOR, MINOR = 75, 76  # for cuDeviceGetAttribute
SHARED_BYTES, SPILLED_BYTES, REGISTERS = 1, 3, 4  # for cuFuncGetAttribute


def compile_cuda(source: str, architecture: str, **defines: int) -> bytes:
    """Compile for an architecture such as "sm_90". Raise the compiler's messages as an error."""
    nvrtc = _nvrtc()
    options = [f"--gpu-architecture={architecture}", *(f"-D{name}={value}" for name, value in defines.items())]
    program = c_void_p()
    _check_nvrtc(nvrtc.nvrtcCreateProgram(byref(program), source.encode(), b"lesson.cu", 0, None, None))
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), (c_char_p * len(options))(*map(str.encode, options)))
        if status:
            raise RuntimeError(f"NVRTC: {_output(program, 'ProgramLog').rstrip(bytes(1)).decode()}")
        return _output(program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


class Kernel:
    """A compiled function on the first GPU, in torch's context, so that its tensors may be arguments."""

    def __init__(self, source: str, name: str, **defines: int) -> None:
        device, context, module, self.function = c_int(), c_void_p(), c_void_p(), c_void_p()
        _check(driver().cuDeviceGet(byref(device), 0))
        _check(driver().cuDevicePrimaryCtxRetain(byref(context), device))
        _check(driver().cuCtxSetCurrent(context))
        code = compile_cuda(source, _architecture(device), **defines)
        _check(driver().cuModuleLoadData(byref(module), code))
        _check(driver().cuModuleGetFunction(byref(self.function), module, name.encode()))

    def resources(self) -> dict[str, int]:
        """Shared memory per block, registers per thread, and bytes spilled from them."""
        found = {}
        for name, number in (("shared", SHARED_BYTES), ("registers", REGISTERS), ("spilled", SPILLED_BYTES)):
            value = c_int()
            _check(driver().cuFuncGetAttribute(byref(value), number, self.function))
            found[name] = value.value
        return found

    def launch(self, grid: tuple[int, int], threads: int, *arguments: Any, stream: int = 0) -> None:
        """Launch with ctypes values, c_void_p(tensor.data_ptr()) for a tensor. The driver takes their addresses."""
        addresses = (c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        _check(driver().cuLaunchKernel(self.function, *grid, 1, threads, 1, 1, 0, stream, addresses, None))


@cache
def _nvrtc() -> Any:
    path = _find_nvrtc()
    if path is None:
        raise Unavailable("NVRTC was not found; it comes with the CUDA builds of torch, or as nvidia-cuda-nvrtc")
    if Path(path).is_absolute():
        for builtins in Path(path).parent.glob("libnvrtc-builtins.so*"):  # NVRTC loads it by name only
            ctypes.CDLL(str(builtins))
    library = ctypes.CDLL(path)
    program = c_void_p
    library.nvrtcCreateProgram.argtypes = [POINTER(program), c_char_p, c_char_p, c_int, c_void_p, c_void_p]
    library.nvrtcCompileProgram.argtypes = [program, c_int, POINTER(c_char_p)]
    library.nvrtcDestroyProgram.argtypes = [POINTER(program)]
    for what in ("ProgramLog", "CUBIN"):
        getattr(library, f"nvrtcGet{what}Size").argtypes = [program, POINTER(c_size_t)]
        getattr(library, f"nvrtcGet{what}").argtypes = [program, c_char_p]
    library.nvrtcGetErrorString.restype = c_char_p
    return library


def _find_nvrtc() -> str | None:
    """Find the newest NVRTC in NVIDIA's packages, in torch's, or on the system's path."""
    found: list[Path] = []
    for package, where in (("nvidia", "*/lib"), ("torch", "lib")):
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            found += Path(folder).glob(f"{where}/libnvrtc.so*")
    return str(max(found, key=lambda path: path.name)) if found else find_library("nvrtc")


@cache
def driver() -> Any:
    """Load libcuda, which comes with the GPU's driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise Unavailable("this lesson needs an NVIDIA GPU, and there is no NVIDIA driver here") from None
    library.cuGetErrorString.argtypes = [c_int, POINTER(c_char_p)]
    library.cuDeviceGet.argtypes = [POINTER(c_int), c_int]
    library.cuDeviceGetAttribute.argtypes = [POINTER(c_int), c_int, c_int]
    library.cuDevicePrimaryCtxRetain.argtypes = [POINTER(c_void_p), c_int]
    library.cuCtxSetCurrent.argtypes = [c_void_p]
    library.cuModuleLoadData.argtypes = [POINTER(c_void_p), c_char_p]
    library.cuModuleGetFunction.argtypes = [POINTER(c_void_p), c_void_p, c_char_p]
    library.cuFuncGetAttribute.argtypes = [POINTER(c_int), c_int, c_void_p]
    library.cuLaunchKernel.argtypes = [c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), POINTER(c_void_p)]
    if library.cuInit(0):
        raise Unavailable("this lesson needs an NVIDIA GPU, and the driver finds none")
    return library


def _architecture(device: c_int) -> str:
    major, minor = c_int(), c_int()
    _check(driver().cuDeviceGetAttribute(byref(major), MAJOR, device))
    _check(driver().cuDeviceGetAttribute(byref(minor), MINOR, device))
    return f"sm_{major.value}{minor.value}"


def _output(program: c_void_p, what: str) -> bytes:
    size = c_size_t()
    _check_nvrtc(getattr(_nvrtc(), f"nvrtcGet{what}Size")(program, byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check_nvrtc(getattr(_nvrtc(), f"nvrtcGet{what}")(program, text))
    return text.raw


def _check_nvrtc(status: int) -> None:
    if status:
        raise RuntimeError(f"NVRTC: {_nvrtc().nvrtcGetErrorString(status).decode()}")


def _check(status: int) -> None:
    if status:
        text = c_char_p()
        driver().cuGetErrorString(status, byref(text))
        raise RuntimeError(f"CUDA driver: {(text.value or b'').decode()} ({status})")
