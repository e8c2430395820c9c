"""Tiling: a backend's tiles of the scores of a head, as plan() shows and counts them."""

from typing import NamedTuple


class Tiling(NamedTuple):
    """A tile of `rows` queries from each of `heads` query heads, by `keys` keys that are loaded once for all heads."""

    rows: int
    keys: int
    heads: int = 1
    at_once: int | None = None  # rows of scores that exist at a time; None: all

    @property
    def rows_at_once(self) -> int:
        return self.rows * self.heads if self.at_once is None else self.at_once
