"""fragment(): the viewer as self-contained HTML; its final frames are readable without scripts."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from flashtile.lab.report.viewer import drawing, sentences, warps
from flashtile.lab.report.viewer.run import COUNTERS
from flashtile.lab.report.viewer.scene import SCENES, Scene
from flashtile.lab.report.viewer.scenes import SIDE_BY_SIDE
from flashtile.lab.units import size

TITLES = {
    "standard": "Standard",
    "fa1": "FlashAttention-1",
    "fa2": "FlashAttention-2",
    "backward": "The backward sweep",
}
SUBTITLES = {
    "standard": "Three kernels. S and P go through HBM.",
    "fa1": "Outer loop over keys, inner over queries. O comes and goes.",
    "fa2": "Outer loop over queries, inner over keys. O is written once.",
    "backward": "One column of tiles at a time. P is recomputed from L; dK and dV accumulate in SRAM, dQ travels.",
}
SHOWN = (  # counter, label, unit
    ("read", "read", " B"),
    ("written", "written", " B"),
    ("flops", "FLOPs", ""),
    ("launches", "kernel launches", ""),
    ("peak", "peak SRAM", " B"),
    ("writes", "writes of", ""),
)
GPU, DIM = "h100", 128  # shown first


def fragment(recorded: dict[str, Any]) -> str:
    """<section id="viewer">: style, drawings, record and script in one."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    env = Environment(autoescape=True, undefined=StrictUndefined)
    env.filters |= {
        "count": lambda n: f"{int(n):,}",
        "percent": percent,
        "part": part,
        "size": size,
        "furthest": lambda splits: f"{max(s['error'] for s in splits.values()):.1e}",
    }
    chosen = {scene.name: scene for scene in SCENES}
    scenes = recorded["scenes"]
    return env.from_string(_text("viewer.html.j2")).render(
        css=Markup(_text("viewer.css")),
        js=Markup(_text("viewer.js")),
        json=Markup(json.dumps(recorded, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")),
        scenes=scenes,
        side_by_side=SIDE_BY_SIDE,
        titles=TITLES,
        subtitles=SUBTITLES,
        shown=SHOWN,
        counters_at={name: at for at, name in enumerate(COUNTERS)},
        drawings={
            **{s["name"]: {k: Markup(x) for k, x in _drawings(chosen[s["name"]], s).items()} for s in scenes},
            "warps": {by: Markup(warps.drawing(by, split["warps"])) for by, split in recorded["warps"].items()},
        },
        cuts={s["name"]: _cuts(s) for s in scenes},
        rules={s["name"]: _rule(s) for s in scenes},
        tables={s["name"]: {"forward": _forward_table(s), "backward": _backward_table(s)} for s in scenes},
        fit=recorded["fit"],
        rooms=_rooms(recorded["fit"]),
        needs=_needs(recorded["fit"]),
        room=next(room for room in recorded["fit"]["rooms"] if room["name"] == GPU),
        dims=sorted({need["dim"] for need in recorded["fit"]["needs"]}),
        gpu=GPU,
        dim=DIM,
        warps=recorded["warps"],
    )


def percent(n: float, of: float) -> str:
    return f"{100 * n / of:.2f}".rstrip("0").rstrip(".")


def part(name: str) -> str:
    """The colour class of a block in SRAM."""
    if name in ("S", "P", "dS", "dP"):
        return "scores"
    if name in ("O", "dQ", "dK", "dV"):
        return "results"
    return "inputs" if name in ("Q", "K", "V", "dO") else "statistics"


def number(x: float | str) -> str:
    """Format a number for the lens."""
    if isinstance(x, str):
        return x.replace("-inf", "\u2212\u221e").replace("inf", "\u221e")
    return f"{round(x, 3) + 0:.3f}".replace("-", "\u2212")


def error(x: float) -> str:
    """Format an error, small ones as a power of ten."""
    if x == 0 or x >= 1e-3:
        return number(x) if x else "0"
    digits, power = f"{x:.1e}".split("e")
    return f"{digits}e{int(power)}".replace("-", "\u2212")


@cache
def _text(name: str) -> str:
    return files("flashtile.lab.report.viewer").joinpath(name).read_text()


def _drawings(scene: Scene, s: dict[str, Any]) -> dict[str, str]:
    counts = ", ".join(f"{n} {kind}" for kind, n in s["tiles"].items())
    drawn = {"map": drawing.tile_map(scene, s["cuts"], f"{scene.title}: the tiles of S, {counts}.")}
    for order, run in s["runs"].items():
        label = f"{TITLES[order]} on S, with its arrays around it."
        drawn[order] = drawing.stage(scene, order, label, _end(run), s["row"])
    return drawn


def _end(run: dict[str, Any]) -> drawing.End:
    written = {(event[1], event[2]): event[3] for event in run["events"] if event[0] == "Store"}
    held = {(name, n) for name, n in zip(run["names"], run["held"][-1], strict=True) if n >= 0}
    return drawing.End(written, held, tuple(run["events"][-1][1:3]))


def _cuts(s: dict[str, Any]) -> str:
    """The cuts of the row of tiles under the lens, span by span."""
    cuts = "; ".join(sentences.filled("cut", **cut) for cut in s["cuts"][s["row"] // s["br"]])
    return sentences.filled("cuts", row=s["row"], cuts=cuts)


def _rule(s: dict[str, Any]) -> str:
    """The band as a formula, and the number of spans."""
    left, right, offset = (s["band"][name] for name in ("left", "right", "offset"))
    spans = ""
    if s["spans"] is not None:
        spans = " and j is in its span" if len(s["spans"][0]) == 1 else " and j is in one of its spans"
    if left is None and right is None:
        return f"Query i sees key j if{spans.removeprefix(' and')}." if spans else "Query i sees every key j."
    sign = "+" if offset and offset > 0 else "\u2212"
    at = f"i {sign} {abs(offset)}" if offset else "i"
    low = "" if left is None else f"{at} \u2212 {left} \u2264 "
    high = "" if right is None else f" \u2264 {at}" + (f" + {right}" if right else "")
    return f"Query i sees key j if {low}j{high}{spans}."


def _visits(s: dict[str, Any], order: str) -> list[tuple[list[Any], dict[str, Any], int]]:
    """The tiles of the row under the lens: event, numbers, and its index in the block."""
    run, row = s["runs"][order], s["row"]
    i, r = divmod(row, s["br"])
    return [(run["events"][int(at)], x, r) for at, x in run["numbers"].items() if run["events"][int(at)][1] == i]


def _forward_table(s: dict[str, Any]) -> dict[str, Any]:
    rows = []
    for event, x, r in _visits(s, "fa2"):
        sentence = sentences.filled(
            x["case"][r],
            row=s["row"],
            key=x["key"][r],
            **{name: number(x[name][r]) for name in ("m", "m_old", "factor")},
        )
        values = [number(x[name][r]) for name in ("m", "factor", "l")]
        rows.append([_keys(s, event[2]), *values, error(x["error"][r]), sentence])
    return {
        "title": f"Row {s['row']} under the lens, FlashAttention-2",
        "head": ["keys", "m", "factor", "l", "error of O / l", ""],
        "rows": rows,
    }


def _backward_table(s: dict[str, Any]) -> dict[str, Any]:
    rows = []
    for event, x, r in _visits(s, "backward"):
        sentence = sentences.filled(x["case"][r], row=s["row"], L=number(x["L"][r]), sum=number(x["sum"][r]))
        rows.append([_keys(s, event[2]), number(x["sum"][r]), error(x["error"][r]), sentence])
    return {
        "title": f"Row {s['row']} under the lens, backward",
        "head": ["keys", "sum of P", "error of dQ", ""],
        "rows": rows,
    }


def _keys(s: dict[str, Any], j: int) -> str:
    last = min((j + 1) * s["bc"], s["n_k"]) - 1
    return f"{j * s['bc']} to {last}"


def _rooms(fit: dict[str, Any]) -> list[dict[str, Any]]:
    """Group GPUs with the same room."""
    found: dict[int, dict[str, Any]] = {}
    for room in fit["rooms"]:
        if room["bytes"] in found:
            found[room["bytes"]]["names"] += f", {room['name']}"
        else:
            found[room["bytes"]] = {**room, "names": room["name"]}
    return sorted(found.values(), key=lambda room: -room["bytes"])


def _needs(fit: dict[str, Any]) -> list[dict[str, Any]]:
    """Group tiles by head width. All bars of a width share one scale, which includes every GPU's room."""
    rooms = [room["bytes"] for room in fit["rooms"]]
    dims = sorted({need["dim"] for need in fit["needs"]})
    groups = [[need for need in fit["needs"] if need["dim"] == dim] for dim in dims]
    return [
        {"dim": dim, "needs": group, "most": max(*rooms, *(need["bytes"] for need in group))}
        for dim, group in zip(dims, groups, strict=True)
    ]
