"""Compiles the Hopper kernels of calls without a GPU. A program: its cases come from stdin."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

from tests.backends.triton.machine_code import loops, nvidia, pdl_order, tool
from tests.backends.triton.offline import ROOT, TARGETS, Phantom

WAIT = re.compile(r"\bWARPGROUP\.DEPBAR\b")
PRODUCT = re.compile(r"\b[HQ]GMMA\b")  # of 16-bit and of 8-bit numbers
ADVICE = re.compile(r"\bC75\d\d\b.*")  # from ptxas, if it serialises products


class Case(NamedTuple):
    """One call with these options of attention(), separated by spaces.

    "gqa", "packed", "ragged" and "short" describe its tensors.
    """

    dim: int
    options: str = ""
    dtype: str = "bfloat16"
    dim_v: int | None = None  # None: that of the keys
    work: str = "forward"  # or "backward"; or "transpose" or "recompute", other kernels of a forward pass


class Built(NamedTuple):
    """The main kernel of a case, compiled."""

    case: Case
    shared: int  # bytes
    stack: int  # bytes of a thread, for spilled registers
    splits_registers: bool  # between loading and consuming warps
    waits: list[int]  # for products, in each loop over tiles
    products: list[int]  # instructions, in each of these loops
    advice: list[str]
    pdl_order: str  # see machine_code.py
    seconds: float


def build(cases: Iterable[Case]) -> list[Built]:
    """Compile in a separate process, without the interpreter and without a cache, which would not keep ptxas's
    messages.
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", "tests.backends.gluon.offline"],
            input=json.dumps(list(cases)),
            env=env | {"TRITON_CACHE_DIR": cache},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return [Built(Case(*case), *rest) for case, *rest in map(json.loads, done.stdout.splitlines())]


def build_here(cases: Iterable[Case]) -> Iterator[Built]:
    """build() in this process, which then knows only this GPU."""
    import triton

    from flashtile.backends.gluon.backward_kernel import backward_kernel
    from flashtile.backends.gluon.forward_kernel import forward_kernel
    from flashtile.backends.gluon.transpose_kernel import transpose_kernel
    from flashtile.backends.gpu.kernel_launch import KernelLaunch
    from flashtile.backends.gpu.nonfinite_kernels import recompute_forward_kernel

    triton.runtime.driver.set_active(Phantom(TARGETS["sm_90"]))
    kernels: list[dict[str, Any]] = []
    triton.knobs.compilation.listener = lambda **told: kernels.append(told)
    triton.knobs.nvidia.dump_ptxas_log = True
    wanted: list[Any] = []
    of_work = {
        "forward": [forward_kernel],
        "backward": [backward_kernel],
        "transpose": [transpose_kernel],
        "recompute": [recompute_forward_kernel],
    }

    def compile_only(launch: KernelLaunch, *args: Any) -> None:
        if launch.kernel in wanted:
            launch.kernel[launch.grid](*launch.kernel_args(args), **launch.constants, **launch.options)

    with mock.patch.object(KernelLaunch, "__call__", compile_only):
        for case in cases:
            kernels.clear()
            wanted[:] = of_work[case.work]
            log = StringIO()
            with redirect_stdout(log):
                start_call(case)
            (told,) = kernels
            yield _built(case, log.getvalue(), **told)


def _built(case: Case, log: str, *, metadata: Any, metadata_group: Any, times: Any, **_: Any) -> Built:
    files = {Path(path).suffix: Path(path) for path in metadata_group.values()}
    assert "ptxas info" in log, "what ptxas says went elsewhere"
    bodies = loops(tool("nvdisasm", "-c", files[".cubin"]))
    return Built(
        case,
        metadata["shared"],
        nvidia(files[".ptx"], files[".cubin"]).stack,
        "setmaxnreg.inc" in (text := files[".ptx"].read_text()) and "setmaxnreg.dec" in text,
        *([sum(bool(word.search(line)) for line in body) for body in bodies] for word in (WAIT, PRODUCT)),
        ADVICE.findall(log),
        pdl_order(text),
        times.total / 1e6,
    )


def start_call(case: Case) -> None:
    """Run a case through the backend, on tensors of arbitrary contents."""
    import torch

    from flashtile.backends.gluon import supports_backward, why_not
    from flashtile.backends.gluon.backward import Backward
    from flashtile.backends.gluon.forward import Forward
    from flashtile.band import Band
    from flashtile.checks.shapes import check_gradients
    from flashtile.inputs import Inputs
    from flashtile.problem import describe

    words = case.options.split()
    length = 4001 if "ragged" in words else 256 if "short" in words else 4096
    batch, heads, kv_heads, n_q, n_k = (2, 16, 2, 8, length) if "gqa" in words else (2, 8, 8, length, length)
    q_shape, k_shape = (batch, heads, n_q), (batch, kv_heads, n_k)
    starts = None
    if "packed" in words:
        q_shape, k_shape = (batch * n_q, heads), (batch * n_k, kv_heads)
        starts = torch.tensor([0, 1000, batch * n_q], dtype=torch.int32)
    shapes = (*q_shape, case.dim), (*k_shape, case.dim), (*k_shape, case.dim_v or case.dim)
    q, k, v = (torch.empty(shape, dtype=getattr(torch, case.dtype)) for shape in shapes)
    values: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "window": {"window": (1000, 0)},
        "band": {"band": Band(300, 100, 17)},
        "softcap": {"softcap": 30.0},
        "alibi": {"alibi": torch.empty(heads)},
        "sink": {"sink": torch.empty(heads)},
        "kv_lengths": {"kv_lengths": torch.zeros(batch, dtype=torch.int32)},
        "float32": {"out_dtype": torch.float32},
        "packed": {"cu_q": starts, "cu_k": starts},
        "deterministic": {"deterministic": True},
        "descale": {"descale": torch.ones(batch, kv_heads, 3)},
        **{word: {} for word in ("gqa", "ragged", "short")},
    }
    problem = describe(q, k, v, **{name: x for word in words for name, x in values[word].items()})
    assert why_not(problem) is None
    device, inputs = torch.device("cpu"), Inputs.of(problem)
    if case.work != "backward":
        Forward(problem, device)(inputs, True)
    else:
        assert supports_backward(problem)
        dout = torch.empty(*q_shape, shapes[2][-1], dtype=q.dtype)
        given = check_gradients(problem, dout, dout, torch.empty(q_shape), None)
        Backward(problem, device, given)(inputs, *given)


if __name__ == "__main__":
    for built in build_here([Case(*row) for row in json.load(sys.stdin)]):
        print(json.dumps(built), flush=True)
