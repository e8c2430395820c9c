"""The catalogue of masks: pictures, and what each mask costs."""

from __future__ import annotations

import numpy as np
import pytest

import flashtile as ft
from flashtile.lab.catalogue.masks import BLOCK, MASKS, Mask
from tests.tools import masks

every_mask = pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)


def test_the_picture_is_that_of_the_code() -> None:
    assert masks.PICTURE.read_text() == masks.svg(), "run: python -m tests.tools.masks"


@every_mask
def test_costs(mask: Mask) -> None:
    n = 1024
    visible, cost = mask.visible(n), mask.cost(n)
    seen = visible.keep(np.arange(n)[:, None], np.arange(n)[None])
    seen_tiles = seen.reshape(n // BLOCK, BLOCK, n // BLOCK, BLOCK).any(axis=(1, 3))
    assert cost.share == seen.mean() and cost.tiles == seen_tiles.mean()
    assert cost.dense == seen.nbytes
    limits = [x.limits.nbytes for name, x in mask.options(n).items() if name == "spans"]
    assert cost.spans == sum(limits)


@every_mask
def test_options_are_those_of_the_picture(mask: Mask) -> None:
    n = 64
    q = np.random.default_rng(0).standard_normal((n, 8))
    dense = mask.visible(n).keep(np.arange(n)[:, None], np.arange(n)[None])
    np.testing.assert_allclose(ft.attention(q, q, q, **mask.options(n)), ft.attention(q, q, q, mask=dense), atol=1e-12)
