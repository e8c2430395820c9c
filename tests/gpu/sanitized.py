"""A few small calls for compute-sanitizer: every kernel, and the edges of tiles.

python -m tests.gpu.sanitized triton | gluon | overrun | handshake

overrun is wrong on purpose, to check that it is noticed; handshake is right, to check whether a tool understands named
barriers: some warps only arrive there, and others come from another place in the code.
"""

from __future__ import annotations

import sys
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gluon.ptx import arrive, sync
from flashtile.backends.gpu import device as gpu
from tests.gpu.runner import BACKENDS, Given, by
from tests.gpu.sizes import DECODE, LONG, PACKED, RAGGED
from tests.support.grid import Case, Size, build

CASES = (
    *(Case(size, "bfloat16", ("causal",)) for size in (LONG, RAGGED, DECODE, PACKED)),
    *(Case(size, "bfloat16", ("everything",)) for size in (RAGGED, DECODE, PACKED)),
    Case(RAGGED, "bfloat16", ("window", "bias of keys", "sink")),
    *(Case(size, "bfloat16", ("spans", "causal")) for size in (LONG, DECODE, PACKED)),
    Case(RAGGED, "float32", ("causal",)),
    Case(Size(1, 2, 1, 1, 1, 64, 64), "bfloat16"),
    *(Case(RAGGED, "bfloat16", options) for options in (("band",), ("alibi", "softcap", "sink", "kv_lengths"))),
    *(Case(Size(1, 2, 1, 129, 127, n, n), "bfloat16", ("causal",)) for n in (128, 256)),
    Case(RAGGED, "float16", ("causal",)),
    Case(Size(1, 2, 1, 65, 63, 80, 33), "bfloat16", ("causal",)),
    Case(Size(1, 2, 1, 65, 63, 1, 1), "float32"),
    Case(Size(1, 1, 1, 17, 33, 512, 512), "bfloat16", ("causal",)),
)


def calls(backend: str) -> None:
    """On two processors, so that a program takes one task after the other."""
    run = 0
    with by(backend), mock.patch.object(gpu, "processors", lambda _device: 2):
        for case in CASES:
            given = Given(build(case), "cuda")
            if given.refusal("cuda") is None:
                given.step()
                torch.cuda.synchronize()
                run += 1
        # NaN in a value: the careful walk runs too.
        spoiled = Given(build(CASES[0]), "cuda")
        spoiled.arguments["v"][:, :, 100] = torch.nan
        spoiled.step()
        torch.cuda.synchronize()
    print(run, "calls")


@triton.jit
def overrun_kernel(p, n):
    tl.store(p + n, 1.0)


def overrun() -> None:
    x = torch.zeros(1024, device="cuda")
    overrun_kernel[(1,)](x, x.numel())
    torch.cuda.synchronize()


TURNS = gl.constexpr(8)


@gluon.jit
def say(box):
    """One warp: send a number per turn, after the previous one has been read."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    for turn in range(TURNS):
        if turn > 0:
            sync(8, 160)
        box.store(gl.full([128], turn, gl.int32, layout))
        arrive(9, 160)
    sync(10, 160)


@gluon.jit
def hear(box, out):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for turn in range(TURNS):
        sync(9, 160)
        gl.store(out + turn * 128 + gl.arange(0, 128, layout), box.load(layout))
        if turn < TURNS - 1:
            arrive(8, 160)
    sync(10, 160)


@gluon.jit
def handshake_kernel(out):
    box = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize([(hear, (box, out)), (say, (box,))], [1], [24])


def handshake() -> None:
    """Pass numbers from one warp to four others through named barriers."""
    out = torch.zeros(TURNS.value, 128, device="cuda", dtype=torch.int32)
    handshake_kernel[(1,)](out, num_warps=4)
    torch.cuda.synchronize()
    assert torch.equal(out, torch.arange(TURNS.value, device="cuda", dtype=torch.int32)[:, None].expand(-1, 128))


if __name__ == "__main__":
    what = sys.argv[1]
    calls(what) if what in BACKENDS else {"overrun": overrun, "handshake": handshake}[what]()
