"""Models of transformers on flashtile: register() once, then from_pretrained(..., attn_implementation="tiled").

transformers takes any name with "flash" in it for flash_attn, so ours has none.
"""

from __future__ import annotations

from flashtile.compat.transformers.layer import forward
from flashtile.compat.transformers.masks import mask
from flashtile.compat.transformers.models import check_models

NAME = "tiled"

__all__ = ["NAME", "forward", "mask", "register"]


def register(name: str = NAME) -> None:
    """Make it known by this name: what layers call, the masks for that, and a look at each model that asks for it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, mask)
    check_models(name)
