"""showcase.py: the equivalence part holds, notices errors, and all parts come out as plain values."""

import json

import numpy as np

from flashtile import machine
from flashtile.bench import cases, peers, showcase


def small(monkeypatch):
    monkeypatch.setattr(showcase, "CONFIGURATIONS", showcase.CONFIGURATIONS[:2])
    monkeypatch.setattr(showcase, "LENGTHS", (128,))
    monkeypatch.setattr(showcase, "SPEED", (cases.square(32, 16, naive=True),) * 2)
    monkeypatch.setattr(showcase, "SECONDS", 0.01)


def test_it_holds(monkeypatch):
    small(monkeypatch)
    result = json.loads(json.dumps(showcase.run(threads=1)))
    assert result["holds"] is True
    assert peers.NAIVE_NUMPY in result["speed"][0]["times"]
    assert set(result["memory"][0]["grown"]) == {peers.OURS, peers.NAIVE_NUMPY}


def test_it_works_without_torch(monkeypatch):
    small(monkeypatch)
    monkeypatch.setattr(machine, "has", lambda package: False)
    result = showcase.run(threads=1)
    assert result["holds"] and set(result["absent"]) == {peers.SDPA, peers.NAIVE_TORCH}
    assert set(result["speed"][0]["times"]) == {peers.OURS, peers.NAIVE_NUMPY}


def test_every_configuration_holds_and_an_error_would_show(monkeypatch):
    for configuration in showcase.CONFIGURATIONS:
        assert showcase._equivalence(*configuration)["holds"], configuration[0]
    plain = showcase.tiles.forward
    monkeypatch.setattr(showcase.tiles, "forward", lambda *a: (np.add(plain(*a)[0], 1e-9), None))
    assert not showcase._equivalence(*showcase.CONFIGURATIONS[0])["holds"]
