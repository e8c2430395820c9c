"""folder.py: written as a whole or not at all, and never over other files."""

import pytest

from flashtile.lab.report import folder, page
from flashtile.lab.report.figures import Drawing

DRAWING = Drawing("<svg></svg>", "<svg/>", b"png", 60)


@pytest.fixture
def content(demo_run):
    return demo_run.content


@pytest.fixture
def drawings(content):
    return {result.study.name: DRAWING for result in content.results}


def everything(where):
    return {path.relative_to(where).as_posix() for path in where.rglob("*")}


def contents(where):
    return {name: (where / name).read_bytes() for name in everything(where) if (where / name).is_file()}


def test_it_writes_the_page_the_figures_and_the_records(content, drawings, tmp_path):
    written = folder.write(content, drawings, tmp_path / "deep" / "demo")
    assert written == tmp_path / "deep" / "demo" / "index.html" and folder.MARK in written.read_text(encoding="utf-8")
    names = {result.study.name for result in content.results}
    found = everything(written.parent)
    assert {f"figures/{name}.{kind}" for name in names for kind in ("svg", "png")} <= found
    assert {f"records/{name}.json" for name in (*names, "about", "lessons")} <= found
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["demo"]


def test_a_second_run_replaces_the_first(content, drawings, tmp_path):
    first = folder.write(content, drawings, tmp_path / "demo")
    (first.parent / "figures" / "stale.svg").write_text("old")
    folder.write(content, drawings, tmp_path / "demo")
    assert not (first.parent / "figures" / "stale.svg").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_a_failed_run_leaves_the_old_files(content, drawings, tmp_path, monkeypatch):
    folder.write(content, drawings, tmp_path / "demo")
    before = contents(tmp_path)
    monkeypatch.setattr(page, "render", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        folder.write(content, drawings, tmp_path / "demo")
    assert contents(tmp_path) == before
    with pytest.raises(ZeroDivisionError):
        folder.write(content, drawings, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_other_files_are_not_overwritten(content, drawings, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="expected a new or empty folder"):
        folder.write(content, drawings, tmp_path)
    (tmp_path / "thesis.tex").rename(tmp_path / "index.html")
    with pytest.raises(ValueError, match="expected a new or empty folder"):
        folder.check(tmp_path)
    with pytest.raises(ValueError, match="got a file"):
        folder.check(tmp_path / "index.html")
    (tmp_path / "index.html").unlink()
    folder.check(tmp_path)
    folder.check(tmp_path / "new")
