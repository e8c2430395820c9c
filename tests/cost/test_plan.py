"""plan.py: counts from shapes alone, sizes of real models, and the reasons of the dispatch table."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import flashtile
from flashtile import DTypeError, ShapeError, UnsupportedError, dispatch
from flashtile.backends import gluon, native, tiles
from flashtile.backends.gluon import tuning as hopper
from flashtile.backends.triton import tuning
from flashtile.band import Band
from flashtile.cost import traffic
from flashtile.cost.hardware import Hardware, Rates
from flashtile.cost.stand_ins import stand_in
from flashtile.numerics.dtypes import EIGHT_BITS
from flashtile.numerics.schedule import Grid, fa2_forward
from flashtile.problem import describe

GIB = 1 << 30


def of_backend(name="tiles", *args, **kwargs):
    return flashtile.plan(*args, backend=name, **kwargs)


@pytest.mark.parametrize("causal", [False, True])
def test_counts_are_those_of_the_schedule(causal):
    p = of_backend("tiles", (2, 6, 300, 64), (2, 3, 300, 64), "bfloat16", v_shape=(2, 3, 300, 32), causal=causal)
    grid = Grid(300, 300, *p.tile)
    band = Band(right=0) if causal else Band()
    total = traffic.count(fa2_forward(band, grid), grid, traffic.Layout(64, 32, "bfloat16"))
    assert p.tile_bytes == 12 * total.bytes
    assert p.pairs == 12 * (300 * 301 // 2 if causal else 300 * 300)
    assert p.flops == p.pairs * 2 * (64 + 32)
    assert p.tiles["partial"] + p.tiles["full"] == 12 * sum(total.tiles.values())
    assert p.kv_bytes == 2 * 3 * 300 * (64 + 32) * 2
    assert p.lse_bytes == 12 * 300 * 4
    assert p.score_bytes == 12 * 300 * 300 * 2


def test_least_bytes_is_the_closed_form():
    p = flashtile.plan((1024, 64), (1024, 64))
    assert p.least_bytes == 4 * traffic.least_elements(1024, 64)
    assert p.standard_bytes == 4 * traffic.standard_elements(1024, 64)


def test_a_window_needs_only_the_visible_keys():
    p = flashtile.plan((1, 8, 1, 64), (1, 8, 8192, 64), window=(255, 0))
    assert p.pairs == 8 * 256
    assert p.least_bytes == 8 * (2 * 64 + 1 + 2 * 64 * 256) * 4


@pytest.mark.parametrize(
    ("context", "scores_gib", "kv_mib"), [(8 << 10, 4, 32), (32 << 10, 64, 128), (128 << 10, 1024, 512)]
)
def test_sizes_of_a_layer_of_llama_3_8b(context, scores_gib, kv_mib):
    p = flashtile.plan((1, 32, context, 128), (1, 8, context, 128), "bfloat16", causal=True)
    assert p.score_bytes == scores_gib * GIB
    assert p.kv_bytes == kv_mib << 20
    if context == 128 << 10:
        assert p.lse_bytes == 16 << 20
    assert p.flops == pytest.approx(32 * 2 * context**2 * 128, rel=2 / context)  # half of the square, by convention


def test_the_floor_is_the_larger_of_compute_and_memory():
    rates = Rates(flops=1e12, bytes=1e11)
    prefill = flashtile.plan((1, 8, 4096, 128), (1, 8, 4096, 128), hardware=Hardware("a machine", rates)).floor
    decode = flashtile.plan((1, 8, 1, 128), (1, 8, 4096, 128), hardware=Hardware("a machine", rates))
    assert prefill.bound == "compute" and prefill.seconds == 4 * 8 * 4096**2 * 128 / 1e12
    assert decode.floor.bound == "memory" and decode.floor.seconds == decode.least_bytes / 1e11
    assert rates.ridge == 10
    assert flashtile.plan((4, 4), (4, 4)).floor is None


def test_every_other_row_has_a_reason():
    p = of_backend("tiles", (16, 8), (16, 8))
    assert p.backend == "tiles"
    assert set(p.reasons) == {row.name for row in dispatch.TABLE} - {"tiles"}
    assert all(p.reasons.values())


def test_an_unsupported_device_still_has_numbers():
    p = flashtile.plan((16, 8), (16, 8), device="toaster")
    assert p.backend is None and p.flops == 4 * 16 * 16 * 8
    assert all("toaster" in reason for reason in p.reasons.values())


def test_devices_of_torch():
    torch = pytest.importorskip("torch")
    for name, others in {"cpu": [torch.device("cpu")], "cuda": ["cuda:0", torch.device("cuda", 1)]}.items():
        wanted = flashtile.plan((16, 8), (16, 8), device=name)
        for other in others:
            found = flashtile.plan((16, 8), (16, 8), device=other)
            assert replace(found, reasons={}) == replace(wanted, reasons={})
            # A torch.device of a CPU means that the call has tensors.
            assert found.reasons | {"sdpa": ""} == wanted.reasons | {"sdpa": ""}
        assert wanted.device == name


def test_an_explicit_backend_that_cannot_run_is_an_error():
    with pytest.raises(UnsupportedError, match="backend"):
        flashtile.plan((16, 8), (16, 8), device="toaster", backend="tiles")


def test_plan_checks_what_attention_checks():
    with pytest.raises(ShapeError, match="k: expected head dim"):
        flashtile.plan((16, 8), (16, 9))
    with pytest.raises(ShapeError, match="bias"):
        flashtile.plan((16, 8), (16, 8), bias=(3, 5))
    with pytest.raises(ShapeError, match=r"q_shape: expected fewer than 2\^60 elements"):
        flashtile.plan((1 << 30, 1 << 30, 8, 8), (16, 8))
    assert flashtile.plan((16, 8), (16, 8), bias=(16, 16), mask=(1, 16)).backend


def test_packed_sequences_and_lengths_in_use():
    cu = np.array([0, 4, 10])
    packed = flashtile.plan((10, 2, 8), (10, 2, 8), cu_q=cu, cu_k=cu, causal=True)
    assert packed.pairs == 2 * (4 * 5 // 2 + 6 * 7 // 2)
    padded = flashtile.plan((2, 2, 1, 8), (2, 2, 10, 8), kv_lengths=np.array([4, 10]))
    assert padded.pairs == 2 * 14
    assert padded.kv_bytes == 2 * 14 * 16 * 4


@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_lengths_may_be_tensors(kind):
    torch = pytest.importorskip("torch")
    shape, cu, lengths = (10, 2, 8), np.array([0, 4, 10], kind), np.array([4, 10], kind)

    def packed(cu):
        return flashtile.plan(shape, shape, cu_q=cu, cu_k=cu, causal=True)

    def padded(lengths):
        return flashtile.plan((2, 2, 1, 8), (2, 2, 10, 8), kv_lengths=lengths)

    assert packed(torch.from_numpy(cu)) == packed(cu) and padded(torch.from_numpy(lengths)) == padded(lengths)
    for wrong in ([0, 30, 10], [0, 4, 9]):
        with pytest.raises(ShapeError, match=r"^cu_q: expected to rise"):
            packed(torch.tensor(wrong))
    with pytest.raises(ShapeError, match=r"^kv_lengths: expected values"):
        padded(torch.tensor([50, 1]))
    with pytest.raises(DTypeError, match=r"^kv_lengths: expected int32 or int64"):
        padded(torch.tensor([1, 2], dtype=torch.bfloat16))
    with pytest.raises(DTypeError, match=r"^cu_q: .* on meta"):
        packed(torch.zeros(3, dtype=torch.int64, device="meta"))


def test_a_stand_in_takes_no_memory():
    x = stand_in((1, 128, 1 << 20, 128), "bfloat16")
    assert x.shape == (1, 128, 1 << 20, 128) and x.strides == (0, 0, 0, 0)


def test_to_dict_is_json():
    p = flashtile.plan((16, 8), (16, 8), hardware=Hardware("a machine", Rates(1e12, 1e11)))
    assert json.loads(json.dumps(p.to_dict()))["floor"]["bound"] in ("compute", "memory")


def test_the_tile_is_the_backends_own():
    assert of_backend("tiles", (1, 2, 300, 64), (1, 2, 300, 64)).tile == (tiles.BLOCK, tiles.BLOCK)
    assert of_backend("reference", (1, 2, 300, 64), (1, 2, 200, 64)).tile == (300, 200)
    p = flashtile.plan((1, 8, 300, 64), (1, 8, 300, 64))
    if p.backend == "native":
        wanted = native.tile(describe(*[stand_in((1, 8, 300, 64), "float32")] * 3))
        assert p.tile == wanted[:2] != (128, 128) and p.rows_at_once == wanted.at_once < p.tile[0]
        assert p.blocks["S"] == p.rows_at_once * p.tile[1] * 4


def on_gpu(q_shape, k_shape, capability, dtype="bfloat16", **options):
    gpu = Hardware("one", Rates(1e15, 1e12), capability=capability)
    return flashtile.plan(q_shape, k_shape, dtype, "cuda", hardware=gpu, **options)


@pytest.mark.parametrize("capability", [(10, 0), (8, 0), None])
def test_the_tile_of_a_gpu_that_is_not_present(capability):
    p = on_gpu((1, 8, 4096, 128), (1, 8, 4096, 128), capability)
    assert p.tile_of == "triton" and p.tile_heads == 1
    assert p.tile == tuning.choose("forward", 128, 128, 2, capability, False)[:2]


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_hopper_has_its_own_tiles(dim):
    p = on_gpu((2, 8, 4096, dim), (2, 8, 4096, dim), (9, 0), causal=True)
    config = hopper.forward(dim)
    assert p.tile_of == "gluon" and p.tile_heads == 1
    assert p.tile == (hopper.ROWS * config.consumers, config.block_k)


SHAPE = (2, 8, 4096, 128)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (SHAPE, {"dtype": "float32"}),
        (SHAPE, {"bias": (4096, 4096)}),
        (SHAPE, {"dropout": 0.1}),
        ((2, 8, 4096, 36), {}),  # rows that the copy engine cannot fetch
        ((1, 8, 1, 128), {}),  # too little work
    ],
    ids=["float32", "bias", "dropout", "width", "decode"],
)
def test_hopper_leaves_the_rest_to_the_portable_kernels(shape, options):
    p = on_gpu(shape, (*shape[:2], 4096, shape[3]), (9, 0), **options)
    assert p.tile_of == "triton"


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_hopper_multiplies_8_bits_as_they_are(dim):
    shape = (2, 8, 4096, dim)
    p = on_gpu(shape, shape, (9, 0), EIGHT_BITS, descale=(1, 1, 1))
    config = hopper.forward(dim, EIGHT_BITS)
    assert p.tile_of == "gluon" and p.tile == (hopper.ROWS * config.consumers, config.block_k)
    assert p.blocks["K"] == config.block_k * dim
    assert on_gpu((8, 32, 1, dim), (8, 4, 4096, dim), (9, 0), EIGHT_BITS).tile_of == "gluon"


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (SHAPE, {"bias": (4096, 4096)}),
        ((2, 8, 4096, 40), {}),
        ((1, 8, 1, 128), {}),
        ((8192, 8, 128), {"cu_q": np.array([0, 4096, 8192]), "cu_k": np.array([0, 4096, 8192])}),
    ],
    ids=["bias", "width", "decode", "packed"],
)
def test_8_bits_are_widened_for_the_portable_kernels(shape, options):
    for capability in ((9, 0), (8, 0)):
        p, wide = (on_gpu(shape, shape, capability, dtype, **options) for dtype in (EIGHT_BITS, "bfloat16"))
        assert p.tile_of == "triton"
        assert p.tile == wide.tile or wide.tile_of == "gluon"


def test_the_named_gpu_counts_not_the_local_one(monkeypatch):
    """With a Hopper GPU in this machine, the tile of another GPU is still that of the portable kernels, for example."""
    for here in ("gluon", "triton"):
        monkeypatch.setattr(dispatch.Backend, "missing", lambda self, here=here: None if self.name == here else "away")
        for capability, there in (((8, 0), "triton"), ((9, 0), "gluon"), (None, here)):
            p = on_gpu(SHAPE, SHAPE, capability)
            assert (p.backend, p.tile_of) == (here, there)
        p = on_gpu(SHAPE, SHAPE, (9, 0), backend=here)
        assert p.backend == p.tile_of == here


def test_the_tile_of_a_gpu_needs_neither_torch_nor_triton():
    code = """
import sys
sys.modules |= dict.fromkeys(("torch", "triton"))  # importing them fails
import flashtile
from flashtile.lab.catalogue.chip import chips
shape = (2, 8, 4096, 128)
print(flashtile.plan(shape, shape, "bfloat16", "cuda", hardware=chips()["h200"].hardware()).tile_of)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "gluon\n", run.stderr


def test_a_row_that_is_not_chosen_has_a_reason(monkeypatch):
    monkeypatch.setattr(dispatch.Backend, "missing", lambda self: None)
    assert on_gpu(SHAPE, SHAPE, (9, 0)).reasons["triton"] == "it could, but comes later in the table"
    monkeypatch.setattr(gluon, "suits", lambda problem: False)
    p = on_gpu(SHAPE, SHAPE, (9, 0))
    assert p.backend == p.tile_of == "triton"
    assert p.reasons["gluon"] == "it could, but another suits this better"


def test_heads_that_share_a_tile_share_its_keys():
    """One query of 8 heads on 2 key heads: the cache is loaded once, not four times."""
    p = on_gpu((1, 8, 1, 128), (1, 2, 4096, 128), (9, 0))
    rows, keys, *_ = tuning.choose("decode", 128, 128, 2, (9, 0), False)
    assert p.tile == (rows // 4, keys) and p.tile_heads == 4
    assert p.tiles["full"] == 2 * 4096 // keys
    assert p.tile_bytes == p.least_bytes
    wide = on_gpu((1, 71, 1, 64), (1, 1, 4096, 64), (9, 0))  # more heads than rows
    rows, keys, *_ = tuning.choose("forward", 64, 64, 2, (9, 0), False)
    assert wide.tile == (1, keys) and wide.tile_heads == min(rows, 71)
    assert wide.tiles["full"] == -(-71 // wide.tile_heads) * 4096 // keys


def test_the_blocks_of_a_tile_do_not_depend_on_the_length():
    """64 x 64 tiles of 16-bit elements, 128 wide: 16 KiB per block."""
    with tuning.override("forward", tuning.Config(64, 64, 4, 2)):
        short, long = (on_gpu((1, 4, n, 128), (1, 4, n, 128), None, "float16") for n in (512, 131072))
    assert short.blocks == long.blocks
    assert [short.blocks[x] >> 10 for x in "QKVSO"] == [16, 16, 16, 16, 32]
