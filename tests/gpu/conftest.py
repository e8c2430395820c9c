"""Tests marked gpu skip without a GPU; each waits for the GPU, so that an error is reported where it belongs.

`backend`: the backend that a test's calls use.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from flashtile import dispatch


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    yield
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:  # an illegal address, for example: nothing can run in this process any more
        if "PYTEST_XDIST_WORKER" in os.environ:  # pytest-xdist starts another
            os.write(2, f"{request.node.nodeid}: {error}\n".encode())
            os._exit(1)
        raise


@pytest.fixture
def backend(request: pytest.FixtureRequest, gpu: None) -> Iterator[str]:
    """Calls that name no backend use this one; skip the test if it cannot run here. Parametrized by by_each."""
    from tests.gpu.runner import by

    name: str = request.param
    row = next(row for row in dispatch.TABLE if row.name == name)
    if reason := row.missing():
        pytest.skip(f"{name}: {reason}")
    with by(name):
        yield name
