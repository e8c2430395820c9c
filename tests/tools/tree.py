"""Write the file trees in README and docs, from the first line of each file: python -m tests.tools.tree."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "flashtile"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "code.md")
# The optional depth limits the tree.
MARKED = re.compile(r"(?P<mark><!-- tree(?:: (?P<depth>\d+))? -->\n)(?P<body>.*?)(?=<!-- end of tree -->)", re.DOTALL)


def summary(path: Path) -> str:
    """Return the first line of a module's docstring, or the first full sentence of a C++ file's comment."""
    text = path.read_text()
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    comment = re.match(r"(//.*\n)*", text)
    words = " ".join(line.removeprefix("//").strip() for line in comment[0].splitlines()) if comment else ""
    found = ""
    for sentence in re.split(r"(?<=\.) ", words):  # if the first sentence is only a title, add the next one
        found = f"{found} {sentence}".strip()
        if len(found.split()) > 3:
            break
    return textwrap.shorten(found, 120, placeholder=" ...")


def lines(folder: Path, depth: int) -> list[tuple[str, str]]:
    """List files, then folders, each with its summary; that of a folder is from its __init__.py."""
    found: list[tuple[str, str]] = []
    for path in sorted(folder.iterdir(), key=lambda p: (p.is_dir(), p.name)):
        indent = "  " * depth
        if path.suffix in (".py", ".h", ".cpp", ".cu") and (path.name != "__init__.py" or depth == 1):
            found.append((f"{indent}{path.name}", summary(path)))
        elif path.is_dir() and path.name != "__pycache__":
            about = summary(path / "__init__.py") if (path / "__init__.py").exists() else ""
            found.append((f"{indent}{path.name}/", about))
            found += lines(path, depth + 1)
    return found


def tree(depth: str | None = None) -> str:
    rows = [("src/flashtile/", ""), *lines(SOURCE, 1)]
    if depth is not None:
        rows = [(name, about) for name, about in rows if len(name) - len(name.lstrip()) <= 2 * int(depth)]
    width = max(len(name) for name, _ in rows) + 2
    return "```\n" + "\n".join(f"{name:{width}}{about}".rstrip() for name, about in rows) + "\n```\n"


def renewed(text: str) -> str:
    """Return a document with its trees made from the current files."""
    return MARKED.sub(lambda found: found["mark"] + tree(found["depth"]), text)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(renewed(document.read_text()))
