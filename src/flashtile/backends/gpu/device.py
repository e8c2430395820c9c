"""The GPU of a call: its architecture, its processors, its precision, and how it becomes the current one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@cache
def architecture(device: Any) -> tuple[int, int] | str | None:
    """What tuning.choose() knows a GPU by."""
    if device.type != "cuda":
        return None
    if torch.version.cuda is None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    return torch.cuda.get_device_capability(device)


@cache
def processors(device: Any) -> int:
    if device.type != "cuda":
        return 8  # so that the interpreter meets splits too
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


_by_backend: Any = getattr(torch._C, "_get_fp32_precision_getter", None)  # from torch 2.9 on


def tf32() -> bool:
    """Whether torch was told that its own products of float32 may be rounded to TF32.

    The older question, get_float32_matmul_precision(), is an error where the answer was given by fp32_precision; the
    newer one knows both answers.
    """
    if _by_backend is None:
        return torch.get_float32_matmul_precision() != "highest"
    return bool(_by_backend("cuda", "matmul") == "tf32")


def index_of(device: Any) -> int | None:
    """Of a GPU, as on_device() takes it."""
    return int(device.index) if device.type == "cuda" else None


def on_device(index: int | None, run: Callable[..., T], *args: Any) -> T:
    """run(*args) with this GPU current, on which Triton then launches."""
    if index is None or index == torch._C._cuda_getDevice():
        return run(*args)
    with torch.cuda.device(index):
        return run(*args)


def bind_context() -> None:
    """Gives this thread the GPU's context, without which no descriptor can be encoded. A new thread has none before its
    first call into CUDA's runtime; this is one that changes nothing, and is allowed while a stream is captured.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.is_current_stream_capturing()
