"""Masks of transformers as spans: equal to its own, no array of all pairs, and models equal to "eager"."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from transformers import masking_utils  # noqa: E402

from flashtile.compat import transformers as ours  # noqa: E402
from flashtile.compat.transformers import packed  # noqa: E402
from flashtile.compat.transformers.mask_functions import NotSimpleError, TooManyRunsError, spans_of  # noqa: E402
from flashtile.compat.transformers.span_mask import SpanMask, written_out  # noqa: E402
from flashtile.errors import UnsupportedError  # noqa: E402
from flashtile.spans import Spans  # noqa: E402
from tests.compat import tiny  # noqa: E402
from tests.compat.test_transformers import LAYER, eager, tensors  # noqa: E402
from tests.compat.test_transformers_models import call_of_a_mask, pair, prompt, same_words  # noqa: E402

BATCH, QUERIES, KEYS = 3, 13, 31
ROOM = 40  # of the tables that mask functions read
LEFT = torch.tensor([0, 3, 7])
IMAGES = torch.full((BATCH, ROOM), -1)  # two images, two neighbours, one
IMAGES[0, 3:8], IMAGES[0, 12:15], IMAGES[1, :4], IMAGES[1, 4:9], IMAGES[2, 20:30] = 0, 1, 0, 1, 0
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in x]) for x in ((10, 3, 27), (40,), (1, 1, 1, 7, 30))])
DOCUMENTS = (POSITIONS == 0).cumsum(-1)


def blocks(ids: Any) -> Callable[..., Any]:
    def same(b: Any, _h: Any, i: Any, j: Any) -> Any:
        return (ids[b, i] == ids[b, j]) & (ids[b, i] >= 0)

    return same


def clamped(ids: Any) -> Callable[..., Any]:
    """As Gemma 3 writes it in older releases, for a cache with more rows than the prompt."""

    def same(b: Any, _h: Any, i: Any, j: Any) -> Any:
        inside = j < ids.shape[1] - 12
        found = torch.where(inside, ids[b, torch.where(inside, j, 0)], -1)
        return (ids[b, i] >= 0) & (found >= 0) & (ids[b, i] == found)

    return same


def of_documents(function: Callable[..., Any]) -> Callable[..., Any]:
    """As transformers writes it: positions count within a document."""

    def found(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (DOCUMENTS[b, i] == DOCUMENTS[b, j]) & function(b, h, POSITIONS[b, i], POSITIONS[b, j])

    return found


def both_ways(b: Any, _h: Any, i: Any, j: Any) -> Any:
    """As Gemma 4 writes its windows."""
    far = i - j
    return (far >= 0) & (far < 5) | (far < 0) & (-far < 3)


def chunks_back(_b: Any, _h: Any, i: Any, j: Any) -> Any:
    far = torch.div(i, 4, rounding_mode="trunc") - torch.div(j, 4, rounding_mode="trunc")
    return (far >= 0) & (far <= 2)


causal, window = masking_utils.causal_mask_function, masking_utils.sliding_window_causal_mask_function(7)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal": causal,
    "bidirectional": lambda b, h, i, j: i >= 0,
    "window": window,
    "window both ways": both_ways,
    "distance": lambda b, h, i, j: abs(i - j) <= 4,
    "chunks": masking_utils.chunked_causal_mask_function(8, LEFT),
    "chunks back": chunks_back,
    "documents": of_documents(causal),
    "documents, window": of_documents(window),
    "images": masking_utils.or_masks(causal, blocks(IMAGES)),
    "images, clamped": masking_utils.or_masks(causal, clamped(IMAGES)),
    "images, window": masking_utils.and_masks(
        masking_utils.or_masks(causal, blocks(IMAGES)), masking_utils.sliding_window_overlay(9)
    ),
    "prefix": masking_utils.or_masks(causal, lambda b, h, i, j: j < LEFT[b]),
    "lengths": lambda b, h, i, j: j < LEFT[b],
    "negated": lambda b, h, i, j: ~(i < j) & (j != i),
    "exchanged": lambda b, h, i, j: torch.tensor(3) >= abs(j - i),
    "all, in many pieces": lambda b, h, i, j: j % 2 <= i + 1,
    "every fourth": lambda b, h, i, j: (j % 4 == 0) & (j <= i),
}
PADDING = {name: torch.ones(BATCH, ROOM, dtype=torch.bool) for name in ("none", "left", "right", "holes", "all")}
PADDING["left"][0, :6] = PADDING["left"][1, :2] = False
PADDING["right"][0, -16:] = PADDING["right"][1, 20:] = False
PADDING["holes"][0, 4:9] = PADDING["holes"][1, 20:] = PADDING["holes"][1, 3] = False
PADDING["all"][1] = False


def indices(queries_from: int = 5, keys_from: int = 0) -> tuple[Any, Any, Any]:
    return torch.arange(BATCH), torch.arange(QUERIES) + queries_from, torch.arange(KEYS) + keys_from


def all_pairs(function: Callable[..., Any], batch: Any, queries: Any, keys: Any) -> Any:
    found = function(
        batch[:, None, None, None], batch.new_zeros(1, 1, 1, 1), queries[:, None], keys[None, None, None, :]
    )
    return found.expand(len(batch), 1, len(queries), len(keys))


def check(function: Callable[..., Any], at: tuple[Any, Any, Any]) -> None:
    found = Spans.of(spans_of(function, *at)).to_mask(len(at[2]))
    assert torch.equal(found.expand(BATCH, 1, QUERIES, len(at[2])), all_pairs(function, *at))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_spans_of_a_function(name: str) -> None:
    """With each padding, and where neither the first query nor the first key is number 0."""
    for padding in PADDING.values():
        function = masking_utils.and_masks(FUNCTIONS[name], masking_utils.padding_mask_function(padding))
        for at in (indices(), indices(0), indices(20, 9)):
            check(function, at)


def test_spans_of_functions_put_together_at_random() -> None:
    drawn = random.Random(1)
    simple = [*FUNCTIONS.values(), *(masking_utils.padding_mask_function(x) for x in PADDING.values())]

    def grown(depth: int) -> Callable[..., Any]:
        if depth == 0:
            return drawn.choice(simple)
        join = drawn.choice([masking_utils.and_masks, masking_utils.or_masks])
        return join(*(grown(depth - 1) for _ in range(2)))

    done = 0
    for _ in range(150):
        try:
            check(grown(drawn.randint(1, 3)), indices(drawn.randint(0, 20), drawn.randint(0, 9)))
        except TooManyRunsError:
            continue
        done += 1
    assert done > 100


table = torch.rand(ROOM, ROOM) > 0.5
NOT_SIMPLE: dict[str, Callable[..., Any]] = {
    "a table of pairs": lambda b, h, i, j: table[i, j],
    "a row of a table": lambda b, h, i, j: LEFT[None, b] == j,
    "a sum": lambda b, h, i, j: j < PADDING["left"][b].sum(),
    "a product": lambda b, h, i, j: i * j < 40,
    "a branch": lambda b, h, i, j: j <= i if (i < 40).all() else j < i,
    "a running sum": lambda b, h, i, j: torch.cumsum(j, 3) <= i,
    "another axis": lambda b, h, i, j: j < LEFT[b, None],
    "halves": lambda b, h, i, j: j <= i / 2,
    "numbers": lambda b, h, i, j: j,
    "a table of whole arrays": lambda b, h, i, j: j <= torch.arange(1),
}


@pytest.mark.parametrize("name", NOT_SIMPLE)
def test_other_functions_are_told(name: str) -> None:
    with pytest.raises((NotSimpleError, AttributeError, TypeError)):
        spans_of(NOT_SIMPLE[name], *indices())


def made(function: Callable[..., Any], padding: Any = None, first: int = 0, **changed: Any) -> Any:
    """The mask made for a call of transformers, where 12 queries follow `first` keys, and its own."""
    call = call_of_a_mask(batch_size=BATCH, kv_length=12 + first, mask_function=function, attention_mask=padding)
    if "cache_position" in call:
        call["cache_position"] = torch.arange(12) + first
    else:
        call |= {"q_length": 12, "q_offset": first}
    call |= {"allow_is_causal_skip": False} | changed
    return ours.mask(**call), masking_utils.sdpa_mask(**call)


@pytest.mark.parametrize("name", ["causal", "window", "chunks", "documents", "images, window"])
def test_masks_are_stored_as_spans(name: str) -> None:
    padding = PADDING["left"][:, :12]
    found, wanted = made(FUNCTIONS[name], padding)
    assert isinstance(found, SpanMask) and found.limits.numel() == BATCH * 12 * 2
    assert found.shape == wanted.shape and found.dtype == torch.bool and torch.equal(written_out(found), wanted)


def test_one_query_gets_plain_booleans() -> None:
    found = ours.mask(**call_of_a_mask(q_length=1, q_offset=torch.tensor(1), cache_position=torch.tensor([1])))
    assert found is None or type(found) is torch.Tensor


@pytest.mark.parametrize("vmapped", [False, True])
def test_a_function_that_is_not_simple_is_evaluated_in_slabs(vmapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With vmap it may be one of single numbers only."""
    monkeypatch.setattr("flashtile.masks.SLAB", 100)
    few = torch.rand(ROOM, ROOM) > 0.3
    few[:, 10:] = False

    def pairs(b: Any, _h: Any, i: Any, j: Any) -> Any:
        return few[i, j] & (j < (5 + 4 * IMAGES[b].max() if vmapped else 9))

    found, wanted = made(pairs, first=3, use_vmap=vmapped)
    assert isinstance(found, SpanMask) and torch.equal(written_out(found), wanted)


def test_more_runs_than_spans_warn_and_get_all_pairs() -> None:
    padding = torch.ones(BATCH, 40, dtype=torch.bool)
    padding[:, 1::2] = False
    call = {"batch_size": BATCH, "kv_length": 40, "device": "cpu", "attention_mask": padding}
    lengths: Any = {"cache_position": torch.arange(40)} if "cache_position" in call_of_a_mask() else {"q_length": 40}
    with pytest.warns(UserWarning, match="more than 8 runs of keys"):
        found = ours.mask(**call, **lengths)
    assert type(found) is torch.Tensor and torch.equal(found, masking_utils.sdpa_mask(**call, **lengths))


@pytest.fixture
def stored() -> SpanMask:
    found, _ = made(causal, PADDING["left"][:, :12])
    return found  # type: ignore[no-any-return]


def test_what_models_do_with_a_mask(stored: SpanMask) -> None:
    """Some functions make another mask of spans; for any other it is written out."""
    kept: list[Callable[[Any], Any]] = [
        lambda x: x[..., :7],
        lambda x: x[:, :, :, :20],
        lambda x: x[1:, :, -5:],
        lambda x: x.to(torch.bool),
        lambda x: x.to("cpu"),
        lambda x: x.detach(),
    ]
    other: list[Callable[[Any], Any]] = [
        lambda x: x.clone(),  # to change it
        lambda x: x[..., 3:],
        lambda x: x[:, 0],
        lambda x: x[torch.tensor([2, 0])],
        lambda x: x & True,
        lambda x: ~x,
        lambda x: x.float(),
        lambda x: x.expand(-1, 4, -1, -1),
        lambda x: torch.cat([x, x], dim=-1),
        lambda x: torch.where(x, 0.0, -1.0),
        lambda x: torch.zeros(x.shape).masked_fill_(x, 1.0),
    ]
    whole = written_out(stored)
    for function in kept:
        found = function(stored)
        assert isinstance(found, SpanMask) and torch.equal(written_out(found), function(whole))
    for function in other:
        found = function(stored)
        assert type(found) is torch.Tensor and torch.equal(found, function(whole))
    assert (stored.ndim, stored.device.type, len(stored)) == (4, "cpu", BATCH) and "SpanMask" in repr(stored)


def test_changes_in_place_are_refused(stored: SpanMask) -> None:
    with pytest.raises(UnsupportedError, match="attention_mask: expected no changes in place"):
        stored &= False  # type: ignore[misc]
    with pytest.raises(UnsupportedError, match=r"clone\(\) it first"):
        stored[:, :, :5] = True


STARTS = torch.tensor([0, 4, 9, 12, 24, 30, 36], dtype=torch.int32)


def test_documents_beside_spans() -> None:
    """Starts count rows of the whole batch; spans, a bias and documents all apply."""
    found, wanted = made(FUNCTIONS["window"], PADDING["left"][:, :12])
    rows = torch.bucketize(torch.arange(36), STARTS[1:], right=True).view(BATCH, 1, 12)
    hidden = ~wanted | (rows[..., None] != rows[..., None, :])
    given = tensors(12, 12, batch=BATCH)
    bias = torch.randn(1, 6, 12, 12, dtype=torch.float64)
    for more in ({}, {"position_bias": bias}):
        call = {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS, **more}
        layer: Any = LAYER
        out, _ = ours.forward(layer, *given, attention_mask=found, **call)
        right = eager(given, *more.values(), hidden=hidden)
        seen = ~hidden.all(-1)[:, 0]
        torch.testing.assert_close(out[seen], right[seen])


def test_whether_spans_keep_documents_apart() -> None:
    query = key = torch.empty(BATCH, 6, 12, 8)
    apart = packed._documents(STARTS, STARTS, query, key)
    assert packed._keeps_apart({"spans": apart & Spans(0, torch.arange(1, 13))}, apart, 12)
    assert not packed._keeps_apart({"spans": Spans(0, torch.arange(1, 13))}, apart, 12)


# Models.
HOLES = prompt(rows=3, length=29)
HOLES["attention_mask"][0, 7:10] = HOLES["attention_mask"][0, 15] = 0
HOLES["attention_mask"][1, :4] = HOLES["attention_mask"][1, 11:13] = 0
RIGHT = prompt(rows=3, length=29)
RIGHT["attention_mask"][0, 20:] = RIGHT["attention_mask"][2, 9:] = 0
PADDED = {"none": prompt(length=29), "left": prompt(length=29, padded=True), "right": RIGHT, "holes": HOLES}
MODELS = ("llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "llama4_text", "qwen3")


def compare(models: tuple[Any, Any], given: dict[str, Any], visible: Any = None) -> None:
    """Compare logits, losses and gradients."""
    seen = given["attention_mask"].bool() if visible is None else visible
    labels = given["input_ids"].masked_fill(~seen | ~seen.roll(1, 1), -100)
    found = []
    for model in models:
        model.zero_grad()
        got = model(**given, labels=labels)
        got.loss.backward()
        found.append((got.logits[seen], got.loss, [x.grad for x in model.parameters() if x.grad is not None]))
    (logits, loss, grads), (our_logits, our_loss, our_grads) = found
    torch.testing.assert_close(our_logits, logits, rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(our_loss, loss, rtol=1e-4, atol=1e-5)
    most = max(x.abs().max() for x in grads)
    torch.testing.assert_close(our_grads, grads, rtol=1e-3, atol=2e-4 * float(most))


class Stored:
    """Counts layers' masks: of spans, and of all pairs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spans = self.pairs = 0
        original = ours.layer._masked

        def counted(mask: Any, query: Any, key: Any) -> Any:
            if query.shape[2] > 1:
                self.spans += isinstance(mask, SpanMask)
                self.pairs += not isinstance(mask, SpanMask)
            return original(mask, query, key)

        monkeypatch.setattr(ours.layer, "_masked", counted)


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stored]:
    found = Stored(monkeypatch)
    yield found
    assert found.spans and not found.pairs, "the layers must get spans"


@pytest.mark.parametrize("padding", ["left", "right", "holes"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_training_step_with_padding(kind: str, padding: str, layers: Stored) -> None:
    compare(pair(kind), PADDED[padding])


@pytest.mark.parametrize("kind", MODELS)
def test_a_training_step_without_padding(kind: str) -> None:
    compare(pair(kind), PADDED["none"])


@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        *((kind, None) for kind in MODELS),
        *((kind, "static") for kind in ("mistral", "gemma3_text", "llama4_text")),
        *(pytest.param(kind, "static", marks=pytest.mark.slow) for kind in ("llama", "gemma2", "gpt_oss", "qwen3")),
    ],
)
def test_64_words(kind: str, cache: str | None, layers: Stored) -> None:
    """From a prompt longer than windows and chunks."""
    same_words(pair(kind), PADDED["left"], max_new_tokens=64, cache_implementation=cache)


@pytest.mark.skipif(tiny.before(5), reason="older encoders call no layer of ours")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # older releases use deprecated functions of torch
@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_encoders(kind: str, layers: Stored) -> None:
    for padding in ("left", "right", "holes"):
        given = PADDED[padding]
        seen = given["attention_mask"].bool()
        theirs, tiled = (model(**given).logits[seen] for model in pair(kind))
        torch.testing.assert_close(tiled, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padding", ["none", "left", "holes"])
def test_images_in_a_text(padding: str, layers: Stored) -> None:
    """Gemma 3: the words of an image see each other, also through windows."""
    models = pair("gemma3")
    given = dict(PADDED[padding])
    kinds = torch.zeros_like(given["input_ids"])
    kinds[0, 10:14], kinds[0, 17:27], kinds[1, 13:28], kinds[2, 6:9] = 1, 1, 1, 1
    given["token_type_ids"] = kinds
    compare(models, given)
    if padding != "holes":
        for cache in (None, "static"):
            same_words(models, given, cache_implementation=cache)


@pytest.mark.skipif(tiny.before(5), reason="an older PaliGemma makes a mask of all pairs itself")
def test_a_prefix_that_all_see(layers: Stored) -> None:
    """PaliGemma: token type 0 is the prefix."""
    ours.register()
    config = tiny.config_of("paligemma")
    config.text_config.num_key_value_heads = 1
    theirs, tiled = (
        tiny.build(transformers.PaliGemmaForConditionalGeneration, config, name) for name in ("eager", ours.NAME)
    )
    for padding in ("none", "left"):
        given = dict(PADDED[padding])
        given["token_type_ids"] = (torch.arange(29) >= torch.tensor([12, 5, 20])[:, None]).long()
        compare((theirs, tiled), given)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text", "llama4_text"])
def test_packed_by_positions(kind: str, layers: Stored) -> None:
    positions = torch.stack([torch.cat([torch.arange(n) for n in x]) for x in ((10, 3, 16), (29,), (1, 1, 20, 7))])
    given = {"input_ids": PADDED["none"]["input_ids"], "position_ids": positions, "use_cache": False}
    compare(pair(kind), given, torch.ones(3, 29, dtype=torch.bool))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_layers_take_spans(layers: Stored) -> None:
    """Each layer is compiled by itself, so it gets a mask that was made outside."""
    theirs, tiled = pair("mistral")
    given = PADDED["left"]
    seen = given["attention_mask"].bool()
    for layer in tiled.model.layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True, dynamic=False)
    layers.spans += 1  # traced calls may not be counted
    with torch.no_grad():
        found, wanted = (model(**given).logits[seen] for model in (tiled, theirs))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_checkpointed_layers_take_spans(layers: Stored) -> None:
    models = pair("mistral")
    for reentrant in (False, True):
        models[1].train()
        enable = "activation" if hasattr(models[1], "activation_checkpointing_enable") else "gradient"
        getattr(models[1], f"{enable}_checkpointing_enable")({"use_reentrant": reentrant})
        compare(models, PADDED["left"])


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most elements of any array that is made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        found = function(*arguments, **(options or {}))
        for x in tree_leaves(found):
            if isinstance(x, torch.Tensor) and not isinstance(x, SpanMask):
                self.most = max(self.most, x.untyped_storage().nbytes() // x.element_size())
        return found


@pytest.mark.parametrize(("rows", "length"), [(2, 2048), pytest.param(4, 8192, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_no_array_of_all_pairs(kind: str, rows: int, length: int) -> None:
    given = prompt(rows, length, padded=True)
    if kind == "gemma3":
        given["token_type_ids"] = torch.zeros_like(given["input_ids"])
        given["token_type_ids"][:, 100:356] = given["token_type_ids"][0, 700:956] = 1
    made = {}
    theirs, tiled = pair(kind)
    theirs.set_attn_implementation("sdpa")
    for name, model in (("tiled", tiled), ("sdpa", theirs)):
        with Largest() as seen:
            model(**given, use_cache=False, logits_to_keep=8).logits.square().mean().backward()
        made[name] = seen.most
    assert made["tiled"] < length * length / 4
    assert made["sdpa"] >= rows * length * length
