"""Adapters between the golden figures (tests/golden) and the product: every internal name that they need is here.

A golden figure is a JSON value under tests/golden. A refactoring that renames something changes a line of this file; it
does not change a figure.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from channel_peer import wait_until
from decision_rig import COUNTERS as DECIDED
from fake_api import FakeBackend
from fake_api import serving as serving_api
from policy_presets import POLICIES
from serving import add_random_profile, gathered, greedy, prepared, settings

from tiermoe.actors.core import _core
from tiermoe.actors.engine.cache.cache import ExpertCache
from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.matcher import Matcher
from tiermoe.actors.ndp_worker import NdpWorker
from tiermoe.actors.policies.baselines import Predictor, PreGate
from tiermoe.actors.requests import GenerationRequest, SamplingParams
from tiermoe.actors.settings import EngineSettings, KvSettings, LinkSettings, NdpSettings
from tiermoe.actors.store.artifacts import (
    GATES_NAME,
    PredictorsOf,
    encode_gates,
    encode_predictors,
    map_shape,
    predictors_file,
)
from tiermoe.actors.store.files import ExpertStore
from tiermoe.actors.store.format import model_fingerprint, read_manifest
from tiermoe.cluster.cli import app, main
from tiermoe.cluster.config import default_model_dir, load_hardware, load_policy
from tiermoe.cluster.jobs.bench.serving import heldout_prompts
from tiermoe.cluster.jobs.prepare.replica_options import ReplicaOptions
from tiermoe.cluster.jobs.prepare.replicas import add_replicas
from tiermoe.proto.peers import MATCHER, LocalDirectory, ndp_name

PRESETS = POLICIES
FOLDER = Path(__file__).parent / "golden"
TOP_K = 4  # of the default model
PROMPT_TOKENS, TOKENS = 24, 10
KV = KvSettings(page_size=32, num_blocks=32)
LINK = LinkSettings(gbps=0.9, latency_us=10.0, layer_us=900.0)

# counters of a run; zero is left out of the JSON
COUNTERS = (*DECIDED, "failed_prefetches", "expert_budget_bytes", "expert_bytes_peak")
STEPPED = ("blocked_io_s", "total_io_s", "link_s")  # seconds of a clock that layers move
NDP = ("ndp_recomputed", "ndp_modelled_s")


# -- the emulated executor ----------------------------------------------------------------------------------------


def golden_store(folder: Path, widths: Sequence[int]) -> ExpertStore:
    """The default model's store with handmade gates, predictors and profile, and replicas of `widths`.

    Replicas take most of a minute to make.
    """
    store = prepared(default_model_dir(), folder / "store")
    path = Path(store.describe().path)
    manifest, rng = read_manifest(path), np.random.default_rng(7)
    layers, shape = len(manifest.layers), manifest.experts
    experts, hidden = shape.num_experts, shape.hidden

    def noise(*dims: int) -> Any:
        return rng.standard_normal(dims).astype(np.float32)

    gates = [PreGate(noise(experts, hidden), noise(experts)) for _ in range(layers - 1)]
    (path / GATES_NAME).write_bytes(encode_gates(gates, manifest, 100))
    stride = load_policy("promoe").prefetch.distance
    predictors = [
        Predictor(
            noise(experts) * 0, noise(experts) * 0 + 1, noise(experts, 8), noise(8), noise(8, experts), noise(experts)
        )
        for _ in range(layers - stride)
    ]
    of = PredictorsOf(model_fingerprint(manifest), layers, experts, stride)
    (path / predictors_file(stride)).write_bytes(encode_predictors(predictors, of))
    add_random_profile(path, TOP_K, outputs=True)
    if widths:
        text = folder / "text.txt"
        text.write_text("".join(f"def f{i}(x):\n    return x * {i} + {i * i}\n\n" for i in range(12)))
        add_replicas(path, default_model_dir(), ReplicaOptions(tuple(widths), 64), text, progress=False)
    return store


def golden_settings(preset: str, **more: Any) -> EngineSettings:
    """A preset on the fixed budget and link. The clock of NDP workers cannot be stepped: their link has no limit."""
    policy = load_policy(preset)
    budget = 1.0 if policy.preload == "all" else 0.375
    link = LinkSettings(gbps=None) if policy.uses_ndp else LINK
    ndp = NdpSettings(hardware=asdict(load_hardware("paper-ndp")))
    # frozen with transformers' own dense part, whose last bits lossy policies can see
    made = settings(budget, policy=policy, kv=KV, link=link, ndp=ndp, compile="off")
    return made.model_copy(update=more)


def uses_ndp(preset: str) -> bool:
    return load_policy(preset).uses_ndp


def is_lossless(preset: str) -> bool:
    return load_policy(preset).lossless


def replica_widths(preset: str) -> tuple[int, ...]:
    """Of the replicas that the store must have: none, or all, which are made once."""
    policy = load_policy(preset)
    return (1, 2, 3, 4) if policy.replica_widths or policy.needs_popularity else ()


class _Answer:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self._answer


class _Channel:
    """Answers at once, on the caller's thread, so that what is answered in time does not depend on the machine."""

    transport, alive, closed_because = "in-process", True, None

    def __init__(self, handle: Callable[[Any], Any]) -> None:
        self._handle = handle

    def submit(self, message: Any, deadline_s: float) -> _Answer:
        return _Answer(self.call(message, deadline_s))

    def call(self, message: Any, deadline_s: float) -> Any:
        return self._handle(message)

    def close(self) -> None:
        pass


class _Link:
    """The way to a worker of this process."""

    def __init__(self, name: str, worker: Any) -> None:
        self.name, self._worker = name, worker

    def address(self) -> str:
        return str(self._worker.address)

    def connect(self, address: str, transport: Any, supply: Any = None, traffic: Any = None) -> _Channel:
        return _Channel(self._worker.handle)


@contextmanager
def emulated(store: ExpertStore, config: EngineSettings) -> Iterator[GpuWorker]:
    """A started lead; its matcher and its NDP worker are objects of this process."""
    view, policy, workers = store.describe(), config.policy, list[Any]()
    links: dict[str, Any] = {}
    if policy.maps is not None:
        workers.append(Matcher(config.matcher, policy.maps, map_shape(view.manifest), TOP_K, LocalDirectory()))
        links["matcher"] = _Link(MATCHER, workers[-1])
    if policy.uses_ndp:
        workers.append(NdpWorker(config.ndp, view.path, LocalDirectory()))
        links["ndp"] = [_Link(ndp_name(0), workers[-1])]
    lead = GpuWorker(config, view, **links)
    try:
        lead.start()
        yield lead
    finally:
        lead.close()
        for worker in workers:
            worker.close()


def workload() -> list[tuple[int, ...]]:
    return heldout_prompts(default_model_dir(), 4, PROMPT_TOKENS)


def run_emulated(store: ExpertStore, preset: str) -> dict[str, Any]:
    """Two prompts one after the other, then two together: tokens, counters, and the order of loads."""
    prompts, ndp = workload(), uses_ndp(preset)
    with emulated(store, golden_settings(preset)) as worker:
        asked = asked_of(worker.engine.cache)
        tokens = [_alone(worker, prompt) for prompt in prompts[:2]] + _together(worker, prompts[2:])
        record = worker.stats().as_dict()
    if load_policy(preset).placement.planned:  # where an expert runs depends on the machine's times
        for part in (record, *record["layers"]):
            part["experts_run"] = part["hits"] + part["misses"] + part["ndp_experts"]
        names = ("experts_run", "forwards", "slots", "expert_budget_bytes", "expert_bytes_peak")
        return {"tokens": tokens, "counters": _chosen(record, names), "by_layer": _by_layer(record, ("experts_run",))}
    if ndp:  # whether an expert that moves for a decode is there in time depends on the machine, and so does the order
        for part in (record, *record["layers"]):
            part["experts_run"] = part.pop("hits") + part.pop("misses")
        names = ("experts_run", *COUNTERS[2:], *NDP)
        return {"tokens": tokens, "counters": _chosen(record, names), "by_layer": _by_layer(record, ("experts_run",))}
    found = {"tokens": tokens, "counters": _chosen(record, COUNTERS + STEPPED), "by_layer": _by_layer(record)}
    if record["prefetch_sources"]:
        found["sources"] = record["prefetch_sources"]
    return found | {"order": order_of(loads(asked))}


def _by_layer(record: Mapping[str, Any], names: Sequence[str] = ("hits", "misses")) -> dict[str, list[int]]:
    return {name: [layer[name] for layer in record["layers"]] for name in names}


def _alone(worker: GpuWorker, prompt: Sequence[int]) -> list[int]:
    tokens = greedy(worker, [prompt], TOKENS)
    _until_idle(worker)
    return tokens[0]


def _together(worker: GpuWorker, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The first prompt's prefill is one forward, the others' prefill and its first decode are the next."""
    engine, entered, submitted = worker.engine, threading.Event(), threading.Event()
    begin_forward = engine.begin_forward

    def held(rows: Any) -> None:
        entered.set()
        assert submitted.wait(60)
        begin_forward(rows)

    engine.begin_forward = held
    sampling, streams = SamplingParams(max_tokens=TOKENS), []
    for i, prompt in enumerate(prompts):
        streams.append(worker.submit(GenerationRequest(f"t{i}", tuple(prompt), sampling)))
        assert entered.wait(60)
    submitted.set()
    found = [gathered(stream).token_ids for stream in streams]
    engine.begin_forward = begin_forward
    _until_idle(worker)
    return found


def _until_idle(worker: GpuWorker) -> None:
    """The batcher ends a request after its last token was read; what it does then comes before the next request."""
    wait_until(lambda: not worker.health()["running"], 30.0)


# -- loads ---------------------------------------------------------------------------------------------------------


def asked_of(cache: ExpertCache) -> _core.AskedLog:
    """What the cache asks of its link from now on."""
    log = _core.AskedLog()
    cache.core.log_to(log)
    return log


def loads(asked: _core.AskedLog) -> list[str]:
    """Every copy that was queued, as cause and key ("d17": demand, "p17": prefetch)."""
    return [f"{what}{segment}" for what, segment, _ in asked.take() if what in "dpm"]


def order_of(seen: Sequence[str], chunk: int = 64) -> dict[str, Any]:
    """How many, the first ones, and a checksum of each 64: a difference shows where it begins."""
    sums = [f"{zlib.crc32(' '.join(seen[i : i + chunk]).encode()):08x}" for i in range(0, len(seen), chunk)]
    return {"loads": len(seen), "first": " ".join(seen[:96]), "crc": " ".join(sums)}


def _chosen(record: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: _rounded(record[name]) for name in names if record[name] not in (0, None)}


def _rounded(value: Any) -> Any:
    """Ten digits of a float: another order of summation is no other figure."""
    return float(f"{value:.10g}") if isinstance(value, float) else value


# -- the command line ----------------------------------------------------------------------------------------------


def command_line() -> dict[str, str]:
    """Arguments and options of every command, sorted; a command's options are in the module that it is forwarded to."""
    found: dict[str, str] = {}
    _walk(typer.main.get_command(app), "tiermoe", found)
    return dict(sorted(found.items()))


def _walk(node: Any, path: str, found: dict[str, str]) -> None:
    if (node.context_settings or {}).get("ignore_unknown_options"):
        node = _forwarded(path.split()[1:])
    parameters = [
        " ".join(sorted([*p.opts, *p.secondary_opts])) if p.param_type_name == "option" else f"<{p.name}>"
        for p in node.params
        if p.name != "help"
    ]
    found[path] = " | ".join(sorted(parameters))
    if hasattr(node, "list_commands"):  # those of `bench` that a clone adds, too
        context = typer.Context(node)
        for name in node.list_commands(context):
            _walk(node.get_command(context, name), f"{path} {name}", found)


def _forwarded(args: list[str]) -> Any:
    """The command that is called for these arguments, which is not run."""
    call, seen = typer.Typer.__call__, list[Any]()

    def watched(self: typer.Typer, *rest: Any, **more: Any) -> Any:
        if self is app:
            return call(self, *rest, **more)
        seen.append(typer.main.get_command(self))
        raise SystemExit(0)

    with pytest.MonkeyPatch.context() as patch, suppress(SystemExit):
        patch.setattr(typer.Typer, "__call__", watched)
        main(args)
    return seen[0]


def keys_of(value: Any, path: str = "") -> set[str]:
    """The keys of a JSON value as paths; "[]" is any element of a list."""
    if isinstance(value, Mapping):
        found = {f"{path}.{key}".lstrip(".") for key in value}
        return found.union(*(keys_of(part, f"{path}.{key}".lstrip(".")) for key, part in value.items()))
    if isinstance(value, list | tuple):
        return set[str]().union(*(keys_of(part, f"{path}[]") for part in value))
    return set()


# -- HTTP ----------------------------------------------------------------------------------------------------------


async def openapi_and_metrics() -> tuple[dict[str, Any], str]:
    """The OpenAPI document, and the page of metrics after a completion and a chat."""
    _, client = serving_api(FakeBackend())
    async with client() as http:
        await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 4})
        await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], "stream": True})
        document = (await http.get("/openapi.json")).json()
        document["info"].pop("version")
        return document, (await http.get("/metrics")).text


def http_figures(document: dict[str, Any], metrics: str) -> dict[str, Any]:
    schemas = document["components"]["schemas"]
    return {
        "openapi_sha256": hashlib.sha256(json.dumps(_undescribed(document), sort_keys=True).encode()).hexdigest(),
        "paths": sorted(f"{verb.upper()} {path}" for path, verbs in document["paths"].items() for verb in verbs),
        "schemas": {name: sorted(schemas[name].get("properties", ())) for name in sorted(schemas)},
        "metrics": sorted(set(re.findall(r"^# TYPE (\S+ \S+)$", metrics, re.MULTILINE))),
        "series": sorted(set(re.findall(r"^(tiermoe_\w+(?:\{[^}]*\})?) ", re.sub(r'le="[^"]*"', "le", metrics), re.M))),
    }


def _undescribed(value: Any) -> Any:
    """Without the prose, which may be said otherwise."""
    if isinstance(value, dict):
        prose = ("description", "summary", "title")
        return {key: _undescribed(part) for key, part in value.items() if key not in prose}
    return [_undescribed(part) for part in value] if isinstance(value, list) else value
