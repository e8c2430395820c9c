"""Flash attention in CUDA C: the same loop by hand, compiled at run time.

kernels/cuda_attention.cu is the lesson; this file compiles it (cuda.py), checks it and times it. It spells out what
Triton decides by itself: which thread owns which row, what is in shared memory and what in registers, and where the
threads synchronize. It uses no matrix units: it shows where the numbers are, not how fast a GPU is.
"""

from ctypes import c_float, c_int, c_void_p
from functools import cache
from typing import Any

import numpy as np

import flashtile
from flashtile.host import machine
from flashtile.lab.bench.timing import alternate
from flashtile.lab.lessons import cuda, device, oracle
from flashtile.lab.lessons.lesson import HERE, Unavailable
from flashtile.lab.lessons.text import Say
from flashtile.lab.units import size

DIM, BLOCK_Q, BLOCK_K = 64, 128, 16
SOURCE = HERE / "kernels" / "cuda_attention.cu"


def defines(causal: bool) -> dict[str, int]:
    """The macros that the source leaves undefined."""
    return {"DIM": DIM, "BLOCK_Q": BLOCK_Q, "BLOCK_K": BLOCK_K, "CAUSAL": int(causal)}


@cache
def kernel(causal: bool) -> cuda.Kernel:
    return cuda.Kernel(SOURCE.read_text(), "attention", **defines(causal))


def attention(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    """Compute attention of float32 tensors [heads, n, DIM] on the GPU in one launch."""
    import torch

    heads, n, dim = q.shape
    out = torch.full_like(q, float("nan"))
    pointers = [c_void_p(x.data_ptr()) for x in (q, k, v, out)]
    stream = torch.cuda.current_stream().cuda_stream
    kernel(causal).launch((-(-n // BLOCK_Q), heads), BLOCK_Q, *pointers, c_int(n), c_float(dim**-0.5), stream=stream)
    return out


def run(say: Say, quick: bool = False) -> dict[str, Any]:
    cuda.driver()
    if not machine.gpu():
        reason = machine.lacks("torch") or "torch sees no GPU"
        raise Unavailable(f"this lesson keeps its arrays in torch tensors, and {reason}")
    import torch

    say.heading("The resources of a block of threads")
    held = kernel(False).resources()
    say.paragraph(
        f"{BLOCK_Q} threads, one query each. Tiles of {BLOCK_K} keys and values in shared memory,",
        f"{size(held['shared'])}.",
        f"A query, its output, m and l in registers: {held['registers']} per thread, {held['spilled']} bytes spilled.",
    )

    say.heading("The same result")
    rng = np.random.default_rng(42)
    checks = []
    for n in (256, 300):
        for causal in (False, True):
            arrays = [rng.standard_normal((2, n, DIM)).astype(np.float32) for _ in range(3)]
            out = attention(*(torch.from_numpy(x).cuda() for x in arrays), causal=causal)
            checks.append(oracle.check(out.cpu().numpy(), *arrays, causal=causal))
    say.table(oracle.ROW, [oracle.row(check) for check in checks])

    say.heading("Time")
    torch.manual_seed(42)
    heads, n = (4, 1024) if quick else (16, 4096)
    q, k, v = (torch.randn(heads, n, DIM, device="cuda") for _ in range(3))
    contenders = {
        "standard, torch": lambda: torch.softmax(q @ k.mT * DIM**-0.5, dim=-1) @ v,
        "this kernel": lambda: attention(q, k, v),
        "this kernel, causal": lambda: attention(q, k, v, causal=True),
        "flashtile.attention": lambda: flashtile.attention(q, k, v),
        "flashtile.attention, causal": lambda: flashtile.attention(q, k, v, causal=True),
    }
    calls = {name: device.finished(call, "cuda") for name, call in contenders.items()}
    times = say.timings(f"{heads} heads, N = {n}, float32", alternate(calls, seconds=0.2 if quick else 1))
    return {
        "device": "cuda",
        "resources": held,
        "checks": checks,
        "times": times,
        "holds": all(check["holds"] for check in checks),
    }
