"""figures.py: inline figures have unique ids, real text, the page's colours and no external address."""

import re

import pytest

from flashtile.lab.report.figures import draw
from flashtile.lab.studies import canvas


def example():
    figure, (ax,) = canvas.panels(1, 1, width=8, height=3)
    ax.plot([1, 2], [3, 4], "o-", color=canvas.BLUE, label="measured")
    canvas.label(ax, "A title", "N", "time")
    canvas.legend(ax)
    return figure


@pytest.fixture(scope="module")
def drawing():
    return draw("one", example)


def test_every_id_begins_with_the_name_and_every_use_finds_one(drawing):
    ids = re.findall(r'\bid="([^"]+)"', drawing.inline)
    assert ids and len(set(ids)) == len(ids) and all(name.startswith("one-") for name in ids)
    used = re.findall(r'(?:href="#|url\(#)([^")]+)', drawing.inline)
    assert used and set(used) <= set(ids)


def test_it_follows_the_page(drawing):
    assert "var(--accent)" in drawing.inline and "var(--ink)" in drawing.inline and "var(--panel)" in drawing.inline
    assert canvas.BLUE.lower() not in drawing.inline and "DejaVu" not in drawing.inline
    assert canvas.BLUE.lower() in drawing.svg
    head = drawing.inline[: drawing.inline.index(">")]
    assert drawing.inline.startswith("<svg ") and " width=" not in head and "viewBox" in head


def test_text_stays_text(drawing):
    assert ">A title</text>" in drawing.inline and ">measured</text>" in drawing.inline


def test_it_holds_no_address_and_no_style_of_its_own(drawing):
    addresses = set(re.findall(r"https?://[^\"' >]+", drawing.inline))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "<style" not in drawing.inline and "<metadata" not in drawing.inline


def test_the_files_are_what_their_names_say(drawing):
    assert drawing.png.startswith(b"\x89PNG") and drawing.svg.startswith("<?xml")
    assert drawing.rem == 48
    assert draw("one", example, png=False).png is None


def test_nothing_to_draw_is_no_figure():
    assert draw("one", lambda: None) is None


def test_the_same_figure_is_the_same_text_every_time(drawing):
    assert draw("one", example).svg == drawing.svg
