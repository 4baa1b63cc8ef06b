"""What benchmarks run on: workers in this process, prompts, recorded traces, stores, and the time of computing."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.progress import Progress

from ....actors.policies.cost import Link, load_s
from ....actors.policy_settings import PolicySettings
from ....actors.requests import Generation, GenerationRequest, SamplingParams
from ....actors.settings import LinkSettings
from ....errors import CheckpointError, ConfigError, RequestError, RuntimeFailure
from ...config import (
    ClusterConfig,
    RaySettings,
    RunConfig,
    engine_settings,
    load_policy,
    load_run_config,
)
from ...prompt import check_length, load_model_config, load_tokenizer
from ...simulate.machine import Machine
from ...simulate.trace import Request, Trace, TraceHeader
from ..evaluate.text import load_heldout
from ..local_worker import start_worker
from ..prepare import ensure_replicas
from ..prepare.needs import add_missing, prepared_store
from .metrics import Measures, advancing

Prompt = tuple[int, ...]
_CALIBRATION_TEXT = "calibration"  # folder of a checkpoint: text that is neither trained nor measured on
_CALIBRATION_RUNS = 3  # prompts on which computing is measured, and runs of each
_LINKED_BYTES = 64 << 20  # from here on a file of a store is linked, not copied
_OF_WORKERS = ("ownership", "ndp_workers")  # keys of `cluster` that hold without Ray, too
_MEASURED = frozenset({2, 5, 8})  # of ten documents, spread so that all kinds of text are on both sides

Submit = Callable[[GenerationRequest], Any]
_ids = itertools.count()


def overridden(file: str, fixed: Collection[str]) -> list[str]:
    """Keys of a configuration file that a benchmark sets itself.

    Args:
        file: YAML file, or a name in configs/clusters.
        fixed: keys that the benchmark sets itself.

    Raises:
        ConfigError: the file asks for what only a deployment has, and this benchmark runs workers in its own process.
    """
    config = load_run_config(file)
    for key in _of_deployments(config):
        what = f"'{file}': key '{key}': this benchmark runs in one process, on one thread and without Ray"
        raise ConfigError(what, f"leave it out, or measure a deployment: `tiermoe bench serve --config {file}`")
    return sorted(config.model_fields_set & set(fixed))


def _of_deployments(config: RunConfig) -> Iterator[str]:
    """Keys whose values a worker without Ray, as `run_config` makes it, cannot have."""
    if config.threads not in (None, 1):
        yield "threads"
    if "request_deadline_s" in config.model_fields_set:
        yield "request_deadline_s"
    for section, given, none in (("ray", config.ray, RaySettings()), ("cluster", config.cluster, ClusterConfig())):
        for name in sorted(given.model_fields_set):
            counts = name in _OF_WORKERS and getattr(given, name) != "per-node"
            if not counts and getattr(given, name) != getattr(none, name):
                yield f"{section}.{name}"


def heldout_prompts(model_dir: Path, count: int, tokens: int, at_least: int | None = None) -> list[Prompt]:
    """The first `tokens` tokens of `count` held-out passages; the kinds of text take turns.

    Args:
        at_least: the smallest acceptable number of passages; None: `count`.

    Raises:
        CheckpointError: the model ships too few held-out passages.
    """
    least = count if at_least is None else at_least
    tokenizer = load_tokenizer(model_dir)
    prompts = [tuple(tokenizer.encode(text).ids[:tokens]) for text in heldout_texts(model_dir)]
    prompts = [prompt for prompt in prompts if len(prompt) == tokens][:count]
    if len(prompts) < least:
        raise CheckpointError(f"'{model_dir}' has no {least} held-out passages", "use the default model")
    return prompts


def heldout_texts(model_dir: Path) -> list[str]:
    """The held-out passages of a model; the kinds of text take turns. Empty: it has none."""
    kinds = [
        [json.loads(line)["text"] for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
        for path in sorted((model_dir / "heldout").glob("*.jsonl"))
    ]
    return [text for group in itertools.zip_longest(*kinds) for text in group if text is not None]


def serve(
    submit: Submit, prompts: Sequence[Prompt], max_tokens: int, seed: int | None = None,
    between_s: list[float] | None = None,
) -> tuple[Measures, list[list[int]]]:
    """Serve all prompts together, greedy or sampled at temperature 1 with a seed, and ignore stop tokens.

    Args:
        between_s: gets the seconds between tokens of a prompt that is alone; those of several are not seen one by one.

    Returns:
        Mean `ttft_s` and `tpot_s` over the requests, and each request's tokens.

    Raises:
        TierMoeError: a request failed.
    """
    temperature = 0.0 if seed is None else 1.0
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=temperature, seed=seed)
    streams = [submit(GenerationRequest(f"bench-{next(_ids)}", prompt, sampling)) for prompt in prompts]
    done = []
    for stream in streams:
        generation, times_s = Generation(""), list[float]()
        for event in stream:
            generation.add(event)
            times_s += [time.perf_counter()] * len(event.token_ids)
        if generation.failure is not None:
            raise generation.failure
        if generation.finish != "length":
            what = f"a request ended with {generation.finish}: {generation.error}"
            raise RuntimeFailure(what, "run again, and report it if it stays")
        done.append(generation)
        if between_s is not None and len(prompts) == 1:
            between_s += [after - before for before, after in itertools.pairwise(times_s)]
    measures = {
        "ttft_s": sum(g.ttft_s or 0.0 for g in done) / len(done),
        "tpot_s": sum(g.tpot_s or 0.0 for g in done) / len(done),
    }
    return measures, [g.token_ids for g in done]


# -- prompts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Prompts to learn from, and prompts to measure on. Each document is on one side only."""

    learn: tuple[Prompt, ...]
    measure: tuple[Prompt, ...]

    def first(self, prompts: int) -> Split:
        """The first prompts, 70% of them to learn from. Raises as `take`."""
        learn = round(0.7 * prompts)
        return self.take(learn, prompts - learn)

    def take(self, learn: int | None, measure: int | None) -> Split:
        """The first prompts of each side; None: all.

        Raises:
            CheckpointError: a side has fewer.
        """
        learn = len(self.learn) if learn is None else learn
        measure = len(self.measure) if measure is None else measure
        if len(self.learn) < learn or len(self.measure) < measure:
            there = f"{len(self.learn)} and {len(self.measure)}"
            what = f"the held-out text gives {there} prompts, not {learn} and {measure}"
            raise CheckpointError(what, "ask for fewer prompts, or use the default model")
        return Split(self.learn[:learn], self.measure[:measure])


def split_prompts(model_dir: Path, tokens: int) -> Split:
    """The first `tokens` tokens of every held-out passage that is long enough, split 7:3 by document.

    Documents take turns. Raises CheckpointError without held-out text.
    """
    heldout = load_heldout(model_dir)
    head = tokens - len(heldout.leading)

    def side(measured: bool) -> tuple[Prompt, ...]:
        chosen = [document for i, document in enumerate(heldout.documents) if (i % 10 in _MEASURED) == measured]
        passages = itertools.chain.from_iterable(itertools.zip_longest(*chosen))
        long = (passage.ids[:head] for passage in passages if passage is not None and len(passage.ids) >= head)
        return tuple((*heldout.leading, *ids) for ids in long)

    return Split(side(False), side(True))


def prompts_of_file(file: Path, base: RunConfig, max_tokens: int, prompt_tokens: int | None) -> tuple[Prompt, ...]:
    """The first `prompt_tokens` tokens of each prompt of a file.

    Raises:
        RequestError: the file is refused, or a prompt and its generated tokens exceed the model's context.
    """
    from ..record.record_command import read_prompts

    found = tuple(tuple(prompt[:prompt_tokens]) for prompt in read_prompts(file, base.model_dir))
    model_config = load_model_config(base.model_dir)
    for number, prompt in enumerate(found, start=1):
        try:
            check_length(len(prompt), max_tokens, model_config, base.kv)
        except RequestError as error:
            what = f"{file}: prompt {number}: {error.what}"
            raise RequestError(what, f"{error.remedy}, or pass --prompt-tokens") from error
    return found


# -- traces ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Recorded:
    """A trace in memory: requests to learn from, and requests to measure on."""

    header: TraceHeader
    learn: Sequence[Request]
    measure: Sequence[Request]


def record_split(
    base: RunConfig, texts: Split, prompt_tokens: int | None, tokens: int, distances: int, out: Path,
    progress: Progress | None,
) -> Recorded:  # fmt: skip
    """Record a trace of both sides' texts in the folder `out`, teacher-forced as `tiermoe record` does it.

    Args:
        prompt_tokens: of each text, prefilled; None: half of it. tokens: the next ones at most, decoded as they stand.

    Raises:
        TraceError: the texts repeat themselves. ConfigError, RuntimeFailure, RequestError: as `record` and `forced`.
    """
    from ..record.record_command import forced, refuse_loops, repeated_share
    from ..record.record_trace import Texts, record

    prompts, rest = forced((*texts.learn, *texts.measure), prompt_tokens, tokens)
    refuse_loops(repeated_share(prompts, rest), "the texts of the trace", "give other text")
    record(_recording(base), Texts(prompts, rest), out, SamplingParams(), distances, progress)
    return read_split(out, len(texts.learn))


def record_served(
    base: RunConfig, prompts: Split, tokens: int, distances: int, out: Path, progress: Progress | None
) -> Recorded:
    """Record in the folder `out` what `serve` runs: both sides' prompts, each with `tokens` greedy ones after it.

    For replays beside a served run. The greedy tokens of a small model fall into loops, so they say little of caches.

    Raises:
        ConfigError, RuntimeFailure: as `record`.
    """
    from ..record.record_trace import Texts, record

    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    record(_recording(base), Texts((*prompts.learn, *prompts.measure)), out, sampling, distances, progress)
    return read_split(out, len(prompts.learn))


def _recording(base: RunConfig) -> RunConfig:
    return base.model_copy(update={"policy": "on-demand", "budget": "1.0", "link": LinkSettings()})


def read_split(trace: Path, learned: int) -> Recorded:
    """Read a trace whose first `learned` requests are those to learn from. Raises TraceError for a corrupt one."""
    opened = Trace(trace)
    found = list(opened.requests())
    return Recorded(opened.header, found[:learned], found[learned:])


# -- stores ------------------------------------------------------------------------------------------------------------


def own_store(base: RunConfig, folder: Path) -> Path:
    """A copy of the prepared store, of large files by hard links where possible, to which files can be added.

    A link sets the change time of a file. Links that come and go within a second look like a write to a runtime that
    serves it (`store.pages.FileStamp`), so small files are copied.
    """
    source, store = prepared_store(base, engine_settings(base)), folder / "store"

    def link_or_copy(source: str, target: str) -> None:
        if os.path.getsize(source) >= _LINKED_BYTES:
            with contextlib.suppress(OSError):  # another file system
                os.link(source, target)
                return
        shutil.copy2(source, target)

    shutil.copytree(source, store, copy_function=link_or_copy)
    return store


def ensure_artifacts(base: RunConfig, presets: Iterable[PolicySettings]) -> None:
    """Add to the prepared store the gates, profile and replicas that these presets read and it lacks.

    Where one of them needs the popularity of experts, all of them get calibrated replicas: presets that are compared
    run on the same ones.

    Raises:
        ConfigError: an artifact is missing, and the checkpoint ships no calibration text.
    """
    settings, text = engine_settings(base), base.model_dir / _CALIBRATION_TEXT
    presets = list(presets)
    needing = [preset for preset in presets if preset.needs or preset.replica_widths or preset.needs_popularity]
    if not needing:
        return
    store = prepared_store(base, settings.model_copy(update={"policy": load_policy("on-demand")}))
    widths = sorted({width for preset in presets for width in preset.replica_widths})
    known = any(preset.needs_popularity for preset in presets)
    if widths or known:
        ensure_replicas(store, base.model_dir, widths, base.ndp.group_size, calibrated=known, progress=False)
    for preset in needing:  # predictors are trained on the prompts to learn from, else by the start
        add_missing(store, preset, base.model_dir, text, preset.needs - {"predictors"}, progress=False)


# -- calibration -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """One decode step with all experts resident, one request at a time.

    tpot_s: seconds for each generated token. moe_s: seconds of a layer's experts in one step, with the host's work.
    expert_bytes: bytes of one expert in its slot. latency_us: microseconds of each copy on the emulated links.
    """

    layers: int
    experts: int
    top_k: int
    expert_bytes: int
    tpot_s: float
    moe_s: float
    latency_us: float

    @property
    def compute_s(self) -> float:
        """Seconds of a layer: the step divided by the layers."""
        return self.tpot_s / self.layers

    def load_s(self, gbps: float) -> float:
        """Seconds in which a link of `gbps` (1e9 bytes per second) loads the K experts of a token in a layer."""
        return self.top_k * load_s(self.expert_bytes, Link(gbps, self.latency_us))

    def ratio(self, gbps: float) -> float:
        """Loading over computing: `load_s` over `compute_s`."""
        return self.load_s(gbps) / self.compute_s

    def link(self, ratio: float, digits: int = 2) -> float:
        """Gigabytes (1e9) per second at which loading over computing is `ratio`, to so many digits.

        Raises:
            ConfigError: no link is fast enough.
        """
        transfer_s = ratio * self.compute_s / self.top_k - self.latency_us * 1e-6
        if transfer_s <= 0:
            what = f"no link loads {ratio:g} times as long as computing takes: "
            what += f"a copy's latency of {self.latency_us:g} us alone is longer"
            raise ConfigError(what, "give a greater ratio, or a smaller link.latency_us")
        return float(f"{self.expert_bytes / transfer_s / 1e9:.{digits}g}")

    @staticmethod
    def of_machine(shape: Mapping[str, int], machine: Machine, latency_us: float) -> Calibration:
        """From the costs of the machine that recorded a trace. shape: see `shape_of`."""
        moe_s = machine.experts(shape["top_k"], shape["top_k"])
        tpot_s = machine.forward_s + shape["layers"] * (machine.dense(1) + moe_s)
        return Calibration(
            shape["layers"], shape["experts"], shape["top_k"], shape["slot_bytes"], tpot_s, moe_s, latency_us
        )


def shape_of(header: TraceHeader) -> dict[str, int]:
    """Layers, experts, top_k and slot_bytes of a trace's model."""
    return {name: getattr(header, name) for name in ("layers", "experts", "top_k", "slot_bytes")}


def calibrate(base: RunConfig, prompts: Sequence[Prompt], max_tokens: int, progress: Progress | None) -> Calibration:
    """Measure the first three prompts three times, one request after the other; medians."""
    from ....actors.engine.host_times import KERNEL_PARTS, host_passes

    prompts = _CALIBRATION_RUNS * list(prompts[:_CALIBRATION_RUNS])
    advance = advancing(progress, "computing without waits", len(prompts))
    config = base.model_copy(update={"policy": "all-resident", "budget": "1.0", "link": LinkSettings()})
    with closing(start_worker(config)) as worker:
        serve(worker.submit, prompts[:1], max_tokens)
        taken = []
        for prompt in prompts:
            taken.append(serve(worker.submit, [prompt], max_tokens)[0]["tpot_s"])
            advance()
        with host_passes(worker.engine, KERNEL_PARTS) as passes:
            serve(worker.submit, prompts[:1], max_tokens)
        engine = worker.engine
        return Calibration(
            len(engine.layers), engine.experts, engine.top_k, engine.slot_bytes, median(taken),
            median(p.total_s for p in passes if p.tokens == 1), base.link.latency_us,
        )  # fmt: skip
