"""torch.autocast: q, k and v are cast to its dtype, as in torch's own attention; sums stay in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.options import OPTIONS

_HALVES = (torch.float16, torch.bfloat16)
_CAST = {
    **dict.fromkeys(("q", "k", "v"), (*_HALVES, torch.float32)),
    # With 16-bit inputs these may stay float32.
    **{name: _HALVES for name, option in OPTIONS.items() if option.array == "like q"},
}


def enabled(q: Tensor) -> bool:
    if not torch._C._is_any_autocast_enabled():
        return False
    device = q.device.type
    return device != "meta" and torch.is_autocast_enabled(device)


def cast(device: str, arguments: dict[str, Any]) -> dict[str, Any]:
    dtype = torch.get_autocast_dtype(device)
    return {
        name: x.to(dtype) if x is not None and name in _CAST and x.dtype in _CAST[name] else x
        for name, x in arguments.items()
    }
