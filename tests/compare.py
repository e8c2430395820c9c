"""Versions of this package beside each other on a GPU, in one process and in turns.

python -m tests.compare OTHER... --only WORDS: OTHER is a commit, or a folder that holds a package `flashtile`; the rows
are those of `flashtile bench gpu`. Prints its time / the time of the tree as it is.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from importlib import import_module
from io import BytesIO
from pathlib import Path
from tarfile import TarFile
from tempfile import TemporaryDirectory

from flashtile.bench.gpu import device, peers, rows
from flashtile.bench.gpu.suite import Bench
from tests.tree import ROOT

NAME = re.compile(r"\bflashtile\b")


def files_of(other: str) -> dict[str, str]:
    """The Python files of a version, by their path in the package."""
    folder = Path(other, "flashtile")
    if folder.is_dir():
        return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.py")}
    command = ("git", "archive", f"{other}:src/flashtile")
    with TarFile(fileobj=BytesIO(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)) as archive:
        names = [name for name in archive.getnames() if name.endswith(".py")]
        return {name: file.read().decode() for name in names if (file := archive.extractfile(name))}


def renamed(other: str, name: str, folder: Path) -> None:
    """Leave a copy of a version in this folder as a package of another name, which shares nothing with ours."""
    for path, text in files_of(other).items():
        place = folder / name / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(NAME.sub(name, text))


def peer_of(name: str) -> peers.Peer:
    """What such a package calls its own, in the benchmark."""
    found: peers.Peer = import_module(f"{name}.bench.gpu.peers").PEERS[0]
    assert found.name == name
    return found


def compare(others: list[str], only: list[str], rounds: int) -> None:
    with TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        names = {f"flashtile_{n}": other for n, other in enumerate(others)}
        for name, other in names.items():
            renamed(other, name, Path(folder))
        bench = Bench(device.Cuda(), [peers.PEERS[0], *map(peer_of, names)], rounds)
        for row in rows.measurable(rows.select([rows.TRAIN], only, False), bench.device.name)[0]:
            found = bench.measure(row)
            ratios = {other: found["ratios"][name]["value"] for name, other in names.items() if name in found["ratios"]}
            told = " ".join(f"{other} {ratio:.3f}" for other, ratio in ratios.items())
            print(f"{row.name}: {found['times'][peers.OURS]['median_s'] * 1e6:.1f} us; {told}", found["absent"] or "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("others", nargs="+", metavar="OTHER")
    parser.add_argument("--only", action="append", default=[], metavar="WORDS")
    parser.add_argument("--rounds", type=int, default=11)
    asked = parser.parse_args()
    compare(asked.others, asked.only, asked.rounds)
