"""catalogue/model.py: KV caches of real models, to the byte."""

import pytest

from flashtile.checks.shapes import MAX_DIM
from flashtile.lab.catalogue import Model, length, models

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "a_token", "gib"),
    [
        ("llama-3-8b", 131_072, (1, 4, 16, 128)),
        ("llama-3-70b", 327_680, (2.5, 10, 40, 320)),
        ("llama-3-405b", 516_096, (3.9375, 15.75, 63, 504)),
        ("llama-2-7b", 524_288, (4, 16, 64, 512)),
    ],
)
def test_the_kv_cache_of_full_attention(name, a_token, gib):
    model = models()[name]
    assert model.kv_bytes_a_token("bfloat16") == a_token
    assert [model.kv_bytes(length(n), "bfloat16") / GIB for n in ("8k", "32k", "128k", "1m")] == list(gib)
    assert model.kv_bytes(1000, "float32") == 2 * model.kv_bytes(1000, "float16") == 2000 * a_token


def test_grouped_queries_shrink_it_by_their_group():
    """With a key head for every query head, Llama 2 70B would keep eight times as much."""
    grouped = models()["llama-2-70b"]
    alone = Model(grouped.layers, grouped.heads, grouped.heads, grouped.dim, grouped.context)
    assert alone.kv_bytes(4096, "float16") == 8 * grouped.kv_bytes(4096, "float16")


def test_a_layer_keeps_no_more_than_its_window():
    model = models()["gemma-3-27b"]
    a_layer = 2 * 16 * 128 * 2
    assert (model.layers, model.local, model.window) == (62, 52, 1024)
    assert model.kv_bytes(1000, "bfloat16") == 62 * 1000 * a_layer == 1000 * model.kv_bytes_a_token("bfloat16")
    assert model.kv_bytes(100_000, "bfloat16") == (10 * 100_000 + 52 * 1024) * a_layer


def test_latent_attention_keeps_one_vector_per_token():
    model = models()["deepseek-v3"]
    assert model.cached_numbers == 512 + 64
    assert model.kv_bytes_a_token("bfloat16") == 61 * 576 * 2 == 70_272
    assert model.shapes(7, 9) == ((1, 128, 7, 192), (1, 128, 9, 192)) and model.v_shape(9) == (1, 128, 9, 128)
    written_out = 61 * 128 * (192 + 128) * 2  # had the cache kept what the heads see
    assert written_out / model.kv_bytes_a_token("bfloat16") == pytest.approx(71.1, abs=0.1)


@pytest.mark.parametrize("name", models())
def test_every_model_is_consistent(name):
    m = models()[name]
    assert m.heads % m.kv_heads == 0 and 0 <= m.local <= m.layers and 1 <= m.dim_v <= m.dim <= MAX_DIM
    assert (m.window is None) == (m.local == 0) and m.context >= 1024
    assert m.latent is None or m.dim == m.dim_v + m.rope


def test_lengths():
    assert [length(x) for x in ("7", "8k", "8K", "1m")] == [7, 8192, 8192, 1 << 20]
    for wrong in ("", "k", "8 k", "-1", "8kk", "1.5k"):
        with pytest.raises(ValueError, match="expected a length"):
            length(wrong)
