"""tuning.py: every kernel has a tile for every width, and an override holds only while it is asked for."""

import pytest

from flashtile.backends.triton import tuning
from flashtile.backends.triton.tuning import KERNELS, Config


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("capability", [None, (8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_there_is_a_tile_for_everything(kernel, capability, itemsize):
    for dim in (1, 64, 65, 128, 200, 256, 512):
        for pairs in (False, True):
            config = tuning.choose(kernel, dim, dim, itemsize, capability, pairs)
            assert config.block_q >= 16 and config.block_k >= 16 and config.warps and config.stages


def test_measured_rows_are_used_where_they_were_measured():
    for (major, itemsize), kernels in tuning.MEASURED.items():
        for kernel, dims in kernels.items():
            for dim, config in dims.items():
                assert tuning.choose(kernel, dim, dim, itemsize, (major, 0), False) == config
                assert tuning.choose(kernel, dim, 1, itemsize, (major, 5), False) == config
    assert tuning.choose("forward", 64, 64, 2, None, False) == Config(*tuning.ELSEWHERE["forward"][64])


def test_a_mask_or_bias_gets_smaller_tiles():
    config = tuning.choose("forward", 128, 128, 2, (9, 0), True)
    assert config.block_q <= 64 and config.block_k <= 64


def test_an_override_holds_while_it_is_asked_for():
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
