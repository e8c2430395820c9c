"""The CUDA lesson: its source compiles with nvcc and NVRTC, and is right when a CPU emulates the GPU."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from ctypes import c_float, c_int, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashtile
from flashtile.lab.lessons import cuda
from flashtile.lab.lessons import cuda_attention as lesson
from flashtile.lab.lessons.lesson import Unavailable
from flashtile.lab.lessons.text import Say

HERE = Path(__file__).parent


@pytest.mark.parametrize("causal", [False, True])
def test_nvcc_compiles_it(causal: bool, tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("there is no nvcc")
    defines = [f"-D{name}={value}" for name, value in lesson.defines(causal).items()]
    command = ["nvcc", "-arch=sm_90", "-cubin", "-Werror=all-warnings", "-Xptxas=-v", *defines]
    done = subprocess.run([*command, "-o", tmp_path / "a.cubin", lesson.SOURCE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores" in done.stderr, "a query and its output fit into registers"


def test_nvrtc_compiles_it() -> None:
    try:
        code = cuda.compile_cuda(lesson.SOURCE.read_text(), "sm_90", **lesson.defines(True))
        with pytest.raises(RuntimeError, match=r"lesson.cu\(1\): error"):
            cuda.compile_cuda("nonsense;", "sm_90")
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert code.startswith(b"\x7fELF")


def a_gpu_that_is_a_cpu(folder: Path, causal: bool, threads: int) -> str:
    """Compile libcuda.cpp as a library, with fewer threads per block than on a GPU."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    defines = [f"-D{name}={value}" for name, value in {**lesson.defines(causal), "BLOCK_Q": threads}.items()]
    path = str(folder / f"libcuda-{causal}.so")
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", f"-I{lesson.SOURCE.parent}", *defines]
    done = subprocess.run([compiler, *options, "-o", path, HERE / "libcuda.cpp"], capture_output=True, text=True)
    if "c++20" in done.stderr or "barrier" in done.stderr:
        pytest.skip("this g++ is too old")
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.skipif(platform.system() != "Linux", reason="a driver's library has this name on Linux only")
@pytest.mark.parametrize("causal", [False, True])
def test_compiled_loaded_and_launched(causal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, heads, n = 32, 2, 70
    library = ctypes.CDLL(a_gpu_that_is_a_cpu(tmp_path, causal, threads))
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda name: {"libcuda.so.1": library}[name])
    compiled: list[Any] = []
    monkeypatch.setattr(cuda, "compile_cuda", lambda *a, **defines: compiled.append((a, defines)) or b"\x7fELF")
    cuda.driver.cache_clear()
    try:
        kernel = cuda.Kernel("the source", "attention", CAUSAL=int(causal))
        assert compiled == [(("the source", "sm_90"), {"CAUSAL": int(causal)})]
        assert kernel.resources() == {"shared": 10, "registers": 40, "spilled": 30}

        rng = np.random.default_rng(42)
        q, k, v = (rng.standard_normal((heads, n, lesson.DIM)).astype(np.float32) for _ in range(3))
        out = np.full_like(q, np.nan)
        pointers = [c_void_p(x.ctypes.data) for x in (q, k, v, out)]
        kernel.launch((-(-n // threads), heads), threads, *pointers, c_int(n), c_float(lesson.DIM**-0.5))
        np.testing.assert_allclose(out, flashtile.standard_attention(q, k, v, causal=causal), atol=5e-6)

        with pytest.raises(RuntimeError, match="CUDA driver: something is wrong"):
            kernel.launch((1, 1), threads + 1)
        with pytest.raises(RuntimeError, match="something is wrong"):
            cuda.Kernel("the source", "another")
    finally:
        cuda.driver.cache_clear()


def test_without_a_driver_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(cuda.ctypes, "CDLL", missing)
    cuda.driver.cache_clear()
    with pytest.raises(Unavailable, match="needs an NVIDIA GPU"):
        lesson.run(Say(lambda line: None))


def test_without_nvrtc_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_find_nvrtc", lambda: None)
    cuda._nvrtc.cache_clear()
    with pytest.raises(Unavailable, match="nvidia-cuda-nvrtc"):
        cuda.compile_cuda("", "sm_90")


def test_the_newest_nvrtc_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12", "cu13/lib/libnvrtc-builtins.so.13.0"):
        (tmp_path / "nvidia" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "nvidia" / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert cuda._find_nvrtc() == str(tmp_path / "nvidia/cu13/lib/libnvrtc.so.13")


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    record = lesson.run(Say(lambda line: None))
    assert record["holds"] and record["resources"]["spilled"] == 0
    assert record["resources"]["shared"] == 2 * lesson.BLOCK_K * lesson.DIM * 4
