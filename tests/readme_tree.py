"""The tree of files in the README, made from the first line of each file. `python -m tests.readme_tree` renews it."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "flashtile"
MARKED = re.compile(r"<!-- tree -->\n(.*?)<!-- end of tree -->", re.DOTALL)


def meaning(path: Path) -> str:
    """The first line of a module's docstring, or the first real sentence of a C++ file's comment."""
    text = path.read_text()
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    comment = re.match(r"(//.*\n)*", text)
    words = " ".join(line.removeprefix("//").strip() for line in comment[0].splitlines()) if comment else ""
    told = ""
    for sentence in re.split(r"(?<=\.) ", words):  # a first sentence that is only a title takes the next one with it
        told = f"{told} {sentence}".strip()
        if len(told.split()) > 3:
            break
    return textwrap.shorten(told, 120, placeholder=" ...")


def lines(folder: Path, depth: int) -> list[tuple[str, str]]:
    """Files first, then folders; a folder means what its __init__.py says."""
    found: list[tuple[str, str]] = []
    for path in sorted(folder.iterdir(), key=lambda p: (p.is_dir(), p.name)):
        indent = "  " * depth
        if path.suffix in (".py", ".h", ".cpp", ".cu") and (path.name != "__init__.py" or depth == 1):
            found.append((f"{indent}{path.name}", meaning(path)))
        elif path.is_dir() and path.name != "__pycache__":
            about = meaning(path / "__init__.py") if (path / "__init__.py").exists() else ""
            found.append((f"{indent}{path.name}/", about))
            found += lines(path, depth + 1)
    return found


def tree() -> str:
    rows = [("src/flashtile/", ""), *lines(SOURCE, 1)]
    width = max(len(name) for name, _ in rows) + 2
    return "```\n" + "\n".join(f"{name:{width}}{about}".rstrip() for name, about in rows) + "\n```\n"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    text = MARKED.sub(lambda _: f"<!-- tree -->\n{tree()}<!-- end of tree -->", readme.read_text())
    readme.write_text(text)
