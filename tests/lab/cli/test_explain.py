"""flashtile explain: figures of real models on real GPUs, combinations of options, and JSON."""

import json

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from flashtile import dispatch
from flashtile.backends.gluon import tuning as hopper
from flashtile.backends.triton import tuning
from flashtile.cost.hardware import Hardware, Level, Rates
from flashtile.host import machine
from flashtile.lab.bench import rates
from flashtile.lab.catalogue import chips, models
from flashtile.lab.cli.app import app
from flashtile.numerics.dtypes import ITEMSIZE

GIB = 1 << 30


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["explain", *arguments])
    assert result.exit_code == code, result.output
    return result


def found(*arguments):
    return json.loads(run(*arguments, "--json").stdout)


def said(*arguments):
    return " ".join(run(*arguments).stdout.split())


@pytest.fixture(autouse=True)
def a_machine(monkeypatch):
    """Replace measuring, which takes a second and has its own tests."""
    here = Hardware(
        "this one", Rates(2e11, 4e10), True, 8 << 30, (Level("L1", 1 << 16, 4e11), Level("memory", 8 << 30, 4e10))
    )
    monkeypatch.setattr(rates, "this_machine", lambda dtype: here)
    monkeypatch.setattr(machine, "gpu", lambda: None)


def test_shapes():
    told = found("--q", "1, 8, 1k, 64", "--k", "1x2x1kx64", "--gpu", "none")
    call = told["call"]
    assert call["flops"] == 4 * 8 * 1024 * 1024 * 64 and call["floor"] is None
    assert call["kv_bytes"] == 2 * 2 * 1024 * 64 * 4
    assert told["model"] is told["hardware"] is None
    causal, window = (
        found("--q", "64,8", "--gpu", "none", *more)["call"] for more in (["--causal"], ["--window", "5"])
    )
    assert causal["pairs"] == 64 * 65 // 2 and window["pairs"] == 64 * 5 - (4 + 3 + 2 + 1)


def test_masks():
    told = found("--q", "4,1024,8", "--mask", "prefix LM", "--gpu", "none")
    prefix = 1024 * 3 // 8
    assert told["call"]["pairs"] == 4 * (prefix * prefix + sum(range(prefix + 1, 1025)))
    causal = [found("--q", "64,8", *more, "--gpu", "none")["call"] for more in (["--mask", "causal"], ["--causal"])]
    assert causal[0] == causal[1]
    assert "as many queries as keys" in run("--q", "64,8", "--k", "65,8", "--mask", "documents", code=2).output
    assert "defines all of it" in " ".join(run("--q", "64,8", "--causal", "--mask", "documents", code=2).output.split())
    assert "did you mean" in run("--q", "64,8", "--mask", "document", code=2).output


@pytest.mark.parametrize(
    ("model", "a_token", "gib_at_128k"),
    [
        ("llama-3-8b", 131_072, 16),
        ("llama-3-70b", 327_680, 40),
        ("llama-3-405b", 516_096, 63),
        ("llama-2-7b", 524_288, 64),
    ],
)
def test_models(model, a_token, gib_at_128k):
    told = found("--model", model, "--context", "128k", "--gpu", "h200")
    assert told["model"]["kv_bytes_a_token"] == a_token
    assert told["model"]["kv_bytes"] == gib_at_128k * GIB
    assert told["call"]["score_bytes"] == models()[model].heads * 32 * GIB
    assert told["call"]["floor"]["bound"] == "compute"
    assert told["hardware"]["rates"]["flops"] / told["hardware"]["rates"]["bytes"] == pytest.approx(206, abs=1)


@pytest.fixture
def a_tile():
    """Fix the tile, so that these figures do not change whenever the kernels are tuned."""
    with tuning.override("forward", tuning.Config(128, 128, 8, 3)):
        yield


def test_what_a_reader_sees(a_tile):
    text = said("--model", "llama-3-8b", "--context", "128k", "--gpu", "h200")
    for words in (
        "32 GiB that are never built",
        "131072 x 131072 13108 x 13108 1311 x 1311",
        "128 queries x 128 keys",
        "Q 32 KiB, K 32 KiB, V 32 KiB of 227 KiB SRAM",
        "score matrix never built │ 1 TiB",
        "statistics kept (lse) │ 16 MiB",
        "140.7 TFLOP; backward 351.8 TFLOP",
        "limited by │ arithmetic: above 206.1 FLOPs per byte",
        "16,760,832 skipped",
        "prompt tokens per second, at most",
        "KV cache per token │ 128 KiB",
        "KV cache │ 16 GiB",
        "11.3% of 141 GiB",
        "SRAM │ 33 MiB │ 30.92 TB/s │ 6.44",
        "HBM │ 141 GiB │ 4.8 TB/s │ 1",
    ):
        assert words in text, words


def test_several_gpus():
    one = found("--model", "llama-3-70b", "--context", "128k", "--gpus", "16")
    assert one["hardware"]["name"] == "NVIDIA H200 SXM"
    methods = {x["method"]: x for x in one["call"]["parallel"]}
    assert [*methods] == ["gather", "ring", "ulysses", "ulysses 8 x ring 2"]
    assert methods["ring"]["sent"] == 15 * (128 << 10) // 16 * 8 * 2 * 128 * 2
    assert methods["ring"]["held"] < methods["gather"]["held"] and methods["ring"]["ideal"] == pytest.approx(1)
    slow = found("--model", "llama-3-70b", "--context", "128k", "--gpus", "16", "--cluster", "ethernet")
    assert slow["hardware"]["name"] == chips()["l40s"].name
    contiguous = found("--q", "1,8,4k,64", "--causal", "--gpus", "8", "--shards", "contiguous")["call"]["parallel"][0]
    assert contiguous["balance"] == pytest.approx(15 / 8, rel=1e-2)
    text = said("--model", "llama-3-70b", "--context", "1m", "--gpus", "64")
    assert "zigzag over 64 GPUs" in text and "upper bound" in text
    assert "upper bound" not in said("--model", "llama-3-70b", "--context", "32k", "--gpus", "8")


def test_decoding():
    told = found("--model", "llama-3-8b", "--decode", "--gpu", "h200")
    call = told["call"]
    assert call["q_shape"][2] == 1 and call["floor"]["bound"] == "memory"
    assert call["intensity"] == pytest.approx(4, rel=0.01)  # query heads on a key head
    assert told["model"]["tokens_a_second"] == pytest.approx(4.8e12 / GIB, rel=0.01)
    text = said("--model", "llama-3-8b", "--decode", "--gpu", "h200")
    assert "least time per token" in text and "new tokens per second, at most" in text and "floor" not in text.lower()


@pytest.mark.parametrize(("gpu", "dtype"), [("a100-80", "bfloat16"), ("h200", "float32"), ("mi300x", "bfloat16")])
def test_the_tile_is_the_one_that_gpu_gets(gpu, dtype):
    call = found("--model", "llama-3-8b", "--gpu", gpu, "--dtype", dtype)["call"]
    wanted = tuning.choose("forward", 128, 128, ITEMSIZE[dtype], chips()[gpu].capability, False)
    assert tuple(call["tile"]) == wanted[:2] and call["tile_of"] == "triton" and call["device"] == "cuda"


def test_hopper_has_kernels_of_its_own():
    call = found("--model", "llama-3-8b", "--gpu", "h200")["call"]
    wanted = hopper.forward(128)
    assert call["tile"] == [hopper.ROWS * wanted.consumers, wanted.block_k] and call["tile_of"] == "gluon"
    assert found("--model", "llama-3-8b", "--decode", "--gpu", "h200")["call"]["tile_of"] == "triton"


def test_another_kernel_may_run_here(monkeypatch):
    """For a GPU of another kind than this machine's."""
    monkeypatch.setattr(dispatch.Backend, "missing", lambda self: "away" if self.name == "gluon" else None)
    assert "gluon, but triton on this machine" in said("--model", "llama-3-8b", "--gpu", "h200")
    monkeypatch.setattr(dispatch.Backend, "missing", lambda self: "away")
    assert "gluon, but not on this machine" in said("--model", "llama-3-8b", "--gpu", "h200")


def test_local_reasons_do_not_apply_to_a_named_gpu(monkeypatch):
    monkeypatch.setattr(dispatch.Backend, "missing", lambda self: "away" if self.device == "cuda" else None)
    assert "away" not in said("--model", "llama-3-8b", "--gpu", "h200")
    monkeypatch.setattr(machine, "gpu", lambda: "NVIDIA H200")
    assert "not gluon: away" in said("--model", "llama-3-8b")


def test_long_times_are_minutes():
    assert "least time for the prompt │ 19 min" in said("--model", "llama-3-8b", "--context", "2m", "--gpu", "h200")


def test_a_misspelt_name_gets_a_suggestion():
    assert "got 'llama3'; did you mean llama-3-8b?" in run("--model", "llama3", code=2).stderr
    assert "did you mean h100?" in run("--model", "gpt-2", "--gpu", "h10", code=2).stderr
    assert "did you mean" not in run("--model", "abacus", code=2).stderr


def test_here_is_measured():
    told = found("--q", "1,8,256,64")
    assert told["hardware"]["measured"] and told["hardware"]["levels"][0]["name"] == "L1"
    assert told["call"]["device"] == "cpu" and told["call"]["floor"]["rates"] == {"flops": 2e11, "bytes": 4e10}
    text = said("--q", "1,8,256,64", "--gpu", "cpu")
    assert "best rates just measured" in text and "L1 │ 64 KiB │ 400 GB/s │ 10" in text


def test_here_is_the_gpu_if_there_is_one(monkeypatch):
    monkeypatch.setattr(machine, "gpu", lambda: "NVIDIA L40S")
    assert found("--q", "1,8,256,64")["hardware"]["name"] == chips()["l40s"].name
    assert found("--q", "1,8,256,64", "--gpu", "cpu")["hardware"]["name"] == "this one"
    monkeypatch.setattr(machine, "gpu", lambda: "Voodoo 2")
    result = run("--q", "1,8,256,64", "--json")
    assert json.loads(result.stdout)["hardware"]["name"] == "this one" and "Voodoo 2" in result.stderr


def test_numbers_instead_of_a_name():
    told = found("--model", "gpt-2", "--gpu-flops", "500T", "--gpu-bandwidth", "2e12", "--gpu-memory", "0.001")
    assert told["hardware"]["rates"] == {"flops": 5e14, "bytes": 2e12}
    assert told["hardware"]["memory"] == int(0.001 * GIB) and told["model"]["gpus"] == 282  # 288 MiB
    changed = found("--model", "gpt-2", "--gpu", "h200", "--gpu-bandwidth", "1T")["hardware"]
    assert changed["rates"] == {"flops": 989.4e12, "bytes": 1e12} and changed["memory"] == 141 * GIB


def test_a_cache_that_outgrows_a_gpu():
    text = said("--model", "llama-3-70b", "--context", "1m", "--decode", "--gpu", "h200")
    assert "it takes 3 of them" in text and "merge() merges these exactly" in text
    assert "was made for 131,072 tokens" in text
    assert "merge()" not in said("--model", "llama-3-70b", "--context", "128k", "--decode", "--gpu", "h200")


def test_latent_attention_is_described():
    args = ("--model", "deepseek-v3", "--context", "64k", "--gpu", "h200")
    told = found(*args, "--decode")
    assert told["call"] is None and told["picture"] == [] and told["model"]["layers"][0]["plan"] is None
    assert "576 numbers per token" in said(*args) and "no kernel here supports" in said(*args, "--decode")


def test_the_picture_is_in_the_json(a_tile):
    pictures = found("--model", "llama-3-8b", "--context", "128k", "--gpu", "h200")["picture"]
    assert [p["queries"] for p in pictures] == [131072, 13108, 1311]
    assert pictures[-1]["lines"][-1] == "-" * 18 + "##"


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--q", "1,a"),
        ("--q", "1,2,x,4"),
        ("--q", "1,2,3,4,5"),
        ("--q", "64"),
        ("--q", "4,4", "--model", "gpt-2"),
        ("--q", "4,4", "--k", "4,5"),
        ("--q", "4,4", "--dtype", "int8"),
        ("--q", "4,4", "--gpu", "abacus"),
        ("--q", "4,4", "--gpu-flops", "1T"),
        ("--q", "4,4", "--gpu-flops", "1T", "--gpu-bandwidth", "fast"),
        ("--q", "4,4", "--gpu-flops", "0", "--gpu-bandwidth", "1T"),
        ("--q", "4,4", "--backend", "abacus"),
        ("--model", "abacus"),
        ("--model", "gpt-2", "--causal"),
        ("--model", "gpt-2", "--window", "4"),
        ("--model", "llama-3-8b", "--context", "long"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments):
    run(*arguments, "--json", code=2)


LLAMA = ("--model", "llama-3-8b", "--gpu", "h200")


@pytest.mark.parametrize("memory", ["0", "-1", "1e-12", "nan", "inf"])
def test_a_gpu_has_some_memory(memory):
    said = f"--gpu-memory: expected a number of GiB above 0, got {memory}"
    assert said in run(*LLAMA, "--gpu-memory", memory, code=2).stderr


@pytest.mark.parametrize("more", [(), ("--decode",)])
def test_a_context_has_a_token(more):
    assert "context: expected 1 token or more, got 0" in run(*LLAMA, *more, "--context", "0", code=2).stderr
    assert found(*LLAMA, *more, "--context", "1")["model"]["tokens_a_second"] > 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--q", "4,4", "--decode"), "--decode"),
        (("--q", "4,4", "--cluster", "dgx-h100"), "--cluster"),
        ((*LLAMA, "--decode", "--gpus", "8"), "--gpus"),
        (("--q", "4,4", "--gpus", "8", "--shards", "zig"), "--shards"),
        (("--q", "4,4", "--context", "8k"), "--context"),
        ((*LLAMA, "--k", "1,2,3,4"), "--k: "),
        ((*LLAMA, "--causal"), "--causal"),
        (("--q", "4,4", "--gpu", "none", "--gpu-flops", "5T"), "--gpu-flops"),
        (("--q", "4,4", "--gpu", "none", "--gpu-bandwidth", "5T"), "--gpu-bandwidth"),
        (("--model", "gpt-2", "--gpu", "none", "--gpu-memory", "80"), "--gpu-memory"),
    ],
)
def test_what_does_not_apply_is_refused(arguments, named):
    assert named in run(*arguments, code=2).stderr


def test_a_context_has_a_default():
    assert found(*LLAMA)["model"]["context"] == 8192
