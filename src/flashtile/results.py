"""Grads: what a backward pass gives; to the caller in its layout and dtypes, within the package before that."""

from __future__ import annotations

from typing import Any, NamedTuple


class Grads(NamedTuple):
    """Gradients of one call: dbias and dsink are None where no bias or sink was given.

    From a backend dq, dk and dv have rank 4, dbias the axes of bias and dsink those of sink.
    """

    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    dsink: Any
