"""The KV cache: its bytes per token, when it fills a GPU, what grouped heads save, and decoding from it."""

from dataclasses import dataclass
from functools import partial

import numpy as np

import flashtile
from flashtile.band import ceil_div
from flashtile.cost.hardware import Rates
from flashtile.lab.bench.suite import time_all
from flashtile.lab.bench.timing import Call, alternate
from flashtile.lab.bench.workload import NAIVE_NUMPY, OURS
from flashtile.lab.catalogue import chips, models
from flashtile.lab.studies import canvas, hierarchy
from flashtile.lab.studies.study import Table, samples
from flashtile.lab.units import quantity, seconds, size
from flashtile.numerics.dtypes import Array

TITLE = "The KV cache"
QUESTION = "How much memory does a token take, and when does that exceed a GPU?"
MODELS = ("llama-2-7b", "llama-3-8b", "llama-3-70b", "llama-3-405b", "qwen2.5-7b", "deepseek-v3")
GPU, DTYPE, LONG = "h100", "bfloat16", 1 << 20
GROUPED = "llama-3-8b"  # one of its layers is measured, with its key heads and with one key head per query head
DECODED = (4 << 10, 8 << 10, 16 << 10, 32 << 10)


@dataclass(frozen=True, slots=True)
class Cache:
    """The KV cache of one sequence of a model."""

    model: str
    heads: int
    kv_heads: int
    per_token: int  # bytes, all layers
    fills: int  # tokens that fill an otherwise empty GPU
    gpus: int  # that a long context fills


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt through one layer, with a key head per query head or per group, standard or tiled."""

    way: str
    kv_heads: int
    cache: int  # bytes of keys and values
    scores: int  # bytes of scores stored
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.way}, {self.kv_heads} key heads"


@dataclass(frozen=True, slots=True)
class Decode:
    """One new token against a cache."""

    tokens: int
    bytes: int
    seconds: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Record:
    gpu: str
    gpu_bytes: int
    dtype: str
    long: int  # tokens
    caches: tuple[Cache, ...]
    tokens: int  # in the prompt
    heads: int
    prompts: tuple[Prompt, ...]
    rates: Rates
    decodes: tuple[Decode, ...]

    @property
    def before(self) -> Prompt:
        return next(p for p in self.prompts if p.way == "standard" and p.kv_heads == self.heads)

    @property
    def after(self) -> Prompt:
        return next(p for p in self.prompts if p.way != "standard" and p.kv_heads < self.heads)


def compute(quick: bool = False) -> Record:
    chip, tokens = chips()[GPU], 256 if quick else 1024
    room = chip.memory_gib << 30
    return Record(
        gpu=chip.name,
        gpu_bytes=room,
        dtype=DTYPE,
        long=LONG,
        caches=tuple(_cache(name, room) for name in MODELS),
        tokens=tokens,
        heads=models()[GROUPED].heads,
        prompts=_prompts(tokens, 0.05 if quick else 1.0),
        rates=hierarchy.this_machine(quick).rates,
        decodes=tuple(_decode(n, 0.02 if quick else 0.2) for n in (DECODED[:2] if quick else DECODED)),
    )


def _cache(name: str, room: int) -> Cache:
    model = models()[name]
    per_token = model.kv_bytes_a_token(DTYPE)
    gpus = ceil_div(model.kv_bytes(LONG, DTYPE), room)
    return Cache(name, model.heads, model.kv_heads, per_token, room // per_token, gpus)


def _prompts(n: int, time: float) -> tuple[Prompt, ...]:
    model, found = models()[GROUPED], []
    for kv_heads in (model.heads, model.kv_heads):
        given = samples((model.heads, n, model.dim), *((kv_heads, n, model.dim),) * 2, dtype=np.float32)
        calls: dict[str, Call] = {OURS: partial(flashtile.attention, *given), NAIVE_NUMPY: partial(standard, *given)}
        times, cache = time_all(calls, time / 2, min_rounds=1), given[1].nbytes + given[2].nbytes
        scores = model.heads * n * n * given[0].itemsize
        found.append(Prompt("standard", kv_heads, cache, scores, times[NAIVE_NUMPY].median))
        found.append(Prompt("flashtile", kv_heads, cache, 0, times[OURS].median))
    return tuple(found)


def standard(q: Array, k: Array, v: Array) -> Array:
    """Standard attention in three lines of NumPy, with the heads of a group side by side."""
    grouped = q.reshape(len(k), -1, *q.shape[1:])
    S = grouped @ k[:, None].swapaxes(-1, -2) * np.float32(q.shape[-1] ** -0.5)
    P = np.exp(S - S.max(axis=-1, keepdims=True))
    out: Array = P / P.sum(axis=-1, keepdims=True) @ v[:, None]
    return out.reshape(q.shape)


def _decode(tokens: int, time: float) -> Decode:
    """Time one new token with a quarter of the heads: a whole layer's cache would take long to create."""
    model = models()[GROUPED]
    heads, kv_heads = model.heads // 4, model.kv_heads // 4
    q, k, v = samples((heads, 1, model.dim), *((kv_heads, tokens, model.dim),) * 2, dtype=np.float32)
    taken = alternate({"decode": lambda: flashtile.attention(q, k, v)}, seconds=time)["decode"].median
    moved = k.nbytes + v.nbytes
    return Decode(tokens, moved, taken, moved / taken)


def tables(r: Record) -> list[Table]:
    return [
        Table(
            f"KV cache of one sequence, {r.dtype}, and the {size(r.gpu_bytes)} of an {r.gpu}",
            ("model", "heads / key heads", "bytes per token", "tokens that fill it", f"GPUs for {r.long:,}"),
            tuple(
                (c.model, f"{c.heads} / {c.kv_heads}", size(c.per_token), f"{c.fills:,}", f"{c.gpus}") for c in r.caches
            ),
        ),
        Table(
            f"A prompt of {r.tokens:,} tokens through one layer of {r.heads} heads, float32, measured here",
            ("attention", "keys and values", "scores stored", "time"),
            tuple(
                (p.name, size(p.cache), size(p.scores) if p.scores else "none", seconds(p.seconds)) for p in r.prompts
            ),
        ),
        Table(
            f"Decoding: one new token against a cache; memory delivers {quantity(r.rates.bytes, 'B/s')} at best",
            ("cached tokens", "keys and values", "time", "bytes per second"),
            tuple(
                (f"{d.tokens:,}", size(d.bytes), seconds(d.seconds), quantity(d.bytes_per_second, "B/s"))
                for d in r.decodes
            ),
        ),
    ]


def findings(r: Record) -> list[str]:
    first, second = r.caches[:2]
    largest, d = max(r.caches, key=lambda c: c.per_token), r.decodes[-1]
    return [
        f"A token of {first.model} takes {size(first.per_token)} in the cache, one of {second.model} "
        f"{size(second.per_token)}: {second.kv_heads} key heads serve {second.heads} query heads.",
        f"{largest.model} fills an {r.gpu} with {largest.fills:,} tokens, not counting any weights. {r.long:,} tokens "
        f"take {largest.gpus} GPUs.",
        f"Grouped heads make the cache {r.before.cache // r.after.cache} times smaller and do not change the scores. "
        "Tiles store no scores and do not change the cache. Both together: "
        f"{size(r.after.cache)} and no scores instead of {size(r.before.cache)} and {size(r.before.scores)}, "
        f"{seconds(r.after.seconds)} instead of {seconds(r.before.seconds)}.",
        f"A new token reads the whole cache once and computes little: with {d.tokens:,} tokens it reads "
        f"{quantity(d.bytes_per_second, 'B/s')} of the {quantity(r.rates.bytes, 'B/s')} that memory delivers here.",
    ]


def draw(r: Record) -> canvas.Figure:
    figure, (prompts, decodes) = canvas.panels(1, 2, width=12, height=4.0)
    _draw_prompts(prompts, r)
    _draw_decodes(decodes, r)
    return figure


def _draw_prompts(ax: canvas.Axes, r: Record) -> None:
    names = [f"{p.name}\n{seconds(p.seconds)}" for p in r.prompts]
    caches = [p.cache for p in r.prompts]
    ax.barh(names, caches, color=canvas.BLUE, height=0.6, label="keys and values")
    ax.barh(names, [p.scores for p in r.prompts], left=caches, color=canvas.ORANGE, height=0.6, label="scores stored")
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    most = max(p.cache + p.scores for p in r.prompts)
    step = 1 << (most // 4).bit_length()
    ax.set_xticks(range(0, most + 1, step), [size(n) for n in range(0, most + 1, step)])
    ax.set_xlim(0, most * 1.05)
    canvas.label(ax, f"One layer, a prompt of {r.tokens:,} tokens: bytes, and time", "bytes")
    canvas.legend(ax, loc="lower right")


def _draw_decodes(ax: canvas.Axes, r: Record) -> None:
    tokens = [d.tokens for d in r.decodes]
    ideal = [d.bytes / r.rates.bytes for d in r.decodes]
    ax.plot(tokens, [d.seconds for d in r.decodes], "o-", color=canvas.BLUE, label="flashtile, measured")
    ax.plot(tokens, ideal, ":", color=canvas.MUTED, label="the cache read once, at the best rate measured")
    canvas.doubling(ax, tokens)
    ax.set_ylim(0, 1.35 * max(*ideal, *(d.seconds for d in r.decodes)))
    ax.yaxis.set_major_formatter(lambda value, _: seconds(value) if value else "0")
    canvas.label(ax, "One new token against a cache", "cached tokens", "time")
    canvas.legend(ax, loc="upper left")
