"""split.py: shares of the keys merge exactly, and a wrong merge is detected."""

import flashtile
from flashtile.lab.studies import split


def test_shares_merge_exactly():
    record = split.compute()
    assert record.holds and record.identity == 0
    assert [m.parts for m in record.of("float64")] == list(split.PARTS) and max(split.PARTS) > 8
    assert "exactly the same" in split.findings(record)[1]


def test_a_wrong_merge_is_detected(monkeypatch):
    right = flashtile.merge
    monkeypatch.setattr(flashtile, "merge", lambda a, la, b, lb: right(a, la + 1e-6, b, lb))
    assert not split.compute().holds
