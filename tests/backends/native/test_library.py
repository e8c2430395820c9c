"""Which build of the C++ core a machine loads."""

from __future__ import annotations

import pytest

from flashtile.backends.native import library

V3 = {"abm", "avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (V4 | {"avx512_bf16"}, ["x86-64-v4-bf16", "x86-64-v4", "x86-64-v3", "generic"]),
        (V4, ["x86-64-v4", "x86-64-v3", "generic"]),
        (V4 - {"avx512vl"} | {"avx512_bf16"}, ["x86-64-v3", "generic"]),
        (V3 | {"avx512_bf16"}, ["x86-64-v3", "generic"]),
        (V4 - {"fma"}, ["generic"]),
        (set(), ["generic"]),
    ],
)
def test_each_build_needs_what_those_below_it_need(monkeypatch, flags, wanted):
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(library, "_cpu_flags", lambda: flags)
    assert library.candidates() == wanted


@pytest.mark.parametrize(("machine", "wanted"), [("arm64", "aarch64"), ("aarch64", "aarch64"), ("riscv64", "generic")])
def test_other_processors(monkeypatch, machine, wanted):
    monkeypatch.setattr(library.platform, "machine", lambda: machine)
    assert library.candidates() == [wanted]
