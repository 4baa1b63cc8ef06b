"""`bench deployment`: what a deployment on several nodes serves, by GPUs, NDP workers and place of the store.

    namespaces with cables of a stated bandwidth -> Ray nodes -> `tiermoe bench sweep` on the head -> rows,
    and the same configurations on a virtual clock beside them

All nodes share this machine's cores: figures are emulated, and more processes than cores wait for each other.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import yaml
from rich.progress import Progress

from tiermoe.actors.budget import Budget
from tiermoe.actors.policies.cost import FULL_BITS, NdpDevice
from tiermoe.cluster.config import default_model_dir, load_policy
from tiermoe.cluster.jobs.bench.metrics import Bar, Report, advancing, markdown, text_of
from tiermoe.cluster.jobs.bench.serving import Prompt, Recorded, Split, heldout_prompts, record_served, serve
from tiermoe.cluster.jobs.local_worker import run_config, start_worker
from tiermoe.cluster.jobs.replay import engine_for
from tiermoe.cluster.prompt import load_tokenizer
from tiermoe.cluster.report.results import measured_rows, read_json
from tiermoe.cluster.simulate.hit_rates import serve as serve_simulated
from tiermoe.cluster.simulate.machine import Machine, load_machine
from tiermoe.errors import ConfigError, RuntimeFailure

from .cases import LATENCY_US, Deployment
from .channels import round_trip_us
from .machines import BIN, Node, RayNodes, Switch, environment, why_not_isolated
from .random_model import NamedModel

LOADS, NEAR = "on-demand", "auto"  # policies: without NDP workers, and with
SHARE = 0.25  # of the experts on all GPUs together
PROMPT_TOKENS, TOKENS = 32, 32
ROUNDS = 2  # requests of each client in a repetition; of the random model, whose steps take five times as long, one
CLIENTS = (1, 8)
CPUS = 4  # that each node offers; they are the machine's own
DISTANCES = 2
GAINS, MESSAGE_US = {2: 1.6, 4: 2.4}, 60.0  # bars
_STRUCK_S, _STRUCK_ROUNDS = 0.2, 8  # processor's seconds of work before a worker is killed; requests of each client
_LOOK_S = 0.05
_SERVING = "starting the HTTP server"  # of a deployment that is ready
_PROMPTS = "prompts.jsonl"
_LOST_S = 900.0


@dataclass(frozen=True)
class Model:
    """A model of the figure. folder: its checkpoint; None: the default model. rounds: requests of each client."""

    name: str
    folder: str | None
    rounds: int = ROUNDS


@dataclass(frozen=True)
class Point:
    """One configuration on so many nodes. store: `replicated`, or read over the `network` from the last node."""

    nodes: int
    shards: int
    ndp: int = 0
    store: str = "replicated"

    @property
    def policy(self) -> str:
        return NEAR if self.ndp else LOADS

    @property
    def budget(self) -> str:
        """Of each GPU."""
        return f"{SHARE / self.shards:g}"

    def cell(self, clients: Sequence[int]) -> dict[str, Any]:
        """As a sweep's file has it."""
        return {
            "cluster.shards": self.shards, "budget": self.budget, "policy": self.policy,
            "cluster.ndp_workers": self.ndp or None,
            "cluster.store.nodes": "workers" if self.store == "replicated" else "marked", "load.streams": list(clients),
        }  # fmt: skip


def points_of(nodes: int, options: Deployment) -> list[Point]:
    """The grid on so many nodes: GPUs, NDP workers up to two, and the store read over the network."""
    if options.quick:
        all_kinds = Point(nodes, nodes, ndp=1)
        points = [all_kinds] if nodes == 2 else [Point(nodes, 1), Point(nodes, nodes), all_kinds]
    else:
        grid = product(range(1, nodes + 1), range(3 if nodes > 2 else 2))
        points = [*(Point(nodes, shards, ndp) for shards, ndp in grid), Point(nodes, nodes, store="network")]
    asked = [(options.gpus, "shards"), (options.ndp, "ndp")]
    return [one for one in points if all(not some or getattr(one, name) in some for some, name in asked)]


def deployment(options: Deployment, progress: Progress | None) -> Report:
    """Tokens a second, TPOT, bytes and waits by GPUs, NDP workers and clients, on two and on four nodes.

    All GPUs together have a quarter of the experts, whatever their number, and a link each. Without NDP workers experts
    are loaded on demand; with them `auto` decides. Of each deployment all clients are measured. Simulated: the same
    prompts' routing with the times of computing that its recording took, a message's time as measured here, and a
    core for each process, which this machine has not.

    Bars, at 8 clients on four nodes, the store replicated: two GPUs over one >= 1.6, four >= 2.4. A message's part of a
    layer on one node, everything resident: <= 60 us of the lead's time in sending and joining, at one request.

    Raises:
        ConfigError: namespaces are not allowed here, or no point has such `gpus` and `ndp`.
        RuntimeFailure: a node did not start, or a sweep ended.
    """
    if (why := why_not_isolated()) is not None:
        raise ConfigError(why, "run it as root, or where user namespaces are allowed")
    if not any(points_of(nodes, options) for nodes in options.nodes):
        what = "no point of the grid has so many GPUs and NDP workers"
        raise ConfigError(what, "give other --gpus, --ndp or --nodes")
    report = Report("deployment", "emulated", settings=_settings(options))
    with _work(options.work) as work:
        prompts = _prompts(work)
        models = [Model("default", None)]
        if options.layers:
            models.append(_random(options.layers))
        advance = advancing(progress, "models and nodes", len(models) * len(options.nodes) + 2)
        message = _message_us()
        advance()
        report.figures["message_us"] = message
        for model in models:
            recorded = _recorded(model, prompts, work, progress)
            for nodes in options.nodes:
                found = _swept(options, model, nodes, work, report)
                report.rows += [
                    row | _beside(row, point, clients, model.rounds, recorded, options, message)
                    for (point, clients), row in found.items()
                ]
                advance()
        report.figures["killed"] = _killed(options, work)
        advance()
    report.bars += _bars(report.rows, message)
    report.printed = list(_tables(report))
    return report


def _settings(options: Deployment) -> dict[str, Any]:
    return options.settings(
        share=SHARE, latency_us=LATENCY_US, prompt_tokens=PROMPT_TOKENS, max_tokens=TOKENS, clients=list(CLIENTS),
        cores=len(os.sched_getaffinity(0)), model="the default model; Qwen3-30B-A3B's shape",
    ) | {"work": None}  # fmt: skip


@contextmanager
def _work(folder: Path | None) -> Iterator[Path]:
    """The folder of finished sweeps; a temporary one, if none is given."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="tiermoe-deployment-") as found:
        yield Path(found)


def _random(layers: int) -> Model:
    made = NamedModel("qwen3-30b-a3b", layers=layers)
    return Model(f"qwen3-30b-a3b, {made.layers} layers, {made.form}", str(made.made()), rounds=1)


def _prompts(work: Path) -> list[Prompt]:
    """The prompts of all models, which have one tokenizer; the sweeps read them from a file of the folder."""
    prompts = heldout_prompts(default_model_dir(), ROUNDS * max(CLIENTS), PROMPT_TOKENS)
    tokenizer = load_tokenizer(default_model_dir())
    lines = [json.dumps({"prompt": tokenizer.decode(list(prompt))}) for prompt in prompts]
    (work / _PROMPTS).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return prompts


# -- sweeps ------------------------------------------------------------------------------------------------------------


@contextmanager
def _nodes(options: Deployment, count: int) -> Iterator[tuple[RayNodes, float]]:
    """Ray nodes in namespaces, the last with the store's mark, and microseconds of delay that cables got."""
    with tempfile.TemporaryDirectory(prefix="nodes-") as folder, closing(Switch(Path(folder))) as machines:
        nodes = RayNodes(machines, CPUS, {"ndp": 1})
        nodes.add_all(*[(CPUS, {"ndp": 1} | ({"store": 1} if i == count - 1 else {})) for i in range(1, count)])
        delays = [machines.shape(node.machine, options.gbit, options.delay_us) for node in nodes.nodes]
        yield nodes, min(delays)


def _sweep(
    options: Deployment, model: Model, nodes: RayNodes, work: Path, cells: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A sweep's file. Its cells are compared with one GPU on these nodes, if that is among them."""
    one = {key: v for key, v in Point(len(nodes.nodes), 1).cell(()).items() if key != "load.streams"}
    return {
        "config": {
            "model": model.folder, "device": "cpu", "threads": 1, "kv": {"prefix_cache": False},
            "link": {"gbps": options.link_gbps, "latency_us": LATENCY_US},
            "cluster": {"lead": nodes.head.address, "strategy": "spread"},
            "ray": {"address": nodes.address, "startup_deadline_s": _LOST_S},
        },
        "load": {
            "prompts": str((work / _PROMPTS).absolute()), "requests": model.rounds, "max_tokens": TOKENS,
            "ignore_eos": True,
        },
        "repeats": options.repeats, "cells": list(cells),
        "baseline": one if any(cell.items() >= one.items() for cell in cells) else {},
    }  # fmt: skip


def _run_sweep(
    sweep: Mapping[str, Any], nodes: RayNodes, out: Path, serving: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """The result of `tiermoe bench sweep` on the head; a finished one of the same file is read.

    Args:
        serving: called when a deployment of the sweep is ready, and its HTTP server starts.

    Raises:
        RuntimeFailure: it ended without a result.
    """
    file = out.with_suffix(".yaml")
    text = yaml.safe_dump(dict(sweep), sort_keys=False)
    if out.exists() and file.exists() and file.read_text(encoding="utf-8") == text:
        record = dict(read_json(out))
        if len(measured_rows(record["rows"])) == len(record["rows"]):
            return record
    file.write_text(text, encoding="utf-8")
    out.unlink(missing_ok=True)
    command = nodes.head.machine.command(str(BIN / "tiermoe"), "bench", "sweep", str(file), "--out", str(out))
    process = subprocess.Popen(
        command, env=environment(), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        for line in process.stderr:  # ends with the process
            sys.stderr.write(line)
            if line.startswith(_SERVING):
                serving()
        code = process.wait()
    finally:  # what it has started ends with the nodes
        process.kill()
        process.wait()
    if not out.exists():
        raise RuntimeFailure(f"the sweep of '{file}' ended with {code} and no result", "see what it printed")
    return dict(read_json(out))


def _swept(
    options: Deployment, model: Model, count: int, work: Path, report: Report
) -> dict[tuple[Point, int], dict[str, Any]]:
    """The rows of a model on so many nodes, by point and clients; what is refused goes into the report."""
    points, clients = points_of(count, options), CLIENTS[-1:] if options.quick else CLIENTS
    if not points:
        return {}
    with _nodes(options, count) as (nodes, delay_us):
        sweep = _sweep(options, model, nodes, work, [point.cell(clients) for point in points])
        record = _run_sweep(sweep, nodes, work / f"{model.name.split(',')[0]}-{count}-nodes.json")
    found = {}
    for point, each in product(points, clients):
        cell = point.cell([each]) | {"load.streams": each}
        own = {"model": model.name, "nodes": count, "shards": point.shards, "ndp": point.ndp, "store": point.store,
               "batch": each, "policy": point.policy, "delay_us": delay_us}  # fmt: skip
        for row in record["rows"]:
            if all(row.get(key) == value for key, value in cell.items()):
                if "refused" in row:
                    report.refused.append(own | row)
                else:
                    found[point, each] = own | _measured(row)
    return found


def _measured(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the figure says of a sweep's row; times of a step are the lead's, by what it waits for."""
    steps = max(1.0, row["lead.steps"])
    waits = {name: 1e3 * row.get(f"lead.{counter}", 0.0) / steps for name, counter in _WAITS.items()}
    step_ms = 1e3 * row["lead.step_s"] / steps
    waits["rest_ms"] = step_ms - sum(waits.values())
    return {
        "tokens_per_s": row["tokens_per_s"], "spread": row["spread"]["tokens_per_s"], "ratio": row.get("ratio"),
        "tpot_ms": row["tpot_p50_ms"], "ttft_ms": row["ttft_p50_ms"], "step_ms": step_ms, **waits,
        "most": max(waits, key=waits.__getitem__).removesuffix("_ms"),
        "loaded_mb": row.get("bytes_loaded", 0.0) / 1e6 / steps,
        "network_mb": row.get("bytes_between", 0.0) / 1e6 / steps,
    }  # fmt: skip


_WAITS = {"copies_ms": "blocked_io_s", "gpus_ms": "shard_wait_s", "ndp_ms": "ndp_wait_s"}


# -- the same on a virtual clock ---------------------------------------------------------------------------------------


def _recorded(model: Model, prompts: Sequence[Prompt], work: Path, progress: Progress | None) -> Recorded:
    """The routing of the prompts that the sweeps serve, and what computing took in its recording."""
    with tempfile.TemporaryDirectory(dir=work) as out:
        base = run_config(model.folder, None)
        return record_served(base, Split(tuple(prompts), ()), TOKENS, DISTANCES, Path(out) / "trace", progress)


def _beside(
    row: Mapping[str, Any], point: Point, clients: int, rounds: int, recorded: Recorded, options: Deployment,
    message: Mapping[str, float],
) -> dict[str, Any]:  # fmt: skip
    """The simulated TPOT of a row's configuration, and the error of it."""
    cable = options.model_copy(update={"delay_us": row["delay_us"]})  # that the kernel could add
    machine, header = machine_of_point(point, recorded, cable, message), recorded.header
    engine = engine_for(load_policy(point.policy), header, machine, Budget.parse(point.budget))
    requests = recorded.learn[: rounds * clients]
    serve_simulated(engine, requests[:clients], clients)
    found = serve_simulated(engine, requests, clients)
    return {"simulated_ms": 1e3 * found.tpot_s, "error": 1e3 * found.tpot_s / row["tpot_ms"] - 1}


def machine_of_point(point: Point, recorded: Recorded, options: Deployment, message: Mapping[str, float]) -> Machine:
    """The recording's machine with the point's GPUs, links, cables and NDP workers.

    An NDP worker computes as the recorded CPU does. Messages between nodes take half of a measured round trip by gRPC
    each way, and their bytes the cable's bandwidth; of the lead's host half of one by shared memory, which has no more
    than encoding and decoding.
    """
    found = load_machine(recorded.header, None, options.link_gbps, LATENCY_US)
    hop_us, peer_gbps = message["grpc_us"] / 2 + options.delay_us, options.gbit / 8
    changes: dict[str, Any] = {
        "gpus": point.shards, "peer_gbps": peer_gbps, "peer_us": hop_us, "message_s": message["shm_us"] * 1e-6 / 2,
    }  # fmt: skip
    if point.ndp:
        weights = recorded.header.slot_bytes / (4 if recorded.header.expert_dtype == "float32" else 2)
        device = NdpDevice(
            name="a core", memory_gbps=weights * FULL_BITS / 8 / found.expert_s / 1e9, capacity_bytes=1 << 40, arrays=1,
            array_rows=1, array_cols=1, clock_ghz=max(weights / max(found.expert_row_s, 1e-9) / 1e9, 1e-6),
            narrowest_bits=FULL_BITS, link_gbps=peer_gbps, link_latency_us=hop_us,
        )  # fmt: skip
        changes |= {"ndp": device, "ndp_workers": point.ndp}
    return found.model_copy(update=changes)


# -- a message's part of a layer ---------------------------------------------------------------------------------------


def _message_us() -> dict[str, float]:
    """layer_us: microseconds of the lead in a layer for its one message to another GPU of this node: sending it and
    taking the answer, without the wait for it. wait_us: that wait, so what the peer takes longer than the lead.

    Everything is resident, one request. shm_us, grpc_us: 8 KiB there and back to another process, by each transport.
    """
    from tiermoe.actors.engine.host_times import MESSAGES, host_passes

    prompts = heldout_prompts(default_model_dir(), 1, PROMPT_TOKENS)
    config = run_config(None, None, policy="all-resident", budget="1.0", cluster={"shards": 2})
    with closing(start_worker(config)) as worker:
        serve(worker.submit, prompts, TOKENS)
        with host_passes(worker.engine, MESSAGES) as passes:
            serve(worker.submit, prompts, TOKENS)
    sent = [one for one in passes if one.tokens == 1 and one.parts["send"]]
    part_s, wait_s = median(one.messages_s for one in sent), median(one.parts["peers"] for one in sent)
    found = {"layer_us": 1e6 * part_s, "wait_us": 1e6 * wait_s}
    return found | {f"{transport}_us": round_trip_us(transport) for transport in ("shm", "grpc")}


# -- a worker that is killed -------------------------------------------------------------------------------------------


def _killed(options: Deployment, work: Path) -> dict[str, Any]:
    """One run of the default model on two nodes with an NDP worker each; the first one that works is killed."""
    point = Point(2, 2, ndp=2)
    with _nodes(options, 2) as (nodes, _):
        once = options.model_copy(update={"repeats": 1})
        sweep = _sweep(once, Model("default", None), nodes, work, [point.cell([max(CLIENTS)])])
        sweep["load"] |= {"warmup": 0, "requests": _STRUCK_ROUNDS}  # it is struck while it is measured
        with closing(_Strike(nodes.nodes)) as strike:
            record = _run_sweep(sweep, nodes, work / "killed.json", strike.start)
    return {"killed": "the first NDP worker that works", "rows": record["rows"]}


class _Strike(threading.Thread):
    """Kills the first NDP worker of these nodes that has computed for `_STRUCK_S` of its processor's time."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        super().__init__(daemon=True)
        self._nodes, self._over = nodes, threading.Event()

    def run(self) -> None:
        workers = [node.actor("NdpWorker") for node in self._nodes]
        idle_s = [worker.cpu_times().user for worker in workers]
        with contextlib.suppress(psutil.Error):  # the sweep has ended
            while not self._over.wait(_LOOK_S):
                for worker, before_s in zip(workers, idle_s, strict=True):
                    if worker.cpu_times().user - before_s > _STRUCK_S:
                        worker.kill()
                        return

    def close(self) -> None:
        self._over.set()
        if self.is_alive():
            self.join()


# -- the page ----------------------------------------------------------------------------------------------------------


def _bars(rows: Sequence[Mapping[str, Any]], message: Mapping[str, float]) -> Iterator[Bar]:
    for row in rows:
        limit = GAINS.get(row["shards"])
        judged = (row["nodes"], row["batch"], row["ndp"], row["store"]) == (4, max(CLIENTS), 0, "replicated")
        if judged and limit is not None:
            name = f"{row['model']}, batch {row['batch']}: tokens/s of {row['shards']} GPUs over one"
            yield Bar(name, math.nan if row["ratio"] is None else row["ratio"], ">=", limit)
    yield Bar("microseconds of a layer for a message on one node", message["layer_us"], "<=", MESSAGE_US)


_COLUMNS = {
    "GPUs": "shards", "NDP": "ndp", "store": "store", "batch": "batch", "tokens/s": "tokens_per_s", "range": "spread",
    "over one GPU": "ratio", "TPOT (ms)": "tpot_ms", "simulated": "simulated_ms", "error": "error",
    "step (ms)": "step_ms", "copies": "copies_ms", "other GPUs": "gpus_ms", "near data": "ndp_ms", "rest": "rest_ms",
    "most": "most", "MB by link": "loaded_mb", "MB between nodes": "network_mb",
}  # fmt: skip


def _tables(report: Report) -> Iterator[str]:
    """A table for each model and number of nodes; then messages, and the run whose worker is killed."""
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in report.rows:
        groups.setdefault((row["model"], row["nodes"]), []).append(row)
    for (model, nodes), rows in groups.items():
        yield from (f"### {model}, {nodes} nodes", "")
        yield from markdown(tuple(_COLUMNS), [[_shown(row.get(key)) for key in _COLUMNS.values()] for row in rows])
        yield ""
    killed = report.figures["killed"]
    yield from (f"### Killed: {killed['killed']}", "")
    head = ("requests", "failed", "tokens/s", "TPOT (ms)", "lost, by second")
    yield from markdown(head, map(_lost_cells, measured_rows(killed["rows"])))
    yield from ("", "### A message, microseconds", "")
    message = report.figures["message_us"]
    yield from markdown(tuple(message), [[f"{value:.1f}" for value in message.values()]])


def _lost_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    lost = (f"{one['t_s']:.0f}: {one['worker'] or one['node']} {one['what']}" for one in row["visits"][0]["lost"])
    shown = (row["requests"], row["failed"], row["tokens_per_s"], row["tpot_p50_ms"], "; ".join(lost))
    return tuple(map(_shown, shown))


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{value['minimum']:.4g} to {value['maximum']:.4g}"
    return f"{value:.4g}" if isinstance(value, float) else text_of(value)
