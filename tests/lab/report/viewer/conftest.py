"""Fixtures: the viewer's record and its page, made once."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from flashtile.lab.report import palette
from flashtile.lab.report.viewer import fragment, scenes

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Tiles</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>
<body><header><h1>Tiles</h1></header><main>{viewer}</main></body></html>"""


@pytest.fixture(scope="session")
def made() -> str:
    return fragment(scenes())


@pytest.fixture(scope="session")
def recorded(made: str) -> dict[str, Any]:
    """The record, read from the page."""
    return json.loads(re.search(r'<script type="application/json" id="scenes">(.*?)</script>', made, re.DOTALL)[1])


@pytest.fixture(scope="session")
def page_file(made: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("viewer") / "index.html"
    path.write_text(
        PAGE.format(style=palette.css() + files("flashtile.lab.report").joinpath("style.css").read_text(), viewer=made)
    )
    return path
