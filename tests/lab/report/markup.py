"""Parse an HTML page into ids, links, headings, tables and text; an unclosed tag is an error."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


class Markup(HTMLParser):
    """What the tests need of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.headings: list[int] = []
        self.tables: dict[str, list[list[str]]] = {}  # by caption; the head is the first row
        self.parts: list[str] = []
        self.rows: list[list[str]] = []
        self.caption = ""

    @classmethod
    def of(cls, page: str) -> Markup:
        parsed = cls()
        parsed.feed(page)
        parsed.close()
        assert parsed.open == [], f"not closed: {parsed.open}"
        return parsed

    @property
    def text(self) -> str:
        """The readable text, with single spaces."""
        return " ".join(" ".join(self.parts).split())

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        given = dict(attrs)
        if "id" in given:
            self.ids.append(given["id"])
        if tag == "a" and given.get("href", "").startswith("#"):
            self.links.append(given["href"][1:])
        if tag in ("h1", "h2", "h3", "h4", "h5", "h6"):
            self.headings.append(int(tag[1]))
        if tag == "table":
            self.rows, self.caption = [], ""
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        """<path/>: nothing to close."""
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> at {self.getpos()} closes {self.open[-3:]}"
        self.open.pop()
        if tag == "table":
            self.tables[self.caption] = self.rows

    def handle_data(self, data: str) -> None:
        if "script" in self.open or "style" in self.open:
            return
        self.parts.append(data)
        if "caption" in self.open:
            self.caption += data
        elif self.open and {"th", "td"} & set(self.open[-2:]) and self.rows:
            self.rows[-1][-1] += data
