"""Contenders on a GPU: flashtile and the libraries in common use, each in its preferred layout.

The CPU suite's contenders (bench/workload.py) are plain calls; these also check rows, lay out tensors and compile.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import flashtile
from flashtile.lab.bench.gpu.rows import DECODE, DTYPE, STEP, TRAIN, Row
from flashtile.lab.bench.memory import BACKWARD
from flashtile.lab.bench.timing import Call
from flashtile.lab.bench.workload import OURS as OURS

CUDNN, SDPA_FLASH, FLEX = "cuDNN", "SDPA flash", "FlexAttention"
PORTABLE = "flashtile, Triton"  # the portable kernels, if others are the default
ORDERED = "flashtile, deterministic"  # deterministic=True, if that costs time
WIDE = "flashtile, bfloat16"  # the numbers of 8-bit tensors in bfloat16
OURSELVES = (PORTABLE, ORDERED, WIDE)  # our own variants
FA2, FA3, FA4 = "FlashAttention-2", "FlashAttention-3", "FlashAttention-4"
SDPA_BACKENDS = {CUDNN: "CUDNN_ATTENTION", SDPA_FLASH: "FLASH_ATTENTION"}
FA4_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"  # "1": compiled kernels stay on disk; read at its import
FLASH_MODULES = {FA2: "flash_attn", FA3: "flash_attn_interface", FA4: "flash_attn.cute"}


class UnfitError(Exception):
    """A peer does not support a row."""


class Tensors(NamedTuple):
    """One set of inputs, all (batch, heads, n, dim), and the starts of packed sequences."""

    q: Any
    k: Any
    v: Any
    dout: Any
    cu: Any  # int32; None if nothing is packed


def tensors(row: Row, device: str, seed: int) -> Tensors:
    """Create random inputs: zeros would run faster than real data."""
    import torch

    c = row.case
    rng = torch.Generator(device).manual_seed(seed)
    queries, keys = c.shapes
    drawn, kind = getattr(torch, DTYPE if row.eight_bits else c.dtype), getattr(torch, c.dtype)

    def make(shape: tuple[int, ...]) -> Any:
        return torch.randn(shape, generator=rng, device=device, dtype=drawn).to(kind)

    cu = torch.tensor(row.starts, device=device, dtype=torch.int32) if row.lengths else None
    return Tensors(make(queries), make(keys), make(keys), make(queries) if row.supports_backward else None, cu)


class Layout(NamedTuple):
    """A library's layout for (batch, heads, n, dim), and the conversion of its results back."""

    lay: Callable[[Any], Any]
    back: Callable[[Any, int], Any]  # takes a result and the batch size


HEADS_FIRST = Layout(lambda x: x, lambda x, batch: x)
ROWS_FIRST = Layout(lambda x: x.transpose(1, 2).contiguous(), lambda x, batch: x.transpose(1, 2))
PACKED = Layout(
    lambda x: x.transpose(1, 2).flatten(0, 1).contiguous(), lambda x, batch: x.unflatten(0, (batch, -1)).transpose(1, 2)
)

Forward = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class Contender:
    """A peer on one row: a call for every set of inputs, which share no memory."""

    calls: tuple[Call, ...]
    context: Callable[[], AbstractContextManager[Any]]
    result: Callable[[], tuple[Any, ...]]  # of the first set, as (batch, heads, n, dim) each

    def repeated(self, times: int) -> Call:
        """That many calls in one, cycling through the sets of inputs."""

        def run() -> None:
            with self.context():
                for n in range(times):
                    self.calls[n % len(self.calls)]()

        return run


@dataclass(frozen=True)
class Peer:
    """A library: whether it is installed, and how it computes a row, for which `build` may raise UnfitError."""

    name: str
    build: Callable[[Row, Tensors], tuple[Layout, Forward]]
    missing: Callable[[], str | None] = lambda: None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    compiles: Callable[[], bool] = lambda: False  # and keeps compiled kernels on disk

    def prepare(self, row: Row, sets: Sequence[Tensors]) -> Contender:
        """Prepare the calls of a row: forward as in inference, backward of a finished forward pass, or both in one."""
        layout, forward = self.build(row, sets[0])
        with self.context():
            calls = tuple(_call(row, given, layout, forward) for given in sets)

        def result() -> tuple[Any, ...]:
            with self.context():
                results = calls[0]()
            return tuple(
                layout.back(x.detach(), row.case.batch) for x in (results if row.supports_backward else (results,))
            )

        return Contender(calls, self.context, result)


def _call(row: Row, given: Tensors, layout: Layout, forward: Forward) -> Call:
    import torch

    leaves = tuple(layout.lay(x).detach().requires_grad_(row.supports_backward) for x in given[:3])
    if not row.supports_backward:
        return partial(forward, *leaves)
    dout = layout.lay(given.dout)
    if row.case.direction == STEP:
        return lambda: torch.autograd.grad(forward(*leaves), leaves, dout)
    return partial(torch.autograd.grad, forward(*leaves), leaves, dout, retain_graph=True)


def _ours(row: Row, given: Tensors, **more: Any) -> tuple[Layout, Forward]:
    options = {**row.case.options, **more}
    if row.eight_bits:
        options["descale"] = _descale(row, given)
    if given.cu is not None:
        return PACKED, lambda q, k, v: flashtile.attention_packed(q, k, v, given.cu, given.cu, **options)
    return HEADS_FIRST, lambda q, k, v: flashtile.attention(q, k, v, **options)


def _descale(row: Row, given: Tensors) -> tuple[Any, Any, Any]:
    """Factors of q, k and v: ones, which cost the same as others."""
    import torch

    one = torch.ones(row.case.batch, row.case.kv_heads, device=given.q.device)
    return one, one, one


def _portable(row: Row, given: Tensors) -> tuple[Layout, Forward]:
    _no_eight_bits(row)
    if row.suite != TRAIN:
        raise UnfitError(f"{OURS} runs the same here")
    return _ours(row, given, backend="triton")


def _ordered(row: Row, given: Tensors) -> tuple[Layout, Forward]:
    if row.case.direction != BACKWARD or row.suite != TRAIN:
        raise UnfitError("it is for gradients")
    return _ours(row, given, deterministic=True)


def _wide(row: Row, given: Tensors) -> tuple[Layout, Forward]:
    """Attention of tensors widened ahead of time, which is not timed."""
    if not row.eight_bits:
        raise UnfitError("it is for rows of 8-bit tensors")
    _, forward = _ours(replace(row, case=replace(row.case, dtype=DTYPE)), given)
    return Layout(lambda x: x.bfloat16(), lambda x, batch: x), forward


def _no_eight_bits(row: Row) -> None:
    if row.eight_bits:
        raise UnfitError("it takes no 8-bit tensors")


def _no_others() -> str | None:
    """Why only the portable kernels can run here; None if others can."""
    from flashtile.backends import gluon

    return gluon.missing()


def _sdpa(row: Row, given: Tensors) -> tuple[Layout, Forward]:
    from torch.nn.functional import scaled_dot_product_attention

    _no_eight_bits(row)
    if row.lengths or row.window is not None:
        raise UnfitError("it takes no packed sequences" if row.lengths else "it takes no window")
    grouped: dict[str, Any] = {"enable_gqa": True} if row.case.heads != row.case.kv_heads else {}
    return HEADS_FIRST, partial(scaled_dot_product_attention, is_causal=row.causal, **grouped)


def _sdpa_kernel(name: str) -> AbstractContextManager[Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen: AbstractContextManager[Any] = sdpa_kernel(getattr(SDPBackend, SDPA_BACKENDS[name]))
    return chosen


def _flex(row: Row, given: Tensors) -> tuple[Layout, Forward]:
    import torch
    from torch._functorch import config
    from torch.nn.attention.flex_attention import flex_attention

    _no_eight_bits(row)
    config.donated_buffer = False  # else only one backward pass could follow a forward pass
    torch._dynamo.reset()  # each row is compiled for its own shape, and dynamo would stop after a few
    run = torch.compile(flex_attention, dynamic=False)
    return HEADS_FIRST, partial(run, block_mask=_block_mask(row, given), enable_gqa=row.case.heads != row.case.kv_heads)


def _block_mask(row: Row, given: Tensors) -> Any:
    """The band as a FlexAttention block mask; None if every query sees every key."""
    import torch
    from torch.nn.attention.flex_attention import and_masks, create_block_mask

    rules: list[Callable[..., Any]] = []
    if row.causal:
        rules.append(lambda b, h, i, j: i >= j)
    if (window := row.window) is not None:
        rules.append(lambda b, h, i, j: i - j < window)
    if given.cu is not None:
        numbers = torch.arange(len(row.lengths), device=given.q.device)
        sequence = numbers.repeat_interleave(torch.tensor(row.lengths, device=given.q.device))
        rules.append(lambda b, h, i, j: sequence[i] == sequence[j])
    if not rules:
        return None
    return create_block_mask(and_masks(*rules), None, None, row.case.n_q, row.case.n_k, device=given.q.device)


def _flash_attn(name: str, row: Row, given: Tensors) -> tuple[Layout, Forward]:
    """flash_attn's three generations, which differ in details: the value for no limit, and splitting a cache."""
    import torch

    module = import_module(FLASH_MODULES[name])
    no_limit = None if name == FA4 else -1
    limits = (no_limit, no_limit) if row.window is None else (row.window - 1, 0)
    options: dict[str, Any] = {"causal": row.causal, "window_size": limits}
    if row.suite == DECODE:
        if cached := getattr(module, "flash_attn_with_kvcache", None):
            return ROWS_FIRST, partial(_first, cached, options)
        options["num_splits"] = 0  # chosen by the library
    whole = getattr(module, "flash_attn_func", None)
    if "q_descale" not in inspect.signature(whole or module.flash_attn_varlen_func).parameters:
        _no_eight_bits(row)
    elif row.eight_bits:
        options |= dict(zip(("q_descale", "k_descale", "v_descale"), _descale(row, given), strict=True))
    if whole is not None and given.cu is None:
        return ROWS_FIRST, partial(_first, whole, options)
    starts_q = starts_k = given.cu
    if given.cu is None:  # a build for packed sequences only
        n_q, n_k, batch = row.case.n_q, row.case.n_k, row.case.batch
        starts_q, starts_k = (
            torch.arange(0, (batch + 1) * n, n, device=given.q.device, dtype=torch.int32) for n in (n_q, n_k)
        )
    options |= {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k}
    options["max_seqlen_q"] = max(row.lengths, default=row.case.n_q)
    options["max_seqlen_k"] = max(row.lengths, default=row.case.n_k)
    return PACKED, partial(_first, module.flash_attn_varlen_func, options)


def _first(function: Callable[..., Any], options: dict[str, Any], q: Any, k: Any, v: Any) -> Any:
    """The output, without an lse that some return too."""
    result = function(q, k, v, **options)
    return result[0] if isinstance(result, tuple) else result


@cache
def _not_importable(name: str) -> str | None:
    try:
        module = import_module(FLASH_MODULES[name])
    except Exception as error:  # a build for another torch can fail in any way
        return f"{FLASH_MODULES[name]} cannot be imported: {short_error(error)}"
    if hasattr(module, "flash_attn_func") or hasattr(module, "flash_attn_varlen_func"):
        return None
    return f"{FLASH_MODULES[name]} has no attention function"  # FlashAttention-4 alone leaves an empty flash_attn


PEERS = (
    Peer(OURS, _ours, compiles=lambda: True),
    Peer(PORTABLE, _portable, _no_others, compiles=lambda: True),
    Peer(ORDERED, _ordered, _no_others, compiles=lambda: True),
    Peer(WIDE, _wide, compiles=lambda: True),
    *(Peer(name, _sdpa, context=partial(_sdpa_kernel, name)) for name in SDPA_BACKENDS),
    Peer(FLEX, _flex, compiles=lambda: True),
    *(
        Peer(
            name,
            partial(_flash_attn, name),
            partial(_not_importable, name),
            compiles=(lambda: os.environ.get(FA4_CACHE) == "1") if name == FA4 else lambda: False,
        )
        for name in FLASH_MODULES
    ),
)
NAMES = tuple(peer.name for peer in PEERS)


def available(wanted: Iterable[str] = ()) -> tuple[list[Peer], dict[str, str]]:
    """The peers that can be timed here, always including ours, and why the others cannot."""
    names = {OURS, *wanted} if wanted else set(NAMES)
    absent = {p.name: reason for p in PEERS if p.name in names and (reason := p.missing()) is not None}
    return [p for p in PEERS if p.name in names and p.name not in absent], absent


def short_error(error: BaseException) -> str:
    """An error in one short line."""
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line.strip()}"[:200]
