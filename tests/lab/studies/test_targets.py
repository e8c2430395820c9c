"""targets.py: the lesson's kernel compiles for AMD as for NVIDIA, and failures are reported."""

import pytest

from flashtile.host import machine
from flashtile.lab.studies import targets


def test_it_compiles_for_amd():
    pytest.importorskip("triton")
    record = targets.compute(quick=True)
    assert record.holds and {target.vendor for target in targets.TARGETS.values()} == {"NVIDIA", "AMD"}
    (amd,) = record.built
    assert "mfma" in amd.instruction and amd.bytes > 1000
    assert "gfx942" in targets.findings(record)[0] and targets.tables(record)[0].rows


def test_without_triton_it_says_so(monkeypatch):
    monkeypatch.setattr(machine, "has", lambda package: False)
    record = targets.compute()
    assert record.built == ()
    assert targets.findings(record) == [
        "Nothing was compiled: triton is not installed; run: pip install 'flashtile[gpu]'."
    ]
    assert targets.tables(record) == [] and record.holds


def test_a_target_that_triton_does_not_know_is_an_error():
    pytest.importorskip("triton")
    with pytest.raises(RuntimeError, match="compiling for gfx0"):
        targets._compiled_apart(("gfx0",))


def test_unused_matrix_units_are_reported():
    idle = targets.Built("x", "AMD", "MI", 1.0, 1, "")
    record = targets.Record("k", (idle,), None)
    assert not record.holds and "does not use the matrix units" in targets.findings(record)[1]


def test_an_empty_record_has_no_figure():
    assert targets.draw(targets.Record("k", (), "no")) is None
