"""A tiled matrix product: a block is loaded once and used many times, which is the purpose of fast memory.

A product of [m, k] and [k, n] multiplies m*n*k pairs of numbers. Fetched one by one, that is 2*m*n*k trips to the large
memory. A tile of C of BLOCK_M x BLOCK_N needs BLOCK_M rows of A and BLOCK_N columns of B. Once they are in fast memory,
each element of A is used for BLOCK_N products and each element of B for BLOCK_M. tiled() is that loop in NumPy, with a
hook for counting; kernels/tiled_matmul.py is the same in Triton.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashtile.lab.bench.timing import alternate
from flashtile.lab.lessons import device
from flashtile.lab.lessons.lesson import Unavailable
from flashtile.lab.lessons.text import Say
from flashtile.lab.units import quantity, seconds, size
from flashtile.numerics.dtypes import Array


@dataclass
class Count:
    """How often each element was loaded from memory, and how often it was multiplied."""

    loads_a: Array
    loads_b: Array
    uses_a: Array
    uses_b: Array

    @classmethod
    def of(cls, A: Array, B: Array) -> "Count":
        return cls(*(np.zeros(x.shape, np.int64) for x in (A, B, A, B)))

    def see(self, rows: slice, inner: slice, cols: slice) -> None:
        """Count one step of a tile: its blocks are loaded, and every row of one meets every column of the other."""
        self.loads_a[rows, inner] += 1
        self.loads_b[inner, cols] += 1
        for i in range(*rows.indices(len(self.uses_a))):
            for j in range(*cols.indices(self.uses_b.shape[1])):
                self.uses_a[i, inner] += 1
                self.uses_b[inner, j] += 1


def tiled(A: Array, B: Array, blocks: tuple[int, int, int], step: Callable[..., None] = lambda *at: None) -> Array:
    """Compute C, one tile at a time. `step` is called at every step with rows, inner, columns, and the tile so far."""
    block_m, block_n, block_k = blocks
    C = np.empty((len(A), B.shape[1]), A.dtype)
    for i in range(0, len(A), block_m):
        for j in range(0, B.shape[1], block_n):
            rows, cols = slice(i, i + block_m), slice(j, j + block_n)
            tile = np.zeros(C[rows, cols].shape, A.dtype)
            for k in range(0, A.shape[1], block_k):
                inner = slice(k, k + block_k)
                tile += A[rows, inner] @ B[inner, cols]
                step(rows, inner, cols, tile)
            C[rows, cols] = tile
    return C


def on_triton(A: Any, B: Any, *, blocks: tuple[int, int, int]) -> Any:
    """Run the kernel on two tensors and return C."""
    import torch

    from flashtile.lab.lessons.kernels.tiled_matmul import matmul_kernel

    (m, k), n = A.shape, B.shape[1]
    C = torch.full((m, n), float("nan"), dtype=A.dtype, device=A.device)
    grid = (-(-m // blocks[0]), -(-n // blocks[1]))
    matmul_kernel[grid](A, B, C, m, n, k, *blocks, num_warps=4 if blocks[0] < 128 else 8)
    return C


def run(say: Say, quick: bool = False) -> dict[str, Any]:
    shown = walk_through(say)
    counted = reuse(say, 64)
    rng = np.random.default_rng(42)

    say.heading("Time")
    n = 256 if quick else 512
    A, B = (rng.standard_normal((n, n)).astype(np.float32) for _ in range(2))
    contenders: dict[str, Callable[[], Any]] = {
        f"NumPy tiles of {block}": lambda block=block: tiled(A, B, (block,) * 3)  # type: ignore[misc]
        for block in (32, 64, 128)
    }
    contenders["np.matmul"] = lambda: A @ B
    times = say.timings(f"{n} x {n} x {n}, float32", alternate(contenders, seconds=0.1 if quick else 1))
    say.paragraph("np.matmul uses tiles too: sized for registers and caches, in machine code.")
    try:
        triton = in_triton(say, device.for_triton(), quick)
    except Unavailable as reason:
        triton = None
        say.paragraph(f"The Triton kernel is left out: {reason}.")
    return {
        "device": "" if triton is None else triton["device"],
        "walk": shown,
        "reuse": counted,
        "times": times,
        "triton": triton,
        "holds": shown["equal"] and (triton is None or triton["holds"]),
    }


def walk_through(say: Say) -> dict[str, Any]:
    """Multiply small matrices and show every step."""
    blocks = block_m, block_n, block_k = 2, 3, 2
    rng = np.random.default_rng(42)
    A, B = rng.integers(0, 5, (4, 4)), rng.integers(0, 5, (4, 6))
    say.heading(f"A 4 x 4 times B 4 x 6, tiles of C {block_m} x {block_n}, {block_k} columns of A at a time")
    _side_by_side(say, {"A": A, "B": B})
    say.paragraph("The first tile of C, rows 0-1, columns 0-2, in two steps:")
    count, steps = Count.of(A, B), []

    def step(rows: slice, inner: slice, cols: slice, tile: Array) -> None:
        count.see(rows, inner, cols)
        steps.append(tile.tolist())
        if rows.start == cols.start == 0:
            _side_by_side(
                say, {"block of A": A[rows, inner], "block of B": B[inner, cols], "tile of C so far": tile.copy()}
            )

    C = tiled(A, B, blocks, step)
    equal = bool((C == A @ B).all())
    say.paragraph(f"After all {len(steps)} steps C is A times B:" if equal else "C is WRONG:")
    _side_by_side(say, {"C": C})
    used = {
        "A": {"loads": int(count.loads_a.max()), "uses": int(count.uses_a.max())},
        "B": {"loads": int(count.loads_b.max()), "uses": int(count.uses_b.max())},
    }
    a, b = used["A"], used["B"]
    say.paragraph(
        f"Each element of A was loaded {a['loads']} times and multiplied {a['uses']} times, "
        f"{a['uses'] // a['loads']} times per load: BLOCK_N = {block_n}. Each of B was loaded {b['loads']} times and "
        f"multiplied {b['uses']} times, {b['uses'] // b['loads']} times per load: BLOCK_M = {block_m}.",
    )
    return {"A": A.tolist(), "B": B.tolist(), "C": C.tolist(), "steps": steps, "used": used, "equal": equal}


def reuse(say: Say, n: int) -> list[dict[str, Any]]:
    """Count what a product of n x n loads, by the size of its tiles."""
    say.heading(f"Loads of a {n} x {n} x {n} product")
    rng = np.random.default_rng(42)
    A, B = (rng.standard_normal((n, n)).astype(np.float32) for _ in range(2))
    rows = []
    for block in (8, 16, 32):
        count = Count.of(A, B)
        tiled(A, B, (block,) * 3, lambda rows, inner, cols, tile, count=count: count.see(rows, inner, cols))
        loads = int(count.loads_a.sum() + count.loads_b.sum())
        rows.append({"block": block, "loads": loads, "uses": int(count.uses_a.sum() + count.uses_b.sum())})
    say.table(
        ("tile", "loaded", "bytes", "multiplied", "uses per load"),
        [
            (
                f"{row['block']} x {row['block']}",
                f"{row['loads']:,}",
                size(4 * row["loads"]),
                f"{row['uses']:,}",
                f"{row['uses'] / row['loads']:.0f}",
            )
            for row in rows
        ],
    )
    say.paragraph("Tiles twice as wide need half the loads, as long as three blocks fit into fast memory.")
    return rows


def in_triton(say: Say, where: str, quick: bool) -> dict[str, Any]:
    """Check the kernel, and on a GPU compare its time with torch's."""
    import torch

    say.heading("In Triton")
    rng = np.random.default_rng(42)
    m, n, k = (300, 200, 100) if where == "cuda" else (50, 40, 60)  # not multiples of the tile
    A, B = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    tensors = [torch.from_numpy(x.astype(np.float32)).to(where) for x in (A, B)]
    C = on_triton(*tensors, blocks=(32, 32, 32)).cpu().numpy()
    right = A.astype(np.float32).astype(np.float64) @ B.astype(np.float32).astype(np.float64)
    error, limit = float(np.abs(C - right).max()), 1e-4
    how = "on the GPU" if where == "cuda" else "interpreted in NumPy, without a GPU"
    say.paragraph(f"{m} x {k} times {k} x {n}, float32, {how}: the error against float64 is {error:.1e}.")
    found: dict[str, Any] = {"device": where, "error": error, "holds": error < limit, "times": None}
    if where == "cuda":
        n = 1024 if quick else 4096
        X, Y = (torch.randn(n, n, device=where, dtype=torch.float16) for _ in range(2))
        contenders = {
            "Triton, tiles of 64": device.finished(lambda: on_triton(X, Y, blocks=(64, 64, 32)), where),
            "Triton, tiles of 128": device.finished(lambda: on_triton(X, Y, blocks=(128, 128, 32)), where),
            "torch.matmul": device.finished(lambda: X @ Y, where),
        }
        times = alternate(contenders, seconds=0.2 if quick else 1)
        say.table(
            (f"{n} x {n} x {n}, float16", "median", "rate"),
            [
                (name, seconds(timing.median), quantity(2 * n**3 / timing.median, "FLOP/s"))
                for name, timing in times.items()
            ],
        )
        found["times"] = {name: timing.to_dict() for name, timing in times.items()}
    return found


def _side_by_side(say: Say, matrices: dict[str, Array]) -> None:
    """Print small integer matrices side by side, with their names above."""
    blocks = []
    for name, x in matrices.items():
        lines = [" ".join(f"{value:3d}" for value in row) for row in x.tolist()]
        width = max(len(name), len(lines[0]))
        blocks.append([f"{line:{width}}" for line in (name, *lines)])
    height = max(map(len, blocks))
    for block in blocks:
        block += [" " * len(block[0])] * (height - len(block))
    for line in zip(*blocks, strict=True):
        say("   ".join(line).rstrip())
    say("")
