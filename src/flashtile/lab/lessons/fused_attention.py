"""Flash attention in Triton: the loop of tiled_attention.py as one GPU kernel, written in Python.

kernels/fused_attention.py is the lesson; this file runs it. Product, mask, softmax and product are one launch: a tile
of scores is computed, used and discarded on the chip. The package's own kernels, backends/triton/, add all options, use
a mask only for the tiles that need it, and choose tiles for the GPU.
"""

from functools import partial
from typing import Any

import numpy as np

import flashtile
from flashtile.lab.bench.timing import alternate
from flashtile.lab.lessons import device, oracle
from flashtile.lab.lessons.text import Say

DIM = 64


def fused(q: Any, k: Any, v: Any, *, causal: bool = False, blocks: tuple[int, int] = (64, 64)) -> Any:
    """Compute attention of tensors [heads, n, DIM] in one launch."""
    import torch

    from flashtile.lab.lessons.kernels.fused_attention import attention_kernel

    (heads, n, dim), (block_q, block_k) = q.shape, blocks
    out = torch.full_like(q, float("nan"))
    attention_kernel[(-(-n // block_q), heads)](
        q, k, v, out, n, dim**-0.5, CAUSAL=causal, DIM=dim, BLOCK_Q=block_q, BLOCK_K=block_k
    )
    return out


def run(say: Say, quick: bool = False) -> dict[str, Any]:
    where = device.for_triton()
    import torch

    say.heading("The same result")
    # The interpreter is slow, and multiplies bfloat16 wrongly: it gets small tiles, and float32 only.
    dtypes, blocks = (("float32",), (16, 32)) if where == "cpu" else (("float32", "float16", "bfloat16"), (64, 32))
    rng = np.random.default_rng(42)
    checks = []
    for dtype in dtypes:
        for n in (256, 300) if where == "cuda" else (50,) if quick else (64, 100):
            for causal in (False, True):
                q, k, v = (
                    torch.from_numpy(rng.standard_normal((2, n, DIM)).astype(np.float32)).to(getattr(torch, dtype))
                    for _ in range(3)
                )
                out = fused(*(x.to(where) for x in (q, k, v)), causal=causal, blocks=blocks)
                arrays = (x.cpu().float().numpy() for x in (out, q, k, v))
                checks.append(oracle.check(*arrays, causal=causal, dtype=dtype))
    say.table(oracle.ROW, [oracle.row(check) for check in checks])
    say.paragraph(
        "Errors against the float64 oracle. Allowed: twice the error of standard attention in the same dtype, plus a",
        "rounding.",
        "This ran on the GPU."
        if where == "cuda"
        else "No GPU is used here: Triton interpreted the kernel in NumPy, which is correct but slow.",
    )
    times = on_gpu(say, quick) if where == "cuda" else interpreted(say, quick)
    return {
        "device": where,
        "checks": checks,
        "times": times,
        "holds": all(check["holds"] for check in checks),
    }


def interpreted(say: Say, quick: bool) -> dict[str, Any]:
    """Time the interpreter; this says nothing about the kernel."""
    import torch

    torch.manual_seed(42)
    q, k, v = (torch.randn(1, 64, DIM) for _ in range(3))
    arrays = [x.numpy() for x in (q, k, v)]
    contenders = {
        "this kernel, interpreted": lambda: fused(q, k, v, blocks=(32, 32)),
        "flashtile.attention, CPU": lambda: flashtile.attention(*arrays),
    }
    return say.timings(f"1 head, N = 64, D = {DIM}", alternate(contenders, seconds=0.1 if quick else 0.5))


def on_gpu(say: Say, quick: bool) -> dict[str, Any]:
    """Compare with standard attention in torch, torch's own fused attention, and flashtile's kernels."""
    import torch

    torch.manual_seed(42)
    heads, n = (4, 1024) if quick else (16, 4096)
    q, k, v = (torch.randn(heads, n, DIM, device="cuda", dtype=torch.float16) for _ in range(3))
    batch = [x[None] for x in (q, k, v)]
    sdpa: Any = torch.nn.functional.scaled_dot_product_attention
    later = torch.ones(n, n, device="cuda", dtype=torch.bool).triu(1)

    def standard(causal: bool) -> Any:
        S = q @ k.mT * DIM**-0.5
        return torch.softmax(S.masked_fill(later, float("-inf")) if causal else S, dim=-1) @ v

    found = {}
    for causal in (False, True):
        contenders = {
            "standard, torch": partial(standard, causal),
            "this kernel": partial(fused, q, k, v, causal=causal),
            "flashtile.attention": partial(flashtile.attention, *batch, causal=causal),
            "torch SDPA": partial(sdpa, *batch, is_causal=causal),
        }
        calls = {name: device.finished(call, "cuda") for name, call in contenders.items()}
        title = f"{heads} heads, N = {n}, float16, {'causal' if causal else 'full'}"
        found["causal" if causal else "full"] = say.timings(title, alternate(calls, seconds=0.2 if quick else 1))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fused(q, k, v)
    held = torch.cuda.max_memory_allocated() - before
    say.paragraph(
        f"One call of the kernel allocated {held:,} bytes. Its output has {q.nbytes:,}; the scores would take "
        f"{2 * heads * n * n:,}.",
    )
    return found
