"""palette.py: text is readable in both colour schemes, and both have every colour."""

import pytest

from flashtile.lab.report import palette
from flashtile.lab.studies import canvas


def luminance(colour):
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a, b):
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


SCHEMES = {"light": palette.LIGHT, "dark": palette.DARK}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("paper", ["paper", "panel"])
@pytest.mark.parametrize("name", ["ink", "muted", "accent", "warm", "good", "bad"])
def test_text_is_readable(scheme, paper, name):
    assert contrast(SCHEMES[scheme][name], SCHEMES[scheme][paper]) >= 4.5


@pytest.mark.parametrize("name", ["orange", "green", "red", "purple", "sky"])
def test_lines_are_visible_on_dark_pages(name):
    assert contrast(palette.DARK[name], palette.DARK["panel"]) >= 3


def test_text_on_tiles_is_readable():
    for scheme in SCHEMES.values():
        for name in ("orange", "sky"):
            assert contrast(canvas.ON_TILE, scheme[name]) >= 4.5
        assert contrast(scheme["ink"], scheme["skipped"]) >= 4.5


def test_both_schemes_have_every_colour():
    assert list(palette.LIGHT) == list(palette.DARK)
    css = palette.css()
    for colours in SCHEMES.values():
        assert all(f"--{name}: {value};" in css for name, value in colours.items())
    assert css.count("--ink:") == 5  # light, dark by the system, light and dark by the page, print


def test_figures_follow_the_page_but_white_stays_white():
    found = palette.variables()
    assert found[canvas.INK] == "var(--ink)" and found[canvas.BLUE.lower()] == "var(--accent)"
    assert "#ffffff" not in found
