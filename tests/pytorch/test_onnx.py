"""ONNX: exported calls, run by onnxruntime, give our results; what ONNX cannot express is refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
onnxscript = pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

import flashtile as ft  # noqa: E402
from flashtile.compat.sdpa import scaled_dot_product_attention  # noqa: E402
from flashtile.numerics.dtypes import widen  # noqa: E402
from flashtile.pytorch.onnx import table  # noqa: E402
from flashtile.pytorch.operands import FIELDS, Operands, operands  # noqa: E402
from flashtile.pytorch.operators import ATTENTION  # noqa: E402
from tests.support.grid import Call  # noqa: E402
from tests.test_random_problems import calls  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's and onnxscript's own
OPSETS = pytest.mark.parametrize("opset", [23, 20], ids=["Attention", "MatMul and Softmax"])


CALLS: dict[str, Callable[..., Any]] = {
    "plain": lambda x: ft.attention(x["q"], x["k"], x["v"]),
    "causal": lambda x: ft.attention(x["q"], x["k"], x["v"], causal=True, return_lse=True),
    "square": lambda x: ft.attention(x["k"], x["k"], x["v"], causal=True),
    "upper left": lambda x: scaled_dot_product_attention(x["k"], x["k"], x["v"], is_causal=True, scale=0.3),
    "softcap": lambda x: ft.attention(x["q"], x["k"], x["v"], softcap=2.0, mask=x["mask"], return_lse=True),
    "sink": lambda x: ft.attention(x["q"], x["k"], x["v"], sink=x["sink"], window=(3, 1), return_lse=True),
    "bias": lambda x: ft.attention(x["q"], x["k"], x["v"], bias=x["bias"], kv_lengths=x["lengths"], causal=True),
    "spans": lambda x: ft.attention(x["q"], x["k"], x["v"], spans=ft.Spans.of(x["limits"]), alibi=x["slopes"]),
    "rank 3": lambda x: ft.attention(x["q"][0], x["k"][0], x["v"][0], causal=True, return_lse=True),
    "negative scale": lambda x: ft.attention(x["q"], x["k"], x["v"], scale=-0.5, causal=True),
    "no scale": lambda x: ft.attention(x["q"], x["k"], x["v"], scale=0.0),
    "rank 2": lambda x: ft.attention(x["q"][0, 0], x["k"][0, 0], x["v"][0, 0], scale=2.0),
    "bnhd": lambda x: ft.attention(x["q"], x["q"], x["q"], layout="bnhd", causal=True),
    "halves": lambda x: ft.attention(
        *(y.half() for y in (x["q"], x["k"], x["v"])), return_lse=True, out_dtype=torch.float32
    ),
}


class Calls(torch.nn.Module):
    """Many calls in one graph, because an export takes seconds."""

    def forward(self, x: dict[str, Any]) -> list[Any]:
        found = []
        for call in CALLS.values():
            results = call(x)
            found += results if isinstance(results, tuple) else (results,)
        return found


def inputs(batch: int = 2, n_q: int = 8, n_k: int = 12) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Any:
        return torch.randn(shape, generator=rng)

    found = {"q": randn(batch, 4, n_q, 16), "k": randn(batch, 2, n_k, 16), "v": randn(batch, 2, n_k, 10)}
    found |= {"bias": randn(1, 4, n_q, n_k), "sink": randn(4), "slopes": randn(batch, 4).abs()}
    found["mask"] = randn(batch, 1, n_q, n_k) > 0
    found["mask"][:, :, 1] = False  # a row that sees no key
    found["lengths"] = torch.tensor([3, n_k])
    begin = torch.randint(0, n_k, (batch, 1, n_q, 1), generator=rng, dtype=torch.int32)
    found["limits"] = torch.stack((begin, begin + 4), -1)
    return found


def export(model: Any, arguments: tuple[Any, ...], opset: int, **more: Any) -> Any:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    return torch.onnx.export(
        model.eval(),
        arguments,
        dynamo=True,
        opset_version=opset,
        custom_translation_table=table(opset),
        verbose=False,
        **more,
    )


def compare(program: Any, x: dict[str, Any], want: list[Any]) -> None:
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    values = dict(zip((each.name for each in session.get_inputs()), x.values(), strict=True))
    found = session.run(None, {name: y.numpy() for name, y in values.items()})
    for got, wanted in zip(found, want, strict=True):
        torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=1e-4, atol=2e-5)


@OPSETS
def test_exported_calls_give_the_same_results(opset: int) -> None:
    model, x = Calls(), inputs()
    program = export(model, (), opset, kwargs={"x": x})
    operators = [node.op_type for node in program.model.graph]
    assert operators.count("Attention") == (len(CALLS) if opset == 23 else 0)
    compare(program, x, model(x))


def test_lengths_may_vary() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return ft.attention(q, k, v, causal=True), ft.attention(k, k, v, causal=True, window=(3, None))

    batch, n_q, n_k = (torch.export.Dim(name, min=2, max=99) for name in ("batch", "n_q", "n_k"))
    keys = {0: batch, 2: n_k}
    x = inputs()
    program = export(
        Model(), (x["q"], x["k"], x["v"]), 23, dynamic_shapes={"q": {0: batch, 2: n_q}, "k": keys, "v": keys}
    )
    for n_q, n_k in ((5, 9), (9, 5)):
        y = {name: each for name, each in inputs(2, n_q, n_k).items() if name in "qkv"}
        compare(program, y, list(Model()(*y.values())))


@given(calls(), st.sampled_from([20, 23]))
@settings(max_examples=max(15, settings().max_examples // 10), suppress_health_check=[HealthCheck.filter_too_much])
def test_any_call(call: Call, opset: int) -> None:
    """The same nodes, run one by one as they are made."""
    assume(not call.packed and call.q.size and call.k.size and "dropout" not in call.options)
    options = {name: x for name, x in call.options.items() if name != "out_dtype"}
    arrays = {"q": call.q, "k": call.k, "v": call.v}
    arrays |= {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    arrays = {n: x if x.dtype.kind in "bi" else widen(x).astype(np.float32) for n, x in arrays.items()}
    options |= {name: x for name, x in arrays.items() if name not in "qkv"}
    q, k, v = (arrays[name] for name in "qkv")
    want = ft.attention(q, k, v, return_lse=True, backend="tiles", **options)
    made = operands(q, k, v, "auto", options)
    made = made._replace(**{n: onnxscript.tensor.Tensor(np.ascontiguousarray(x)) for n, x in arrays.items()})
    for got, wanted in zip(table(opset)[ATTENTION](*made), want, strict=True):
        np.testing.assert_allclose(got.value, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("dropout", 0.5, "0, because ONNX has no dropout with a seed, got 0.5"),
        ("cu_q", "starts", "None, because ONNX has no packed sequences"),
        ("descale", "factors", "None, because ONNX has no attention of 8-bit floats"),
        ("q", (2, 4, 8, 16, 1), "floats of 16 bits or more"),
        ("k", (2, "heads", 8, 16, 4), "a static number of heads and head dim"),
    ],
)
def test_what_onnx_lacks_is_refused(name: str, value: Any, words: str) -> None:
    def tensor(*shape: Any, size: int = 4) -> Any:
        return SimpleNamespace(shape=shape, dtype=SimpleNamespace(itemsize=size))

    x = tensor(2, 4, 8, 16)
    call = Operands(*(None for _ in FIELDS))._replace(q=x, k=x, v=x)
    call = call._replace(**{name: tensor(*value[:-1], size=value[-1]) if isinstance(value, tuple) else value})
    with pytest.raises(ft.UnsupportedError, match=rf"^{name}: expected {words}"):
        table()[ATTENTION](*call)


def test_an_export_with_dropout_names_it() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Any) -> Any:
            return ft.attention(q, q, q, dropout=0.5, seed=1)

    with pytest.raises(torch.onnx.errors.OnnxExporterError) as caught:
        export(Model(), (inputs()["q"],), 23)
    chain: Any = caught.value
    while chain is not None and not isinstance(chain, ft.UnsupportedError):
        chain = chain.__cause__
    assert str(chain).startswith("dropout: expected 0, because ONNX has no dropout with a seed, got 0.5")


@pytest.mark.parametrize("opset", [17, 22.5, "23"])
def test_opsets_are_checked(opset: Any) -> None:
    with pytest.raises((ft.DTypeError, ft.ShapeError), match=r"^opset: expected"):
        table(opset)
