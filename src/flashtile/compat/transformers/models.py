"""A check of each model as it is built: can its layers use the registered attention? Else an error or a warning."""

import sys
import warnings
from collections.abc import Callable, Hashable
from functools import cache, wraps
from typing import Any, NoReturn

from flashtile.compat.transformers.masks import ADDITIVE
from flashtile.errors import UnsupportedError

NAMES: set[str] = set()
# Suffixes of the dicts in which models look up their attention by name.
CLASS_TABLES = ("ATTENTION_CLASSES", "ATTENTION_FUNCTION")
WARNED: set[str] = set()  # modules of models that never call the interface


def check_models(name: str) -> None:
    """From now on, check every model that asks for attention by this name."""
    from transformers import PreTrainedModel

    if not NAMES:
        check = "get_correct_attn_implementation"
        setattr(PreTrainedModel, check, _checked(getattr(PreTrainedModel, check)))
    NAMES.add(name)


def _checked(check: Callable[..., str]) -> Callable[..., str]:
    """Wrap transformers' check of the name, which runs for every model and submodel before its layers are built."""

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
    """Whether the model's layers call transformers' AttentionInterface; warn or prepare an error if not."""
    assert isinstance(model, type) and isinstance(config, type)
    if not getattr(model, "_supports_sdpa", False):
        ADDITIVE.add(config)
    from transformers import PreTrainedModel

    looks_up = calls = attends = parts = False
    # A model may be derived in a module without attention, or in one that is not in sys.modules.
    places = {kind.__module__ for kind in model.__mro__ if issubclass(kind, PreTrainedModel)} & sys.modules.keys()
    for place in places - {PreTrainedModel.__module__}:
        file = vars(sys.modules[place])
        for found in [x for what, x in file.items() if what.endswith(CLASS_TABLES) and isinstance(x, dict)]:
            found.setdefault(name, _refusal(model.__name__, list(found), name))
            looks_up = True
        attends |= any("Attention" in what and getattr(x, "__module__", "") == place for what, x in file.items())
        parts |= composite and any(what.startswith("AutoModel") for what in file)  # which are checked one by one
        calls |= "ALL_ATTENTION_FUNCTIONS" in file
    if attends and not calls and not parts and not looks_up and model.__module__ not in WARNED:
        WARNED.add(model.__module__)
        warnings.warn(
            f"{model.__name__}: attn_implementation={name!r} has no effect on it, because its layers do not call "
            "transformers' AttentionInterface",
            stacklevel=2,
        )
    return calls


def refuse_weights(model: Any, _arguments: Any, options: dict[str, Any]) -> None:
    """Check before a model's forward() that no weights are wanted: many models do not pass that on to their layers."""
    wanted = options.get("output_attentions")
    if wanted is None:
        wanted = getattr(model.config, "output_attentions", None)
    if wanted and model.config._attn_implementation in NAMES:
        raise UnsupportedError(
            'output_attentions: expected False, because weights are never stored ("eager" does), got True'
        )


def _refusal(model: str, known: list[str], name: str) -> Callable[..., NoReturn]:
    """An entry for a table of attention classes that raises an error: such models do not call AttentionInterface."""

    def refuse(*_arguments: Any, **_options: Any) -> NoReturn:
        raise UnsupportedError(
            f"attn_implementation: expected one of {', '.join(known)} for {model}, which has a class for each and does "
            f"not call transformers' AttentionInterface, got {name!r}"
        )

    return refuse
