"""SVG in a few words: an element, a rectangle, a number."""

from __future__ import annotations

from html import escape
from typing import Any


def element(tag: str, text: str = "", **attributes: Any) -> str:
    """<tag a="b">text</tag>; class_ is class, and a_b is a-b. The text of <text> is escaped, other tags hold tags."""
    named = "".join(f' {_name(name)}="{escape(str(value))}"' for name, value in attributes.items())
    return f"<{tag}{named}>{escape(text) if tag == 'text' else text}</{tag}>"


def rectangle(x: float, y: float, width: float, height: float) -> dict[str, str]:
    return {"x": decimal(x), "y": decimal(y), "width": decimal(width), "height": decimal(height)}


def decimal(x: float) -> str:
    """At most two decimals, and no more than needed."""
    return f"{x:.2f}".rstrip("0").rstrip(".")


def _name(name: str) -> str:
    return name.rstrip("_").replace("_", "-")
