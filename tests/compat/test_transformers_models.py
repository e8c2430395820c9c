"""transformers' models with our attention and with their own: words, gradients, packed documents, errors."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402
from transformers.models.t5 import modeling_t5  # noqa: E402

from flashtile.compat import transformers as ours  # noqa: E402
from flashtile.compat.transformers import masks, models  # noqa: E402
from flashtile.errors import UnsupportedError  # noqa: E402
from tests.compat import tiny  # noqa: E402

# Plain heads; a window; softcap and alternating windows; sinks.
KINDS = ("llama", "mistral", "gemma2", "gpt_oss")
WORDS = 10
T5_CALLS = hasattr(modeling_t5, "ALL_ATTENTION_FUNCTIONS")


def pair(kind: str, **changed: Any) -> tuple[Any, Any]:
    """A tiny model of this kind with "eager" attention, and the same with ours."""
    ours.register()
    config = tiny.config_of(kind)
    for name, x in changed.items():
        setattr(config, name, x)
    made = tiny.class_of(kind, config)
    theirs, tiled = (tiny.build(made, config, name) for name in ("eager", ours.NAME))
    tiled.load_state_dict(theirs.state_dict())
    assert tiled.config._attn_implementation == ours.NAME
    for model in (theirs, tiled):
        if model.can_generate():
            model.generation_config.eos_token_id = None
    return theirs, tiled


def prompt(rows: int = 3, length: int = 17, padded: bool = False) -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(1)
    seen = torch.ones(rows, length, dtype=torch.long)
    if padded:
        seen[0, :6] = seen[1, :2] = 0
    return {"input_ids": torch.randint(5, 80, (rows, length), generator=drawn), "attention_mask": seen}


def same_words(models: tuple[Any, Any], given: dict[str, Any], **options: Any) -> None:
    call = given | {"max_new_tokens": WORDS, "do_sample": False, "pad_token_id": 0} | options
    a, b = (model.generate(**call) for model in models)
    assert a.shape[1] > given["input_ids"].shape[1] and torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients(kind: str) -> None:
    given = prompt(padded=True)
    seen = given["attention_mask"].bool()
    labels = given["input_ids"].masked_fill(
        ~seen | ~seen.roll(1, 1), -100
    )  # the word after padding cannot be predicted
    found = []
    for model in pair(kind):
        got = model(**given, labels=labels)
        got.loss.backward()
        found.append((got.logits[seen], [x.grad for x in model.parameters() if x.grad is not None]))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-4)
    most = max(x.abs().max() for x in found[0][1])
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-3, atol=1e-4 * float(most))


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_words(kind: str, cache: str | None, padded: bool) -> None:
    same_words(pair(kind), prompt(padded=padded), cache_implementation=cache)
    if cache == "static":
        same_words(pair(kind), prompt(length=1), cache_implementation=cache)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_words_by_other_generation_modes(kind: str) -> None:
    """Beam search; prompt lookup and assisted decoding, where each step checks several words at once."""
    both = pair(kind)
    same_words(both, prompt(padded=True), num_beams=3)
    if kind == "gemma2" and tiny.before(5, 10):
        return  # their windows cannot drop rejected words
    one = prompt(rows=1)
    one["input_ids"][:, 9:] = one["input_ids"][:, :8]
    same_words(both, one, prompt_lookup_num_tokens=4, eos_token_id=98)
    helper, _ = pair(kind, num_hidden_layers=1)
    helper.config.vocab_size = both[0].config.vocab_size
    same_words(both, one, assistant_model=helper, eos_token_id=98)


def turns(model: Any, cache: Any, lengths: tuple[int, ...]) -> Any:
    """The logits of a chat, one turn after another on one cache."""
    ids = prompt(rows=2, length=sum(lengths))["input_ids"]
    found, at = [], 0
    with torch.no_grad():
        for length in lengths:
            call = {"position_ids": torch.arange(at, at + length)[None].expand(2, -1)}
            if BY_POSITIONS:
                call["cache_position"] = torch.arange(at, at + length)
            found.append(model(ids[:, at : at + length], past_key_values=cache, **call).logits)
            at += length
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_turns_of_a_chat_on_one_cache(kind: str, static: bool) -> None:
    lengths = (5, 1, 6, 1, 1, 9)

    def cache(model: Any) -> Any:
        if static:
            return transformers.StaticCache(config=model.config, max_cache_len=40)
        return transformers.DynamicCache(config=model.config)

    theirs, tiled = pair(kind)
    wanted = turns(theirs, cache(theirs), lengths)
    torch.testing.assert_close(turns(tiled, cache(tiled), lengths), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_words_after_a_prompt_with_padding_inside(kind: str, cache: str | None) -> None:
    """Positions are 0 there too, but no document starts."""
    given = prompt(rows=1)
    given["attention_mask"][0, 7:10] = 0
    same_words(pair(kind), given, cache_implementation=cache)


def test_a_mask_of_the_caller_overrides_positions() -> None:
    """Several contexts in parallel, all seen by the words after them."""
    sees = torch.ones(12, 12, dtype=torch.bool).tril()
    sees[5:9, :5] = False
    mask = torch.zeros(12, 12).masked_fill(~sees, torch.finfo(torch.float32).min).expand(1, 1, 12, 12)
    positions = torch.tensor([[*range(5), *range(4), 5, 6, 7]])
    call = {"attention_mask": mask, "position_ids": positions}
    theirs, tiled = (model(prompt(rows=1, length=12)["input_ids"], **call).logits for model in pair("llama"))
    torch.testing.assert_close(tiled, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["bart", "t5"] if T5_CALLS else ["bart"])
def test_a_source_of_padding_only(kind: str) -> None:
    """The decoder reads the mean that "eager" computes for it."""
    given = prompt()
    given["attention_mask"][1] = 0
    given["decoder_input_ids"] = given["input_ids"][:, :9]
    found = []
    for model in pair(kind):
        logits = model(**given).logits
        logits.square().sum().backward()
        grads = [x.grad for x in model.parameters() if x.grad is not None]
        most = max(x.abs().max() for x in grads)
        found.append([logits, *(x / most for x in grads)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3])
def test_words_in_inference_mode(rows: int) -> None:
    models = pair("llama")
    with torch.inference_mode():
        same_words(models, prompt(rows=rows))


def test_a_decoder_made_bidirectional() -> None:
    theirs, tiled = pair("llama", is_causal=False)
    given = prompt()
    torch.testing.assert_close(tiled(**given).logits, theirs(**given).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # older releases use deprecated functions of torch
def test_compiled_as_one_graph() -> None:
    theirs, tiled = pair("llama")
    compiled = torch.compile(tiled, fullgraph=True, backend="aot_eager", dynamic=False)
    for given in (prompt(), prompt(padded=True)):
        seen = given["attention_mask"].bool()
        with torch.no_grad():
            found, wanted = (model(**given).logits[seen] for model in (compiled, theirs))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_step_with_a_static_cache_is_compiled_once() -> None:
    """generate() builds the mask of each step outside the compiled code."""
    once = transformers.CompileConfig(fullgraph=True, backend="eager", mode=None)
    once._compile_all_devices = True
    call = prompt(padded=True) | {"max_new_tokens": WORDS, "do_sample": False, "pad_token_id": 0}
    call["cache_implementation"] = "static"
    theirs, tiled = pair("llama")
    torch.compiler.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = tiled.generate(**call, compile_config=once)
    assert hasattr(tiled, "_compiled_call") and torch.equal(found, theirs.generate(**call))


STARTS = torch.tensor([0, 4, 11, 17], dtype=torch.int32)
STATED = {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS, "max_length_q": 7, "max_length_k": 7}
BACK = {"position_ids": torch.cat([torch.arange(int(n)) for n in STARTS.diff()])[None]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_packed_documents_compiled_as_one_graph(kind: str) -> None:
    call = {"input_ids": prompt(rows=1)["input_ids"], "use_cache": False} | BACK
    theirs, tiled = pair(kind)
    compiled = torch.compile(tiled, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found, wanted = compiled(**call, **STATED).logits, theirs(**call).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"use_cache": False}], ids=["cached", "uncached"])
@pytest.mark.parametrize("call", [STATED | BACK, BACK], ids=["starts", "positions"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_step_of_packed_documents(kind: str, call: dict[str, Any], options: dict[str, Any]) -> None:
    """The gradients are those of the separate documents."""
    ids = prompt(rows=1)["input_ids"]

    def step(model: Any, losses: Callable[[Any], Any]) -> Any:
        losses(model.train()).backward()
        return [x.grad for x in model.parameters() if x.grad is not None]

    def loss(logits: Any) -> Any:
        return (logits * torch.arange(logits.shape[-1])).square().sum()

    theirs, tiled = pair(kind)
    wanted = step(theirs, lambda m: sum(loss(m(x).logits) for x in ids.split(STARTS.diff().tolist(), dim=1)))
    found = step(tiled, lambda m: loss(m(ids, **call, **options).logits))
    most = max(float(x.abs().max()) for x in wanted)
    torch.testing.assert_close([x / most for x in found], [x / most for x in wanted], rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not T5_CALLS, reason="this T5 calls no layer of ours")
def test_a_bias_by_position_has_a_gradient() -> None:
    """In T5 the first layer computes the bias for all layers."""
    theirs, tiled = pair("t5")
    drawn = torch.Generator().manual_seed(1)
    given = prompt(padded=True) | {"decoder_input_ids": torch.randint(5, 80, (3, 9), generator=drawn)}
    grads = []
    for model in (theirs, tiled):
        model(**given).logits.square().sum().backward()
        grads.append({n: x.grad for n, x in model.named_parameters() if "relative_attention_bias" in n})
    assert len(grads[0]) == 2 and all(x.abs().max() > 0 for x in grads[0].values())
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    "kind", ["llama", "gpt2", "opt", *([] if tiny.before(5, 10) else ["stablelm", "pix2struct_vision_model"])]
)
def test_weights_are_refused(kind: str) -> None:
    """By our error or transformers' own, whichever check is first; some models do not pass the flag to their layers."""
    theirs, tiled = pair(kind)
    given = next(tiny.inputs(tiled))
    for model in (tiled, theirs):
        if model is theirs:  # it now uses our attention
            model.set_attn_implementation(ours.NAME)
        with pytest.raises((UnsupportedError, ValueError, UserWarning), match="output_attentions"):
            model(**given, output_attentions=True)
        model.set_attn_implementation("eager")
        assert all(isinstance(x, torch.Tensor) for x in model(**given, output_attentions=True).attentions)


@pytest.mark.parametrize("kind", ["falcon", "gptj", "gpt_neo", "sam_vision_model"])
def test_models_that_look_their_attention_up_by_name_are_refused(kind: str) -> None:
    ours.register()
    config = tiny.config_of(kind)
    with pytest.raises(UnsupportedError, match=r"attn_implementation: expected one of eager.* got 'tiled'"):
        tiny.class_of(kind, config)._from_config(config, attn_implementation=ours.NAME)
    tiny.class_of(kind, config)._from_config(config, attn_implementation="eager")


def test_a_model_that_never_calls_warns_once() -> None:
    ours.register()
    models._calls_interface.cache_clear()
    models.WARNED.clear()
    config = tiny.config_of("mpt")
    made = transformers.MptForCausalLM
    with pytest.warns(UserWarning, match="MptForCausalLM: attn_implementation='tiled' has no effect on it"):
        made._from_config(config, attn_implementation=ours.NAME)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made._from_config(config, attn_implementation=ours.NAME)
        pair("llama")


@pytest.mark.parametrize("known", [True, False])
def test_a_model_derived_elsewhere_calls_as_its_parent_does(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a file with another, unrelated attention, which may not be in sys.modules."""
    theirs = ModuleType("theirs")
    theirs.AttentionPool = type("AttentionPool", (torch.nn.Module,), {"__module__": "theirs"})  # type: ignore[attr-defined]
    if known:
        monkeypatch.setitem(sys.modules, "theirs", theirs)
    ours.register()
    config = tiny.config_of("llama")
    derived = type("Derived", (tiny.class_of("llama", config),), {"__module__": "theirs"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = tiny.build(derived, config, ours.NAME)
    with pytest.raises(UnsupportedError, match="output_attentions"):
        model(**prompt(), output_attentions=True)


def test_registered_twice_is_registered_once() -> None:
    ours.register()
    before = transformers.PreTrainedModel.get_correct_attn_implementation
    ours.register("tiles")
    assert transformers.PreTrainedModel.get_correct_attn_implementation is before


BY_POSITIONS = "cache_position" in inspect.signature(masking_utils.sdpa_mask).parameters


def call_of_a_mask(**changed: Any) -> dict[str, Any]:
    """The arguments that transformers passes."""
    if BY_POSITIONS:
        lengths: dict[str, Any] = {"cache_position": torch.arange(changed.pop("q_length", 4))}
    else:
        lengths = {"q_length": 4}
    return {"batch_size": 2, "kv_length": 4, "config": SimpleNamespace(), "dtype": torch.float32} | lengths | changed


def test_masks() -> None:
    assert ours.mask(**call_of_a_mask()) is None
    found = ours.mask(**call_of_a_mask(config=SimpleNamespace(model_type="gemma4_text")))
    assert found is not None and torch.equal(found[0, 0], torch.ones(4, 4, dtype=torch.bool).tril())


@pytest.mark.skipif(BY_POSITIONS, reason="no offsets of queries in this transformers")
def test_one_query_before_the_last_key_gets_a_mask() -> None:
    """Unused rows of a cache follow it."""
    assert ours.mask(**call_of_a_mask(q_length=1, q_offset=3)) is None
    for offset in (1, torch.tensor(1)):
        found = ours.mask(**call_of_a_mask(q_length=1, q_offset=offset))
        assert found is not None and found[0, 0, 0].tolist() == [True, True, False, False]


def test_models_that_take_no_booleans_get_numbers() -> None:
    """DeepSeek-V4 concatenates its own numbers to the mask."""
    name = "deepseek_v4" if "deepseek_v4" in transformers.CONFIG_MAPPING else "nllb-moe"
    theirs, tiled = pair(name)
    assert type(tiled.config) in masks.ADDITIVE
    given = prompt(padded=True)
    if tiled.config.is_encoder_decoder:
        given["decoder_input_ids"] = given["input_ids"][:, :9]
    seen = given["attention_mask"].bool() if "decoder_input_ids" not in given else slice(None)
    with torch.no_grad():
        found, wanted = (model(**given).logits[seen] for model in (tiled, theirs))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
