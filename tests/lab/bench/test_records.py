"""records.py: records are written atomically, read back, and compared."""

import json

import pytest

from flashtile.lab.bench import records
from tests.lab.bench.samples import example


def test_a_record_describes_its_machine():
    record = records.new("cpu", quick=True, threads=2)
    assert record["schema"] == records.SCHEMA and record["threads"] == 2 and record["quick"] is True
    assert {"versions", "processor", "isa", "commit", "cores", "system"} <= set(record["machine"])
    assert record["machine"]["versions"]["numpy"]


def test_round_trip(tmp_path):
    path = tmp_path / "deep" / "record.json"
    records.write(example(), path)
    assert records.read(path)["summary"] == example()["summary"]
    assert [p.name for p in path.parent.iterdir()] == ["record.json"]


def test_a_failed_write_leaves_the_old_record(tmp_path):
    path = tmp_path / "record.json"
    records.write(example(), path)
    before = path.read_text()
    with pytest.raises(TypeError):
        records.write({"unwritable": object()}, path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]


def test_another_schema_is_refused(tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"schema": 999}))
    with pytest.raises(ValueError, match="schema"):
        records.read(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "1", '{"schema": 1}', '{"schema": 1, "suite": 2}'])
def test_a_malformed_record_is_refused_by_name(tmp_path, text):
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"^{path}: expected a record"):
        records.read(path)


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 10_000, '"\\ud800', "\0"])
def test_invalid_json_is_refused_by_name(tmp_path, text):
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"^{path}: expected a record"):
        records.read(path)


def test_records_of_one_run_are_alike():
    record = records.new("cpu", quick=False, threads=2)
    records.check_alike(record, json.loads(json.dumps(record)) | {"created": "later", "measurements": [1]})
    other = record | {"machine": record["machine"] | {"commit": "0123"}}
    with pytest.raises(ValueError, match=r"^machine, commit differs: 0123 in the other record, "):
        records.check_alike(record, other)
    with pytest.raises(ValueError, match=r"^threads differs: 3 in the other record, 2 here"):
        records.check_alike(record, record | {"threads": 3})
