"""The forward and the backward pass of a call on one rank: heads are exchanged, then blocks of keys, then back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashtile.checks.options import combine_bands
from flashtile.distributed import by_heads, gather, ring
from flashtile.distributed.arithmetic import Call, Keys, Saved, Sums, accumulator
from flashtile.distributed.messages import Transport
from flashtile.distributed.pieces import Uses
from flashtile.distributed.plan import Heads, Method, Plan, plan_of
from flashtile.distributed.shards import Shards
from flashtile.distributed.visible import Visible
from flashtile.errors import ShapeError

NUMBERS = ("softcap", "dropout", "seed", "origin", "deterministic", "threads")
LANES = 2  # of heads in the backward pass of a ring: one is sent while the other is computed


class Results(NamedTuple):
    """out and lse of this rank's rows; and, if heads were exchanged, what the backward pass needs of its heads."""

    out: Tensor
    lse: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out_of_heads: Tensor
    lse_of_heads: Tensor


@dataclass(frozen=True)
class Sharded:
    """A call of tensors of one rank's rows: how it is split, and its options."""

    shards: Shards
    method: Method
    rank: int
    backend: str
    options: dict[str, Any]  # with limits for spans
    heads: int
    kv_heads: int
    rows: int  # of this rank

    @property
    def sizes(self) -> tuple[str, int, int, tuple[int, int]]:
        """For the checks of arguments."""
        rows, tokens = self.shards.counts[self.rank], self.shards.tokens
        return self.backend, rows, rows, (tokens, tokens)

    @property
    def pairs(self) -> dict[str, bool]:
        """Whether the mask and the bias are of all pairs, by this rank's rows, or of keys."""
        return {name: self._is_of_pairs(name) for name in ("mask", "bias") if self.options.get(name) is not None}

    def _is_of_pairs(self, name: str) -> bool:
        rows, columns = self.options[name].shape[2:]
        if (rows, columns) == (1, self.rows):
            return False
        if (rows, columns) == (self.rows, self.shards.tokens):
            return True
        raise ShapeError(
            f"{name}: expected (batch, heads, 1, {self.rows}), of this rank's keys, or (batch, heads, {self.rows}, "
            f"{self.shards.tokens}), of its queries and all keys, got {tuple(self.options[name].shape)}"
        )

    @property
    def uses(self) -> Uses:
        return Uses(
            bool(self.options.get("dropout")) or any(self.pairs.values()), self.options.get("alibi") is not None
        )

    def visible(self, first: int = 0) -> Visible:
        """What tokens see. first: the token that is the first query."""
        some = self.options
        band, align_end = combine_bands(bool(some.get("causal")), some.get("window"), some.get("band"))
        limits, lengths = (None if some.get(x) is None else _to_host(some[x]) for x in ("spans", "kv_lengths"))
        return Visible(self.shards.tokens, self.shards.starts, band, align_end, limits, lengths, first)

    def plan(self) -> Plan:
        return plan_of(self.shards, self.visible(), self.method, self.rank, self.uses)

    def call(self, heads: Heads, dim: int) -> Call:
        """What all pieces have in common, for these heads of this rank."""
        some, pairs = self.options, self.pairs
        numbers = {name: some[name] for name in NUMBERS if name in some}
        numbers["scale"] = dim**-0.5 if some.get("scale") is None else some["scale"]
        alibi = some.get("alibi")
        return Call(
            heads,
            heads,
            self.heads,
            numbers,
            self.backend,
            None if alibi is None else alibi.reshape(-1, self.heads).to(accumulator(alibi.dtype)),
            some["bias"] if pairs.get("bias") else None,
            some["mask"] if pairs.get("mask") else None,
        )

    def keys(self, k: Tensor, v: Tensor) -> Keys:
        bias, mask = (None if self.pairs.get(x, True) else self.options[x] for x in ("bias", "mask"))
        return Keys(k, v, bias, mask)

    def heads_of(self, plan: Plan) -> Heads:
        return plan.heads(self.rank, self.heads, self.kv_heads)

    @property
    def by_tokens(self) -> Any:
        return gather if self.method.gather else ring


def forward(channel: Transport, sharded: Sharded, q: Tensor, k: Tensor, v: Tensor) -> Results:
    """Attention of this rank's queries to the keys of all ranks."""
    plan, options = sharded.plan(), sharded.options
    call, keys = sharded.call(sharded.heads_of(plan), q.shape[-1]), sharded.keys(k, v)
    out_dtype = q.dtype if options.get("out_dtype") is None else getattr(torch, options["out_dtype"])
    exchanged = sharded.method.ulysses > 1
    if exchanged:
        q, keys = _to_heads(channel, plan, sharded, [(q, 2, by_heads.queries)], keys, "forward, heads")
    real = accumulator(q.dtype)
    out = q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=real)
    lse = torch.full(out.shape[:3], -torch.inf, dtype=real, device=q.device)
    sharded.by_tokens.forward(channel, plan, call, q, keys, out, lse)
    if options.get("sink") is not None:
        add_sink(out, lse, options["sink"][call.heads.first : call.heads.stop].to(real))
    out = out.to(out_dtype)
    if not exchanged:
        return Results(out, lse, *(q.new_empty(0) for _ in range(5)))
    every = (sharded.heads, sharded.kv_heads)
    back = [(out, 2, by_heads.queries, sharded.heads), (lse, 2, by_heads.queries, sharded.heads)]
    own_out, own_lse = by_heads.to_rows(channel, plan, every, back, "forward, rows")
    return Results(own_out, own_lse, q, keys.k, keys.v, out, lse)


def backward(
    channel: Transport,
    sharded: Sharded,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of this rank's q, k, v and bias, and of the sink, which all ranks share.

    If heads were exchanged, q, k, v, out and lse are those of this rank's heads.
    """
    plan, options = sharded.plan(), sharded.options
    call, keys = sharded.call(sharded.heads_of(plan), q.shape[-1]), sharded.keys(k, v)
    exchanged = sharded.method.ulysses > 1
    every = (sharded.heads, sharded.kv_heads)
    if exchanged:
        rows: list[Any] = [(dout, 2, by_heads.queries)]
        if dlse is not None:
            rows.append((dlse, 2, by_heads.queries))
        rows += by_heads.of_keys(keys)[2:]
        dout, *more = by_heads.to_heads(channel, plan, every, rows, "backward, heads")
        dlse = more.pop(0) if dlse is not None else None
        keys = keys.like([k, v, *more])
    real = accumulator(q.dtype)
    saved = Saved(q, dout, out, lse, dlse)
    dq = torch.zeros_like(q, dtype=real)
    key_bias, pair_bias = (None if x is None else torch.zeros_like(x, dtype=real) for x in (keys.bias, call.bias))
    sums = Sums(torch.zeros_like(keys.k, dtype=real), torch.zeros_like(keys.v, dtype=real), key_bias)
    lanes = call.lanes(LANES if sharded.method.ring > 2 and not sharded.method.gather else 1)
    sharded.by_tokens.backward(channel, plan, lanes, saved, keys, dq, sums, pair_bias)
    dsink = None
    if options.get("sink") is not None:
        own = slice(call.heads.first, call.heads.stop)
        dsink = torch.zeros(sharded.heads, dtype=real, device=q.device)
        dsink[own] = _sink_gradient(saved, options["sink"][own].to(real))
        dsink = channel.reduce(dsink, "sum", "backward, sink").to(options["sink"].dtype)
    dk, dv, dbias = sums.dk, sums.dv, pair_bias if sums.dbias is None else sums.dbias
    if exchanged:
        # Sums that are complete are rounded before they are sent.
        alone = sharded.kv_heads % sharded.method.ulysses == 0
        dk, dv = (x.to(k.dtype) if alone else x for x in (dk, dv))
        back: list[Any] = [
            (dq.to(q.dtype), 2, by_heads.queries, sharded.heads),
            (dk, 2, by_heads.keys, sharded.kv_heads),
            (dv, 2, by_heads.keys, sharded.kv_heads),
        ]
        if dbias is not None:
            some = (by_heads.every, 1) if options["bias"].shape[1] == 1 else (by_heads.queries, sharded.heads)
            back.append((dbias, 3, *some))
        dq, dk, dv, *rest = by_heads.to_rows(channel, plan, every, back, "backward, rows")
        dbias = rest[0] if rest else None
    if dbias is not None:
        dbias = dbias.to(options["bias"].dtype) if bias_grad else None
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dbias, dsink


def _to_heads(
    channel: Transport, plan: Plan, sharded: Sharded, rows: list[Any], keys: Keys, step: str
) -> tuple[Tensor, Keys]:
    """The queries and keys of this rank's heads."""
    tensors = [*rows, *by_heads.of_keys(keys)]
    q, *found = by_heads.to_heads(channel, plan, (sharded.heads, sharded.kv_heads), tensors, step)
    return q, keys.like(found)


def add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """Merge out and lse with a logit that has no value, in place."""
    total = torch.logaddexp(lse, sink[:, None])
    out.mul_((lse - total).exp().masked_fill(total == -torch.inf, 0)[..., None])
    lse.copy_(total)


def _sink_gradient(saved: Saved, sink: Tensor) -> Tensor:
    delta = (saved.dout.to(sink.dtype) * saved.out.to(sink.dtype)).sum(-1)
    if saved.dlse is not None:
        delta = delta - saved.dlse
    weight = (sink[:, None] - saved.lse).exp().masked_fill(saved.lse == -torch.inf, 0)
    return -(weight * delta).sum((0, 2))


def _to_host(x: Tensor) -> Any:
    return np.ascontiguousarray(x.detach().cpu().numpy())
