"""Sizes that these tests share, so that they share kernels too.

Triton compiles a kernel for each dtype, pair of head dims, group and set of options, for lengths that divide by 16 or
are one tile, and for tensors of more than 512 rows, which the copy engine fetches. Lengths are odd here, so that none
is special.
"""

from __future__ import annotations

from tests.support.grid import Size

LONG = Size(2, 4, 2, 577, 641, 64, 64)
RAGGED = Size(2, 4, 2, 65, 129, 64, 64)
DECODE = Size(2, 8, 4, 3, 701, 64, 64)  # few queries: heads share a tile, and the keys are split
PACKED = Size.packed(4, 2, 64, 64, (17, 30), (0, 5), (265, 263), (4, 0), (0, 0), (301, 329))
