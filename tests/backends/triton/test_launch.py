"""launch.py: which tile a decode gets on a GPU, into how many shares its keys go, and how many warps merge them."""

from __future__ import annotations

from typing import Any

import pytest

from flashtile.problem import check_gradients, describe
from tests.backends.triton import kernels

torch = pytest.importorskip("torch")
launch = kernels.launch
HOPPER, PROCESSORS = (9, 0), 132
USUAL, SHORT = (16, 64, 4, 4), (16, 64, 2, 3)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, HOPPER, PROCESSORS)


def on_gpu(monkeypatch: pytest.MonkeyPatch, gpu: Any, processors: int) -> None:
    monkeypatch.setattr(launch, "_gpu", lambda _device: gpu)
    monkeypatch.setattr(launch, "processors", lambda _device: processors)


def decode(batch: int, keys: int, heads: int = 32, kv_heads: int = 8, dim: int = 128, **more: Any) -> Any:
    """The launches of one; nothing is started, and no memory touched."""
    dtype, n_q = more.pop("dtype", torch.bfloat16), more.pop("n_q", 1)
    q = torch.empty(batch, heads, n_q, dim, dtype=dtype)
    k = torch.empty(1, kv_heads, keys, dim, dtype=dtype).expand(batch, -1, -1, -1)
    return launch.Forward(describe(q, k, k, **more), q.device, dict.fromkeys("qkv", True))


def tile(forward: Any) -> tuple[int, ...]:
    C, options = forward._start.constants["C"], forward._start.options
    return C.BLOCK_Q, C.BLOCK_K, options["num_warps"], options["num_stages"]


@pytest.mark.parametrize(
    ("batch", "keys", "splits"),
    [(1, 8192, 32), (1, 16384, 32), (1, 4096, 16), (2, 8192, 16), (8, 2048, 4)],
)
def test_a_short_decode_has_two_programs_a_processor(batch: int, keys: int, splits: int) -> None:
    found = decode(batch, keys)
    assert tile(found) == SHORT and found._splits == splits
    (programs, *_) = found._start.grid
    assert programs == 8 * batch * splits <= 2 * PROCESSORS and 2 * programs > PROCESSORS
    assert found._mend is None and found._start.constants["AGAIN"] is not None


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
    assert found._splits > 1 and tile(found) == (128, 128, 8, 3)


@pytest.mark.parametrize("more", [{"dim": 64}, {"dim": 256}, {"dtype": torch.float32}, {"mask": True}], ids=str)
def test_what_was_not_measured_is_as_any_decode(more: dict[str, Any]) -> None:
    if "mask" in more:
        more = {"mask": torch.ones(1, 1, 1, 8192, dtype=torch.bool)}
    found = decode(1, 8192, **more)
    assert found._splits == 16 and found._start.options["num_warps"] == 4


def test_another_gpu_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, (8, 0), 108)
    found = decode(1, 8192)
    assert tile(found) == (16, 64, 4, 3) and found._splits == 8


def test_candidates_take_its_place() -> None:
    with launch.tuning.override("decode-short", launch.Config(16, 32, 1, 2, programs=2)):
        assert tile(decode(1, 8192)) == (16, 32, 1, 2) and decode(1, 8192)._splits == 32
        assert tile(decode(1, 32768)) == USUAL
    with launch.tuning.override("decode-short", launch.Config(16, 64, 2, 3)):
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
    assert found._splits == splits and found._launch.steps[-1][0].options == {"num_warps": warps}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 1000, 1024])
def test_statistics_have_room_for_a_whole_tile(rows: int, packed: bool) -> None:
    """dkdv_kernel reads a tile of them where the last rows begin, wherever a packed sequence begins."""
    shape = (rows, 2, 64) if packed else (1, 2, rows, 64)
    q = torch.empty(shape, dtype=torch.bfloat16)
    cu = {"cu_q": torch.tensor([0, rows]), "cu_k": torch.tensor([0, rows])} if packed else {}
    p = describe(q, q, q, **cu)
    given = check_gradients(p, q, q, torch.empty(shape[:-1]), None)
    run = launch.Backward(p, q.device, dict.fromkeys(("q", "k", "v", "dout"), True), given, False)
    tile, room = started(run, "dkdv_kernel").constants["C"].BLOCK_Q, started(run, "statistics_kernel").rows[5][1]
    last = rows - 1 if packed else (rows - 1) // tile * tile
    assert last + tile <= room and room % 16 == 0
    assert run._delta.of(run._scratch()).shape == (1, 2, room)


def started(run: Any, kernel: str) -> Any:
    return next(start for start, _ in run._launch.steps if start.kernel.fn.__name__ == kernel)
