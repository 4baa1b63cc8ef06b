"""`tiermoe trace`: statistics of routing traces, and synthetic traces."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ...errors import ConfigError
from ..commands import Command, Group
from ..report.files import check_folder
from ..report.output import print_json
from ..report.tables import Facts, Grid, facts, grid, results, share, show
from ..simulate.importers import FORMATS, import_trace
from ..simulate.shapes import shape_named
from ..simulate.statistics import CACHES, PHASES, figures_of, routing_of
from ..simulate.synthetic import CALIBRATIONS, FAMILIES, NOTHING_PUBLISHED, comparable, write_synthetic
from ..simulate.trace import MAX_DISTANCE, Trace, TraceHeader
from .options import AsJson, with_options

trace_app = typer.Typer(
    cls=Group, help="Statistics of routing traces; import traces of other programs; make synthetic ones.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip


@trace_app.callback()
def _top() -> None: ...


@trace_app.command("stats", cls=Command)
def stats_command(
    trace: Annotated[Path, typer.Argument(help="Trace folder.", metavar="TRACE")],
    slots: Annotated[
        str | None,
        typer.Option(help="Cache slots of each layer, such as 16,32; default: 25, 50 and 75% of the experts."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random replacement.")] = 0,
    as_json: AsJson = False,
) -> None:
    """How skewed, sticky and predictable a model's routing is, and the hit rates of caches of single layers."""
    found = Trace(trace)
    sizes = None if slots is None else _slots(slots, found.header)
    record = {
        "name": "trace-stats", "trace": str(trace), "model": found.header.model, "complete": found.header.complete,
    } | figures_of(routing_of(found.header, found.requests()), sizes, seed)  # fmt: skip
    show(results(as_json), *_tables(record))
    if as_json:
        print_json(record)


@dataclass(frozen=True)
class Drawing:
    """How much is drawn: options of `tiermoe trace make`."""

    requests: Annotated[int, typer.Option(min=1, help="Requests to draw.")] = 8
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens that each request decodes.")] = 64
    distances: Annotated[
        int, typer.Option(min=0, max=MAX_DISTANCE, help="Layers ahead to draw predictions for.")
    ] = 4
    seed: Annotated[int, typer.Option(min=0, help="Seed of the routing.")] = 0


@trace_app.command("make", cls=Command)
@with_options()
def make_command(
    out: Annotated[Path, typer.Argument(help="Trace folder to write.", metavar="OUT")],
    family: Annotated[str, typer.Option(help=f"Family of the routing: {', '.join(FAMILIES)}.")],
    shape: Annotated[str, typer.Option(help="Model shape: a name in configs/shapes/published.yaml.")],
    drawing: Drawing,
    as_json: AsJson = False,
) -> None:
    """Draw a synthetic trace of a published model's shape, in a family that is calibrated on published statistics,
    or in one that a script makes hard for some policy.
    """
    check_folder(out, "OUT", empty=True)
    if family not in FAMILIES:
        raise ConfigError(f"--family is '{family}'", f"give one of {', '.join(FAMILIES)}")
    header = write_synthetic(
        out, family, shape, shape_named(shape), drawing.requests, drawing.prompt_tokens, drawing.max_tokens,
        drawing.distances, drawing.seed,
    )  # fmt: skip
    routing = routing_of(header, Trace(out).requests())
    calibration = CALIBRATIONS.get(family) or NOTHING_PUBLISHED
    sizes = [max(header.top_k, round(size / calibration.experts * header.experts)) for size in calibration.sizes]
    found = comparable(routing, sizes, drawing.seed)
    targets = {name: target.value for name, target in calibration.targets.items()}
    title = f"{out}: {family}, {header.layers} layers of {header.experts} experts, top-{header.top_k}"
    published = f"{calibration.source}, {calibration.experts} experts, top-{calibration.top_k}"
    rows = [(name, _figure(value), _figure(targets.get(name))) for name, value in found.items()]
    show(results(as_json), grid(title, ("figure", "here", published), rows))
    if as_json:
        record = {"name": "trace-make", "trace": str(out), "family": family, "shape": shape, "figures": found,
                  "targets": targets}  # fmt: skip
        print_json(record)


@trace_app.command("import", cls=Command)
def import_command(
    file: Annotated[Path, typer.Argument(help="Trace that another program recorded.", metavar="FILE")],
    out: Annotated[Path, typer.Argument(help="Trace folder to write.", metavar="OUT")],
    kind: Annotated[
        str | None, typer.Option("--format", help=f"{', '.join(FORMATS)}; default: by the contents.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Model shape of configs/shapes, which gives experts and their bytes.")
    ] = None,
    experts: Annotated[
        int | None, typer.Option(min=1, help="Experts of a layer; default: the greatest id plus one.")
    ] = None,
    expert_bytes: Annotated[int, typer.Option(min=1, help="Bytes of an expert, without --shape.")] = 16 << 20,
    as_json: AsJson = False,
) -> None:
    """Make a trace of vLLM's returned routed experts, Megatron's routing trace, or CSV."""
    check_folder(out, "OUT", empty=True)
    if kind is not None and kind not in FORMATS:
        raise ConfigError(f"--format is '{kind}'", f"give one of {', '.join(FORMATS)}")
    known = None if shape is None else shape_named(shape)
    header = import_trace(
        file, out, kind, shape or file.stem, experts if known is None else known.experts,
        expert_bytes if known is None else known.expert_bytes,
    )  # fmt: skip
    record = {
        "name": "trace-import", "trace": str(out), "requests": header.requests, "rows": header.rows,
        "layers": header.layers, "experts": header.experts, "top_k": header.top_k,
    }  # fmt: skip
    show(
        results(as_json),
        f"{out}: {header.rows} tokens of {header.requests} requests, {header.layers} layers of {header.experts} "
        f"experts, top-{header.top_k}",
    )
    if as_json:
        print_json(record)


def _slots(text: str, header: TraceHeader) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or any(not header.top_k <= size <= header.experts for size in sizes):
        what = f"--slots is '{text}' for layers of {header.experts} experts, top-{header.top_k}"
        raise ConfigError(what, f"give whole numbers from {header.top_k} to {header.experts}, such as 16,32")
    return sizes


def _tables(record: dict[str, Any]) -> tuple[Facts, Grid]:
    skew, reuse, cosine = record["popularity"], record["reuse"], record["prefill_decode_cosine"]
    names = {"lognormal_sigma": "sigma of its logarithm", "max_over_mean": "maximum over mean"}
    rows = [
        ("shape", f"{record['layers']} layers of {record['experts']} experts, top-{record['top_k']}"),
        ("tokens", f"{record['tokens']} of {record['requests']} requests, {record['decode_tokens']} in decode"),
        *((f"popularity: {names.get(name, name.replace('_', ' '))}", _figure(value)) for name, value in skew.items()),
        ("entropy of a token's router", _figure(record["token_entropy"])),
        ("overlap by chance", _figure(record["overlap_by_chance"])),
        *((f"overlap with the token {d} before", _figure(value)) for d, value in record["overlap"].items()),
        *((f"distinct experts in {w} tokens", _figure(value)) for w, value in record["distinct"].items()),
        ("first uses", share(reuse["first_uses"])),
        *((f"reused within {d} tokens", share(value)) for d, value in reuse["within"].items()),
        ("experts since the last use, median and 90%",
         f"{_figure(reuse['experts_quantiles']['0.5'])}, {_figure(reuse['experts_quantiles']['0.9'])}"),
        *((f"next-router recall, {d} ahead", _figure(value))
          for d, value in enumerate(record["next_router"] or [], start=1)),
        ("cosine of decode and prefill, own request", _figure(None if cosine is None else cosine["own"])),
        ("cosine of decode and prefill, other request", _figure(None if cosine is None else cosine["other"])),
    ]  # fmt: skip
    table = [
        (f"{line['size']} of {record['experts']}", phase, *(share(line.get(f"{name}{key}")) for name in CACHES))
        for line in record["hit_rates"]
        for phase, key in (("all", ""), *((phase, f"_{phase}") for phase in PHASES))
    ]
    hits = grid("hit rates of caches of single layers", ("slots", "phase", *CACHES), table)
    return facts(f"{record['trace']}, {record['model']}", rows), hits


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
