"""Who waits for the GPU on the host is told."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waiting() -> Iterator[None]:
    """Operations of torch that wait for the device are errors."""
    torch.cuda.synchronize()
    _mind("error")
    try:
        yield
    finally:
        _mind("default")


def _mind(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it may miss some
        torch.cuda.set_sync_debug_mode(mode)
