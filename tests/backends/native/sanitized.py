"""Part of the grid for sanitizers: options, dtypes, kinds of size, odd addresses, non-finite values.

python -m tests.backends.native.sanitized THREADS
"""

from __future__ import annotations

import itertools
import sys

import numpy as np

from tests import test_nonfinite as nonfinite
from tests.backends.native import test_alignment as alignment
from tests.support.grid import COMBINATIONS, LAYOUTS, OPTIONS, Case, Size
from tests.support.runners import api_runner
from tests.test_agreement import DECODE, DTYPES, PACKED, SIZES, agree

RAGGED = Size(2, 4, 2, 37, 70, 33, 17)


def flags(isa: str) -> list[str]:
    """The compiler flags for this instruction set, as in CMakeLists.txt."""
    return f"-march={isa}".replace("-bf16", " -mavx512bf16").split() if isa.startswith("x86") else []


def cases() -> list[Case]:
    found = [Case(RAGGED, dtype, (option,)) for option in OPTIONS for dtype in DTYPES]
    found += [Case(RAGGED, dtype, ("causal",), layout) for layout in LAYOUTS for dtype in DTYPES]
    found += [Case(RAGGED, DTYPES[n % 4], names) for n, names in enumerate(COMBINATIONS)]
    for n, size in enumerate((*SIZES, *DECODE)):
        found += [Case(size, DTYPES[(n + m) % 4], (o,)) for m, o in enumerate(("plain", "causal", "everything"))]
    found += [Case(size, dtype, (o,)) for size in PACKED for dtype in DTYPES for o in ("causal", "everything")]
    return found


def main(threads: int) -> None:
    runner = api_runner("native", threads=threads)
    for case in cases():
        agree(case, runner)
    for shape, dtype in itertools.product(alignment.SIZES, DTYPES):
        alignment.check_same_numbers(shape, dtype, threads)
    for size, hider, dtype in itertools.product(nonfinite.SIZES, nonfinite.HIDERS, ("float32", "bfloat16")):
        call, _ = nonfinite.case(size, hider, dtype)
        for name in ("k", "v", "q", "dout"):
            nonfinite.everything(runner, nonfinite.changed(call, name, np.s_[:, :, ::2, 1], np.nan))
    print(len(cases()), "cases")


if __name__ == "__main__":
    main(int(sys.argv[1]))
