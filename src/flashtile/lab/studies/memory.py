"""Study 2: the memory of standard and tiled attention, by the formulas and as measured."""

from dataclasses import dataclass

import numpy as np

from flashtile.backends import tiles
from flashtile.host import threads
from flashtile.lab.bench import memory, workload
from flashtile.lab.bench.cases import FORWARD, Case
from flashtile.lab.studies import canvas
from flashtile.lab.studies.allocations import tracked
from flashtile.lab.studies.study import Table, qkv
from flashtile.lab.units import size
from flashtile.numerics.dtypes import ITEMSIZE, Array, narrow
from flashtile.problem import describe

TITLE = "Far less memory"
QUESTION = "How much memory does standard attention take, and how much does tiled attention take?"
D, BLOCK = 64, 32
LENGTHS = (256, 512, 1024, 2048)
PREDICTED = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
GROWN = (1024, 4096)
DTYPES = ("float16", "float32", "float64")
DTYPE_LENGTH = 512


def standard_floats(n: int, d: int) -> int:
    """Floats of S and P, and the output."""
    return 2 * n * n + n * d


def block_floats(block: int) -> int:
    """Floats of S and P of one tile."""
    return 2 * block * block


def tiled_floats(n: int, d: int, block: int, statistic: int = 1) -> int:
    """Floats of S and P of one tile, m and l of every row, and the output; a statistic may count as several."""
    return block_floats(block) + 2 * n * statistic + n * d


@dataclass(frozen=True, slots=True)
class Predicted:
    """Bytes by the formulas, float32."""

    n: int
    standard: int
    tiled: int
    tiled_wide: int  # m and l in float64
    blocks: int

    @property
    def saved(self) -> float:
        return self.standard / self.tiled

    @property
    def saved_wide(self) -> float:
        return self.standard / self.tiled_wide


@dataclass(frozen=True, slots=True)
class Measured:
    """Peak bytes of arrays alive during one call, including the results."""

    n: int
    dtype: str
    standard: int
    tiled: int
    results: int  # out and lse, part of the tiled peak

    @property
    def blocks(self) -> int:
        """What tiles needed besides their results."""
        return self.tiled - self.results

    @property
    def saved(self) -> float:
        return self.standard / self.tiled


@dataclass(frozen=True, slots=True)
class Grown:
    """Memory growth of a fresh process during one call; None if the system does not report it."""

    n: int
    standard: int | None  # three lines of NumPy
    flashtile: int | None  # attention() on its default backend


@dataclass(frozen=True, slots=True)
class Memory:
    d: int
    block: int
    predicted: tuple[Predicted, ...]
    measured: tuple[Measured, ...]
    dtypes: tuple[Measured, ...]
    grown: tuple[Grown, ...]

    @property
    def holds(self) -> bool:
        """Whether tiles need the same for every N, beyond their results, and standard attention follows its formula."""
        formula = {p.n: p.standard for p in self.predicted}
        exact = all(formula[m.n] <= m.standard < 1.01 * formula[m.n] for m in self.measured)
        return exact and len({m.blocks for m in self.measured}) == 1


def compute(quick: bool = False) -> Memory:
    return Memory(
        D,
        BLOCK,
        tuple(_predict(n) for n in PREDICTED),
        tuple(_measure(n, "float32") for n in (LENGTHS[:3] if quick else LENGTHS)),
        tuple(_measure(256 if quick else DTYPE_LENGTH, dtype) for dtype in DTYPES),
        tuple(_grow(n) for n in (GROWN[:1] if quick else GROWN)),
    )


def _predict(n: int) -> Predicted:
    float32 = ITEMSIZE["float32"]
    floats = standard_floats(n, D), tiled_floats(n, D, BLOCK), tiled_floats(n, D, BLOCK, 2), block_floats(BLOCK)
    return Predicted(n, *(float32 * x for x in floats))


def _measure(n: int, dtype: str) -> Measured:
    q, k, v = qkv(n, D, dtype)
    problem = describe(q, k, v)
    with tracked() as standard:
        frugal_attention(q, k, v)
    with tracked() as tiled:
        out, lse = tiles.forward(problem, "fa2", BLOCK, BLOCK)
        out = narrow(out, dtype)
    return Measured(n, dtype, standard.peak, tiled.peak, out.nbytes + lse.nbytes)


def frugal_attention(q: Array, k: Array, v: Array) -> Array:
    """Standard attention with the least memory possible: S, P and nothing else of that size."""
    S = q @ k.T
    S *= q.dtype.type(q.shape[1] ** -0.5)
    P = S - S.max(axis=1, keepdims=True)
    np.exp(P, out=P)
    P /= P.sum(axis=1, keepdims=True)
    out: Array = P @ v
    return out


def _grow(n: int) -> Grown:
    case, contenders = Case(n, n, D, heads=1, kv_heads=1), (workload.NAIVE_NUMPY, memory.OURS_NUMPY)
    return Grown(n, *(memory.growth(contender, case, FORWARD, threads.cores()) for contender in contenders))


def tables(record: Memory) -> list[Table]:
    shape = f"d = {record.d}, blocks of {record.block}"
    return [
        Table(
            f"By the formulas, float32, {shape}: standard 2N² + Nd, tiled 2B² + 2N + Nd",
            ("N", "standard", "tiled", "saved", "m, l in float64", "saved", "2B²"),
            tuple(
                (
                    f"{p.n}",
                    size(p.standard),
                    size(p.tiled),
                    f"{p.saved:.0f}x",
                    size(p.tiled_wide),
                    f"{p.saved_wide:.0f}x",
                    size(p.blocks),
                )
                for p in record.predicted
            ),
        ),
        Table(
            f"Measured: peak of arrays alive at once, float32, {shape}",
            ("N", "standard", "tiled", "saved", "of which out and lse", "everything else"),
            tuple(
                (f"{m.n}", size(m.standard), size(m.tiled), f"{m.saved:.0f}x", size(m.results), size(m.blocks))
                for m in record.measured
            ),
        ),
        Table(
            f"Measured by dtype, N = {record.dtypes[0].n}, {shape}",
            ("dtype", "standard", "tiled", "saved", "bytes saved", "by the formulas"),
            tuple(
                (
                    m.dtype,
                    size(m.standard),
                    size(m.tiled),
                    f"{m.saved:.1f}x",
                    size(m.standard - m.tiled),
                    f"{standard_floats(m.n, record.d) / tiled_floats(m.n, record.d, record.block):.1f}x",
                )
                for m in record.dtypes
            ),
        ),
        Table(
            f"Memory growth of a fresh process, float32, d = {record.d}",
            ("N", "three lines of NumPy", "attention()"),
            tuple((f"{g.n}", _grown(g.standard), _grown(g.flashtile)) for g in record.grown),
        ),
    ]


def _grown(grown: int | None) -> str:
    return "not measured" if grown is None else size(grown)


def findings(record: Memory) -> list[str]:
    at = {p.n: p for p in record.predicted}
    small, large = at[1024], at[8192]
    first, last = record.measured[0], record.measured[-1]
    blocks = " to ".join(dict.fromkeys(size(x) for x in sorted(m.blocks for m in record.measured)))
    half, whole = record.dtypes[0], record.dtypes[1]
    return [
        f"N = {small.n}, d = {record.d}, by the formulas: {size(small.standard)} against {size(small.tiled)}, or "
        f"{size(small.tiled_wide)} if m and l are float64.",
        f"N = {large.n}: {large.saved:.0f}x less, or {large.saved_wide:.0f}x if m and l are float64.",
        f"The two tables of one tile, S and P, take {size(small.blocks)} for every N.",
        f"Measured from N = {first.n} to {last.n}: standard attention went from {size(first.standard)} to "
        f"{size(last.standard)}; what tiles needed besides their results was {blocks} throughout.",
        f"{blocks} is more than {size(small.blocks)} because NumPy allocates a new array for every operation: S and P "
        "of this tile and of the previous one, the old O, the rescaled O, what is added to it, and the sum.",
        f"In {half.dtype} the saving is {half.saved:.1f}x, in {whole.dtype} {whole.saved:.1f}x (N = {half.n}): 16-bit "
        "results are accumulated in float32 first, and both exist at the end.",
    ]


def draw(record: Memory) -> canvas.Figure:
    figure, (lengths, parts, dtypes) = canvas.panels(1, 3, width=13, height=4.4)
    _draw_lengths(lengths, record)
    _draw_parts(parts, record)
    _draw_dtypes(dtypes, record)
    return figure


def _draw_lengths(ax: canvas.Axes, record: Memory) -> None:
    n, m = [p.n for p in record.predicted], [p.n for p in record.measured]
    ax.plot(n, [p.standard for p in record.predicted], "--", color=canvas.RED, label="standard, 2N² + Nd")
    ax.plot(m, [p.standard for p in record.measured], "s", color=canvas.RED, label="standard, measured")
    ax.plot(n, [p.tiled for p in record.predicted], "--", color=canvas.BLUE, label="tiled, 2B² + 2N + Nd")
    ax.plot(m, [p.tiled for p in record.measured], "o", color=canvas.BLUE, label="tiled, measured")
    ax.plot(m, [p.blocks for p in record.measured], "^", color=canvas.GREEN, label="tiled, without results, measured")
    ax.plot(n, [p.blocks for p in record.predicted], ":", color=canvas.GREEN, label="S and P of a tile, 2B²")
    canvas.doubling(ax, n[::2])
    canvas.in_bytes(ax, 2**12, 2**39)
    canvas.label(ax, "Peak memory of one head, float32", "N")
    canvas.legend(ax, loc="upper left")


def _draw_parts(ax: canvas.Axes, record: Memory) -> None:
    names = [f"{m.n}" for m in record.measured]
    blocks, results = [m.blocks / 1024 for m in record.measured], [m.results / 1024 for m in record.measured]
    ax.bar(names, blocks, color=canvas.GREEN, label="everything else")
    ax.bar(names, results, bottom=blocks, color=canvas.SKY, label="results: out and lse")
    for x, block in enumerate(blocks):
        ax.text(x, block / 2, f"{block:.4g}", ha="center", va="center", fontsize=8.5, color="white", fontweight="bold")
    ax.margins(y=0.25)
    ax.grid(False, axis="x")
    canvas.label(ax, "Tiled, measured", "N", "KiB")
    canvas.legend(ax, loc="upper left")


def _draw_dtypes(ax: canvas.Axes, record: Memory) -> None:
    x = np.arange(len(record.dtypes))
    formulas = [standard_floats(m.n, record.d) * ITEMSIZE[m.dtype] for m in record.dtypes]
    tiled = [tiled_floats(m.n, record.d, record.block) * ITEMSIZE[m.dtype] for m in record.dtypes]
    ax.bar(x - 0.2, [m.standard for m in record.dtypes], 0.36, color=canvas.RED, label="standard, measured")
    ax.bar(x + 0.2, [m.tiled for m in record.dtypes], 0.36, color=canvas.BLUE, label="tiled, measured")
    ax.hlines(formulas, x - 0.4, x, color=canvas.INK, linestyle="--", linewidth=1.2, label="formula")
    ax.hlines(tiled, x, x + 0.4, color=canvas.INK, linestyle="--", linewidth=1.2)
    for at, m in zip(x, record.dtypes, strict=True):
        ax.text(at + 0.2, m.tiled * 1.1, f"{m.saved:.1f}x", ha="center", fontsize=8.5, color=canvas.INK)
    ax.set_xticks(x, [m.dtype for m in record.dtypes])
    ax.grid(False, axis="x")
    canvas.in_bytes(ax, 2**14, 2**25)
    canvas.label(ax, f"By dtype, N = {record.dtypes[0].n}", "above the bars: how many times less")
    canvas.legend(ax, loc="upper left")
