"""The package as a whole: what importing it costs and pulls in, what the README says, what the examples do."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flashtile
from flashtile.lab.bench import records, table
from tests.tools import tree

README = (tree.ROOT / "README.md").read_text()


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


WATCHED = "import sys; print([m for m in ('torch', 'triton', 'rich', 'typer') if m in sys.modules])"


def test_import_pulls_in_numpy_and_nothing_else():
    assert python(f"import flashtile, flashtile.lab.cli; {WATCHED}").strip() == "[]"


def test_a_call_pulls_in_nothing_either():
    call = "import numpy as np; import flashtile; x = np.ones((4, 4)); flashtile.attention(x, x, x)"
    assert python(f"{call}; {WATCHED}").strip() == "[]"


def test_the_watch_above_can_fail():
    assert "rich" in python(f"import rich; import flashtile; {WATCHED}")


def import_seconds(name: str, path: str = "") -> float:
    """Of processor time, so that a busy machine does not count; the best of a few fresh processes."""
    clock = "time.process_time()"
    code = f"import numpy, sys, time; sys.path.append({path!r}); start = {clock}; import {name}; print({clock} - start)"
    return min(float(python(code)) for _ in range(5))


def test_cold_import_takes_less_than_100_ms_beyond_numpy():
    assert import_seconds("flashtile") < 0.1


def test_the_import_clock_can_fail(tmp_path):
    (tmp_path / "slowpoke.py").write_text(
        "import time\nend = time.process_time() + 0.15\nwhile time.process_time() < end: pass\n"
    )
    assert import_seconds("slowpoke", str(tmp_path)) > 0.1


def imports_of(path: Path) -> set[str]:
    """The modules of this package that a file imports, also within functions; of a name both readings."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return {name.removeprefix("flashtile.") for name in found if name.startswith("flashtile.")}


# Files of a folder, and what none of them may import.
APART = [
    ("", "lab", "lab"),
    ("backends/gpu", "", "backends.triton"),
    ("backends/gpu", "", "backends.gluon"),
    ("backends/triton", "", "backends.gluon"),
    ("backends/gluon", "", "backends.triton"),
    ("backends", "sdpa", "pytorch"),
    ("numerics", "", "backends"),
    ("checks", "", "backends"),
]


@pytest.mark.parametrize(("folder", "but", "other"), APART)
def test_what_is_apart(folder, but, other):
    root = tree.SOURCE / folder
    files = [path for path in root.rglob("*.py") if not but or root / but not in path.parents]
    assert files
    wrong = [path for path in files if any(f"{name}.".startswith(f"{other}.") for name in imports_of(path))]
    assert wrong == []


def test_the_reading_of_imports_can_fail():
    assert {"problem", "problem.describe"} <= imports_of(tree.SOURCE / "api.py")
    assert any(name.startswith("lab.") for name in imports_of(tree.SOURCE / "lab" / "cli" / "bench.py"))


def test_tab_completion_shows_the_public_names():
    assert sorted(flashtile.__all__) == dir(flashtile)
    modules = {path.stem if path.suffix else path.name for path in tree.SOURCE.iterdir()}
    assert not modules & set(flashtile.__all__), "a name is a function and a module"


def test_every_public_name_exists_and_is_told_about():
    for name in flashtile.__all__:
        assert name == "__version__" or getattr(flashtile, name).__doc__, name


def test_the_version_has_one_source():
    assert re.fullmatch(r"\d+\.\d+\.\d+", flashtile.__version__)
    assert "version =" not in (tree.ROOT / "pyproject.toml").read_text().partition("[tool.")[0]


def test_it_is_typed():
    assert (Path(flashtile.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("document", tree.DOCUMENTS, ids=lambda path: path.name)
def test_documents_show_the_tree_as_it_is(document):
    text = document.read_text()
    assert tree.MARKED.search(text) and text == tree.renewed(text), "run: python -m tests.tools.tree"


def test_every_file_says_what_it_is():
    untold = [name for name, about in tree.lines(tree.SOURCE, 1) if not about and not name.endswith("/")]
    assert untold == []


@pytest.mark.parametrize(
    "name", ["README.md", *(f"docs/{path.name}" for path in sorted((tree.ROOT / "docs").glob("*.md")))]
)
def test_documents_show_their_records_as_they_are(name):
    document = tree.ROOT / name
    places = table.marked(document.read_text())
    assert places or name not in ("README.md", "docs/speed.md")
    for kind, path, shown in places:
        if path:
            first, *more = (records.read(document.parent / each) for each in path.split())
            assert shown == table.render(first, kind, *more)
        else:
            assert not re.search(r"\d", shown)


EXAMPLES = list(enumerate(re.findall(r"```python\n(.*?)```", README, re.DOTALL)))


@pytest.mark.parametrize("n, example", EXAMPLES)
def test_the_examples_run(n, example):
    if "import torch" in example:
        pytest.importorskip("torch")
    exec(compile(example, f"README example {n}", "exec"), {})


def test_documents_name_equations_that_exist():
    numbered = set(re.findall(r"\((\d+)\)$", (tree.ROOT / "docs" / "algorithm.md").read_text(), re.MULTILINE))
    cited = set()
    for path in tree.SOURCE.rglob("*.*"):
        if path.suffix in (".py", ".h", ".cpp"):
            for first, last in re.findall(r"eq\. (\d+)(?: (?:to|and) (\d+))?", path.read_text()):
                cited |= {first, last or first}
    assert cited and cited <= numbered
