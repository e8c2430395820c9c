"""flashtile explain: the cost of a call or a model before it runs: memory, bytes, FLOPs, least time."""

from dataclasses import asdict, replace
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar

import typer

from flashtile import FlashtileError, dispatch
from flashtile.cost.hardware import Hardware, Rates
from flashtile.cost.parallel import Parallel
from flashtile.cost.plan import Plan, plan
from flashtile.distributed import Shards
from flashtile.host import machine
from flashtile.lab.budget import Budget, budget
from flashtile.lab.catalogue import Cluster, chips, clusters, known_as, length, models
from flashtile.lab.catalogue.masks import MASKS
from flashtile.lab.cli import output
from flashtile.lab.cli.picture import Picture, legend, pictures, side_by_side
from flashtile.lab.units import quantity, seconds, size
from flashtile.numerics.dtypes import EIGHT_BITS, FLOATS, ITEMSIZE
from flashtile.numerics.visibility import Visible

T = TypeVar("T")
DTYPES = (*FLOATS, EIGHT_BITS)
CONTEXT = "8k"
NAMED = {mask.name: mask for mask in MASKS}
LAYOUTS = {"zigzag": Shards.zigzag, "contiguous": Shards.contiguous, "striped": Shards.striped}
CLUSTER = "dgx-h200"


def explain(
    q: Annotated[str | None, typer.Option(help="Shape of q, such as 1,32,8192,128.")] = None,
    k: Annotated[str | None, typer.Option(help="With --q: shape of k and v; like q unless given.")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="With --q: no query sees a later key.")] = False,
    window: Annotated[
        int | None, typer.Option(min=1, help="With --q: the number of keys, up to its own, that a query sees.")
    ] = None,
    mask: str = typer.Option(None, help=f"With --q: a mask of as many queries as keys: {', '.join(NAMED)}."),
    model: str = typer.Option(None, help=f"A named model instead of shapes: {', '.join(models())}."),
    context: Annotated[
        str | None, typer.Option(help=f"With --model: the number of tokens, such as 1m; {CONTEXT} by default.")
    ] = None,
    decode: Annotated[
        bool, typer.Option("--decode", help="With --model: one new token against the context, not the whole prompt.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}; float32, or bfloat16 with --model.")] = None,
    backend: Annotated[str, typer.Option(help="The backend to use.")] = "auto",
    gpu: str = typer.Option(
        None,
        help="Where it would run: here (this machine's GPU, or its CPU, measured), cpu (measured), none, "
        f"{', '.join(chips())}. The default is here.",
    ),
    gpu_flops: Annotated[
        str | None, typer.Option(help="FLOPs per second, such as 989T, of an unlisted GPU or to replace its own.")
    ] = None,
    gpu_bandwidth: Annotated[str | None, typer.Option(help="The same for bytes per second, such as 4.8T.")] = None,
    gpu_memory: Annotated[float | None, typer.Option(help="The same for memory in GiB.")] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Shard the tokens over so many GPUs: what each method sends and takes.")
    ] = None,
    cluster: str = typer.Option(None, help=f"With --gpus: how they are linked: {', '.join(clusters())}."),
    shards: Annotated[str, typer.Option(help=f"With --gpus: {', '.join(LAYOUTS)}.")] = "zigzag",
    json: Annotated[bool, typer.Option("--json", help="Print plain JSON.")] = False,
) -> None:
    """Show what a call would cost, from shapes or a model's name."""
    if (q is None) == (model is None):
        raise typer.BadParameter("expected --q with a shape, or --model with a name")
    if model is not None and (causal or window is not None or mask is not None):
        raise typer.BadParameter("--causal, --window, --mask: the model defines its mask")
    if mask is not None and (causal or window is not None):
        raise typer.BadParameter("--causal, --window: --mask defines all of it")
    if model is not None and k is not None:
        raise typer.BadParameter("--k: the model and --context define its shape")
    if model is None and (decode or context is not None):
        raise typer.BadParameter("--decode, --context: expected with --model; with --q the shapes define them")
    kind = _one_of("--dtype", dtype or ("float32" if model is None else "bfloat16"), {name: name for name in DTYPES})
    if gpus is None and cluster is not None:
        raise typer.BadParameter("--cluster: expected with --gpus")
    if gpus is not None and decode:
        raise typer.BadParameter("--gpus: expected a prompt; a decode sends its output and lse only")
    linked = None if gpus is None else _one_of("--cluster", CLUSTER if cluster is None else cluster, clusters())
    layout = _one_of("--shards", shards, LAYOUTS)
    given = _given(gpu_flops, gpu_bandwidth, gpu_memory)
    hardware, device = _hardware(linked.chip if linked and gpu is None and not given else gpu, kind, given)
    several: dict[str, Any] = {}
    whole: Budget | None = None
    visible: Visible | None = None
    try:
        if model is not None:
            about = _one_of("--model", model, models())
            tokens = _length("--context", CONTEXT if context is None else context)
            if linked is not None:
                several = {"shards": layout(tokens, ranks=gpus), "links": linked.links}
            whole = budget(
                about,
                tokens,
                decode=decode,
                dtype=kind,
                hardware=hardware,
                device=device,
                backend=backend,
                **several,
            )
            call = whole.layers[0].plan
        else:
            q_shape = _shape("--q", q or "")
            k_shape = q_shape if k is None else _shape("--k", k)
            options = {"causal": causal, "window": None if window is None else (window - 1, 0)}
            if mask is not None:
                if len(q_shape) < 2 or q_shape[-2] != k_shape[-2]:
                    raise typer.BadParameter("--mask: expected as many queries as keys")
                named = _one_of("--mask", mask, NAMED)
                options, visible = named.options(q_shape[-2]), named.visible(q_shape[-2])
            if linked is not None:
                several = {"shards": layout(q_shape[-2], ranks=gpus), "links": linked.links}
            call = plan(q_shape, k_shape, kind, device, **options, backend=backend, hardware=hardware, **several)
    except FlashtileError as error:
        raise typer.BadParameter(str(error)) from None
    drawn = [] if call is None else pictures(visible or call.band, call.q_shape[-2], call.k_shape[-2], call.tile)
    if json:
        output.print_json(
            {
                "call": call and call.to_dict(),
                "model": whole and {"name": model, **whole.to_dict()},
                "hardware": hardware and asdict(hardware),
                "picture": [picture._asdict() for picture in drawn],
            }
        )
    else:
        elsewhere = device == "cuda" and gpu != "here" and (gpu is not None or bool(given))
        _show(call, whole, model, hardware, drawn, here=not elsewhere)
        if call is not None and linked is not None:
            _show_parallel(call.parallel, linked, shards)


# Where it runs


def _given(flops: str | None, bandwidth: str | None, memory: float | None) -> dict[str, float]:
    found = {"flops": _quantity("--gpu-flops", flops), "bytes": _quantity("--gpu-bandwidth", bandwidth)}
    found["memory"] = _memory("--gpu-memory", memory)
    return {name: value for name, value in found.items() if value is not None}


def _hardware(gpu: str | None, dtype: str, given: dict[str, float]) -> tuple[Hardware | None, str]:
    """The hardware that determines the least time, and the device of the tensors."""
    if gpu is None and given:
        if not {"flops", "bytes"} <= given.keys():
            raise typer.BadParameter("--gpu-flops, --gpu-bandwidth: expected both, or a --gpu to change")
        found, device = Hardware("the GPU given", Rates(given["flops"], given["bytes"])), "cuda"
    elif gpu == "none":
        if given:
            raise typer.BadParameter("--gpu-flops, --gpu-bandwidth, --gpu-memory: --gpu none has none of them")
        return None, "cpu"
    else:
        here = machine.gpu() if gpu in (None, "here") else None
        name = known_as(here) if here else gpu
        if here and name is None:
            output.err().print(f"{here} is not in the catalogue; pass --gpu-flops and --gpu-bandwidth for it")
        if name in (None, "here", "cpu"):
            from flashtile.lab.bench import rates

            found, device = rates.this_machine(dtype), "cpu"
        else:
            found, device = _one_of("--gpu", name or "", chips(), "here", "cpu", "none").hardware(dtype), "cuda"
    rates_given = {key: given[key] for key in ("flops", "bytes") if key in given}
    memory = int(given["memory"]) if "memory" in given else found.memory
    return replace(found, rates=replace(found.rates, **rates_given), memory=memory), device


# What is printed


def _show(
    call: Plan | None,
    whole: Budget | None,
    name: str | None,
    hardware: Hardware | None,
    drawn: list[Picture],
    here: bool,
) -> None:
    out = output.out()
    shades = out.encoding.startswith("utf")
    if call is not None:
        head = call.q_shape[-2] * call.k_shape[-2] * ITEMSIZE[call.dtype]
        out.print(f"The scores of one head, {size(head)} that are never built, to scale:", style="bold")
        out.print(side_by_side(drawn, shades))
        out.print(legend(drawn, shades))
        out.print(output.facts("One layer" if whole else "One call", _of_call(call, hardware)))
    if whole is not None:
        out.print(output.facts(f"{name}, {whole.context:,} tokens", _of_model(whole, hardware)))
    if hardware is not None:
        if hardware.levels:
            out.print(_hierarchy(hardware))
        output.say(_source_of(hardware))
    for note in _notes(call, whole, name, hardware, here):
        output.say(note)


def _show_parallel(found: tuple[Parallel, ...], cluster: Cluster, layout: str) -> None:
    """What each method sends, holds and takes."""
    rows = [
        (
            x.method,
            size(x.sent),
            size(x.sent_backward),
            size(x.held),
            *("" if t is None else seconds(t) for t in (x.seconds, x.backward_seconds)),
            "" if x.ideal is None else f"{x.ideal:.0%}",
        )
        for x in found
    ]
    heads = ("method", "sent", "backward", "extra memory", "forward", "backward", "of ideal")
    first = found[0]
    title = f"One layer, {layout} over {first.ranks:,} GPUs: {cluster.name}"
    output.out().print(output.table(title, heads, rows))
    bound = "" if first.exact else " With so many GPUs, bytes are an upper bound."
    output.say(
        f"Bytes are those of the GPU that sends most.{bound} The busiest GPU has {first.balance:.3f} times the mean of "
        "the visible pairs. Times are the least there can be, by published rates: products at the peak, messages at "
        "the rate of the links, those of a ring while it computes. Extra memory: beyond its own tokens and gradients."
    )


def _of_call(p: Plan, hardware: Hardware | None) -> list[tuple[str, str]]:
    room = "" if hardware is None or hardware.sram_a_tile is None else f" of {size(hardware.sram_a_tile)} SRAM"
    rows = [
        ("kernel", _kernel(p)),
        ("q; k", f"{_times(p.q_shape)}; {_times(p.k_shape)}"),
        ("dtype", p.dtype),
        ("tile", _tile(p)),
        ("loaded per tile", _sizes(p.blocks, "QKV") + room),
        ("accumulated per tile", _sizes(p.blocks, "SO")),
        ("tiles", ", ".join(f"{n:,} {kind}" for kind, n in p.tiles.items())),
        ("FLOPs", f"{quantity(p.flops, 'FLOP')}; backward {quantity(p.backward_flops, 'FLOP')}"),
        ("score matrix never built", size(p.score_bytes)),
        ("statistics kept (lse)", size(p.lse_bytes)),
        *([("spans; cuts, backward", f"{size(p.span_bytes)}; {size(p.cut_bytes)}")] * (p.span_bytes > 0)),
        ("keys and values", size(p.kv_bytes)),
        ("standard attention moves", size(p.standard_bytes)),
        ("tiles move, no cache", size(p.tile_bytes)),
        ("least that must move", size(p.least_bytes)),
        ("FLOPs per byte, at best", f"{p.intensity:,.0f}" if p.intensity >= 100 else f"{p.intensity:.3g}"),
    ]
    if p.floor is not None:
        limit = "arithmetic: above" if p.floor.bound == "compute" else "memory: below"
        rows.append(("limited by", f"{limit} {p.floor.rates.ridge:.4g} FLOPs per byte"))
        rows.append(("least time", seconds(p.floor.seconds)))
    return rows


def _kernel(p: Plan) -> str:
    if p.tile_of is None or p.backend == p.tile_of:
        return p.backend or "no backend supports it"
    return f"{p.tile_of}, but {f'{p.backend} ' if p.backend else 'not '}on this machine"


def _tile(p: Plan) -> str:
    heads = f" x {p.tile_heads} heads" if p.tile_heads > 1 else ""
    part = f" ({p.rows_at_once} at a time)" if p.rows_at_once < p.tile[0] * p.tile_heads else ""
    return f"{p.tile[0]} queries{part} x {p.tile[1]} keys{heads}"


def _sizes(blocks: dict[str, int], names: str) -> str:
    return ", ".join(f"{name} {size(blocks[name])}" for name in names)


def _of_model(b: Budget, hardware: Hardware | None) -> list[tuple[str, str]]:
    rows = [
        ("layers", ", ".join(f"{kind.count} that see {kind.window or 'all'} keys" for kind in b.layers)),
        ("KV cache per token", size(b.kv_bytes_a_token)),
        ("KV cache", size(b.kv_bytes)),
    ]
    if hardware is not None and hardware.memory is not None:
        rows.append(("share of the memory", f"{b.kv_bytes / hardware.memory:.1%} of {size(hardware.memory)}"))
    rows.append(("FLOPs", quantity(b.flops, "FLOP")))
    rows.append(("least that must move", size(b.least_bytes)))
    if b.seconds is not None and b.tokens_a_second is not None:
        rows.append(("least time per token" if b.decode else "least time for the prompt", seconds(b.seconds)))
        tokens = "new tokens" if b.decode else "prompt tokens"
        rows.append((f"{tokens} per second, at most", f"{b.tokens_a_second:,.0f}"))
    return rows


def _hierarchy(hardware: Hardware) -> Any:
    """The memories, fastest first; bandwidths as multiples of the slowest show what a tile gains."""
    slowest = hardware.levels[-1].rate
    rows = []
    for level in hardware.levels:
        times = f"{level.rate / slowest:.3g}" if level.rate and slowest else ""
        unknown = "not measured" if hardware.measured else "not published"
        rate = unknown if level.rate is None else quantity(level.rate, "B/s")
        rows.append((level.name, size(level.bytes), rate, times))
    return output.table(f"Memories of {hardware.name}", ("level", "total size", "bandwidth", "x memory"), rows)


def _source_of(hardware: Hardware) -> str:
    rates = f"{quantity(hardware.rates.flops, 'FLOP/s')}, {quantity(hardware.rates.bytes, 'B/s')}"
    if hardware.measured:
        return f"Least times use the best rates just measured, {rates}, of NumPy's product and copy and our kernels."
    return f"Least times use the published rates of {hardware.name}, {rates}, which no kernel fully reaches."


def _notes(
    call: Plan | None, whole: Budget | None, name: str | None, hardware: Hardware | None, here: bool
) -> list[str]:
    """Remarks. `here`: the call would run on this machine, so backends missing on it are listed."""
    notes = []
    if whole is not None:
        notes.append("This is attention only, without weights, projections and other layers.")
        if whole.context > whole.model.context:
            limit, asked = f"{whole.model.context:,}", f"{whole.context:,}"
            notes.append(f"{name} was made for {limit} tokens; this is the cost of {asked}.")
        if hardware is not None and whole.gpus is not None and whole.gpus > 1 and whole.shared_seconds is not None:
            notes.append(
                f"The KV cache alone exceeds {hardware.name}: it takes {whole.gpus} of them. Each attends to its own "
                "keys and returns out and lse; flashtile.merge() merges these exactly, and the least time falls to "
                f"{seconds(whole.shared_seconds)}."
            )
        if whole.model.latent is not None:
            notes.append(_latent(whole))
    if call is not None:
        for row in dispatch.TABLE:
            reason = call.reasons.get(row.name) if row.device == call.device else None
            if reason and (here or reason != row.missing()):
                notes.append(f"not {row.name}: {reason}")
    return notes


def _latent(whole: Budget) -> str:
    cached = whole.model.cached_numbers
    cache = f"Latent attention: the cache keeps {cached} numbers per token and layer for all heads."
    if not whole.decode:
        return f"{cache} The layer above has the keys and values made from them, as a prompt needs them."
    return (
        f"{cache} Decoding reads them as one key head of width {cached}, which no kernel here supports; "
        "only its counts are given."
    )


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


# Parsing options


def _one_of(option: str, name: str, table: dict[str, T], *others: str) -> T:
    if name not in table:
        meant = "".join(f"; did you mean {near}?" for near in get_close_matches(name, table, n=1))
        raise typer.BadParameter(f"{option}: expected one of {', '.join((*others, *table))}, got {name!r}{meant}")
    return table[name]


def _length(option: str, text: str) -> int:
    try:
        return length(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from None


def _shape(option: str, text: str) -> tuple[int, ...]:
    """Parse 2 to 4 lengths, "2, 8, 1k, 64" or "2x8x1kx64"."""
    try:
        lengths = tuple(length(part.strip()) for part in text.replace("x", ",").split(","))
    except ValueError:
        raise typer.BadParameter(f"{option}: expected lengths like 2,8,1024,64, got {text!r}") from None
    if not 2 <= len(lengths) <= 4:
        raise typer.BadParameter(f"{option}: expected 2, 3 or 4 lengths, got {text!r}")
    return lengths


def _memory(option: str, gib: float | None) -> float | None:
    """Convert GiB to bytes, at least one."""
    if gib is not None and not 1 <= gib * (1 << 30) < float("inf"):
        raise typer.BadParameter(f"{option}: expected a number of GiB above 0, got {gib:g}")
    return None if gib is None else gib * (1 << 30)


def _quantity(option: str, text: str | None) -> float | None:
    """Parse a number with a prefix: 989e12 for "989T"."""
    if text is None:
        return None
    factor = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}.get(text[-1:], 0)
    try:
        value = float(text[:-1] if factor else text) * (factor or 1)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise typer.BadParameter(f"{option}: expected a number such as 989T or 4.8e12, got {text!r}")
    return value
