"""The tile of a decode on a GPU, the number of shares of its keys, and the warps that merge them."""

from __future__ import annotations

from typing import Any

import pytest

from flashtile.problem import describe

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from flashtile.backends.gpu import device as gpu  # noqa: E402
from flashtile.backends.gpu.config import Config  # noqa: E402
from flashtile.backends.gpu.kernel_launch import FUSED  # noqa: E402
from flashtile.backends.triton import tuning  # noqa: E402
from flashtile.backends.triton.forward import Forward  # noqa: E402

HOPPER, PROCESSORS = (9, 0), 132
USUAL, SHORT = (16, 64, 4, 4), (16, 64, 2, 3)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, HOPPER, PROCESSORS)


def on_gpu(monkeypatch: pytest.MonkeyPatch, architecture: Any, processors: int) -> None:
    monkeypatch.setattr(gpu, "architecture", lambda _device: architecture)
    monkeypatch.setattr(gpu, "processors", lambda _device: processors)


def decode(batch: int, keys: int, heads: int = 32, kv_heads: int = 8, dim: int = 128, **more: Any) -> Any:
    """The prepared launches of a decode; nothing runs, and no memory is touched."""
    dtype, n_q = more.pop("dtype", torch.bfloat16), more.pop("n_q", 1)
    q = torch.empty(batch, heads, n_q, dim, dtype=dtype)
    k = torch.empty(1, kv_heads, keys, dim, dtype=dtype).expand(batch, -1, -1, -1)
    return Forward(describe(q, k, k, **more), q.device, dict.fromkeys("qkv", True))


def tile(forward: Any) -> tuple[int, ...]:
    C, options = forward._kernel.constants["C"], forward._kernel.options
    return C.BLOCK_Q, C.BLOCK_K, options["num_warps"], options["num_stages"]


@pytest.mark.parametrize(
    ("batch", "keys", "splits"),
    [(1, 8192, 32), (1, 16384, 32), (1, 4096, 16), (2, 8192, 16), (8, 2048, 4)],
)
def test_a_short_decode_has_two_programs_per_processor(batch: int, keys: int, splits: int) -> None:
    found = decode(batch, keys)
    assert tile(found) == SHORT and found._splits == splits
    (programs, *_) = found._kernel.grid
    assert programs == 8 * batch * splits <= 2 * PROCESSORS and 2 * programs > PROCESSORS
    assert found._recompute is None and found._kernel.constants["RECOMPUTE"] is not None


@pytest.mark.parametrize(
    ("batch", "keys", "splits"),
    [(1, 16384 + 1, 16), (1, 32768, 16), (1, 131072, 16), (16, 8192, 1), (64, 4096, 1), (8, 8192, 2)],
)
def test_a_long_decode_has_one(batch: int, keys: int, splits: int) -> None:
    found = decode(batch, keys)
    assert tile(found) == USUAL and found._splits == splits


@pytest.mark.parametrize("keys", [64, 255, 511])
def test_a_decode_that_is_not_split_is_not_short(keys: int) -> None:
    found = decode(1, keys)
    assert tile(found) == USUAL and found._splits == 1


def test_many_queries_are_no_decode() -> None:
    found = decode(1, 8192, n_q=100)
    assert found._splits > 1 and tile(found) == (64, 64, 4, 3)


@pytest.mark.parametrize(("n_q", "shared"), [(5, 4), (33, 4), (48, 4), (49, 1), (64, 1)])
def test_heads_share_tiles_that_one_would_leave_a_quarter_empty(n_q: int, shared: int) -> None:
    found = decode(1, 32768, n_q=n_q)
    assert found._kernel.constants["PACKED_HEADS"] == shared
    tiles = -(-n_q * shared // 64) * 32 // shared
    (programs, *_) = found._kernel.grid
    assert programs == tiles * found._splits <= 2 * PROCESSORS < 2 * programs


@pytest.mark.parametrize("more", [{"dim": 64}, {"dim": 256}, {"dtype": torch.float32}, {"mask": True}], ids=str)
def test_cases_without_measurements_use_the_ordinary_tile(more: dict[str, Any]) -> None:
    if "mask" in more:
        more = {"mask": torch.ones(1, 1, 1, 8192, dtype=torch.bool)}
    found = decode(1, 8192, **more)
    assert found._splits == 16 and found._kernel.options["num_warps"] == 4


def test_other_gpus_have_no_short_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, (8, 0), 108)
    found = decode(1, 8192)
    assert tile(found) == (16, 64, 4, 3) and found._splits == 8


def test_overrides_apply_to_it() -> None:
    with tuning.override("decode-short", Config(16, 32, 1, 2, programs=2)):
        assert tile(decode(1, 8192)) == (16, 32, 1, 2) and decode(1, 8192)._splits == 32
        assert tile(decode(1, 32768)) == USUAL
    with tuning.override("decode-short", Config(16, 64, 2, 3)):
        assert tile(decode(1, 8192)) == SHORT and decode(1, 8192)._splits == 16


@pytest.mark.parametrize(
    ("more", "splits", "warps"),
    [
        ({}, 32, 1),
        ({"heads": 4, "kv_heads": 1, "keys": 65536}, 64, 2),
        ({"dim": 256}, 16, 1),
        ({"dim": 256, "kv_heads": 2, "heads": 8}, 64, 4),
        ({"dim": 256, "kv_heads": 2, "heads": 8, "dtype": torch.float64}, 64, 8),
        ({"keys": 131072}, 16, 1),
    ],
    ids=str,
)
def test_one_warp_merges_if_it_can(more: dict[str, Any], splits: int, warps: int) -> None:
    found = decode(1, **{"keys": 8192, **more})
    assert found._splits == splits and found._launch.launches[-1][0].options == FUSED | {"num_warps": warps}
