"""The seven studies, each computed anew: a question, a record, its tables, its figure, what it shows."""

from typing import Any

from flashtile.lab.studies import arithmetic, block_size, causal, equivalence, materialization, memory, models, tiling
from flashtile.lab.studies.study import Study, Table

STUDIES: tuple[Study[Any], ...] = (
    equivalence.STUDY,
    memory.STUDY,
    block_size.STUDY,
    tiling.STUDY,
    causal.STUDY,
    models.STUDY,
    materialization.STUDY,
)
ARITHMETIC: Study[Any] = arithmetic.STUDY  # worked examples beside them: a study in form, with nothing to find out

__all__ = ["ARITHMETIC", "STUDIES", "Study", "Table"]
