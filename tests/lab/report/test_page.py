"""The page: every section, every table as computed, no external address, no typed number."""

import json
import re
from dataclasses import replace

import pytest
from jinja2 import UndefinedError

from flashtile.lab import studies
from flashtile.lab.bench.showcase import Speed
from flashtile.lab.bench.workload import NAIVE_NUMPY, NAIVE_TORCH, OURS, SDPA
from flashtile.lab.report import mathml, page
from flashtile.lab.report.content import LessonResult, Result
from flashtile.lab.report.figures import Drawing
from flashtile.lab.studies import targets
from flashtile.lab.studies.study import to_dict
from tests.lab.report.markup import Markup
from tests.tools.tree import SOURCE

TEMPLATES = [*(SOURCE / "lab" / "report").glob("*.j2"), *(SOURCE / "lab" / "report" / "sections").glob("*.j2")]
NAMES = re.compile(r"FlashAttention(-| )\d(, \d and \d)?|float\d\d")  # digits that belong to a name
NUMBER_WORDS = re.compile(r"\b(three|four|five|six|seven|eight|nine|ten|eleven|twelve|hundred|thousand)\b", re.I)


def test_it_is_well_formed(markup):
    assert markup.headings[0] == 1 and markup.headings.count(1) == 1
    deeper = [b - a for a, b in zip(markup.headings, markup.headings[1:], strict=False)]
    assert max(deeper) == 1
    assert len(set(markup.ids)) == len(markup.ids)
    assert markup.links and set(markup.links) <= set(markup.ids)


def test_an_open_tag_is_detected():
    with pytest.raises(AssertionError, match="closes"):
        Markup.of("<main><p>words</main>")


def test_every_section_is_there_and_in_the_contents(markup, demo_run):
    ids = [name for name in markup.ids if name in {section.id for section in page.SECTIONS}]
    assert ids == [section.id for section in page.SECTIONS]
    assert {section.id for section in page.SECTIONS} <= set(markup.links)
    text = demo_run.page.read_text(encoding="utf-8")
    assert all(f'<h2 id="{section.id}-title">{section.title}</h2>' in text for section in page.SECTIONS)
    assert {path.name.partition(".")[0] for path in TEMPLATES if path.parent.name == "sections"} == {
        section.id for section in page.SECTIONS if section.id != "viewer"
    }


def test_every_result_and_lesson_is_there(markup, demo_run):
    results = {f"study-{r.study.name}" for r in demo_run.content.results if r.study.name != "arithmetic"}
    assert results | {f"lesson-{told.lesson.name}" for told in demo_run.content.lessons} <= set(markup.ids)
    assert len(results) == len(studies.STUDIES) - 1
    page_text = demo_run.page.read_text(encoding="utf-8")
    assert page_text.count('<figure class="wide">') == len(results) + 1
    for told in demo_run.content.lessons:
        shown = told.reason or told.text
        assert " ".join(shown.split()) in markup.text
        assert " ".join(told.source.split()) in markup.text


def test_equations_are_numbered_as_in_the_document(markup):
    assert {f"eq-{n}" for n in mathml.EQUATIONS} <= set(markup.ids)


def test_it_needs_nothing_from_elsewhere(demo_run):
    text = demo_run.page.read_text(encoding="utf-8")
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink", "http://www.w3.org/1998/Math/MathML"}
    assert set(re.findall(r"https?://[^\"' <>)]+", text)) <= namespaces
    assert not re.search(r'<(script|img|iframe|link)[^>]+(src|href)="(?!data:)', text)
    assert "@import" not in text


def test_the_page_shows_what_was_computed_and_the_records_hold_it(markup, demo_run):
    content = demo_run.content
    for result in content.results:
        written = json.loads((demo_run.folder / "records" / f"{result.study.name}.json").read_text())
        assert written == json.loads(json.dumps(to_dict(result.record)))
        for sentence in result.findings:
            assert " ".join(sentence.split()) in markup.text
        shown = result.tables[len(result.record.examples) :] if result.study.name == "arithmetic" else result.tables
        for table in shown:
            assert markup.tables[table.title] == [list(table.head), *map(list, table.rows)], table.title


def test_another_record_is_detected(markup, demo_run):
    result = next(r for r in demo_run.content.results if r.study.name == "split")
    first = result.tables[0]
    assert markup.tables[first.title] != [list(first.head), *map(list, first.rows[::-1])]


@pytest.mark.parametrize(
    "what",
    [
        *("64 GiB", "256 MiB", "512 MiB", "16 KiB", "64 KiB", "16,777,216", "64 MiB", "8 KiB", "4,000,000", "8 MB"),
        *("multiplied by 0.27", "three operations", "six trips", "one launch", "two trips"),
        *("20.25 MiB at 19.49 TB/s", "40 GiB at 1.555 TB/s"),
        *("8.25 MiB against 272 KiB, or 280 KiB", "241x", "6 tiles are skipped, 10 are processed"),
        *("32 GiB per head and layer", "34 MB", "262,144 scores"),
        *("vLLM", "TensorRT-LLM", "transformers", "TGI", "scaled_dot_product_attention"),
        *("Is it approximate?", "Wrong:", "Right.", "FlashAttention-3", "Grouped heads", "gfx942"),
    ],
)
def test_the_expected_facts_are_on_the_page(markup, what):
    assert what in markup.text


def stripped(text):
    """The typed text of a template, without its expressions, tags and scripts."""
    text = re.sub(r"<(script|style).*?</\1>", " ", text, flags=re.DOTALL)
    text = re.sub(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}", " ", text, flags=re.DOTALL)
    return re.sub(r"<[^>]*>|&\w+;", " ", text)


def literals(text):
    """Strings in expressions that are shown as they are: not formulas, formats or keys."""
    for expression in re.findall(r"\{[{%](.*?)[%}]\}", text, re.DOTALL):
        code = r"""formula\("[^"]*"|from "[^"]*"|include .*|"%[^"]*"|\["[^"]*"\]|level="h3"|, "h4\""""
        expression = re.sub(code, " ", expression)
        yield from re.findall(r'"([^"]*)"', expression)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_no_number_is_typed_into_a_template(path):
    text = path.read_text()
    for words in (stripped(text), *literals(text)):
        words = NAMES.sub("", words)
        assert not re.search(r"\d", words), re.search(r".{0,40}\d.{0,40}", words, re.DOTALL)[0]
        assert not NUMBER_WORDS.search(words), NUMBER_WORDS.search(words)


def test_a_typed_number_is_detected():
    assert re.search(r"\d", NAMES.sub("", stripped("<p>takes {{ n }} and 64 GiB, by FlashAttention-2</p>")))
    assert not re.search(r"\d", NAMES.sub("", stripped('<p class="h2">{{ n | size(3) }} by FlashAttention-2</p>')))
    assert "64 GiB" in list(literals('{{ "64 GiB" }} {{ formula("12 N") }}'))


def test_titles_hold_no_numbers_but_names():
    for section in page.SECTIONS:
        assert not re.search(r"\d", NAMES.sub("", section.title))


@pytest.fixture
def bare(demo_run):
    """The page of a machine without torch and triton."""
    content = demo_run.content
    run = {result.study.name: result for result in content.results}
    sides = replace(run["speed"].record.cpu, rows=tuple(map(alone, run["speed"].record.cpu.rows)))
    records = {
        "speed": Speed(1, dict.fromkeys((SDPA, NAIVE_TORCH), "no torch"), sides, None, "no torch"),
        "targets": targets.Record("k", (), "no triton"),
    }
    changed = tuple(Result(study.study, records.get(name, study.record)) for name, study in run.items())
    told = tuple(LessonResult(t.lesson, "", {}, "no torch") if t.lesson.needs else t for t in content.lessons)
    drawings = {name: Drawing("<svg></svg>", "", None, 60) for name in (r.study.name for r in content.results)}
    del drawings["targets"]
    return Markup.of(page.render(replace(content, results=changed, lessons=told), drawings))


def alone(row):
    return replace(row, runs={name: run for name, run in row.runs.items() if name in (OURS, NAIVE_NUMPY)})


def test_without_torch_the_page_claims_nothing_of_it(bare, markup, demo_run):
    assert "this page compares their speed" not in bare.text and "Each was run for this page" not in bare.text
    assert "Those that can run here were run for this page." in bare.text
    assert bare.text.count("pip install 'flashtile[torch]'") == 1
    if _ratio(demo_run):
        assert "this page compares their speed" in markup.text and "flashtile[torch]" not in markup.text


def _ratio(demo_run):
    return page._ratio(next(r.record for r in demo_run.content.results if r.study.name == "speed"))


def test_a_study_without_a_drawing_has_no_figure(bare, markup):
    captions = "The numbers are in the tables below"
    assert (
        "Nothing was compiled: no triton." in bare.text and "One kernel for every vendor. The numbers" not in bare.text
    )
    assert bare.text.count(captions) == len(studies.STUDIES) - 1


def test_tables_under_a_figure_are_folded(demo_run):
    text = demo_run.page.read_text(encoding="utf-8")
    for result in demo_run.content.results:
        if not result.study.numbered:
            continue
        after = text[text.index(f'id="study-{result.study.name}"') :]
        assert after.index("<figure") < after.index("<details>") < after.index("<table")


def test_powers_are_not_typed_with_a_caret(markup):
    assert not [title for title in markup.tables if "^" in title]
    assert not [cell for rows in markup.tables.values() for cell in rows[0] if "^" in cell]


def test_an_undefined_name_is_an_error():
    with pytest.raises(UndefinedError):
        page.environment().from_string("{{ nothing }}").render()


def test_small_numbers_are_spelled():
    assert [page.spelled(n) for n in (1, 3, 12, 1000)] == ["one", "three", "twelve", "1,000"]
    assert page.counted(1, "thread") == "1 thread" and page.counted(2, "thread") == "2 threads"
