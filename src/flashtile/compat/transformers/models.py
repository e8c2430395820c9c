"""Models as they are made: what looks its attention up by name is refused with a reason, what calls none is told of."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Hashable
from functools import cache, wraps
from typing import Any, NoReturn

from flashtile.compat.transformers.masks import ADDITIVE
from flashtile.errors import UnsupportedError

NAMES: set[str] = set()
CLASS_TABLES = ("ATTENTION_CLASSES", "ATTENTION_FUNCTION")  # what is looked up by name, by the ends of its own
WARNED: set[str] = set()  # modules of models that never call


def check_models(name: str) -> None:
    """From now on, look at every model that asks for attention by this name."""
    from transformers import PreTrainedModel

    if not NAMES:
        check = "get_correct_attn_implementation"
        setattr(PreTrainedModel, check, _checked(getattr(PreTrainedModel, check)))
    NAMES.add(name)


def _checked(check: Callable[..., str]) -> Callable[..., str]:
    """transformers' own check of the name, which each model makes, outer and inner, before it has layers."""

    @wraps(check)
    def checked(self: Any, *arguments: Any, **options: Any) -> str:
        name = check(self, *arguments, **options)
        if name in NAMES:
            model: Any = type(self)
            config: Any = type(self.config)
            calls = _calls_interface(model, config, bool(getattr(self.config, "sub_configs", None)), name)
            if calls and refuse_weights not in self._forward_pre_hooks.values():
                self.register_forward_pre_hook(refuse_weights, with_kwargs=True)
        return name

    return checked


@cache
def _calls_interface(model: Hashable, config: Hashable, composite: bool, name: str) -> bool:
    """Whether its layers call what is registered."""
    assert isinstance(model, type) and isinstance(config, type)
    if not getattr(model, "_supports_sdpa", False):
        ADDITIVE.add(config)
    from transformers import PreTrainedModel

    looks_up = calls = attends = parts = False
    # A model may be derived in a file that says nothing of attention, or that is no module by its name.
    places = {kind.__module__ for kind in model.__mro__ if issubclass(kind, PreTrainedModel)} & sys.modules.keys()
    for place in places - {PreTrainedModel.__module__}:
        file = vars(sys.modules[place])
        for found in [x for what, x in file.items() if what.endswith(CLASS_TABLES) and isinstance(x, dict)]:
            found.setdefault(name, _refusal(model.__name__, list(found), name))
            looks_up = True
        attends |= any("Attention" in what and getattr(x, "__module__", "") == place for what, x in file.items())
        parts |= composite and any(what.startswith("AutoModel") for what in file)  # which are looked at one by one
        calls |= "ALL_ATTENTION_FUNCTIONS" in file
    if attends and not calls and not parts and not looks_up and model.__module__ not in WARNED:
        WARNED.add(model.__module__)
        warnings.warn(
            f"{model.__name__}: attn_implementation={name!r} changes nothing in it, because its layers do not call "
            "their attention through transformers' AttentionInterface",
            stacklevel=2,
        )
    return calls


def refuse_weights(model: Any, _arguments: Any, options: dict[str, Any]) -> None:
    """Before a model's forward(): many do not tell their layers, and would give weights that nobody stored."""
    wanted = options.get("output_attentions")
    if wanted is None:
        wanted = getattr(model.config, "output_attentions", None)
    if wanted and model.config._attn_implementation in NAMES:
        raise UnsupportedError(
            'output_attentions: expected False, because weights are never stored ("eager" does), got True'
        )


def _refusal(model: str, known: list[str], name: str) -> Callable[..., NoReturn]:
    """In the place of a class: models that look one up by name do not call transformers' AttentionInterface."""

    def refuse(*_arguments: Any, **_options: Any) -> NoReturn:
        raise UnsupportedError(
            f"attn_implementation: expected one of {', '.join(known)} for {model}, which has a class for each and does "
            f"not call transformers' AttentionInterface, got {name!r}"
        )

    return refuse
