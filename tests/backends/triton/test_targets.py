"""The gate for GPUs that are not here: each kernel compiles, works on the matrix unit, keeps to registers and fits."""

from __future__ import annotations

import pytest

from tests.backends.triton.machine_code import Figures, spills
from tests.backends.triton.offline import TARGETS, Built, Case, build

pytest.importorskip("torch")
pytest.importorskip("triton")

DIMS = (64, 128, 256)
EVERYTHING = ("causal", "mask", "bias", "alibi", "softcap", "dropout", "sink")
# A call without a mask runs the kernels of a causal one.
QUICK = {name: [Case("forward", 128, ("causal",)), Case("backward", 128, ("causal",))] for name in TARGETS}
QUICK["sm_90"] = [Case(work, dim, ("causal",)) for dim in DIMS for work in ("forward", "backward")]
QUICK["sm_90"].append(Case("decode", 128))
FULL = [
    Case("forward", 128, ("window",)),
    *(Case("decode", dim) for dim in DIMS),
    *(Case(work, dim, ("causal",)) for dim in DIMS for work in ("forward", "backward")),
    *(Case(work, dim, EVERYTHING) for dim in DIMS for work in ("forward", "backward")),
    *(Case(work, dim, ("causal",), "float32") for dim in DIMS for work in ("forward", "backward")),
]
KERNELS = {
    "forward": {"forward_kernel"},
    "decode": {"forward_kernel", "merge_kernel"},
    "backward": {"statistics_kernel", "dkdv_kernel", "dq_kernel"},
}
