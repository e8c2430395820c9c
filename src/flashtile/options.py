"""The options of a call, each written down once: its type, default, check, meaning, and type in torch's operator.

All that lists options is made from here: the signature and docstring of attention(), the checks of describe(), the
fields of Problem and Inputs, the operator's schema, the axes of vmap, what autocast casts, what plan() takes as shapes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypedDict, TypeVar, get_type_hints

from flashtile.band import Band
from flashtile.checks import options as checks

if TYPE_CHECKING:
    from flashtile.checks.options import Shapes

F = TypeVar("F", bound=Callable[..., Any])


class Option(NamedTuple):
    """One option.

    A check takes the option's name, its value and the Shapes of the call, and returns the value that a Problem holds;
    without Shapes, as in a graph of torch.compile, it checks what it can. Arrays have no check there.
    """

    default: Any
    schema: str
    check: Callable[[str, Any, Shapes | None], Any]
    about: str = ""
    # For an array, whose values may change from call to call: "bool", "like q", "integers" or "factors".
    array: str | None = None
    rank: int | None = None  # axes of an array, the first of them the batch; None: it has no batch


class Options(TypedDict, total=False):
    """What every function of the package takes besides its arrays."""

    causal: Annotated[
        bool,
        Option(
            False, "bool", checks.flag, "the last query sees every key, the one before it all but the last, and so on"
        ),
    ]
    window: Annotated[
        tuple[int | None, int | None] | None,
        Option(
            None,
            "SymInt[]?",
            checks.window,
            "(left, right): how many keys before and after its own position a query sees; None is no limit",
        ),
    ]
    band: Annotated[
        Band | None,
        Option(
            None,
            "SymInt[]?",
            checks.band,
            "the general form, a flashtile.Band: query i sees key j iff -left <= j - (i + offset) <= right",
        ),
    ]
    mask: Annotated[
        Any,
        Option(
            None,
            "Tensor?",
            checks.mask,
            "boolean, True = may attend, broadcast to (batch, heads, queries, keys)",
            array="bool",
            rank=4,
        ),
    ]
    bias: Annotated[
        Any,
        Option(None, "Tensor?", checks.bias, "added to the scaled scores, broadcast likewise", array="like q", rank=4),
    ]
    alibi: Annotated[
        Any,
        Option(
            None,
            "Tensor?",
            checks.alibi,
            "slopes, (heads,) or (batch, heads): adds -slope * |i + offset - j|",
            array="like q",
            rank=2,
        ),
    ]
    softcap: Annotated[float, Option(0.0, "float", checks.at_least_zero, "c > 0: scores become c * tanh(score / c)")]
    sink: Annotated[
        Any,
        Option(
            None,
            "Tensor?",
            checks.sink,
            "(heads,): one more logit a row, which takes probability and gives no value",
            array="like q",
        ),
    ]
    scale: Annotated[float | None, Option(None, "float?", checks.real_or_none, "dim ** -0.5 unless given")]
    dropout: Annotated[float, Option(0.0, "float", checks.probability, "probability of dropping a weight")]
    seed: Annotated[
        Any,
        Option(
            0,
            "SymInt",
            checks.seed,
            "decides which weights are dropped, the same on every backend: give another one at every training step. "
            "64 bits: a number, or an int64 tensor of one, whose negative values stand for the large numbers of the "
            "same bits. Only the kernels read the value of a tensor on a GPU: for torch.compile and CUDA graphs",
        ),
    ]
    kv_lengths: Annotated[
        Any,
        Option(
            None,
            "Tensor?",
            checks.kv_lengths,
            "(batch,): how many keys of each sequence are in use; causal and window align to their end",
            array="integers",
            rank=1,
        ),
    ]
    descale: Annotated[
        Any,
        Option(
            None,
            "Tensor?",
            checks.descale,
            "for torch.float8_e4m3fn inputs, the factors of q, k and v: numbers, or float32 tensors of shape () or "
            "(batch, kv_heads); what counts is q * descale[0], and so on. Such inputs have no gradient",
            array="factors",
            rank=3,
        ),
    ]
    out_dtype: Annotated[
        Any,
        Option(
            None,
            "str?",
            checks.out_dtype,
            "float32 keeps the partial result of 16-bit inputs unrounded, for merge(); 8-bit ones give bfloat16 unless "
            "this says float16 or float32",
        ),
    ]
    deterministic: Annotated[
        bool,
        Option(
            False,
            "bool",
            checks.flag,
            "the same bits on every run, also where that costs time; torch.use_deterministic_algorithms() asks too",
        ),
    ]
    threads: Annotated[int | None, Option(None, "int?", checks.threads, "how many CPU threads to use at most")]


class Laid(Options, total=False):
    """The same, with the order of axes and the padding of a batch."""

    layout: Annotated[
        str | None,
        Option(
            None,
            "",
            checks.unchecked,
            '"bhnd", as above, or "bnhd": q, k, v and the output are (batch, length, heads, dim), or (length, heads, '
            "dim), and so is the lse without its last axis; mask and bias are as ever",
        ),
    ]
    key_padding_mask: Annotated[
        Any,
        Option(
            None,
            "",
            checks.unchecked,
            "boolean, (batch, keys), True = may be attended, for keys that all queries of a sequence ignore. (That of "
            "torch.nn.MultiheadAttention means the opposite.) It moves nothing: causal and window align to the last "
            "key there is, padded or not",
        ),
    ]


class Packed(Options, total=False):
    """The same, with where packed sequences start."""

    cu_q: Annotated[Any, Option(None, "Tensor?", checks.unchecked, array="integers")]
    cu_k: Annotated[Any, Option(None, "Tensor?", checks.unchecked, array="integers")]


def _of(kind: Any) -> dict[str, Option]:
    """The options of a TypedDict."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


OPTIONS = _of(Packed)  # of describe()
ARRAYS = tuple(name for name, option in OPTIONS.items() if option.array)
PLAIN_ARRAYS = tuple(name for name in ARRAYS if OPTIONS[name].array != "factors")  # factors may also be numbers
NUMBERS = tuple(name for name, option in OPTIONS.items() if not option.array)
DEFAULTS = {name: option.default for name, option in _of(Laid).items()}  # of attention()


def documented(function: F) -> F:
    """Give a function that takes **options the signature and the docstring of what it takes."""
    said, about = [], _of(Laid)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            said.append(parameter)
            continue
        hints = get_type_hints(Laid)
        said += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=hints[name])
            for name, option in about.items()
        ]
    function.__signature__ = inspect.Signature(said, return_annotation=Any)  # type: ignore[attr-defined]
    function.__doc__ = (function.__doc__ or "").replace("{options}", _text(about))
    return function


def _text(options: dict[str, Option]) -> str:
    width, room = 16, 120
    lines: list[str] = []
    for name, option in options.items():
        line = f"{name:{width - 4}}" if len(name) < width - 4 else f"{name}  "
        for word in option.about.split():
            if len(line) + 1 + len(word) > room - 4:
                lines.append(line)
                line = " " * (width - 4)
            line += word if line.endswith(" ") else f" {word}"
        lines.append(line)
    return "\n    ".join(lines)
