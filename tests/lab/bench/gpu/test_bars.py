"""gpu/bars.py: each bar holds exactly when it should, and a row that we cannot run is a failure."""

from __future__ import annotations

from typing import Any

import pytest

from flashtile.lab.bench.gpu import bars, measures
from flashtile.lab.bench.gpu.peers import CUDNN, FA3, FLEX, ORDERED, OURS, PORTABLE, WIDE


def row(suite: str, direction: str = "forward", *, us: float = 1.0, **more: Any) -> dict[str, Any]:
    return {
        "suite": suite,
        "direction": direction,
        "dtype": "bfloat16",
        "absent": {},
        "times": {OURS: {"median_s": us}},
        "ratios": {},
        "shape": {"batch": 1, "n_k": 16384, "dim": 64},
        "options": {},
        "extra": False,
        "backend": "triton",
        **more,
    }


def train(direction: str, more: Any = (), **ratios: float) -> dict[str, Any]:
    named = {{"flex": FLEX, "cudnn": CUDNN}[name]: {"value": x} for name, x in ratios.items()}
    return row("train", direction, ratios=named, **dict(more))


def hopper(direction: str, ratio: float, **more: Any) -> dict[str, Any]:
    """A row that the Hopper kernels ran, and the best peer's time over ours."""
    shared = {"backend": "gluon", "rates": {OURS: 0.5}, "ceiling": 1.0}
    return train(direction, shared | more, flex=ratio + 1, cudnn=ratio)


def only(found: list[dict[str, Any]], group: str) -> dict[str, Any]:
    (line,) = [line for line in found if line["group"] == group]
    return line


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_row_beats_flex(direction: str) -> None:
    good = [train(direction, flex=1.05, cudnn=0.9), train(direction, flex=2.0)]
    line = only(bars.judge(good), f"{direction}-flex")
    assert line["holds"] is True and line["worst"] == 1.05 and line["value"] == pytest.approx((1.05 * 2) ** 0.5)
    assert only(bars.judge([*good, train(direction, flex=1.04)]), f"{direction}-flex")["holds"] is False
    assert only(bars.judge([train(direction, cudnn=2.0)]), f"{direction}-flex")["holds"] is None
    best = only(bars.judge(good), f"{direction}-best")
    assert best["worst"] == 0.9 and best["holds"] is None and best["worst_bar"] is None


def test_deterministic_has_a_bar_and_is_not_a_peer() -> None:
    times = {OURS: {"median_s": 1.0}, ORDERED: {"median_s": 1.1}, CUDNN: {"median_s": 1.2}}
    ratios = {name: {"value": t["median_s"]} for name, t in times.items() if name != OURS}
    found = row("train", "backward", times=times, ratios=ratios)
    assert only(bars.judge([found]), "backward-ordered")["worst"] == pytest.approx(1.1)
    assert only(bars.judge([found]), "backward-ordered")["holds"] is True
    assert measures.best_peer(found) == CUDNN
    dear = row("train", "backward", times=times, ratios=ratios | {ORDERED: {"value": 1.2}})
    assert only(bars.judge([found, dear]), "backward-ordered")["holds"] is False


def test_portable_kernels_beat_flex_too_and_are_not_a_peer() -> None:
    times = {OURS: {"median_s": 1.0}, PORTABLE: {"median_s": 1.5}, FLEX: {"median_s": 2.0}, CUDNN: {"median_s": 1.7}}
    ratios = {name: {"value": time["median_s"]} for name, time in times.items() if name != OURS}
    fast = row("train", times=times, ratios=ratios)
    found = bars.judge([fast])
    assert only(found, "forward-portable")["worst"] == pytest.approx(2 / 1.5)
    assert only(found, "forward-portable")["holds"] is True
    assert only(found, "forward-best")["worst"] == 1.7
    slow = row("train", times=times | {PORTABLE: {"median_s": 1.95}}, ratios=ratios)
    assert only(bars.judge([fast, slow]), "forward-portable")["holds"] is False
    assert not any(line["group"] == "forward-portable" for line in bars.judge([train("forward", flex=2.0)]))


def test_a_row_that_we_cannot_run_is_not_a_success() -> None:
    failed = train("forward") | {"absent": {OURS: "no"}, "times": {}}
    assert only(bars.judge([train("forward", flex=2.0), failed]), "forward-flex")["holds"] is False
    assert only(bars.judge([failed]), "forward-flex")["holds"] is False


@pytest.mark.parametrize(("seconds", "holds"), [(0.0914, True), (0.0915, False)])
def test_a_window_costs_its_share(seconds: float, holds: bool) -> None:
    whole = {OURS: {"median_s": 1.0}, PORTABLE: {"median_s": 2.0}}  # 1.3 * 1152 / 16384 = 0.09141
    windowed = row("train", us=seconds, unwindowed=whole, window=1024)
    assert only(bars.judge([windowed]), "forward-window")["holds"] is holds
    assert not any(line["group"] == "forward-window-portable" for line in bars.judge([windowed]))
    times = windowed["times"] | {PORTABLE: {"median_s": 2 * seconds}}
    assert only(bars.judge([windowed | {"times": times}]), "forward-window-portable")["holds"] is holds


@pytest.mark.parametrize(
    ("direction", "ratios", "holds"),
    [
        ("forward", (1.0, 1.13), True),
        ("forward", (0.99, 1.3), False),  # one of them
        ("forward", (1.05, 1.06), False),  # their mean
        ("backward", (0.97, 1.14), True),
        ("backward", (0.96, 1.3), False),
        ("backward", (1.0, 1.05), False),
    ],
)
def test_the_hopper_kernels_beat_the_best_peer(direction: str, ratios: tuple[float, float], holds: bool) -> None:
    found = bars.judge([hopper(direction, x) for x in ratios])
    assert only(found, f"{direction}-grid")["holds"] is holds
    assert not any(line["group"] == f"{direction}-best" for line in found)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_other_shapes_are_only_compared_with_the_best_peer(direction: str) -> None:
    found = bars.judge([hopper(direction, 1.0, extra=True), hopper(direction, 2.0)])
    assert only(found, f"{direction}-extra")["holds"] is True and only(found, f"{direction}-extra")["value"] == 1
    assert only(found, f"{direction}-grid")["value"] == pytest.approx(2)
    assert only(bars.judge([hopper(direction, 0.99, extra=True)]), f"{direction}-extra")["holds"] is False


def test_a_step_of_training() -> None:
    assert only(bars.judge([hopper("step", 1.05)]), "step-hopper")["holds"] is True
    assert only(bars.judge([hopper("step", 1.05), hopper("step", 1.04)]), "step-hopper")["holds"] is False


def test_bars_for_hopper_kernels_apply_only_to_them() -> None:
    rows = [train(direction, cudnn=0.5) for direction in ("forward", "backward", "step")]
    groups = {line["group"]: line["holds"] for line in bars.judge(rows)}
    for name in ("forward-grid", "forward-extra", "forward-product", "backward-grid", "backward-extra", "step-hopper"):
        assert name not in groups
    assert groups["forward-best"] is groups["step-best"] is None


@pytest.mark.parametrize(("rate", "holds"), [(95.0, True), (94.0, False)])
def test_dense_rows_are_compared_with_the_matrix_product(rate: float, holds: bool) -> None:
    dense = {"rates": {OURS: rate}, "ceiling": 100.0, "shape": {"batch": 1, "n_k": 16384, "dim": 128}}
    found = bars.judge([hopper("forward", 1.1, **dense), hopper("forward", 1.1), hopper("backward", 1.1, **dense)])
    line = only(found, "forward-product")
    assert line["holds"] is holds and line["value"] == pytest.approx(rate / 100)
    causal = hopper("forward", 1.1, **dense, options={"causal": True})
    assert not any(line["group"] == "forward-product" for line in bars.judge([causal]))


def decode(batch: int, keys: int, share: float, cudnn: float = 1.0) -> dict[str, Any]:
    ratios = {CUDNN: {"value": cudnn}}
    return row("decode", shape={"batch": batch, "n_k": keys}, shares={OURS: share}, ratios=ratios)


def test_decode() -> None:
    rows = [decode(1, 8192, 0.3, cudnn=1.1), decode(1, 131072, 0.91), decode(16, 8192, 0.9), decode(64, 4096, 0.95)]
    found = bars.judge(rows)
    assert only(found, "decode")["holds"] is True and only(found, "decode-short")["holds"] is True
    assert only(found, "decode")["worst"] == 0.9  # the short cache is not held to it
    worse = [decode(1, 8192, 0.3, cudnn=0.99), decode(16, 8192, 0.89)]
    found = bars.judge(worse)
    assert only(found, "decode")["holds"] is False and only(found, "decode-short")["holds"] is False


@pytest.mark.parametrize(("backend", "group", "bar"), [("triton", "host", 40e-6), ("gluon", "host-hopper", 25e-6)])
def test_host_time(backend: str, group: str, bar: float) -> None:
    for seconds, holds in ((bar, True), (bar + 1e-6, False)):
        small = row("small", host={OURS: {"median_s": seconds}}) | {"backend": backend}
        assert only(bars.judge([small]), group)["holds"] is holds


@pytest.mark.parametrize(("grown", "holds"), [((5 << 20), True), ((5 << 20) + 1, False)])
def test_memory(grown: int, holds: bool) -> None:
    found = bars.judge([row("memory", "backward", grown={OURS: grown}, needed=4 << 20)])
    assert only(found, "memory-backward")["holds"] is holds


def test_agreement_is_with_the_nearest_peer() -> None:
    near, far = train("forward"), train("forward")
    near["differences"], far["differences"] = {FLEX: 0.5, CUDNN: 0.01}, {CUDNN: 0.03, PORTABLE: 0, ORDERED: 0}
    assert only(bars.judge([near]), "agreement")["holds"] is True
    assert only(bars.judge([near, far]), "agreement")["holds"] is False


def eight_bits(dim: int, ratio: float, **more: Any) -> dict[str, Any]:
    """A row of 8-bit tensors, and our time in bfloat16 over that in 8 bits."""
    shape = {"batch": 1, "n_k": 16384, "dim": dim}
    shared = {"dtype": "float8_e4m3fn", "backend": "gluon", "shape": shape, "rates": {OURS: 0.5}, "ceiling": 1.0}
    return row("train", **{"ratios": {WIDE: {"value": ratio}}, **shared, **more})


def test_8_bits_are_compared_with_our_own_bfloat16() -> None:
    found = bars.judge([eight_bits(64, 1.0), eight_bits(128, 1.5), eight_bits(128, 1.31), eight_bits(256, 1.1)])
    assert only(found, "eight-bits-128")["holds"] is True and only(found, "eight-bits-128")["worst"] == 1.31
    assert only(found, "eight-bits-64")["holds"] is None and only(found, "eight-bits-256")["value"] == pytest.approx(
        1.1
    )
    assert only(bars.judge([eight_bits(128, 1.39)]), "eight-bits-128")["holds"] is False
    assert {line["group"] for line in found} == {"eight-bits-64", "eight-bits-128", "eight-bits-256"}
    assert bars.judge([eight_bits(128, 1.0, backend="triton")]) == []


def test_8_bits_compared_with_a_peer() -> None:
    ratios = {WIDE: {"value": 1.0}, FA3: {"value": 1.2}}  # we are no peer of ourselves
    line = only(bars.judge([eight_bits(128, 1.5), eight_bits(128, 1.5, ratios=ratios)]), "eight-bits-best")
    assert line["value"] == pytest.approx(1.2) and line["holds"] is None


def test_agreement_in_8_bits_has_its_own_tolerance() -> None:
    near, far = (eight_bits(128, 1.5, differences={WIDE: x}) for x in (0.049, 0.051))
    assert only(bars.judge([near]), "agreement-eight-bits")["holds"] is True
    assert only(bars.judge([near, far]), "agreement-eight-bits")["holds"] is False
    wide = train("forward", {"differences": {CUDNN: 0.021}})
    assert only(bars.judge([near, wide]), "agreement")["holds"] is False


def test_the_tolerance_of_8_bits_is_twice_what_weights_of_3_bits_lose() -> None:
    torch = pytest.importorskip("torch")
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 64, generator=source).to(torch.float8_e4m3fn).float() for n in (64, 1024, 1024))
    S = q @ k.mT / 8
    P = (S - S.amax(-1, keepdim=True)).exp()

    def off(weights: Any) -> float:
        return float((weights @ v - P @ v).norm() / (P @ v).norm())

    assert 0.4 < off((P * 64).to(torch.float8_e4m3fn).float() / 64) / bars.SAME_IN_8_BITS < 0.6
    assert off(P.to(torch.float8_e5m2).float()) > bars.SAME_IN_8_BITS  # one bit less
    lost = P.clone()
    lost[:, :128] = 0
    assert off(lost) > bars.SAME_IN_8_BITS  # a tile


def test_rows_that_failed_are_counted() -> None:
    assert only(bars.judge([], ["a", "b"]), "failed")["worst"] == 2 and bars.judge([]) == []
