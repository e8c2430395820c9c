"""Calls of flashtile.distributed.attention() by all ranks, and the same call by one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import flashtile as ft
from flashtile import distributed
from flashtile.distributed import Shards

LEAVES = ("bias", "sink")  # options that have gradients
BY_KEYS = ("mask", "bias", "key_padding_mask")  # sharded along their last axis


@dataclass
class Whole:
    """A call of all tokens: q, k, v, dout, dlse or None, and options."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None
    options: dict[str, Any] = field(default_factory=dict)

    def leaves(self) -> dict[str, torch.Tensor]:
        found = {"q": self.q, "k": self.k, "v": self.v}
        return {**found, **{name: self.options[name] for name in LEAVES if name in self.options}}


def make(
    lengths: Any,
    heads: int,
    kv_heads: int,
    options: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    batch: int = 2,
    dim: int = 8,
    dim_v: int = 4,
    dlse: bool = False,
    seed: int = 0,
) -> Whole:
    rng = torch.Generator().manual_seed(seed)
    n = sum(lengths)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)

    real = torch.float64 if dtype is torch.float64 else torch.float32
    return Whole(
        numbers(batch, heads, n, dim),
        numbers(batch, kv_heads, n, dim),
        numbers(batch, kv_heads, n, dim_v),
        numbers(batch, heads, n, dim_v),
        numbers(batch, heads, n).to(real) if dlse else None,
        options,
    )


def in_one_process(whole: Whole, lengths: Any, backend: str = "reference") -> dict[str, torch.Tensor]:
    """Results and gradients of the whole, where tokens of different documents do not see each other."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in whole.leaves().items()}
    options = {**whole.options, **{name: leaves[name] for name in LEAVES if name in leaves}}
    if len(lengths) > 1:
        documents = ft.masks.documents(lengths=torch.tensor(lengths))
        options["spans"] = documents & options["spans"] if "spans" in options else documents
    qkv = [leaves.pop(name) for name in ("q", "k", "v")]
    out, lse = ft.attention(*qkv, return_lse=True, backend=backend, **options)
    return _results(whole.dout, whole.dlse, out, lse, dict(zip(("q", "k", "v"), qkv, strict=True)) | leaves)


def on_rank(whole: Whole, group: Any, shards: Shards, method: Any, **more: Any) -> dict[str, torch.Tensor]:
    """The same of one rank's shards."""
    rank = group.rank()

    def part(x: torch.Tensor, axis: int = 2) -> torch.Tensor:
        return shards.shard(x.detach(), rank, axis).clone()

    leaves = {name: part(x).requires_grad_() for name, x in (("q", whole.q), ("k", whole.k), ("v", whole.v))}
    options = {**whole.options, **more}
    for name in BY_KEYS:
        x = options.get(name)
        if x is not None:
            options[name] = part(x, -1 if x.ndim == 2 or x.shape[2] == 1 else 2)
    if "sink" in options:
        options["sink"] = options["sink"].detach().clone()
    for name in LEAVES:
        if name in options:
            leaves[name] = options[name].requires_grad_()
    bnhd = options.get("layout") == "bnhd"
    swapped = [leaves[name].transpose(1, 2) if bnhd else leaves[name] for name in ("q", "k", "v")]
    out, lse = distributed.attention(*swapped, group=group, shards=shards, method=method, return_lse=True, **options)
    if bnhd:
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    return _results(part(whole.dout), None if whole.dlse is None else part(whole.dlse), out, lse, leaves)


def _results(dout: Any, dlse: Any, out: Any, lse: Any, leaves: dict[str, Any]) -> dict[str, torch.Tensor]:
    outputs, grads = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    torch.autograd.backward(outputs, grads)
    return {"out": out.detach(), "lse": lse.detach(), **{name: x.grad for name, x in leaves.items()}}


def joined(parts: list[dict[str, torch.Tensor]], shards: Shards, whole: Whole) -> dict[str, torch.Tensor]:
    """The results of the whole, from those of all ranks."""
    found = {name: shards.restore([x[name] for x in parts], 2) for name in ("out", "lse", "q", "k", "v")}
    if "bias" in parts[0]:
        axis = 3 if whole.options["bias"].shape[2] == 1 else 2
        found["bias"] = shards.restore([x["bias"] for x in parts], axis)
    if "sink" in parts[0]:
        assert all(torch.equal(x["sink"], parts[0]["sink"]) for x in parts)
        found["sink"] = parts[0]["sink"]
    return found


def part_of(results: dict[str, torch.Tensor], whole: Whole, shards: Shards, rank: int) -> dict[str, torch.Tensor]:
    """What a rank has of the results of the whole."""
    found = dict(results)
    for name in ("out", "lse", "q", "k", "v"):
        found[name] = shards.shard(results[name], rank, 2)
    if "bias" in results:
        found["bias"] = shards.shard(results["bias"], rank, 3 if whole.options["bias"].shape[2] == 1 else 2)
    return found


def largest_error(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest error of each result; rows that see no key have an lse of -inf in both."""
    assert found.keys() == wanted.keys()
    errors = {}
    for name, x in wanted.items():
        y = found[name].to(x.dtype)
        difference = torch.where(x == y, 0, (x - y).abs())
        errors[name] = float(difference.max()) if x.numel() else 0.0
    return errors
