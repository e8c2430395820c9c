"""timing.py: contenders take turns, warm-up is not counted, and the statistics are right."""

import random

import pytest

from flashtile.lab.bench.timing import Ratio, Timing, alternate, geometric_mean


def test_contenders_take_turns():
    calls = []
    times = alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, seconds=0, min_rounds=3)
    assert calls == ["a", "b"] * 4  # one round to warm up
    assert {name: len(t.samples) for name, t in times.items()} == {"a": 3, "b": 3}


def test_rounds_may_be_shuffled():
    def order(seed):
        calls = []
        contenders = {name: lambda name=name: calls.append(name) for name in "abc"}
        alternate(contenders, seconds=0, min_rounds=8, max_rounds=8, warm_up=0, shuffle=random.Random(seed))
        return ["".join(calls[n : n + 3]) for n in range(0, 24, 3)]

    assert order(1) == order(1) != order(2)
    assert all(sorted(each) == ["a", "b", "c"] for each in order(1)) and len(set(order(1))) > 1


def test_another_clock():
    times = alternate({"a": lambda: None}, seconds=0, max_rounds=3, clock=lambda call: 7.0)
    assert times["a"].samples == (7.0, 7.0, 7.0) and times["a"].over(2).samples == (3.5, 3.5, 3.5)


def test_the_before_call_is_not_timed():
    import time

    times = alternate({"a": lambda: None}, seconds=0, min_rounds=2, warm_up=0, before=lambda: time.sleep(0.02))
    assert times["a"].median < 0.02


def test_time_and_rounds_are_limits():
    assert len(alternate({"a": lambda: None}, seconds=10, max_rounds=7)["a"].samples) == 7


def test_garbage_collection_is_restored():
    import gc

    with pytest.raises(ZeroDivisionError):
        alternate({"a": lambda: 1 / 0}, seconds=0, warm_up=0)
    assert gc.isenabled()


def test_statistics():
    t = Timing((4.0, 1.0, 3.0, 2.0))
    assert t.median == 2.5 and t.quartiles == (1.75, 3.25)
    assert t.to_dict() == {"median_s": 2.5, "q1_s": 1.75, "q3_s": 3.25, "rounds": 4}
    assert Timing((2.0,)).quartiles == (2.0, 2.0)
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    ratio = Ratio.of(Timing((1.0, 2.0, 3.0)), Timing((2.0, 2.0, 2.0)))
    assert (ratio.value, ratio.q1, ratio.q3) == (1.0, 0.75, 1.25)
