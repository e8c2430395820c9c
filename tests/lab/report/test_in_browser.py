"""The page in a real browser: quiet, self-contained, within its width, and fit for everyone."""

import pytest

from tests.support.browser import opened, violations

SIZES = {"narrow": {"width": 390, "height": 844}, "wide": {"width": 1280, "height": 900}}
OPEN_ALL = "document.querySelectorAll('details').forEach((part) => { part.open = true; })"
# Everything outside a part that scrolls by itself, and wider than the window.
TOO_WIDE = """() => [...document.querySelectorAll('main *, header *, footer *')].filter((e) => {
    const box = e.getBoundingClientRect();
    return box.width && box.right > innerWidth + 1 && !e.closest('.plot, .table, pre, .equation, #viewer, .skip');
}).map((e) => e.outerHTML.slice(0, 100))"""

CUT = """() => [...document.querySelectorAll('.table')].filter((e) => e.scrollWidth > e.clientWidth + 1)
    .map((e) => e.ariaLabel)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_wider_than_the_window(browser, demo_run, size, scheme):
    with opened(browser, demo_run.page, viewport=SIZES[size], color_scheme=scheme) as page:
        page.evaluate(OPEN_ALL)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate(TOO_WIDE) == []


def test_no_table_is_cut_on_a_wide_page(browser, demo_run):
    with opened(browser, demo_run.page, viewport=SIZES["wide"]) as page:
        page.evaluate(OPEN_ALL)
        assert page.evaluate(CUT) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_stands_in_anyones_way(browser, demo_run, scheme):
    with opened(browser, demo_run.page, color_scheme=scheme) as page:
        page.evaluate(OPEN_ALL)
        assert violations(page) == []


def test_it_can_be_read_without_scripts(browser, demo_run):
    with opened(browser, demo_run.page, java_script_enabled=False) as page:
        assert page.locator("#theme").is_hidden()
        assert page.locator("main > section").count() > 10
        assert page.locator("#study-equivalence svg").is_visible()
        page.locator("#study-equivalence summary").click()
        assert page.locator("#study-equivalence table").first.is_visible()


def test_the_button_changes_the_paper(browser, demo_run):
    paper = "getComputedStyle(document.body).backgroundColor"
    with opened(browser, demo_run.page, color_scheme="light") as page:
        light = page.evaluate(paper)
        page.locator("#theme").click()
        assert page.evaluate(paper) != light
        page.locator("#theme").click()
        assert page.evaluate(paper) == light


def test_the_keyboard_gets_to_the_text_first(browser, demo_run):
    with opened(browser, demo_run.page) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.getAttribute('href')") == "#main"


def test_paper_is_light_and_shows_what_is_folded(browser, demo_run):
    with opened(browser, demo_run.page, color_scheme="dark") as page:
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.locator("#questions .answer").first.bounding_box()["height"] > 0
