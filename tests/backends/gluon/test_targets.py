"""The cross-compilation gate of the Hopper kernels: no spills, no unnecessary waits for products, and they fit."""

from __future__ import annotations

import pytest

from flashtile.numerics.dtypes import EIGHT_BITS
from tests.backends.gluon.offline import ADVICE, Built, Case, build
from tests.backends.triton.offline import TARGETS

pytest.importorskip("torch")
pytest.importorskip("triton")

DIMS = (64, 128, 256)
EVERYTHING = "causal softcap alibi sink kv_lengths gqa"
GRADIENTS = ("softcap", "band", "causal packed", "causal gqa", "kv_lengths", "causal alibi sink kv_lengths gqa")
QUICK = {
    "plain": [*(Case(dim, options) for dim in DIMS for options in ("", "causal")), Case(64, "causal short")],
    "options": [
        Case(128, "window"),
        Case(128, EVERYTHING),
        Case(128, "causal packed"),
        Case(128, "causal", "float16"),
    ],
    "8 bits": [
        *(Case(dim, "causal descale", EIGHT_BITS) for dim in DIMS),
        Case(128, "", EIGHT_BITS),
        Case(128, "causal descale short", EIGHT_BITS),
    ],
    "gradients": [
        *(Case(dim, options, work="backward") for dim in DIMS for options in ("", "causal")),
        Case(128, "softcap", work="backward"),
    ],
    "ordered": [Case(dim, "causal ragged deterministic", work="backward") for dim in DIMS],
}
FULL = [
    *(Case(dim, "band") for dim in DIMS),
    *(Case(64, f"{options} short", dtype) for options in ("", "band") for dtype in ("bfloat16", "float16", EIGHT_BITS)),
    *(Case(dim, options, "float16") for dim in DIMS for options in ("", "causal", "band")),
    *(Case(dim, f"{options} float32") for dim in DIMS for options in ("", "causal")),
    *(Case(dim, f"{options} packed") for dim in DIMS for options in ("causal", "band", "kv_lengths sink")),
    *(Case(dim, options) for dim in DIMS for options in (EVERYTHING, "softcap", "alibi", "gqa")),
    *(
        Case(dim, options, EIGHT_BITS)
        for dim in DIMS
        for options in ("", "float32", "band", "gqa", f"{EVERYTHING} descale")
    ),
    *(
        Case(dim, options, work="backward")
        for dim in DIMS
        for options in ("causal ragged", *GRADIENTS)
        if dim <= 128 or options != "softcap"
    ),
]
WIDTHS = [(8, 8), (16, 24), (32, 32), (40, 48), (96, 96), (64, 128), (128, 64), (192, 128), (128, 256), (256, 64)]
# Bytes that may be spilled, as measured, so that they do not grow unnoticed; 0 for all others.
STACK = {
    ("forward", 64, "band"): 8,
    ("forward", 64, "alibi"): 8,
    ("forward", 64, EVERYTHING): 24,
    ("forward", 128, EVERYTHING): 24,
    ("forward", 256, "band"): 40,
    ("forward", 256, "softcap"): 8,
    ("forward", 256, "alibi"): 8,
    ("forward", 256, EVERYTHING): 56,
    ("8 bits", 64, f"{EVERYTHING} descale"): 16,
    ("8 bits", 128, ""): 8,
    ("8 bits", 128, "causal descale"): 8,
    ("8 bits", 128, "float32"): 8,
    ("8 bits", 128, "band"): 32,
    ("8 bits", 128, "gqa"): 8,
    ("8 bits", 128, f"{EVERYTHING} descale"): 40,
    ("8 bits", 256, "band"): 40,
    ("8 bits", 256, f"{EVERYTHING} descale"): 64,
    # One number of the loading warp, which it reads once per task.
    ("backward", 128, "causal packed"): 8,
    ("backward", 64, "softcap"): 88,
    ("backward", 64, "causal alibi sink kv_lengths gqa"): 24,
    ("backward", 128, "causal alibi sink kv_lengths gqa"): 24,
    ("backward", 256, ""): 48,
    ("backward", 256, "causal"): 24,
    ("backward", 256, "causal ragged"): 32,
    ("backward", 256, "causal ragged deterministic"): 40,
    ("backward", 256, "band"): 152,
    ("backward", 256, "causal packed"): 232,
}
OPTIONS_STACK = 56  # gradients at head dim 256 with options that are not tuned for
# Waits for products in a loop over tiles: S and P V; S, dP, dV and dK, dQ.
WAITS = {"forward": 2, "backward": 4}
# The order in which they wait, launch dependents (pdl.py) and access memory.
PDL_ORDER = {"forward": "launch memory", "8 bits": "wait launch memory", "backward": "wait launch memory"}


def faults(built: Built) -> list[str]:
    """The faults of a kernel, as messages."""
    case, found = built.case, list(built.advice)
    strange = case.work == "backward" and case.dim > 128 and case.options in GRADIENTS
    kind = "8 bits" if case.dtype == EIGHT_BITS else case.work
    allowed = STACK.get((kind, case.dim, case.options), OPTIONS_STACK if strange else 0)
    if built.stack > allowed:
        found.append(f"{built.stack} bytes of stack, of {allowed}")
    if built.shared > TARGETS["sm_90"].shared:
        found.append(f"{built.shared} bytes of shared memory, of {TARGETS['sm_90'].shared}")
    if not built.splits_registers:
        found.append("all warps have as many registers")
    if not built.products or not all(built.products):
        found.append("no loop over tiles with products in it")
    if any(waits != WAITS[case.work] for waits in built.waits):
        found.append(f"{built.waits} waits in loops over tiles, where {WAITS[case.work]} do")
    if built.pdl_order != PDL_ORDER[kind]:
        found.append(f"its PDL order is {built.pdl_order}, and should be {PDL_ORDER[kind]}")
    return [f"{case}: {fault}" for fault in found]


@pytest.mark.parametrize("group", QUICK)
def test_kernels(group: str) -> None:
    rows = build(QUICK[group])
    assert [built.case for built in rows] == QUICK[group]
    assert [fault for built in rows for fault in faults(built)] == []


@pytest.mark.slow
@pytest.mark.parametrize("dim", DIMS)
def test_more_kernels(dim: int) -> None:
    rows = build([case for case in FULL if case.dim == dim])
    assert [fault for built in rows for fault in faults(built)] == []


@pytest.mark.slow
def test_other_widths() -> None:
    rows = build([Case(dim, "causal", dim_v=dim_v) for dim, dim_v in WIDTHS])
    assert [fault for built in rows for fault in faults(built)] == []


@pytest.mark.parametrize(
    "dim", [pytest.param(64, marks=pytest.mark.slow), 128, pytest.param(256, marks=pytest.mark.slow)]
)
def test_kernels_beside_8_bits(dim: int) -> None:
    """Values are transposed within registers, and nothing spills."""
    turned, recomputed = build(
        Case(dim, "causal descale", EIGHT_BITS, work=work) for work in ("transpose", "recompute")
    )
    assert turned.stack == turned.shared == 0
    assert turned.pdl_order == "launch memory"
    assert recomputed.stack == 0


BUILT = Built(Case(64), 232448, 0, True, [2, 2], [12, 12], [], "launch memory", 1.0)
SERIAL = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."


@pytest.mark.parametrize(
    ("built", "fault"),
    [
        (BUILT._replace(stack=8), "8 bytes of stack, of 0"),
        (BUILT._replace(shared=232449), "of shared memory"),
        (BUILT._replace(splits_registers=False), "as many registers"),
        (BUILT._replace(products=[], waits=[]), "no loop over tiles"),
        (BUILT._replace(waits=[2, 3]), "3] waits"),
        (BUILT._replace(advice=ADVICE.findall(SERIAL)), "C7510"),
        (BUILT._replace(pdl_order="memory launch"), "its PDL order is memory launch"),
    ],
    ids=["stack", "shared", "registers", "products", "waits", "advice", "pdl_order"],
)
def test_the_gate_closes(built: Built, fault: str) -> None:
    assert faults(BUILT) == []
    (found,) = faults(built)
    assert fault in found
    assert faults(BUILT._replace(case=Case(64, "band"), stack=8)) == []
