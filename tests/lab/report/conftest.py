"""Fixtures of the page's tests: one run, its parsed page, and a browser."""

from __future__ import annotations

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from tests.lab.report.markup import Markup
from tests.support.browser import browser as browser
from tests.support.demo_run import demo_run as demo_run


@pytest.fixture(scope="session")
def markup(demo_run) -> Markup:
    return Markup.of(demo_run.page.read_text(encoding="utf-8"))
