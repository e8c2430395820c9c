"""units.py: human-readable quantities."""

import pytest

from flashtile.lab import units


@pytest.mark.parametrize(
    "n, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (286_720, "280 KiB"),
        (8.25 * 2**20, "8.25 MiB"),
        (2**51, "2048 TiB"),
        (2**55, "32,768 TiB"),
    ],
)
def test_size(n, text):
    assert units.size(n) == text


@pytest.mark.parametrize(
    "n, text", [(1000, "1000"), (2048, "2048"), (8192, "8K"), (5000, "5000"), (131072, "128K"), (1 << 20, "1M")]
)
def test_short(n, text):
    assert units.short(n) == text


def test_quantity_and_seconds():
    assert units.quantity(1.2e9, "FLOP") == "1.2 GFLOP" and units.quantity(3e18, "B/s") == "3000 PB/s"
    assert units.quantity(2.882e19, "FLOP") == "28,820 PFLOP"
    assert [units.quantity(n, "") for n in (12, 12_976_128)] == ["12", "12.98 M"]
    assert [units.seconds(t) for t in (2.5, 0.0025, 0.0000025)] == ["2.5 s", "2.5 ms", "2.5 us"]
    assert [units.seconds(t) for t in (99, 100, 1220, 7000, 1e8)] == ["99 s", "1.7 min", "20 min", "1.9 h", "27,778 h"]
