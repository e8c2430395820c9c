"""The benchmark of masks: a short run has every line, and its table can be shown."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from flashtile.lab.bench import masks, records, table


def test_a_short_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        masks, "_flex", lambda tensors, spans, absent: absent.setdefault(masks.FLEX, "too slow") and None
    )
    monkeypatch.setattr(masks, "_cases", lambda _shrink, cases=masks._cases: cases(64))
    seen: list[int] = []
    record = masks.run(True, 0.0, lambda what, done, total: seen.append(total - done))
    assert len(record["measurements"]) == masks.LINES and seen[0] == masks.LINES
    assert all(x["value"] is not None for x in record["summary"] if masks.FLEX not in x["measure"])
    shares = {x["case"]: x["share"] for x in record["measurements"] if "share" in x}
    assert shares["eight documents"] in (1 / 8, 1.0)  # beside a dense mask there is no share
    assert shares["half of the keys are padding"] == pytest.approx(0.5, abs=0.01)
    path = tmp_path / "masks.json"
    records.write(record, path)
    assert "image blocks" in table.render(table.read(path)) and "eight documents" in table.details(record)
