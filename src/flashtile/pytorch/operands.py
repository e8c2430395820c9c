"""Call: the arguments of the operator flashtile::attention, and their way from and back to options. Settings."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashtile.band import Band
from flashtile.checks.arguments import ARRAYS, TEXT, check_ends, check_numbers, check_stored
from flashtile.numerics.dtypes import name_of
from flashtile.pytorch.interception import readable

SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_q, Tensor? cu_k, "
    "Tensor? mask, Tensor? bias, Tensor? alibi, Tensor? sink, Tensor? kv_lengths, Tensor? descale, "
    "Tensor? seed_tensor, bool causal, SymInt? left, SymInt? right, SymInt? offset, float softcap, float? scale, "
    "float dropout, SymInt seed, str? out_dtype, str backend, bool deterministic, int? threads"
)
TENSORS = ("cu_q", "cu_k", *ARRAYS, "descale")  # among the options
N_TENSORS = 3 + len(TENSORS) + 1  # they come first in a Call, that of a seed the last
_MAY_BE_TENSORS = frozenset((*TENSORS, "seed"))
_ONE = (torch.Size(()), torch.Size((1,)))
_name_of = name_of.__wrapped__  # without its cache, of which torch.compile warns


class Call(NamedTuple):
    """One call, in the order of SCHEMA; or something about each argument of it, such as whether it needs a gradient.

    left and right are a window, and with an offset a flashtile.Band. seed is 64 bits with a sign, for a schema has no
    unsigned integers; seed_tensor, where there is one, holds them in its place.
    """

    q: Any
    k: Any
    v: Any
    cu_q: Any
    cu_k: Any
    mask: Any
    bias: Any
    alibi: Any
    sink: Any
    kv_lengths: Any
    descale: Any
    seed_tensor: Any
    causal: Any
    left: Any
    right: Any
    offset: Any
    softcap: Any
    scale: Any
    dropout: Any
    seed: Any
    out_dtype: Any
    backend: Any
    deterministic: Any
    threads: Any

    def options(self) -> dict[str, Any]:
        """What describe() takes besides q, k and v, as attention() hands it on: only what is given, in its order."""
        banded = self.offset is not None
        windowed = not banded and not (self.left is None and self.right is None)
        every = {
            "cu_q": self.cu_q,
            "cu_k": self.cu_k,
            "causal": self.causal or None,
            "window": (self.left, self.right) if windowed else None,
            "band": Band(self.left, self.right, self.offset) if banded else None,
            "mask": self.mask,
            "bias": self.bias,
            "alibi": self.alibi,
            "softcap": self.softcap or None,
            "sink": self.sink,
            "scale": self.scale,
            "dropout": self.dropout or None,
            "seed": self.seed % 2**64 or None if self.seed_tensor is None else settled_seed(self.seed_tensor),
            "kv_lengths": self.kv_lengths,
            "descale": self.descale,
            "out_dtype": self.out_dtype,
            "deterministic": self.deterministic or None,
            "threads": self.threads,
        }
        return {name: x for name, x in every.items() if x is not None}


def tensors_of(q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """All tensors of a call, by name."""
    return {"q": q, "k": k, "v": v, **{name: options[name] for name in tensors_among(options)}}


def tensors_among(options: Mapping[str, Any]) -> list[str]:
    """The names of the options that are tensors."""
    return [name for name, x in options.items() if name in _MAY_BE_TENSORS and isinstance(x, Tensor)]


def number_of(seed: Tensor) -> int:
    """The seed that a tensor holds, a negative one by its bits."""
    check_stored({"seed": seed})
    return int(seed.item()) % 2**64


def settled_seed(x: Any) -> Any:
    """The seed in a tensor that the host can read at no cost; anything else as it is.

    What is wrong with it describe() says.
    """
    if isinstance(x, Tensor) and readable(x) and x.dtype is torch.int64 and x.shape in _ONE:
        return number_of(x)
    return x


_WHOLE = ("window", "band", "seed", "threads")  # whole numbers, or made of them


def _settled(x: Any) -> Any:
    """Such an option in Python's own numbers: a tensor, say, may have another value before gradients are made.

    What is wrong with it stays as it is, for describe() to say so.
    """
    if x is None or isinstance(x, (int, *TEXT)):
        return x
    if isinstance(x, Band):
        return Band(*map(_settled, (x.left, x.right, x.offset)))
    if isinstance(x, Sequence):
        return tuple(map(_settled, x))
    try:
        return operator.index(x)
    except TypeError:
        return x


class Settings:
    """A call without its tensors, which autograd keeps in a way of its own. names: of those among the options.

    known: a call like it, if there is one; see prepared.py.
    """

    __slots__ = ("_options", "backend", "known", "names")

    def __init__(self, backend: str, options: dict[str, Any], names: list[str], known: Any) -> None:
        self.backend, self.names, self.known = backend, names, known
        self._options = options | dict.fromkeys(names) if names else options  # that keep their places: see prepared.py
        if "window" in options or "band" in options or "seed" in options or "threads" in options:
            whole = (name for name in _WHOLE if name in options and name not in names)
            self._options = self._options | {name: _settled(options[name]) for name in whole}

    def options_with(self, tensors: Iterable[Any]) -> dict[str, Any]:
        """The options with these tensors, in the order of their names."""
        return self._options | dict(zip(self.names, tensors, strict=True)) if self.names else self._options

    def call(self, q: Any, k: Any, v: Any, tensors: Iterable[Any]) -> Call:
        """The call of these tensors."""
        return of(q, k, v, self.backend, **self.options_with(tensors))


def of(
    q: Any,
    k: Any,
    v: Any,
    backend: str,
    *,
    cu_q: Any = None,
    cu_k: Any = None,
    causal: bool = False,
    window: Any = None,
    band: Band | None = None,
    mask: Any = None,
    bias: Any = None,
    alibi: Any = None,
    softcap: float = 0.0,
    sink: Any = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Any = 0,
    kv_lengths: Any = None,
    descale: Any = None,
    out_dtype: Any = None,
    deterministic: bool = False,
    threads: int | None = None,
) -> Call:
    """The call that options stand for, its numbers Python's own; describe() judges the tensors."""
    if isinstance(window, (tuple, list)) and len(window) == 2:  # torch.compile knows no tuple | list before torch 2.10
        window = _whole(window[0]), _whole(window[1])
    causal, left, right, offset = check_ends(_whole(causal), window, band, None)
    seed_tensor = None
    if isinstance(seed, Tensor):
        seed, seed_tensor = 0, seed
    seed = _whole(seed)
    drawn = _is_drawn(seed)
    scale, softcap, dropout, checked, deterministic, threads = check_numbers(
        _real(scale), _real(softcap), _real(dropout), 0 if drawn else seed, _whole(deterministic), _whole(threads)
    )
    return Call(
        q,
        k,
        v,
        cu_q,
        cu_k,
        mask,
        bias,
        alibi,
        sink,
        kv_lengths,
        descale,
        seed_tensor,
        causal,
        left,
        right,
        offset,
        softcap,
        scale,
        dropout,
        seed if drawn else checked - 2**64 if checked >= 2**63 else checked,
        None if out_dtype is None else _name_of(out_dtype),
        str(backend),
        deterministic,
        threads,
    )


def _is_drawn(seed: Any) -> bool:
    """Whether a number comes from a tensor of the graph that is being traced: nothing can be asked of its value."""
    if not torch.compiler.is_compiling() or isinstance(seed, bool) or not isinstance(seed, (int, torch.SymInt)):
        return False
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    drawn: bool = guard_or_false(seed < 0) != guard_or_true(seed < 0)
    return drawn


def _real(x: Any) -> Any:
    """torch.compile takes a number of NumPy's for an array of no axes."""
    return float(x) if isinstance(x, np.ndarray) and x.ndim == 0 else x


def _whole(x: Any) -> Any:
    """Likewise; of an array, int() is more than torch.compile can follow."""
    return x.tolist() if isinstance(x, np.ndarray) else x
