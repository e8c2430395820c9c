"""Every way to add two vectors is right, including the last block, and the overhead of a launch is found."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from flashtile.lab.bench.timing import Timing
from flashtile.lab.lessons import device
from flashtile.lab.lessons import vector_add as lesson
from flashtile.lab.lessons.lesson import Unavailable
from flashtile.lab.lessons.text import Say

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Triton's interpreter


def test_a_program_computes_its_positions() -> None:
    a, b, c = np.arange(10.0), np.ones(10), np.full(10, np.nan)
    o, inside = lesson.program(2, a, b, c, 4)
    assert o.tolist() == [8, 9, 10, 11] and inside.tolist() == [True, True, False, False]
    assert c[8:].tolist() == [9, 10] and np.isnan(c[:8]).all()


@pytest.mark.parametrize("n", [1, 4, 10, 1024, 1025])
def test_programs_cover_the_vector(n: int) -> None:
    rng = np.random.default_rng(n)
    a, b, c = rng.standard_normal(n), rng.standard_normal(n), np.full(n, np.nan)
    lesson.programs(a, b, c, 4)
    np.testing.assert_array_equal(c, a + b)


@pytest.mark.parametrize("n", [1, 1000, 1024, 3000])
def test_the_kernel(n: int) -> None:
    try:
        where = device.for_triton()
    except Unavailable as reason:
        pytest.skip(str(reason))
    rng = np.random.default_rng(n)
    a, b = rng.standard_normal(n, np.float32), rng.standard_normal(n, np.float32)
    call, result = lesson.on_triton(where, a, b)
    assert np.isnan(result()).all()
    call()
    np.testing.assert_array_equal(result(), a + b)


def test_without_triton_the_rest_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    lines: list[str] = []
    record = lesson.run(Say(lines.append), quick=True)
    assert "The Triton kernel is left out: triton is not installed; run: pip install" in lines
    assert record["device"] == "" and record["holds"] and len(record["measured"]) == 2


def test_when_the_work_outweighs_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that takes 10 us, plus 1 us per element."""
    lengths = iter((1, 5, 20, 100))

    def timed(calls: object, **options: object) -> dict[str, Timing]:
        n = next(lengths)
        return {"NumPy": Timing((1e-5 + 1e-6 * n,))}

    monkeypatch.setattr(lesson, "alternate", timed)
    (worker,) = lesson.overhead("", (1, 5, 20, 100))
    assert worker["overhead_s"] == pytest.approx(1.1e-5) and worker["work_outweighs_from"] == 20
    assert "From about n = 20 on" in lesson._described(worker)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    record = lesson.run(Say(lambda line: None))
    assert record["device"] == "cuda" and record["holds"]
    assert [row["n"] for row in record["measured"]] == [10_000, 1_000_000, 10_000_000]
    _, gpu = record["sweep"]
    assert gpu["worker"] == "GPU" and gpu["work_outweighs_from"] > 10_000 and gpu["faster_than_numpy_from"] > 1
