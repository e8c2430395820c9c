"""What a backend returns: Gradients, before they are rounded and given the caller's layout."""

from __future__ import annotations

from typing import Any, NamedTuple


class Gradients(NamedTuple):
    """dq, dk, dv of rank 4; dbias with the axes of bias, dsink with those of sink (None where there is none)."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    dsink: Any
