"""The device's current ceilings: a large matrix product and a large copy, timed among the contenders."""

from dataclasses import dataclass
from functools import partial

from flashtile.lab.bench.timing import Call

PRODUCT, COPY = "matrix product", "device copy"
SIDE = 8192
COPIED = 1 << 30


@dataclass(frozen=True)
class Ceiling:
    """A call, and the FLOPs it computes or the bytes it reads and writes."""

    call: Call
    amount: float


def product(device: str, side: int = SIDE) -> Ceiling:
    """A product of side^3 in bfloat16, of random numbers."""
    import torch

    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    return Ceiling(partial(torch.mm, a, b, out=torch.empty_like(a)), 2.0 * side**3)


def copy(device: str, copied: int = COPIED) -> Ceiling:
    """A copy of far more bytes than any cache holds."""
    import torch

    source = torch.randint(256, (copied,), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return Ceiling(partial(target.copy_, source), 2.0 * copied)
