"""Study 6: the same formulas at the size of real models: 8K, 32K, 128K tokens and beyond."""

from dataclasses import dataclass

from flashtile import plan
from flashtile.band import full
from flashtile.cost.traffic import Layout, count
from flashtile.lab.catalogue import chips, models
from flashtile.lab.studies import canvas
from flashtile.lab.studies.memory import block_floats
from flashtile.lab.studies.study import Table
from flashtile.lab.units import short, size
from flashtile.numerics.dtypes import ITEMSIZE
from flashtile.numerics.schedule import Grid, fa2_forward

TITLE = "At the size of real models"
QUESTION = "How much memory would the scores of a real model take at 8K, 32K, 128K tokens, and how much do tiles take?"
CONTEXTS = (8 << 10, 32 << 10, 128 << 10, 512 << 10, 1 << 20)
D, BLOCK, DTYPE = 128, 64, "float16"
MODELS = ("llama-2-7b", "llama-3-8b", "llama-3-70b", "llama-3-405b", "qwen2.5-7b")
CHIPS = ("rtx-4090", "h200")


@dataclass(frozen=True, slots=True)
class Context:
    """Bytes of one head of one layer."""

    n: int
    scores: int  # the score matrix that is never built
    blocks: int  # S and P of one tile
    sram: int  # everything in the fast memory: also Q, K, V, O and the statistics of one tile
    output: int
    statistics: int  # the log-sum-exp of every row, float32

    @property
    def results(self) -> int:
        return self.output + self.statistics

    @property
    def saved(self) -> float:
        return self.scores / (self.blocks + self.results)


@dataclass(frozen=True, slots=True)
class Layer:
    """Bytes of a model at a context: for one layer with all its heads, and the KV cache of all layers."""

    n: int
    scores: int
    results: int
    kv_cache: int


@dataclass(frozen=True, slots=True)
class Scaled:
    model: str
    layers: int
    heads: int
    kv_heads: int
    dim: int
    contexts: tuple[Layer, ...]


@dataclass(frozen=True, slots=True)
class Models:
    d: int
    block: int
    dtype: str
    contexts: tuple[Context, ...]
    models: tuple[Scaled, ...]
    memories: dict[str, int]  # of some GPUs, in bytes

    @property
    def holds(self) -> bool:
        """Whether the memory of a tile is independent of the context."""
        return len({(c.blocks, c.sram) for c in self.contexts}) == 1


def compute(quick: bool = False) -> Models:  # always quick
    contexts = tuple(_context(n) for n in CONTEXTS)
    return Models(
        D,
        BLOCK,
        DTYPE,
        contexts,
        tuple(_scaled(name, contexts) for name in MODELS),
        {chips()[name].name: chips()[name].memory_gib << 30 for name in CHIPS},
    )


def _context(n: int) -> Context:
    shape, item = (1, 1, n, D), ITEMSIZE[DTYPE]
    planned = plan(shape, shape, DTYPE)
    row = Grid(BLOCK, n, BLOCK, BLOCK)  # all rows of tiles are alike, and each holds the most at its end
    sram = sum(count(fa2_forward(full(), row), row, Layout(D, D, DTYPE)).sram_bytes.values())
    return Context(n, planned.score_bytes, item * block_floats(BLOCK), sram, item * n * D, planned.lse_bytes)


def _scaled(name: str, contexts: tuple[Context, ...]) -> Scaled:
    model, item = models()[name], ITEMSIZE[DTYPE]
    layers = tuple(
        Layer(
            c.n,
            model.heads * c.scores,
            model.heads * (item * c.n * model.dim_v + c.statistics),
            model.kv_bytes(c.n, DTYPE),
        )
        for c in contexts
    )
    return Scaled(name, model.layers, model.heads, model.kv_heads, model.dim, layers)


def tables(record: Models) -> list[Table]:
    return [
        Table(
            f"One head of one layer, {record.dtype}, d = {record.d}, blocks of {record.block}",
            ("context", "score matrix", "S and P of a tile", "all of a tile", "output", "lse", "saved"),
            tuple(
                (
                    short(c.n),
                    *(size(x) for x in (c.scores, c.blocks, c.sram, c.output, c.statistics)),
                    f"{c.saved:,.0f}x",
                )
                for c in record.contexts
            ),
        ),
        Table(
            "Score matrices of one layer, all heads, never built",
            ("model", *(short(c.n) for c in record.contexts)),
            tuple((m.model, *(size(layer.scores) for layer in m.contexts)) for m in record.models),
        ),
        Table(
            "Output and lse of one layer, all heads",
            ("model", *(short(c.n) for c in record.contexts)),
            tuple((m.model, *(size(layer.results) for layer in m.contexts)) for m in record.models),
        ),
        Table(
            "KV cache, all layers",
            ("model", *(short(c.n) for c in record.contexts)),
            tuple((m.model, *(size(layer.kv_cache) for layer in m.contexts)) for m in record.models),
        ),
    ]


def findings(record: Models) -> list[str]:
    at = next(c for c in record.contexts if c.n == 128 << 10)
    last = record.contexts[-1]
    model = next(m for m in record.models if m.model == "llama-3-8b")
    layer = next(layer for layer in model.contexts if layer.n == at.n)
    name, room = max(record.memories.items(), key=lambda item: item[1])
    return [
        f"At {short(at.n)} tokens in {record.dtype} the score matrix takes {size(at.scores)} per head and layer.",
        f"Tiled: {size(at.blocks)} of blocks, and {size(at.results)} ({at.results / 1e6:.0f} MB) of output and "
        "statistics, which grow with N, not with its square.",
        f"At {short(last.n)} tokens the blocks still take {size(last.blocks)}. With the results, that is "
        f"{last.saved:,.0f}x less than the score matrix.",
        f"All {model.heads} heads of one layer of {model.model} at {short(at.n)} would need "
        f"{size(layer.scores)} of scores; an {name} has {size(room)}.",
        f"The KV cache does grow: {size(layer.kv_cache)} there. Fewer key heads shrink it; tiles do not.",
    ]


def draw(record: Models) -> canvas.Figure:
    figure, (head, whole) = canvas.panels(1, 2, width=13, height=4.8)
    _draw_head(head, record)
    _draw_models(whole, record)
    return figure


def _draw_head(ax: canvas.Axes, record: Models) -> None:
    n = [c.n for c in record.contexts]
    ax.plot(n, [c.scores for c in record.contexts], "s-", color=canvas.RED, label="score matrix, 2N² bytes")
    ax.plot(n, [c.results for c in record.contexts], "o-", color=canvas.BLUE, label="tiled: output and lse")
    ax.plot(n, [c.sram for c in record.contexts], "^-", color=canvas.ORANGE, label="tiled: all of one tile")
    ax.plot(n, [c.blocks for c in record.contexts], "v-", color=canvas.GREEN, label="tiled: S and P of one tile")
    canvas.doubling(ax, n)
    canvas.in_bytes(ax, 2**12, 2**47)
    _draw_memories(ax, record)
    canvas.label(ax, f"One head of one layer, {record.dtype}, d = {record.d}", "context")
    canvas.legend(ax, loc="upper left", ncols=2)


def _draw_models(ax: canvas.Axes, record: Models) -> None:
    names, contexts = [m.model for m in record.models], record.contexts[:3] + record.contexts[-1:]
    width = 0.8 / len(contexts)
    colours = (canvas.SKY, canvas.BLUE, canvas.ORANGE, canvas.RED)
    for at, (context, colour) in enumerate(zip(contexts, colours, strict=True)):
        scores = [next(layer.scores for layer in m.contexts if layer.n == context.n) for m in record.models]
        caches = [next(layer.kv_cache for layer in m.contexts if layer.n == context.n) for m in record.models]
        x = [n + (at - (len(contexts) - 1) / 2) * width for n in range(len(names))]
        ax.bar(x, scores, width * 0.9, color=colour, label=short(context.n))
        ax.plot(
            x, caches, "_", color=canvas.INK, markersize=9, markeredgewidth=2, label="KV cache" if at == 0 else None
        )
    ax.set_xticks(range(len(names)), names)
    ax.grid(False, axis="x")
    canvas.in_bytes(ax, 2**28, 2**54)
    _draw_memories(ax, record)
    canvas.label(ax, "Scores of one layer, all heads: never built")
    canvas.legend(ax, loc="upper left", ncols=4)


def _draw_memories(ax: canvas.Axes, record: Models) -> None:
    for (name, room), style in zip(record.memories.items(), (":", "--"), strict=True):
        ax.axhline(room, color=canvas.INK, linewidth=1.2, linestyle=style, label=name)
