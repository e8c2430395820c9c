"""Origin: where the queries, keys, heads and sequences of a call lie in a whole that it is a part of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """The place of a part, by which dropout counts: query i is query + i * query_step of the whole.

    Key j is key + j * key_step, head h is head + h, sequence s is sequence + s. heads: how many query heads the whole
    has; None means as many as the call.
    """

    query: int = 0
    key: int = 0
    head: int = 0
    sequence: int = 0
    heads: int | None = None
    query_step: int = 1
    key_step: int = 1

    def numbers(self) -> tuple[int | None, ...]:
        """All fields, in order."""
        return self.query, self.key, self.head, self.sequence, self.heads, self.query_step, self.key_step
