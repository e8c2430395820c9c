"""The best rates of this machine, measured briefly: FLOPs and bytes per second, and its levels of memory."""

import numpy as np

from flashtile import api
from flashtile.backends import native
from flashtile.cost.hardware import Hardware, Rates
from flashtile.host import machine
from flashtile.host.threads import cores
from flashtile.lab.bench import levels
from flashtile.lab.bench.timing import alternate
from flashtile.numerics.dtypes import accumulator


def this_machine(dtype: str = "float32", seconds: float = 0.6) -> Hardware:
    """Measure this machine's CPU for elements of this type; 16-bit ones are widened before they are multiplied."""
    rates = measure(accumulator(dtype), seconds)
    memories = levels.measure(rates.bytes, seconds / 2)
    return Hardware(machine.processor(), rates, measured=True, memory=machine.memory(), levels=memories)


def measure(dtype: str = "float32", seconds: float = 0.6) -> Rates:
    """Measure several ways to multiply and to move bytes, our own kernels among them, and return the best.

    No single one is a ceiling: NumPy's product may be faster than our kernel on one machine, slower on another.
    """
    n, d, heads = 1024, 128, 2
    a, b = (np.full((n, n), 0.5, dtype) for _ in range(2))
    product = np.empty_like(a)
    q, k, v = (np.full((1, heads, n, d), 0.5, dtype) for _ in range(3))
    rows = levels.LARGE // (2 * heads * d * a.itemsize)
    cache = [np.full((1, heads, rows, d), 0.5, dtype) for _ in range(2)]
    flat = [x.reshape(-1) for x in cache]
    copies = levels.Copies(levels.LARGE // cores(), cores())
    work = {"product": (2 * n**3, lambda: np.matmul(a, b, out=product))}
    moves = {"copy": (copies.moved, copies.run), "read": (levels.LARGE, lambda: np.dot(*flat))}
    if native.missing() is None:
        work["attention"] = (4 * heads * n * n * d, lambda: api.attention(q, k, v, backend="native"))
        moves["decode"] = (levels.LARGE, lambda: api.attention(q[..., :1, :], *cache, backend="native"))
    times = alternate({name: call for name, (_, call) in (work | moves).items()}, seconds=seconds)
    best = {name: amount / min(times[name].samples) for name, (amount, _) in (work | moves).items()}
    return Rates(max(best[name] for name in work), max(best[name] for name in moves))
