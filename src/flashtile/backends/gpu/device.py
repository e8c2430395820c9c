"""The GPU of a call: its architecture, processors and precision, and how to make it the current one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@cache
def architecture(device: Any) -> tuple[int, int] | str | None:
    """The compute capability of an NVIDIA GPU, the architecture name of an AMD GPU; None without a GPU."""
    if device.type != "cuda":
        return None
    if torch.version.cuda is None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    return torch.cuda.get_device_capability(device)


@cache
def processors(device: Any) -> int:
    if device.type != "cuda":
        return 8  # few enough that the interpreter runs split keys too
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


_by_backend: Any = getattr(torch._C, "_get_fp32_precision_getter", None)  # from torch 2.9 on


def tf32() -> bool:
    """Whether torch is set to round its own float32 products to TF32.

    The older getter, get_float32_matmul_precision(), raises if fp32_precision was set; the newer one handles both.
    """
    if _by_backend is None:
        return torch.get_float32_matmul_precision() != "highest"
    return bool(_by_backend("cuda", "matmul") == "tf32")


def index_of(device: Any) -> int | None:
    """The index of a GPU, as on_device() takes it; None without a GPU."""
    return int(device.index) if device.type == "cuda" else None


current: Any = getattr(torch._C, "_cuda_getDevice", None)  # a torch without CUDA lacks it


def on_device(index: int | None, run: Callable[..., T], *args: Any) -> T:
    """Call run(*args) with this GPU current, because Triton launches on the current one."""
    if index is None or index == current():
        return run(*args)
    with torch.cuda.device(index):
        return run(*args)


def bind_context() -> None:
    """Bind the GPU's context to this thread, which encoding a descriptor requires.

    A new thread has no context before its first call into CUDA's runtime. This call changes nothing, and is allowed
    while a stream is captured.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.is_current_stream_capturing()
