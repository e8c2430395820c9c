"""flashtile.distributed.decode(): attention of queries that all ranks have to a cache whose keys they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashtile.checks import layout as axes
from flashtile.checks.numbers import check_flag
from flashtile.checks.options import name_of_any
from flashtile.distributed import arguments, arithmetic, passes, segments
from flashtile.distributed.arguments import Arguments
from flashtile.distributed.arithmetic import Call, Keys
from flashtile.distributed.groups import channel_of, process_group
from flashtile.distributed.pieces import Piece, pieces
from flashtile.distributed.plan import Heads, Method
from flashtile.distributed.segments import Segment
from flashtile.distributed.shards import Shards
from flashtile.errors import ShapeError, UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flashtile.options import LayoutOptions

# Options that need to know which tokens the keys are.
OF_TOKENS = ("causal", "window", "band", "spans", "alibi")


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def decode(
    q: Any,
    k: Any,
    v: Any,
    *,
    group: Any = None,
    shards: Shards | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    **options: Unpack[LayoutOptions],
) -> Any:
    """Compute attention of queries that every rank has to keys of which each rank has a share, on all ranks.

    q is the same on all ranks, (batch, heads, queries, dim); k and v are this rank's keys, as many as it has, also
    none. Each rank attends to its own, and the results are merged by all-reduces of out and lse. There are no
    gradients.

    shards      which tokens of the cache each rank has, the queries' being the last of them. Without it, queries see
                all keys; kv_lengths then counts those in use on this rank, and options that depend on positions are
                refused

    The other arguments are those of flashtile.distributed.attention().
    """
    return_lse = check_flag("return_lse", return_lse)
    group = process_group(group)
    recorded = torch.is_grad_enabled()
    with torch.no_grad(), channel_of(group.group_name, "decode") as channel:
        refused: Exception | None = None
        facts: dict[str, Any] = {}
        try:
            call = arguments.prepare(q, k, v, dict(options))
            if recorded and any(x.requires_grad for x in (call.q, call.k, call.v)):
                raise UnsupportedError("q, k, v: expected tensors that need no gradient; attention() has gradients")
            facts = _facts(call, shards, backend)
            parts, numbers, keys = _parts(call, shards, channel.rank, channel.size, backend)
        except Exception as error:
            refused = error
        channel.agree("keys", refused=refused, **facts)
        real = arithmetic.accumulator(call.q.dtype)
        out = call.q.new_zeros((*call.q.shape[:3], call.v.shape[3]), dtype=real)
        lse = torch.full(out.shape[:3], -torch.inf, dtype=real, device=out.device)
        arithmetic.forward(numbers, parts, call.q, keys, out, lse)
        out, lse = _merged(channel, out, lse)
        if (sink := call.options.get("sink")) is not None:
            passes.add_sink(out, lse, sink.to(real))
    out_dtype = call.options.get("out_dtype")
    out = out.to(call.q.dtype if out_dtype is None else getattr(torch, name_of_any(out_dtype)))
    for _ in range(4 - call.ndim):
        out, lse = out[0], lse[0]
    results = (out, lse) if return_lse else out
    return axes.swap_results(results, return_lse) if call.bnhd else results


def _facts(call: Arguments, shards: Shards | None, backend: str) -> dict[str, Any]:
    """What must be equal on all ranks."""
    q, k, v, options, *_ = call
    shared = {name: x for name, x in options.items() if shards is not None or name != "kv_lengths"}
    return {
        "q": (q.dtype, tuple(q.shape)),
        "heads": (k.shape[1], v.shape[1]),
        "dims": (k.shape[3], v.shape[3]),
        "shards": None if shards is None else arguments.digest(torch.from_numpy(shards.code)),
        "backend": backend,
        **arguments.facts(shared),
    }


def _parts(
    call: Arguments, shards: Shards | None, rank: int, size: int, backend: str
) -> tuple[list[Piece], Call, Keys]:
    """The pieces of this rank's keys, checked, and what they have in common."""
    q, k, v, options, *_ = call
    n_q, n_k, heads = q.shape[2], k.shape[2], q.shape[1]
    positions = shards is not None
    every = Heads(0, heads, heads // max(k.shape[1], 1))
    if options.get("dropout"):
        raise UnsupportedError("dropout: expected 0 in decode()")
    if shards is None:
        found = [name for name in OF_TOKENS if name in options]
        if found:
            raise ShapeError(f"{found[0]}: expected shards with it, which say what tokens the keys are, got None")
        shards, rank, tokens = Shards.contiguous(n_k, ranks=1), 0, n_k
    else:
        arguments.check_shards(shards, size)
        tokens = shards.tokens
        if n_q > tokens:
            raise ShapeError(f"shards: expected at least {n_q} tokens, the queries', got {tokens}")
    arguments.check(call, backend, n_q, shards.counts[rank], (n_q, tokens))
    sharded = passes.Sharded(shards, Method(1, shards.ranks), rank, backend, options, heads, k.shape[1], n_k)
    if any(sharded.pairs.values()):
        name = next(name for name, x in sharded.pairs.items() if x)
        raise UnsupportedError(f"{name}: expected (batch, heads, 1, {n_k}), one number for each of this rank's keys")
    common, keys = sharded.call(every, q.shape[3]), sharded.keys(k, v)
    if not positions:
        if (lengths := options.get("kv_lengths")) is not None:
            common.numbers["kv_lengths"] = lengths
        return [Piece(slice(0, n_q), slice(0, n_k))] if n_q and n_k else [], common, keys
    first = tokens - n_q
    visible = sharded.visible(first)
    return pieces(visible, (Segment(first, 1, n_q),), segments.of_rank(shards, rank), sharded.uses), common, keys


def _merged(channel: Any, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The results of all ranks, merged: sums of outputs and of weights, by the largest lse."""
    most = channel.reduce(lse.clone(), "max", "merge, largest lse")
    base = most.masked_fill(most == -torch.inf, 0)
    weight = (lse - base).exp()[..., None]
    sums = channel.reduce(torch.cat([out * weight, weight], -1), "sum", "merge, sums")
    total = sums[..., -1]
    empty = total == 0
    return sums[..., :-1] / total.masked_fill(empty, 1)[..., None], (base + total.log()).masked_fill(empty, -torch.inf)
