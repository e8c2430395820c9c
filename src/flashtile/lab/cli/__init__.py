"""The command line: demo, lesson, explain, doctor, bench; each is a thin call into the package.

Exit codes: 0 success; 1 a check does not hold; 2 wrong usage; 3 a required package or GPU is missing.
"""

import sys

DOES_NOT_HOLD = 1
MISSING = 3


def main() -> None:
    """Run the `flashtile` script."""
    try:
        from flashtile.lab.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        print(f"flashtile: the command line needs {error.name}; run: pip install 'flashtile[cli]'", file=sys.stderr)
        raise SystemExit(MISSING) from None
    app()
