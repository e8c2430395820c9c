"""Numbers that tell the order of a sum: of key tiles in dQ, where it would hardly be seen in 16 bits otherwise."""

from __future__ import annotations

import numpy as np

from flashtile.numerics.dtypes import narrow
from tests.support.grid import Call

LARGE = 2.0**16


def telling(batch: int, heads: int, n: int, dim: int, tile: int, seed: int = 0) -> Call:
    """Of four tiles of keys the first gives dQ a large number, and the third takes it off again. The others give small
    ones, which are rounded where they come beside a large one, and nowhere else; each four a little less.

    Queries are 0, so all weights are alike. Values are +1 or -1 in all columns, and add up to 0: so does the output,
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
