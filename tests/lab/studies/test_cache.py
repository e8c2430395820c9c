"""cache.py: bytes per token of real models, when a GPU is full, and the two independent savings."""

import numpy as np
import pytest

import flashtile
from flashtile.lab.studies import cache
from flashtile.lab.studies.study import samples


@pytest.fixture(scope="module")
def record():
    return cache.compute(quick=True)


def test_bytes_per_token(record):
    per_token = {c.model: c.per_token for c in record.caches}
    assert per_token["llama-2-7b"] == 524_288 and per_token["llama-3-8b"] == 131_072
    llama = next(c for c in record.caches if c.model == "llama-3-8b")
    assert llama.fills * llama.per_token <= record.gpu_bytes < (llama.fills + 1) * llama.per_token
    assert llama.gpus == -(-llama.per_token * record.long // record.gpu_bytes) == 2


def test_grouped_heads_shrink_the_cache_and_tiles_store_no_scores(record):
    by = {(p.way, p.kv_heads): p for p in record.prompts}
    assert by["standard", 32].cache == 4 * by["standard", 8].cache == 4 * by["flashtile", 8].cache
    assert by["standard", 32].scores == by["standard", 8].scores == 32 * record.tokens**2 * 4
    assert by["flashtile", 32].scores == by["flashtile", 8].scores == 0
    assert record.before is by["standard", 32] and record.after is by["flashtile", 8]
    assert "4 times smaller" in cache.findings(record)[2]


def test_the_standard_way_computes_the_same():
    q, k, v = samples((4, 8, 16), (2, 8, 16), (2, 8, 16))
    np.testing.assert_allclose(cache.standard(q, k, v), flashtile.standard_attention(q, k, v), atol=1e-7)


def test_decoding_reads_the_cache_once(record):
    d = record.decodes[-1]
    assert d.bytes == 2 * 2 * d.tokens * 128 * 4 and d.bytes_per_second == pytest.approx(d.bytes / d.seconds)


def test_it_can_be_drawn(record):
    pytest.importorskip("matplotlib")
    assert len(cache.draw(record).axes) == 2
