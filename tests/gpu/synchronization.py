"""Detects waits for the GPU on the host."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waiting() -> Iterator[None]:
    """Within it, torch operations that wait for the device raise."""
    torch.cuda.synchronize()
    _mind("error")
    try:
        yield
    finally:
        _mind("default")


def _mind(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that it may miss some
        torch.cuda.set_sync_debug_mode(mode)
