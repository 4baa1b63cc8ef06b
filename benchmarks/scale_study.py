"""`bench scale-study`: a large model on many GPUs and near-data devices, simulated, and what saturates first.

Requests of a synthetic routing are prefilled together and then decode in step. Only decoding counts. The lead's GPU
runs the dense parts and its share of the experts; its host runs the batching loop, the host's part of each layer, and
handles each message to a peer or from one.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.cluster.config import load_policy
from tiermoe.cluster.jobs.bench.experiment import Plot
from tiermoe.cluster.jobs.bench.metrics import Bar, Report
from tiermoe.cluster.jobs.replay import checked_prefetch, require_replayable
from tiermoe.cluster.simulate.executor import context_of, engine_of, eviction_of
from tiermoe.cluster.simulate.machine import machine_of
from tiermoe.cluster.simulate.shapes import ModelShape, shape_named
from tiermoe.cluster.simulate.synthetic import write_synthetic
from tiermoe.cluster.simulate.trace import Request, Trace, TraceHeader
from tiermoe.cluster.topology.machine import MachineCosts, costs_of

from .cases import ScaleStudy

MLA_ELEMENTS = 512 + 64  # of a token's latent keys and values in a layer (DeepSeek-V3, arXiv 2412.19437, section 4.2)
SECONDS = 300.0  # of one core
PAUSE_S = 60.0  # after the first decode
NDP_BITS = 16  # of a weight that near-data devices hold in full precision


def scale_study(options: ScaleStudy, progress: Progress | None) -> Report:
    """Rows, each a simulated run of the same requests:

    part: `gpus`: with so many GPUs, under each preset; `messages`: with another cost of a message, at each number of
    GPUs; `batch`: with other numbers of requests, at the most GPUs; `ndp`: one GPU with near-data devices.
    tokens_per_s: of all requests together. link: share of the time that the busiest GPU's link is busy.
    messages: the lead's, of a layer. host: share of the time that the lead's host works. dense: share of the time that
    the lead's GPU spends outside the experts. ndp_busy: of the busiest device. matcher: share of the time that one
    matcher would take to forecast each layer of each request; above 1 its forecasts come too late.

    Bar: seconds of CPU time.

    Raises:
        ConfigError: an unknown shape, machine or preset.
    """
    begin_s, shape, costs = time.process_time(), shape_named(options.shape), costs_of(options.machine)
    for name in options.policy:
        require_replayable(load_policy(name))
    report = Report("scale-study", "simulated", settings=options.settings(bits=shape.bits))
    batch, most, first, us = max(options.batch), max(options.gpus), options.policy[0], options.message_us[0]
    points = [("gpus", name, gpus, 0, us, batch) for name in options.policy for gpus in options.gpus]
    points += [("messages", first, gpus, 0, other, batch) for other in options.message_us[1:] for gpus in options.gpus]
    points += [("batch", first, most, 0, us, size) for size in options.batch if size != batch]
    points += [("ndp", options.ndp_policy, 1, workers, us, batch) for workers in options.ndp]
    task = None if progress is None else progress.add_task("simulating", total=len(points))
    with tempfile.TemporaryDirectory(prefix="tiermoe-scale-") as folder:
        header = write_synthetic(
            Path(folder) / "trace", options.family, options.shape, shape, batch, options.prompt_tokens,
            options.decode_tokens, distances=1,
        )  # fmt: skip
        requests = list(Trace(Path(folder) / "trace").requests())
        for part, name, gpus, workers, message_us, size in points:
            host = costs.model_copy(update={"gpus": gpus, "message_us": message_us, "ndp_workers": max(1, workers)})
            run = _Run(header, shape, host, load_policy(name), options.gpu_bytes, workers > 0)
            row = {"part": part, "policy": name, "gpus": gpus, "ndp": workers, "batch": size, "message_us": message_us}
            report.rows.append(row | run.decode(requests[:size]))
            if progress is not None and task is not None:
                progress.advance(task)
    report.bars.append(Bar("seconds of CPU time", time.process_time() - begin_s, "<=", SECONDS))
    return report


class _Run:
    """One engine.

    Args:
        near_data: the policy computes on near-data devices. They hold experts at 16 bits and less.
    """

    def __init__(
        self, header: TraceHeader, shape: ModelShape, costs: MachineCosts, policy: PolicySettings, gpu_bytes: int,
        near_data: bool,
    ) -> None:  # fmt: skip
        bits = NDP_BITS if near_data else shape.bits
        nbytes = int(3 * shape.hidden * shape.intermediate * bits / 8)
        self.header = header.model_copy(update={"slot_bytes": nbytes})
        self._host, _ = costs.of_policy(policy.name)
        self.machine = machine_of(
            costs, self._host, self.header, dense_bytes=4 * shape.hidden**2 * bits / 8, kv_bytes=2 * MLA_ELEMENTS
        )
        eviction = eviction_of(policy, self.header)
        prefetch = checked_prefetch(policy, context_of(self.header, eviction=eviction), self.header)
        self.engine = engine_of(policy, self.header, self.machine, gpu_bytes, eviction, prefetch)
        if self.engine.slots >= self.engine.stats.experts and policy.placement.kind == "cache":
            self.engine.preload()

    def decode(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Prefill the requests together, then measure their decoding after its first step."""
        engine, machine, header = self.engine, self.machine, self.header
        names = [f"request-{request.number}" for request in requests]
        steps = list(zip(*(request.iterations for request in requests), strict=True))
        for parts in steps[:2]:
            engine.forward(list(zip(names, parts, strict=True)))
        engine.clock.advance(PAUSE_S)  # the loads of a placement end, which begin with the first decode
        engine.reset_stats()
        begin_s, messages, busy_s = engine.clock.now_s, engine.messages, self._ndp_busy_s()
        for parts in steps[2:]:
            engine.forward(list(zip(names, parts, strict=True)))
        forwards, layers, passed_s = len(steps) - 2, header.layers, engine.clock.now_s - begin_s
        stats, caches = engine.live_stats(), [cache.live_stats().total() for cache in engine.caches]
        messages = engine.messages - messages
        dense_s = machine.dense(len(requests), engine.context) - self._host.layer_us * 1e-6
        loads = caches[0].bytes_loaded / header.slot_bytes
        host_s = forwards * (machine.forward_s + layers * self._host.layer_us * 1e-6)
        host_s += messages * machine.message_s + loads * machine.load_s
        return {
            "tokens_per_s": forwards * len(requests) / passed_s,
            "tpot_ms": passed_s / forwards * 1e3,
            "hit_rate": stats.hit_rate,
            "link": max(total.total_io_s for total in caches) / passed_s,
            "messages": messages / forwards / layers,
            "host": host_s / passed_s,
            "dense": forwards * layers * dense_s / passed_s,
            "ndp_busy": max((b - a for a, b in zip(busy_s, self._ndp_busy_s(), strict=True)), default=0.0) / passed_s,
            "matcher": machine.matcher_s * layers * len(requests) * forwards / passed_s,
        }

    def _ndp_busy_s(self) -> list[float]:
        return [] if self.engine.ndp is None else list(self.engine.ndp.busy_s)


def figure_of(policy: str) -> Plot:
    """The figure of a run; policy: of the panel that compares costs of a message."""
    by_gpus = {"from": "rows", "series": "policy", "x": "gpus", "x_label": "GPUs", "log_x": True, "from_zero": True}
    whole, near = {"where": {"part": "gpus"}}, {"where": {"part": "ndp"}, "x": "ndp", "x_label": "near-data devices"}
    said = "{policy}, {message_us:g} us a message"
    costs = {"where": {"part": ["gpus", "messages"], "policy": policy}, "series": "message_us", "legend": said}
    panels = [
        by_gpus | costs | {"y": "tokens_per_s", "y_label": "tokens a second"},
        by_gpus | whole | {"y": "link", "y_label": "busiest link, share of the time"},
        by_gpus | whole | {"y": "host", "y_label": "lead's host, share of the time"},
        by_gpus | near | {"y": "tokens_per_s", "y_label": "tokens a second, one GPU"},
    ]
    return Plot.model_validate({"beside": True, "panels": panels})
