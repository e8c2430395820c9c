"""The options of a call, each defined once: its type, default, check, meaning, and type in torch's operator.

Everything that lists options is derived from here: the signature and docstring of attention(), the checks of
describe(), the fields of Problem and Inputs, the operator's schema, the axes of vmap, what autocast casts, and what
plan() takes as shapes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypedDict, TypeVar, get_type_hints

from flashtile.band import Band
from flashtile.checks import options as checks
from flashtile.origin import Origin
from flashtile.spans import Spans

if TYPE_CHECKING:
    from flashtile.checks.options import Shapes

F = TypeVar("F", bound=Callable[..., Any])

MEANING = """causal      the last query sees every key, the one before it all but the last, and so on
    window      (left, right): how many keys before and after its own position a query sees; None is no limit
    band        the general form, a flashtile.Band: query i sees key j iff -left <= j - (i + offset) <= right
    spans       a flashtile.Spans: query i sees key j iff begin[i] <= j < end[i], in memory that grows with the queries
    mask        boolean, True = may attend, broadcast to (batch, heads, queries, keys)
    bias        added to the scaled scores, broadcast like mask
    alibi       slopes, (heads,) or (batch, heads): adds -slope * |i + offset - j|
    softcap     c > 0: scores become c * tanh(score / c)
    sink        (heads,): one more logit per row, which takes probability but has no value
    scale       dim ** -0.5 by default
    dropout     probability of dropping a weight
    seed        decides which weights are dropped, identically on every backend: pass a new one at every training
                step. 64 bits: a number, or an int64 tensor of one element, read as unsigned. A tensor on a GPU is
                read only by kernels, so it works in torch.compile and CUDA graphs
    origin      a flashtile.Origin: where the queries, keys, heads and sequences lie in a whole that this call is a part
                of. Dropout counts by it, so that parts drop what the whole drops; nothing else is affected
    kv_lengths  (batch,): how many keys of each sequence are in use; causal and window align to their end
    descale     for torch.float8_e4m3fn inputs, the factors of q, k and v: numbers, or float32 tensors of shape () or
                (batch, kv_heads); q stands for q * descale[0], and so on. Such inputs have no gradient
    out_dtype   float32 keeps the partial result of 16-bit inputs unrounded, for merge(); 8-bit inputs give
                bfloat16 by default, or float16 or float32
    deterministic  the same bits on every run, even if it is slower; torch.use_deterministic_algorithms() sets it too
    threads     the largest number of CPU threads to use
    layout      "bhnd", as above, or "bnhd": q, k, v and the output are (batch, length, heads, dim), or (length, heads,
                dim), and the lse lacks the last axis; mask and bias keep their layout
    key_padding_mask  boolean, (batch, keys), True = may be attended, for keys that all queries of a sequence ignore.
                (In torch.nn.MultiheadAttention, True means the opposite.) It does not affect alignment: causal and
                window align to the last key, padded or not"""


class Option(NamedTuple):
    """One option.

    A check takes the option's name, its value and the Shapes of the call, and returns the value for the Problem.
    Without Shapes, while torch.compile traces, it checks what it can.
    """

    default: Any
    schema: str
    check: Callable[[str, Any, Shapes | None], Any] = checks.unchecked
    # The dtypes of an array: "bool", "like q", "integers", "limits" or "factors"; None for a number.
    array: str | None = None
    rank: int | None = None  # axes of an array that starts with the batch; None: it has no batch
    unsupported_by: tuple[str, ...] = ()  # names of backends


class Options(TypedDict, total=False):
    """The options of every function of the package."""

    causal: Annotated[bool, Option(False, "bool", checks.flag)]
    window: Annotated[tuple[int | None, int | None] | None, Option(None, "SymInt[]?", checks.window)]
    band: Annotated[Band | None, Option(None, "SymInt[]?", checks.band)]
    spans: Annotated[
        Spans | None,
        Option(None, "Tensor?", checks.spans, "limits", 5, unsupported_by=("sdpa", "gluon")),
    ]
    mask: Annotated[Any, Option(None, "Tensor?", checks.mask, "bool", 4, unsupported_by=("gluon",))]
    bias: Annotated[Any, Option(None, "Tensor?", checks.bias, "like q", 4, unsupported_by=("gluon",))]
    alibi: Annotated[Any, Option(None, "Tensor?", checks.alibi, "like q", 2, unsupported_by=("sdpa",))]
    softcap: Annotated[float, Option(0.0, "float", checks.at_least_zero, unsupported_by=("sdpa",))]
    sink: Annotated[Any, Option(None, "Tensor?", checks.sink, "like q", unsupported_by=("sdpa",))]
    scale: Annotated[float | None, Option(None, "float?", checks.real_or_none)]
    dropout: Annotated[float, Option(0.0, "float", checks.probability, unsupported_by=("sdpa", "gluon"))]
    seed: Annotated[Any, Option(0, "SymInt", checks.seed)]
    origin: Annotated[Origin | None, Option(None, "SymInt[]?", checks.origin)]
    kv_lengths: Annotated[Any, Option(None, "Tensor?", checks.kv_lengths, "integers", 1, unsupported_by=("sdpa",))]
    descale: Annotated[Any, Option(None, "Tensor?", checks.descale, "factors", 3)]
    out_dtype: Annotated[Any, Option(None, "str?", checks.out_dtype)]
    deterministic: Annotated[bool, Option(False, "bool", checks.flag)]
    threads: Annotated[int | None, Option(None, "int?", checks.threads)]


class LayoutOptions(Options, total=False):
    """Options, with the order of axes and the padding of a batch."""

    layout: Annotated[str | None, Option(None, "")]
    key_padding_mask: Annotated[Any, Option(None, "")]


class PackedOptions(Options, total=False):
    """Options, with the starts of packed sequences."""

    cu_q: Annotated[Any, Option(None, "Tensor?", array="integers")]
    cu_k: Annotated[Any, Option(None, "Tensor?", array="integers")]


def _of(kind: Any) -> dict[str, Option]:
    """The options of a TypedDict."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


OPTIONS = _of(PackedOptions)  # of describe()
ARRAYS = tuple(name for name, option in OPTIONS.items() if option.array)
PLAIN_ARRAYS = tuple(name for name in ARRAYS if OPTIONS[name].array != "factors")  # factors may also be numbers
INTEGER_ARRAYS = tuple(name for name in ARRAYS if OPTIONS[name].array == "integers")
NUMBERS = tuple(name for name, option in OPTIONS.items() if not option.array)
DEFAULTS = {name: option.default for name, option in _of(LayoutOptions).items()}  # of attention()


def documented(function: F) -> F:
    """Decorate a function that takes **options: spell them out in its signature and docstring."""
    parameters = [*inspect.signature(function).parameters.values()][:-1]
    hints = get_type_hints(LayoutOptions)
    kind = inspect.Parameter.KEYWORD_ONLY
    for name, default in DEFAULTS.items():
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=hints[name]))
    function.__signature__ = inspect.Signature(parameters, return_annotation=Any)  # type: ignore[attr-defined]
    function.__doc__ = (function.__doc__ or "").replace("{options}", MEANING)
    return function
