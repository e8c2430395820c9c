"""For every test: new arrays are filled with NaN, and Hypothesis repeats its examples unless another profile is set."""

from __future__ import annotations

import os
from pathlib import Path

# Without a GPU the Triton kernels run under Triton's interpreter, which must be enabled before triton is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Workers share the cores: if each had a BLAS with many threads, they would wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from typing import Any

import hypothesis
import numpy as np
import pytest

# HYPOTHESIS_PROFILE=search tries many new examples each time.
hypothesis.settings.register_profile("every", deadline=None, derandomize=True, max_examples=150, database=None)
hypothesis.settings.register_profile("search", deadline=None, max_examples=5000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "every"))


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the arrays of np.empty with NaN, so that a result that was never written cannot pass."""

    def poisoning(make: Any) -> Any:
        def made(*args: Any, **options: Any) -> Any:
            x = make(*args, **options)
            if x.ndim and x.flags.c_contiguous and not x.dtype.hasobject:
                x.view(np.uint8).fill(0xFF)
            return x

        return made

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(np, name, poisoning(getattr(np, name)))
