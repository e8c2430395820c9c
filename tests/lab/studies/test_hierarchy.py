"""hierarchy.py: the papers' GPU by published figures, and this machine, measured once."""

import pytest

from flashtile.cost.hardware import Rates
from flashtile.host import machine
from flashtile.lab.studies import hierarchy


@pytest.fixture(scope="module")
def record():
    return hierarchy.compute(quick=True)


def test_the_figures_of_the_papers(record):
    near, far = hierarchy.fast(record.paper), hierarchy.slow(record.paper)
    assert near.bytes / 1e6 == pytest.approx(20, abs=1.5) and near.rate / 1e12 == pytest.approx(19, abs=0.6)
    assert far.bytes >> 30 == 40 and far.rate / 1e12 == pytest.approx(1.5, abs=0.1)
    assert "13 times as fast" in hierarchy.findings(record)[0]


def test_this_machine_is_measured(record):
    assert record.here.measured and record.here.rates.flops > 1e8 and record.here.rates.bytes > 1e8
    assert record.here is hierarchy.this_machine(True)  # one roof for every chart
    assert "measured here" in hierarchy.tables(record)[1].title


def test_the_best_of_several_tries(record):
    import dataclasses

    slow = dataclasses.replace(record.here, levels=tuple(dataclasses.replace(x, rate=1.0) for x in record.here.levels))
    busy = dataclasses.replace(record.here, rates=Rates(1.0, 1.0))
    known = [level.rate for level in record.here.levels if level.rate]
    found = hierarchy.best([slow, busy])
    assert found.rates == record.here.rates and [x.rate for x in found.levels if x.rate and x.rate > 1] == known


def test_a_known_gpu_is_listed(monkeypatch):
    gpu = {"device": "cuda:0", "name": "NVIDIA H200", "memory": 1}
    monkeypatch.setattr(machine, "devices", lambda: [{"device": "cpu", "name": "x"}, gpu, gpu])
    assert [h.name for h in hierarchy.compute(quick=True).machines][2:] == ["NVIDIA H200 SXM"]


def test_a_machine_with_unknown_rates_gets_no_finding(record):
    import dataclasses

    mute = dataclasses.replace(record.here, levels=record.here.levels[-1:])
    assert hierarchy.findings(hierarchy.Record((mute,))) == []


def test_it_can_be_drawn(record):
    pytest.importorskip("matplotlib")
    assert len(hierarchy.draw(record).axes[0].get_lines()) == len(record.machines)
