"""budget.py: whole models, kinds of layers, latent caches, and the number of GPUs for a cache."""

import json

import pytest

from flashtile.backends.gluon import tuning
from flashtile.band import Band
from flashtile.cost.hardware import Hardware, Rates
from flashtile.cost.traffic import visible_pairs
from flashtile.lab.budget import budget
from flashtile.lab.catalogue import chips, length, models

H200 = chips()["h200"].hardware()


def of(name, context, **how):
    return budget(models()[name], length(context), device="cuda", hardware=H200, **how)


def test_a_prompt_of_llama_3_8b():
    found = of("llama-3-8b", "8k")
    assert found.kv_bytes == 1 << 30 and found.gpus == 1
    assert found.flops == pytest.approx(32 * 549_755_813_888, rel=2 / 8192)
    assert found.flops == 32 * 32 * (4 * 128) * (8192 * 8193 // 2)
    (layers,) = found.layers
    config = tuning.forward(128)
    assert layers.count == 32 and layers.plan.tile_of == "gluon"
    assert layers.plan.tile == (tuning.ROWS * config.consumers, config.block_k)
    assert found.seconds == found.flops / H200.rates.flops
    assert found.tokens_a_second == 8192 / found.seconds


def test_decoding_is_bound_by_reading_the_cache():
    found = of("llama-3-8b", "128k", decode=True)
    assert found.least_bytes == pytest.approx(found.kv_bytes, rel=1e-4) and found.least_bytes > found.kv_bytes
    assert found.seconds == pytest.approx(found.least_bytes / 4.8e12)
    assert found.tokens_a_second == pytest.approx(4.8e12 / (16 << 30), rel=1e-3)


def test_layers_with_a_window_are_counted_separately():
    found = of("gemma-3-27b", "32k")
    whole, local = found.layers
    assert (whole.count, whole.window, local.count, local.window) == (10, None, 52, 1024)
    assert local.flops == 32 * 4 * 128 * visible_pairs(Band(1023, 0), 32768, 32768)
    assert whole.flops == pytest.approx(32 * 2 * 32768**2 * 128, rel=1e-4)
    assert found.flops == 10 * whole.flops + 52 * local.flops
    assert [kind.window for kind in of("mistral-7b-v0.1", "32k").layers] == [4096]


def test_latent_decoding_has_counts_but_no_kernel():
    found = of("deepseek-v3", "64k", decode=True)
    (layers,) = found.layers
    assert layers.plan is None
    assert layers.flops == 128 * 65536 * 2 * (576 + 512)
    assert layers.least_bytes == 65536 * 576 * 2 + 128 * ((576 + 512) * 2 + 4)
    assert of("deepseek-v3", "4k").layers[0].plan.v_shape == (1, 128, 4096, 128)


@pytest.mark.parametrize(("context", "gpus"), [("128k", 1), ("512k", 2), ("1m", 3)])
def test_how_many_gpus_hold_the_cache(context, gpus):
    found = of("llama-3-70b", context, decode=True)  # 40, 160 and 320 GiB; an H200 has 141
    assert found.gpus == gpus
    assert found.shared_seconds == found.seconds / gpus


def test_without_hardware_there_are_counts_only():
    found = budget(models()["gpt-2"], 1024)
    assert found.seconds is found.gpus is found.tokens_a_second is found.shared_seconds is None
    assert found.kv_bytes == 36 << 20
    assert budget(models()["gpt-2"], 1024, hardware=Hardware("fast", Rates(1e15, 1e15))).gpus is None


def test_to_dict_is_json():
    found = json.loads(json.dumps(of("gemma-3-4b", "2k").to_dict()))
    assert found["layers"][1]["plan"]["band"] == {"left": 1023, "right": 0, "offset": 0}
    assert found["model"]["window"] == 1024 and found["tokens_a_second"] > 0
