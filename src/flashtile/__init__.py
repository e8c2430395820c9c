"""flashtile: exact attention, tile by tile."""

from flashtile import threads  # noqa: F401  it remembers which process this is, before any fork
from flashtile.api import (
    attention,
    attention_backward,
    attention_packed,
    merge,
    probabilities,
    standard_attention,
)
from flashtile.band import Band, causal, full, window
from flashtile.errors import DTypeError, FlashtileError, ShapeError, UnsupportedError
from flashtile.plan import Plan, plan
from flashtile.results import Grads
from flashtile.softmax import online_softmax
from flashtile.trace import Trace, trace

__version__ = "0.1.0"

__all__ = [
    "Band",
    "DTypeError",
    "FlashtileError",
    "Grads",
    "Plan",
    "ShapeError",
    "Trace",
    "UnsupportedError",
    "__version__",
    "attention",
    "attention_backward",
    "attention_packed",
    "causal",
    "full",
    "merge",
    "online_softmax",
    "plan",
    "probabilities",
    "standard_attention",
    "trace",
    "window",
]
