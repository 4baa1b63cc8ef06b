"""Decision logs: what each preset decides, as integers, on a link and on peers that a script moves.

    routing (frozen) -> the simulator's step -> who runs where, what is loaded, evicted, prefetched, dropped

A log holds no seconds. Times are whole numbers of `TICK`, which floats hold exactly, so what has arrived when a layer
runs is the same on every machine. A refactoring that renames something changes a line of this file; it changes no log.

    F d 3                      a forward: decode or prompt (d, p), rows
    L2 5x2 9x1 | 37 41 | 0a..  layer 2: experts x pairs | segments that run here, in order | checksum of what is held
    > ndp/0 5 9b4              experts that a peer runs, with the bits of a replica
    d37@5, p12@3, m8@1         a copy is queued on the link: for demand, as prefetch, as migration; segment @ slot
    ^12, x12, -12              a queued copy is promoted to demand, cancelled, or could not be (it had begun)
    w37                        the compute waits for a copy
"""

from __future__ import annotations

import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import traces

from tiermoe.actors.budget import Budget
from tiermoe.actors.core import _core
from tiermoe.actors.engine.cache.cache import ExpertCache
from tiermoe.actors.engine.hooks import Hooks
from tiermoe.actors.engine.layer import Pass
from tiermoe.actors.engine.make_policies import make_rerouting
from tiermoe.actors.policies.baselines import Predictor
from tiermoe.actors.policies.buddymoe.buddies import BINS, TEMPERATURES, ExpertProfile, Outputs
from tiermoe.actors.policies.cost import NdpDevice
from tiermoe.actors.policies.fmoe import ExpertMapPolicy
from tiermoe.actors.policies.prefetch_trials import PrefetchTrials
from tiermoe.actors.policies.registry import make
from tiermoe.actors.store.artifacts import PolicyArtifacts
from tiermoe.cluster.config import load_policy
from tiermoe.cluster.simulate import executor, gpu
from tiermoe.cluster.simulate.executor import Policies, SimulatedEngine, context_of, eviction_of, first_split
from tiermoe.cluster.simulate.hit_rates import serve
from tiermoe.cluster.simulate.machine import Machine
from tiermoe.cluster.simulate.peers import Peers, SimulatedNdp, SimulatedShard, SimulatedTask
from tiermoe.cluster.simulate.trace import Trace, TraceHeader
from tiermoe.proto.messages import ExpertResult

TICK = 2.0**-14  # seconds, 61 us
BATCHES = (1, 8)
BUDGET, REQUESTS = 0.375, 8


@dataclass(frozen=True)
class Script:
    """Ticks of a copy of a whole expert, of a layer's dense part, of an expert's kernels, and of a peer's batch.

    gpus: that share the experts; near-data devices are absent for the last of each 8 forwards.
    """

    copy: int
    dense: int
    expert: int
    batch: int
    gpus: int = 1


SCRIPTS = {
    "slow": Script(copy=6, dense=2, expert=1, batch=5), "quick": Script(copy=1, dense=4, expert=1, batch=2),
    "shards": Script(copy=4, dense=2, expert=1, batch=3, gpus=2),
}  # fmt: skip
# a copy and a near-data expert of few rows cost about as much, so choices by cost go both ways
_NEAR = NdpDevice("scripted", 1.0, 10**9, 1, 4, 4, 1.0, 1, 1.0, 0.0)
_ABSENT = 8


class Log:
    """The lines of one run."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self.asked = _core.AskedLog()
        self.sent: list[str] = []
        self.forwards = 0

    def add(self, line: str) -> None:
        """After what was asked of the links until now."""
        self.lines.append(line)

    def say(self, core: _core.Core, layer: int, experts: Sequence[int], counts: Sequence[int]) -> None:
        """What a layer has run, and who is in slots then."""
        run, _ = core.planned
        held = " ".join(map(str, core.states.nonzero()[0].tolist()))
        needs = " ".join(f"{e}x{n}" for e, n in zip(experts, counts, strict=True))
        self.add(f"L{layer} {needs} | {' '.join(map(str, run))} | {zlib.crc32(held.encode()):08x}")

    @property
    def lines(self) -> list[str]:
        for what, segment, slot in self.asked.take():
            self._lines.append(f"{what}{segment}@{slot}" if what in "dpm" else f"{what}{segment}")
        return self._lines

    def frozen(self, first: int = 12, chunk: int = 256) -> dict[str, Any]:
        """How many lines, the first ones, and a checksum of each `chunk`: a difference shows where it begins."""
        chunks = ["\n".join(self.lines[i : i + chunk]) for i in range(0, len(self.lines), chunk)]
        sums = " ".join(f"{zlib.crc32(part.encode()):08x}" for part in chunks)
        return {"lines": len(self.lines), "first": self.lines[:first], "crc": sums}


# -- what a script moves -------------------------------------------------------------------------------------------


class LoggedCache(ExpertCache):
    """Says what its core asks of the link."""

    log: ClassVar[Log]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.core.log_to(self.log.asked)


class LoggedPeers(Peers):
    """Says what they run, once the layer's loads are queued (`Heard`)."""

    log: ClassVar[Log]

    def send(self, of: Pass) -> list[SimulatedTask]:
        for peer, keys, bits in of.remote:
            said = [f"{key}{f'b{width}' if width else ''}" for key, width in zip(keys, bits, strict=True)]
            self.log.sent.append(f"> {peer} {' '.join(said)}")
        return super().send(of)


class LoggedShard(SimulatedShard):
    """Says what it runs."""

    log: ClassVar[Log]

    def run_part(self, layer: int, tokens: int, experts: Sequence[int], counts: Sequence[int]) -> ExpertResult:
        found = super().run_part(layer, tokens, experts, counts)
        self.log.say(self.cache.core, layer, experts, counts)
        return found


class Heard:
    """A watcher, and what looks ahead behind a policy's: says what the lead's layers run."""

    def __init__(self, log: Log, core: _core.Core) -> None:
        self._log, self._core, self._routing = log, core, cast(_core.Routing, None)

    def routed(self, layer: int, routing: _core.Routing) -> None:
        self._routing = routing

    def ran(self, layer: int) -> None:
        self._log.say(self._core, layer, self._routing.experts, self._routing.counts)

    def native(self, index: int, to: Any) -> None:
        return None

    def layer(self, index: int, view: Any) -> None:
        for line in self._log.sent:
            self._log.add(line)
        self._log.sent = []


class ScriptedNdp(SimulatedNdp):
    """Near-data devices whose batches take whole ticks, and which are gone for some forwards."""

    script: ClassVar[Script]

    def run(self, name: str, keys: list[int], bits: Sequence[int], counts: Sequence[int], tokens: int) -> SimulatedTask:
        number, took_s = self._names.index(name), self.script.batch * TICK
        begin_s = max(self.clock.now_s, self.free_s[number])
        self.free_s[number] = done_s = begin_s + took_s
        nothing: Any = None
        answer = ExpertResult(nothing, took_s, took_s, done_s - self.clock.now_s)
        return SimulatedTask("ndp", name, keys, sum(counts), done_s, answer)


@contextmanager
def _scripted(script: Script, log: Log, header: TraceHeader) -> Iterator[None]:
    """The simulator on such a link and such peers, saying what its layers run."""
    forward, make_hooks = SimulatedEngine.forward, SimulatedEngine._make_hooks

    def heard(self: SimulatedEngine, policies: Policies) -> Hooks:
        """With a prefetch in native code nothing in Python may look ahead, and no peer is sent anything."""
        hooks, heard = make_hooks(self, policies), Heard(log, self.cache.core)
        alone = self._peers.ndp is None and self._peers.shards is None
        return replace(hooks, watch=[heard, *hooks.watch], ahead=hooks.ahead if alone else [*hooks.ahead, heard])

    def begun(self: SimulatedEngine, parts: Any) -> None:
        rows = sum(len(part.tokens) for _, part in parts)
        log.add(f"F {'d' if all(part.decode for _, part in parts) else 'p'} {rows}")
        log.forwards += 1
        if self.ndp is not None:
            self.ndp.available = log.forwards % _ABSENT != 0
        forward(self, parts)

    with pytest.MonkeyPatch.context() as patch:

        def link(clock: _core.Clock, machine: Machine) -> _core.VirtualLink:
            """Whose copies take whole ticks."""
            whole = header.slot_bytes
            return _core.VirtualLink(clock, lambda n: max(1, -(-n * script.copy // whole)) * TICK, machine.wait_s)

        for logged in (LoggedCache, LoggedShard, LoggedPeers):
            patch.setattr(logged, "log", log, raising=False)
        patch.setattr(gpu, "ExpertCache", LoggedCache)
        patch.setattr(gpu, "virtual_link", link)
        patch.setattr(ScriptedNdp, "script", script, raising=False)
        patch.setattr(executor, "SimulatedNdp", ScriptedNdp)
        patch.setattr(executor, "Peers", LoggedPeers)
        patch.setattr(executor, "SimulatedShard", LoggedShard)
        patch.setattr(SimulatedEngine, "_make_hooks", heard)
        patch.setattr(SimulatedEngine, "forward", begun)
        yield


# -- what a preset is made of --------------------------------------------------------------------------------------


def frozen_trace(folder: Path) -> Path:
    """Eight requests, each with favourite experts, the more so the later the layer: 6 layers of 16 experts, top 2."""
    shape = traces.header(layers=6, experts=16, distances=5, slot_bytes=8192 * 48)  # neurons of 4 inputs
    rng = np.random.default_rng(11)
    writer = traces.TraceWriter(folder, shape, traces.embed, 1 << 20)
    for number in range(REQUESTS):
        favourites = rng.integers(0, 64, (shape.layers, shape.experts)) * np.array([[1], [2], [4], [6], [8], [8]])
        prompt = rng.integers(50, size=12 + 3 * number).tolist()
        writer.begin(prompt)
        for step in range(16):
            tokens = prompt if step == 0 else [int(rng.integers(50))]
            writer.add(_rows(shape, tokens, favourites, rng), decode=step > 0)
    writer.close(True, traces.COSTS)
    return folder


def _rows(shape: TraceHeader, tokens: Sequence[int], favourites: Any, rng: np.random.Generator) -> Any:
    """Probabilities are small fractions, so that every processor sums them alike; the look-ahead is mostly right."""
    count, top = len(tokens), shape.top_k
    points = favourites + rng.integers(0, 128, (count, shape.layers, shape.experts)) + 1
    squares = points * points * points
    probabilities = squares / (1 << int(squares.sum(-1).max()).bit_length())
    ids = np.argsort(-probabilities, axis=-1, kind="stable")[..., :top]
    weights = np.take_along_axis(probabilities, ids, -1)
    guessed = np.argsort(-(points + rng.integers(0, 96, points.shape)), axis=-1, kind="stable")[..., :top]
    next_ids = np.zeros((count, shape.layers, shape.distances, top), np.int64)
    next_probabilities = np.zeros(next_ids.shape)
    for d in range(1, shape.distances + 1):
        next_ids[:, : shape.layers - d, d - 1] = guessed[:, d:]
        next_probabilities[:, : shape.layers - d, d - 1] = np.take_along_axis(probabilities, guessed, -1)[:, d:]
    return traces.Rows(np.asarray(tokens, np.int32), probabilities, ids, weights, next_ids, next_probabilities)


def _artifacts(header: TraceHeader) -> PolicyArtifacts:
    """Those that rerouting rules need, from small integers."""
    layers, experts, rng = header.layers, header.experts, np.random.default_rng(0)
    counts = rng.integers(1, 100, (layers, experts, experts)).astype(np.float64)
    counts = (counts + counts.transpose(0, 2, 1)) * ~np.eye(experts, dtype=bool)
    norms = rng.integers(64, 128, counts.shape) / 64
    products = Outputs(norms * (rng.integers(0, 64, counts.shape) / 64), norms)
    entropies = np.ones((layers, len(TEMPERATURES), BINS))
    profile = ExpertProfile(counts.sum(axis=2), counts, counts, entropies, products)
    return PolicyArtifacts(profile=profile)


def _predictors(header: TraceHeader, prefetch: Any) -> list[Predictor] | None:
    """Of small whole numbers, so that their products are exact."""
    if "predictors" not in prefetch.needs:
        return None
    rng, experts = np.random.default_rng(7), header.experts
    zeros = np.zeros(experts, np.float32)

    def whole(*dims: int) -> Any:
        return rng.integers(-8, 8, dims).astype(np.float32)

    return [
        Predictor(zeros, zeros + 1, whole(experts, 8), whole(8), whole(8, experts), whole(experts))
        for _ in range(header.layers - prefetch.distance)
    ]


def runs_on(preset: str, script: str) -> bool:
    """Whether the simulator runs the preset on the script's GPUs."""
    settings = load_policy(preset)
    alone = (
        settings.split.kind != "off" or settings.low_bit is not None or settings.reroutes or settings.evict_writeback
    )
    one = alone or settings.placement.kind == "monde" or settings.pre_evict.kind != "off"
    return not (one and SCRIPTS[script].gpus > 1)


def engine_of(preset: str, trace: Trace, script: Script, check: bool = True, **machine: Any) -> SimulatedEngine:
    settings, header, artifacts = load_policy(preset), trace.header, _artifacts(trace.header)
    budget = Budget(share=1.0 if settings.preload == "all" else BUDGET)
    scripted = Machine(
        name="scripted", forward_s=TICK, dense_s=script.dense * TICK, dense_row_s=0.0, expert_s=script.expert * TICK,
        expert_row_s=0.0, ndp=_NEAR if settings.uses_ndp else None, link_gbps=1.0, gpus=script.gpus, peer_us=0.0,
        **machine,
    )  # fmt: skip
    eviction = eviction_of(settings, header)
    context = context_of(header, predictors=_predictors(header, settings.prefetch), eviction=eviction)
    prefetch = settings.make_prefetch(context)
    others = [eviction_of(settings, header) for _ in range(1, script.gpus)]
    if isinstance(prefetch, ExpertMapPolicy):
        for other in others:
            prefetch.tell(other)
    rerouting = None
    if settings.low_bit is None:
        rerouting = make_rerouting(settings, header.layers, header.experts, True, artifacts, header.slot_bytes)
    counts = np.arange(header.layers * header.experts, dtype=np.int64).reshape(header.layers, -1) * 7 % 31
    policies = Policies(
        eviction, prefetch, others, trials=PrefetchTrials() if settings.adapts_prefetch else None,
        pre_evict=make("pre_evict", settings.pre_evict, context), rerouting=rerouting,
        split=None if settings.split.kind == "off" else first_split(header, settings, budget), popularity=counts,
        settings=settings,
    )  # fmt: skip
    engine = SimulatedEngine(header, scripted, budget, policies, check)
    if settings.preload == "all":
        engine.preload()
    return engine


COUNTERS = (
    "hits", "misses", "prefetched_hits", "top_hits", "low_bit_hits", "low_bit_misses", "low_bit_pairs",
    "late_prefetches", "bytes_loaded_demand", "bytes_loaded_prefetch", "bytes_loaded_migration",
    "bytes_loaded_low_bit", "bytes_demanded_decode", "bytes_preloaded", "bytes_wasted", "vacated", "bytes_premature",
    "bytes_written_back", "forwards", "waves", "substitutions", "dropped", "migrations", "slots", "low_bit_slots",
    "ndp_calls", "ndp_experts", "ndp_tokens",
)  # fmt: skip


def decide(trace: Path, preset: str, script: str, batch: int) -> tuple[Log, dict[str, int]]:
    """A preset's decisions on the trace, and its counters; zero is left out."""
    found, log = Trace(trace), Log()
    with _scripted(SCRIPTS[script], log, found.header):
        engine = engine_of(preset, found, SCRIPTS[script])
        serve(engine, found.requests(), batch)
    record = engine.live_stats().as_dict()
    return log, {name: record[name] for name in COUNTERS if record[name]}


def main(preset: str, script: str, batch: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log, counters = decide(frozen_trace(Path(folder) / "trace"), preset, script, int(batch))
    print("\n".join([*log.lines, *[f"{name} {value}" for name, value in counters.items()]]))


if __name__ == "__main__":
    main(*sys.argv[1:])
