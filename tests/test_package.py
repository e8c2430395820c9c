"""The package as a whole: the cost of importing it, what its parts import, its documents and their examples."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import flashtile
from flashtile.lab.bench import records, table
from tests.tools import tree

README = (tree.ROOT / "README.md").read_text()


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


PRINT_IMPORTED = "import sys; print([m for m in ('torch', 'triton', 'rich', 'typer') if m in sys.modules])"


def test_importing_flashtile_imports_only_numpy():
    assert python(f"import flashtile, flashtile.lab.cli; {PRINT_IMPORTED}").strip() == "[]"


def test_a_call_imports_only_numpy():
    call = "import numpy as np; import flashtile; x = np.ones((4, 4)); flashtile.attention(x, x, x)"
    assert python(f"{call}; {PRINT_IMPORTED}").strip() == "[]"


def test_the_import_tests_can_fail():
    assert "rich" in python(f"import rich; import flashtile; {PRINT_IMPORTED}")


def import_seconds(name: str, path: str = "") -> float:
    """Return the least processor time of a few new processes; it does not depend on how busy the machine is."""
    clock = "time.process_time()"
    code = f"import numpy, sys, time; sys.path.append({path!r}); start = {clock}; import {name}; print({clock} - start)"
    return min(float(python(code)) for _ in range(5))


def test_cold_import_takes_less_than_100_ms_beyond_numpy():
    assert import_seconds("flashtile") < 0.1


def test_the_import_timer_can_fail(tmp_path):
    (tmp_path / "slowpoke.py").write_text(
        "import time\nend = time.process_time() + 0.15\nwhile time.process_time() < end: pass\n"
    )
    assert import_seconds("slowpoke", str(tmp_path)) > 0.1


def imports_of(path: Path) -> set[str]:
    """Return the modules of this package that a file imports, also within functions; "a.b" if b may be a name in a."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return {name.removeprefix("flashtile.") for name in found if name.startswith("flashtile.")}


# A folder, a subfolder that is left out, and what none of its files may import.
FORBIDDEN_IMPORTS = [
    ("", "lab", "lab"),
    ("backends/gpu", "", "backends.triton"),
    ("backends/gpu", "", "backends.gluon"),
    ("backends/triton", "", "backends.gluon"),
    ("backends/gluon", "", "backends.triton"),
    ("backends", "sdpa", "pytorch"),
    ("numerics", "", "backends"),
    ("checks", "", "backends"),
]


@pytest.mark.parametrize(("folder", "left_out", "other"), FORBIDDEN_IMPORTS)
def test_forbidden_imports(folder, left_out, other):
    root = tree.SOURCE / folder
    files = [path for path in root.rglob("*.py") if not left_out or root / left_out not in path.parents]
    assert files
    wrong = [path for path in files if any(f"{name}.".startswith(f"{other}.") for name in imports_of(path))]
    assert wrong == []


def test_imports_are_found():
    assert {"problem", "problem.describe"} <= imports_of(tree.SOURCE / "api.py")
    assert any(name.startswith("lab.") for name in imports_of(tree.SOURCE / "lab" / "cli" / "bench.py"))


def test_tab_completion_shows_the_public_names():
    assert sorted(flashtile.__all__) == dir(flashtile)
    modules = {path.stem if path.suffix else path.name for path in tree.SOURCE.iterdir()}
    functions = {name for name in flashtile.__all__ if not isinstance(getattr(flashtile, name), ModuleType)}
    assert not modules & functions, "a name is a function and a module"


def test_every_public_name_is_documented():
    for name in flashtile.__all__:
        assert name == "__version__" or getattr(flashtile, name).__doc__, name


def test_the_version_has_one_source():
    assert re.fullmatch(r"\d+\.\d+\.\d+", flashtile.__version__)
    assert "version =" not in (tree.ROOT / "pyproject.toml").read_text().partition("[tool.")[0]


def test_the_package_is_marked_as_typed():
    assert (Path(flashtile.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("document", tree.DOCUMENTS, ids=lambda path: path.name)
def test_documents_show_the_current_tree(document):
    text = document.read_text()
    assert tree.MARKED.search(text) and text == tree.renewed(text), "run: python -m tests.tools.tree"


def test_every_file_has_a_docstring():
    without = [name for name, about in tree.lines(tree.SOURCE, 1) if not about and not name.endswith("/")]
    assert without == []


@pytest.mark.parametrize(
    "name", ["README.md", *(f"docs/{path.name}" for path in sorted((tree.ROOT / "docs").glob("*.md")))]
)
def test_documents_match_their_records(name):
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
