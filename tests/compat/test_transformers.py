"""The function that transformers calls for a layer, tested without transformers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

import flashtile as ft

torch = pytest.importorskip("torch")

from torch._subclasses import FakeTensorMode  # noqa: E402

from flashtile.compat import transformers as ours  # noqa: E402
from flashtile.errors import DTypeError, ShapeError, UnsupportedError  # noqa: E402

LAYER = SimpleNamespace(is_causal=True)
ENCODER = SimpleNamespace(is_causal=False)


def tensors(queries: int, keys: int, batch: int = 2) -> tuple[Any, Any, Any]:
    shapes = ((batch, 6, queries, 8), (batch, 2, keys, 8), (batch, 2, keys, 8))
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)  # type: ignore[return-value]


def upper_left(queries: int, keys: int) -> Any:
    return torch.ones(queries, keys, dtype=torch.bool).tril()


def eager(given: Any, *added: Any, hidden: Any = None, sinks: Any = None) -> Any:
    """Attention as in transformers' models, with numbers added to the scores and some of them hidden."""
    q, k, v = (x.repeat_interleave(6 // x.shape[1], dim=1) for x in given)
    scores = q @ k.mT / math.sqrt(8)
    for x in added:
        scores = scores + x
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    whole = scores if sinks is None else torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    return (whole.softmax(-1)[..., : scores.shape[-1]] @ v).transpose(1, 2)


def check(layer: Any, given: Any, call: dict[str, Any], wanted: Any) -> None:
    """Check the output, and the gradients of all inputs that require one."""
    out, weights = ours.forward(layer, *given, **({"attention_mask": None} | call))
    assert weights is None and out.is_contiguous()
    torch.testing.assert_close(out, wanted)
    leaves = [x for x in (*given, *call.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    grad = torch.randn_like(out)
    for found, right in zip(*(torch.autograd.grad(x, leaves, grad) for x in (out, wanted)), strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (7, 12), (7, 4)])
def test_without_a_mask_the_first_query_is_aligned_with_the_first_key(queries: int, keys: int) -> None:
    """As in a cache that has unused rows after the last query."""
    given = tensors(queries, keys)
    for layer, call in ((LAYER, {}), (SimpleNamespace(), {}), (ENCODER, {"is_causal": True})):
        check(layer, given, call, eager(given, hidden=~upper_left(queries, keys)))
    for layer, call in ((ENCODER, {}), (LAYER, {"is_causal": False})):
        check(layer, given, call, eager(given))


def test_a_model_whose_none_hides_nothing() -> None:
    given = tensors(7, 7)
    layer = SimpleNamespace(is_causal=True, config=SimpleNamespace(model_type="doge"))
    check(layer, given, {}, eager(given))


def test_unused_rows_of_a_cache_may_hold_anything() -> None:
    q, k, v = (x.detach() for x in tensors(5, 9))
    k[:, :, 5:] = v[:, :, 5:] = torch.nan
    out, _ = ours.forward(LAYER, q, k, v, None)
    torch.testing.assert_close(out, ours.forward(LAYER, q, k[:, :, :5], v[:, :, :5], None)[0])


def test_one_query_sees_all() -> None:
    given = tensors(1, 9)
    check(LAYER, given, {}, eager(given))


def test_windows() -> None:
    """Only with a causal pattern: otherwise transformers passes a mask if a window hides something."""
    far = torch.arange(7)[:, None] - torch.arange(9)
    given = tensors(7, 9)
    check(LAYER, given, {"sliding_window": 3}, eager(given, hidden=(far >= 3) | (far < 0)))
    check(ENCODER, given, {"sliding_window": 3}, eager(given))
    given = tensors(1, 9)
    check(LAYER, given, {"sliding_window": 3}, eager(given))


def test_a_mask_includes_causal_and_window() -> None:
    given = tensors(5, 9)
    mask = torch.rand(2, 1, 5, 12) > 0.3  # a cache with unused rows
    mask[..., 0] = True
    call = {"attention_mask": mask, "sliding_window": 2, "is_causal": True}
    check(LAYER, given, call, eager(given, hidden=~mask[..., :9]))
    bias = torch.randn(2, 1, 5, 9, dtype=torch.float64, requires_grad=True)
    check(LAYER, given, {"attention_mask": bias}, eager(given, bias))
    low = bias.detach().float()
    check(LAYER, given, {"attention_mask": low}, eager(given, low))


@pytest.mark.parametrize("shape", [(5, 9), (2, 9), (2, 5, 9)])
def test_a_mask_of_fewer_axes_is_refused(shape: tuple[int, ...]) -> None:
    """(batch, keys) would be taken for (queries, keys)."""
    with pytest.raises(ShapeError, match="attention_mask: expected 4 axes"):
        ours.forward(LAYER, *tensors(5, 9), attention_mask=torch.ones(shape, dtype=torch.bool))


def test_a_mask_of_integers_is_refused() -> None:
    with pytest.raises(DTypeError, match="attention_mask") as found:
        ours.forward(LAYER, *tensors(5, 9), attention_mask=torch.ones(2, 1, 5, 9, dtype=torch.long))
    assert isinstance(found.value, RuntimeError), "like torch's error"


def test_position_bias() -> None:
    """Without a mask, causal or not, and with masks of booleans and numbers; with a gradient."""
    given = tensors(5, 9)
    bias = torch.randn(1, 6, 5, 9, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, 1, 5, 9) > 0.3
    mask[..., 0] = True
    more = torch.randn(2, 1, 5, 9, dtype=torch.float64)
    check(ENCODER, given, {"position_bias": bias}, eager(given, bias))
    check(LAYER, given, {"position_bias": bias}, eager(given, bias, hidden=~upper_left(5, 9)))
    check(LAYER, given, {"position_bias": bias, "attention_mask": mask}, eager(given, bias, hidden=~mask))
    check(LAYER, given, {"position_bias": bias, "attention_mask": more}, eager(given, bias, more))


def test_sinks() -> None:
    """One logit per head, or one per row."""
    given, hidden = tensors(5, 5), ~upper_left(5, 5)
    a_head = torch.randn(6, dtype=torch.float64, requires_grad=True)
    a_row = torch.randn(2, 6, 5, 1, dtype=torch.float64, requires_grad=True)
    check(LAYER, given, {"s_aux": a_head}, eager(given, hidden=hidden, sinks=a_head.view(1, 6, 1, 1)))
    check(LAYER, given, {"sinks": a_row}, eager(given, hidden=hidden, sinks=a_row))


def test_scale_and_softcap() -> None:
    given = tensors(5, 5)
    out, _ = ours.forward(LAYER, *given, attention_mask=None, scaling=0.3, softcap=5.0)
    torch.testing.assert_close(out, ft.attention(*given, causal=True, scale=0.3, softcap=5.0).transpose(1, 2))


def test_dropout_uses_the_generator_of_torch() -> None:
    given = tensors(5, 9)
    torch.manual_seed(3)
    a, b = (ours.forward(LAYER, *given, attention_mask=None, dropout=0.5)[0] for _ in range(2))
    torch.manual_seed(3)
    c = ours.forward(LAYER, *given, attention_mask=None, dropout=0.5)[0]
    assert torch.equal(a, c) and not torch.equal(a, b)


@pytest.mark.parametrize("name", ["cache", "head_mask", "layer_head_mask", "block_table", "anything"])
def test_unknown_arguments_are_refused_by_name(name: str) -> None:
    given = tensors(5, 5)
    with pytest.raises(UnsupportedError, match=f"^{name}: expected None"):
        ours.forward(LAYER, *given, attention_mask=None, **{name: torch.ones(3)})
    check(LAYER, given, {name: None}, eager(given, hidden=~upper_left(5, 5)))


def test_arguments_that_do_not_affect_attention_are_accepted() -> None:
    given = tensors(5, 5)
    call = {
        "use_cache": True,
        "input_ids": torch.arange(5),
        "cache_position": torch.arange(5),
        "output_attentions": False,
        "max_length_q": 5,
    }
    check(LAYER, given, call, eager(given, hidden=~upper_left(5, 5)))


def test_weights_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="output_attentions: expected False"):
        ours.forward(LAYER, *tensors(5, 5), attention_mask=None, output_attentions=True)


# Documents of 4, 1 and 7 tokens.
STARTS = torch.tensor([0, 4, 5, 12], dtype=torch.int32)
ROWS = torch.tensor([0] * 4 + [1] + [2] * 7)
OTHER_DOCUMENT = ROWS[:, None] != ROWS
RESTARTS = torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5, 6]])
WITH_STARTS = {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS, "max_length_q": 7, "max_length_k": 7}


@pytest.mark.parametrize("call", [WITH_STARTS, {"position_ids": RESTARTS}], ids=["starts", "positions"])
def test_documents_do_not_see_each_other(call: dict[str, Any]) -> None:
    given = tensors(12, 12, batch=1)
    far = torch.arange(12)[:, None] - torch.arange(12)
    check(LAYER, given, call, eager(given, hidden=OTHER_DOCUMENT | (far < 0)))
    check(LAYER, given, call | {"sliding_window": 3}, eager(given, hidden=OTHER_DOCUMENT | (far < 0) | (far >= 3)))
    wide = (far < 5).expand(1, 1, 12, 12)  # a mask that does not separate documents
    hidden = OTHER_DOCUMENT | (far >= 5) if "cu_seq_lens_q" in call else far >= 5  # a caller's mask overrides positions
    check(LAYER, given, call | {"attention_mask": wide}, eager(given, hidden=hidden))
    bias = torch.randn(1, 6, 12, 12, dtype=torch.float64, requires_grad=True)
    check(LAYER, given, call | {"position_bias": bias}, eager(given, bias, hidden=OTHER_DOCUMENT | (far < 0)))
    sinks = torch.randn(1, 6, 12, 1, dtype=torch.float64, requires_grad=True)
    check(LAYER, given, call | {"sinks": sinks}, eager(given, hidden=OTHER_DOCUMENT | (far < 0), sinks=sinks))


def test_documents_of_encoders_and_of_several_rows() -> None:
    given = tensors(12, 12, batch=1)
    check(ENCODER, given, WITH_STARTS, eager(given, hidden=OTHER_DOCUMENT))
    check(ENCODER, given, {"position_ids": RESTARTS}, eager(given))
    given = tensors(6, 6)
    starts = torch.tensor([0, 4, 6, 9, 12], dtype=torch.int32)
    first, second = (torch.tensor(x) for x in ([0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1]))
    apart = torch.stack([x[:, None] != x for x in (first, second)])[:, None] | ~upper_left(6, 6)
    check(LAYER, given, {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}, eager(given, hidden=apart))


def test_positions_are_read_again_when_they_change() -> None:
    given, positions = tensors(12, 12, batch=1), RESTARTS.clone()
    before, _ = ours.forward(LAYER, *given, attention_mask=None, position_ids=positions)
    positions.copy_(torch.arange(12))
    after, _ = ours.forward(LAYER, *given, attention_mask=None, position_ids=positions)
    torch.testing.assert_close(after, eager(given, hidden=~upper_left(12, 12)))
    assert not torch.allclose(before, after)


def test_positions_without_a_version() -> None:
    """Tensors made in torch's inference mode have no version."""
    given = tensors(12, 12, batch=1)
    with torch.inference_mode():
        positions = RESTARTS.clone()
        for hidden in (OTHER_DOCUMENT | ~upper_left(12, 12), ~upper_left(12, 12)):
            for _layer in range(2):
                out, _ = ours.forward(LAYER, *given, attention_mask=None, position_ids=positions)
                torch.testing.assert_close(out, eager(given, hidden=hidden))
            positions.copy_(torch.arange(12))


def test_positions_without_values() -> None:
    """Fake tensors have shapes only, as in an estimate of a model's memory."""
    with FakeTensorMode():
        given = (torch.empty(1, 6, 12, 8), *(torch.empty(1, 2, 12, 8) for _ in range(2)))
        out, _ = ours.forward(LAYER, *given, attention_mask=None, position_ids=torch.zeros(1, 12, dtype=torch.int64))
    assert out.shape == (1, 12, 6, 8)


def test_starts_that_do_not_fit_are_refused() -> None:
    given = tensors(12, 12, batch=1)
    with pytest.raises(ShapeError, match="expected both or neither"):
        ours.forward(LAYER, *given, attention_mask=None, cu_seq_lens_q=STARTS)
    with pytest.raises(ShapeError, match="cu_seq_lens_k: expected to end at 12, the rows given, got 5"):
        ours.forward(LAYER, *given, attention_mask=None, cu_seq_lens_q=STARTS, cu_seq_lens_k=STARTS[:3])
    chunks = SimpleNamespace(is_causal=True, config=SimpleNamespace(attention_chunk_size=4))
    whole = upper_left(12, 12).expand(1, 1, 12, 12)
    with pytest.raises(UnsupportedError, match="a mask that keeps documents apart, because of attention in chunks"):
        ours.forward(chunks, *given, attention_mask=whole, **WITH_STARTS)
    check(
        chunks,
        given,
        WITH_STARTS | {"attention_mask": whole & ~OTHER_DOCUMENT},
        eager(given, hidden=OTHER_DOCUMENT | ~whole[0, 0]),
    )


def test_keys_selected_by_an_indexer() -> None:
    given, seen = tensors(5, 9), upper_left(5, 9)
    chosen = torch.rand(2, 5, 9).topk(4).indices
    chosen[..., 0] = 0  # one of them is always visible
    none = torch.ones(2, 1, 5, 9, dtype=torch.bool).scatter(-1, chosen[:, None], False)
    for call in ({}, {"attention_mask": seen.expand(2, 1, 5, 9)}):
        check(LAYER, given, call | {"indices": chosen.int()}, eager(given, hidden=none | ~seen))
    blocks = torch.tensor([[[[0, -1]] * 5, [[0, 1]] * 5]] * 2)  # of 4 keys, for the first three heads and the others
    kept = torch.arange(9) < torch.tensor([4, 4, 4, 8, 8, 8])[:, None, None]
    layer = SimpleNamespace(is_causal=False, indexer=SimpleNamespace(block_size=4))
    check(layer, given, {"block_indices": blocks}, eager(given, hidden=~kept))
    with pytest.raises(UnsupportedError, match="because of keys that an indexer selected"):
        apart = {"cu_seq_lens_q": torch.tensor([0, 3, 10]), "cu_seq_lens_k": torch.tensor([0, 3, 10])}
        ours.forward(LAYER, *tensors(5, 5), attention_mask=None, indices=torch.zeros(2, 5, 2).long() + 3, **apart)
