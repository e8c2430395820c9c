"""Similar calls, one after another: a call cached for one must not answer another."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

import flashtile as ft
from flashtile import calls as array_calls
from flashtile.pytorch import calls as tensor_calls
from flashtile.pytorch.bridge import to_numpy

Call = tuple[list[Tensor], dict[str, Any], dict[str, Any]]  # q, k, v; options; keywords such as return_lse


def family(seed: int) -> Iterator[Call]:
    """Calls that each differ from the first in one respect, or only in their numbers."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    batch, heads, n_q, n_k, dim = 2, 4, int(rng.choice([1, 3, 24])), 24, int(rng.choice([8, 24]))

    def tensors(dtype: torch.dtype = torch.float32, kv_heads: int = 2, n: int = n_k) -> list[Tensor]:
        return [torch.randn(batch, h, m, dim).to(dtype) for h, m in ((heads, n_q), (kv_heads, n), (kv_heads, n))]

    one, mask = tensors(), torch.rand(batch, 1, n_q, n_k) < 0.7
    options: tuple[dict[str, Any], ...] = (
        {},
        {"causal": True},
        {"causal": np.True_},
        {"scale": 1},
        {"scale": 1.0},
        {"scale": 0.3},
        {"scale": np.float32(1)},
        {"softcap": 1},
        {"softcap": 2},
        {"softcap": 1.5},
        {"window": (3, 0)},
        {"window": (3, None)},
        {"window": [3, 1]},
        {"band": ft.Band(3, 0, 1)},
        {"band": ft.Band(3, 0, 2)},
        {"dropout": 0.25, "seed": 1},
        {"dropout": 0.25, "seed": 2**63 + 5},
        {"dropout": 0.5, "seed": 1},
        {"dropout": 0.5, "seed": 1, "origin": ft.Origin(3, 3)},
        {"dropout": 0.5, "seed": 1, "origin": ft.Origin(3, 4)},
        {"dropout": 0.5, "seed": 1, "origin": ft.Origin(3, 4, heads=heads + 1)},
        {"mask": mask},
        {"mask": ~mask},
        {"mask": mask[:1]},
        {"bias": mask.float()},
        {"bias": mask.float()[:, :, :1]},
        {"alibi": torch.rand(heads)},
        {"alibi": torch.rand(batch, heads)},
        {"sink": torch.rand(heads)},
        {"kv_lengths": torch.tensor([24, 7])},
        {"kv_lengths": torch.tensor([5, 24])},
        {"kv_lengths": torch.tensor([5, 24], dtype=torch.int32)},
        {"threads": 1},
        {"deterministic": True},
    )
    for o in options:
        yield one, o, {}
        yield tensors(), o, {"return_lse": True}
    gaps = [torch.randn(*x.shape[:-1], dim + 5)[..., :dim] for x in one]
    apart = [torch.randn(*x.shape, 2)[..., 0] for x in one]
    transposed = [torch.randn(batch, x.shape[2], x.shape[1], dim).transpose(1, 2) for x in one]
    shifted = [torch.randn(x.numel() + 1)[1:].view(x.shape) for x in one]
    for given in (
        gaps,
        apart,
        transposed,
        shifted,
        [gaps[0], *one[1:]],
        [one[0], one[1], one[1]],
        [one[0], *transposed[1:]],
    ):
        yield given, {}, {}
        yield given, {"causal": True}, {}
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        yield tensors(dtype), {}, {}
        yield tensors(dtype), {"out_dtype": torch.float64 if dtype is torch.float64 else torch.float32}, {}
    for more in ({"kv_heads": 4}, {"kv_heads": 1}, {"n": 25}):
        yield tensors(**more), {"causal": True}, {}
    yield [x.clone().requires_grad_() for x in one], {"causal": True}, {}
    yield [one[0].clone().requires_grad_(), *one[1:]], {}, {}
    yield one, {}, {"backend": "tiles"}


def answers(call: Call, arrays: bool) -> list[Any]:
    """Output, and the lse and gradients if wanted."""
    tensors, options, how = call
    if arrays:
        given = [to_numpy(x) for x in tensors]
        options = {name: to_numpy(x) if isinstance(x, Tensor) else x for name, x in options.items()}
        if "out_dtype" in options:
            options["out_dtype"] = str(options["out_dtype"]).removeprefix("torch.")
        found = ft.attention(*given, **options, **how)
        return [np.array(x) for x in (found if isinstance(found, tuple) else (found,))]
    found = ft.attention(*tensors, **options, **how)
    results = [*found] if isinstance(found, tuple) else [found]
    wanted = [x for x in tensors if x.requires_grad]
    grads = torch.autograd.grad(results[0].square().sum(), wanted) if wanted else ()
    return [x.detach() for x in (*results, *grads)]


def same(found: list[Any], wanted: list[Any]) -> bool:
    """Whether the results are bitwise equal."""
    return len(found) == len(wanted) and all(
        x.dtype == y.dtype and x.shape == y.shape and np.asarray(_bytes(x) == _bytes(y)).all()
        for x, y in zip(found, wanted, strict=True)
    )


def _bytes(x: Any) -> bytes:
    return (x.contiguous().view(torch.uint8).numpy() if isinstance(x, Tensor) else np.ascontiguousarray(x)).tobytes()


def clear_caches() -> None:
    array_calls.KNOWN.clear()
    tensor_calls._known.clear()


def check_mixed(seed: int) -> None:
    """Check that each call of a family, in random order and repeated, gives the result that it gives alone."""
    rng, calls = np.random.default_rng(seed), list(family(seed))
    arrays = bool(rng.random() < 0.4)
    alone = []
    for call in calls:
        clear_caches()
        alone.append(answers(call, arrays))
    clear_caches()
    for n in rng.permutation(np.repeat(np.arange(len(calls)), 3)):
        _, options, how = calls[n]
        assert same(answers(calls[n], arrays), alone[n]), f"seed {seed}, call {n}: {options} {how}"


@pytest.mark.parametrize("seed", range(40))
def test_look_alikes(seed: int) -> None:
    check_mixed(seed)


@pytest.mark.slow
def test_look_alikes_for_hours() -> None:
    end, seed = time.monotonic() + 60 * float(os.environ.get("FLASHTILE_FUZZ_MINUTES", "30")), int(time.time())
    while time.monotonic() < end:
        check_mixed(seed)
        seed += 1
