"""Models of transformers with our attention beside their own; and what a layer's call becomes, without transformers."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest

import flashtile as ft

torch = pytest.importorskip("torch")

from flashtile.compat import transformers as ours  # noqa: E402

LAYER = SimpleNamespace(is_causal=True)


def tensors(queries: int, keys: int) -> tuple[Any, Any, Any]:
    shapes = ((2, 6, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8))
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)  # type: ignore[return-value]


def check(layer: Any, given: tuple[Any, Any, Any], call: dict[str, Any], **options: Any) -> None:
    out, weights = ours.forward(layer, *given, **call)
    assert weights is None and out.is_contiguous()
    torch.testing.assert_close(out, ft.attention(*given, **options).transpose(1, 2))


def test_layers_are_causal_unless_they_say_otherwise() -> None:
    given = tensors(7, 7)
    check(LAYER, given, {"attention_mask": None}, causal=True)
    check(SimpleNamespace(), given, {"attention_mask": None}, causal=True)
    check(SimpleNamespace(is_causal=False), given, {"attention_mask": None})
    check(LAYER, given, {"attention_mask": None, "is_causal": False})
    check(LAYER, tensors(1, 9), {"attention_mask": None})


def test_windows() -> None:
    call = {"attention_mask": None, "sliding_window": 3}
    check(LAYER, tensors(7, 7), call, causal=True, window=(2, 0))
    check(LAYER, tensors(1, 9), call, window=(2, 0))
    check(SimpleNamespace(is_causal=False), tensors(7, 7), call, window=(2, 2))


def test_a_mask_says_it_all() -> None:
    given = tensors(5, 9)
    mask = torch.rand(2, 1, 5, 12) > 0.3  # a cache with more room than keys
    check(LAYER, given, {"attention_mask": mask, "sliding_window": 2, "is_causal": True}, mask=mask[..., :9])
    bias = torch.randn(2, 1, 5, 9, dtype=torch.float64)
    check(LAYER, given, {"attention_mask": bias}, bias=bias)


def test_other_options() -> None:
    given = tensors(5, 9)
    sink = torch.randn(6, dtype=torch.float64)
    call = {"attention_mask": None, "scaling": 0.3, "softcap": 5.0, "s_aux": sink, "position_ids": None}
    check(LAYER, given, call, causal=True, scale=0.3, softcap=5.0, sink=sink)


def test_dropout_goes_by_torch() -> None:
    given = tensors(5, 9)
    torch.manual_seed(3)
    a, b = (ours.forward(LAYER, *given, attention_mask=None, dropout=0.5)[0] for _ in range(2))
    torch.manual_seed(3)
    c = ours.forward(LAYER, *given, attention_mask=None, dropout=0.5)[0]
    assert torch.equal(a, c) and not torch.equal(a, b)


# A model for each of: plain heads, a window, softcap and windows by turns, sinks.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "gemma2": {"head_dim": 8, "sliding_window": 7, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "gpt_oss": {"head_dim": 8, "sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 1},
}
SMALL = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model(name: str) -> None:
    """Logits, gradients, and words, of sequences padded on the left, beside transformers' own attention."""
    transformers = pytest.importorskip("transformers")
    ours.register()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SMALL, **MODELS[name])
    make = transformers.AutoModelForCausalLM.from_config
    theirs, tiled = (make(deepcopy(config), attn_implementation=kind).eval() for kind in ("eager", ours.NAME))
    tiled.load_state_dict(theirs.state_dict())
    assert tiled.config._attn_implementation == ours.NAME
    ids, mask = torch.randint(5, 99, (3, 17)), torch.ones(3, 17, dtype=torch.long)
    mask[0, :6] = mask[1, :2] = 0
    labels = ids.masked_fill((mask == 0) | (mask.roll(1, 1) == 0), -100)  # what follows padding is nobody's guess
    found = []
    for model in (theirs, tiled):
        got = model(ids, attention_mask=mask, labels=labels)
        got.loss.backward()
        grads = [x.grad for x in model.parameters() if x.grad is not None]
        words = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
        found.append((got.logits[mask.bool()], grads, words))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-6)
    assert torch.equal(found[1][2], found[0][2])
