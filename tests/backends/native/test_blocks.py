"""The numbers in backends/native/blocks.py are those of the C++ sources."""

from __future__ import annotations

import re

import pytest

from flashtile.backends.native import blocks
from flashtile.checks.shapes import MAX_DIM
from flashtile.cost.stand_ins import stand_in
from flashtile.problem import describe
from tests.tools.tree import SOURCE

CORE = SOURCE / "backends" / "native" / "core"
MACROS = {"__AVX512F__": "x86-64-v4", "__AVX2__": "x86-64-v3", "__aarch64__": "aarch64", "": "generic"}


def test_lanes_are_those_of_vectors_h():
    text = (CORE / "vectors.h").read_text()
    matches = re.findall(
        r"#(?:if|elif|else)(?: defined\((\w+)\))?\n"
        r"constexpr int VECTOR_BYTES = (\d+), NV = (\d+), REGISTERS = (\d+);",
        text,
    )
    found = {MACROS[macro]: blocks.Lanes(*map(int, numbers)) for macro, *numbers in matches}
    assert found | {"x86-64-v4-bf16": found["x86-64-v4"]} == blocks.LANES
    assert "constexpr int LANES = NV * W<R>;" in text


@pytest.mark.parametrize(
    ("file", "name", "keys"),
    [("forward.cpp", "BLOCK_KEYS", blocks.FORWARD_KEYS), ("decode.cpp", "BLOCK_KEYS", blocks.DECODE_KEYS)],
)
def test_keys_of_a_block(file, name, keys):
    assert re.findall(rf"^constexpr int {name} = (\d+);", (CORE / file).read_text(), re.MULTILINE) == [str(keys)]


def test_the_largest_head_dim():
    assert re.findall(r"FT_MAX_DIM = (\d+)", (CORE / "flashtile.h").read_text()) == [str(MAX_DIM)]
    assert "MOST = vectors_of<R>(FT_MAX_DIM) * W<R>;" in (CORE / "decode.cpp").read_text()


def test_which_calls_decode():
    text = (CORE / "decode.cpp").read_text()
    assert "return p.q_len <= W<R> / 4 || p.q_heads / p.kv_heads * p.q_len <= W<R>;" in text
    assert "heads_per_set(clip(W<R> / std::max<int64_t>(p.q_len, 1), 1, group))" in text


def test_tasks_of_a_forward_pass():
    text = (CORE / "forward.cpp").read_text()
    assert f"constexpr int MAX_GROUPS = {blocks.MAX_GROUPS};" in text
    assert f"constexpr int L2_SHARE = {blocks.L2_SHARE >> 10} << 10;" in text
    assert f"constexpr int MIN_SPLIT = {blocks.MIN_SPLIT}, ENOUGH_TASKS = {blocks.ENOUGH_TASKS};" in text
    for line in (
        "splits = units < 1 || units >= ENOUGH_TASKS ? 1 : "
        "clip(p.kv_len / MIN_SPLIT, 1, ceil_div(ENOUGH_TASKS, units));",
        "const int64_t bytes = sizeof(R) * LANES<R> * (p.dim + p.v_dim);",
        "groups_per_task = splits > 1 ? 1 : clip(L2_SHARE / bytes, 1, MAX_GROUPS);",
        "while (groups_per_task > 1 && heads * ceil_div(groups, groups_per_task) < 4 * p.threads) groups_per_task--;",
    ):
        assert line in text


def tile(heads, kv_heads, n_q, n_k, dim, dtype, isa, threads):
    q, k = stand_in((1, heads, n_q, dim), dtype), stand_in((1, kv_heads, n_k, dim), dtype)
    return blocks.tile(describe(q, k, k, threads=threads), isa=isa)


@pytest.mark.parametrize(
    ("heads", "n_q", "n_k", "dim", "dtype", "isa", "threads", "wanted"),
    [
        (8, 4096, 4096, 64, "float32", "x86-64-v4", 2, (192, 192, 1, 48)),  # 96 KiB / (48 x 128 x 4 B): 4 groups
        (8, 4096, 4096, 128, "float32", "x86-64-v4", 2, (96, 192, 1, 48)),
        (8, 4096, 4096, 16, "bfloat16", "x86-64-v3", 2, (192, 192, 1, 24)),  # at most 8 groups
        (8, 4096, 4096, 64, "float64", "x86-64-v4", 2, (96, 192, 1, 24)),
        (8, 4096, 4096, 64, "float32", "aarch64", 2, (128, 192, 1, 16)),
        (1, 480, 480, 64, "float32", "x86-64-v4", 2, (48, 192, 1, 48)),  # 10 groups, for at least 8 tasks
        (1, 960, 960, 64, "float32", "x86-64-v4", 2, (96, 192, 1, 48)),
        (1, 960, 960, 64, "float32", "x86-64-v4", 9, (48, 192, 1, 48)),
        (1, 960, 4096, 64, "float32", "x86-64-v4", 1, (48, 192, 1, 48)),  # 20 groups: the keys are split
        (8, 17, 4096, 64, "float32", "x86-64-v4", 2, (48, 192, 1, 48)),
    ],
)
def test_tiles(heads, n_q, n_k, dim, dtype, isa, threads, wanted):
    assert tile(heads, heads, n_q, n_k, dim, dtype, isa, threads) == wanted


@pytest.mark.parametrize(
    ("heads", "kv_heads", "n_q", "dtype", "wanted"),
    [
        (32, 8, 1, "float32", (1, 64, 4)),
        (64, 2, 1, "float32", (1, 64, 16)),
        (8, 8, 4, "float32", (4, 64, 1)),
        (8, 8, 4, "float64", (4, 64, 1)),
    ],
)
def test_few_queries(heads, kv_heads, n_q, dtype, wanted):
    assert tile(heads, kv_heads, n_q, 4096, 64, dtype, "x86-64-v4", 2)[:3] == wanted
    assert tile(8, 1, 4, 4096, 64, "float64", "x86-64-v4", 2).keys == blocks.FORWARD_KEYS
