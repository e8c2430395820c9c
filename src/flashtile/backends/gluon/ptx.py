"""Inline PTX that Gluon does not expose: named barriers, a rescale that is mostly skipped, packed weights."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# The number of named barriers of a program, which count threads. Triton itself uses the first few.
BARRIERS = gl.constexpr(16)


@gluon.jit
def named_barrier(WORD: gl.constexpr, barrier, THREADS: gl.constexpr):
    code: gl.constexpr = f"bar.{WORD} $1, {THREADS}; mov.u32 $0, $1;"
    gl.inline_asm_elementwise(code, "=r,r", [gl.to_tensor(barrier)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive(barrier, THREADS: gl.constexpr):
    """Arrive at a named barrier without waiting. Unlike mbarrier.arrive it does not synchronize the warpgroup first."""
    named_barrier("arrive", barrier, THREADS)


@gluon.jit
def sync(barrier, THREADS: gl.constexpr):
    """Wait until THREADS threads, including these, have arrived at a named barrier."""
    named_barrier("sync", barrier, THREADS)


@gluon.jit
def stay_before(x):
    """Keep the next wait below everything that x depends on. x is positive, so that nothing ever happens here.

    Without it ptxas moves the wait for P V above the exponentials that should overlap it.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $2, 0f00000000; setp.lt.or.f32 p, $3, 0f00000000, p;"
        " @p bar.arrive 8, 160; mov.u32 $0, 0; mov.u32 $1, 0; }",
        "=r,=r,f,f",
        [x],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )


def _scale_unless_one(columns: int) -> tuple[str, str]:
    """PTX of o *= factor for the two rows of a thread, in a branch that a warp takes if any factor is not 1."""
    n = columns // 2  # values of a thread; those of a row are neighbours in pairs
    test = (
        f"{{ .reg .pred p, q; setp.neu.f32 p, ${2 * n}, 0f3F800000; setp.neu.or.f32 p, ${2 * n + 2}, 0f3F800000, p;"
        " vote.sync.any.pred q, p, 0xffffffff; @!q bra L; "
    )
    products = " ".join(f"mul.f32 ${k}, ${k}, ${2 * n + k};" for k in range(n))
    return test + products + " L: }", ",".join(["=f"] * n + [str(k) for k in range(n)] + ["f"] * n)


_SCALE = {columns: _scale_unless_one(columns) for columns in (16, 32, 64, 128, 256)}
_CODE = {columns: code for columns, (code, _operands) in _SCALE.items()}
_OPERANDS = {columns: operands for columns, (_code, operands) in _SCALE.items()}


@gluon.constexpr_function
def _code(columns):
    return _CODE[columns]


@gluon.constexpr_function
def _operands(columns):
    return _OPERANDS[columns]


@gluon.jit
def scale_unless_one(o, factor):
    """o * factor, of softmax.in_pairs(), skipped by warps whose factors are all 1."""
    COLUMNS: gl.constexpr = o.shape[1] * 8
    return gl.inline_asm_elementwise(
        _code(COLUMNS), _operands(COLUMNS), [o, factor], dtype=gl.float32, is_pure=True, pack=COLUMNS // 2
    )


@gluon.constexpr_function
def _follow_growth_code(most):
    """PTX of follow_growth(). Results: two factors, two maxima; operands: two partial sums, two maxima."""
    limit = f"0f{(127 + most) << 23:08X}"
    rows = "".join(
        f" shfl.sync.bfly.b32 b, ${4 + n}, 1, 31, -1; max.f32 a, b, ${4 + n}; shfl.sync.bfly.b32 b, a, 2, 31, -1;"
        f" max.f32 a, a, b; setp.gt.f32 p, a, {limit}; mov.b32 e, a; shr.s32 e, e, 23; min.s32 e, e, 253;"
        f" sub.s32 e, e, 127; selp.b32 e, e, 0, p; cvt.rn.f32.s32 b, e; add.f32 ${2 + n}, ${2 + n}, b;"
        f" sub.s32 e, 127, e; shl.b32 e, e, 23; mov.b32 ${n}, e;"
        for n in range(2)
    )
    return (
        "{ .reg .pred p, q; .reg .f32 a, b; .reg .b32 e;"
        " mov.f32 $0, 0f3F800000; mov.f32 $1, 0f3F800000; mov.f32 $2, $6; mov.f32 $3, $7;"
        f" setp.gt.f32 p, $4, {limit}; setp.gt.or.f32 p, $5, {limit}, p; vote.sync.any.pred q, p, 0xffffffff;"
        f" @!q bra L;{rows} L: }}"
    )


@gluon.jit
def follow_growth(partial_sum, m, MOST: gl.constexpr):
    """A power of two that brings a partial sum over 2^MOST under 2, and the new maximum; otherwise 1 and m.

    The four neighbouring threads of a row use the largest of their sums. Most warps skip this.
    """
    return gl.inline_asm_elementwise(
        _follow_growth_code(MOST),
        "=&f,=&f,=&f,=&f,f,f,f,f",
        [partial_sum, m],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=2,
    )


@gluon.constexpr_function
def _hold(words):
    """PTX of hold(): results, then operands, one word for two weights. No weight has its sign bit set."""
    every = "".join(f" or.b32 x, x, ${n};" for n in range(words, 2 * words))
    zeros = "".join(f" mov.b32 ${n}, 0;" for n in range(words))
    return f"{{ .reg .pred p; .reg .b32 x; mov.b32 x, 0;{every} setp.lt.s32 p, x, 0; @p bar.arrive 8, 160;{zeros} }}"


@gluon.constexpr_function
def _hold_operands(words):
    return ",".join(["=r"] * words + ["r"] * words)


@gluon.jit
def hold(p):
    """Like stay_before(), for a whole tile of 16-bit weights."""
    WORDS: gl.constexpr = p.shape[0] * p.shape[1] // 256
    gl.inline_asm_elementwise(_hold(WORDS), _hold_operands(WORDS), [p], dtype=gl.int16, is_pure=False, pack=2 * WORDS)


@gluon.jit
def reciprocal(x):
    """1 / x, accurate to the last bit but one; 0 if x is too large."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def pack_halves(low, high, dtype: gl.constexpr):
    """Two float32 numbers, rounded to a 16-bit type, in one integer."""
    NAME: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        f"cvt.rn.{NAME}.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def await_adds():
    """Wait until this thread's asynchronous adds are complete; tma.store_wait() waits only for their reads."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def pack_quarters(a, b, c, d):
    """Four float32 numbers, rounded to e4m3, in one integer, the first in its lowest byte."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f",
        [a, b, c, d],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def fence_async_global():
    """Order this thread's earlier accesses to global memory before its later ones through the copy engine."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
