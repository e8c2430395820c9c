"""bench/rates.py and bench/levels.py: the best of several ways, and the caches as the system reports them."""

import pytest

from flashtile.backends import native
from flashtile.lab.bench import levels, rates
from flashtile.lab.bench.timing import Timing


def timed(monkeypatch, seconds):
    monkeypatch.setattr(rates, "alternate", lambda calls, **_: {name: Timing((9.0, seconds[name])) for name in calls})
    return rates.measure()


def test_the_roof_is_the_best_rate_measured(monkeypatch):
    """Our own kernels count too, since on some machines they are faster than NumPy's product."""
    monkeypatch.setattr(native, "missing", lambda: None)
    slow = {"product": 1.0, "attention": 1.0, "copy": 1.0, "read": 1.0, "decode": 1.0}
    same = timed(monkeypatch, slow)
    assert timed(monkeypatch, slow | {"attention": 0.25}).flops == 4 * 2 * 1024**2 * 128 / 0.25 > same.flops
    assert timed(monkeypatch, slow | {"product": 0.25}).flops == 4 * same.flops == 2 * 1024**3 / 0.25
    assert timed(monkeypatch, slow | {"decode": 0.25}).bytes == 4 * levels.LARGE
    assert timed(monkeypatch, slow | {"read": 0.125}).bytes == 8 * levels.LARGE


def test_without_the_core_numpy_sets_it(monkeypatch):
    monkeypatch.setattr(native, "missing", lambda: "no core")
    assert timed(monkeypatch, {"product": 0.5, "copy": 1.0, "read": 1.0}).flops == 4 * 1024**3


def test_here():
    found = rates.this_machine(seconds=0.02)
    assert found.measured and found.rates.flops > 1e6 and found.rates.bytes > 1e6
    names = [level.name for level in found.levels]
    assert names == sorted(names, key=["registers", "L1", "L2", "L3", "memory"].index)
    assert found.levels[-1].rate == found.rates.bytes
    assert all(level.rate is None or level.rate > 1e6 for level in found.levels)


def cache(folder, n, level, kind, size, shared):
    (folder / f"index{n}").mkdir()
    for name, text in zip(("level", "type", "size", "shared_cpu_list"), (level, kind, size, shared), strict=True):
        (folder / f"index{n}" / name).write_text(f"{text}\n")


def test_caches(tmp_path):
    cache(tmp_path, 0, "1", "Data", "48K", "0,4")
    cache(tmp_path, 1, "1", "Instruction", "32K", "0,4")
    cache(tmp_path, 2, "3", "Unified", "32768K", "0-3,8-9")
    assert list(levels.caches(tmp_path)) == [("L1", 48 << 10, 2), ("L3", 32 << 20, 6)]
    assert list(levels.caches(tmp_path / "nowhere")) == []


@pytest.mark.parametrize("size", [64, 8 << 10, 3 << 20])
def test_copies_move_the_bytes_they_count(size):
    copies = levels.Copies(size, 2)
    for n, (to, source) in enumerate(copies.pairs):
        source[...] = n + 1
        assert to.strides == (levels.LINE, 1) and to.shape == source.shape
        assert (to.shape[0] - 1) * levels.LINE + to.shape[1] == max(size, 2 * levels.LINE)  # within its bytes
    copies.run()
    assert [(to == n + 1).all() for n, (to, _) in enumerate(copies.pairs)] == [True, True]
    assert copies.moved == 2 * 2 * copies.times * copies.pairs[0][0].nbytes
