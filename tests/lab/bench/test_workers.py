"""workers.py: answers come in order, and a job that raises, dies or hangs does not affect the others."""

import time

from flashtile.lab.bench import workers

TARGET = "tests.lab.bench.jobs:work"


def run(*names, **more):
    jobs = [{"do": name} for name in names]
    return workers.run(TARGET, jobs, **{"workers": 1, "seconds": 20.0} | more)


def test_answers_come_in_order_from_one_process():
    seen = []
    answers = run("a", "b", "c", environment={"SAID_BY_TEST": "hello"}, done=lambda *told: seen.append(told))
    assert [answer["said"] for answer in answers] == ["a", "b", "c"]
    assert seen == [({"do": "a"}, 1), ({"do": "b"}, 2), ({"do": "c"}, 3)]
    assert len({answer["process"] for answer in answers}) == 1
    assert {answer["variable"] for answer in answers} == {"hello"}


def test_failures_are_reported_and_the_next_job_gets_a_fresh_process():
    first, dead, raised, last = run("a", "die", "raise", "b")
    assert dead == {"failed": "it died: last words"}
    assert raised == {"failed": "ValueError: wrong"}
    assert last["said"] == "b" and last["process"] != first["process"]


def test_a_hanging_worker_is_ended():
    start = time.monotonic()
    (answer,) = run("hang", seconds=1.5)
    assert answer["failed"].startswith("no answer in") and time.monotonic() - start < 20


def test_no_job_starts_after_the_end():
    assert run("a", "b", end=time.monotonic() - 1) == [{"failed": "no time was left"}] * 2


def test_several_work_at_once():
    assert [answer["said"] for answer in run(*"abcd", workers=2)] == list("abcd")
    assert run() == []
