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
from flashtile.lab.studies.study import Study

# In the order in which they run: those that measure time come last, when nothing else runs beside them.
STUDIES: tuple[Study[Any], ...] = (
    equivalence.STUDY,
    memory.STUDY,
    block_size.STUDY,
    tiling.STUDY,
    causal.STUDY,
    models.STUDY,
    materialization.STUDY,
    arithmetic.STUDY,
    recompute.STUDY,
    overlap.STUDY,
    split.STUDY,
    targets.STUDY,
    hierarchy.STUDY,
    speed.STUDY,
    cache.STUDY,
)

__all__ = ["STUDIES", "Study"]
