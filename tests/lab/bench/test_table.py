"""table.py and tables/: records are shown as markdown, and put into documents."""

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from flashtile.lab.bench import records, table
from flashtile.lab.bench.tables import cpu, goals
from tests.lab.bench.samples import example

RECORDS = Path(__file__).parents[3] / "benchmarks" / "records"


def broken(record: Any, rng: random.Random) -> None:
    """Remove or change one value anywhere in the record."""
    while True:
        places = list(record) if isinstance(record, dict) else range(len(record))
        place = rng.choice(list(places))
        inner = record[place]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.85:
            record = inner
            continue
        if isinstance(record, dict) and rng.random() < 0.3:
            del record[place]
        else:
            record[place] = rng.choice([None, True, -1, 0, 1e400, "x", [], {}, [1], {"x": 1}])
        return


@pytest.mark.parametrize("name", ["cpu", "gpu", "io", "masks", "tune"])
def test_a_record_with_a_wrong_value_is_shown_or_refused_by_name(tmp_path, name):
    whole, rng, path = (RECORDS / f"{name}.json").read_text(), random.Random(0), tmp_path / "record.json"
    short = json.loads(whole)
    short["measurements"] = short["measurements"][:: max(1, len(short["measurements"]) // 6)]
    refused = 0
    for _ in range(120):
        record = copy.deepcopy(short)
        broken(record, rng)
        path.write_text(json.dumps(record))
        try:
            table.render(table.read(path))
        except ValueError as error:
            refused += 1
            assert str(error).startswith(f"{path}: expected ")
    assert refused


def test_text_of_a_record_cannot_end_a_cell_or_a_place(tmp_path):
    name = "a | b\n<!-- end of bench -->\n# <script>x</script> [c](d) `e` \\"
    record = example()
    record["machine"] |= {"processor": name, "commit": "<b>", "versions": {"flashtile": name, "torch": "", "numpy": ""}}
    record["measurements"][0] |= {"group": name, "case": name, "times": {name: {"median_s": 1.0}}}
    record["summary"][0] |= {"title": name, "measure": name, "holds": False}
    path, document = tmp_path / "r.json", tmp_path / "README.md"
    records.write(record, path)
    before = "one\n<!-- bench: r.json -->\n<!-- end of bench -->\n<!-- brief: r.json -->\n<!-- end of brief -->\ntwo\n"
    document.write_text(before)
    for _ in range(2):
        table.put_into(document, path)
    text = document.read_text()
    assert [place.kind for place in table.marked(text)] == ["bench", "brief"] and text.endswith(
        "end of brief -->\ntwo\n"
    )
    for shown in (table.render(record), table.render(record, table.BRIEF), table.details(record)):
        assert not re.search(r"(?<!\\)[<>\[\]`]", shown) and "\n#" not in shown
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in shown.splitlines() if line.startswith("|")}
        assert len(widths) <= 2, "every row of a table has as many cells"


def test_records_of_unknown_suites_can_be_read_but_not_shown(tmp_path):
    path = tmp_path / "record.json"
    records.write(example() | {"suite": "moon"}, path)
    assert records.read(path)["suite"] == "moon"
    with pytest.raises(ValueError, match=rf"^{path}: expected a record of the suite cpu or gpu .*'moon'"):
        table.read(path)


def test_tables():
    record = example()
    assert "| forward | time / SDPA time | 0.50 | 0.50 | 0.85, none over 0.97 | yes |" in goals.summary(record)
    assert "| full | B1 H8 N512 D64 float32 | forward | 1 | 2 | 0.50 | 123 |" in table.details(record)
    assert "| B1 | forward | 1.0 |  |" in cpu._memory(record)
    assert "| flashtile, MiB | torch SDPA, MiB |" in cpu._memory(record)
    assert "2 threads" in cpu.caption(record)


def test_a_table_is_put_into_a_document(tmp_path):
    records.write(example(), tmp_path / "records" / "r.json")
    document = tmp_path / "README.md"
    document.write_text("before\n<!-- bench:  -->\n<!-- end of bench -->\nafter\n")
    table.put_into(document, tmp_path / "records" / "r.json")
    text = document.read_text()
    assert table.marked(text) == [("bench", "records/r.json", table.render(example()))]
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    table.put_into(document, tmp_path / "records" / "r.json")
    assert document.read_text() == text


def test_paths_are_relative_to_the_document(tmp_path):
    records.write(example(), tmp_path / "records" / "r.json")
    document = tmp_path / "docs" / "d.md"
    document.parent.mkdir()
    document.write_text("<!-- bench:  -->\n<!-- end of bench -->\n")
    table.put_into(document, tmp_path / "records" / "r.json")
    assert [place.path for place in table.marked(document.read_text())] == ["../records/r.json"]


def test_a_document_may_show_several_records(tmp_path):
    for name in ("a.json", "b.json", "c.json"):
        records.write(example() | {"threads": ord(name[0])}, tmp_path / name)
    document = tmp_path / "README.md"
    place = "<!-- bench:  -->\n<!-- end of bench -->\n"
    document.write_text(f"one\n{place}two\n{place}three\n")
    table.put_into(document, tmp_path / "a.json")
    table.put_into(document, tmp_path / "b.json")
    table.put_into(document, tmp_path / "a.json")
    found = {place.path: place.body for place in table.marked(document.read_text())}
    assert list(found) == ["a.json", "b.json"] and "97 threads" in found["a.json"] and "98 threads" in found["b.json"]
    with pytest.raises(ValueError, match=r"bench: c\.json"):
        table.put_into(document, tmp_path / "c.json")


def test_a_document_may_show_a_record_in_brief_and_in_full(tmp_path):
    records.write(example(), tmp_path / "r.json")
    document = tmp_path / "README.md"
    document.write_text(
        "<!-- brief: r.json -->\nold\n<!-- end of brief -->\n<!-- bench: r.json -->\n<!-- end of bench -->\n"
    )
    table.put_into(document, tmp_path / "r.json")
    short, whole = table.marked(document.read_text())
    assert short.body == table.render(example(), table.BRIEF) and whole.body == table.render(example())
    assert "| forward | 2.0 |" in short.body and "old" not in short.body and len(short.body) < len(whole.body)


def test_a_brief_of_several_records_shows_their_range(tmp_path):
    """It has the range over the records."""
    one, two = example(), json.loads(json.dumps(example()))
    two["summary"][0]["value"] = 0.8
    for name, record in (("a.json", one), ("b.json", two)):
        records.write(record, tmp_path / name)
    document = tmp_path / "README.md"
    document.write_text("<!-- brief: a.json b.json -->\n<!-- end of brief -->\n")
    table.put_into(document, tmp_path / "b.json")
    (place,) = table.marked(document.read_text())
    assert place.path == "a.json b.json" and place.body == table.render(one, table.BRIEF, two)
    assert "| forward | 1.2 to 2.0 |" in place.body and place.body.count("goals are reached") == 2


def test_goals():
    line = {
        "title": "t",
        "measure": "m",
        "value": 1.5,
        "worst": 1.0499,
        "bar": None,
        "worst_bar": 1.05,
        "at_least": True,
    }
    record = example()
    record["summary"] = [line | {"holds": True}, line | {"holds": None}]
    assert goals.goals(record) == "1 of 1 goals are reached."
    record["summary"].append(line | {"holds": False})
    shown = "1 of 2 goals are reached. Not yet:\n\n- t: m mean 1.50, worst 1.050; goal: none under 1.05"
    assert goals.goals(record) == shown


def test_lower_bounds_and_lines_without_a_bar():
    line = {"title": "t", "measure": "m", "value": 1.5, "worst": 1.25, "bar": None, "worst_bar": 1.05, "at_least": True}
    record = example()
    record["summary"] = [line | {"holds": True}, line | {"worst_bar": None, "holds": None}]
    shown = goals.summary(record)
    assert "| t | m | 1.50 | 1.25 | none under 1.05 | yes |" in shown and "| t | m | 1.50 | 1.25 |  |  |" in shown


def test_a_document_without_a_place_is_refused(tmp_path):
    records.write(example(), tmp_path / "r.json")
    (tmp_path / "README.md").write_text("nothing here")
    with pytest.raises(ValueError, match="expected a line"):
        table.put_into(tmp_path / "README.md", tmp_path / "r.json")


@pytest.mark.parametrize(("worst", "shown"), [(1.1513, "1.151"), (1.15, "1.15"), (1.149, "1.149"), (1.16, "1.16")])
def test_a_number_near_its_bar_has_one_more_digit(worst, shown):
    line = {"title": "t", "measure": "m", "value": 1.04, "worst": worst, "bar": None, "worst_bar": 1.15}
    record = example()
    record["summary"] = [line | {"holds": worst <= 1.15}]
    assert f"| 1.04 | {shown} | none over 1.15 |" in goals.summary(record)
