"""Budget: the cost of a whole model's attention: KV cache, FLOPs, bytes, least time, and number of GPUs."""

from dataclasses import asdict, dataclass
from typing import Any

from flashtile.band import ceil_div
from flashtile.cost.hardware import Hardware
from flashtile.cost.parallel import Links
from flashtile.cost.plan import Floor, Plan, plan
from flashtile.cost.traffic import forward_flops_per_pair
from flashtile.distributed import Shards
from flashtile.errors import ShapeError
from flashtile.lab.catalogue import Model
from flashtile.numerics.dtypes import ITEMSIZE, accumulator


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers of one kind, and the cost of one of them."""

    count: int
    window: int | None  # keys that a query sees; None: all before it
    flops: int
    least_bytes: int
    plan: Plan | None  # None: flashtile has no kernel for it

    def seconds(self, hardware: Hardware) -> float:
        return Floor.under(self.flops, self.least_bytes, hardware.rates).seconds


@dataclass(frozen=True, slots=True)
class Budget:
    """The cost of one sequence, attention only: no weights, no projections, no other layers."""

    model: Model
    context: int
    decode: bool  # one new token against the context, not the whole prompt
    layers: tuple[Layers, ...]
    kv_bytes_a_token: int
    kv_bytes: int
    flops: int
    least_bytes: int
    seconds: float | None  # the least time of all layers in sequence
    gpus: int | None  # needed for the KV cache alone

    @property
    def tokens_a_second(self) -> float | None:
        """The highest possible rate."""
        if self.seconds is None:
            return None
        return (1 if self.decode else self.context) / self.seconds

    @property
    def shared_seconds(self) -> float | None:
        """The least time if that many GPUs share the keys evenly, not counting communication."""
        return None if self.seconds is None or self.gpus is None else self.seconds / max(self.gpus, 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        layers = [{**asdict(kind), "plan": kind.plan and kind.plan.to_dict()} for kind in self.layers]
        derived = {"tokens_a_second": self.tokens_a_second, "shared_seconds": self.shared_seconds}
        return {**asdict(self), "layers": layers, **derived}


def budget(
    model: Model,
    context: int,
    *,
    decode: bool = False,
    dtype: str = "bfloat16",
    hardware: Hardware | None = None,
    device: str = "cpu",
    backend: str = "auto",
    shards: Shards | None = None,
    links: Links | None = None,
) -> Budget:
    """Compute the cost of one sequence of `context` tokens: of all of them, or of the next one.

    With shards and links, also of its layers on several GPUs.
    """
    if context < 1:
        raise ShapeError(f"context: expected 1 token or more, got {context}")
    kinds = []
    for count, window in ((model.layers - model.local, None), (model.local, model.window)):
        if count and decode and model.latent is not None:
            kinds.append(_latent(model, model.latent, count, context, dtype))
        elif count:
            planned = plan(
                *model.shapes(1 if decode else context, context),
                dtype,
                device,
                v_shape=model.v_shape(context),
                causal=True,
                window=None if window is None else (window - 1, None),
                backend=backend,
                hardware=hardware,
                shards=shards,
                links=links,
            )
            kinds.append(Layers(count, window, planned.flops, planned.least_bytes, planned))
    kv_bytes = model.kv_bytes(context, dtype)
    return Budget(
        model=model,
        context=context,
        decode=decode,
        layers=tuple(kinds),
        kv_bytes_a_token=model.kv_bytes_a_token(dtype),
        kv_bytes=kv_bytes,
        flops=sum(kind.count * kind.flops for kind in kinds),
        least_bytes=sum(kind.count * kind.least_bytes for kind in kinds),
        seconds=None if hardware is None else sum(kind.count * kind.seconds(hardware) for kind in kinds),
        gpus=None if hardware is None or hardware.memory is None else ceil_div(kv_bytes, hardware.memory),
    )


def _latent(model: Model, latent: int, count: int, context: int, dtype: str) -> Layers:
    """One token against latent vectors: all heads read the same vector per token, and its front part is the value."""
    wide, size = latent + model.rope, ITEMSIZE[dtype]
    flops = model.heads * context * forward_flops_per_pair(wide, latent)
    rows = model.heads * ((wide + latent) * size + ITEMSIZE[accumulator(dtype)])  # q, out and lse
    return Layers(count, None, flops, context * wide * size + rows, None)
