"""python -m tests.fuzz MINUTES [FIRST SEED]"""

from __future__ import annotations

import sys

from tests.fuzz.run import run, seeds

if __name__ == "__main__":
    minutes, first = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    print(run(seeds(first, minutes)), "problems, from seed", first)
