"""The operators flashtile::context_parallel and context_parallel_backward: one node each to torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.distributed import arguments, passes
from flashtile.distributed.groups import channel_of, rank_of
from flashtile.distributed.passes import Sharded
from flashtile.distributed.plan import Method
from flashtile.distributed.shards import Shards
from flashtile.pytorch import flops
from flashtile.pytorch.autograd import Backward, Operator, register, reject_gradients
from flashtile.pytorch.interception import answering
from flashtile.pytorch.operands import FIELDS, SCHEMA, TENSOR_ARGUMENTS, Operands
from flashtile.pytorch.operators import LIBRARY

# split: rows, query heads and key heads of this rank once heads are exchanged.
_SPLIT = f"{SCHEMA}, str group, Tensor shards, int ulysses, int ring, bool gather, SymInt[] split"
LIBRARY.define(
    f"context_parallel({_SPLIT}) -> (Tensor out, Tensor lse, Tensor q_of_heads, Tensor k_of_heads, Tensor v_of_heads, "
    "Tensor out_of_heads, Tensor lse_of_heads)"
)
LIBRARY.define(
    f"context_parallel_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool bias_grad, SymInt kv_heads, "
    f"{_SPLIT}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)"
)
FORWARD = torch.ops.flashtile.context_parallel.default
BACKWARD = torch.ops.flashtile.context_parallel_backward.default
_N = len(FIELDS)


@torch.library.impl(LIBRARY, "context_parallel", "CompositeExplicitAutograd")
def _forward(*args: Any) -> tuple[Tensor, ...]:
    call = Operands(*args[:_N])
    heads, kv_heads = call.q.shape[1], call.k.shape[1]
    with torch.no_grad():
        return tuple(
            _run(args, heads, kv_heads, call.q.shape[2], "forward", {}, passes.forward, call.q, call.k, call.v)
        )


@torch.library.impl(LIBRARY, "context_parallel_backward", "CompositeExplicitAutograd")
def _backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, bias_grad: bool, kv_heads: int, *args: Any
) -> tuple[Tensor, ...]:
    call = Operands(*args[:_N])
    tensors = (call.q, call.k, call.v, out, lse, dout, dlse, bias_grad)
    with torch.no_grad():
        grads = _run(
            args,
            dout.shape[1],
            kv_heads,
            dout.shape[2],
            "backward",
            {"dlse": dlse is not None},
            passes.backward,
            *tensors,
        )
    return tuple(dout.new_empty(0) if x is None else x for x in grads)


def _run(
    args: tuple[Any, ...],
    heads: int,
    kv_heads: int,
    rows: int,
    step: str,
    facts: dict[str, Any],
    run: Any,
    *tensors: Any,
) -> Any:
    """Check that all ranks make the same call, and run it."""
    call = Operands(*args[:_N])
    group, code, ulysses, ring, gather, _ = args[_N:]
    method = Method(ulysses, ring, gather)
    channel = channel_of(group, str(method))
    with channel, answering():
        shards = Shards.decode(code.numpy())
        sharded = Sharded(shards, method, channel.rank, call.backend, call.options(), heads, kv_heads, rows)
        refused: Exception | None = None
        try:
            if step == "forward":  # in compiled graphs, too
                arguments.check(arguments.Arguments(call.q, call.k, call.v, sharded.options, 4, False), *sharded.sizes)
            facts = {**facts, **_facts(call, sharded, code)}
            sharded.plan()
        except Exception as error:
            refused = error
        channel.agree(step, refused=refused, **facts)
        return run(channel, sharded, *tensors)


def _facts(call: Operands, sharded: Sharded, code: Tensor) -> dict[str, Any]:
    """What must be equal on all ranks."""
    return {
        "q, k, v": (call.q.dtype, call.q.shape[0], call.q.shape[-1], call.v.shape[-1]),
        "heads": (sharded.heads, sharded.kv_heads),
        "shards": arguments.digest(code),
        "of all pairs": sharded.pairs,
        "backend": sharded.backend,
        **arguments.facts(sharded.options),
    }


@torch.library.register_fake("flashtile::context_parallel", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _fake_forward(*args: Any) -> tuple[Tensor, ...]:
    call = Operands(*args[:_N])
    q, k, v = call.q, call.k, call.v
    _, _, ulysses, _, _, (rows, heads, kv_heads) = args[_N:]
    real = torch.float64 if q.dtype is torch.float64 else torch.float32
    out_dtype = q.dtype if call.out_dtype is None else getattr(torch, call.out_dtype)
    out = q.new_empty((*q.shape[:3], v.shape[3]), dtype=out_dtype)
    lse = q.new_empty(q.shape[:3], dtype=real)
    if ulysses == 1:
        return out, lse, *(q.new_empty(0) for _ in range(5))
    batch = q.shape[0]
    return (
        out,
        lse,
        q.new_empty((batch, heads, rows, q.shape[3])),
        k.new_empty((batch, kv_heads, rows, k.shape[3])),
        v.new_empty((batch, kv_heads, rows, v.shape[3])),
        q.new_empty((batch, heads, rows, v.shape[3]), dtype=out_dtype),
        q.new_empty((batch, heads, rows), dtype=real),
    )


@torch.library.register_fake("flashtile::context_parallel_backward", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _fake_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, bias_grad: bool, kv_heads: int, *args: Any
) -> tuple[Tensor, ...]:
    call = Operands(*args[:_N])
    batch, heads, rows, _ = dout.shape
    dbias = None if call.bias is None or not bias_grad else torch.empty_like(call.bias)
    if args[_N + 2] > 1:  # heads were exchanged
        qkv = zip((call.q, call.k, call.v), (heads, kv_heads, kv_heads), strict=True)
        dq, dk, dv = (x.new_empty((batch, n, rows, x.shape[3])) for x, n in qkv)
        dbias = None if dbias is None else dbias.contiguous()
    else:  # in the order of the inputs in memory
        dq, dk, dv = (torch.empty_like(x) for x in (call.q, call.k, call.v))
    return (
        dq,
        dk,
        dv,
        dout.new_empty(0) if dbias is None else dbias,
        dout.new_empty(0) if call.sink is None else torch.empty_like(call.sink),
    )


class _Forward(Operator):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        _, *args = inputs
        call, more = Operands(*args[:_N]), args[_N:]
        reject_gradients(call.q, Operands(*ctx.needs_input_grad[1 : _N + 1]).alibi)
        out, lse, *of_heads, out_of_heads, lse_of_heads = output
        ctx.kv_heads = call.k.shape[1]
        ctx.more = more
        if more[2] > 1:  # heads were exchanged
            (q, k, v), out, lse = of_heads, out_of_heads, lse_of_heads
            call = call._replace(q=q, k=k, v=v)
        ctx.numbers = tuple(call)[len(TENSOR_ARGUMENTS) :]
        ctx.save_for_backward(*tuple(call)[: len(TENSOR_ARGUMENTS)], out, lse, more[1])

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Any, ...]:
        *tensors, out, lse, shards = ctx.saved_tensors
        needs = Operands(*ctx.needs_input_grad[1 : _N + 1])
        group, _, *rest = ctx.more
        if dout is None:  # only the lse has a gradient
            assert dlse is not None
            dout = dlse.new_zeros((*dlse.shape, out.shape[-1]), dtype=out.dtype)
        bias_grad = bool(needs.bias)
        grads = BACKWARD(dout, dlse, out, lse, bias_grad, ctx.kv_heads, *tensors, *ctx.numbers, group, shards, *rest)
        named = dict(zip(("q", "k", "v", "bias", "sink"), grads, strict=True))
        found = Operands(*(None for _ in FIELDS))
        found = found._replace(**{name: x for name, x in named.items() if getattr(needs, name)})
        return None, *found, *(None for _ in ctx.more)


def _pairs(q: Tensor, group: str, code: Tensor, ulysses: int, ring: int, *_: Any) -> int:
    """This rank's queries times the keys of their documents, masked or not; as one document if codes have no values.

    q: of this rank's rows and all heads.
    """
    batch, heads, rows = (int(n) for n in q.shape[:3])
    if type(code) is not Tensor or code.is_meta:
        return batch * heads * rows * rows * ulysses * ring
    shards = Shards.decode(code.numpy())
    return batch * heads * sum(run.n * shards.lengths[run.document] for run in shards.runs[rank_of(group)])


def _forward_flops(*args: Any, **_: Any) -> int:
    call = Operands(*args[:_N])
    return flops.of_forward(_pairs(call.q, *args[_N:]), call)


def _backward_flops(
    dout: Tensor, dlse: Any, out: Any, lse: Any, bias_grad: Any, kv_heads: Any, *args: Any, **_: Any
) -> int:
    return flops.of_backward(_pairs(dout, *args[_N:]), Operands(*args[:_N]))


flops.FORMULAS.update({FORWARD: _forward_flops, BACKWARD: _backward_flops})
register(FORWARD, _Forward)
register(BACKWARD, Backward)
