"""What the page computes beside the seven studies, in the same form: sizes, traffic, speed, gradients, caches."""

from __future__ import annotations

from typing import Any

from flashtile.lab.report.topics import cache, hierarchy, overlap, recompute, speed, split, targets
from flashtile.lab.studies import ARITHMETIC
from flashtile.lab.studies.study import Study

COUNTED: tuple[Study[Any], ...] = (ARITHMETIC, recompute.STUDY, overlap.STUDY, split.STUDY, targets.STUDY)
TIMED: tuple[Study[Any], ...] = (hierarchy.STUDY, speed.STUDY, cache.STUDY)  # these want the machine for themselves
TOPICS = (*COUNTED, *TIMED)
