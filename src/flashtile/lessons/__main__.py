"""python -m flashtile.lessons NAME [--quick]: one lesson in a process of its own, as JSON on stdout."""

from __future__ import annotations

import argparse
import json

from flashtile.lessons import LESSONS
from flashtile.lessons.lesson import answer


def main() -> None:
    lessons = {lesson.name: lesson for lesson in LESSONS}
    parser = argparse.ArgumentParser(prog="python -m flashtile.lessons")
    parser.add_argument("name", choices=lessons)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    print(json.dumps(answer(lessons[given.name], given.quick)))


if __name__ == "__main__":
    main()
