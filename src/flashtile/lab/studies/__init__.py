"""The list of studies: each asks a question, computes a record, and shows it in tables, a figure and sentences."""

from typing import Any

from flashtile.lab.studies import (
    arithmetic,
    block_size,
    cache,
    causal,
    cluster,
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
from flashtile.lab.studies.study import Module, Study, study

_NUMBERED: tuple[Module[Any], ...] = (equivalence, memory, block_size, tiling, causal, models, materialization)
_OTHERS: tuple[Module[Any], ...] = (arithmetic, recompute, overlap, split, cluster, targets)
_TIMED: tuple[Module[Any], ...] = (hierarchy, speed, cache)
# In the order in which they run: those that measure time come last, when nothing else runs beside them.
STUDIES: tuple[Study[Any], ...] = (
    *(study(module, numbered=True) for module in _NUMBERED),
    *map(study, _OTHERS),
    *(study(module, timed=True) for module in _TIMED),
)

__all__ = ["STUDIES", "Study"]
