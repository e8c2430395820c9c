"""The command line: demo, bench, explain, doctor; each a thin call into the package."""

from __future__ import annotations

import sys

MISSING_EXTRA = 3


def main() -> None:
    """What the `flashtile` script runs."""
    try:
        from flashtile.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        print(f"flashtile: the command line needs {error.name}; run: pip install 'flashtile[cli]'", file=sys.stderr)
        raise SystemExit(MISSING_EXTRA) from None
    app()
