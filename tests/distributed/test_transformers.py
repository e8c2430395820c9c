"""Models of transformers whose tokens are sharded over two processes have the logits and gradients of one process."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import flashtile as ft  # noqa: E402
from flashtile.compat import transformers as tiled  # noqa: E402
from flashtile.distributed import Shards  # noqa: E402
from tests.support.processes import Ranks  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or sys.platform != "linux", reason="this torch has no gloo"
)
TOKENS, VOCABULARY = 22, 50


@cache
def model(kind: str, name: str) -> Any:
    """A model of two layers with random weights, the same in every process."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.MistralConfig(**sizes, sliding_window=5) if kind == "windows" else None
    config = config or transformers.LlamaConfig(**sizes, attention_dropout=0.5 if kind == "dropout" else 0.0)
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name, dtype=torch.float64)
    return made.train()


def gradients(model: Any, weights: Any, whole: Any, **batch: Any) -> list[Any]:
    """The logits, and the gradients of a sum of them that depends on every token."""
    model.zero_grad()
    torch.manual_seed(7)  # of dropout
    logits = model(**batch, use_cache=False).logits
    (logits * weights).sum().backward()
    return [whole(logits.detach()), *(p.grad.clone() for p in model.parameters())]


def compare(rank: int, size: int, kind: str, order: str, method: Any) -> None:
    documents = [9, 13] if kind == "packed" else [TOKENS]
    batch = 1 if kind == "packed" else 2
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (batch, TOKENS), generator=rng)
    weights = torch.randn((batch, TOKENS, VOCABULARY), generator=rng, dtype=torch.float64)
    positions = torch.cat([torch.arange(n) for n in documents]).expand(batch, -1)
    padding = None
    if kind == "padded":
        padding = torch.ones(batch, TOKENS, dtype=torch.long)
        padding[0, :6], padding[1, 17:] = 0, 0
        weights *= padding[..., None]
    tiled.register("tiled")
    alone = {} if kind == "padded" else {"position_ids": positions.clone()}
    want = gradients(model(kind, "tiled"), weights, lambda x: x, input_ids=ids, attention_mask=padding, **alone)

    tiled.register("sharded", group=torch.distributed.group.WORLD, method=method)
    shards = getattr(Shards, order)(documents=documents, ranks=size)

    def whole(logits: Any) -> Any:
        parts = [None] * size
        torch.distributed.all_gather_object(parts, logits)
        return shards.restore(parts)

    found = gradients(
        model(kind, "sharded"),
        shards.shard(weights, rank),
        whole,
        input_ids=shards.shard(ids, rank, dim=1),
        attention_mask=None if padding is None else shards.shard(padding, rank, dim=1),
        position_ids=shards.shard(positions, rank, dim=1),
        shards=shards,
    )
    if padding is not None:  # the others see no key
        found[0], want[0] = (x * padding[..., None] for x in (found[0], want[0]))
    for x in found[1:]:
        torch.distributed.all_reduce(x)
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "order", "method"),
    [
        ("plain", "zigzag", "auto"),
        ("plain", "striped", "ring"),
        ("windows", "contiguous", "ring"),
        ("padded", "zigzag", "gather"),
        ("packed", "zigzag", "ring"),
        ("packed", "contiguous", "ulysses"),
        ("dropout", "zigzag", "ring"),
    ],
)
def test_logits_and_gradients_are_those_of_one_process(kind: str, order: str, method: Any, two: Ranks) -> None:
    two.run(compare, kind, order, method)


def refused(rank: int, size: int) -> None:
    tiled.register("sharded", group=torch.distributed.group.WORLD)
    shards = Shards.zigzag(TOKENS, ranks=size)
    n = shards.counts[rank]
    ids = torch.zeros(1, n, dtype=torch.long)
    one = model("plain", "sharded")
    with pytest.raises(ft.DTypeError, match=r"^shards: expected a flashtile.distributed.Shards, .* got NoneType"):
        one(ids)
    with pytest.raises(ft.ShapeError, match=r"^position_ids: expected shards.positions\(rank\)"):
        one(ids, position_ids=torch.zeros(1, n, dtype=torch.long), shards=shards)
    right = torch.from_numpy(shards.positions(rank))[None]
    with pytest.raises(ft.ShapeError, match=r"^attention_mask: expected \(batch, tokens of this rank\)"):
        one(ids, attention_mask=torch.ones(1, 1, n, n, dtype=torch.bool), position_ids=right, shards=shards)
    kind = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
    config = transformers.GemmaConfig(**kind, head_dim=8, intermediate_size=8, num_key_value_heads=2)
    gemma = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sharded")
    from transformers.masking_utils import create_causal_mask, or_masks

    with pytest.raises(ft.UnsupportedError, match=r"^attention_mask: expected a causal, sliding or full pattern"):
        create_causal_mask(
            config=gemma.config,
            inputs_embeds=torch.zeros(1, n, 32),
            attention_mask=None,
            past_key_values=None,
            or_mask_function=or_masks(lambda b, h, q, k: q < 3),
        )


def test_what_cannot_be_sharded_is_refused(two: Ranks) -> None:
    two.run(refused)
