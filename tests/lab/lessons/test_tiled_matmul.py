"""The tiled product is right, elements are used BLOCK_N and BLOCK_M times per load, and Triton's agrees."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from flashtile.lab.lessons import device
from flashtile.lab.lessons import tiled_matmul as lesson
from flashtile.lab.lessons.lesson import Unavailable
from flashtile.lab.lessons.text import Say

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Triton's interpreter


@pytest.mark.parametrize("blocks", [(1, 1, 1), (2, 3, 4), (7, 5, 3), (50, 50, 50)])
def test_tiles_make_the_product(blocks: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(0)
    A, B = rng.integers(-9, 9, (12, 10)), rng.integers(-9, 9, (10, 15))
    np.testing.assert_array_equal(lesson.tiled(A, B, blocks), A @ B)


def test_uses_per_load() -> None:
    A, B = np.ones((8, 4)), np.ones((4, 12))
    count = lesson.Count.of(A, B)
    lesson.tiled(A, B, (4, 6, 2), lambda rows, inner, cols, tile: count.see(rows, inner, cols))
    assert (count.uses_a == 12).all() and (count.uses_b == 8).all()  # n and m: every product is made once
    assert (count.loads_a == 12 // 6).all() and (count.loads_b == 8 // 4).all()


def test_the_walk_through() -> None:
    lines: list[str] = []
    walked = lesson.walk_through(Say(lines.append))
    assert walked["equal"] and (np.array(walked["A"]) @ walked["B"] == walked["C"]).all()
    assert walked["used"] == {"A": {"loads": 2, "uses": 6}, "B": {"loads": 2, "uses": 4}}
    text = " ".join(lines)
    assert "3 times per load: BLOCK_N = 3" in text and "2 times per load: BLOCK_M = 2" in text


def test_loads_fall_as_tiles_grow() -> None:
    rows = lesson.reuse(Say(lambda line: None), 64)
    assert [row["uses"] // row["loads"] for row in rows] == [row["block"] for row in rows]
    assert len({row["uses"] for row in rows}) == 1


def test_the_kernel() -> None:
    try:
        where = device.for_triton()
    except Unavailable as reason:
        pytest.skip(str(reason))
    import torch

    rng = np.random.default_rng(0)
    A, B = (torch.from_numpy(rng.integers(-4, 4, shape).astype(np.float32)) for shape in ((33, 20), (20, 50)))
    C = lesson.on_triton(A.to(where), B.to(where), blocks=(16, 32, 16))
    assert torch.equal(C.cpu(), A @ B)  # small whole numbers: no rounding


def test_without_triton_the_rest_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    lines: list[str] = []
    record = lesson.run(Say(lines.append), quick=True)
    assert "The Triton kernel is left out: triton is not installed; run: pip install" in lines
    assert record["triton"] is None and record["holds"]


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    record = lesson.run(Say(lambda line: None))
    assert record["triton"]["device"] == "cuda" and record["holds"]
    assert set(record["triton"]["times"]) == {"Triton, tiles of 64", "Triton, tiles of 128", "torch.matmul"}
