"""The record: its counters equal the closed forms, and replaying its events gives attention."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from flashtile.band import FAR, Band, Kind
from flashtile.cost import traffic
from flashtile.cost.traffic import Layout, count
from flashtile.lab.report.viewer import clock, scenes, warps
from flashtile.lab.report.viewer.run import COUNTERS, DIGITS
from flashtile.lab.report.viewer.scene import QUICK, SCENES
from flashtile.lab.report.viewer.scenes import ORDERS, SIDE_BY_SIDE
from flashtile.numerics.dtypes import ITEMSIZE
from flashtile.numerics.schedule import Grid, backward, fa1_forward, fa2_forward, standard_forward
from flashtile.numerics.visibility import Visibility, Visible
from tests.lab.report.viewer.replay import Replay, number

TOLERANCE = 5 * 10.0**-DIGITS  # the record is float32, rounded to this many digits
names = pytest.mark.parametrize("name", [scene.name for scene in SCENES])
orders = pytest.mark.parametrize("order", ORDERS)


def of(recorded: dict[str, Any], name: str) -> dict[str, Any]:
    return next(scene for scene in recorded["scenes"] if scene["name"] == name)


@names
@orders
def test_replaying_the_record_gives_attention(recorded, name, order):
    scene = of(recorded, name)
    replay = Replay(scene, order)
    computed = 0
    for at, numbers in replay:
        told = scene["runs"][order]["numbers"][str(at)]
        for key, x in numbers.items():
            np.testing.assert_allclose(number(told[key]), x, rtol=TOLERANCE, atol=TOLERANCE, err_msg=f"{at} {key}")
        computed += 1
    assert computed == len(scene["runs"][order]["numbers"]) > 0
    results = {"dQ": "dq", "dK": "dk", "dV": "dv"} if order == "backward" else {"O": "out"}
    for key, exact in (results | ({"L": "lse"} if order == "fa2" else {})).items():
        np.testing.assert_allclose(replay.hbm[key], number(scene["exact"][exact]), rtol=TOLERANCE, atol=TOLERANCE)


@names
@orders
def test_counters_land_on_the_closed_form(recorded, name, order):
    scene = of(recorded, name)
    run = scene["runs"][order]
    n_q, n_k, d, br, bc = (scene[key] for key in ("n_q", "n_k", "dim", "br", "bc"))
    left, right = (FAR if scene["band"][key] is None else scene["band"][key] for key in ("left", "right"))
    visible: Visible = Band(left, right, scene["band"]["offset"])
    if scene["spans"] is not None:
        visible = Visibility(visible, np.array(scene["spans"]))
    elements = {
        "standard": traffic.standard_elements(n_q, d, n_k),
        "fa1": traffic.fa1_visible_elements(n_q, n_k, d, d, br, bc, visible),
        "fa2": traffic.fa2_elements(n_q, n_k, d, d, br, bc, visible),
        "backward": traffic.backward_elements(n_q, n_k, d, d, br, bc, visible),
    }[order]
    size = ITEMSIZE[scene["dtype"]]
    last = dict(zip(COUNTERS, run["counts"][-1], strict=True))
    assert last["moved"] == run["closed"] == elements * size
    grid = Grid(n_q, n_k, br, n_k if order == "standard" else bc)
    streams = {"fa1": fa1_forward, "fa2": fa2_forward, "backward": backward}
    events = standard_forward(grid) if order == "standard" else streams[order](visible, grid)
    total = count(events, grid, Layout(d, d))
    assert (last["read"], last["written"]) == (total.loaded_bytes, total.stored_bytes)
    assert (last["flops"], last["peak"]) == (total.flops, total.peak_sram * size)
    tiles = traffic.tile_counts(visible, n_q, n_k, br, bc)
    assert scene["tiles"] == {kind.name.lower(): n for kind, n in tiles.items()}
    assert last["launches"] == (3 if order == "standard" else 1)
    blocks, worked = -(-n_q // br), tiles[Kind.PARTIAL] + tiles[Kind.FULL]
    if order in ("standard", "fa2"):
        assert last["writes"] == blocks
    elif order == "fa1" and name in ("full", "causal"):
        assert last["writes"] == worked > blocks
    assert run["counts"][0] == [0] * len(COUNTERS)
    steps = np.delete(np.array(run["counts"]), COUNTERS.index("sram"), axis=1)
    assert (np.diff(steps, axis=0) >= 0).all(), "but for what lies in SRAM, a counter never goes back"


def test_the_full_scene_is_the_paper_s_formula(recorded):
    runs, n, d = of(recorded, "full")["runs"], 16, 4
    assert runs["standard"]["counts"][-1][0] == 4 * (4 * n * n + 4 * n * d)
    assert runs["fa1"]["counts"][-1][0] == 4 * traffic.fa1_elements(n, d, 4)
    assert of(recorded, "causal")["tiles"] == {"skipped": 6, "partial": 4, "full": 6}


@names
@orders
def test_lists_by_step_have_the_same_length(recorded, name, order):
    run = of(recorded, name)["runs"][order]
    steps = len(run["events"]) + 1
    assert {len(run[key]) for key in ("captions", "counts", "sram", "held")} == {steps}
    assert all(caption.endswith(".") and "{" not in caption for caption in run["captions"])
    assert [sum(at) for at in run["sram"]] == [counts[COUNTERS.index("sram")] for counts in run["counts"]]


@names
@orders
def test_sentences_have_the_numbers_of_their_event(recorded, name, order):
    run = of(recorded, name)["runs"][order]
    for at, event in enumerate(run["events"]):
        said, moved = run["captions"][at + 1], run["counts"][at + 1][0] - run["counts"][at][0]
        if event[0] in ("Load", "Store"):
            assert f": {moved:,}\u00a0B." in said and moved > 0
        elif event[0] == "Tile":
            S = number(run["numbers"][str(at)]["S"])
            seen = np.isfinite(S).sum()
            assert f": {seen} of {S.size} pairs" in said if seen < S.size else f"all {S.size} pairs" in said


@names
@orders
def test_the_blocks_in_sram_add_up_to_the_count(recorded, name, order):
    scene = of(recorded, name)
    run, replay = scene["runs"][order], Replay(scene, order)
    own = () if order == "standard" else ("S", "P", "dP", "dS", "factor")  # of a tile: no blocks of an array
    for held, sizes in zip(run["held"], run["sram"], strict=True):
        for block, n, size in zip(run["names"], held, sizes, strict=True):
            if block in own:
                assert n == -1
            else:
                assert size == (0 if n < 0 else 4 * replay.hbm[block][replay.block(block, n)].size), block


@names
def test_errors_fall_to_nothing(recorded, name):
    scene = of(recorded, name)
    for order in ORDERS:
        run = scene["runs"][order]
        last: dict[int, list[float]] = {}
        for at, x in run["numbers"].items():
            event = run["events"][int(at)]
            if "error" in x:
                last[event[1] if event[0] == "Tile" else event[2]] = x["error"]
        assert max(max(errors) for errors in last.values()) < 1e-6
    assert max(scene["start"]["forward"]) > 0.1


@names
def test_the_factor_is_exp_of_the_difference(recorded, name):
    for order in ("fa1", "fa2"):
        for x in of(recorded, name)["runs"][order]["numbers"].values():
            m, old = number(x["m"]), number(x["m_old"])
            seen = np.isfinite(m)
            np.testing.assert_allclose(number(x["factor"])[seen], np.exp(old[seen] - m[seen]), rtol=1e-4)
            case = np.array(x["case"])
            assert (m[case == "bigger"] > old[case == "bigger"]).all()
            assert (m[case == "same"] == old[case == "same"]).all()


@names
def test_one_clock(recorded, name):
    """No order is ahead of or behind the clock, and all are done in the last frame."""
    scene = of(recorded, name)
    moved = {order: [counts[0] for counts in scene["runs"][order]["counts"]] for order in SIDE_BY_SIDE}
    assert moved["fa2"][-1] < moved["fa1"][-1] < moved["standard"][-1]
    for follow in SIDE_BY_SIDE:
        frames = [dict(zip(SIDE_BY_SIDE, frame, strict=True)) for frame in scene["frames"][follow]]
        assert set(frames[0].values()) == {0}
        assert frames[-1] == {order: len(moved[order]) - 1 for order in SIDE_BY_SIDE}
        own = [frame[follow] for frame in frames]
        assert own[: len(moved[follow])] == list(range(len(moved[follow])))
        for n, frame in enumerate(frames[1:], 1):
            leader = follow if n < len(moved[follow]) else "standard"
            now = moved[leader][frame[leader]]
            for order in set(SIDE_BY_SIDE) - {follow, leader}:
                done = frame[order]
                assert moved[order][done] <= now
                assert done + 1 == len(moved[order]) or moved[order][done + 1] > now


def test_frames_of_a_small_race():
    moved = {"slow": [0, 0, 4, 8, 12], "fast": [0, 3, 5, 5]}
    assert clock.frames(moved, "fast") == [[0, 0], [1, 1], [2, 2], [2, 3], [3, 3], [4, 3]]
    assert clock.frames(moved, "slow") == [[0, 0], [1, 0], [2, 1], [3, 3], [4, 3]]


def test_what_fits_where(recorded):
    rooms = {room["name"]: room["bytes"] for room in recorded["fit"]["rooms"]}
    needs = {(need["dim"], need["br"], need["bc"]): need for need in recorded["fit"]["needs"]}
    small = needs[128, 64, 64]
    assert small["blocks"]["Q"] == small["blocks"]["K"] == 16 << 10, "one block of 64 x 128 in float16"
    assert sum(small["blocks"][name] for name in "QKVO") == 64 << 10
    assert {fits for need in needs.values() for fits in need["fits"].values()} == {True, False}
    for need in needs.values():
        assert sum(need["blocks"].values()) == need["bytes"]
        assert need["fits"] == {name: need["bytes"] <= room for name, room in rooms.items()}


def test_warps(recorded):
    keys, queries = recorded["warps"]["keys"], recorded["warps"]["queries"]
    assert keys["exchanged"] == (keys["warps"] - 1) * keys["rows"] * (keys["dim"] + 2) and queries["exchanged"] == 0
    assert (keys["states"], queries["states"]) == (warps.WARPS, 1)
    assert max(keys["error"], queries["error"]) < 1e-12


def test_quick_is_a_part_of_the_whole(recorded):
    quick = json.loads(json.dumps(scenes(quick=True)))
    assert tuple(scene["name"] for scene in quick["scenes"]) == QUICK
    assert quick["scenes"] == [of(recorded, name) for name in QUICK]


def test_it_is_small_enough(recorded):
    assert len(json.dumps(recorded, separators=(",", ":"))) < 1_500_000
