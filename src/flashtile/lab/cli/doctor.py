"""flashtile doctor: installed versions, devices, and which backends can run here, or why not."""

import os
from typing import Annotated, Any

import typer

from flashtile import dispatch
from flashtile.host import machine, threads
from flashtile.lab.cli import DOES_NOT_HOLD, output


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print plain JSON.")] = False,
    brief: Annotated[bool, typer.Option("--brief", help="Print only one line per backend.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 unless every backend can run here.")] = False,
) -> None:
    """Report what works on this machine, and why the rest does not."""
    found = backends() if brief else examine()
    if json:
        output.print_json(found)
    elif brief:
        for row in found["backends"]:
            output.say(f"{row['backend']}: {row['why_not'] or 'ready'}")
    else:
        _show(found)
    if strict and any(row["why_not"] for row in found["backends"]):
        raise typer.Exit(DOES_NOT_HOLD)


def backends() -> dict[str, Any]:
    """The dispatch table, in order."""
    return {
        "backends": [
            {"backend": row.name, "device": row.device, "about": row.about, "why_not": row.missing()}
            for row in dispatch.TABLE
        ]
    }


def examine() -> dict[str, Any]:
    return {
        "versions": machine.versions(),
        "too_old": [reason for package in machine.OLDEST if (reason := machine.too_old(package))],
        "commit": machine.commit(),
        "devices": machine.devices(),
        "threads": {"cores": threads.cores(), **{name: os.environ.get(name) for name in threads.VARIABLES}},
        **backends(),
    }


def _setting(name: str, value: str | None) -> str:
    """Format the value of an environment variable for the number of threads."""
    if not value:
        return "(not set)"
    return value if threads.from_environment(name) else f"{value} (ignored: expected a number above 0)"


def _show(found: dict[str, Any]) -> None:
    out = output.out()
    versions = [(name, version or "not installed") for name, version in found["versions"].items()]
    out.print(output.facts("Versions", versions))
    for reason in found["too_old"]:
        output.say(reason)
    for device in found["devices"]:
        about = ", ".join(f"{key} {value}" for key, value in device.items() if key != "device" and value is not None)
        output.say(f"{device['device']}: {about}")
    settings = ", ".join(f"{name}={_setting(name, found['threads'][name])}" for name in threads.VARIABLES)
    output.say(f"threads: {found['threads']['cores']} cores available; {settings}")
    out.print("Backends; the first that can run a call is used:", style="bold")
    for row in found["backends"]:
        output.say(f"  {row['backend']} ({row['device']}): {row['about']}")
        output.say(f"    {'ready' if row['why_not'] is None else 'no: ' + row['why_not']}")
