"""transformers' models on flashtile: register() once, then from_pretrained(..., attn_implementation="tiled").

transformers takes any name that contains "flash" for flash_attn, so this one does not.
"""

from flashtile.compat.transformers.layer import forward
from flashtile.compat.transformers.masks import mask
from flashtile.compat.transformers.models import check_models

NAME = "tiled"

__all__ = ["NAME", "forward", "mask", "register"]


def register(name: str = NAME) -> None:
    """Register the layer function, its masks, and a check of every model that asks for this name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, mask)
    check_models(name)
