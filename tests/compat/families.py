"""Compare "eager" with ours on tiny models of all transformers families: python -m tests.compat.families [TYPE ...]

Without types, run all, which takes minutes, and rewrite docs/transformers.json and the tables of docs/transformers.md.
Exit code 1: a model differs.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers

from flashtile.compat import transformers as ours
from flashtile.compat.transformers import models
from flashtile.errors import FlashtileError
from tests.compat import families_page, tiny
from tests.compat.families_page import DIFFERS, EQUAL, NEVER, REFUSED, UNBUILT

LIMIT, LIMIT_DOUBLE = (
    2e-4,
    1e-5,
)  # relative to the largest number compared: in float32, and in float64 if that is exceeded
NEW_WORDS = 8
ORDINARY = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError)
SECONDS = 120


# Model types that read the first word, through windows: with left padding it sees no key.
FIRST = ("pe_audio",)


@dataclass
class Finding:
    """The result for a model type."""

    type: str
    outcome: str = UNBUILT
    why: str = ""
    model: str = ""
    checks: list[str] = field(default_factory=list)
    warned: bool = False


class DifferenceError(Exception):
    """Our results differ from those of "eager"."""


class EagerError(Exception):
    """A call that "eager" itself cannot run."""


class Calls:
    """Counts the calls of the layer function."""

    count = 0

    @classmethod
    def counted(cls, *arguments: Any, **options: Any) -> Any:
        cls.count += 1
        return cls.forward(*arguments, **options)

    forward = staticmethod(ours.forward)


def examine(kind: str) -> Finding:
    found = Finding(kind)
    models._calls_interface.cache_clear()
    models.WARNED.clear()
    failed: Exception | None = None
    for sizes in (tiny.SIZE_OF, tiny.FREE_SIZE_OF):
        try:
            config = tiny.config_of(kind, sizes)
            made = tiny.class_of(kind, config)
            found.model = made.__name__
            eager = tiny.build(made, config, "eager")
            which = _working_input(eager)
            break
        except TimeoutError:
            raise
        except Exception as error:
            failed = failed or error
    else:
        found.why = _one_line(failed)
        return found
    _register()
    before = Calls.count
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            tiled = tiny.build(made, config, ours.NAME)
        found.warned = any("has no effect" in str(x.message) for x in heard)
        tiled.load_state_dict(eager.state_dict())
        for name, check in _checks(eager, tiled, which):
            try:
                name = check() or name
            except EagerError as error:
                if not found.checks:
                    found.why = _one_line(error)
                    return found
                continue
            if Calls.count == before:
                found.outcome = NEVER
                return found
            found.checks.append(name)
        found.outcome = EQUAL
    except FlashtileError as error:
        found.outcome, found.why = REFUSED, _one_line(error)
    except DifferenceError as error:
        found.outcome, found.why = DIFFERS, _one_line(error)
    return found


def _register() -> None:
    ours.register()
    transformers.AttentionInterface.register(ours.NAME, Calls.counted)


def _working_input(model: Any) -> int:
    """The index of the first generated inputs that the model accepts."""
    failed: Exception = LookupError(f"no {model.main_input_name} could be made up")
    for which, given in enumerate(tiny.inputs(model)):
        try:
            with torch.no_grad():
                if _tensors(model(**given)):
                    return which
            failed = LookupError("no numbers in its output")
        except TimeoutError:
            raise
        except Exception as error:
            failed = error if which == 0 else failed
    raise failed


def _checks(eager: Any, tiled: Any, which: int) -> Iterator[tuple[str, Callable[[], str | None]]]:
    def given(padding: str | None = None) -> dict[str, Any]:
        return list(tiny.inputs(eager, padding))[which]

    yield "prefill", lambda: _compare("prefill", eager, tiled, given())
    padded = "attention_mask" in given()
    if padded and eager.config.model_type not in FIRST:
        yield "left padding", lambda: _compare("left padding", eager, tiled, given("left"))
    if padded:
        yield "right padding", lambda: _compare("right padding", eager, tiled, given("right"))
    if eager.can_generate():
        for cache in ("dynamic", "static"):
            for padding in (None, "left") if padded else (None,):
                call = given(padding)
                words = _generated(eager, call, cache)
                if words is not None:
                    name = f"{cache} cache" + (f", {padding} padding" if padding else "")
                    yield (
                        name,
                        lambda name=name, call=call, cache=cache, words=words: _check_same_words(
                            name, words, tiled, call, cache
                        ),
                    )
    if _is_causal_lm(eager):
        yield "packed", lambda: None if _packed(eager, tiled) else "packed without a cache"


def _compare(name: str, eager: Any, tiled: Any, given: dict[str, Any]) -> None:
    """Compare outputs and gradients."""
    error = _errors(eager, tiled, given)
    if not all(x <= LIMIT for x in error):
        said = f"{name}: outputs by {error[0]:.1e}, gradients by {error[1]:.1e}"
        try:  # rounding may have selected another expert
            double = {n: x.double() if x.is_floating_point() else x for n, x in given.items()}
            error = _errors(eager.double(), tiled.double(), double)
            undecided = any(x.isnan().any() for x in _outputs_and_gradients(eager, double)[0])
        except EagerError as failure:
            raise DifferenceError(f"{said}; no float64: {_one_line(failure)}") from None
        finally:
            eager.float(), tiled.float()
        if undecided:
            raise EagerError(f"{said}; NaN in float64")
        if not all(x <= LIMIT_DOUBLE for x in error):
            raise DifferenceError(f"{said}; in float64 by {error[0]:.1e}, {error[1]:.1e}")


def _errors(eager: Any, tiled: Any, given: dict[str, Any]) -> tuple[float, float]:
    try:
        a, da = _outputs_and_gradients(eager, given)
    except ORDINARY as error:
        raise EagerError(_one_line(error)) from None
    b, db = _outputs_and_gradients(tiled, given)
    most = max((_most(x) for x in da.values()), default=0.0) or 1.0
    gradients = max((_difference(da[n], db[n]) / most if n in db else 1.0 for n in da), default=0.0)
    return max(_difference(x, y) / (_most(x) or 1.0) for x, y in zip(a, b, strict=True)), gradients


def _outputs_and_gradients(model: Any, given: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    seen = given.get("attention_mask")
    found = []
    for x in _tensors(model(**given)):
        words = seen is not None and x.shape[:2] == seen.shape
        found.append(x[seen.bool()] if words and seen is not None else x)  # outputs at padding are arbitrary
    drawn = torch.Generator().manual_seed(2)
    loss = sum((x * torch.randn(x.shape, generator=drawn).to(x.dtype)).sum() for x in found if x.requires_grad)
    model.zero_grad()
    if isinstance(loss, torch.Tensor):
        loss.backward()
    grads = {n: x.grad.detach().clone() for n, x in model.named_parameters() if x.grad is not None}
    return [x.detach() for x in found], grads


def _tensors(out: Any) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out] if out.is_floating_point() and out.numel() else []
    if isinstance(out, dict):
        return [x for name, value in out.items() if "past" not in name and "cache" not in name for x in _tensors(value)]
    return [x for value in out for x in _tensors(value)] if isinstance(out, (list, tuple)) else []


def _most(x: torch.Tensor) -> float:
    return float(x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max()) if x.numel() else 0.0


def _difference(x: torch.Tensor, y: torch.Tensor) -> float:
    same = (x == y) | (x.isnan() & y.isnan())
    return float(torch.where(same, 0, (x - y).abs().nan_to_num(nan=math.inf)).max()) if x.numel() else 0.0


def _generated(model: Any, given: dict[str, Any], cache: str) -> torch.Tensor | None:
    """The words a model generates greedily; None if it cannot generate."""
    try:
        return _generate(model, given, cache)
    except TimeoutError:
        raise
    except Exception:
        return None


def _generate(model: Any, given: dict[str, Any], cache: str) -> torch.Tensor:
    model.generation_config.eos_token_id = None
    if hasattr(model.generation_config, "max_denoising_steps"):
        model.generation_config.max_denoising_steps = 2  # with more steps, random draws depend on the last bit
    if model.config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
        model.generation_config.decoder_start_token_id = 1
    call = {name: x for name, x in given.items() if not name.startswith("decoder_")}
    torch.manual_seed(0)
    with torch.no_grad():
        said = model.generate(
            **call,
            max_new_tokens=NEW_WORDS,
            do_sample=False,
            num_beams=1,
            pad_token_id=0,
            cache_implementation=None if cache == "dynamic" else cache,
            disable_compile=True,
        )
    return said if isinstance(said, torch.Tensor) else said[0]


def _check_same_words(name: str, words: torch.Tensor, tiled: Any, given: dict[str, Any], cache: str) -> None:
    said = _generate(tiled, given, cache)
    if not torch.equal(said, words):
        raise DifferenceError(
            f"{name}: other words, {said[:, -NEW_WORDS:].tolist()} for {words[:, -NEW_WORDS:].tolist()}"
        )


STARTS = torch.tensor([0, 4, 11, 17], dtype=torch.int32)


def _is_causal_lm(model: Any) -> bool:
    return type(model).__name__.endswith(("CausalLM", "LMHeadModel"))


def _documents() -> dict[str, Any]:
    ids = torch.randint(5, 80, (1, int(STARTS[-1])), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "position_ids": torch.cat([torch.arange(int(n)) for n in STARTS.diff()])[None]}


def _alone(model: Any) -> torch.Tensor:
    ids = _documents()["input_ids"]
    return torch.cat([model(x).logits for x in ids.split(STARTS.diff().tolist(), dim=1)], dim=1)


def _packed(eager: Any, tiled: Any) -> bool:
    """Whether packed documents give the results of each document alone; False if only without a cache.

    A model that keeps another state than its attention mixes documents, with any mask.
    """
    served = []
    call = _documents() | {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS, "max_length_q": 7, "max_length_k": 7}
    with torch.no_grad():
        try:
            alone = _alone(eager)
            mixed = _difference(eager(**_documents(), use_cache=False).logits, alone)
            eager(**call)
        except ORDINARY as error:
            raise EagerError(_one_line(error)) from None
        for options in ({}, {"use_cache": False}):
            try:
                found = _difference(tiled(**call, **options).logits, alone) / _most(alone)
            except FlashtileError:
                served.append(False)
                continue
            if not found <= LIMIT:
                raise (EagerError if mixed > LIMIT * _most(alone) else DifferenceError)(
                    f"packed: logits by {found:.1e}"
                )
            served.append(True)
    if not served[-1]:
        raise (EagerError if mixed > LIMIT * _most(alone) else DifferenceError)("packed: refused without a cache")
    return served[0]


def _one_line(error: BaseException | None) -> str:
    text = " ".join(str(error).split())
    named = isinstance(error, FlashtileError | DifferenceError | EagerError)
    return text if named else f"{type(error).__name__}: {text}"


def timed(kind: str) -> Finding:
    """examine() with a time limit."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {SECONDS} seconds")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        return examine(kind)
    except TimeoutError as error:
        return Finding(kind, why=_one_line(error))
    except Exception as error:
        return Finding(kind, DIFFERS, f"raises where eager does not: {_one_line(error)}")
    finally:
        signal.alarm(0)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("types", nargs="*")
    given = asked.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = []
    for kind in given.types or [kind for kinds in tiny.types().values() for kind in kinds]:
        start = time.monotonic()
        found.append(timed(kind))
        x = found[-1]
        warned = " (warned)" if x.warned else ""
        took = f"{time.monotonic() - start:.1f} s"
        print(
            f"{kind}: {x.outcome}{warned} {x.model} {x.why} [{'; '.join(x.checks)}] {took}", file=sys.stderr, flush=True
        )
    if not given.types:
        families_page.write({x.type: asdict(x) for x in found})
    sys.exit(any(x.outcome == DIFFERS for x in found))


if __name__ == "__main__":
    main()
