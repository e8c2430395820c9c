"""DTensor: the operators on shards of the batch and of heads. Shards of a sequence are refused by name."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flashtile.errors import DTypeError, UnsupportedError
from flashtile.options import OPTIONS
from flashtile.origin import Origin
from flashtile.pytorch.operands import FIELDS, TENSOR_ARGUMENTS, Operands

if TYPE_CHECKING:
    from torch.distributed.tensor._op_schema import OpSchema, OpStrategy

_MODULE = "torch.distributed.tensor"
_registered = False


def check(tensors: Mapping[str, Any]) -> Split | None:
    """Check the DTensors of a call, and return how they are split; None if there are none.

    All tensors must be DTensors, of one mesh, and split by batch or heads.
    """
    dtensors = {name: x for name, x in tensors.items() if _is_dtensor(x)}
    if not dtensors:
        return None
    from torch.distributed.tensor import DTensor

    (first, like), *others = dtensors.items()
    for name, x in tensors.items():
        if name not in dtensors and x.numel() != 1 and not DTensor._op_dispatcher._allow_implicit_replication:
            raise DTypeError(f"{name}: expected a DTensor like others of the call, got a {type(x).__name__}")
    for name, x in others:
        if x.device_mesh != like.device_mesh:
            raise UnsupportedError(f"{name}: expected the mesh of {first}, {like.device_mesh}, got {x.device_mesh}")
    register()
    return Split.of(tensors, like.device_mesh)


def run_on_shards(
    split: Split, tensors: Mapping[str, Any], options: Mapping[str, Any], attention: Callable[..., Any]
) -> tuple[Any, Any]:
    """Return out and lse of a call with dropout, run on this rank's shards, which drop what the whole drops."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    q, v = tensors["q"], tensors["v"]
    placements, axes = split.placements("q"), split.axes["q"]
    _, first = compute_local_shape_and_global_offset(q.shape, split.mesh, placements)
    origin = options.get("origin") or Origin()
    origin = replace(
        origin,
        sequence=origin.sequence + (0 if axes.batch is None else first[axes.batch]),
        head=origin.head + (0 if axes.heads is None else first[axes.heads]),
        heads=origin.heads or (1 if axes.heads is None else q.shape[axes.heads]),
    )
    local = {
        name: x.redistribute(placements=split.placements(name)).to_local(
            grad_placements=split.placements_of_gradient(name)
        )
        if _is_dtensor(x)
        else x
        for name, x in tensors.items()
    }
    results = attention(*(local.pop(name) for name in ("q", "k", "v")), {**options, **local, "origin": origin})
    found = []
    for x, shape in zip(results, ((*q.shape[:-1], v.shape[-1]), q.shape[:-1]), strict=True):
        stride = tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))
        found.append(
            DTensor.from_local(x, split.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
        )
    return found[0], found[1]


def _is_dtensor(x: Any) -> bool:
    """Whether x is a DTensor; does not import torch.distributed."""
    return type(x).__module__.startswith(_MODULE) and hasattr(x, "placements")


class Axes(NamedTuple):
    """The axes by which a tensor of a call can be split; None: it has no such axis, or one that is broadcast."""

    batch: int | None = None
    heads: int | None = None


def axes_of(tensors: Mapping[str, Any]) -> dict[str, Axes]:
    """Find the Axes of each tensor of a call, by its name and shape."""
    q, packed = tensors["q"].shape, tensors.get("cu_q") is not None
    batch = 0 if len(q) == 4 else None  # of q, k and v
    heads = 1 if packed or len(q) == 4 else 0 if len(q) == 3 else None
    found = {}
    for name, x in tensors.items():
        if name in ("q", "k", "v"):
            found[name] = Axes(batch, heads)
        elif name == "sink":
            found[name] = Axes(heads=0)
        elif (rank := OPTIONS[name].rank if name in OPTIONS else None) is None:  # starts and seeds
            found[name] = Axes()
        else:
            first = len(x.shape) - rank
            of = tensors["k"].shape if name == "descale" else q
            found[name] = Axes(
                _unless_broadcast(x.shape, first, None if batch is None else of[batch]),
                _unless_broadcast(x.shape, first + 1, None if heads is None or name == "kv_lengths" else of[heads]),
            )
    return found


def _unless_broadcast(shape: Any, axis: int, size: int | None) -> int | None:
    return axis if axis >= 0 and size is not None and shape[axis] == size else None


class Split:
    """How each axis of a mesh splits a call: by "batch", by "heads", or not at all (None)."""

    def __init__(self, by: list[str | None], axes: dict[str, Axes], mesh: Any) -> None:
        self.by, self.axes, self.mesh = by, axes, mesh

    @staticmethod
    def of(tensors: Mapping[str, Any], mesh: Any) -> Split:
        """The split of a call by the placements of its tensors: q's where it is split, else that of the next."""
        axes = axes_of(tensors)
        by: list[str | None] = [None] * len(mesh.shape)
        for name, x in tensors.items():
            for n, placement in enumerate(getattr(x, "placements", ())):  # a plain tensor is replicated
                axis = getattr(placement, "dim", None)
                if axis is not None:
                    by[n] = by[n] or _kind_of(name, axis, axes[name], placement)
        shards = math.prod(size for size, kind in zip(mesh.shape, by, strict=True) if kind == "heads")
        heads = tensors["k"].shape[axes["k"].heads] if axes["k"].heads is not None else 1
        if heads % shards:
            raise UnsupportedError(
                f"k: expected a number of heads that {shards} shards of heads divide, got {heads}; repeat_interleave() "
                "those of k and v, or replicate q, k and v"
            )
        return Split(by, axes, mesh)

    @property
    def replicated(self) -> Any:
        from torch.distributed.tensor import Replicate

        return (Replicate(),) * len(self.by)

    def placements(self, name: str) -> Any:
        """The placements of a tensor of the call."""
        from torch.distributed.tensor import Replicate, Shard

        axes = (None if kind is None else getattr(self.axes[name], kind) for kind in self.by)
        return tuple(Replicate() if axis is None else Shard(axis) for axis in axes)

    def placements_of_gradient(self, name: str) -> Any:
        """The placements of a tensor's gradient: a sum over the shards that share the tensor."""
        from torch.distributed.tensor import Partial

        shared = (kind is not None and getattr(self.axes[name], kind) is None for kind in self.by)
        return tuple(Partial() if sums else p for p, sums in zip(self.placements(name), shared, strict=True))


def _kind_of(name: str, axis: int, axes: Axes, placement: Any) -> str:
    if axis not in axes:
        known = [kind for kind in axes._fields if getattr(axes, kind) is not None]
        wanted = f"a DTensor split by {' or '.join(known)}" if known else "a replicated DTensor"
        raise UnsupportedError(
            f"{name}: expected {wanted}, got {placement}; flashtile.distributed.attention() takes shards of sequences"
        )
    return axes._fields[axes.index(axis)]


def register() -> None:
    """Register the strategies with DTensor, once, if torch.distributed.tensor has been imported."""
    global _registered
    if _registered or _MODULE not in sys.modules:
        return
    _registered = True
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    propagator = DTensor._op_dispatcher.sharding_propagator
    for name, strategy in (
        ("attention", _strategy),
        ("attention_backward", _strategy_of_backward),
        ("block_backward", _strategy_of_backward),
    ):
        info = RuntimeSchemaInfo(static_argnum=3, needs_pytree=True)  # from here on, numbers are part of torch's key
        propagator.register_op_strategy(getattr(torch.ops.flashtile, name).default, strategy, info)


def _strategy(schema: OpSchema) -> OpStrategy:
    """The strategy of flashtile::attention: one, that follows from the placements of the call."""
    tensors, split = _split_of(schema, schema.args_schema)
    out_and_lse = [split.placements("q")] * 2
    return _only(schema, out_and_lse, [split.placements(name) for name in tensors])


def _strategy_of_backward(schema: OpSchema) -> OpStrategy:
    """The same of flashtile::attention_backward, and of block_backward, which has one argument more."""
    _, dlse, _, _, bias_grad = schema.args_schema[:5]
    tensors, split = _split_of(schema, schema.args_schema[-len(FIELDS) :])
    of_rows = [split.placements("q")] * (3 if dlse is None else 4)  # dout, dlse, out, lse
    has = {"bias": "bias" in tensors and bias_grad, "sink": "sink" in tensors}
    grads = [split.placements(name) for name in ("q", "k", "v")]
    grads += [split.placements_of_gradient(name) if given else split.replicated for name, given in has.items()]
    return _only(schema, grads, of_rows + [split.placements(name) for name in tensors])


def _split_of(schema: OpSchema, arguments: Sequence[Any]) -> tuple[list[str], Split]:
    """The names of the tensors of a call, in the operator's order, and how they are split."""
    call = Operands(*arguments)
    given = {name: getattr(call, name) for name in TENSOR_ARGUMENTS}
    tensors = {name: x.strategies[0].output_spec for name, x in given.items() if x is not None}
    split = Split.of(tensors, schema.get_mesh_from_args())
    if call.dropout and any(split.by):
        raise UnsupportedError(
            f"dropout: expected 0 for shards of the batch or of heads in compiled code, where each would drop what the "
            f"first drops, got {call.dropout}"
        )
    return list(tensors), split


def _only(schema: OpSchema, outputs: Sequence[Any], inputs: Sequence[Any]) -> OpStrategy:
    """The strategy that has these placements of the outputs and of the tensors among the arguments."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSpec, OpStrategy
    from torch.distributed.tensor._ops.utils import generate_redistribute_costs

    mesh = schema.get_mesh_from_args()
    wanted = [
        DTensorSpec(mesh, placements, tensor_meta=given.strategies[0].output_spec.tensor_meta)
        for placements, given in zip(inputs, schema.args_strategy, strict=True)
    ]
    costs = [generate_redistribute_costs(*each) for each in zip(schema.args_strategy, wanted, strict=True)]
    specs = tuple(DTensorSpec(mesh, placements) for placements in outputs)
    return OpStrategy([OpSpec(output_specs=specs, input_specs=wanted, redistribute_cost=costs)])
