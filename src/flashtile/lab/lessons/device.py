"""Where a lesson's kernels run: on a GPU or under Triton's interpreter, or why they cannot."""

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from flashtile.host import machine
from flashtile.lab.lessons.lesson import Unavailable

TOO_NEW = (2, 4)  # the first NumPy that the interpreter of Triton 3.6 does not support


def for_triton() -> str:
    """Return the device for tensors: "cuda", or "cpu" with Triton's interpreter. Call it before importing triton.

    The import of triton decides, for the life of the process, whether kernels are compiled or interpreted.
    """
    if reason := machine.lacks("torch", "triton"):
        raise Unavailable(reason)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if machine.gpu() and not interpreted:
        return "cuda"
    if tuple(int(part) for part in np.__version__.split(".")[:2]) >= TOO_NEW:
        newest = ".".join(map(str, TOO_NEW))
        raise Unavailable(f"there is no GPU, and Triton's interpreter needs numpy < {newest}, not {np.__version__}")
    if "triton" in sys.modules and not interpreted:
        raise Unavailable("there is no GPU, and triton was imported without its interpreter: use a new process")
    os.environ["TRITON_INTERPRET"] = "1"
    return "cpu"


def finished(call: Callable[[], Any], where: str) -> Callable[[], Any]:
    """Make a call wait until the device is done, so that it can be timed."""
    if where == "cpu":
        return call
    import torch

    def waiting() -> None:
        call()
        torch.cuda.synchronize()

    return waiting
