"""Where a lesson's kernels run: on a GPU, or under Triton's interpreter; or the reason why they cannot."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from flashtile.host import machine
from flashtile.lab.lessons.lesson import Unavailable

TOO_NEW = (2, 4)  # the first NumPy that the interpreter of Triton 3.6 does not run on


def for_triton() -> str:
    """The device for tensors: "cuda", or "cpu", where Triton interprets. To be asked before anything imports triton.

    Whether kernels are compiled or interpreted is settled when triton is imported, for as long as the process lives.
    """
    if reason := machine.lacks("torch", "triton"):
        raise Unavailable(reason)
    asked = os.environ.get("TRITON_INTERPRET") == "1"
    if machine.gpu() and not asked:
        return "cuda"
    if tuple(int(part) for part in np.__version__.split(".")[:2]) >= TOO_NEW:
        newest = ".".join(map(str, TOO_NEW))
        raise Unavailable(f"there is no GPU, and Triton's interpreter wants numpy < {newest}, not {np.__version__}")
    if "triton" in sys.modules and not asked:
        raise Unavailable("there is no GPU, and triton was loaded here without its interpreter: take a new process")
    os.environ["TRITON_INTERPRET"] = "1"
    return "cpu"


def finished(call: Callable[[], Any], where: str) -> Callable[[], Any]:
    """A call that returns when the device is done, which is what there is to time."""
    if where == "cpu":
        return call
    import torch

    def waiting() -> None:
        call()
        torch.cuda.synchronize()

    return waiting
