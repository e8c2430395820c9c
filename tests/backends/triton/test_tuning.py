"""tuning.py: every kernel has a tile for every width, and an override holds only within its context."""

from itertools import product

import pytest

from flashtile.backends.gpu.config import (
    Config,
    careful,
)
from flashtile.backends.triton import tuning
from flashtile.backends.triton.tuning import KERNELS


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "gpu", [None, (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), "gfx942", "gfx1100"], ids=str
)
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_there_is_a_tile_for_everything(kernel, gpu, itemsize):
    for dim in (1, 64, 65, 128, 200, 256, 512):
        for pairs, dropout in product((False, True), repeat=2):
            config = tuning.choose(kernel, dim, dim, itemsize, gpu, pairs, dropout)
            assert config.block_q >= 16 and config.block_k >= 16 and config.warps and config.stages


def test_reasoned_rows_are_for_plain_calls_of_16_bits():
    for gpu, family in {(8, 0): "ampere", (8, 6): "ada", (12, 0): "ada", (10, 3): "blackwell"}.items():
        check_family(gpu, family)
    for gpu, family in {"gfx90a": "cdna", "gfx942": "cdna", "gfx1100": "rdna", "gfx1201": "rdna"}.items():
        check_family(gpu, family)
    elsewhere = Config(*tuning.DEFAULT["forward"][128])
    for gpu in (None, (7, 5)):
        assert tuning.choose("forward", 128, 128, 2, gpu, False) == elsewhere
    assert tuning.choose("forward", 128, 128, 2, (8, 0), True) == elsewhere


def check_family(gpu, family):
    for kernel, dims in tuning.REASONED[family].items():
        for dim, config in dims.items():
            assert tuning.choose(kernel, dim, dim, 2, gpu, False) == config
    assert tuning.choose("forward", 64, 64, 4, gpu, False) == Config(*tuning.DEFAULT["forward"][128])


@pytest.mark.parametrize("dim", [16, 64, 128, 256, 512])
def test_careful_tiles_divide_the_others(dim):
    """And no two warps share columns of a product on the matrix unit: 16 rows and 8 columns per warp."""
    for itemsize, exact in ((2, True), (4, True), (4, False), (8, True)):
        for rows in (16, 32, 64, 128):
            for walked in (16, 32, 128):
                config = careful(dim, dim, itemsize, exact, rows, walked)
                assert rows % config.block_q == 0 and walked % config.block_k == 0 and config.stages == 1
            config = careful(dim, dim, itemsize, exact, rows, 32)
            if itemsize == 2:
                assert config.block_q // 16 * config.block_k // 8 >= config.warps


def test_measured_rows_are_used_where_they_were_measured():
    for (major, itemsize), kernels in tuning.MEASURED.items():
        for kernel, dims in kernels.items():
            for dim, config in dims.items():
                assert tuning.choose(kernel, dim, dim, itemsize, (major, 0), False) == config
                assert tuning.choose(kernel, dim, 1, itemsize, (major, 5), False) == config
    assert tuning.choose("forward", 64, 64, 2, None, False) == Config(*tuning.DEFAULT["forward"][64])


def test_dropout_has_rows_where_other_tiles_do_not_fit():
    for (major, itemsize), kernels in tuning.DROPOUT.items():
        for kernel, dims in kernels.items():
            for dim, config in dims.items():
                assert tuning.choose(kernel, dim, dim, itemsize, (major, 0), dropout=True) == config
                assert tuning.choose(kernel, dim, dim, itemsize, (major, 0)) != config
    assert tuning.choose("dq", 128, 128, 2, (9, 0), dropout=True) == tuning.choose("dq", 128, 128, 2, (9, 0))


def test_a_short_decode_has_a_tile_of_its_own_only_if_measured():
    def tiles(dim, itemsize=2, gpu=(9, 0), pairs=False):
        return [tuning.choose(kernel, dim, dim, itemsize, gpu, pairs) for kernel in tuning.DECODES]

    usual, short = tiles(128)
    assert usual == Config(16, 64, 4, 4) and short == Config(16, 64, 2, 3, programs=2)
    others = [tiles(64), tiles(256), tiles(128, itemsize=4), tiles(128, pairs=True)]
    others += [tiles(128, gpu=gpu) for gpu in (None, (8, 0), (10, 0), "gfx942")]
    assert all(usual == short and short.programs == 1 for usual, short in others)
    one = Config(16, 32, 1, 2, programs=2)
    with tuning.override("decode-short", one):
        assert tiles(64)[0] != one and tiles(64)[1] == tiles(128)[1] == one
    with tuning.override("decode", one):
        assert tiles(64) == [one, one] and tiles(128) == [one, short]


def test_a_short_decode_has_the_blocks_that_plan_shows():
    """plan() does not know the number of processors, and shows the blocks of any decode."""
    for (major, itemsize), kernels in tuning.MEASURED.items():
        for dim, config in kernels.get("decode-short", {}).items():
            assert config[:2] == tuning.choose("decode", dim, dim, itemsize, (major, 0), False)[:2]


def test_one_warp_merges_what_its_registers_hold():
    found = {size: tuning.merge_warps(4 * size) for size in (16, 4095, 4096, 4097, 8192, 8193, 16384, 32768, 131072)}
    assert [*found.values()] == [1, 1, 1, 2, 2, 4, 4, 8, 8]


@pytest.mark.parametrize(("kernel", "dim", "axis"), [("forward", 64, "block_k"), ("dq", 128, "block_q")])
def test_a_mask_or_bias_gets_smaller_tiles(kernel, dim, axis):
    plain, paired = (tuning.choose(kernel, dim, dim, 2, (9, 0), pairs) for pairs in (False, True))
    assert getattr(plain, axis) == 128 and getattr(paired, axis) == 64 and paired.stages == 2


def test_an_override_holds_within_its_context():
    before = tuning.choose("dq", 64, 64, 2, (9, 0), False)
    one, two = Config(16, 32, 4, 1), Config(32, 16, 8, 2)
    with tuning.override("dq", one):
        assert tuning.choose("dq", 64, 64, 2, (9, 0), False) == one
        assert tuning.choose("dkdv", 64, 64, 2, (9, 0), False) != one
        with pytest.raises(ZeroDivisionError), tuning.override("dq", two):
            assert tuning.choose("dq", 256, 8, 4, None, True) == two
            raise ZeroDivisionError
        assert tuning.choose("dq", 64, 64, 2, (9, 0), False) == one
    assert tuning.choose("dq", 64, 64, 2, (9, 0), False) == before


def test_statistics_use_measured_rows() -> None:
    assert [tuning.statistics_rows(gpu) for gpu in ((9, 0), (8, 0), "gfx942", None)] == [16, 64, 64, 64]
