"""Masks on a CPU: calls with spans beside the same call with a band or without a mask, and torch with a dense mask."""

import random
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import numpy as np

import flashtile
from flashtile import masks
from flashtile.lab.bench import records
from flashtile.lab.bench.cases import FORWARD, TRAINING
from flashtile.lab.bench.records import Record
from flashtile.lab.bench.suite import Progress
from flashtile.lab.bench.timing import Call, Ratio, alternate, geometric_mean
from flashtile.lab.bench.workload import OURS, default_threads, set_threads
from flashtile.lab.catalogue.masks import MASKS
from flashtile.spans import Spans

BAND, FULL, DENSE, FLEX = "with the band", "without a mask", "torch SDPA, dense mask", "FlexAttention, compiled"
DIRECTIONS = (FORWARD, TRAINING)
TOKENS = 1 << 20
LINES = 29  # of measurements
COSTS_AT = 8192  # tokens


def missing() -> str | None:
    """Why this cannot run here; None if it can."""
    return None if find_spec("torch") else "torch"


def run(short: bool, seconds: float, progress: Progress = lambda what, done, total: None) -> Record:
    """Measure everything and return the record. `short`: an eighth of the lengths, to see that it works."""
    import torch

    threads = default_threads()
    set_threads(threads)
    record = records.new("masks", short, threads=threads)
    rows = record["measurements"]
    for group, name, n, dim, batch, direction, spans, other in _cases(8 if short else 1):
        progress(f"{name}, {direction}", len(rows), LINES)
        torch.manual_seed(0)
        tensors = [torch.randn(batch, 8, n, dim, requires_grad=direction == TRAINING) for _ in range(3)]
        calls = {OURS: _step(flashtile.attention, tensors, spans=spans[0], **spans[1])}
        share = 1.0
        if group == "dense":
            sdpa = torch.nn.functional.scaled_dot_product_attention
            calls[DENSE] = _step(sdpa, tensors, attn_mask=spans[0].to_mask(n))
            if direction == FORWARD and (flex := _flex(tensors, spans[0], record["absent"])):
                calls[FLEX] = flex
        else:
            calls[BAND if group == "band" else FULL] = _step(flashtile.attention, tensors, **other)
            share = _share(spans, n, batch) if group != "band" else 1.0
        times = alternate(calls, seconds=seconds, min_rounds=3 if short else 9, shuffle=random.Random(0))
        ratios = {peer: Ratio.of(times[OURS], times[peer]).value / share for peer in calls if peer != OURS}
        timed = {peer: x.to_dict() for peer, x in times.items()}
        rows.append(
            {"group": group, "case": name, "direction": direction, "share": share, "times": timed, "ratios": ratios}
        )
    start = np.arange(TOKENS) // 512
    making = alternate({OURS: lambda: masks.documents(start)}, seconds=seconds, max_rounds=20)[OURS]
    rows.append({"group": "making", "case": f"{TOKENS} tokens", "direction": "", "times": {OURS: making.to_dict()}})
    record["costs"] = [{"mask": x.name, "code": x.code, **asdict(x.cost(COSTS_AT))} for x in MASKS]
    record["summary"] = [_line(rows, *goal) for goal in _GOALS]
    return record


def _cases(shrink: int) -> Any:
    """(group, name, length, head dim, batch, direction, (spans, options), the other call's options)."""
    import torch

    for n in (2048 // shrink, 8192 // shrink):
        at = torch.arange(n)
        for dim in (64, 128):
            for direction in DIRECTIONS:
                causal: Any = (Spans(0, at + 1), {})
                yield "band", f"causal N{n} D{dim}", n, dim, 1, direction, causal, {"causal": True}
                window: Any = (Spans(at - 255, at + 1), {})
                yield "band", f"window 256 N{n} D{dim}", n, dim, 1, direction, window, {"window": (255, 0)}
    n = 8192 // shrink
    eight = masks.documents(lengths=torch.full((8,), n // 8))
    short = masks.documents(lengths=torch.full((n * shrink // 256,), 256 // shrink))
    half = masks.padding(torch.tensor([n // 8, n // 4, n * 5 // 8, n]) // 4)
    for direction in DIRECTIONS:
        yield "share", "eight documents", n, 64, 1, direction, (eight, {}), {}
        yield "share", "half of the keys are padding", n // 4, 64, 4, direction, (half, {}), {}
        yield "share", "prefix-LM", n, 64, 1, direction, (masks.prefix_lm(n // 4, n, device="cpu"), {}), {}
        yield "short", "documents of 256", n, 64, 1, direction, (short, {}), {}
        yield "short-causal", "causal documents of 256", n, 64, 1, direction, (short, {"causal": True}), {}
        yield "dense", "eight documents", n, 64, 1, direction, (eight, {}), {}


_GOALS = (
    ("band", FORWARD, "spans equal to a band, forward", BAND, 1.03),
    ("band", TRAINING, "spans equal to a band, forward + backward", BAND, 1.03),
    ("share", FORWARD, "documents, padding, prefix: their share of the pairs, forward", FULL, 1.10),
    ("share", TRAINING, "documents, padding, prefix: their share of the pairs, forward + backward", FULL, 1.10),
    ("short", FORWARD, "documents of 256: their share, forward", FULL, 1.20),
    ("short", TRAINING, "documents of 256: their share, forward + backward", FULL, 1.20),
    ("short-causal", FORWARD, "causal documents of 256: their share, forward", FULL, 1.40),
    ("short-causal", TRAINING, "causal documents of 256: their share, forward + backward", FULL, 1.40),
    ("dense", FORWARD, "eight documents, forward", DENSE, 0.12),
    ("dense", TRAINING, "eight documents, forward + backward", DENSE, 0.15),
    ("dense", FORWARD, "eight documents, forward", FLEX, 0.50),
    ("making", "", "making spans of documents, 1M tokens, ms", "", 50.0),
)


def _line(rows: list[dict[str, Any]], group: str, direction: str, title: str, peer: str, bar: float) -> dict[str, Any]:
    line = records.goal(f"{group} {direction} {peer}".strip(), title, f"time / {peer}" if peer else "ms", bar)
    own = [x for x in rows if x["group"] == group and x["direction"] == direction]
    values = [x["ratios"][peer] for x in own if peer in x.get("ratios", ())]
    if not peer:
        values = [x["times"][OURS]["median_s"] * 1e3 for x in own]
    if values:
        line |= {"value": geometric_mean(values), "worst": max(values), "worst_bar": bar, "holds": max(values) <= bar}
    return line


def _step(function: Callable[..., Any], tensors: list[Any], **options: Any) -> Call:
    """A call, followed by its backward pass if the tensors require gradients."""
    import torch

    if not tensors[0].requires_grad:
        return lambda: function(*tensors, **options)
    dout = torch.ones_like(tensors[0])
    return lambda: torch.autograd.grad(function(*tensors, **options), tensors, dout)


def _flex(tensors: list[Any], spans: Spans, absent: dict[str, str]) -> Call | None:
    """FlexAttention, compiled, with its block mask made beforehand; None if it does not run here."""
    import torch

    begin, end = (x[0, 0, :, 0].long().contiguous() for x in (spans.begin, spans.end))
    try:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        n = tensors[0].shape[2]
        mask = create_block_mask(lambda b, h, i, j: (begin[i] <= j) & (j < end[i]), None, None, n, n, device="cpu")
        compiled: Any = torch.compile(flex_attention)
        compiled(*tensors, block_mask=mask)
    except Exception as error:  # of torch's compiler, its C++ compiler, or an old torch
        absent[FLEX] = str(error).partition("\n")[0][:200]
        return None
    return lambda: compiled(*tensors, block_mask=mask)


def _share(spans: tuple[Spans, dict[str, Any]], n: int, batch: int) -> float:
    """The share of all pairs that is visible."""
    limits = Spans.of(spans[0].limits.numpy())
    shape = (batch, 1, n, 1)
    return flashtile.plan(shape, shape, backend="tiles", spans=limits, **spans[1]).pairs / (batch * n * n)
