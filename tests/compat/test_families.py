"""Tiny models of transformers families give the results of "eager": forty of different kinds; all with -m slow."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from flashtile.compat import transformers as ours
from flashtile.errors import UnsupportedError
from tests.compat import families, families_page, tiny
from tests.compat.families_page import DIFFERS, EQUAL, NEVER, REFUSED, UNBUILT

# Each tests something special.
FORTY = (
    "aimv2 align_text_model bart bert bigbird_pegasus chameleon clip deepseek_v3 deepseek_v32 deepseek_v4 "
    "diffusion_gemma_text esm gemma2 gemma3_text gemma4_text gpt2 gpt_oss hy_v4 informer inkling2 llama llama4_text "
    "minimax_m3_vl mixtral modernbert nllb-moe phi4_multimodal_vision pix2struct qwen2 qwen2_vl qwen2_vl_vision qwen3 "
    "qwen3_next seamless_m4t splinter stablelm t5 vit whisper xlm-roberta "
)
UNSUPPORTED = {"falcon": REFUSED, "gptj": REFUSED, "mpt": NEVER, "mamba": NEVER}

pytestmark = pytest.mark.skipif(tiny.before(5), reason="the record is for a newer transformers")


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """transformers logs many warnings about configurations this small."""
    import warnings

    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    transformers.logging.set_verbosity(before)


@pytest.mark.parametrize("kind", FORTY.split())
def test_a_family(kind: str) -> None:
    found = families.timed(kind)
    assert found.outcome == EQUAL, found.why
    assert "prefill" in found.checks


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_an_unsupported_family(kind: str) -> None:
    found = families.timed(kind)
    assert found.outcome == UNSUPPORTED[kind] and found.warned == (kind == "mpt")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kinds in tiny.types().values() for kind in kinds])
def test_any_family(kind: str) -> None:
    found = families.timed(kind)
    assert found.outcome != DIFFERS, found.why


def without(*names: str) -> Any:
    def forward(*arguments: Any, **options: Any) -> Any:
        return ours.forward(*arguments, **{name: x for name, x in options.items() if name not in names})

    return forward


def without_mask(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    return ours.forward(module, query, key, value, None, **options)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("t5", without("position_bias")),
        ("gpt_oss", without("s_aux")),
        ("gemma2", without("softcap")),
        ("llama", without_mask),
    ],
    ids=["no bias", "no sinks", "no softcap", "no masks"],
)
def test_a_dropped_argument_is_detected(kind: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families.Calls, "forward", wrong)
    assert families.timed(kind).outcome == DIFFERS


def test_dropped_starts_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = without("cu_seq_lens_q", "cu_seq_lens_k", "position_ids")
    monkeypatch.setattr(families.Calls, "forward", wrong)
    found = families.timed("llama")
    assert found.outcome == DIFFERS and found.why.startswith("packed")


def test_an_error_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> Any:
        raise UnsupportedError("anything: expected None, got 1")

    monkeypatch.setattr(families.Calls, "forward", refuse)
    found = families.timed("llama")
    assert found.outcome == REFUSED and found.why == "anything: expected None, got 1"


def test_the_page_shows_its_record() -> None:
    shown = families_page.MARKED.search(families_page.PAGE.read_text())
    assert shown is not None and shown[0] == families_page.tables(families_page.read())
    outcomes = {row[0]: row[3] for row in families_page.read()["types"]}
    assert all(outcomes[kind] == EQUAL for kind in FORTY.split())
    assert all(outcomes[kind] == outcome for kind, outcome in UNSUPPORTED.items())
    assert UNBUILT in outcomes.values()
