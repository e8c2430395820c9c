"""transformers' models on flashtile: register() once, then from_pretrained(..., attn_implementation="tiled").

transformers takes any name that contains "flash" for flash_attn, so this one does not.
"""

from typing import Any

from flashtile.compat.transformers.layer import forward
from flashtile.compat.transformers.masks import mask
from flashtile.compat.transformers.models import check_models

NAME = "tiled"

__all__ = ["NAME", "forward", "mask", "register"]


def register(name: str = NAME, group: Any = None, method: str | tuple[int, int] = "auto") -> None:
    """Register the layer function, its masks, and a check of every model that asks for this name.

    group: a ProcessGroup, or a DeviceMesh of one axis, whose ranks have shards of the tokens. Then a model is called as
    model(..., shards=shards), with a flashtile.distributed.Shards, and method is that of its attention().
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    layer, masks = forward, mask
    if group is not None:
        from flashtile.compat.transformers import sharded

        layer, masks = sharded.layer_of(group, method), sharded.mask
    AttentionInterface.register(name, layer)
    AttentionMaskInterface.register(name, masks)
    check_models(name)
