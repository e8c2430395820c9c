"""Two processes of one group, for the tests of several modules: starting them takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.processes import Ranks


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    with Ranks(2) as found:
        yield found
