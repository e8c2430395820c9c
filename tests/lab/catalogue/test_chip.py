"""catalogue/chip.py: datasheets are consistent, and the hierarchy is the one of the papers."""

import math

import pytest

from flashtile.lab.catalogue import chips, known_as


def test_the_hierarchy_of_the_a100_is_the_one_of_the_papers():
    """SRAM 19 TB/s and 20 MB against HBM 1.5 TB/s and 40 GB."""
    levels = {level.name: level for level in chips()["a100-40"].levels}
    assert list(levels) == ["registers", "SRAM", "L2", "HBM"]
    assert int(levels["SRAM"].rate / 1e12) == 19 and levels["SRAM"].bytes >> 20 == 20
    assert int(levels["HBM"].rate / 1e11) == 15 and levels["HBM"].bytes == 40 << 30
    assert levels["L2"].rate == 5120 * 1.41e9


@pytest.mark.parametrize("name", chips())
def test_a_datasheet_agrees_with_itself(name):
    chip = chips()[name]
    a_clock = chip.tflops["float16"] * 1e6 / (chip.processors * chip.clock_mhz)  # FLOPs of one processor
    assert a_clock == pytest.approx(2 ** round(math.log2(a_clock)), rel=0.02)
    assert chip.tflops["float64"] <= chip.tflops["float32"] <= chip.tflops["float16"]
    assert chip.block_kib <= chip.sram_kib
    rates = [level.rate for level in chip.levels if level.rate is not None]
    assert len(rates) >= 2 and rates == sorted(rates, reverse=True)
    assert chip.levels[-1].bytes == chip.memory_gib << 30 == chip.hardware().memory


def test_the_ridge_of_the_h200():
    assert chips()["h200"].rates().ridge == pytest.approx(206, abs=0.5)
    assert chips()["h200"].rates("float32").flops < chips()["h200"].rates("float16").flops / 10


def test_8_bits_count_as_16_if_widened():
    h200, a100 = chips()["h200"], chips()["a100-80"]
    assert h200.rates("float8_e4m3fn").flops == pytest.approx(2 * h200.rates("bfloat16").flops, rel=1e-3)
    assert a100.rates("float8_e4m3fn") == a100.rates("bfloat16")


def test_capabilities():
    found = {name: chips()[name].capability for name in ("a100-80", "rtx-4090", "h200", "b200", "mi300x")}
    assert found == {"a100-80": (8, 0), "rtx-4090": (8, 9), "h200": (9, 0), "b200": (10, 0), "mi300x": None}


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Tesla T4", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_driver_names_are_recognised(said, name):
    assert known_as(said) == name
