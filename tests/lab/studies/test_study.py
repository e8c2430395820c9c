"""Every study: plain records, complete tables, sentences with numbers, a figure with its axes."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest

from flashtile.lab.studies import STUDIES
from flashtile.lab.studies.study import qkv, to_dict
from tests.lab.studies.records import ALL, record

AXES = {
    "equivalence": ["Queries x keys, and the tile", "Block size (N = 256, d = 64)", "Online softmax"],
    "memory": ["Peak memory of one head, float32", "Tiled, measured", "By dtype, N = 256"],
    "block_size": ["A tile grows as B²", "Fewer tiles, the same work", "Moved through HBM", "The same accuracy"],
    "tiling": [
        "FA1: column by column",
        "FA2: row by row",
        "Weights, never stored whole",
        "Causal: 6 skipped, 10 processed",
        *(f"Tile {n}" for n in (1, 2, 3, 4)),
    ],
    "causal": ["Unequal blocks: 24 x 8, N = 96", "Share of tiles skipped", "Queries x keys, and the tile"],
    "models": ["One head of one layer, float16, d = 128", "Scores of one layer, all heads: never built"],
    "materialization": ["The largest array besides the results, elements", "All 8,416 arrays at N = 512, FA2 order"],
    "arithmetic": ["N = 1024, d = 64", "N = 8192, d = 128"],
}


def test_the_first_seven_are_numbered_and_those_that_measure_time_come_last():
    assert [study.name for study in STUDIES if study.numbered] == list(AXES)[:7]
    assert [study.numbered for study in STUDIES] == sorted((study.numbered for study in STUDIES), reverse=True)
    assert [study.timed for study in STUDIES] == sorted(study.timed for study in STUDIES)
    assert all(study.question.endswith("?") for study in STUDIES)


@pytest.mark.parametrize("name", ALL)
def test_the_quick_record_holds_and_survives_json(name):
    found = record(name)
    assert found.holds
    plain = to_dict(found)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert set(plain) == {field.name for field in dataclasses.fields(found)}


@pytest.mark.parametrize("name", ALL)
def test_tables_and_findings(name):
    study, found = ALL[name], record(name)
    tables, findings = study.tables(found), study.findings(found)
    assert tables and findings
    for table in tables:
        assert table.title and table.rows
        assert {len(row) for row in table.rows} == {len(table.head)}
        assert all(isinstance(cell, str) for row in table.rows for cell in row)
    assert all(sentence.endswith(".") for sentence in findings)
    assert sum(bool(re.search(r"\d", sentence)) for sentence in findings) >= len(findings) - 1


@pytest.mark.parametrize("name", ALL)
def test_the_figure(name):
    pytest.importorskip("matplotlib")
    figure = ALL[name].draw(record(name))
    panels = [ax for ax in figure.axes if ax.get_title(loc="left")]
    assert [ax.get_title(loc="left") for ax in panels] == AXES[name]
    assert all(ax.lines or ax.patches or ax.images for ax in panels)
    figure.draw_without_rendering()
    bounds = figure.bbox.padded(1)
    for ax in panels:  # no title runs out of the figure
        box = ax._left_title.get_window_extent()
        assert bounds.x0 <= box.x0 and box.x1 <= bounds.x1, ax.get_title(loc="left")


def test_studies_need_neither_matplotlib_nor_torch_until_they_draw():
    some = "[study.compute(True) for study in s.STUDIES if study.name in ('memory', 'causal', 'models')]"
    code = f"import sys, flashtile.lab.studies as s; {some}; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "'flashtile.lab.catalogue'" in done.stdout
    assert not {"'matplotlib'", "'torch'", "'triton'", "'rich'", "'typer'"} & set(done.stdout.strip("[]\n").split(", "))


def test_samples_are_the_same_every_time():
    assert all((a == b).all() for a, b in zip(qkv(5, 3), qkv(5, 3), strict=True))
    assert abs(qkv(1, 1)[0][0, 0] - 0.30471707975443135) < 1e-15, "seed 42"


@dataclasses.dataclass
class Odd:
    x: object


def test_to_dict_takes_plain_values_only():
    assert to_dict(Odd({"a": (1, None, True, "b", float("inf"))})) == {"x": {"a": [1, None, True, "b", "inf"]}}
    with pytest.raises(TypeError, match="complex"):
        to_dict(Odd(1j))
