"""Layers of a model whose tokens are sharded over a group: register(group=...), then model(..., shards=shards)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flashtile.compat.errors import raise_runtime_errors
from flashtile.compat.options import dropout_options
from flashtile.compat.transformers.layer import apply_sinks, check_others, match_dtype
from flashtile.compat.transformers.masks import none_hides_nothing
from flashtile.distributed import Shards, attention
from flashtile.errors import DTypeError, ShapeError, UnsupportedError
from flashtile.pytorch.interception import readable

# Functions of transformers.masking_utils that together make the mask of a plain causal, sliding or full layer.
_KNOWN = frozenset(
    {
        "and_masks",
        "bidirectional_mask_function",
        "causal_mask_function",
        # Of documents, which it finds where positions jump; these are documents of the shards, or shards.
        "packed_sequence_mask_function",
        "remap_positions_for_packed_sequence",
        "sliding_window_overlay",
    }
)


def mask(
    mask_function: Any = None, attention_mask: Tensor | None = None, config: Any = None, **_others: Any
) -> Tensor | None:
    """The padding of this rank's tokens, (batch, 1, 1, tokens), which are keys of all ranks; None: there is none."""
    unknown = {name for name in _parts(mask_function) if name not in _KNOWN}
    if unknown or none_hides_nothing(config):
        what = ", ".join(sorted(unknown)) or f"{getattr(config, 'model_type', 'a model')}, which adds to its masks"
        raise UnsupportedError(
            f"attention_mask: expected a causal, sliding or full pattern of attention, because tokens are sharded over "
            f"a group, got {what}"
        )
    return None if attention_mask is None else attention_mask.bool()[:, None, None]


def _parts(function: Any) -> Iterator[str]:
    """The names of the functions that a mask function is put together from."""
    if function is None:
        return
    yield function.__qualname__.partition(".")[0]
    for cell in function.__closure__ or ():
        held = cell.cell_contents
        for x in held if isinstance(held, tuple | list) else (held,):
            if callable(x) and hasattr(x, "__qualname__"):
                yield from _parts(x)


def layer_of(group: Any, method: str | tuple[int, int]) -> Callable[..., tuple[Tensor, None]]:
    """The function that transformers calls for a layer, for a ProcessGroup or a DeviceMesh of one axis."""

    @raise_runtime_errors
    def forward(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: Tensor | None = None,
        sinks: Tensor | None = None,
        position_ids: Tensor | None = None,
        deterministic: bool | None = None,
        output_attentions: bool | None = None,
        shards: Any = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        check_others(others, output_attentions)
        if not isinstance(shards, Shards):
            raise DTypeError(
                "shards: expected a flashtile.distributed.Shards, as in model(..., shards=shards), because "
                f"register() was given a group, got {type(shards).__name__}"
            )
        options: dict[str, Any] = {"scale": scaling, "softcap": softcap or 0.0, **dropout_options(dropout, query)}
        if deterministic:
            options["deterministic"] = True
        if s_aux is not None:
            options["sink"] = match_dtype(query, s_aux)
        if getattr(module, "is_causal", True) if is_causal is None else is_causal:
            options["causal"] = True
            options["window"] = None if sliding_window is None else (sliding_window - 1, None)
        if attention_mask is None:
            _check_positions(position_ids, shards, group)
        elif attention_mask.dtype != torch.bool or attention_mask.ndim != 4 or attention_mask.shape[1:3] != (1, 1):
            raise ShapeError(
                "attention_mask: expected (batch, tokens of this rank), because tokens are sharded over a group, got "
                f"{tuple(attention_mask.shape)}"
            )
        else:
            options["mask"] = attention_mask
        out, lse = attention(query, key, value, group=group, shards=shards, method=method, return_lse=True, **options)
        if sinks is not None:
            out = apply_sinks(out, lse, sinks)
        return out.transpose(1, 2).contiguous(), None

    return forward


# The last positions that were right, and their version: all layers of a model get the same.
_checked: tuple[weakref.ref[Tensor], int, Shards] | None = None


def _check_positions(positions: Tensor | None, shards: Shards, group: Any) -> None:
    """Check that rotary embeddings were made from the positions of this rank's tokens in their documents."""
    global _checked
    if positions is None or positions.ndim != 2 or not readable(positions):
        return
    if _checked is not None and _checked[0]() is positions and _checked[1:] == (positions._version, shards):
        return
    rank = group.get_local_rank() if hasattr(group, "get_local_rank") else torch.distributed.get_rank(group)
    wanted = torch.from_numpy(shards.positions(rank))
    if positions.shape[1] != len(wanted) or not bool((positions == wanted).all()):
        raise ShapeError(
            "position_ids: expected shards.positions(rank), where this rank's tokens are in their documents, got others"
        )
    _checked = weakref.ref(positions), positions._version, shards
