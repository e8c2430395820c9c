"""The worked examples, and the IO complexity of the theorem."""

import itertools

import pytest

from tests.lab.studies.records import record, told


@pytest.fixture(scope="module")
def found():
    return record("arithmetic")


@pytest.fixture(scope="module")
def examples(found):
    return {example.name: example for example in found.examples}


KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def values(examples, name):
    return [part.value for part in examples[name].lines]


def test_128k_by_128k_is_64_gib(examples):
    assert values(examples, "long-context") == [64 * GIB]


def test_two_tables_at_8192(examples):
    assert values(examples, "two-tables") == [256 * MIB, 256 * MIB] and examples["two-tables"].total == 512 * MIB


def test_a_tile_of_64_by_128(examples):
    assert values(examples, "tile") == [16 * KIB] * 4 and examples["tile"].total == 64 * KIB


def test_the_exercise_at_4096(examples):
    assert values(examples, "exercise-scores") == [16_777_216, 64 * MIB]
    assert values(examples, "exercise-tile") == [8 * KIB]


def test_2000_tokens(examples):
    assert values(examples, "article") == [4_000_000, 8_000_000]


def test_the_products_match_their_text(found):
    for example in found.examples:
        for part in example.lines:
            product = 1
            for factor in part.sum.removesuffix(" B").split(" x "):
                product *= int(factor.replace(",", ""))
            assert product == part.value


def test_they_are_in_the_findings():
    text = told("arithmetic")
    for figure in (
        "64 GiB",
        "256 MiB",
        "512 MiB",
        "16 KiB",
        "64 KiB",
        "16,777,216",
        "64 MiB",
        "8 KiB",
        "4,000,000",
        "8 MB",
    ):
        assert figure in text


def test_traffic_falls_as_sram_grows(found):
    assert found.holds
    for n, d in ((1024, 64), (8192, 128)):
        moved = [m for m in found.moved if (m.n, m.d) == (n, d)]
        assert all(m.standard == 4 * n * n + 4 * n * d and m.least == 4 * n * d + n for m in moved)
        assert all(m.tiled == 2 * n * d + m.columns * (3 * n * d + 4 * n) for m in moved)
        many = [m for m in moved if m.columns >= 8]
        for a, b in itertools.pairwise(many):
            assert b.sram == 2 * a.sram and a.tiled / b.tiled == pytest.approx(2, rel=0.05)
        assert any(m.tiled < m.standard for m in moved)
