"""recompute.py: gradients of every backend are those of the oracle, and an error is detected."""

import numpy as np
import pytest

import flashtile
from flashtile.lab.studies import recompute


def test_the_gradients_hold():
    record = recompute.compute()
    assert record.holds and record.worst < 1e-12
    assert {c.causal for c in record.compared} == {False, True} and "tiles" in {c.backend for c in record.compared}
    last = record.kept[-1]
    assert last.weights // last.lse == last.n and last.weights == 4 * last.n**2
    assert record.recompute_flops / record.backward_flops == pytest.approx(0.2)
    assert "64 GiB" in recompute.findings(record)[1]


def test_a_wrong_gradient_is_detected(monkeypatch):
    right = flashtile.attention_backward

    def wrong(*given, backend, **more):
        grads = right(*given, backend=backend, **more)
        return grads if backend == "reference" else grads._replace(dk=np.add(grads.dk, 1e-6))

    monkeypatch.setattr(flashtile, "attention_backward", wrong)
    assert not recompute.compute().holds
