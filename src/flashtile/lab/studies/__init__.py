"""The list of studies: each asks a question, computes a record, and shows it in tables, a figure and sentences."""

from typing import Any

from flashtile.lab.studies import (
    arithmetic,
    block_size,
    cache,
    causal,
    equivalence,
    hierarchy,
    materialization,
    memory,
    models,
    overlap,
    recompute,
    speed,
    split,
    targets,
    tiling,
)
from flashtile.lab.studies.study import Study, study

# In the order in which they run: those that measure time come last, when nothing else runs beside them.
STUDIES: tuple[Study[Any], ...] = (
    study(equivalence, numbered=True),
    study(memory, numbered=True),
    study(block_size, numbered=True),
    study(tiling, numbered=True),
    study(causal, numbered=True),
    study(models, numbered=True),
    study(materialization, numbered=True),
    study(arithmetic),
    study(recompute),
    study(overlap),
    study(split),
    study(targets),
    study(hierarchy, timed=True),
    study(speed, timed=True),
    study(cache, timed=True),
)

__all__ = ["STUDIES", "Study"]
