"""mathml.py: the formulas are those of docs/algorithm.md, and have the right structure."""

import re
from xml.etree import ElementTree

import pytest

from flashtile.lab.report import mathml
from tests.tools.tree import ROOT

DOCUMENT = (ROOT / "docs" / "algorithm.md").read_text()


def parsed(markup):
    """Parse as XML, which lacks HTML's named characters."""
    return ElementTree.fromstring(re.sub(r"&(?!amp|lt|gt|quot|#)\w+;", "?", markup))


def documented(number):
    """The lines of an equation, from the indented block with its number."""
    blocks = re.findall(r"(?:^    .*\n)+", DOCUMENT, re.MULTILINE)
    block = next(block for block in blocks if re.search(rf"\({number}\)$", block, re.MULTILINE))
    lines = [re.sub(r"\s*\(\d+\)$", "", line).strip() for line in block.splitlines()]
    return tuple(" ".join(line.split()) for line in lines)


@pytest.mark.parametrize("number", mathml.EQUATIONS)
def test_the_equations_are_those_of_the_document(number):
    ours = tuple(" ".join(line.split()) for line in mathml.EQUATIONS[number])
    assert documented(number)[: len(ours)] == ours or ours == documented(number)[-len(ours) :]


@pytest.mark.parametrize("number", mathml.EQUATIONS)
def test_an_equation_is_well_formed_and_can_be_linked_to(number):
    markup = mathml.equation(number)
    assert parsed(markup).attrib["id"] == f"eq-{number}" and f"({number})" in markup
    assert markup.count("<math") == len(mathml.EQUATIONS[number])


def test_a_fraction_takes_the_products_on_both_sides():
    (fraction,) = parsed(mathml.formula("a b / c d + e")).iter("mfrac")
    assert ["".join(part.itertext()) for part in fraction] == ["ab", "cd"]


def test_a_line_of_text_has_no_fraction():
    drawn = parsed(mathml.formula("N^2 d^2 / M", False))
    assert not list(drawn.iter("mfrac")) and "".join(drawn.itertext()) == "N2d2/M"


def test_products_of_arrays_and_of_vectors_look_different():
    assert mathml.equation(12).count("&odot;") == 2 and "&middot;" not in mathml.equation(12)
    assert mathml.equation(1).count("&middot;") == 1 and "&odot;" not in mathml.equation(1)
    assert not {"&odot;", "&middot;"} & set(re.findall(r"&\w+;", mathml.equation(13) + mathml.equation(14)))


def test_a_prime_is_as_large_as_its_letter():
    assert "<mi>j</mi><mo" in mathml.equation(2) and "<msup>" not in mathml.equation(2)


def test_scripts():
    names = [
        (e.tag, "".join(e.itertext())) for e in parsed(mathml.formula("S_ij + m_new + P^T + sum_{j in T} x_j'")).iter()
    ]
    assert ("msub", "Sij") in names and ("msub", "mnew") in names and ("msup", "PT") in names
    assert ("munder", "?j?T") in names and ("msub", "xj?") in names


def test_a_formula_has_a_text_label():
    assert parsed(mathml.formula("a = exp(m - m_new)")).attrib["aria-label"] == "a = exp(m - m_new)"
    assert parsed(mathml.formula("a", False)).get("display") is None


def test_references_are_links():
    assert mathml.reference(4) == 'eq.&nbsp;<a href="#eq-4">4</a>'
    assert mathml.reference(4, 5, 6).endswith('<a href="#eq-5">5</a> and <a href="#eq-6">6</a>')
