"""Targets: one Triton kernel, unchanged, compiled for GPUs of two vendors, without a GPU."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from flashtile.host import machine
from flashtile.lab.studies import canvas
from flashtile.lab.studies.study import Table
from flashtile.lab.units import seconds

TITLE = "One kernel for every vendor"
QUESTION = "Does another vendor's GPU need another kernel?"


class Target(NamedTuple):
    """A GPU as Triton names it."""

    vendor: str
    chips: str
    backend: str
    arch: int | str
    lanes: int  # per warp


TARGETS = {
    "sm_80": Target("NVIDIA", "A100", "cuda", 80, 32),
    "sm_90": Target("NVIDIA", "H100, H200", "cuda", 90, 32),
    "gfx90a": Target("AMD", "MI210, MI250", "hip", "gfx90a", 64),
    "gfx942": Target("AMD", "MI300", "hip", "gfx942", 64),
}
QUICK = ("gfx942",)
CONSTANTS = {"CAUSAL": True, "DIM": 64, "BLOCK_Q": 64, "BLOCK_K": 64}
SIGNATURE = {**dict.fromkeys(("p_q", "p_k", "p_v", "p_out"), "*bf16"), "n": "i32", "scale": "fp32"}
MATRIX = re.compile(r"wgmma\.mma_async|mma\.sync|v_mfma\w+|v_wmma\w+")  # matrix instructions


@dataclass(frozen=True, slots=True)
class Built:
    """The kernel as compiled for one target."""

    target: str
    vendor: str
    chips: str
    seconds: float
    bytes: int
    instruction: str  # its matrix instruction; "" if it has none


@dataclass(frozen=True, slots=True)
class Record:
    kernel: str
    built: tuple[Built, ...]
    reason: str | None  # why nothing was compiled

    @property
    def holds(self) -> bool:
        """Whether every target uses its matrix units."""
        return all(b.instruction for b in self.built)


def compute(quick: bool = False) -> Record:
    kernel = "lessons/kernels/fused_attention.py"
    if reason := machine.lacks("triton"):
        return Record(kernel, (), reason)
    return Record(kernel, tuple(_compiled_apart(QUICK if quick else tuple(TARGETS))), None)


def _compiled_apart(names: tuple[str, ...]) -> list[Built]:
    """Compile in a separate process, independent of the caller's Triton settings, and without leftovers."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {k: x for k, x in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": folder}
        command = [sys.executable, "-m", "flashtile.lab.studies.targets", *names]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"compiling for {', '.join(names)}: {done.stderr.strip()}")
    return [Built(**built) for built in json.loads(done.stdout)]


def _compile(name: str) -> Built:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile

    from flashtile.lab.lessons.kernels.fused_attention import attention_kernel

    t = TARGETS[name]
    start = time.perf_counter()
    source = ASTSource(attention_kernel, {**SIGNATURE, **dict.fromkeys(CONSTANTS, "constexpr")}, CONSTANTS)
    built: dict[str, Any] = triton_compile(source, target=GPUTarget(t.backend, t.arch, t.lanes)).asm
    taken = time.perf_counter() - start
    text, binary = ("ptx", "cubin") if t.backend == "cuda" else ("amdgcn", "hsaco")
    found = MATRIX.search(built[text])
    return Built(name, t.vendor, t.chips, taken, len(built[binary]), found[0] if found else "")


def tables(r: Record) -> list[Table]:
    if r.reason:
        return []
    return [
        Table(
            f"{r.kernel}, compiled here",
            ("target", "GPUs", "compiled in", "matrix instruction"),
            tuple((b.target, f"{b.vendor} {b.chips}", seconds(b.seconds), b.instruction) for b in r.built),
        )
    ]


def findings(r: Record) -> list[str]:
    if r.reason:
        return [f"Nothing was compiled: {r.reason}."]
    vendors = " and ".join(dict.fromkeys(b.vendor for b in r.built))
    return [
        f"The same source was compiled unchanged for {', '.join(b.target for b in r.built)} of {vendors}, without a "
        "GPU.",
        "It uses the matrix units of every target." if r.holds else "It does not use the matrix units of every target.",
    ]


def draw(r: Record) -> canvas.Figure | None:
    if not r.built:
        return None
    figure, (ax,) = canvas.panels(1, 1, height=2.4)
    names = [f"{b.target} ({b.vendor} {b.chips})" for b in r.built]
    colours = [canvas.GREEN if b.vendor == "NVIDIA" else canvas.ORANGE for b in r.built]
    bars = ax.barh(names, [b.seconds for b in r.built], color=colours, height=0.6)
    ax.bar_label(bars, [seconds(b.seconds) for b in r.built], padding=5, fontsize=9, color=canvas.INK)
    ax.grid(axis="y", visible=False)
    ax.margins(x=0.12)
    canvas.label(ax, "Time to compile the attention kernel", "seconds")
    return figure


if __name__ == "__main__":
    print(json.dumps([asdict(_compile(name)) for name in sys.argv[1:]]))
