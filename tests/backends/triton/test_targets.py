"""The cross-compilation gate: each kernel compiles for all targets, uses the matrix unit, does not spill, and fits."""

from __future__ import annotations

import pytest

from tests.backends.triton.machine_code import Figures, matrix, pdl_order, spills
from tests.backends.triton.offline import KILO, TARGETS, Built, Case, build, narrow_products

pytest.importorskip("torch")
pytest.importorskip("triton")

DIMS = (64, 128, 256)
DROPOUT = "causal dropout"
EVERYTHING = "causal mask bias alibi softcap dropout sink"
# A causal call runs the same kernels as one without a mask.
PLAIN = [Case(work, dim, "causal") for dim in DIMS for work in ("forward", "backward")]
QUICK = {name: [case for case in PLAIN if case.dim == 128 or name == "sm_90"] for name in TARGETS}
QUICK["sm_90"] += [
    Case("decode", 128),
    Case("decode", 32, EVERYTHING, "float32"),
    Case("backward-packed", 128, "causal"),
    Case("decode", 64, "dropout seed"),
    *(Case(work, dim, DROPOUT) for dim in (128, 256) for work in ("forward", "backward")),
]
# Apart from the others, because tests.tools.ptx compiles those by trees that may not have spans.
SPANS = [Case("forward", 128, "spans3"), Case("backward", 128, "causal spans3"), Case("decode", 128, "spans1")]
FULL_SPANS = [
    *(
        Case(work, dim, options)
        for options in ("spans1", "causal spans8", f"spans3 {EVERYTHING}")
        for dim in DIMS
        for work in ("forward", "backward")
    ),
    *(Case(work, 128, "spans3") for work in ("decode", "decode-short", "backward-ragged", "backward-packed")),
    *(Case(work, 128, "spans3", "float32") for work in ("forward", "backward")),
]
SHORT = [Case("decode-short", 128, options) for options in ("", "causal alibi softcap dropout sink")]
FULL = [
    *PLAIN,
    *(Case("decode", dim) for dim in DIMS),
    *(Case(f"backward-{rows}", 128, "causal") for rows in ("ragged", "packed")),
    Case("forward", 128, "window"),
    *(
        Case(work, dim, options)
        for options in (EVERYTHING, DROPOUT, f"{EVERYTHING} seed")
        for dim in DIMS
        for work in ("forward", "backward")
    ),
    *(case._replace(dtype="float32") for case in PLAIN),
]
KERNELS = {
    "forward": {"forward_kernel", "recompute_forward_kernel"},
    "decode": {"forward_kernel", "merge_kernel"},  # forward_kernel recomputes its own rows
    "decode-short": {"forward_kernel", "merge_kernel"},
    **{
        work: {"statistics_kernel", "dkdv_kernel", "dq_kernel", "recompute_backward_kernel"}
        for work in ("backward", "backward-ragged", "backward-packed")
    },
}
# Spills allowed in the loop over full tiles of a plain call; 0 for all others. Options, float32 and kernels that
# recompute may spill.
SPILLS = {
    ("sm_90", "dkdv_kernel"): 4,  # measured to be the fastest tiles nevertheless
    ("gfx1100", "forward_kernel"): 8,
    ("gfx1100", "dkdv_kernel"): 16,
}
# The order in which kernels with PDL launch dependents, wait and access memory.
PDL_ORDER = {
    "forward_kernel": "launch memory",
    "recompute_forward_kernel": "wait memory",
    "statistics_kernel": "launch memory",
    "dkdv_kernel": "wait launch memory",
    "dq_kernel": "launch memory wait",
    "recompute_sums_kernel": "wait launch memory",
    "recompute_backward_kernel": "wait memory",
}
WITH_PDL = ("sm_90", "sm_100")


def faults(name: str, built: Built) -> list[str]:
    """The faults of a kernel on a target, as messages."""
    target, case, code, found = TARGETS[name], built.case, built.code, []
    if built.multiplies and case.dtype == "bfloat16":
        if not code.matrix:
            found.append("no matrix instruction")
        elif min(built.tile[:2]) >= 64 and target.matrix not in code.matrix:
            found.append(f"{code.matrix}, where {target.matrix} would do")
    if built.narrow:
        found.append(f"{built.narrow} products are narrower than their layout")
    if built.shared > target.shared:
        found.append(f"{built.shared} bytes of shared memory, of {target.shared}")
    chained = name in WITH_PDL and not case.work.startswith("decode")
    expected = PDL_ORDER.get(built.kernel, "memory") if chained else "memory"
    if built.pdl_order not in (None, expected):
        found.append(f"its PDL order is {built.pdl_order}, and should be {expected}")
    if built.with_pdl != ("wait" in expected):
        found.append("it is launched with PDL" if built.with_pdl else "it is not launched with PDL")
    plain = case.options in ("", "causal") or (name == "sm_90" and case.options == DROPOUT)
    plain = plain and case.dtype == "bfloat16" and not built.kernel.startswith("recompute")
    if plain and code.spills > SPILLS.get((name, built.kernel), 0):
        found.append(f"{code.spills} spills in the loop over full tiles")
    return [f"{name} {case} {built.kernel} {built.tile}: {fault}" for fault in found]


def check(name: str, cases: list[Case]) -> list[Built]:
    """Build the kernels of these cases and check that they have no faults."""
    rows = build(name, cases)
    for work in {case.work for case in cases}:
        assert {built.kernel for built in rows if built.case.work == work} >= KERNELS[work]
    assert [fault for built in rows for fault in faults(name, built)] == []
    return rows


@pytest.mark.parametrize("name", TARGETS)
def test_the_kernels_of_head_dim_128(name: str) -> None:
    check(name, QUICK[name])


def test_kernels_with_spans() -> None:
    assert "row_cuts_kernel" in {built.kernel for built in check("sm_90", SPANS)}


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_every_kernel_with_spans(name: str) -> None:
    check(name, FULL_SPANS)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_every_kernel(name: str) -> None:
    assert "dbias_kernel" in {built.kernel for built in check(name, FULL)}


def fits_twice(built: Built) -> bool:
    """Whether two programs fit a Hopper processor, as the tuning table assumes of their tile."""
    in_memory = 2 * (built.shared + KILO) <= TARGETS["sm_90"].shared + KILO  # each program takes 1 KB more
    return in_memory and 2 * 32 * built.tile[2] * built.code.registers <= 65536


def test_a_short_decode_on_hopper() -> None:
    """Two programs of its tile fit a processor, and one warp holds all the parts that it merges."""
    for built in check("sm_90", SHORT):
        if built.kernel == "merge_kernel":
            assert built.tile[0] == 1 and built.code.stack == 0
        else:
            assert built.tile == [16, 64, 2, 3] and fits_twice(built)


def test_the_forward_tile_of_128_on_hopper() -> None:
    for built in check("sm_90", [Case("forward", 128, options) for options in ("", "causal", "window")]):
        if built.kernel == "forward_kernel":
            assert built.tile == [64, 64, 4, 3] and fits_twice(built)


BUILT = Built(
    PLAIN[0],
    "forward_kernel",
    [64, 64, 4, 2],
    1024,
    1.0,
    0,
    "launch memory",
    False,
    Figures(["wgmma.mma_async"], 128, 0, []),
)


@pytest.mark.parametrize(
    ("built", "fault"),
    [
        (BUILT._replace(code=BUILT.code._replace(matrix=[])), "no matrix instruction"),
        (BUILT._replace(code=BUILT.code._replace(matrix=["mma.sync"])), "where wgmma.mma_async would do"),
        (BUILT._replace(shared=228 * 1024), "bytes of shared memory"),
        (BUILT._replace(narrow=2), "2 products are narrower"),
        (BUILT._replace(code=BUILT.code._replace(stack=8, loops=[2, 1, 0])), "2 spills"),
        (BUILT._replace(pdl_order="memory launch"), "its PDL order is memory launch, and should be launch memory"),
        (BUILT._replace(with_pdl=True), "launched with PDL"),
    ],
    ids=["none", "slow", "shared", "narrow", "spills", "pdl_order", "with_pdl"],
)
def test_the_gate_closes(built: Built, fault: str) -> None:
    assert faults("sm_90", BUILT) == []
    (found,) = faults("sm_90", built)
    assert fault in found


def test_narrow_products_are_seen() -> None:
    line = "tt.dot %a, %b, %c : tensor<16x{}xbf16, #ttg.dot_op<{{opIdx = 0, parent = #mma1, kWidth = 8}}>> * tensor"
    assert narrow_products("\n".join(line.format(k) for k in (16, 32, 16))) == 2


def test_the_pdl_order_is_seen() -> None:
    lines = ["ld.param.b64 %rd1, [x];", "griddepcontrol.wait; mov.u32 %r1, 0;", "st.shared.b32 [%r1], %r2;"]
    lines += ["@%p1 ld.global.v4.b32 {%r1}, [%rd2 + 0];", "cp.async.cg.shared.global [%r1], [%rd1], 16;"]
    assert pdl_order("\n".join([*lines, "griddepcontrol.launch_dependents;"])) == "wait memory launch"


NVIDIA = """
.L_x_1:
        /*0010*/                   LDL R2, [R1+0x8] ;
        /*0020*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
.L_x_2:
        /*0030*/                   MUFU.EX2 R9, R10 ;
        /*0040*/              @!P0 BRA `(.L_x_1) ;
        /*0050*/                   STL [R1], R5 ;
.L_x_3:
        /*0060*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R0 ;
        /*0070*/              @!P1 BRA `(.L_x_3) ;
        /*0080*/                   BRA `(.L_x_2) ;
"""
AMD = """
.LBB0_1:
	v_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
.LBB0_2:
	scratch_load_dword v4, off, s33 offset:8 ; 4-byte Folded Reload
	v_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
	v_exp_f32_e32 v5, v4
	scratch_store_dword off, v5, s33 offset:8 ; 4-byte Folded Spill
	s_cbranch_scc1 .LBB0_2
	scratch_store_dword off, v5, s33 offset:8 ; 4-byte Folded Spill
	s_cbranch_vccnz .LBB0_1
"""


@pytest.mark.parametrize(("text", "name", "n"), [(NVIDIA, "HMMA", 1), (AMD, "v_mfma", 2)], ids=["nvidia", "amd"])
def test_only_the_innermost_loop_counts(text: str, name: str, n: int) -> None:
    assert matrix(text) == [name]
    assert spills(text) == [n]
    assert spills(text.replace("EX2", "LG2").replace("v_exp", "v_log")) == []
