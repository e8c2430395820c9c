"""The command line: demo, lesson, explain, doctor, bench; each a thin call into the package.

Exit codes: 0 all is well; 1 something measured does not hold; 2 wrong usage; 3 a package or a GPU that is needed is
missing.
"""

from __future__ import annotations

import sys

DOES_NOT_HOLD = 1
MISSING = 3


def main() -> None:
    """What the `flashtile` script runs."""
    try:
        from flashtile.lab.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        print(f"flashtile: the command line needs {error.name}; run: pip install 'flashtile[cli]'", file=sys.stderr)
        raise SystemExit(MISSING) from None
    app()
