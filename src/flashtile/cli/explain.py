"""flashtile explain: what a call costs before it is made: backend, tiles, bytes, FLOPs, the floor under its time."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import typer

from flashtile import FlashtileError, plan
from flashtile.cli import output
from flashtile.cli.models import Model, chips, length, models
from flashtile.dtypes import FLOATS
from flashtile.plan import Plan, Rates

T = TypeVar("T")


def explain(
    q: Annotated[str | None, typer.Option(help="Shape of q, such as 1,32,8192,128.")] = None,
    k: Annotated[str | None, typer.Option(help="Shape of k and v; like q unless given.")] = None,
    model: str = typer.Option(None, help=f"A named model instead of shapes: {', '.join(models())}."),
    context: Annotated[str, typer.Option(help="With --model: how many tokens, such as 8k or 1m.")] = "8k",
    decode: Annotated[
        bool, typer.Option(help="With --model: one new token against the context, not the whole prompt.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(FLOATS)}; float32, or bfloat16 with --model.")] = None,
    causal: Annotated[bool | None, typer.Option(help="Causal or not; not, or causal with --model.")] = None,
    window: Annotated[int | None, typer.Option(min=1, help="How many keys up to its own a query sees.")] = None,
    device: Annotated[str, typer.Option(help="Where the tensors would be.")] = "cpu",
    backend: Annotated[str, typer.Option(help="Ask for a backend by name.")] = "auto",
    chip: str = typer.Option("here", help=f"Whose rates set the floor: here (measured), none, {', '.join(chips())}."),
    json: Annotated[bool, typer.Option("--json", help="Print plain JSON.")] = False,
) -> None:
    """Say what a call would do, from its shapes or from a model and a context."""
    named = None
    if model is not None:
        named = _one_of("--model", model, models())
        q_shape, k_shape = named.shapes(1 if decode else _length(context), _length(context))
    elif q is not None:
        q_shape = _shape("--q", q)
        k_shape = q_shape if k is None else _shape("--k", k)
    else:
        raise typer.BadParameter("expected --q with a shape, or --model with a name")
    try:
        planned = plan(
            q_shape,
            k_shape,
            _one_of("--dtype", dtype or ("float32" if named is None else "bfloat16"), {name: name for name in FLOATS}),
            device,
            causal=named is not None if causal is None else causal,
            window=None if window is None else (window - 1, None),
            backend=backend,
            rates=_rates(chip),
        )
    except FlashtileError as error:
        raise typer.BadParameter(str(error)) from None
    found = {**planned.to_dict(), "model": None if named is None else _of_model(named, model, planned)}
    if json:
        output.print_json(found)
    else:
        _show(planned, found["model"])


def _of_model(model: Model, name: str, p: Plan) -> dict[str, Any]:
    a_token = model.kv_bytes_a_token(p.dtype)
    return {
        "name": name,
        "layers": model.layers,
        "kv_bytes_a_token": a_token,
        "kv_bytes": a_token * p.k_shape[-2],
        "flops": p.flops * model.layers,
        "floor_s": None if p.floor is None else p.floor.seconds * model.layers,
    }


def _show(p: Plan, model: dict[str, Any] | None) -> None:
    out = output.out()
    rows = [
        ("backend", p.backend or "none can run it"),
        ("q, k", f"{_times(p.q_shape)}, {_times(p.k_shape)} {p.dtype}"),
        ("tiles", f"{p.tile[0]} x {p.tile[1]}: " + ", ".join(f"{n} {kind}" for kind, n in p.tiles.items())),
        ("FLOPs", output.quantity(p.flops, "FLOP") + f" forward, {output.quantity(p.backward_flops, 'FLOP')} backward"),
        ("score matrix never built", output.size(p.score_bytes)),
        ("statistics kept (lse)", output.size(p.lse_bytes)),
        ("keys and values", output.size(p.kv_bytes)),
        ("moved by standard attention", output.size(p.standard_bytes)),
        ("moved tile by tile, no cache", output.size(p.tile_bytes)),
        ("least that must move", output.size(p.least_bytes)),
        ("FLOPs a byte at best", f"{p.intensity:.4g}"),
    ]
    if p.floor is not None:
        rates = p.floor.rates
        rows.append(("floor", f"{output.seconds(p.floor.seconds)}, set by {p.floor.bound}"))
        of = f"{output.quantity(rates.flops, 'FLOP/s')}, {output.quantity(rates.bytes, 'B/s')}"
        rows.append(("on a machine of", f"{of}, ridge {rates.ridge:.4g} FLOP/B"))
    out.print(output.facts("One layer" if model else "One call", rows))
    if model:
        rows = [
            ("KV cache a token", output.size(model["kv_bytes_a_token"])),
            ("KV cache", output.size(model["kv_bytes"])),
            ("FLOPs", output.quantity(model["flops"], "FLOP")),
        ]
        if model["floor_s"] is not None:
            rows.append(("floor", output.seconds(model["floor_s"])))
        out.print(output.facts(f"{model['name']}, {model['layers']} layers", rows))
    for name, reason in p.reasons.items():
        out.print(f"not {name}: {reason}", soft_wrap=True)


def _rates(chip: str) -> Rates | None:
    if chip == "none":
        return None
    if chip == "here":
        from flashtile.bench import rates

        return rates.measure()
    return _one_of("--chip", chip, chips())


def _one_of(option: str, name: str, table: dict[str, T]) -> T:
    if name not in table:
        raise typer.BadParameter(f"{option}: expected one of {', '.join(table)}, got {name!r}")
    return table[name]


def _length(text: str) -> int:
    try:
        return length(text)
    except ValueError as error:
        raise typer.BadParameter(f"--context: {error}") from None


def _shape(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(length(part) for part in text.replace("x", ",").split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from None


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
