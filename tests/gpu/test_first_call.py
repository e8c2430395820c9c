"""The cost of a first call: a few seconds to compile, and almost nothing in later processes.

These are times: run them with nothing else on the machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.gpu.child import python

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

CALLS: dict[str, dict[str, Any]] = {
    "training, d 64": {"shape": [2, 8, 4, 1024, 1024, 64], "options": {"causal": True}},
    "training, d 128": {"shape": [2, 8, 4, 1024, 1024, 128], "options": {"causal": True}},
    "window and softcap, d 128": {
        "shape": [2, 8, 4, 1024, 1024, 128],
        "options": {"window": [256, 0], "softcap": 30.0},
    },
    "decode, d 128": {"shape": [1, 32, 8, 1, 8192, 128], "options": {}},
    "float32, d 64": {"shape": [1, 4, 4, 512, 512, 64], "options": {"causal": True}, "dtype": "float32"},
}
SCRIPT = """
import json, sys, time
import torch
import flashtile as ft
given = json.loads(sys.argv[1])
b, h, kv, n_q, n_k, d = given["shape"]
dtype = getattr(torch, given.get("dtype", "bfloat16"))
q = torch.randn(b, h, n_q, d, device="cuda", dtype=dtype, requires_grad=True)
k, v = (torch.randn(b, kv, n_k, d, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
(q.sum() + k.sum()).backward()  # torch itself is ready
torch.cuda.synchronize()
times = []
for _ in range(2):
    begin = time.perf_counter()
    out = ft.attention(q, k, v, **given["options"])
    torch.cuda.synchronize()
    middle = time.perf_counter()
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    torch.cuda.synchronize()
    times.append([middle - begin, time.perf_counter() - middle])
print(json.dumps(times))
"""


def seconds(name: str, cache: Path) -> list[list[float]]:
    """Times of forward and backward, in the first and in the second call of a new process."""
    run = python("-c", SCRIPT, json.dumps(CALLS[name]), TRITON_CACHE_DIR=str(cache))
    assert run.returncode == 0, run.stderr[-3000:]
    times: list[list[float]] = json.loads(run.stdout.splitlines()[-1])
    return times


@pytest.mark.parametrize("name", CALLS)
def test_first_and_later_processes(name: str, tmp_path: Path) -> None:
    (forward, backward), again = seconds(name, tmp_path)
    (later_forward, later_backward), _ = seconds(name, tmp_path)
    told = (
        f"{name}: compiling took {forward:.2f} s forward and {backward:.2f} s backward; "
        f"from the cache {later_forward:.2f} and {later_backward:.2f} s; after that {sum(again) * 1e3:.2f} ms"
    )
    print(told)
    assert list(tmp_path.iterdir()), "the kernels went to this cache"
    assert forward < 10 and backward < 10, told
    assert later_forward + later_backward < 5, told
    assert sum(again) < 0.1, told
