"""gpu/rows.py: the agreed shapes, work counted by convention, and filters by words."""

import pytest

from flashtile import dispatch
from flashtile.lab.bench.gpu import rows
from flashtile.lab.bench.gpu.rows import ROWS


def of(suite, direction, dtype="bfloat16"):
    return [row for row in ROWS if (row.suite, row.case.direction, row.case.dtype) == (suite, direction, dtype)]


def test_the_training_shapes_are_as_agreed():
    eight_bits = of("train", "forward", "float8_e4m3fn")
    assert len(eight_bits) == 18 and not any(row.extra for row in eight_bits)
    for grid in (of("train", "forward")[:18], of("train", "backward")[:18], eight_bits):
        assert {(r.case.dim, r.causal, r.case.n_q) for r in grid} == {
            (d, c, n) for d in (64, 128, 256) for c in (False, True) for n in (1024, 4096, 16384)
        }
        assert all(r.case.batch * r.case.n_q == 16384 and r.case.heads * r.case.dim == 2048 for r in grid)
    for direction in ("forward", "backward"):
        names = " | ".join(row.name for row in of("train", direction)[18:])
        for said in ("H32/8 N8192", "window1024", "N5000", "packed8"):
            assert said in names
        assert [row.extra for row in of("train", direction)] == [False] * 18 + [True] * 5
    steps = of("train", "step")
    assert [(r.case.dim, r.causal, r.case.n_q, r.extra) for r in steps] == [
        (128, True, n, False) for n in (4096, 16384)
    ]
    assert {row.case.dtype for row in ROWS} == {"bfloat16", "float8_e4m3fn"}


def test_the_decode_shapes_are_as_agreed():
    shapes = [(r.case.batch, r.case.n_k) for r in of("decode", "forward")]
    assert shapes == [(1, 8192), (1, 131072), (16, 8192), (64, 4096)]
    assert {(r.case.heads, r.case.kv_heads, r.case.dim, r.case.n_q) for r in of("decode", "forward")} == {
        (32, 8, 128, 1)
    }


def test_work_is_counted_as_agreed():
    full, causal = (rows.select(only=[f"forward N4096 D128 {mask}"])[0] for mask in ("full", "causal"))
    assert full.flops == 4 * 4 * 16 * 4096**2 * 128 and causal.flops == full.flops / 2
    assert rows.select(only=["backward N4096 D128 full"])[0].flops == 2.5 * full.flops
    assert rows.select(only=["N4096 D128 full float8_e4m3fn"])[0].flops == full.flops
    assert rows.select(only=["step N4096"])[0].flops == 3.5 * causal.flops
    packed = rows.select(only=["forward packed8"])[0]
    assert sum(packed.lengths) == packed.case.n_q == 16384
    assert packed.flops == 2 * 16 * 128 * sum(n * n for n in packed.lengths)
    windowed = rows.select(only=["forward window1024"])[0]
    pairs = 16384 * 1024 - 1024 * 1023 // 2
    assert windowed.window == 1024 and windowed.flops == 4 * 16 * 128 * pairs
    assert windowed.unwindowed().flops == 4 * 16 * 128 * 16384**2
    assert rows.select(["decode"])[2].kv_bytes == 2 * 16 * 8 * 8192 * 128 * 2


def test_the_backend_of_a_row():
    for words in ("forward D64 full", "step", "packed8", "decode", "small"):
        row = rows.select(only=[words])[0]
        assert row.backend("cpu") in ("native", "tiles")
    assert rows.select(only=["packed8"])[0].starts[:3] == [0, 512, 1512]
    assert rows.select(only=["packed8"])[0].starts[-1] == 16384


def test_the_hopper_kernels_run_the_rows_of_their_bars(monkeypatch):
    for row in dispatch.TABLE:
        if row.name in ("gluon", "triton"):
            monkeypatch.setattr(row.load(), "missing", lambda: None)
    assert {row.backend("cuda") for row in ROWS if row.suite == "train"} == {"gluon"}
    assert [row.backend("cuda") for row in rows.select(["small"])] == ["triton", "gluon"]


def test_8_bits_are_measured_only_if_multiplied_as_they_are(monkeypatch):
    gluon = dispatch.TABLE[[row.name for row in dispatch.TABLE].index("gluon")].load()
    monkeypatch.setattr(gluon.gpu, "missing", lambda: None)
    for reason in ("it needs a Hopper GPU", None):
        monkeypatch.setattr(gluon, "missing", lambda reason=reason: reason)
        here, unfit = rows.measurable(ROWS, "cuda")
        assert here == [row for row in ROWS if reason is None or not row.eight_bits]
        assert set(unfit.values()) == ({"gluon: it needs a Hopper GPU"} if reason else set())
        assert list(unfit) == [row.name for row in ROWS if row not in here]


def test_rows_outside_the_grid_come_first_then_the_least_work():
    turns = rows.run_order(ROWS)
    assert sorted(row.name for row in turns) == sorted(row.name for row in ROWS)
    on_grid = [row.suite == "train" and not row.extra for row in turns]
    assert on_grid == sorted(on_grid) and on_grid.count(False) == 18
    grid = [row.flops for row in turns[18:]]
    assert grid == sorted(grid)
    assert {(row.case.direction, row.case.n_q, row.causal) for row in turns[-3:]} == {("backward", 16384, False)}


def test_row_names_are_unique():
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_filters():
    assert rows.select() == list(ROWS)
    assert all(row.suite == "decode" for row in rows.select(["decode"])) and rows.select(["decode"])
    assert {row.case.dim for row in rows.select(only=["d128"])} == {128}
    both = rows.select(only=["D64 causal backward", "packed8"])
    assert both == [r for r in ROWS if (r.case.dim == 64 and r.causal and r.case.direction == "backward") or r.lengths]
    assert rows.select(only=["D12"]) == []  # words, not parts of words
    assert max(row.case.n_k for row in rows.select(quick=True)) == 8192


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_in_a_record_is_plain(row):
    said = row.to_dict()
    assert said["case"] == row.name and said["suite"] == row.suite and said["shape"]["n_k"] == row.case.n_k
    assert "entry" not in said
