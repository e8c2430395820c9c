"""traffic.py: the sum over events equals the closed forms and published values, and SRAM that of the executor."""

import itertools

import numpy as np
import pytest

from flashtile.backends import tiles
from flashtile.band import FAR, Band, Kind
from flashtile.cost import traffic
from flashtile.cost.traffic import Layout, Traffic, count
from flashtile.numerics.schedule import (
    FORWARD,
    STANDARD,
    Grid,
    Launch,
    backward,
    fa1_forward,
    fa2_forward,
    standard_forward,
)
from flashtile.problem import describe

SRAM = 51_200
FLASH = (Launch("attention", ("Q", "K", "V"), ("O", "L")),)


def launched_elements(launches, n, d):
    """Elements moved when each launch moves each of its arrays once."""
    sizes = {"Q": n * d, "K": n * d, "V": n * d, "O": n * d, "L": n, "S": n * n, "P": n * n}
    return sum(sizes[name] for launch in launches for name in launch.reads + launch.writes)


@pytest.mark.parametrize(
    ("n", "d", "bc", "tc", "standard", "fa1", "fa2", "fa2_causal", "least"),
    [
        (1024, 64, 200, 6, 4_456_448, 1_335_296, 1_180_672, 721_920, 263_168),
        (8192, 128, 100, 82, 272_629_760, 262_733_824, 136_323_072, 70_262_784, 4_202_496),
    ],
)
def test_published_values(n, d, bc, tc, standard, fa1, fa2, fa2_causal, least):
    assert traffic.standard_elements(n, d) == standard
    assert launched_elements(STANDARD, n, d) == standard
    assert traffic.fa1_block(SRAM, d) == bc and -(-n // bc) == tc
    assert traffic.fa1_elements(n, d, bc) == fa1
    assert traffic.fa2_elements(n, n, d, d, 128, 128, Band()) == fa2
    assert traffic.fa2_elements(n, n, d, d, 128, 128, Band(right=0)) == fa2_causal
    assert traffic.least_elements(n, d) == least
    assert launched_elements(FLASH, n, d) == least

    layout = Layout(d, d)
    grid = Grid(n, n, 128, bc)
    assert count(fa1_forward(Band(), grid), grid, layout).elements == fa1
    grid = Grid(n, n, 128, 128)
    assert count(fa2_forward(Band(), grid), grid, layout).elements == fa2
    assert count(fa2_forward(Band(right=0), grid), grid, layout).elements == fa2_causal


@pytest.mark.parametrize("br, bc", [(1, 1), (3, 5), (5, 3), (8, 8), (40, 40)])
@pytest.mark.parametrize("n", [1, 8, 37])
def test_fa1_fold_equals_its_closed_form_for_ragged_tiles_too(n, br, bc):
    grid = Grid(n, n, br, bc)
    assert count(fa1_forward(Band(), grid), grid, Layout(6, 6)).elements == traffic.fa1_elements(n, 6, bc)


BANDS = [Band(), Band(right=0), Band(3, 2), Band(4, 0, 5), Band(FAR, 0, -7), Band(-2, 1), Band(0, 0, 100)]


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("n_q, n_k", [(0, 5), (5, 0), (17, 17), (9, 30), (30, 9)])
def test_fa2_fold_equals_its_closed_form(band, n_q, n_k):
    for br, bc in itertools.product((1, 4, 16), (1, 3, 16)):
        grid = Grid(n_q, n_k, br, bc)
        total = count(fa2_forward(band, grid), grid, Layout(6, 10))
        assert total.elements == traffic.fa2_elements(n_q, n_k, 6, 10, br, bc, band)
        assert total.stored == n_q * 11
        by_row = traffic.tile_counts(band, n_q, n_k, br, bc)
        assert {k: by_row[k] for k in total.tiles} == total.tiles
        assert sum(by_row.values()) == grid.shape[0] * grid.shape[1]


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("n_q, n_k", [(0, 5), (5, 0), (17, 17), (9, 30), (30, 9)])
def test_fa1_and_backward_folds_equal_their_closed_forms(band, n_q, n_k):
    for br, bc in itertools.product((1, 4, 16), (1, 3, 16)):
        shape = n_q, n_k, 6, 10, br, bc, band
        grid = Grid(n_q, n_k, br, bc)
        assert count(fa1_forward(band, grid), grid, Layout(6, 10)).elements == traffic.fa1_visible_elements(*shape)
        assert count(backward(band, grid), grid, Layout(6, 10)).elements == traffic.backward_elements(*shape)


@pytest.mark.parametrize("n_q, n_k, br", [(0, 5, 4), (5, 0, 4), (17, 17, 4), (9, 30, 5)])
def test_the_fold_of_standard_attention_equals_its_closed_form(n_q, n_k, br):
    grid = Grid(n_q, n_k, br, max(n_k, 1))
    total = count(standard_forward(grid), grid, Layout(6, 10))
    assert total.elements == traffic.standard_elements(n_q, 6, n_k, 10)
    assert total.flops == n_q * n_k * traffic.forward_flops_per_pair(6, 10)
    assert total.launches == len(STANDARD) and total.stored == n_q * (2 * n_k + 10)


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_visible_pairs_by_brute_force(band):
    for n_q, n_k in itertools.product((0, 1, 2, 7, 12), repeat=2):
        seen = band.keep(np.arange(n_q)[:, None], np.arange(n_k)[None, :])
        assert traffic.visible_pairs(band, n_q, n_k) == int(np.broadcast_to(seen, (n_q, n_k)).sum())


def test_flops_of_whole_grids():
    grid = Grid(32, 48, 8, 8)
    assert count(fa2_forward(Band(), grid), grid, Layout(16, 16)).flops == 4 * 32 * 48 * 16
    assert count(backward(Band(), grid), grid, Layout(16, 16)).flops == 10 * 32 * 48 * 16


def test_sixteen_tokens_in_tiles_of_four_skip_six_of_sixteen():
    counts = traffic.tile_counts(Band(right=0), 16, 16, 4, 4)
    assert counts == {Kind.SKIPPED: 6, Kind.PARTIAL: 4, Kind.FULL: 6}


@pytest.mark.parametrize("n", [64, 256, 2048])
def test_the_largest_block_does_not_grow(n):
    grid = Grid(n, n, 32, 32)
    total = count(fa2_forward(Band(), grid), grid, Layout(32, 32))
    assert max(total.sram.values()) == 1024
    assert total.peak_sram == 6 * 32 * 32 + 3 * 32  # Q, K, V, O, S, P; m, l, factor


def test_bytes_follow_the_dtype_and_statistics_stay_wide():
    grid = Grid(64, 64, 16, 16)
    half, single = (count(fa2_forward(Band(), grid), grid, Layout(8, 8, t)) for t in ("bfloat16", "float32"))
    assert half.elements == single.elements
    assert single.bytes == 4 * single.elements
    assert half.bytes == 2 * (half.elements - 64) + 4 * 64


@pytest.mark.parametrize("order", [*FORWARD, "standard", "backward"])
@pytest.mark.parametrize("causal", [False, True])
def test_sram_is_what_the_executor_holds_after_every_event(order, causal):
    """The count and the computation are compared block by block."""
    rng = np.random.default_rng(42)
    q, k, v = (rng.standard_normal((21, w)).astype(np.float32) for w in (6, 6, 10))
    problem = describe(q, k, v, causal=causal)
    total = Traffic(Grid(21, 21, 8, 21 if order == "standard" else 5), Layout(6, 10))

    def observe(event, machine):
        total.see(event)
        assert total.sram == {name: x.size for name, x in machine.sram.items()}

    if order == "backward":
        out, lse = tiles.forward(problem)
        tiles.backward(problem, out, out, lse, None, 8, 5, observe)
    elif order == "standard":
        tiles.standard(problem, 8, observe)
    else:
        tiles.forward(problem, order, 8, 5, observe)
    assert total.elements > 0
