"""flashtile.distributed.attention(): exact attention of this rank's queries to the keys of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flashtile.checks import layout as axes
from flashtile.checks.numbers import check_flag, check_integer
from flashtile.distributed import operators
from flashtile.distributed.arguments import PAIRED, Arguments, check, check_shards, prepare
from flashtile.distributed.groups import channel_of, process_group
from flashtile.distributed.plan import Heads, Method
from flashtile.distributed.shards import Shards
from flashtile.errors import ShapeError, UnsupportedError
from flashtile.pytorch import flops
from flashtile.pytorch.operands import operands

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flashtile.options import LayoutOptions

MOST_GATHERED = 1 << 30  # bytes of keys and values that "auto" gathers; beyond it takes the ring
METHODS = ("auto", "gather", "ring", "ulysses")


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    group: Any = None,
    shards: Shards,
    method: str | tuple[int, int] = "auto",
    return_lse: bool = False,
    backend: str = "auto",
    **options: Unpack[LayoutOptions],
) -> Any:
    """Compute attention of this rank's queries to the keys of all ranks, exactly, with gradients.

    q, k and v are this rank's shards of (batch, heads, tokens, dim), and so is the result. Every rank of the group
    calls this with the same options.

    group       a ProcessGroup, or a DeviceMesh of one axis, such as mesh["cp"]; by default, all ranks
    shards      which tokens each rank holds; tokens of different documents do not see each other
    method      "gather": the keys that a rank's queries see are gathered. "ring": blocks of keys go from rank to rank,
                while each computes; memory does not grow with the ranks. "ulysses": heads are exchanged for tokens.
                (a, b): ulysses in groups of a neighbouring ranks, and a ring over b groups. "auto": ulysses if it
                sends least, else gather, or the ring if keys and values take more than 1 GiB

    All options of flashtile.attention() mean what they mean there for the whole sequence: causal, window and spans
    count over the tokens of all ranks, dropout drops the same weights. A mask or bias is (batch, heads, 1, this rank's
    tokens), one number for each key, or (batch, heads, this rank's tokens, all tokens). What all ranks share (spans,
    alibi, sink, kv_lengths, seed) is the same on each, and so is the gradient of the sink: that of the sum of all
    ranks' losses.
    """
    group = process_group(group)
    rank, size = group.rank(), group.size()
    try:
        return_lse = check_flag("return_lse", return_lse)
        check_shards(shards, size)
        call = prepare(q, k, v, dict(options))
        if not torch.compiler.is_compiling():
            flops.add_to_counters()
            check(call, backend, shards.counts[rank], shards.counts[rank], (shards.tokens, shards.tokens))
        split = method_of(method, size, shards, call)
    except Exception as error:  # whatever it is, the other ranks must not wait
        if not torch.compiler.is_compiling():
            refuse(group, error)
        raise
    q, k, v = call.q, call.k, call.v
    within = rank % split.ulysses
    heads, kv_heads = q.shape[1], k.shape[1]
    own = Heads(heads * within // split.ulysses, heads * (within + 1) // split.ulysses, heads // kv_heads)
    first = rank - within
    rows = sum(shards.counts[first : first + split.ulysses])
    sizes = [rows, own.n, own.keys.stop - own.keys.start]
    code = torch.from_numpy(shards.code)
    out, lse, *_ = operators.FORWARD(
        *operands(q, k, v, backend, call.options),
        group.group_name,
        code,
        split.ulysses,
        split.ring,
        split.gather,
        sizes,
    )
    for _ in range(4 - call.ndim):
        out, lse = out[0], lse[0]
    results = (out, lse) if return_lse else out
    return axes.swap_results(results, return_lse) if call.bnhd else results


def refuse(group: Any, error: Exception) -> None:
    """Tell the other ranks that this one does not make the call."""
    with channel_of(group.group_name, "attention") as channel:
        channel.agree("forward", refused=error)


def method_of(method: Any, size: int, shards: Shards, call: Arguments) -> Method:
    """How a call is split."""
    q, k, v, options, *_ = call
    pairs = [name for name in PAIRED if options.get(name) is not None and options[name].shape[2:] != (1, k.shape[2])]
    if method == "auto":
        heads, kv_heads = q.shape[1], k.shape[1]
        if size > 1 and not pairs and kv_heads % size == 0 and heads + kv_heads <= kv_heads * size:
            return Method(size, 1)
        tokens = sum(shards.counts)  # numbers that torch.compile knows
        gathered = tokens * k.shape[0] * kv_heads * (k.shape[3] + v.shape[3]) * k.element_size()
        return Method(1, size, bool(gathered <= MOST_GATHERED))
    if method in ("gather", "ring"):
        return Method(1, size, method == "gather")
    found = Method(size, 1) if method == "ulysses" else None
    if isinstance(method, tuple) and len(method) == 2:
        ulysses, ring = (check_integer("method", n, 1, size) for n in method)
        found = Method(ulysses, ring)
    if found is None or found.ulysses * found.ring != size:
        raise ShapeError(
            f"method: expected {', '.join(METHODS)}, or two sizes whose product is {size}, the ranks, got {method!r}"
        )
    if pairs and found.ulysses > 1:
        raise UnsupportedError(
            f"{pairs[0]}: expected (batch, heads, 1, keys) for {found}, which exchanges heads for tokens, got one of "
            "all pairs: use gather or ring"
        )
    return found
