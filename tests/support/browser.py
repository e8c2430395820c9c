"""A real browser for tests of pages: one headless Chromium per session, and checks of requests and console."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
AXE = Path(__file__).parents[2] / "build" / "npm" / "node_modules" / "axe-core" / "axe.min.js"


def skip_or_fail(reason: str) -> None:
    """Skip the test; in continuous integration, where nothing may be missing, fail it."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    print(reason)
    pytest.skip(reason)


def executable(playwright: Any) -> str | None:
    """The path of a Chromium: on PATH, or playwright's own."""
    return next(filter(None, map(shutil.which, (*NAMES, playwright.chromium.executable_path))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        skip_or_fail("no browser: playwright is not installed")
    with sync_playwright() as playwright:
        path = executable(playwright)
        if path is None:
            skip_or_fail(f"no browser: none of {', '.join(NAMES)} is on the path, and playwright has none of its own")
        started = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield started
        started.close()


@contextmanager
def opened(browser: Any, path: Path, fragment: str = "", **options: Any) -> Iterator[Any]:
    """Open a page from disk; on exit, check that it logged no error and requested nothing but its own file."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    page = context.new_page()
    complaints: list[str] = []
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.partition("#")[0]))
    page.goto(f"{path.as_uri()}{fragment}")
    try:
        yield page
        assert complaints == []
        assert set(asked) == {path.as_uri()}
    finally:
        context.close()


def violations(page: Any) -> list[str]:
    """The serious and critical findings of axe-core."""
    if not AXE.exists():
        skip_or_fail(f"no axe-core: {AXE} is missing")
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [
        f"{v['id']}: {node['target']} {node['html'][:120]}"
        for v in found
        if v["impact"] in ("serious", "critical")
        for node in v["nodes"]
    ]


if __name__ == "__main__":
    from playwright.sync_api import sync_playwright

    with sync_playwright() as found:
        sys.exit(None if executable(found) else "no browser: the tests of pages will be skipped")
