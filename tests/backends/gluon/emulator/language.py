"""The functions of Triton and Gluon in plain Python, and kernels rebuilt from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import getsource
from textwrap import dedent
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from triton.experimental.gluon.language.nvidia import hopper

from flashtile.backends.gluon import compatibility, ptx
from flashtile.backends.gpu import pdl
from tests.backends.gluon.emulator import processor
from tests.backends.gluon.emulator.processor import MBARRIER, WAITED, WRITTEN, Barriers, Role, Shared, me, turns
from tests.backends.gluon.emulator.registers import TORCH, Block, MisuseError, Number, Pointer, as_tensor, as_torch

# ---- arithmetic ----


def _either(of_numbers: Callable[..., Any], of_blocks: Callable[..., Any]) -> Callable[..., Any]:
    def word(a: Any, b: Any) -> Any:
        if isinstance(a, Block) or isinstance(b, Block):
            x, y = as_tensor(a), as_tensor(b)
            return Block(of_blocks(x, y.to(x.dtype) if not y.ndim else y))
        return _to_tensor(of_numbers(a, b))

    return word


def _where(condition: Any, a: Any, b: Any) -> Any:
    if not any(isinstance(x, Block) for x in (condition, a, b)):
        return _to_tensor(a if condition else b)
    a, b = as_torch(a), as_torch(b)
    return Block(torch.where(as_tensor(condition).to(torch.bool), a, b))


def _alone(op: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return lambda x: Block(op(x.x))


def _largest(x: Block, axis: int) -> Block:
    return Block(_without_nan(x.x).amax(axis))


def _without_nan(x: torch.Tensor) -> torch.Tensor:
    """A GPU's maximum ignores NaN. The maximum of NaN alone is NaN there; here it is -inf."""
    return torch.where(x.isnan(), -torch.inf, x) if x.is_floating_point() else x


def _cast(x: Any, dtype: Any, bitcast: bool = False) -> Any:
    return (x if isinstance(x, Number | Block) else Number(x)).to(dtype, bitcast=bitcast)


def _full(shape: Any, x: Any, dtype: Any, layout: Any = None) -> Block:
    return Block(torch.full([int(n) for n in shape], as_torch(x), dtype=TORCH[dtype]))


def _to_tensor(x: Any) -> Any:
    return Block(torch.tensor(x, dtype=torch.float32)) if isinstance(x, float) else Number(x)


def _split(x: Block) -> tuple[Block, Block]:
    return Block(x.x[..., 0]), Block(x.x[..., 1])


# ---- memory ----


def _atomic_add(pointer: Pointer, x: Any, sem: str = "acq_rel") -> Any:
    role = me()
    role.pause()
    role.not_after(WAITED)
    if sem == "relaxed":
        role.program.launch.relaxed.add(pointer.address)
    found = pointer.read()
    pointer.write(found + x)
    return found


def _allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
    return Barriers.allocate(shape[0]) if layout is MBARRIER else Shared.allocate(dtype, shape, layout)


class _Layout:
    """Stands for layouts, which the emulator ignores, except for those made outside of kernels."""

    def __call__(self, *_: Any, **__: Any) -> None:
        return None

    get_default_for = __call__


# ---- roles ----


def _warp_specialize(parts: list[tuple[Any, tuple[Any, ...]]], warps: list[int], _registers: list[int]) -> None:
    """The first part runs on the warps that the program began with."""
    mine = me()
    (first, args), *others = parts
    left = set[int]()
    for n, ((work, given), count) in enumerate(zip(others, warps, strict=True), 1):

        def live(work: Any = work, given: Any = given, n: int = n) -> None:
            work(*given)
            me().end()
            left.add(n)

        turns().add(f"{mine.program.name} {work.__name__} {n}", live, Role(mine.program, count))
    first(*args)
    mine.end()
    mine.pause(lambda: len(left) == len(others), "the end of its other roles")


# ---- assembly ----


def _follow_growth(share: Block, m: Block, most: int) -> tuple[Block, Block]:
    """ptx.follow_growth()."""
    largest = _without_nan(share.x).amax(1, keepdim=True).expand(share.x.shape)
    power = ((largest.contiguous().view(torch.int32) >> 23).clamp(max=253) - 127).float()
    power = torch.where(largest > 2.0**most, power, 0.0)
    return Block(torch.exp2(-power)), Block(m.x + power)


def _pack(*parts: torch.Tensor) -> Block:
    """Pack numbers of a few bits into one integer, the first in its lowest bits."""
    bits = 32 // len(parts)
    whole = {16: torch.int16, 8: torch.int8}[bits]
    words_ = [(x.view(whole).to(torch.int32) & (1 << bits) - 1) << bits * n for n, x in enumerate(parts)]
    return Block(torch.stack(words_).sum(0).to(torch.int32))


def _pack_quarters(*parts: Block) -> Block:
    return _pack(*(x.x.clamp(-448, 448).to(torch.float8_e4m3fn) for x in parts))


def _pack_halves(low: Block, high: Block, dtype: Any) -> Block:
    return _pack(low.x.to(TORCH[dtype]), high.x.to(TORCH[dtype]))


def _reciprocal(x: Block) -> Block:
    found = 1 / x.x
    return Block(torch.where(found.abs() < torch.finfo(torch.float32).tiny, 0.0, found))


def _await_count(counter: Pointer, count: int, _rest: int) -> None:
    """Counts are unsigned. What a previous kernel did before it counts must be visible."""
    before = me().program.launch.before
    me().pause(lambda: int(counter.read()) % 2**32 >= int(count) % 2**32, f"{count} at a counter")
    if before is not None and counter.address in before.relaxed:
        raise MisuseError("a counter of the kernel before, which does not release what it counts")


def _nothing(*_: Any) -> None:
    return None


LANGUAGE = SimpleNamespace(
    **{name: getattr(tl, name) for name in ("int8", "int16", "int32", "int64")},
    **{name: getattr(tl, name) for name in ("float16", "bfloat16", "float32", "float64", "float8e4nv")},
    minimum=_either(min, torch.fmin),
    maximum=_either(max, torch.fmax),
    where=_where,
    cdiv=lambda a, b: (a + (b - 1)) // b if isinstance(a, Block) else (Number(a) + (b - 1)) // b,
    cast=_cast,
    to_tensor=_to_tensor,
    exp2=_alone(torch.exp2),
    log2=_alone(torch.log2),
    abs=_alone(torch.abs),
    sum=lambda x, axis: Block(x.x.sum(axis)),
    max=_largest,
    arange=lambda begin, end, layout=None: Block(torch.arange(begin, end, dtype=torch.int32)),
    zeros=lambda shape, dtype, layout=None: _full(shape, 0, dtype),
    zeros_like=lambda x: Block(torch.zeros_like(x.x)),
    full=_full,
    reshape=lambda x, shape: Block(x.x.reshape([int(n) for n in shape])),
    permute=lambda x, order: Block(x.x.permute(order)),
    join=lambda x, y: Block(torch.stack((x.x, y.x), -1)),
    split=_split,
    convert_layout=lambda x, layout, assert_trivial=False: x,
    load=Pointer.read,
    store=Pointer.write,
    atomic_add=_atomic_add,
    allocate_shared_memory=_allocate,
    static_range=range,
    program_id=lambda axis: Number(me().program.number),
    num_programs=lambda axis: Number(me().program.launch.programs),
    num_warps=lambda: Number(me().threads // processor.LANES),
    warp_specialize=_warp_specialize,
    **dict.fromkeys(
        (
            *("SliceLayout", "BlockedLayout", "NVMMASharedLayout", "NVMMADistributedLayout", "DotOperandLayout"),
            *("SwizzledSharedLayout", "DistributedLinearLayout"),
        ),
        _Layout(),
    ),
)


def _init(barrier: Barriers, count: int) -> None:
    barrier.only.init(count)


def _arrive(barrier: Barriers, count: int = 1) -> None:
    """All threads of a role synchronize before one of them arrives."""
    me().meet()
    barrier.only.arrive(count)
    me().pause()


def _expect(barrier: Barriers, count: int) -> None:
    me().not_after(WRITTEN)
    barrier.only.expect(count)
    me().pause()


def _store_wait(under_way: int) -> None:
    assert under_way == 0
    processor.await_reads()


MODULES = {
    "triton.language": LANGUAGE,
    "triton.experimental.gluon.language": LANGUAGE,
    hopper.mbarrier.__name__: SimpleNamespace(
        MBarrierLayout=lambda: MBARRIER, init=_init, arrive=_arrive, expect=_expect, wait=processor.await_phase
    ),
    hopper.tma.__name__: SimpleNamespace(store_wait=_store_wait),
}
# Functions that are replaced as a whole, by identity.
OTHERS: dict[int, Any] = {
    id(of): by
    for of, by in (
        (hopper.fence_async_shared, lambda: me().fence()),
        (hopper.warpgroup_mma, processor.begin_product),
        (hopper.warpgroup_mma_wait, lambda under_way, deps: processor.await_products(under_way, deps)),
        (compatibility.thread_barrier, lambda: me().meet()),
        (compatibility.fetch_tile, processor.fetch_tile),
        (compatibility.send_tile, processor.send_tile),
        (compatibility.add_tile, lambda desc, at, tile: processor.send_tile(desc, at, tile, add=True)),
        (compatibility.reinterpreted, lambda tile, dtype, shape, layout: tile.reinterpret(dtype, shape, layout)),
        (ptx.arrive, lambda barrier, threads: processor.come_to(barrier, threads, stay=False)),
        (ptx.sync, lambda barrier, threads: processor.come_to(barrier, threads, stay=True)),
        (ptx.stay_before, _nothing),
        (ptx.hold, _nothing),
        (ptx.scale_unless_one, lambda o, factor: o * factor),
        (ptx.follow_growth, _follow_growth),
        (ptx.reciprocal, _reciprocal),
        (ptx.pack_halves, _pack_halves),
        (ptx.pack_quarters, _pack_quarters),
        (ptx.await_adds, processor.await_copies),
        (ptx.fence_async_global, _nothing),  # sums are added at once here
        (pdl.wait_for_previous, lambda use_pdl: me().program.launch.wait_for_previous() if use_pdl else None),
        (
            pdl.launch_dependents,
            lambda use_pdl: me().program.launch.launch_dependents(me().program) if use_pdl else None,
        ),
        (pdl.await_count, _await_count),
    )
}


# ---- kernels ----

_made: dict[int, Callable[..., Any]] = {}  # by the jitted function


def python(function: Any) -> Callable[..., Any]:
    """A jitted function, and everything that it calls, in plain Python."""
    if id(function) not in _made:
        _make(function, function.fn.__code__)
    return _made[id(function)]


def _make(function: Any, code: CodeType) -> None:
    of = function.fn
    of_compiler = type(function).__name__ == "ConstexprFunction"  # its constants are plain Python values
    used: dict[str, Any] = {}
    _made[id(function)] = FunctionType(code, used, of.__name__, of.__defaults__)
    for name in code.co_names:
        if name in of.__globals__:
            x = of.__globals__[name]
            used[name] = x if of_compiler and isinstance(x, tl.constexpr) else _in_words(x)


def _in_words(x: Any) -> Any:
    if id(x) in OTHERS:
        return OTHERS[id(x)]
    if isinstance(x, tl.constexpr):
        return x.value
    if isinstance(x, ModuleType):
        return MODULES.get(x.__name__, x)
    return python(x) if hasattr(getattr(x, "fn", None), "__code__") else x


@contextmanager
def rewritten(function: Any, line: int, text: str) -> Iterator[None]:
    """Replace one line of a jitted function's source within this context. Line 0 is its decorator."""
    lines = dedent(getsource(function.fn)).splitlines()
    lines[line] = " " * (len(lines[line]) - len(lines[line].lstrip())) + text
    first = next(n for n, x in enumerate(lines) if x.startswith("def "))
    made: dict[str, Any] = {}
    exec(compile("from __future__ import annotations\n" + "\n".join(lines[first:]), "rewritten", "exec"), made)
    with mock.patch.dict(_made, clear=True):
        _make(function, made[function.fn.__name__].__code__)
        yield
