"""SVG helpers: an element, a rectangle, the name of an axis, a number."""

from html import escape
from typing import Any


def element(tag: str, text: str = "", **attributes: Any) -> str:
    """Return <tag a="b">text</tag>; class_ becomes class, a_b a-b. Only <text> escapes its text; others hold tags."""
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for name, value in attributes.items()
    )
    return f"<{tag}{named}>{escape(text) if tag == 'text' else text}</{tag}>"


def rectangle(x: float, y: float, width: float, height: float) -> dict[str, str]:
    return {"x": decimal(x), "y": decimal(y), "width": decimal(width), "height": decimal(height)}


def axis(text: str, x: float, y: float, **more: str) -> str:
    """The name of an axis."""
    return element("text", text, class_="axis", x=decimal(x), y=decimal(y), **more)


def decimal(x: float) -> str:
    """Format with at most two decimals, without trailing zeros."""
    return f"{x:.2f}".rstrip("0").rstrip(".")
