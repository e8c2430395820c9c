"""The viewer in a real browser: it plays, steps both ways, shows the record, and is accessible."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from flashtile.lab.report.viewer.drawing import STRIPS
from flashtile.lab.report.viewer.scene import SCENES
from flashtile.lab.report.viewer.scenes import ORDERS, SIDE_BY_SIDE
from tests.support.browser import opened, violations

SIZES = {"narrow": {"width": 390, "height": 844}, "wide": {"width": 1280, "height": 900}}
STATE = "[...document.querySelectorAll('.scene:not([hidden]), .deck, .lens')].map((part) => part.innerHTML).join('')"

# Every frame of an order by the scrubber: what its panels show.
READ_ALL = """() => {
    const scrub = document.querySelector('[data-scrub]'), found = [];
    const pairs = (list, ...keys) => [...list].map((e) => keys.map((key) => e.dataset[key] ?? e[key]));
    for (let step = 0; step <= Number(scrub.max); step++) {
        scrub.value = step;
        scrub.dispatchEvent(new Event('input'));
        const panels = [...document.querySelectorAll('.panel[data-order]')].filter((p) => p.offsetParent);
        found.push(panels.map((panel) => ({
            order: panel.dataset.order,
            counters: Object.fromEntries(pairs(panel.querySelectorAll('[data-count]'), 'count', 'textContent')),
            caption: panel.querySelector('[data-caption]').textContent,
            landed: panel.querySelector('[data-closed]').classList.contains('landed'),
            done: pairs(panel.querySelectorAll('.tile.done'), 'i', 'j'),
            now: pairs(panel.querySelectorAll('.tile.now'), 'i', 'j'),
            S: pairs(panel.querySelectorAll('.tile.stored.S'), 'i'),
            P: pairs(panel.querySelectorAll('.tile.stored.P'), 'i'),
            held: pairs(panel.querySelectorAll('.block.in'), 'a', 'n'),
            written: pairs(panel.querySelectorAll('.block.written'), 'a', 'n'),
            times: pairs(panel.querySelectorAll('.times:not(:empty)'), 'a', 'n', 'textContent'),
        })));
    }
    return found;
}"""


def marks(run: dict[str, Any], step: int) -> dict[str, set[tuple[str, ...]]]:
    """What a stage has to show after some events, from the events alone."""
    strips = STRIPS[run["order"]]
    drawn = strips.left + strips.top + strips.right + strips.bottom
    done = run["events"][:step]
    stored = {(e[1], e[2]): e[3] for e in done if e[0] == "Store"}
    shown = {
        "done": {(e[1], e[2]) for e in done if e[0] == "Tile"},
        "now": {(e[1], e[2]) for e in done[-1:] if e[0] == "Tile"}
        | {(e[2], 0) for e in done[-1:] if e[0] == "Make" or (e[0] == "Store" and e[1] in ("S", "P"))},
        "S": {(n,) for name, n in stored if name == "S" and ("P", n) not in stored},
        "P": {(n,) for name, n in stored if name == "P"},
        "held": {(a, n) for a, n in zip(run["names"], run["held"][step], strict=True) if n >= 0 and a in drawn},
        "written": {key for key in stored if key[0] not in ("S", "P")},
        "times": {(*key, f"{n}\u00d7") for key, n in stored.items() if key[0] in ("O", "dQ")},
    }
    return {key: {tuple(map(str, x)) for x in found} for key, found in shown.items()}


def scene_of(recorded: dict[str, Any], name: str) -> dict[str, Any]:
    return next(scene for scene in recorded["scenes"] if scene["name"] == name)


def at(page: Any) -> list[str]:
    """Scene, order, step and row of the address, which is updated a moment later."""
    page.wait_for_timeout(250)
    return page.evaluate("location.hash").removeprefix("#viewer/").split("/")


def go(page: Any, name: str, order: str, step: int) -> None:
    """Open the link to a moment. The page writes the whole address a moment later.

    A busy machine may draw no frames for a while, so the address is looked at by the clock.
    """
    page.evaluate(f"location.hash = '#viewer/{name}/{order}/{step}'")
    page.wait_for_function(f"location.hash.match(/viewer.{name}.{order}.\\d+.\\d+$/)", polling=100, timeout=90_000)


def test_it_loads_only_from_disk(browser, page_file):
    with opened(browser, page_file) as page:
        page.wait_for_load_state("load")
        assert page.locator(".viewer.live").count() == 1
        assert page.locator(".scene:visible").count() == 1
        assert page.locator(".deck:visible, .lens:visible").count() == 2


@pytest.mark.parametrize(
    "name, order", [("oblong", "standard"), ("ragged", "fa1"), ("causal", "fa2"), ("empty", "backward")]
)
def test_every_frame_shows_the_record(browser, page_file, recorded, name, order):
    scene = scene_of(recorded, name)
    with opened(browser, page_file, f"#viewer/{name}/{order}/0") as page:
        shown = page.evaluate(READ_ALL)
    assert len(shown) == len(scene["frames"][order])
    lanes = ("backward",) if order == "backward" else SIDE_BY_SIDE
    for frame, panels in zip(scene["frames"][order], shown, strict=True):
        assert [panel["order"] for panel in panels] == list(lanes)
        for step, panel in zip(frame, panels, strict=True):
            run = scene["runs"][panel["order"]]
            told = dict(zip(recorded["counters"], run["counts"][step], strict=True))
            assert panel["counters"] == {key: f"{n:,}" for key, n in told.items()}
            assert panel["caption"] == run["captions"][step]
            assert panel["landed"] == (step == len(run["events"]))
            expected = marks(run, step)
            assert {key: {tuple(x) for x in panel[key]} for key in expected} == expected, step


@pytest.mark.parametrize(
    "name, order", [("causal", "standard"), ("offset", "fa1"), ("window", "fa2"), ("full", "backward")]
)
def test_stepping_back_restores_every_frame(browser, page_file, recorded, name, order):
    with opened(browser, page_file, f"#viewer/{name}/{order}/0") as page:
        steps = len(scene_of(recorded, name)["frames"][order]) - 1
        there, back = page.evaluate(
            f"""() => {{
                const press = (what) => document.querySelector(`[data-do="${{what}}"]`).click();
                const there = [{STATE}], back = [];
                for (let n = 0; n < {steps}; n++) {{ press('step'); there.push({STATE}); }}
                for (let n = 0; n < {steps}; n++) {{ back.unshift({STATE}); press('back'); }}
                return [there, [{STATE}, ...back]];
            }}"""
        )
        assert len(set(there)) == len(there), "every step shows something new"
        assert there == back


def test_the_last_frame_is_the_drawing_made_without_scripts(browser, page_file):
    panels = "[...document.querySelectorAll('.panel[data-order]')].map((panel) => panel.innerHTML)"
    with opened(browser, page_file, java_script_enabled=False) as page:
        still = page.evaluate(panels)
    with opened(browser, page_file) as page:
        for scene, order in itertools.product(SCENES, ("fa2", "backward")):
            go(page, scene.name, order, 9999)
        played = page.evaluate(panels)
    only_live = re.compile(r' (disabled=""|aria-pressed="(true|false)")')
    assert [only_live.sub("", panel) for panel in played] == [only_live.sub("", panel) for panel in still]


def test_play_reaches_the_end_and_stops(browser, page_file, recorded):
    with opened(browser, page_file, "#viewer/causal/fa2/0") as page:
        page.clock.install()
        page.reload()
        page.select_option("[data-speed]", "8")
        page.click('[data-do="play"]')
        assert page.get_attribute('[data-do="play"]', "aria-label") == "Pause"
        frames = len(scene_of(recorded, "causal")["frames"]["fa2"])
        page.clock.run_for(1000 * frames / 32 / 2)
        middle = int(page.input_value("[data-scrub]"))
        assert 0 < middle < frames - 1
        page.clock.run_for(1000 * frames / 32)
        assert int(page.input_value("[data-scrub]")) == frames - 1
        assert page.get_attribute('[data-do="play"]', "aria-label") == "Play"
        assert page.locator(".panel:visible .closed.landed").count() == len(SIDE_BY_SIDE)
        page.click('[data-do="play"]')
        page.clock.run_for(1000)
        assert 0 < int(page.input_value("[data-scrub]")) < frames - 1, "it starts again from the beginning"


def test_keys(browser, page_file, recorded):
    last = len(scene_of(recorded, "full")["frames"]["fa1"]) - 1
    with opened(browser, page_file, "#viewer/full/fa1/5/3") as page:
        for key, step, row in [
            ("ArrowRight", 6, 3), ("ArrowLeft", 5, 3), ("End", last, 3), ("ArrowRight", last, 3), ("Home", 0, 3),
            ("ArrowLeft", 0, 3), ("ArrowDown", 0, 4), ("ArrowUp", 0, 3),
        ]:  # fmt: skip
            page.keyboard.press(key)
            assert at(page) == ["full", "fa1", str(step), str(row)], key
        page.keyboard.press("Space")
        assert page.locator(".viewer.playing").count() == 1
        page.keyboard.press("Space")
        assert page.locator(".viewer.playing").count() == 0
        page.focus('input[name="scene"]:checked')
        page.keyboard.press("ArrowRight")
        assert at(page)[0] == "causal", "among choices the arrows choose"


def test_every_control_can_be_reached_and_seen_by_keyboard(browser, page_file):
    with opened(browser, page_file) as page:
        seen = set()
        for _ in range(40):
            page.keyboard.press("Tab")
            seen.add(page.evaluate("document.activeElement.dataset.do ?? document.activeElement.dataset.follow ?? ''"))
            assert page.evaluate(
                """() => { const e = document.activeElement; if (e === document.body) return true;
                const shown = e.matches('.choices input') ? e.nextElementSibling : e;
                return getComputedStyle(shown).outlineStyle !== 'none'; }"""
            )
        assert {"first", "back", "play", "step", "last", *SIDE_BY_SIDE} <= seen


@pytest.mark.parametrize(
    "link, expected",
    [
        ("#viewer/window/fa1/40/7", ["window", "fa1", "40", "7"]),
        ("#viewer/offset/backward/9", ["offset", "backward", "9", None]),
        ("#viewer/ragged", ["ragged", "fa2", "0", None]),
        ("#viewer/full/nonsense/-3/x", ["full", "fa2", "0", None]),
        ("#viewer/full/fa2/9999/9999", ["full", "fa2", None, "15"]),
    ],
)
def test_a_link_leads_to_its_moment(browser, page_file, recorded, link, expected):
    with opened(browser, page_file, link) as page:
        found = at(page)
        scene = scene_of(recorded, expected[0])
        default = [None, None, str(len(scene["frames"][found[1]]) - 1), str(scene["row"])]
        assert found == [x if x is not None else default[n] for n, x in enumerate(expected)]
        assert page.locator(f'.scene[data-scene="{expected[0]}"]:visible').count() == 1
        assert page.locator(f'.panel.followed[data-order="{expected[1]}"]:visible').count() == 1


def test_the_lens_follows_one_row(browser, page_file, recorded):
    """The changes of the row, one click each: the sentence and the numbers are those of its tiles."""
    scene = scene_of(recorded, "causal")
    run, row = scene["runs"]["fa2"], scene["row"]
    tiles = [x for at_, x in run["numbers"].items() if run["events"][int(at_)][1] == row // scene["br"]]
    r = row % scene["br"]
    with opened(browser, page_file, "#viewer/causal/fa2/0") as page:
        assert "seen no key yet" in page.text_content("[data-says]")
        for x in tiles:
            page.click('[data-visit="1"]')
            glass = page.text_content("[data-glass]")
            for key in ("m", "l", "factor"):
                assert f"{x[key][r]:.3f}".replace("-", "\u2212") in glass
            says = page.text_content("[data-says]")
            if x["case"][r] == "bigger":
                assert (
                    f"exp({x['m_old'][r]:.3f} - {x['m'][r]:.3f}) = {x['factor'][r]:.3f}".replace("-", "\u2212") in says
                )
        assert {"first", "bigger"} <= {x["case"][r] for x in tiles}
        assert page.is_disabled('[data-visit="1"]')
        tile = page.locator('.panel[data-order="fa2"]:visible .tile[data-i="0"][data-j="0"]')
        tile.scroll_into_view_if_needed()
        box = tile.bounding_box()
        page.mouse.click(box["x"] + 3, box["y"] + box["height"] - 3)
        assert page.text_content("[data-lens-title]") == f"Row {scene['br'] - 1} under the lens"


# Which tiles are red, and which bars reach beyond the line.
READ_FIT = """(name) => {
    const gpu = document.querySelector('[data-gpu]');
    gpu.value = name;
    gpu.dispatchEvent(new Event('change'));
    return [...document.querySelectorAll('.need')].filter((need) => need.offsetParent).map((need) => [
        need.dataset.tile,
        need.classList.contains('over'),
        [...need.querySelectorAll('.part')].pop().getBoundingClientRect().right
            - need.querySelector('[data-room]').getBoundingClientRect().left - 1,
    ]);
}"""


def test_the_fit_turns_red_where_a_tile_is_too_large(browser, page_file, recorded):
    with opened(browser, page_file, reduced_motion="reduce") as page:
        for dim in {need["dim"] for need in recorded["fit"]["needs"]}:
            page.check(f'input[name="dim"][value="{dim}"]', force=True)
            needs = {f"{n['br']}x{n['bc']}": n["bytes"] for n in recorded["fit"]["needs"] if n["dim"] == dim}
            for room in recorded["fit"]["rooms"]:
                shown = page.evaluate(READ_FIT, room["name"])
                assert [tile for tile, _, _ in shown] == list(needs)
                for tile, red, beyond in shown:
                    assert red == (needs[tile] > room["bytes"])
                    assert red == (beyond > 0) or abs(beyond) < 2, "drawn to scale, to a pixel or two"


def test_without_scripts_the_final_frames_can_be_read(browser, page_file, recorded):
    with opened(browser, page_file, java_script_enabled=False) as page:
        assert page.locator(".deck:visible, .lens:visible, form:visible").count() == 0
        assert page.locator(".scene:visible").count() == len(SCENES)
        for scene in recorded["scenes"]:
            text = page.locator(f'.scene[data-scene="{scene["name"]}"]').inner_text()
            for order in ORDERS:
                assert f"{scene['runs'][order]['counts'][-1][0]:,} B" in text.replace("\n", " ")
            assert page.locator(f'.scene[data-scene="{scene["name"]}"] svg:visible').count() == len(ORDERS) + 1
            assert page.locator(f'.scene[data-scene="{scene["name"]}"] table tbody tr').count() >= 2


VIEWS = [("causal", "fa2", 38), ("window", "fa1", 90), ("oblong", "standard", 20), ("ragged", "backward", 80)]
# Boxes that must not touch: whatever shares a parent, and the words of a drawing.
OVERLAPS = """() => {
    const shown = (e) => e.offsetParent !== null || e instanceof SVGElement;
    const groups = ['.viewer', '.play', '.scene:not([hidden])', '.panels', '.panel', '.readings', '.counts', '.lens',
        '.lens .head', '.glass', '.glass > div', '.deck', '.needs', '.need', '.legend', '.two', '.choices'].flatMap(
        (s) => [...document.querySelectorAll(s)].filter(shown).map((e) => [...e.children].filter(shown)));
    for (const svg of document.querySelectorAll('svg.stage')) groups.push([...svg.querySelectorAll('text')]);
    const found = [];
    for (const group of groups) {
        const boxes = group.map((e) => [e, e.getBoundingClientRect()]).filter(([e, b]) => b.width > 0 && b.height > 0);
        boxes.forEach(([a, p], n) => boxes.slice(n + 1).forEach(([b, q]) => {
            const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
            const tall = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
            if (wide > 1 && tall > 1) found.push(`${a.outerHTML.slice(0, 80)} | ${b.outerHTML.slice(0, 80)}`);
        }));
    }
    return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_looks_right(browser, page_file, size, scheme):
    with opened(browser, page_file, viewport=SIZES[size], color_scheme=scheme) as page:
        page.add_style_tag(content=".deck { position: static !important }")  # in its place, not over the rest
        for view in VIEWS:
            go(page, *view)
            assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size]["width"]
            assert page.evaluate(OVERLAPS) == []
            colours = _colours(page.locator(".viewer").screenshot())
            assert len(colours) > 30, "not blank"
            lightness = sum(max(colours, key=lambda c: colours[c])) / 3
            assert lightness > 200 if scheme == "light" else lightness < 60


def _colours(png: bytes) -> dict[tuple[int, ...], int]:
    """The number of pixels of each colour."""
    import io

    from PIL import Image

    image = Image.open(io.BytesIO(png)).convert("RGB")
    return {colour: n for n, colour in image.getcolors(maxcolors=1 << 24)}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser, page_file, scheme):
    with opened(browser, page_file, color_scheme=scheme) as page:
        for view in VIEWS[1::2]:
            go(page, *view)
            assert violations(page) == []


def test_reduced_motion_means_none(browser, page_file):
    longest = """Math.max(...[...document.querySelectorAll('.viewer *')].flatMap((e) =>
        getComputedStyle(e).transitionDuration.split(',').map(parseFloat)))"""
    with opened(browser, page_file) as page:
        assert page.evaluate(longest) > 0
    with opened(browser, page_file, reduced_motion="reduce") as page:
        assert page.evaluate(longest) == 0
        page.click('[data-do="step"]')
        assert at(page)[2] == "1"
