"""FlashAttention 1 and 2: the same tiles, columns first or rows first, and the effect on the writes.

FlashAttention-1 holds a block of K and V and iterates over the queries: every block of O is read, updated and written
back once for each block of keys. FlashAttention-2 holds a block of Q and iterates over the keys: a block of O stays on
the chip until it is finished and is written once; and since rows of tiles are independent, each may go to a different
processor. schedule.py has both orders as events; here they are counted, run and timed.
"""

from collections import Counter
from functools import partial
from typing import Any

import numpy as np

import flashtile
from flashtile.backends import tiles
from flashtile.band import full
from flashtile.cost import traffic
from flashtile.lab.bench.timing import alternate
from flashtile.lab.lessons.text import Say
from flashtile.lab.units import size
from flashtile.numerics import schedule
from flashtile.numerics.dtypes import Array
from flashtile.numerics.schedule import Grid, Store, Tile
from flashtile.numerics.softmax import OnlineSoftmax
from flashtile.problem import describe

DIM, WARPS = 64, 4
ORDERS = ("fa1", "fa2")


def run(say: Say, quick: bool = False) -> dict[str, Any]:
    say.heading("The order of writes")
    grid = Grid(16, 16, 4, 4)
    written = {}
    for order in ORDERS:
        stores = [event for event in schedule.FORWARD[order](full(), grid) if isinstance(event, Store)]
        written[order] = [event.n for event in stores if event.name == "O"]
        say(f"{order}: O blocks in order of writing: {' '.join(map(str, written[order]))}")
    say("")
    each = {order: Counter(blocks).most_common(1)[0][1] for order, blocks in written.items()}
    say.paragraph(
        f"16 queries and keys in tiles of 4 x 4. In FA1 every block of O is written {each['fa1']} times, once for each",
        "column of tiles, and the next write is always to another block: the writes are scattered. In FA2 it is",
        f"written {each['fa2']} time, one block after the other: the writes are sequential.",
    )
    moved = count(say, 1024 if quick else 4096)
    times, difference = race(say, *((256, 0.2) if quick else (1024, 2)))
    shared = warps(say)
    say.paragraph(
        "A processor runs a block of threads as warps, which share its fast memory but not their registers. FA1 gives",
        "each warp a slice of K and V. Then each has a part of every score row, and the parts of O must be summed",
        "through shared memory, while all warps wait. FA2 gives each warp a slice of Q. Then each has whole rows, all",
        "read K and V, and they exchange nothing.",
    )
    return {
        "written": written,
        "moved": moved,
        "times": times,
        "error": difference,
        "warps": shared,
        "holds": max(difference, *(way["error"] for way in shared.values())) < 1e-10,
    }


def count(say: Say, n: int) -> dict[str, Any]:
    """Count what both orders move, by their events."""
    say.heading("Memory traffic")
    block = 128
    grid, layout = Grid(n, n, block, block), traffic.Layout(DIM, DIM, "float16")
    found = {}
    for order in ORDERS:
        events = list(schedule.FORWARD[order](full(), grid))
        summed = traffic.count(events, grid, layout)
        stores = Counter(event.n for event in events if isinstance(event, Store) and event.name == "O")
        walks: dict[int, set[int]] = {}  # outer step -> the blocks of O it writes
        for event in events:
            if isinstance(event, Tile):
                walks.setdefault(event.j if order == "fa1" else event.i, set()).add(event.i)
        alone = sum(map(len, walks.values())) == len(set().union(*walks.values()))  # no block has two writers
        found[order] = {
            "read": summed.loaded_bytes,
            "written": summed.stored_bytes,
            "writes_of_a_block": max(stores.values()),
            "sram": summed.peak_sram,
            "independent": len(walks) if alone else 1,
        }
    say.table(
        ("order", "read", "written", "writes of an O block", "independent loops per head"),
        [
            (
                order,
                size(row["read"]),
                size(row["written"]),
                str(row["writes_of_a_block"]),
                str(row["independent"]),
            )
            for order, row in found.items()
        ],
    )
    ratio = found["fa1"]["written"] / found["fa2"]["written"]
    say.paragraph(
        f"One head, N = {n}, D = {DIM}, float16, tiles of {block} x {block}. FA1 writes {ratio:.0f} times as much: O,",
        "m and l for every column of tiles. All its columns update the same O, so a head is one sequential loop; the",
        "rows of FA2 are independent, and keep many processors busy even with one head.",
    )
    return {"n": n, "block": block, **found}


def race(say: Say, n: int, seconds: float) -> tuple[dict[str, Any], float]:
    """Time both orders on this machine, in NumPy, and check that the results agree."""
    say.heading("Time")
    rng = np.random.default_rng(42)
    q, k, v = (rng.standard_normal((n, DIM)) for _ in range(3))
    problem = describe(q, k, v)
    oracle = flashtile.standard_attention(q, k, v)
    block = 64
    ways = {order: partial(tiles.forward, problem, order, block, block) for order in ORDERS}
    difference = max(float(np.abs(way()[0][0, 0] - oracle).max()) for way in ways.values())
    what = f"tiles backend, N = {n}, tiles of {block} x {block}"
    times = say.timings(what, alternate(ways, seconds=seconds))
    say.paragraph(f"Both differ from the oracle by at most {difference:.1e}.")
    return times, difference


def warps(say: Say) -> dict[str, dict[str, Any]]:
    """Split one tile of 64 queries and 64 keys between warps by keys and by queries, and count what they exchange."""
    say.heading(f"Work split between {WARPS} warps")
    rng = np.random.default_rng(42)
    q, k, v = (rng.standard_normal((64, DIM)) for _ in range(3))
    by_keys, by_queries, exchanged = split(q, k, v)
    oracle = flashtile.standard_attention(q, k, v)
    found = {
        "K split (FA1)": {"exchanged": exchanged, "error": float(np.abs(by_keys - oracle).max())},
        "Q split (FA2)": {"exchanged": 0, "error": float(np.abs(by_queries - oracle).max())},
    }
    say.table(
        ("split", "numbers exchanged", "from the oracle"),
        [(name, f"{way['exchanged']:,}", f"{way['error']:.1e}") for name, way in found.items()],
    )
    return found


def split(q: Array, k: Array, v: Array) -> tuple[Array, Array, int]:
    """The output with split keys, and with split queries, and how many numbers the warps exchange if keys are split."""
    S = q @ k.T * q.shape[1] ** -0.5
    whole, *others = (absorbed(S[:, part], v[part]) for part in np.array_split(np.arange(len(k)), WARPS))
    exchanged = sum(state.m.size + state.l.size + state.O.size for state in others)  # all through shared memory
    for state in others:
        whole.merge(state)
    # With split queries each warp has whole rows: concatenated, with nothing to merge.
    rows = [absorbed(S[part], v).normalized() for part in np.array_split(np.arange(len(q)), WARPS)]
    return whole.normalized(), np.concatenate(rows), exchanged


def absorbed(S: Array, v: Array) -> OnlineSoftmax:
    """The state of some rows after some keys."""
    state = OnlineSoftmax.empty(len(S), v.shape[1], S.dtype)
    P, _ = state.absorb(S)
    state.O = state.O + P @ v
    return state
