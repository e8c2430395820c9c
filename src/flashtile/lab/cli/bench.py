"""flashtile bench: measure this machine and compare with peers, and make tables of the records."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from flashtile.backends.triton.tuning import KERNELS
from flashtile.lab.bench import candidates, masks, records, suite, table, tune
from flashtile.lab.bench.cases import GROUPS
from flashtile.lab.bench.gpu import bench as gpu_bench
from flashtile.lab.bench.gpu import device, io, ncu, peers, precompile, rows
from flashtile.lab.bench.tables.tune import rows as tuning_rows
from flashtile.lab.cli import DOES_NOT_HOLD, output

SUITES = (*rows.SUITES, "all")
AsJson = Annotated[bool, typer.Option("--json", help="Also print the record as plain JSON, and no table.")]

app = typer.Typer(help="Measure, taking turns with the peers; every run writes a record.", no_args_is_help=True)


def _listed(names: Iterable[str | int]) -> str:
    """List names in quotes, because some have commas."""
    return ", ".join(map(repr, names))


@app.command()
def cpu(
    quick: Annotated[bool, typer.Option(help="Short cases and few rounds.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="GROUP", help=f"Only these groups (repeatable): {_listed(GROUPS)}.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads, for flashtile and torch; torch's own number by default.")
    ] = None,
    path: Annotated[
        Path | None, typer.Option("--output", help=f"Path of the record; in {records.FOLDER}/ by default.")
    ] = None,
    json: AsJson = False,
    check: Annotated[bool, typer.Option(help="Exit with 1 if a goal is missed.")] = False,
) -> None:
    """Time this CPU.

    Forward, backward, decoding, half precision, options, small calls, memory, scaling.
    """
    _known("--only", only, GROUPS)
    path = path or records.default_path("cpu")
    _check(path)
    with output.progress_bar() as progress:
        record = suite.run(only=only or (), short=quick, threads=threads, progress=progress)
    _leave(record, path, json, check)


@app.command()
def gpu(
    which: Annotated[
        list[str] | None, typer.Option("--suite", help=f"Only these (repeatable): {_listed(SUITES)}.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="WORDS", help='Only rows with these words in their name (repeatable): "D128 backward".'),
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option("--peers", help=f"Only these (repeatable): {_listed(peers.NAMES)}.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each contender per row.")] = 15,
    quick: Annotated[bool, typer.Option(help="Short sequences, three rounds of short samples.")] = False,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Start no row after this time; rows left out are listed.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that compile ahead; one per core by default, 0 for none.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="An unfinished record: keep its rows, and measure the others.")
    ] = None,
    path: Annotated[Path, typer.Option("--output", help="Path of the record.")] = records.FOLDER / "gpu.json",
    json: AsJson = False,
    check: Annotated[bool, typer.Option(help="Exit with 1 if a goal is missed.")] = False,
) -> None:
    """Time this GPU.

    Training, decoding, small calls and memory, compared with cuDNN, SDPA, FlexAttention and FlashAttention.
    """
    _known("--suite", which, SUITES)
    _known("--peers", peer, peers.NAMES)
    chosen = rows.select([] if "all" in (which or ["all"]) else which or [], only or (), quick)
    if not chosen:
        raise typer.BadParameter("--only: no row has all of these words in its name")
    earlier = None
    if resume is not None:
        with _blamed_on("--resume", resume):
            earlier = table.read(resume)
    _check(path)
    _need_gpu()
    start = time.monotonic()
    precompile.keep_on_disk()
    here, absent = peers.available(peer or ())
    bench = gpu_bench.Bench(device.Cuda(), here, min(rounds, 3) if quick else rounds)
    if resume is not None and earlier is not None:
        with _blamed_on("--resume", resume):
            records.check_alike(gpu_bench.empty_record(bench, quick), earlier)
    chosen, unfit = rows.measurable(chosen, bench.device.name)
    if quick:
        bench.sample /= 5
    with output.progress_bar() as progress:
        half = None if seconds is None else start + seconds / 2
        left = gpu_bench.unmeasured(chosen, earlier)
        late = precompile.compile_ahead(left, here, count=workers, end=half, progress=progress)
        record = gpu_bench.run(
            bench,
            chosen,
            absent=absent,
            unfit=unfit,
            quick=quick,
            seconds=None if seconds is None else start + seconds - time.monotonic(),
            earlier=earlier,
            progress=progress,
            save=lambda record: records.write(record, path),
        )
    for what, reason in late.items():
        output.remark(f"not compiled ahead: {what}: {reason}")
    for (name, reason), cases in gpu_bench.absences(record).items():
        where = cases[0] if len(cases) == 1 else f"{cases[0]} and {len(cases) - 1} more"
        output.remark(f"{where}: {name} is absent: {reason}")
    for what, reason in record["failed"].items():
        output.remark(f"{what}: failed: {reason}")
    for what, reason in record["unfit"].items():
        output.remark(f"{what}: left out, {reason}")
    for what in record["left_out"]:
        output.remark(f"{what}: left out, no time was left")
    _leave(record, path, json, check)


@app.command("tune")
def search(
    kernel: Annotated[list[str] | None, typer.Option(help=f"Only these (repeatable): {_listed(KERNELS)}.")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help=f"Only these (repeatable): {_listed(candidates.DTYPES)}.")
    ] = None,
    dim: Annotated[
        list[int] | None,
        typer.Option(help=f"Only these head dims (repeatable): {_listed(candidates.DIMS)}."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each candidate per shape.")] = 7,
    seconds: Annotated[float | None, typer.Option(min=0, help="Start nothing after this time.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that compile; one per core by default.")] = None,
    path: Annotated[Path, typer.Option("--output", help="Path of the record.")] = records.FOLDER / "tune.json",
    json: AsJson = False,
) -> None:
    """Find the fastest tiles of the Triton kernels on this GPU.

    Print them as rows of backends/triton/tuning.py.
    """
    _known("--kernel", kernel, KERNELS)
    _known("--dtype", dtype, candidates.DTYPES)
    _known("--dim", dim, candidates.DIMS)
    _check(path)
    _need_gpu()
    with output.progress_bar() as progress:
        record = tune.run(
            device.Cuda(),
            candidates.limits(),
            candidates.targets(kernel or (), dtype or (), dim or ()),
            rounds=rounds,
            count=workers,
            seconds=seconds,
            progress=progress,
            save=lambda record: records.write(record, path),
        )
    if not json:
        print(tuning_rows(record), end="\n\n")
    _leave(record, path, json)


@app.command("masks")
def spans(
    quick: Annotated[bool, typer.Option(help="An eighth of the lengths.")] = False,
    path: Annotated[Path, typer.Option("--output", help="Path of the record.")] = records.FOLDER / "masks.json",
    json: AsJson = False,
    check: Annotated[bool, typer.Option(help="Exit with 1 if a goal is missed.")] = False,
) -> None:
    """Time masks given as spans on this CPU.

    Compared with the same call with a band or without a mask, and with torch's SDPA and FlexAttention.
    """
    _check(path)
    if reason := masks.missing():
        raise output.missing(f"flashtile: this needs {reason}")
    with output.progress_bar() as progress:
        record = masks.run(quick, 0.2 if quick else 4.0, progress)
    _leave(record, path, json, check)


@app.command("io")
def bytes_moved(
    program: Annotated[str | None, typer.Option("--ncu", help="Path of NVIDIA's profiler; found by default.")] = None,
    path: Annotated[Path, typer.Option("--output", help="Path of the record.")] = records.FOLDER / "io.json",
    json: AsJson = False,
) -> None:
    """Count the bytes that the forward pass moves on this GPU.

    NVIDIA's ncu counts them; the table compares them with what the tiles should move.
    """
    _check(path)
    _need_gpu()
    program = program or ncu.find()
    if program is None:
        raise output.missing("flashtile: this needs NVIDIA's profiler ncu (Nsight Compute): none found on the path")
    try:
        record = io.run(device.Cuda(), program)
    except (ncu.ProfilerError, OSError) as error:
        raise output.missing(f"flashtile: ncu: {error}") from None
    _leave(record, path, json)


@app.command("table")
def show(
    record: Annotated[Path, typer.Argument(help="A record of flashtile bench.", exists=True, dir_okay=False)],
    details: Annotated[bool, typer.Option(help="One row per case.")] = False,
    into: Annotated[
        Path | None, typer.Option(help="Write the table into this document, at the place marked for it.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print its summary, or its measurements, as plain JSON.")
    ] = False,
) -> None:
    """Show a record as markdown."""
    with _blamed_on("RECORD", record):
        content = table.read(record)
    text = table.details(content) if details else table.render(content)
    if json:
        output.print_json(content["summary"] or content["measurements"])
    elif into is not None:
        with _blamed_on("--into", into):
            table.put_into(into, record)
    elif details:
        print(text)
    else:
        output.markdown(text)


def _known(option: str, given: list[str] | list[int] | None, names: tuple[str, ...] | tuple[int, ...]) -> None:
    for name in given or ():
        if name not in names:
            raise typer.BadParameter(f"{option}: expected one of {_listed(names)}, got {name!r}")


@contextmanager
def _blamed_on(option: str, path: Path) -> Iterator[None]:
    """Report errors of a file as errors of the option that named it."""
    try:
        yield
    except OSError as error:
        raise typer.BadParameter(f"{option}: {path}: {error.strerror}") from None
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from None


def _check(path: Path) -> None:
    """Report anything that would prevent writing the record before measuring anything."""
    output.check_writable("--output", path)
    if path.is_dir():
        raise typer.BadParameter(f"--output: expected a file, got a folder: {path}")


def _need_gpu() -> None:
    if reason := device.missing():
        raise output.missing(f"flashtile: this needs a CUDA GPU: {reason}")


def _leave(record: records.Record, path: Path, json: bool, check: bool = False) -> None:
    """Write and show the record, report its path and the absent peers; with `check`, fail if a goal is missed."""
    if json:
        output.print_json(record)
    records.write(record, path)
    for name, reason in record["absent"].items():
        output.remark(f"{name}: not compared, {reason}")
    if not json:
        print(table.details(record), table.render(record), sep="\n\n", end="")
    output.remark(f"record: {path}")
    if check and any(row["holds"] is False for row in record["summary"]):
        raise typer.Exit(DOES_NOT_HOLD)
