"""docs/io.md: its numbers match the code."""

from __future__ import annotations

import re

import pytest

from flashtile import plan
from flashtile.backends import tiles
from flashtile.backends.native import blocks
from flashtile.band import Band
from flashtile.checks.shapes import MAX_DIM
from flashtile.cost import traffic
from flashtile.lab.catalogue import chips, models
from flashtile.lab.catalogue.chip import SRAM_BYTES_PER_CLOCK
from tests.tools.tree import ROOT

TEXT = (ROOT / "docs" / "io.md").read_text()
ROWS = [list(map(int, re.findall(r"\d+", line))) for line in re.findall(r"^\| \d+, \d+ .*", TEXT, re.MULTILINE)]


def test_the_table_has_both_rows():
    assert [row[:2] for row in ROWS] == [[1024, 64], [8192, 128]]


@pytest.mark.parametrize("row", ROWS)
def test_elements_moved(row):
    n, d, standard, fa1, fa2, causal, least = row
    assert standard == traffic.standard_elements(n, d)
    assert fa1 == traffic.fa1_elements(n, d, traffic.fa1_block(51_200, d))
    assert fa2 == traffic.fa2_elements(n, n, d, d, 128, 128, Band())
    assert causal == traffic.fa2_elements(n, n, d, d, 128, 128, Band(right=0))
    assert least == traffic.least_elements(n, d)


def test_flops_per_byte():
    n, d = 1 << 16, 128
    prompt = plan((1, 4, n, d), (1, 4, n, d), "bfloat16")
    assert prompt.intensity == pytest.approx(n / 2, rel=0.01)
    assert prompt.flops / prompt.standard_bytes == pytest.approx(d / 2, rel=0.01)
    assert plan((1, 32, 1, d), (1, 8, n, d), "bfloat16").intensity == pytest.approx(32 / 8, rel=0.01)


def test_other_numbers_of_the_document():
    deepseek = models()["deepseek-v3"]
    assert f"({deepseek.cached_numbers})" in TEXT and f"({deepseek.latent})" in TEXT
    assert f"the\n  {MAX_DIM} that the kernels here support" in TEXT and deepseek.cached_numbers > MAX_DIM
    assert f"{SRAM_BYTES_PER_CLOCK} bytes per clock" in TEXT
    assert f"up to {blocks.MAX_GROUPS} groups" in TEXT and f"x {blocks.FORWARD_KEYS} keys; for few" in TEXT
    assert f"all of them x {blocks.DECODE_KEYS} keys" in TEXT
    assert f"| tiles | {tiles.BLOCK} x {tiles.BLOCK} |" in TEXT
    for name in re.findall(r"--gpu (\S+)", TEXT):
        assert name.strip("`") in {"cpu", *chips()}
