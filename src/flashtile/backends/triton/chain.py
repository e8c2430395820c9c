"""Chains: a kernel that begins in the tail of the one before it. NVIDIA's GPUs can do so from Hopper on.

A kernel that leads lets the next one begin once all its own programs have begun. One that follows must be launched with
FOLLOWING, and wait until the one before it is complete: before it reads what that one wrote, or writes what that one
reads, and in any case before its own end. So whatever comes after a chain finds all of it complete. The first kernel is
launched as any other, when all before it is complete. One that follows and leads says so in this order, where the next
one needs what the kernels before it wrote.
"""

from __future__ import annotations

import triton
import triton.language as tl

FOLLOWING = {"launch_pdl": True}  # programmatic dependent launch, an option of Triton for NVIDIA's GPUs
FIRST_MAJOR = 9  # compute capability


def can_chain(gpu: tuple[int, int] | str | None) -> bool:
    """gpu: as tuning.choose() knows it."""
    return isinstance(gpu, tuple) and gpu[0] >= FIRST_MAJOR


@triton.jit
def follow(CHAINED: tl.constexpr):
    """Wait until the kernel before is complete and what it wrote can be seen. Not CHAINED: nothing."""
    if CHAINED:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def lead(CHAINED: tl.constexpr):
    """Let the next kernel begin, once every program of this one has said so. Not CHAINED: nothing."""
    if CHAINED:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
