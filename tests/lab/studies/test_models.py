"""Study 6: the sizes of real models."""

import pytest

from flashtile.numerics.dtypes import ITEMSIZE
from tests.lab.studies.records import record, told


@pytest.fixture(scope="module")
def found():
    return record("models")


@pytest.fixture(scope="module")
def at(found):
    return {c.n: c for c in found.contexts}


KIB, MIB, GIB, TIB = (1 << p for p in (10, 20, 30, 40))


def test_contexts(at, found):
    assert {8 << 10, 32 << 10, 128 << 10, 1 << 20} <= set(at)
    assert found.dtype == "float16" and ITEMSIZE[found.dtype] == 2


def test_scores_of_one_head(at):
    assert [at[n << 10].scores / GIB for n in (8, 32, 128, 1024)] == [0.125, 2, 32, 2048]


def test_tiles_at_128k(at):
    long = at[128 << 10]
    assert long.blocks == 16 * KIB
    assert long.results == 34_078_720 and round(long.results / 1e6) == 34
    assert long.output == 32 * MIB and long.statistics == 512 * KIB
    text = told("models")
    assert "32 GiB per head and layer" in text and "16 KiB of blocks" in text and "34 MB" in text


def test_a_tile_does_not_depend_on_the_context(found):
    assert found.holds and {c.sram for c in found.contexts} == {2 * (4 * 64 * 128 + 2 * 64 * 64) + 4 * 3 * 64}


SCORES = {  # GiB a layer, all heads, at 8K, 32K, 128K, 1M
    "llama-3-8b": (4, 64, 1024, 65536),
    "llama-3-70b": (8, 128, 2048, 131072),
    "llama-3-405b": (16, 256, 4096, 262144),
    "llama-2-7b": (4, 64, 1024, 65536),
}
CACHES = {
    "llama-3-8b": (1, 4, 16, 128),
    "llama-3-70b": (2.5, 10, 40, 320),
    "llama-3-405b": (3.9375, 15.75, 63, 504),
    "llama-2-7b": (4, 16, 64, 512),
}


def test_real_models(found):
    found = {m.model: {layer.n: layer for layer in m.contexts} for m in found.models}
    for name, scores in SCORES.items():
        layers = [found[name][n << 10] for n in (8, 32, 128, 1024)]
        assert tuple(layer.scores / GIB for layer in layers) == scores
        assert tuple(layer.kv_cache / GIB for layer in layers) == CACHES[name]
    at = found["llama-3-8b"][128 << 10]
    assert at.results == 32 * (32 * MIB) + 16 * MIB, "out, and an lse of 16 MiB a layer"


def test_gpus_have_memory(found):
    assert all(24 * GIB <= room < TIB for room in found.memories.values())
