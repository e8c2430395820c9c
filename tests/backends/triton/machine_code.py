"""What a compiled kernel is made of, read from its code: matrix instructions, registers, and spills in its loops."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

MATRIX = r"wgmma\.mma_async|tcgen05\.mma|mma\.sync|v_mfma|v_wmma"


class Figures(NamedTuple):
    """Bytes of stack are what a thread has in memory because its registers are too few.

    loops: how many instructions go there in each loop over tiles, where there is a stack. Full tiles, partial tiles and
    the walk for spoiled sums each have a loop; by far the most time goes to full tiles, whose loop holds the least.
    """

    matrix: list[str]
    registers: int
    stack: int
    loops: list[int]


def nvidia(ptx: Path, cubin: Path) -> Figures:
    usage = re.findall(r"REG:(\d+) STACK:(\d+)", _tool("cuobjdump", "--dump-resource-usage", cubin))
    registers, stack = map(int, usage[-1])
    return Figures(matrix(ptx.read_text()), registers, stack, spills(_tool("nvdisasm", "-c", cubin)) if stack else [])


def amd(assembly: Path) -> Figures:
    text = assembly.read_text()
    registers, stack = (
        int(re.findall(rf"\.{field}:\s*(\d+)", text)[-1]) for field in ("vgpr_count", "private_segment_fixed_size")
    )
    return Figures(matrix(text), registers, stack, spills(text) if stack else [])


def matrix(text: str) -> list[str]:
    return sorted(set(re.findall(MATRIX, text)))


def spills(text: str) -> list[int]:
    """Loads and stores of spilled registers in each loop that multiplies matrices and takes exponentials.

    A loop is a jump back and all that lies between it and where it goes. One within which another ends is not counted:
    it holds that loop, or it is a wait set apart, which returns into it.
    """
    lines = text.splitlines()
    places = {label[1]: at for at, line in enumerate(lines) if (label := re.match(r"\s*(\.L\w+):", line))}
    jumps = ((at, re.search(r"\b(?:BRA|s_c?branch\w*)\b.*?(\.L\w+)", line)) for at, line in enumerate(lines))
    spans = [(places[jump[1]], at) for at, jump in jumps if jump and places.get(jump[1], at) < at]
    spans = [(first, last) for first, last in spans if _walks("\n".join(lines[first:last]))]
    inner = [(first, last) for first, last in spans if not any(first <= end < last for _, end in spans)]
    memory = re.compile(r"\b(?:LDL|STL)\b|Folded (?:Spill|Reload)")
    return [sum(bool(memory.search(line)) for line in lines[first:last]) for first, last in inner]


def _walks(body: str) -> bool:
    return bool(re.search(r"\w*MMA\b|v_mfma|v_wmma", body) and re.search(r"MUFU\.EX2|v_exp_f32", body))


def _tool(name: str, *args: Any) -> str:
    """The output of one of the tools in Triton's wheel."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *args], capture_output=True, text=True, check=True).stdout
