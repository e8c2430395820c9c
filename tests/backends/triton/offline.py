"""Compiles the kernels of calls for GPUs that this machine does not have. A program: one target per process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests.backends.triton.machine_code import Figures, amd, nvidia, pdl_order

ROOT = Path(__file__).parents[3]
KILO = 1024
# Batch, heads, key heads, queries, keys; and the number of processors of the GPU.
SHAPES = {
    "forward": ((2, 8, 4, 1024, 1024), 8),
    "backward": ((2, 8, 4, 1024, 1024), 8),
    "backward-ragged": ((2, 8, 4, 1001, 1001), 8),
    "backward-packed": ((2, 8, 4, 1001, 1001), 8),  # both sequences in one
    "decode": ((1, 8, 2, 1, 8192), 8),
    "decode-short": ((1, 32, 8, 1, 8192), 132),
}


class Target(NamedTuple):
    """A GPU as Triton names it, the shared memory of a program (bytes), and the GPU's own matrix instructions."""

    backend: str
    arch: int | str
    lanes: int  # of a warp
    shared: int
    matrix: str


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 * KILO, "mma.sync"),
    "sm_89": Target("cuda", 89, 32, 99 * KILO, "mma.sync"),
    "sm_90": Target("cuda", 90, 32, 227 * KILO, "wgmma.mma_async"),
    "sm_100": Target("cuda", 100, 32, 227 * KILO, "tcgen05.mma"),
    "gfx90a": Target("hip", "gfx90a", 64, 64 * KILO, "v_mfma"),
    "gfx942": Target("hip", "gfx942", 64, 64 * KILO, "v_mfma"),
    "gfx950": Target("hip", "gfx950", 64, 160 * KILO, "v_mfma"),
    "gfx1100": Target("hip", "gfx1100", 32, 64 * KILO, "v_wmma"),
}


class Case(NamedTuple):
    """One call: `work` is one of SHAPES, `options` are options of attention(), separated by spaces."""

    work: str
    dim: int
    options: str = ""
    dtype: str = "bfloat16"


class Built(NamedTuple):
    """One compiled kernel of a case."""

    case: Case
    kernel: str
    tile: list[int]  # block_q, block_k, warps, stages; only warps and stages for kernels without tiles of scores
    shared: int  # bytes
    seconds: float
    narrow: int  # products by mma.sync with fewer columns than their layout; Triton 3.6 leaves some of them out
    pdl_order: str | None  # see machine_code.py; None on AMD GPUs
    with_pdl: bool  # launched with programmatic dependent launch
    code: Figures

    @property
    def multiplies(self) -> bool:
        return len(self.tile) == 4


def build(target: str, cases: Iterable[Case]) -> list[Built]:
    """Compile in a separate process, without the interpreter; compiled kernels are cached in build/triton-cache."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(ROOT / "build" / "triton-cache")
    command = [sys.executable, "-m", "tests.backends.triton.offline", target]
    done = subprocess.run(command, input=json.dumps(list(cases)), env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{target}: {done.stderr[-4000:]}")
    lines = (json.loads(line) for line in done.stdout.splitlines())
    return [Built(Case(*case), *rest, Figures(*code)) for case, *rest, code in lines]


class Phantom:
    """The driver of a GPU that this machine does not have: Triton compiles for it, and launches do nothing."""

    def __init__(self, target: Target) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget(*target[:3])
        self.utils = self

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": sys.maxsize}  # so that a test reports the size, if it is too large

    def load_binary(self, name: str, *_: Any) -> tuple[Any, ...]:
        return name, name, 0, 0, 1024  # module, function, registers, spills, threads

    def launcher_cls(self, *_: Any) -> Any:
        return lambda *_: None


def build_here(name: str, cases: Iterable[Case]) -> Iterator[Built]:
    """build() in this process, which then knows only this GPU."""
    import triton

    from flashtile.backends.gpu import device as gpu

    target = TARGETS[name]
    triton.runtime.driver.set_active(Phantom(target))
    kernels: list[dict[str, Any]] = []
    triton.knobs.compilation.listener = lambda **told: kernels.append(told)
    # The tensors are on the CPU; the tuning table is asked for the target.
    architecture = divmod(target.arch, 10) if isinstance(target.arch, int) else target.arch
    with mock.patch.object(gpu, "architecture", lambda _device: architecture):
        for case in cases:
            kernels.clear()
            with mock.patch.object(gpu, "processors", lambda _device, case=case: SHAPES[case.work][1]):
                start(case)
            for told in kernels:
                yield _built(target, case, **told)


def _built(target: Target, case: Case, *, src: Any, metadata: Any, metadata_group: Any, times: Any, **_: Any) -> Built:
    """The figures of a kernel, from the compiler's report and output."""
    known = constants(src)
    tile = [known[name] for name in ("BLOCK_Q", "BLOCK_K") if name in known]
    tile += metadata["num_warps"], metadata["num_stages"]
    files = {Path(path).suffix: Path(path) for path in metadata_group.values()}
    code = nvidia(files[".ptx"], files[".cubin"]) if target.backend == "cuda" else amd(files[".amdgcn"])
    narrow = narrow_products(files[".ttgir"].read_text()) if target.backend == "cuda" else 0
    said = pdl_order(files[".ptx"].read_text()) if target.backend == "cuda" else None
    with_pdl = metadata.get("launch_pdl", False)
    return Built(case, src.name, tile, metadata["shared"], times.total / 1e6, narrow, said, with_pdl, code)


def narrow_products(code: str) -> int:
    """The number of left factors of mma.sync that are narrower than four threads with kWidth columns each."""
    found = re.findall(
        r"tt\.dot .*?: tensor<\d+x(\d+)x\w+, #ttg\.dot_op<{opIdx = 0, parent = #mma\d*, kWidth = (\d+)", code
    )
    return sum(int(columns) < 4 * int(width) for columns, width in found)


def start(case: Case) -> None:
    """Run a case through the backend, on tensors of arbitrary contents."""
    import torch

    from flashtile import dispatch
    from flashtile.problem import describe

    batch, heads, kv_heads, n_q, n_k = SHAPES[case.work][0]
    dtype = getattr(torch, case.dtype)
    q = torch.empty(batch, heads, n_q, case.dim, dtype=dtype)
    k, v = (torch.empty(batch, kv_heads, n_k, case.dim, dtype=dtype) for _ in "kv")
    values = {
        "causal": True,
        "window": (256, 0),
        "softcap": 30.0,
        "dropout": 0.1,
        "seed": torch.zeros((), dtype=torch.int64),  # a pointer
        "mask": torch.empty(1, 1, n_q, n_k, dtype=torch.bool),
        "bias": torch.empty(1, heads, n_q, n_k, dtype=dtype),
        "alibi": torch.empty(heads),
        "sink": torch.empty(heads),
        **{f"spans{n}": torch.empty(1, 1, n_q, n, 2, dtype=torch.int32) for n in (1, 3, 8)},
    }
    options = {"spans" if name.startswith("spans") else name: values[name] for name in case.options.split()}
    if case.work.endswith("packed"):
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        options["cu_q"], options["cu_k"] = (torch.arange(batch + 1) * n for n in (n_q, n_k))
    run, inputs = dispatch.named("triton").prepare(describe(q, k, v, **options))
    if case.work.startswith("backward"):
        run.backward(inputs, torch.empty_like(q), torch.empty_like(q), torch.empty(q.shape[:-1]), None)
    else:
        run.forward(inputs)


def constants(src: Any) -> dict[str, Any]:
    """The constants of a kernel by name, including fields of named tuples;

    of several tuples, those of the ordinary walk.
    """
    found = {src.fn.arg_names[path[0]]: _plain(value) for path, value in src.constants.items() if len(path) == 1}
    inside = [found[name]._asdict() for name in ("RECOMPUTE", "OF_QUERIES", "C") if found.get(name) is not None]
    return found | {name: _plain(value) for fields in inside for name, value in fields.items()}


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)  # unwraps a tl.constexpr


if __name__ == "__main__":
    for built in build_here(sys.argv[1], [Case(*row) for row in json.load(sys.stdin)]):
        print(json.dumps(built), flush=True)
