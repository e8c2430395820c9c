"""Dropout as other libraries have it: torch's generator decides what is dropped."""

from __future__ import annotations

from typing import Any

import torch


def dropped(probability: Any) -> dict[str, Any]:
    """The options of a call that drops weights; none, and no number drawn, where it drops nothing."""
    if probability == 0:
        return {}
    return {"dropout": probability, "seed": int(torch.randint(2**63 - 1, ()))}
