"""What compiled code shows of a kernel: registers, stack, and the instructions in its loops over tiles."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

MATRIX = re.compile(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync|v_mfma|v_wmma|[A-Z]+MMA\b")
EXPONENTIAL = re.compile(r"ex2\.approx|MUFU\.EX2|v_exp_f32")
SPILL = re.compile(r"\b(?:LDL|STL)\b|Folded (?:Spill|Reload)")
LABEL = re.compile(r"\s*([.$]L\w+):")
MEMORY = re.compile(r"\b(?:ld|st|red|atom)\.(?:\w+\.)*?global|\bcp\.(?:async|reduce\.async)\b")
JUMP = re.compile(r"\b(?:bra|BRA|s_c?branch\w*)\b.*?([.$]L\w+)")


class Figures(NamedTuple):
    """registers and stack (bytes) of a thread; a stack holds spilled registers.

    matrix: the names of the matrix instructions in loops over tiles. loops: if there is a stack, the number of
    instructions in each of these loops that access it: full tiles, partial ones, and last the careful walk, if the
    kernel has one, which ordinary data skips.
    """

    matrix: list[str]
    registers: int
    stack: int
    loops: list[int]

    @property
    def spills(self) -> int:
        """Spills in the loop over full tiles, which takes most of the time."""
        return self.loops[0] if self.loops else 0


def nvidia(ptx: Path, cubin: Path) -> Figures:
    usage = re.findall(r"REG:(\d+) STACK:(\d+)", tool("cuobjdump", "--dump-resource-usage", cubin))
    registers, stack = map(int, usage[-1])
    return Figures(matrix(ptx.read_text()), registers, stack, spills(tool("nvdisasm", "-c", cubin)) if stack else [])


def amd(assembly: Path) -> Figures:
    text = assembly.read_text()
    registers, stack = (
        int(re.findall(rf"\.{field}:\s*(\d+)", text)[-1]) for field in ("vgpr_count", "private_segment_fixed_size")
    )
    return Figures(matrix(text), registers, stack, spills(text) if stack else [])


def matrix(text: str) -> list[str]:
    """The matrix instructions in loops over tiles. Those outside of them are needed only for spoiled sums."""
    return sorted({name for body in loops(text) for line in body for name in MATRIX.findall(line)})


def spills(text: str) -> list[int]:
    """Loads and stores of spilled registers in each loop over tiles."""
    return [sum(bool(SPILL.search(line)) for line in body) for body in loops(text)]


def pdl_order(ptx: str) -> str:
    """The order in which a kernel launches dependents, waits (pdl.py) and accesses memory, without repetitions."""
    words = {"griddepcontrol.wait": "wait", "griddepcontrol.launch_dependents": "launch"}
    found: list[str] = []
    for line in ptx.splitlines():
        said = next((word for code, word in words.items() if code in line), "memory" if MEMORY.search(line) else None)
        if said is not None and found[-1:] != [said]:
            found.append(said)
    return " ".join(found)


def loops(text: str) -> list[list[str]]:
    """The loops over tiles: they multiply matrices and compute exponentials.

    A loop is everything between a backward jump and its target. A loop in which another one ends is not counted: it
    contains that loop, or it is a wait placed elsewhere, which jumps back into it.
    """
    lines = text.splitlines()
    places = {label[1]: at for at, line in enumerate(lines) if (label := LABEL.match(line))}
    jumps = ((at, JUMP.search(line)) for at, line in enumerate(lines))
    spans = [(places[jump[1]], at) for at, jump in jumps if jump and places.get(jump[1], at) < at]
    spans = [span for span in spans if all(any(map(x.search, lines[slice(*span)])) for x in (MATRIX, EXPONENTIAL))]
    inner = [(first, last) for first, last in spans if not any(first <= end < last for _, end in spans)]
    return [lines[first:last] for first, last in inner]


def tool(name: str, *args: Any) -> str:
    """The output of a tool in Triton's wheel."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *args], capture_output=True, text=True, check=True).stdout
