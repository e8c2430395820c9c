"""The machine and the installation: versions, processor, devices, commit."""

import os
import platform
import re
import subprocess
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flashtile.host.threads import cores

PACKAGES = ("flashtile", "numpy", "torch", "triton", "transformers", "typer", "rich")
CPUINFO, CPU_NUMBERS = Path("/proc/cpuinfo"), ("cpu family", "model", "stepping")
OLDEST = {"torch": "2.8", "triton": "3.6", "transformers": "4.57"}  # supported, see docs/versions.md


def versions() -> dict[str, str | None]:
    """Return the versions of Python and related packages, None if not installed. Imports nothing."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    if name == "flashtile":
        from flashtile import __version__

        return __version__
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def has(package: str) -> bool:
    return find_spec(package) is not None


def too_old(package: str, version: str | None = None) -> str | None:
    """Why this version (by default the installed one) is too old; None if it is not, or not installed."""
    version, oldest = version or _version(package), OLDEST[package]
    if version is None or _release(version) >= _release(oldest):
        return None
    return f"{package}: expected {oldest} or newer, got {version}; run: pip install --upgrade {package}"


def _release(version: str) -> tuple[int, ...]:
    """Return (2, 13) for "2.13.0+cpu"."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def lacks(*packages: str) -> str | None:
    """Name a missing package, and how to install it; None if all are installed."""
    missing = next((package for package in packages if not has(package)), None)
    return missing and f"{missing} is not installed; run: pip install 'flashtile[gpu]'"


def processor() -> str:
    """Return the CPU's model name and model numbers, because names like "AMD EPYC" are ambiguous."""
    try:
        lines = CPUINFO.read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    known = {name.strip(): x.strip() for name, _, x in (line.partition(":") for line in lines)}
    if "model name" not in known:
        return platform.processor() or platform.machine()
    numbers = [f"{name.removeprefix('cpu ')} {known[name]}" for name in CPU_NUMBERS if name in known]
    return known["model name"] + (f" ({', '.join(numbers)})" if numbers else "")


def isa() -> str | None:
    """The instruction set of the loaded C++ core; None without a core."""
    from flashtile.backends.native import library

    return None if library.why_not() else str(library.isa())


def memory() -> int | None:
    """Bytes of main memory; None if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def devices() -> list[dict[str, Any]]:
    """Describe the CPU and the GPUs that torch sees. Imports torch if it is installed."""
    found: list[dict[str, Any]] = [{"device": "cpu", "name": processor(), "isa": isa(), "cores": cores()}]
    if has("torch"):
        import torch

        for n in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(n)
            found.append({"device": f"cuda:{n}", "name": properties.name, "memory": properties.total_memory})
    return found


def gpu() -> str | None:
    """Return the driver's name of the first GPU that torch sees. Imports torch only if there is a driver."""
    drivers = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
    if not has("torch") or not any(path.exists() for path in drivers):
        return None
    import torch

    return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None


def commit() -> str | None:
    """Return the commit of flashtile's checkout, with "+" if its sources are modified; None outside a checkout."""
    here = Path(__file__).parent
    top = _git(here, "rev-parse", "--show-toplevel")
    if top is None or not (Path(top) / "src" / "flashtile" / "host" / "machine.py").exists():  # another repository
        return None
    head = _git(here, "rev-parse", "HEAD")
    changed = _git(Path(top), "status", "--porcelain", "--untracked-files=no", "--", "src")
    return head and head + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def describe() -> dict[str, Any]:
    """Return what is recorded with every measurement."""
    return {
        "versions": versions(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "isa": isa(),
        "cores": cores(),
        "commit": commit(),
    }
