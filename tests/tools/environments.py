"""Run the tests with other releases of torch and transformers, each in a separate environment.

python -m tests.tools.environments

Creates the environments under build/environments (gigabytes each, removed when done), installs this tree in them, runs
the tests, and writes the record and the table of docs/versions.md. Names of environments select some of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from flashtile.host import machine
from flashtile.lab.bench.markdown import table
from tests.tools.tree import ROOT

FOLDER = ROOT / "build" / "environments"
RECORD = ROOT / "benchmarks" / "records" / "versions.json"
DOCUMENT = ROOT / "docs" / "versions.md"
MARKED = re.compile(r"(?<=<!-- versions -->\n).*?(?=<!-- end of versions -->)", re.DOTALL)
WITH_TESTS = ("pytest>=8", "hypothesis>=6.100", "ml_dtypes>=0.5", "typer>=0.12", "rich>=13", "numpy<2.4")
SHOWN = ("torch", "transformers", "triton", "numpy", "python")

TORCH = (
    ("tests/pytorch", "tests/compat/test_sdpa.py", "tests/compat/test_flash_attn.py", "tests/backends/test_sdpa.py"),
    ("tests/test_agreement.py", "-k", "sdpa"),
)
TRANSFORMERS = (("tests/compat", "-k", "transformers"),)


@dataclass(frozen=True)
class Environment:
    """What pip installs, and the arguments of each pytest run."""

    name: str
    wanted: tuple[str, ...]
    tests: tuple[tuple[str, ...], ...]


ENVIRONMENTS = (
    Environment("torch-oldest", (f"torch=={machine.OLDEST['torch']}.*",), TORCH),
    *(Environment(f"torch-{release}", (f"torch=={release}.*",), TORCH) for release in ("2.9", "2.10", "2.13")),
    Environment("torch-newest", ("torch",), TORCH),
    Environment(
        "transformers-oldest", ("torch==2.13.*", f"transformers=={machine.OLDEST['transformers']}.*"), TRANSFORMERS
    ),
    Environment("transformers-newest", ("torch", "transformers"), TRANSFORMERS),
)


class CannotInstall(Exception):  # noqa: N818
    """pip found no such release for this Python, or there is no network."""


def wheel() -> Path:
    """Build the package as it would be installed, compiled for this machine only."""
    library = runpy.run_path(str(ROOT / "src/flashtile/backends/native/library.py"))
    folder = FOLDER / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    isa = f"-Ccmake.define.FLASHTILE_ISA={library['candidates']()[0]}"
    _pip(Path(sys.executable), "wheel", "--no-deps", isa, "--wheel-dir", str(folder), str(ROOT))
    (found,) = folder.glob("*.whl")
    return found


def run(environment: Environment, package: Path, keep: bool = False) -> dict[str, Any]:
    """Run an environment's tests and return its row of the record. keep: do not remove the environment."""
    folder = FOLDER / environment.name
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    try:
        if not python.exists():
            venv.create(folder, with_pip=True)
        _pip(python, "install", *environment.wanted, *WITH_TESTS)
        _pip(python, "install", "--no-deps", "--force-reinstall", str(package))
        row: dict[str, Any] = {
            "name": environment.name,
            "wanted": list(environment.wanted),
            "versions": _versions(python),
        }
        row |= {"tests": [list(arguments) for arguments in environment.tests]}
        row |= dict.fromkeys(("passed", "failed", "skipped"), 0) | {"failures": []}
        for arguments in environment.tests:
            for outcome, name in _outcomes(python, folder / "results.xml", arguments):
                row[outcome] += 1
                row["failures"] += [name] if outcome == "failed" else []
        return row
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _pip(python: Path, *arguments: str) -> None:
    done = subprocess.run(
        [str(python), "-m", "pip", "--disable-pip-version-check", *arguments], capture_output=True, text=True
    )
    if done.returncode:
        raise CannotInstall((done.stderr.strip() or done.stdout.strip()).splitlines()[-1])


def _clean_variables() -> dict[str, str]:
    """Return the environment variables without those that would select another tree or core."""
    return {name: x for name, x in os.environ.items() if name not in ("PYTHONPATH", "FLASHTILE_NATIVE_DIR")}


def _versions(python: Path) -> dict[str, str]:
    code = "import json; from flashtile.host import machine; print(json.dumps(machine.versions()))"
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=True, env=_clean_variables(), cwd="/"
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def _outcomes(python: Path, results: Path, arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return "passed", "failed" or "skipped", and the name, of each test."""
    results.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=_clean_variables(), capture_output=True, text=True)
    if not results.exists():
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [_outcome(case) for case in ElementTree.parse(results).iter("testcase")]


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    kinds = {child.tag for child in case}
    outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    return outcome, f"{case.get('classname')}.{case.get('name')}"


def recorded(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the record in which these rows replace older ones of the same environments."""
    before = json.loads(RECORD.read_text())["environments"] if RECORD.exists() else []
    by_name = {row["name"]: row for row in (*before, *rows)}
    known = [by_name[environment.name] for environment in ENVIRONMENTS if environment.name in by_name]
    return {"schema": 1, "suite": "versions", "environments": known}


def render(record: dict[str, Any]) -> str:
    """Return the table of docs/versions.md."""
    head = (*SHOWN, "passed", "failed", "skipped", "on")
    rows = [
        (
            *(row["versions"][name] or "" for name in SHOWN),
            *(f"{row[outcome]:,}" for outcome in ("passed", "failed", "skipped")),
            row["created"][:10],
        )
        for row in record["environments"]
    ]
    return table([head, *rows]) + "\n"


def renewed(text: str, record: dict[str, Any]) -> str:
    """Return a document with its table made from the record."""
    return MARKED.sub(lambda _: render(record), text)


def save(row: dict[str, Any]) -> None:
    row = {**row, "created": datetime.now(timezone.utc).isoformat(timespec="seconds"), "commit": machine.commit()}
    record = recorded([row])
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    DOCUMENT.write_text(renewed(DOCUMENT.read_text(), record))


def main() -> int:
    names = [environment.name for environment in ENVIRONMENTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(names)}; all by default")
    parser.add_argument("--keep", action="store_true", help="do not remove the environments")
    given = parser.parse_args()
    if unknown := set(given.names) - set(names):
        parser.error(f"expected {', '.join(names)}, got {', '.join(unknown)}")
    package, failed = wheel(), False
    for environment in ENVIRONMENTS:
        if environment.name not in (given.names or names):
            continue
        print(f"{environment.name}: {', '.join(environment.wanted)}", file=sys.stderr, flush=True)
        try:
            row = run(environment, package, given.keep)
        except CannotInstall as error:
            print(f"  left out: {error}", file=sys.stderr, flush=True)
            continue
        save(row)
        print(
            f"  {row['passed']} passed, {row['failed']} failed",
            *row["failures"],
            sep="\n  ",
            file=sys.stderr,
            flush=True,
        )
        failed = failed or row["failed"] > 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
