"""`bench host`: what a decoded token's time consists of, by part of a layer, of a step, and of the way to the client.

Runs take turns: as it is, with the layers' kernels and the step's parts timed (what totals come from), and with every
part of a layer timed; both by wall-clock and by the thread's CPU time, which other work on the machine changes less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.progress import Progress

from tiermoe.actors.requests import GenerationRequest, SamplingParams, TokenEvent
from tiermoe.cluster.api.schema import Display
from tiermoe.cluster.api.text import ChoiceText
from tiermoe.cluster.config import RunConfig, engine_settings, load_policy
from tiermoe.cluster.detokenizer import IncrementalText
from tiermoe.cluster.jobs.bench.metrics import Bar, Case, Measures, Report, Spread, interleaved
from tiermoe.cluster.jobs.bench.serving import (
    Prompt,
    ensure_artifacts,
    heldout_prompts,
    serve,
)
from tiermoe.cluster.jobs.local_worker import start_worker
from tiermoe.cluster.jobs.prepare.needs import prepared_store
from tiermoe.cluster.prompt import load_tokenizer
from tiermoe.errors import ConfigError

from .cases import LATENCY_US, Host, HostDevice
from .requantized import Published, requantized

if TYPE_CHECKING:  # torch
    from tiermoe.actors.engine.host_times import HostPass, HostStep

    from .instant_gpu import Recorded

# microseconds of the host in an MoE layer outside kernels, messages to peers and waits, at batch 1
LIMITS_US = {
    "all-resident": 10.0, "on-demand": 20.0, "on-demand, fp8": 60.0, "next-gate": 35.0, "fmoe": 70.0, "moepic": 70.0,
    "activeevict": 70.0, "activeevict-lossless": 70.0, "buddymoe": 70.0, "auto, local": 20.0, "auto, planned": 60.0,
    "context-ndp-full": 60.0, "context-ndp-3bit": 60.0, "on-demand, 2 shards": 60.0,
}  # fmt: skip
PRESETS = ("all-resident", "on-demand", "next-gate", "fmoe", "moepic", "activeevict", "buddymoe")
PEERS = ("auto", "context-ndp-full", "context-ndp-3bit")
# the same beside a GPU whose kernels and copies take no time, launching included
LIMITS_GPU_US = {
    "all-resident": 30.0, "on-demand": 40.0, "next-gate": 45.0, "moepic": 80.0, "activeevict": 80.0,
    "all-resident, fp8": 55.0, "on-demand, fp8": 55.0, "all-resident, mxfp4": 55.0, "on-demand, mxfp4": 55.0,
    "auto, planned": 70.0, "context-ndp-full": 70.0, "context-ndp-3bit": 70.0, "on-demand, 2 shards": 70.0,
}  # fmt: skip
LAUNCHES = 6  # of a decode layer beside a GPU, at most
PROMPT_TOKENS, MAX_TOKENS = 32, 48
CALLS, DETOKENIZED = 50, 20  # actor calls, and runs of a detokenizer over the generated tokens, in one repetition

Column = dict[tuple[int, str, str], float]  # (batch, per what, part) -> microseconds of one preset


def host(options: Host, progress: Progress | None) -> Report:
    """Microseconds of the host in a decode step, for each preset and batch.

    A layer's figures are means over the layers of a step, medians over the steps. A token's are means over the steps,
    since only means add up: `sum` is all parts, `rest` what the measured time between tokens has beyond it.

    A preset that plans misses has a column for planned forwards and one for those that only load, where it has both.

    Bars, at batch 1: `host` of a layer (outside kernels, messages and waits, by wall-clock) at most `LIMITS_US`.
    `messages`: sending to peers and taking their answers.

    On a fake GPU (`instant_gpu`) only the layers are measured, as they run on a GPU: `host` includes launching,
    `kernels` and `combine` are launching alone, and `LIMITS_GPU_US` are the bars. `loads awaited`: no copy has ended
    when the host looks, so that each load has a wait and a launch of its own. The numbers of launches and of calls that
    Python makes are the same on a busy machine.

    Raises:
        ConfigError: an unknown preset. RuntimeFailure: a request failed.
    """
    cases = cases_of(options)
    with TemporaryDirectory() as folder:
        runs = {str(case): case.run_of(options, Path(folder)) for case in cases}
        for form in dict.fromkeys(case.form for case in cases):
            alike = [case for case in cases if case.form is form]
            ensure_artifacts(runs[str(alike[0])], [load_policy(case.preset) for case in alike])
        prompts = heldout_prompts(next(iter(runs.values())).model_dir, max(options.batch), PROMPT_TOKENS)
        settings = options.settings(
            latency_us=LATENCY_US, prompt_tokens=PROMPT_TOKENS, max_tokens=MAX_TOKENS, threads=1, budget=options.budget
        )
        beside = options.device is HostDevice.FAKE_GPU
        return (_beside_gpu if beside else _on_cpu)(options, runs, prompts, settings, progress)


@dataclass(frozen=True)
class HostCase:
    """What a column is of."""

    preset: str
    form: Published = Published.BF16
    shards: int = 1

    def __str__(self) -> str:
        form = f", {self.form}" if self.form is not Published.BF16 else ""
        return f"{self.preset}{form}" + (f", {self.shards} shards" if self.shards > 1 else "")

    def run_of(self, options: Host, folder: Path) -> RunConfig:
        """The configuration; with one NDP worker for who uses any. folder: of models and stores that are made.

        Raises:
            ConfigError: a form of another model than the default one.
        """
        workers = {"ndp_workers": 1} if load_policy(self.preset).uses_ndp else {}
        more: dict[str, Any] = {"cluster": {"shards": self.shards} | workers}
        if self.form is not Published.BF16:
            if options.model is not None:
                raise ConfigError("--form is of the default model", "leave --model out, or give --form bf16")
            model = folder / self.form
            more["model"] = str(model if model.exists() else requantized(self.form, model))
            more["cache_dir"] = str(folder / "stores")
        return options.run_of(self.preset, **more)


def cases_of(options: Host) -> list[HostCase]:
    """Those that are asked for, or those that the bars judge."""
    if options.preset:
        return [HostCase(*case) for case in product(options.preset, options.form, options.shards)]
    sharded = HostCase("on-demand", shards=2)
    if options.device is HostDevice.CPU:
        return [*map(HostCase, (*PRESETS, *PEERS)), HostCase("on-demand", Published.FP8), sharded]
    forms = product(("all-resident", "on-demand"), Published)
    plain = ("next-gate", "moepic", "activeevict", *PEERS)
    return [*(HostCase(*case) for case in forms), *map(HostCase, plain), sharded]


def _on_cpu(
    options: Host, configs: Mapping[str, RunConfig], prompts: Sequence[Prompt], settings: dict[str, Any],
    progress: Progress | None,
) -> Report:  # fmt: skip
    report = Report("host", "", settings=settings)
    columns: dict[str, Column] = {}
    spreads: list[dict[str, Any]] = []
    whole = options.run_of("all-resident")
    service = _service(whole, prompts[0], options.repeats) if options.ray else {}  # first: Ray may fail to start
    for name, config in configs.items():
        with closing(start_worker(config)) as worker:
            report.executor = worker.stats().executor
            for column in _columns(name, worker):
                found: Column = {}
                columns[column] = found
                for batch in options.batch:
                    label, some = f"{column}, {batch}", prompts[:batch]
                    measured, spread = _measure(worker, some, options.repeats, progress, label)
                    found |= {(batch, *key): value for key, value in measured.items()}
                    spreads.append({"preset": column, "batch": batch, "matcher": worker.matcher_stats(), **spread})
    if service:
        columns.setdefault("all-resident", {}).update(service)
    what = "microseconds of the host in a layer outside kernels, messages and waits"
    return _told(report, columns, spreads, LIMITS_US, what)


def _told(
    report: Report, columns: Mapping[str, Column], spreads: list[dict[str, Any]], limits_us: Mapping[str, float],
    what: str,
) -> Report:  # fmt: skip
    """The report with its rows and bars."""
    for key in dict.fromkeys(key for found in columns.values() for key in found):
        values = {name: found.get(key, "") for name, found in columns.items()}
        if any(values.values()):
            report.rows.append({"batch": key[0], "per": key[1], "part": key[2], **values})
    report.figures["spread"] = spreads
    for name, found in columns.items():
        if name in limits_us and (1, "layer", "host") in found:
            report.bars.append(Bar(f"{what}, {name}, batch 1", found[1, "layer", "host"], "<=", limits_us[name]))
    return report


def _beside_gpu(
    options: Host, configs: Mapping[str, RunConfig], prompts: Sequence[Prompt], settings: dict[str, Any],
    progress: Progress | None,
) -> Report:  # fmt: skip
    """The layers' host time on a fake GPU: of recorded decode forwards, run again without kernels and copies."""
    from .instant_gpu import EXECUTOR, Recorded, instant_gpu

    report = Report("host-gpu", EXECUTOR, settings=settings)
    columns: dict[str, Column] = {}
    spreads: list[dict[str, Any]] = []
    for name, config in configs.items():
        for batch in options.batch:
            config = config.model_copy(update={"dtype": "bfloat16"})  # as on GPUs; copies need no cast
            with instant_gpu() as gpu, closing(start_worker(config)) as worker:
                for column in _columns(name, worker):
                    recorded, label = Recorded(worker, gpu), f"{column}, {batch}"
                    recorded.record(partial(serve, worker.submit, prompts[:batch], MAX_TOKENS))
                    found, spread = _run_again(worker, recorded, batch, options.repeats, progress, label)
                    columns.setdefault(column, {}).update({(batch, *key): value for key, value in found.items()})
                    spreads.append({"preset": column, "batch": batch, **spread})
    what = "microseconds of the host in a layer, launching included"
    report = _told(report, columns, spreads, LIMITS_GPU_US, what)
    for name, times in columns.items():
        if (launches := times.get((1, "layer", "launches, number"))) is not None and name.startswith("all-resident"):
            report.bars.append(Bar(f"launches of a decode layer, {name}", launches, "<=", LAUNCHES))
    return report


def _run_again(
    worker: Any, recorded: Recorded, batch: int, repeats: int, progress: Progress | None, label: str
) -> tuple[dict[tuple[str, str], float], dict[str, Any]]:
    """Microseconds of a layer in decode forwards by (per what, part): means over its layers, medians over forwards."""
    from tiermoe.actors.engine.host_times import MESSAGES, PARTS, host_passes

    apart = MESSAGES if worker.engine.peers else ()
    kinds: dict[str, tuple[bool, Sequence[str], Callable[[], float]]] = {
        "layer": (False, apart, time.perf_counter), "layer, by part": (False, PARTS, time.perf_counter),
        "layer, CPU": (False, apart, time.thread_time), "layer, loads awaited": (True, apart, time.perf_counter),
        "layer, loads awaited, by part": (True, PARTS, time.perf_counter),
        "layer, loads awaited, CPU": (True, apart, time.thread_time),
    }  # fmt: skip
    forwards: dict[str, list[Sequence[HostPass]]] = {kind: [] for kind in kinds}
    layers = len(worker.engine.layers)

    def again(kind: str) -> Measures:
        late, parts, now = kinds[kind]
        with host_passes(worker.engine, parts, now) as passes:
            recorded.run(late)
        ran = [passes[at : at + layers] for at in range(0, len(passes), layers)]
        forwards[kind] += [forward for forward in ran if forward[0].tokens == batch]
        return {}

    for late in (False, True):
        recorded.run(late)  # warm up; not counted
    interleaved([Case(kind, partial(again, kind)) for kind in kinds], repeats, 0, progress, label)

    hosts = {kind: _layer_us(forwards[kind], _HOST_S) for kind, (_, parts, _) in kinds.items() if parts is apart}
    found: dict[tuple[str, str], float] = {}
    for kind in kinds:
        if kind in hosts:
            found[kind, "host"] = hosts[kind].median
            found[kind, "messages"] = _layer_us(forwards[kind], _MESSAGES_S).median
        else:
            found |= {(kind, part): _layer_us(forwards[kind], _part_s(part)).median for part in PARTS}
    for kind, late in (("layer", False), ("layer, loads awaited", True)):
        found[kind, "calls of Python, number"] = recorded.calls(late)
        found[kind, "launches, number"] = recorded.launches(late, batch)
    return found, {kind: asdict(spread) | {"values": None} for kind, spread in hosts.items()}


def _columns(preset: str, worker: Any) -> Iterator[str]:
    """The columns of a preset; the worker runs decode forwards of the last one's kind."""
    placer = worker.engine.layers[0].placer
    faster = getattr(placer, "faster", None)
    if faster is None or not placer.may_be_local:
        yield preset
        return
    for way, kind in enumerate(("planned", "local")):
        faster.only = way
        yield f"{preset}, {kind}"


def _measure(
    worker: Any, prompts: Sequence[Prompt], repeats: int, progress: Progress | None, label: str
) -> tuple[dict[tuple[str, str], float], dict[str, Any]]:
    """Microseconds of one preset at one batch by (per what, part), and the spread of those that bars judge."""
    from tiermoe.actors.engine.host_times import KERNEL_PARTS, PARTS, host_steps

    kinds: dict[str, tuple[Sequence[str], Callable[[], float]]] = {
        "totals": (KERNEL_PARTS, time.perf_counter), "parts": (PARTS, time.perf_counter),
        "CPU totals": (KERNEL_PARTS, time.thread_time), "CPU parts": (PARTS, time.thread_time),
    }  # fmt: skip
    steps: dict[str, list[HostStep]] = {kind: [] for kind in kinds}

    def plain() -> Measures:
        return serve(worker.submit, prompts, MAX_TOKENS)[0]

    def timed(kind: str) -> Measures:
        parts, now = kinds[kind]
        with host_steps(worker.engine, worker.model, worker.batcher, parts, now) as collected:
            measures = plain()
        steps[kind] += [step for step in collected if step.rows == len(prompts)]
        return measures

    cases = [Case("plain", plain), *(Case(kind, lambda kind=kind: timed(kind)) for kind in kinds)]  # type: ignore[misc]
    for kind in kinds:
        timed(kind)  # warm up; not counted
        steps[kind].clear()
    taken = interleaved(cases, repeats, 0, progress, label)
    return by_part(steps, {kind: fmean(measures["tpot_s"].values) for kind, measures in taken.items()})


def by_part(
    steps: Mapping[str, Sequence[HostStep]], tpot_s: Mapping[str, float]
) -> tuple[dict[tuple[str, str], float], dict[str, Any]]:
    """The table of one preset at one batch, and the spread over the steps of `host` and `kernels` of a layer.

    Args:
        steps: by kind ("totals", "parts", "CPU totals", "CPU parts"). tpot_s: mean time between tokens, by kind and
            "plain".
    """
    found: dict[tuple[str, str], float] = {}
    brief: dict[str, Any] = {}
    for clock in ("", "CPU "):
        words = ", CPU" if clock else ""
        totals, parts = steps[f"{clock}totals"], steps[f"{clock}parts"]
        layers = [step.layers for step in totals]
        each = {"host": _OUTSIDE_S, "kernels": _KERNEL_S, "messages": _MESSAGES_S}
        spreads = {part: _layer_us(layers, value) for part, value in each.items()}
        brief |= {f"{part}{words}": asdict(spread) | {"values": None} for part, spread in spreads.items()}
        found |= {(f"layer{words}", part): spread.median for part, spread in spreads.items()}
        for part in parts[0].layers[0].parts:
            found[f"layer, by part{words}", part] = _layer_us([s.layers for s in parts], _part_s(part)).median
        token = {part: fmean(step.parts[part] for step in totals) * 1e6 for part in totals[0].parts}
        of_layers: dict[str, Callable[[HostPass], float]] = {
            "kernels": _KERNEL_S, "waits for copies": _part_s("copies"), "waits for peers": _part_s("peers"),
            "messages": _MESSAGES_S, "host": _OUTSIDE_S,
        }  # fmt: skip
        for name, value in of_layers.items():
            token[f"layers, {name}"] = fmean(sum(map(value, step)) for step in layers) * 1e6
        token["sum"] = sum(token.values())
        if not clock:
            token["measured"] = tpot_s["totals"] * 1e6
            token["rest"] = token["measured"] - token["sum"]
            token["measured without timing"] = tpot_s["plain"] * 1e6
        found |= {(f"token{words}", part): value for part, value in token.items()}
    return found, brief


_OUTSIDE_S, _HOST_S, _KERNEL_S, _MESSAGES_S = map(attrgetter, ("outside_s", "host_s", "kernel_s", "messages_s"))


def _part_s(part: str) -> Callable[[HostPass], float]:
    return lambda layer: layer.parts[part]


def _layer_us(steps: Sequence[Sequence[HostPass]], value: Callable[[HostPass], float]) -> Spread:
    """Microseconds of a layer, the mean over the layers of a step."""
    return Spread.of([fmean(map(value, layers)) * 1e6 for layers in steps])


def _service(config: RunConfig, prompt: Prompt, repeats: int) -> Column:
    """What a request costs beyond the worker: calls of its actor, pieces of the stream, text of the tokens."""
    from tiermoe.cluster.deploy import Deployment  # Ray
    from tiermoe.cluster.launch import Launch

    settings = engine_settings(config)
    store = prepared_store(config, settings)
    tokenizer = load_tokenizer(config.model_dir)
    tokens: list[int] = []

    def piece(token: int) -> TokenEvent:
        return TokenEvent("", (token,))

    with closing(start_worker(config)) as worker, Deployment(Launch(config, settings, str(store))) as runtime:
        numbers = iter(range(1 << 30))

        def direct() -> Measures:
            measures, found = serve(worker.submit, [prompt], MAX_TOKENS)
            tokens[:] = found[0]
            return measures

        def through_ray() -> Measures:
            sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
            asked_s = time.perf_counter()
            came_s: list[float] = []
            ttft_s = 0.0
            for event in runtime.generate(GenerationRequest(f"host-{next(numbers)}", prompt, sampling)):
                came_s.append(time.perf_counter())
                ttft_s = event.ttft_s or ttft_s
            first_s = came_s[0] - asked_s - ttft_s
            return {"tpot_s": (came_s[-1] - came_s[0]) / (MAX_TOKENS - 1), "first_s": first_s}

        def calls() -> Measures:
            return {"call_s": median(_seconds(runtime.health) for _ in range(CALLS))}

        def detokenize() -> Measures:
            def run_text() -> None:
                text = IncrementalText(tokenizer)
                for token in tokens:
                    text.add((token,))

            def api_text() -> None:
                text = ChoiceText(tokenizer, Display())
                for token in tokens:
                    text.delta(piece(token))

            return {
                name: median(_seconds(run) for _ in range(DETOKENIZED)) / len(tokens)
                for name, run in (("run_s", run_text), ("api_s", api_text))
            }

        cases = [Case("direct", direct), Case("ray", through_ray), Case("calls", calls), Case("text", detokenize)]
        found = interleaved(cases, repeats, 1)
    tpots = zip(found["ray"]["tpot_s"].values, found["direct"]["tpot_s"].values, strict=True)
    seconds = {
        ("request", "actor call"): found["calls"]["call_s"].median,
        ("request", "Ray, call to first piece"): found["ray"]["first_s"].median,
        ("token, client", "Ray, piece of a stream"): median(through - here for through, here in tpots),
        ("token, client", "detokenize, run"): found["text"]["run_s"].median,
        ("token, client", "detokenize, API"): found["text"]["api_s"].median,
    }
    return {(1, *key): value * 1e6 for key, value in seconds.items()}


def _seconds(run: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s
