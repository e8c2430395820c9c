"""candidates.py: every target has some, none that cannot fit, and the arithmetic is what it says."""

import pytest

from flashtile.backends.gpu.config import Config
from flashtile.backends.triton import tuning
from flashtile.lab.bench import candidates
from flashtile.lab.bench.candidates import Limits, Target

HOPPER, SMALL = Limits(227 << 10, True), Limits(99 << 10, False)
FORWARD = Target("forward", "bfloat16", 128)


@pytest.mark.parametrize("target", candidates.targets(), ids=lambda target: target.name)
@pytest.mark.parametrize("limits", [HOPPER, SMALL], ids=["hopper", "small"])
def test_candidates_can_fit_and_differ(target: Target, limits: Limits) -> None:
    found = candidates.candidates(target, limits)
    assert found and len(set(found)) == len(found)
    assert all(candidates.shared_bytes(target, config) <= limits.shared for config in found)
    assert any(c.descriptors for c in found) == (
        limits.copy_engine and target.dtype == "bfloat16" and not target.kernel.startswith("decode")
    )


def test_a_short_decode_may_share_a_processor() -> None:
    found = candidates.candidates(Target("decode-short", "bfloat16", 128), HOPPER)
    assert {c.programs for c in found} == {1, 2} and tuning.MEASURED[9, 2]["decode-short"][128] in found
    assert {c.programs for c in candidates.candidates(Target("decode", "bfloat16", 128), HOPPER)} == {1}


def test_the_arithmetic_of_a_tile() -> None:
    config = Config(128, 64, 8, 3)
    assert candidates.shared_bytes(FORWARD, config) == (128 + 3 * 2 * 64) * 128 * 2
    assert candidates.shared_bytes(Target("dkdv", "float32", 64), config) == (2 * 64 + 3 * 2 * 128) * 64 * 4
    assert candidates.accumulators(FORWARD, config) == (128 * 128 + 128 * 64) / 256
    assert candidates.accumulators(Target("dkdv", "bfloat16", 128), config) == (2 * 64 * 128 + 2 * 128 * 64) / 256


def test_targets_can_be_selected() -> None:
    assert len(candidates.targets()) == 5 * 2 * 3
    assert candidates.targets(["dq"], ["float32"], [64]) == [Target("dq", "float32", 64)]
