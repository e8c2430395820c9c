"""tables.py: tables of the records of lessons and of the machine."""

from dataclasses import replace

from flashtile.lab.lessons.lesson import Lesson
from flashtile.lab.report import tables
from flashtile.lab.report.content import LessonResult
from flashtile.lab.studies.study import Table


def told(demo_run, name):
    return next(told.record for told in demo_run.content.lessons if told.lesson.name == name)


def test_columns_of_numbers_line_up():
    table = Table("t", ("a", "b", "c"), (("1", "2 KiB", "x"), ("2", "none", "3")))
    assert tables.kinds(table) == ["text", "number", "text"]
    assert tables.kinds(Table("t", ("a", "b"), ())) == ["text", "number"]


def test_the_worked_examples_are_one_table(demo_run):
    record = next(r.record for r in demo_run.content.results if r.study.name == "arithmetic")
    rows = tables.worked(record).rows
    assert [row[0] for row in rows if row[0]] == [example.title for example in record.examples]
    assert ("", "together", "", "65,536 B = 64 KiB") in rows and ("", "together", "", "536,870,912 B = 512 MiB") in rows


def test_one_token_is_followed_through_every_tile(demo_run):
    rows = tables.followed(told(demo_run, "online-softmax")).rows
    assert [row[0] for row in rows] == ["0 to 499", "500 to 999", "1000 to 1499", "1500 to 1999"]
    assert [row[3] for row in rows] == ["0.0000", "0.2725", "1.0000", "1.0000"]


def test_every_launch_has_a_row(demo_run):
    rows = tables.launched(told(demo_run, "launches")).rows
    assert [row[:2] for row in rows] == [
        ("standard", "scores"),
        ("standard", "softmax"),
        ("standard", "values"),
        ("flash", "attention"),
    ]


def test_the_two_orders(demo_run):
    rows = {name: values for name, *values in tables.ordered(told(demo_run, "fa1-vs-fa2")).rows}
    assert rows["writes of a block of O"][1] == "1" != rows["writes of a block of O"][0]
    assert rows["independent loops per head"][0] == "1"
    assert rows["numbers exchanged between warps"][1] == "0" != rows["numbers exchanged between warps"][0]


def test_the_needs_of_lessons_and_how_they_ran(demo_run):
    gpu = Lesson("x", "X", "", needs=("triton",), kernel="x.py")
    lessons = (
        LessonResult(gpu, "", {"device": "cuda"}, None),
        LessonResult(gpu, "", {"device": "cpu"}, None),
        LessonResult(gpu, "", {"device": ""}, None),
        LessonResult(gpu, "", {}, "no moon"),
        LessonResult(Lesson("y", "Y", ""), "", {}, None),
    )
    assert [row[1:] for row in tables.needed(replace(demo_run.content, lessons=lessons)).rows] == [
        ("triton", "ran on the GPU"),
        ("triton", "ran, with its kernel interpreted on the CPU"),
        ("triton", "ran without its kernel"),
        ("triton", "no moon"),
        ("nothing", "ran"),
    ]
    assert any(row[0] == "triton" for row in tables.available(demo_run.content).rows)
    assert ("processor", demo_run.content.machine["processor"]) in tables.versions(demo_run.content).rows
