"""The Triton lesson against the oracle, and the lessons' Triton kernels compiled without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import flashtile
from flashtile.lab.lessons import device
from flashtile.lab.lessons import fused_attention as lesson
from flashtile.lab.lessons.lesson import Unavailable
from flashtile.lab.lessons.text import Say

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Triton's interpreter


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 16, 37])
def test_the_kernel(n: int, causal: bool) -> None:
    try:
        where = device.for_triton()
    except Unavailable as reason:
        pytest.skip(str(reason))
    import torch

    rng = np.random.default_rng(n)
    q, k, v = (rng.standard_normal((2, n, 16)).astype(np.float32) for _ in range(3))
    out = lesson.fused(*(torch.from_numpy(x).to(where) for x in (q, k, v)), causal=causal, blocks=(16, 32))
    np.testing.assert_allclose(out.cpu(), flashtile.standard_attention(q, k, v, causal=causal), atol=2e-6)


def test_without_triton_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(Unavailable, match="triton is not installed"):
        lesson.run(Say(lambda line: None))


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from flashtile.lab.lessons.kernels.fused_attention import attention_kernel
from flashtile.lab.lessons.kernels.tiled_matmul import matmul_kernel
from flashtile.lab.lessons.kernels.vector_add import add_kernel

def build(kernel, pointers, dtype, numbers, **constants):
    signature = {**{p: f"*{dtype}" for p in pointers}, **numbers, **{name: "constexpr" for name in constants}}
    built = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
    print(kernel.__name__, dtype, built.asm["cubin"][:4] == b"\\x7fELF", "wgmma" in built.asm["ptx"])

build(add_kernel, ("p_a", "p_b", "p_c"), "fp32", {"n": "i32"}, BLOCK=1024)
sizes = {"m": "i32", "n": "i32", "k": "i32"}
for dtype, block in (("fp32", 32), ("fp16", 64), ("fp16", 128)):
    build(matmul_kernel, ("p_a", "p_b", "p_c"), dtype, sizes, BLOCK_M=block, BLOCK_N=block, BLOCK_K=32)
numbers, sizes = {"n": "i32", "scale": "fp32"}, {"DIM": 64, "BLOCK_Q": 64}
for dtype, block_k in (("fp32", 32), ("fp16", 64), ("bf16", 32)):
    build(attention_kernel, ("p_q", "p_k", "p_v", "p_out"), dtype, numbers, CAUSAL=True, BLOCK_K=block_k, **sizes)
"""


def test_the_kernels_compile_for_hopper(tmp_path: object) -> None:
    for package in ("torch", "triton"):
        pytest.importorskip(package)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    # A kernel's source is looked up in its file, so what calls the compiler may be a string.
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    built = [line.split() for line in done.stdout.splitlines()]
    assert len(built) == 7 and all(cubin == "True" for _, _, cubin, _ in built)
    assert all((matrix_units == "True") == (dtype != "fp32") for _, dtype, _, matrix_units in built)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    record = lesson.run(Say(lambda line: None))
    assert record["device"] == "cuda" and record["holds"]
    assert {check["dtype"] for check in record["checks"]} == {"float32", "float16", "bfloat16"}
    assert set(record["times"]) == {"full", "causal"}
