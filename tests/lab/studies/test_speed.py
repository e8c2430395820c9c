"""speed.py: findings, tables and figure follow from the record, with and without a GPU."""

from dataclasses import replace

import pytest

from flashtile.cost.hardware import Rates
from flashtile.lab.bench.cases import FORWARD, TRAINING
from flashtile.lab.bench.showcase import Row, Run, Side, Speed
from flashtile.lab.bench.workload import NAIVE_NUMPY, NAIVE_TORCH, OURS, SDPA
from flashtile.lab.studies import speed


def run(seconds, grown=None):
    return Run(seconds, seconds, seconds, 3, 1e9 / seconds, 1 / seconds / 100, 10.0, grown)


def row(n, direction, **times):
    return Row(f"N{n}", 8, n, 64, "float32", direction, "native", 10**9, times)


CPU = Side(
    "CPU",
    Rates(1e11, 1e10),
    (
        row(512, FORWARD, **{OURS: run(0.02), SDPA: run(0.04), NAIVE_NUMPY: run(0.1)}),
        row(1024, FORWARD, **{OURS: run(0.025), SDPA: run(0.05), NAIVE_NUMPY: run(0.2)}),
        row(2048, TRAINING, **{OURS: run(0.5), SDPA: run(0.4)}),
    ),
)
GPU = Side(
    "A GPU",
    Rates(1e15, 1e12),
    (row(1024, FORWARD, **{OURS: run(0.02, 0), SDPA: run(0.01, 0), NAIVE_NUMPY: run(0.1, 1 << 20)}),),
)
ALONE = Speed(2, {}, CPU, None, "torch sees no GPU")
BOTH = replace(ALONE, gpu=GPU, no_gpu=None)


def test_before_and_after_come_from_the_longest_forward_pass():
    first, best, second, third = speed.findings(ALONE)
    assert "N = 1,024: naive NumPy reaches 5% of the best rate measured, flashtile 40%" in first
    assert "25 ms instead of 200 ms" in first
    assert "100 GFLOP/s and 10 GB/s" in best and "Above 10 FLOPs per byte" in best
    assert "takes 0.50 to 1.25 of the time" in second
    assert third == "There are no GPU times: torch sees no GPU."


def test_absent_peers_are_named_once_with_a_remedy():
    found = speed.findings(replace(ALONE, absent=dict.fromkeys((SDPA, NAIVE_TORCH), "torch is not installed")))
    assert f"{SDPA} and {NAIVE_TORCH} were not timed: torch is not installed." in found
    assert found.count("To compare with torch: pip install 'flashtile[torch]', then run flashtile demo.") == 1
    assert not any("pip install" in sentence for sentence in speed.findings(ALONE))


def spiked(**changes):
    first, *others = CPU.rows
    return replace(CPU, rows=(replace(first, runs=first.runs | changes), *others))


@pytest.mark.parametrize("odd", [replace(run(0.1), q3=0.2), run(0.3)], ids=["far apart", "longer than a longer one"])
def test_an_unsteady_baseline_is_named_and_not_drawn(odd):
    pytest.importorskip("matplotlib")
    side = spiked(**{NAIVE_NUMPY: odd})
    assert speed.unsteady(side, side.rows[0], NAIVE_NUMPY) and not speed.unsteady(CPU, CPU.rows[0], NAIVE_NUMPY)
    assert speed.tables(replace(ALONE, cpu=side))[0].rows[0][-1].endswith(" ms (unsteady)")
    lines = {line.get_label(): list(line.get_xdata()) for line in speed.draw(replace(ALONE, cpu=side)).axes[0].lines}
    assert lines[f"{NAIVE_NUMPY}, unsteady at 512"] == [1024] and lines[OURS] == [512, 1024]


def test_our_own_line_is_drawn_unfiltered():
    pytest.importorskip("matplotlib")
    side = spiked(**{OURS: run(0.3)})
    lines = {line.get_label(): list(line.get_xdata()) for line in speed.draw(replace(ALONE, cpu=side)).axes[0].lines}
    assert lines[OURS] == [512, 1024]


def test_a_gpu_has_its_own_tables_and_findings():
    assert [table.title.partition(":")[0].partition(",")[0] for table in speed.tables(BOTH)] == ["CPU"] * 2 + [
        "A GPU"
    ] * 3
    assert speed.tables(BOTH)[-1].rows == (("N = 1,024, forward", "0 B", "0 B", "1 MiB"),)
    assert any(sentence.startswith("A GPU, N = 1,024") for sentence in speed.findings(BOTH))


def test_findings_skip_cases_too_large_for_standard_attention():
    large = row(4096, FORWARD, **{OURS: run(1.0), SDPA: run(2.0)})
    assert speed.longest(replace(CPU, rows=(*CPU.rows, large))).n == 1024


def test_a_missing_contender_leaves_an_empty_cell():
    times = speed.tables(ALONE)[0]
    assert times.head == ("case", OURS, SDPA, NAIVE_NUMPY)
    assert times.rows[-1] == ("N = 2,048, forward + backward", "500 ms", "400 ms", "")


@pytest.mark.parametrize("record, panels", [(ALONE, 2), (BOTH, 4)])
def test_the_figure_has_a_roof_for_every_device(record, panels):
    pytest.importorskip("matplotlib")
    axes = speed.draw(record).axes
    assert len(axes) == panels
    roof = axes[1].get_lines()[0]
    assert list(roof.get_xdata())[1] == CPU.rates.ridge and list(roof.get_ydata())[1:] == [1e11, 1e11]
