"""Chains: a kernel that begins in the tail of the one before it. NVIDIA's GPUs can do so from Hopper on.

A kernel that leads lets the next one begin once all its own programs have begun. One that follows must be launched with
pdl_options(), and wait until the one before it is complete: before it reads what that one wrote, or writes what that one
reads, and in any case before its own end. So whatever comes after a chain finds all of it complete. The first kernel is
launched as any other, when all before it is complete. One that follows and leads says so in this order, where the next
one needs what the kernels before it wrote.

A program may also go by a counter, of something that the kernel before makes, and begin with that before it is
complete: every program of that kernel has begun, and needs nobody's help to go on.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from flashtile.backends.gpu import device as gpu
from flashtile.backends.gpu.arguments import INTERPRETED

FIRST_MAJOR = 9  # compute capability


def supports_pdl(device: Any) -> bool:
    """Whether the kernels of a pass are launched as a chain."""
    found = gpu.architecture(device)
    return not INTERPRETED and isinstance(found, tuple) and found[0] >= FIRST_MAJOR


def pdl_options(use_pdl: bool) -> dict[str, bool]:
    """What a kernel that follows is launched with besides: an option of Triton, for programmatic dependent launch."""
    return {"launch_pdl": True} if use_pdl else {}


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the kernel before is complete and what it wrote can be seen. Not PDL: nothing."""
    if PDL:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Let the next kernel begin, once every program of this one has said so. Not PDL: nothing."""
    if PDL:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def await_count(counter, count, rest):
    """Wait until a counter in memory has come to `count`. rest: nanoseconds between two looks at it."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; L: ld.acquire.gpu.global.u32 $0, [$1]; setp.lt.u32 p, $0, $2;"
        " @p nanosleep.u32 $3; @p bra L; }",
        "=r,l,r,r",
        [counter, count, rest],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
