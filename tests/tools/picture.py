"""Draw docs/viewer.png, the README's picture of the page: python -m tests.tools.picture [index.html of a demo]."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from flashtile.lab.cli import main
from tests.support.browser import FLAGS, executable

PICTURE = Path(__file__).parents[2] / "docs" / "viewer.png"
MOMENT = "#viewer/causal/fa2/40"


def draw(page: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(playwright), args=FLAGS)
        tab = browser.new_page(viewport={"width": 1280, "height": 1360}, color_scheme="light", reduced_motion="reduce")
        tab.goto(f"{page.as_uri()}{MOMENT}")
        tab.evaluate("document.querySelector('#viewer').scrollIntoView()")
        tab.screenshot(path=PICTURE)
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        draw(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as folder:
            sys.argv = ["flashtile", "demo", "--out", f"{folder}/demo"]
            try:
                main()
            except SystemExit as done:
                if done.code:
                    raise
            draw(Path(folder) / "demo" / "index.html")
