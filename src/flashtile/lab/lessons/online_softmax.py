"""Online softmax: one row of scores, seen tile by tile, keeping only a maximum and a sum.

softmax(s)_j = exp(s_j) / sum_i exp(s_i) seems to need the whole row twice: once for the sum, once to divide. And exp
of a large score overflows, so the row's maximum m is subtracted first; that seems to need the row a third time.

One pass is enough. For the scores seen so far, keep

    m = max s_j        l = sum exp(s_j - m)        o = sum exp(s_j - m) v_j

A new tile may have a larger maximum m_new. Each term of the old sums is exp(s_j - m), and should be exp(s_j - m_new).
But

    exp(s_j - m) * exp(m - m_new) = exp(s_j - m_new)

with a factor that does not depend on j, so it comes out of the sum: l * exp(m - m_new) is exactly the sum as if m_new
had been known from the start, and the same holds for o. No term is lost and none is approximated. By induction l and o
are right after every tile, and at the end o / l is the softmax times v: exp(-m) cancels.
"""

from typing import Any

import numpy as np

from flashtile import online_softmax
from flashtile.lab.bench.timing import alternate
from flashtile.lab.lessons.text import Say
from flashtile.numerics.dtypes import Array

N, TILE = 2000, 500
PEAKS = (2.1, 3.4, 2.9, 3.1)  # the largest score of each tile


def plain(s: Array, v: Array) -> Array:
    """Softmax times v, over the whole row at once."""
    p = np.exp(s - s.max())
    out: Array = p / p.sum() @ v
    return out


def online(s: Array, v: Array, tile: int) -> tuple[Array, list[dict[str, float]]]:
    """Softmax times v, one tile at a time; also return the state after each tile."""
    m, l, o = -np.inf, 0.0, np.zeros(v.shape[1])
    steps = []
    for j in range(0, len(s), tile):
        scores, values = s[j : j + tile], v[j : j + tile]
        m_new = max(m, scores.max())
        factor = np.exp(m - m_new)  # rescales the sums so far to the new maximum; 1 if it is unchanged
        p = np.exp(scores - m_new)
        l = l * factor + p.sum()
        o = o * factor + p @ values
        steps.append({"max": scores.max(), "m_old": m, "m": m_new, "factor": factor, "sum": p.sum(), "l": l, "o": o[0]})
        m = m_new
    return o / l, [{name: float(x) for name, x in step.items()} for step in steps]


def run(say: Say, quick: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(42)
    # Random scores of one token, shifted so that the largest of each tile is the chosen one.
    s = np.concatenate([x + peak - x.max() for x, peak in zip(rng.standard_normal((4, TILE)), PEAKS, strict=True)])
    v = rng.standard_normal((N, 4))

    say.heading("One token, four tiles")
    say.paragraph(
        f"{N:,} tokens have {N * N:,} scores: {N * N * 2 / 1e6:.0f} MB in 16 bits. Here is one token's row, seen "
        f"{TILE} keys at a time. m is the largest score so far, l the sum of exp(score - m), o[0] the first "
        "number of the output before the division. The first factor is 0, because the sums are still empty.",
    )
    out, steps = online(s, v, TILE)
    say.table(
        ("keys", "largest here", "m", "factor", "sum here", "l", "o[0]"),
        [
            (
                f"{n * TILE}-{(n + 1) * TILE - 1}",
                *(f"{step[name]:.4f}" for name in ("max", "m", "factor", "sum", "l", "o")),
            )
            for n, step in enumerate(steps)
        ],
    )
    rise = steps[1]
    say.paragraph(
        f"The second tile has a larger score, {rise['m']:.1f} after {rise['m_old']:.1f}. The sums so far are "
        f"multiplied by exp({rise['m_old']:.1f} - {rise['m']:.1f}) = {rise['factor']:.2f}: "
        f"{rise['factor']:.4f} x {steps[0]['l']:.4f} + {rise['sum']:.4f} = {rise['l']:.4f}. The later tiles have "
        "no larger score, so their factor is 1. The only division comes at the end: "
        f"{steps[-1]['o']:.4f} / {steps[-1]['l']:.4f} = {out[0]:.6f}.",
    )

    say.heading("The same result")
    errors = {f"{tile}": float(np.abs(online(s, v, tile)[0] - plain(s, v)).max()) for tile in (1, 7, 500, N)}
    say.table(("tile", "largest difference"), [(tile, f"{error:.1e}") for tile, error in errors.items()])
    late = s[::-1] + 1000
    with np.errstate(over="ignore", invalid="ignore"):
        careless = np.exp(late) @ v / np.exp(late).sum()
    careful = float(np.abs(online(late, v[::-1], TILE)[0] - plain(s, v)).max())
    say.paragraph(
        f"Scores of 1000 and more, in the opposite order: difference {careful:.1e}. "
        f"Without subtracting a maximum, the result would be {careless[0]}.",
    )

    say.heading("Time")
    rows = rng.standard_normal((64 if quick else 512, N))

    def whole() -> Array:
        P: Array = np.exp(rows - rows.max(axis=1, keepdims=True))
        P /= P.sum(axis=1, keepdims=True)
        return P

    contenders = {"the whole row": whole, f"tiles of {TILE}": lambda: online_softmax(rows, TILE)}
    times = say.timings(
        f"softmax, {len(rows)} rows of {N}", alternate(contenders, seconds=0.1 if quick else 1, max_rounds=50)
    )
    say.paragraph(
        "This alone gains nothing: a softmax has to write its row anyway. Attention does not: it needs only o, not the",
        "row. The lesson tiled-attention continues from here.",
    )
    return {
        "n": N,
        "tile": TILE,
        "steps": [{**step, "m_old": step["m_old"] if np.isfinite(step["m_old"]) else None} for step in steps],
        "output": out.tolist(),
        "errors": errors,
        "error_at_1000": careful,
        "times": times,
        "holds": max(*errors.values(), careful) < 1e-10,
    }
