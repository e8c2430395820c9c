"""Jobs for the workers of test_workers.py."""

from __future__ import annotations

import os
import sys
import time
from typing import Any


def work(job: dict[str, Any]) -> dict[str, Any]:
    print("noise that is no answer")
    match job["do"]:
        case "die":
            print("last words", file=sys.stderr, flush=True)
            os._exit(3)
        case "hang":
            time.sleep(60)
        case "raise":
            raise ValueError("wrong\nand more")
    return {"said": job["do"], "process": os.getpid(), "variable": os.environ.get("SAID_BY_TEST")}
