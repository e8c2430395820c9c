"""Programmatic dependent launch (PDL), from Hopper on: a kernel begins in the tail of the previous one.

launch_dependents() lets the next kernel begin once all programs of this one have called it. The next kernel must be
launched with pdl_options(). It must call wait_for_previous() before it reads what the previous kernel wrote, before it
writes what that kernel reads, and in any case before its own end. So work after the last kernel finds all of them
complete. The first kernel is launched without PDL, after everything before it is complete. A kernel that does both
waits first, if the next one needs what the kernels before it wrote.

A program may also wait for a counter of finished parts, and use those before the previous kernel is complete: every
program of that kernel has begun, and needs no other kernel to finish.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from flashtile.backends.gpu import device as gpu
from flashtile.backends.gpu.arguments import INTERPRETED

FIRST_MAJOR = 9  # compute capability


def supports_pdl(device: Any) -> bool:
    """Whether the kernels of a pass are launched with PDL."""
    found = gpu.architecture(device)
    return not INTERPRETED and isinstance(found, tuple) and found[0] >= FIRST_MAJOR


def pdl_options(use_pdl: bool) -> dict[str, bool]:
    """Triton's launch option for a kernel that begins in the tail of the previous one."""
    return {"launch_pdl": True} if use_pdl else {}


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the previous kernel is complete and its writes are visible. Without PDL, do nothing."""
    if PDL:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Let the next kernel begin once every program of this one has called it. Without PDL, do nothing."""
    if PDL:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def await_count(counter, count, rest):
    """Wait until a counter in memory reaches `count`. rest: nanoseconds between two polls."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; L: ld.acquire.gpu.global.u32 $0, [$1]; setp.lt.u32 p, $0, $2;"
        " @p nanosleep.u32 $3; @p bra L; }",
        "=r,l,r,r",
        [counter, count, rest],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
