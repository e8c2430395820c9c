"""Numbers that reveal the order in which the tiles of dQ are summed, which 16 bits otherwise hide."""

from __future__ import annotations

import numpy as np

from flashtile.numerics.dtypes import narrow
from tests.support.grid import Call

LARGE = 2.0**16


def order_sensitive(batch: int, heads: int, n: int, dim: int, tile: int, seed: int = 0) -> Call:
    """A call in which, of four tiles of keys, the first gives dQ a large number, and the third subtracts it again. The
    others give small ones, which are rounded next to a large one and nowhere else; each four a little less.

    Queries are 0, so all weights are equal. Values are +1 or -1 in all columns, and add up to 0: so does the output,
    and dS is its weight with the sign of its value.
    """
    rng = np.random.default_rng(seed)
    j = np.arange(n)
    four, of_four = np.divmod(j // tile, 4)
    large = of_four % 2 == 0
    keys = np.where(large[:, None], LARGE / 2 ** four[:, None], rng.standard_normal((batch, heads, n, dim)))
    values = np.where(large, 1.0 - of_four, (-1.0) ** j)
    assert not values.sum(), "each tile with its opposite"
    q, v = np.zeros(keys.shape), np.broadcast_to(values[:, None], keys.shape)
    dout = np.full(keys.shape, 1 / dim)
    return Call(*(narrow(x, "bfloat16") for x in (q, keys, v)), {}, narrow(dout, "bfloat16"), None)
