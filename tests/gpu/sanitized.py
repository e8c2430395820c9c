"""A handful of small calls, to be run under compute-sanitizer: every kernel, and the places where tiles end.

python -m tests.gpu.sanitized triton | gluon | overrun (the last is wrong on purpose, to see that it is noticed)
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl

from tests.gpu.runner import BACKENDS, Given, by
from tests.gpu.sizes import DECODE, LONG, PACKED, RAGGED
from tests.grid import Case, Size, build

CASES = (
    *(Case(size, "bfloat16", ("causal",)) for size in (LONG, RAGGED, DECODE, PACKED)),
    *(Case(size, "bfloat16", ("everything",)) for size in (RAGGED, DECODE, PACKED)),
    Case(RAGGED, "bfloat16", ("window", "bias of keys", "sink")),
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
    run = 0
    with by(backend):
        for case in CASES:
            given = Given(build(case), "cuda")
            if given.refusal("cuda") is None:
                given.step()
                torch.cuda.synchronize()
                run += 1
        # NaN in a value: the guarded walk runs too.
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


if __name__ == "__main__":
    calls(sys.argv[1]) if sys.argv[1] in BACKENDS else overrun()
