"""flashtile: exact attention, tile by tile."""

from flashtile import masks
from flashtile.api import (
    attention,
    attention_backward,
    attention_packed,
    merge,
    probabilities,
    standard_attention,
)
from flashtile.band import Band, causal, full, window
from flashtile.cost.plan import Plan, plan
from flashtile.cost.trace import Trace, trace
from flashtile.errors import DTypeError, FlashtileError, MismatchError, PeerError, ShapeError, UnsupportedError
from flashtile.host import threads  # noqa: F401  records the process id before any fork
from flashtile.numerics.softmax import online_softmax
from flashtile.origin import Origin
from flashtile.results import Grads
from flashtile.spans import Spans

__version__ = "0.1.0"

__all__ = [
    "Band",
    "DTypeError",
    "FlashtileError",
    "Grads",
    "MismatchError",
    "Origin",
    "PeerError",
    "Plan",
    "ShapeError",
    "Spans",
    "Trace",
    "UnsupportedError",
    "__version__",
    "attention",
    "attention_backward",
    "attention_packed",
    "causal",
    "full",
    "masks",
    "merge",
    "online_softmax",
    "plan",
    "probabilities",
    "standard_attention",
    "trace",
    "window",
]


def __dir__() -> list[str]:
    """List the public names for tab completion, without submodules."""
    return __all__
