"""`tiermoe record` writes what the engine did, and a simulated replay counts what the engine counted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import serving
import tiny_models
import torch

from tiermoe.actors.policies.eviction import Lru
from tiermoe.actors.requests import SamplingParams
from tiermoe.actors.store.format import read_manifest
from tiermoe.cluster.jobs.record.job import record_with
from tiermoe.cluster.simulate.executor import Machine, SimulatedEngine
from tiermoe.cluster.simulate.hit_rates import result, serve
from tiermoe.cluster.simulate.trace import Trace

PROMPTS = [list(range(3, 40)), [5, 9, 70], list(range(60, 20, -1))]
TOKENS = 20
BUDGET = 0.5
COUNTERS = (
    "hits", "misses", "bytes_loaded_demand", "bytes_demanded_decode", "bytes_loaded_prefetch", "bytes_wasted",
    "forwards", "waves",
)  # fmt: skip


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v2"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict]:
    """A store, a trace of some prompts, and the engine's counters with the same prompts, one at a time."""
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = tiny_models.save_tiny_checkpoint(request.param, folder / "checkpoint", num_experts_per_tok=3)
    store = serving.prepared(checkpoint, folder / "store")
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    with serving.serving(store, serving.settings(1.0)) as worker:
        record_with(worker, read_manifest(folder / "store"), PROMPTS, folder / "trace", sampling, chunk_bytes=1000)
    with serving.serving(store, serving.settings(BUDGET)) as worker:
        serving_tokens(worker)
        counted = worker.stats().as_dict()
    return folder / "store", folder / "trace", counted


def serving_tokens(worker: object) -> list[list[int]]:
    from tiermoe.actors.requests import GenerationRequest

    out = []
    for i, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        events = worker.submit(GenerationRequest(f"s{i}", tuple(prompt), sampling))  # type: ignore[attr-defined]
        out.append([token for event in events for token in event.token_ids])
    return out


def test_the_trace_holds_each_token_in_its_phase(recorded: tuple[Path, Path, dict]) -> None:
    trace = Trace(recorded[1])
    assert trace.header.complete
    assert len(trace.header.chunks) > 3  # requests run over chunks
    requests = list(trace.requests())
    assert [r.prompt_tokens for r in requests] == [len(p) for p in PROMPTS]
    for request, prompt in zip(requests, PROMPTS, strict=True):
        phases = [step.decode for step in request.iterations]
        assert phases == [False] + [True] * (TOKENS - 1)
        assert request.iterations[0].tokens.tolist() == prompt
        np.testing.assert_allclose(request.embedding, request.iterations[0].embedding, atol=1e-3)


def test_recorded_routing_is_the_model_s_own(recorded: tuple[Path, Path, dict]) -> None:
    """Probabilities, choices and look-ahead, against the router's weights on the hidden states of a plain forward."""
    store, path, _ = recorded
    from tiermoe.actors.store.files import ExpertStore

    trace = Trace(path)
    step = next(iter(trace.requests())).iterations[0]
    seen: list[torch.Tensor] = []
    with serving.serving(ExpertStore(str(store)), serving.settings(1.0)) as worker:
        blocks = list(worker.engine.layers)
        for layer in blocks:
            layer.observers.clear()
            plain = layer.forward

            def run(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, plain=plain) -> torch.Tensor:  # type: ignore[no-untyped-def]
                seen.append(hidden.clone())
                return plain(hidden, ids, weights)

            layer.forward = run
        serving.logits(worker, PROMPTS[0], "eager")
        from tiermoe.actors.engine.model.model import find_blocks

        routers = [block.router for block in find_blocks(worker.model, read_manifest(store))]
        for layer in range(len(blocks)):
            wanted = torch.softmax(routers[layer](seen[layer]), -1).detach().numpy()
            np.testing.assert_allclose(step.probabilities[:, layer], wanted, atol=2e-3)
            following = (layer + 1) % len(blocks)  # past the last, of the next forward
            later = torch.softmax(routers[following](seen[layer]), -1).detach().numpy()
            scores = step.lookahead(layer, 1)
            assert scores is not None
            picked = np.argsort(-scores, axis=1)[:, : trace.header.top_k]
            gap = np.sort(later, axis=1)[:, ::-1] - np.take_along_axis(later, picked, 1).min(axis=1, keepdims=True)
            assert (gap[:, trace.header.top_k] <= 1e-5).all()  # nothing left out is more probable


@pytest.mark.parametrize("gbps", [None, 0.001, 10.0])
def test_simulated_counters_equal_the_engine_s(recorded: tuple[Path, Path, dict], gbps: float | None) -> None:
    """On demand with LRU no counter depends on time, so replay and engine must agree to the last one."""
    trace, counted = Trace(recorded[1]), recorded[2]
    machine = Machine(
        name="any", forward_s=1e-3, dense_s=1e-4, dense_row_s=1e-6, expert_s=1e-4, expert_row_s=1e-6, link_gbps=gbps
    )
    engine = SimulatedEngine(trace.header, machine, BUDGET, Lru(), check=True)
    figures = result(engine, serve(engine, trace.requests()))
    assert counted["misses"] > 0
    assert counted["hits"] > 0
    for name in COUNTERS:
        assert [layer[name] for layer in figures["layers"]] == [layer[name] for layer in counted["layers"]], name
    assert (figures["executor"], counted["executor"]) == ("simulated", "emulated")
    assert figures["slots"] == counted["slots"]
    assert figures["expert_budget_bytes"] == counted["expert_budget_bytes"]


def test_header_states_costs_and_bytes(recorded: tuple[Path, Path, dict]) -> None:
    _, path, _ = recorded
    header = Trace(path).header
    assert header.costs is not None
    assert header.costs.expert_s > 0
    held = sum(chunk.bytes for chunk in header.chunks)
    assert held > header.rows * header.row_bytes
    assert json.loads((path / "trace.json").read_text())["complete"] is True


def test_an_interrupt_keeps_what_ran(recorded: tuple[Path, Path, dict], tmp_path: Path) -> None:
    from collections.abc import Iterator

    from tiermoe.actors.store.files import ExpertStore

    store = recorded[0]

    def interrupted() -> Iterator[list[int]]:
        yield from PROMPTS[:2]
        raise KeyboardInterrupt

    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    engine = serving.serving(ExpertStore(str(store)), serving.settings(1.0))
    with engine as worker, pytest.raises(KeyboardInterrupt):
        record_with(worker, read_manifest(store), interrupted(), tmp_path / "t", sampling)  # type: ignore[arg-type]
    trace = Trace(tmp_path / "t")
    assert not trace.header.complete
    assert [(r.prompt_tokens, len(r.iterations)) for r in trace.requests()] == [(37, TOKENS), (3, TOKENS)]


def test_a_failing_write_ends_the_recording(
    recorded: tuple[Path, Path, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer runs on the forward's thread: its error must reach the caller, and what was written stays valid."""
    from tiermoe.actors.store.files import ExpertStore
    from tiermoe.cluster.simulate.trace_writer import TraceWriter
    from tiermoe.errors import ConfigError

    store, flush, calls = recorded[0], TraceWriter._flush, []

    def fail_later(self: TraceWriter) -> None:
        calls.append(1)
        if len(calls) >= 2:
            raise ConfigError("no space", "free some")
        flush(self)

    monkeypatch.setattr(TraceWriter, "_flush", fail_later)
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    engine = serving.serving(ExpertStore(str(store)), serving.settings(1.0))
    with engine as worker, pytest.raises(ConfigError, match="no space"):
        record_with(worker, read_manifest(store), PROMPTS, tmp_path / "t", sampling, chunk_bytes=1000)
    (request,) = Trace(tmp_path / "t").requests()
    assert request.prompt_tokens == 37
