"""Formulas in the plain notation of docs/algorithm.md -> MathML, which browsers render natively.

The notation: names with subscripts (S_ij, m_new, sum_{j in T}), a space for multiplication, . for the product of two
vectors, * for the elementwise product of two arrays, or of the number scale and an array, + - = , and / which makes a
fraction of the products on both sides, or stays a slash in a line of text, where a fraction is too high. A quote stands
for a prime.
"""

import re
from html import escape

# One formula per line, with the lines of docs/algorithm.md. A test compares the two.
EQUATIONS: dict[int, tuple[str, ...]] = {
    1: ("S_ij = scale * q_i . k_j",),
    2: ("out_i = sum_j P_ij v_j,      P_ij = exp(S_ij) / sum_j' exp(S_ij')",),
    3: ("m = max_j S_j,      l = sum_j exp(S_j - m),      O = sum_j exp(S_j - m) v_j",),
    4: (
        "m_new = max(m, max_{j in T} S_j)",
        "l_new = a l + sum_{j in T} exp(S_j - m_new)",
        "O_new = a O + sum_{j in T} exp(S_j - m_new) v_j",
    ),
    5: ("a = exp(m - m_new)",),
    6: (
        "m = max(m_a, m_b)",
        "l = exp(m_a - m) l_a + exp(m_b - m) l_b",
        "O = exp(m_a - m) O_a + exp(m_b - m) O_b",
    ),
    7: ("out = O / l,      L = m + log l",),
    8: ("L = log(exp(L_a) + exp(L_b)),      out = exp(L_a - L) out_a + exp(L_b - L) out_b",),
    9: ("P = exp(S - L)",),
    10: ("dV = P^T dO",),
    11: ("dP = dO V^T",),
    12: ("dS = P * (dP - D),      D = rowsum(dO * out) - dL",),
    13: ("dQ = scale * dS K",),
    14: ("dK = scale * dS^T Q",),
}

_TOKEN = re.compile(r"\s*(?P<name>[A-Za-z]+'?|\d+(?:\.\d+)?)|\s*(?P<other>\S)")
_FUNCTIONS = ("exp", "log", "max", "rowsum", "ceil")
_SYMBOLS = {"sum": "<mo>&sum;</mo>", "in": "<mo>&isin;</mo>", "Theta": "<mi>&Theta;</mi>"}
_SIGNS = {"-": "&minus;", "*": "&odot;", ".": "&middot;"}
_RELATIONS = ("=", ",", "+", "-")


def equation(number: int) -> str:
    """A numbered equation, with an id that text can link to."""
    lines = "".join(f"<div>{formula(line)}</div>" for line in EQUATIONS[number])
    return f'<div class="equation" id="eq-{number}"><div>{lines}</div><span class="number">({number})</span></div>'


def reference(*numbers: int) -> str:
    """Return "eq. 4 and 5", each a link to the equation."""
    links = [f'<a href="#eq-{n}">{n}</a>' for n in numbers]
    listed = " and ".join([", ".join(links[:-1]), links[-1]] if links[1:] else links)
    return f"eq.&nbsp;{listed}"


def formula(text: str, display: bool = True) -> str:
    """One formula as a <math> element, labelled with its plain text for screen readers."""
    block = ' display="block"' if display else ""
    body = _Parser(text, fractions=display).expression()
    return f'<math{block} aria-label="{escape(" ".join(text.split()))}">{body}</math>'


class _Parser:
    """expression: products separated by relations; product: factors and /; factor: a name with scripts."""

    def __init__(self, text: str, fractions: bool) -> None:
        self.fractions = fractions
        self.tokens = [m["name"] or m["other"] for m in _TOKEN.finditer(text)]
        self.at = 0

    def peek(self) -> str | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1]

    def expression(self, end: str | None = None) -> str:
        parts: list[str] = []
        while self.peek() not in (None, end):
            if self.peek() in _RELATIONS:
                parts.append(self.relation(first=not parts, apart=end is None))
            else:
                parts.append(self.product(end))
        if end is not None:
            self.take()
        return _row(parts)

    def relation(self, first: bool, apart: bool) -> str:
        sign = self.take()
        if sign == ",":
            return '<mo separator="true">,</mo>' + ('<mspace width="0.9em"/>' if apart else "")
        return _operator(sign, "prefix" if first else "infix")

    def product(self, end: str | None) -> str:
        factors: list[str] = []
        while self.peek() not in (None, end, *_RELATIONS):
            if self.peek() == "/":
                slash, above, below = self.take(), _row(factors), self.product(end)
                if self.fractions:
                    return f"<mfrac>{above}{below}</mfrac>"
                return f'{above}<mo form="infix" lspace="0" rspace="0">{slash}</mo>{below}'
            if self.peek() in _SIGNS:
                factors.append(_operator(self.take(), "infix"))
            else:
                factors.append(self.factor())
        return _row(factors)

    def factor(self) -> str:
        name = self.take()
        if name == "(":
            return f'<mo stretchy="false">(</mo>{self.expression(")")}<mo stretchy="false">)</mo>'
        if name == "scale" and self.peek() == "*":
            self.take()
            return _name(name) + '<mspace width="0.3em"/>'
        base = _name(name)
        below = self.script("_")
        above = self.script("^")
        if below:
            tag = "munder" if name in ("sum", "max") else "msub"
            base = f"<{tag}>{base}{below}</{tag}>"
        if above:
            base = f"<msup>{base}{above}</msup>"
        return base + ('<mspace width="0.17em"/>' if name in _FUNCTIONS and self.peek() != "(" else "")

    def script(self, mark: str) -> str:
        if self.peek() != mark:
            return ""
        self.take()
        if self.peek() == "{":
            self.take()
            return self.expression("}")
        name = self.take()
        # Indices are adjacent letters (ij, ij'); a word such as "new" is one name.
        return _row([_name(x) for x in re.findall(r"[ij]'?", name)]) if re.fullmatch(r"[ij']+", name) else _name(name)


def _name(name: str) -> str:
    if name in _SYMBOLS:
        return _SYMBOLS[name]
    if name[0].isdigit():
        return f"<mn>{name}</mn>"
    if name.endswith("'"):
        # Next to its letter, and larger: raised by msup in a subscript, it would be too small to see.
        return f'<mrow>{_name(name[:-1])}<mo lspace="0" rspace="0" mathsize="140%">&prime;</mo></mrow>'
    if re.fullmatch(r"d[A-Z]", name):  # a gradient: the d is upright and belongs to its letter
        return f'<mrow><mi mathvariant="normal">d</mi><mi>{name[1]}</mi></mrow>'
    return f"<mi>{name}</mi>"


def _operator(sign: str, form: str) -> str:
    return f'<mo form="{form}">{_SIGNS.get(sign, sign)}</mo>'


def _row(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"<mrow>{''.join(parts)}</mrow>"
