"""The folder that a run writes: the page, its figures and its records; replaced as a whole or not at all."""

import json
import os
import tempfile
from pathlib import Path

from flashtile.lab.report import page
from flashtile.lab.report.content import Content
from flashtile.lab.report.figures import Drawing

PAGE, FIGURES, RECORDS = "index.html", "figures", "records"
MARK = '<meta name="generator" content="flashtile">'  # identifies a folder as ours


def check(folder: Path) -> None:
    """Refuse to overwrite other files."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"expected a folder, got a file: {folder}")
    found = {path.name for path in folder.iterdir()}
    ours = PAGE in found and found <= {PAGE, FIGURES, RECORDS} and MARK in (folder / PAGE).read_text(errors="replace")
    if found and not ours:
        raise ValueError(f"expected a new or empty folder, or one that flashtile demo wrote: {folder}")


def write(content: Content, drawings: dict[str, Drawing], folder: Path) -> Path:
    """Write everything next to the folder, move it into place, the page last, and return the path of the page."""
    check(folder)
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
        made, old = Path(name) / "made", Path(name) / "old"
        _fill(made, content, drawings)
        old.mkdir()
        folder.mkdir(exist_ok=True)
        for part in (FIGURES, RECORDS, PAGE):
            if (folder / part).exists():
                os.rename(folder / part, old / part)
            os.rename(made / part, folder / part)
    return folder / PAGE


def _fill(made: Path, content: Content, drawings: dict[str, Drawing]) -> None:
    for part in (made, made / FIGURES, made / RECORDS):
        part.mkdir()
    for study, drawing in drawings.items():
        (made / FIGURES / f"{study}.svg").write_text(drawing.svg, encoding="utf-8")
        if drawing.png is not None:
            (made / FIGURES / f"{study}.png").write_bytes(drawing.png)
    for record, value in content.records().items():
        (made / RECORDS / f"{record}.json").write_text(json.dumps(value, indent=1) + "\n")
    (made / PAGE).write_text(page.render(content, drawings), encoding="utf-8")
