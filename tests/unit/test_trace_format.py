"""Routing traces on disk: what is written is read, in pieces, and what is not a trace is refused.

`tiermoe record` writes what the engine did, and a simulated replay counts what the engine counted.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import serving
import tiny_models
import torch
import traces
from orders_reference import Lru
from safetensors.numpy import load, save

from tiermoe.actors.budget import Budget
from tiermoe.actors.requests import SamplingParams
from tiermoe.actors.store.format import read_manifest
from tiermoe.cluster.jobs.record.record_trace import Texts, record_with
from tiermoe.cluster.jobs.replay import replay_policy
from tiermoe.cluster.simulate.executor import Policies, SimulatedEngine, context_of, first_split
from tiermoe.cluster.simulate.hit_rates import result, serve
from tiermoe.cluster.simulate.machine import Machine
from tiermoe.cluster.simulate.predictors import routing_profile
from tiermoe.cluster.simulate.trace import Trace, TraceHeader, check_chunk, read_chunk
from tiermoe.cluster.simulate.trace_writer import TraceWriter, merge_traces
from tiermoe.errors import TraceError

PROMPTS = [[1, 2, 3], [7], [9, 9, 1, 4]]


@pytest.mark.parametrize("chunk_bytes", [1, 400, 1 << 20])
def test_what_is_written_is_read(tmp_path: Path, chunk_bytes: int) -> None:
    shape = traces.header()
    written = traces.write(tmp_path / "t", shape, PROMPTS, chunk_bytes=chunk_bytes)
    trace = Trace(tmp_path / "t")
    assert trace.header.requests == len(PROMPTS)
    assert (len(trace.header.chunks) == 1) == (chunk_bytes == 1 << 20)
    requests = list(trace.requests())
    assert [r.number for r in requests] == [0, 1, 2]
    for request, steps, prompt in zip(requests, written, PROMPTS, strict=True):
        assert request.prompt_tokens == len(prompt)
        np.testing.assert_array_equal(request.embedding, traces.embed(np.asarray(prompt)).mean(axis=0))
        assert [step.decode for step in request.iterations] == [False, True, True, True]
        for read, step in zip(request.iterations, steps, strict=True):
            for name in shape.row_arrays():
                wanted = getattr(step, name)
                np.testing.assert_array_equal(getattr(read, name), wanted.astype(getattr(read, name).dtype))
            np.testing.assert_allclose(read.embedding, traces.embed(step.tokens).mean(axis=0))


def test_lookahead_gives_the_recorded_order(tmp_path: Path) -> None:
    traces.write(tmp_path / "t", traces.header(), PROMPTS)
    step = next(Trace(tmp_path / "t").requests()).iterations[0]
    scores = step.lookahead(0, 2)
    assert scores is not None
    np.testing.assert_array_equal(np.argsort(-scores, axis=1)[:, :2], step.ids[:, 2])
    assert np.isfinite(scores).sum() == 3 * 2
    assert [step.lookahead(*at) is None for at in ((1, 2), (2, 1), (0, 3), (0, 0))] == [True] * 4


def test_interrupted_trace_is_valid(tmp_path: Path) -> None:
    """Every forward that was flushed can be read, also when nobody closed the writer."""
    shape, rng = traces.header(), np.random.default_rng(0)
    writer = TraceWriter(tmp_path / "t", shape, traces.embed, chunk_bytes=1)
    assert list(Trace(tmp_path / "t").requests()) == []
    writer.begin([1, 2])
    writer.add(traces.rows_of(shape, [1, 2], rng), decode=False)
    writer.add(traces.rows_of(shape, [8], rng), decode=True)
    writer.begin([3])  # no forward of it ran
    (request,) = Trace(tmp_path / "t").requests()
    assert [len(step.tokens) for step in request.iterations] == [2, 1]
    assert not Trace(tmp_path / "t").header.complete
    assert writer.close(False).requests == 1
    assert not list((tmp_path / "t").glob(".*"))  # no drafts left


def test_merging(tmp_path: Path) -> None:
    first = traces.write(tmp_path / "a", traces.header(), PROMPTS, seed=1, chunk_bytes=300)
    second = traces.write(tmp_path / "b", traces.header(), PROMPTS[:2], seed=2)
    merge_traces([tmp_path / "a", tmp_path / "b"], tmp_path / "ab")
    merged = merge_traces([tmp_path / "ab", tmp_path / "b"], tmp_path / "abb")
    requests = list(Trace(tmp_path / "abb").requests())
    assert merged.requests == len(requests) == 7
    assert [r.number for r in requests] == list(range(7))
    for request, steps in zip(requests, [*first, *second, *second], strict=True):
        for read, step in zip(request.iterations, steps, strict=True):
            np.testing.assert_array_equal(read.ids, step.ids)
    traces.write(tmp_path / "c", traces.header(fingerprint="0" * 64), PROMPTS)
    with pytest.raises(TraceError, match="not of the model"):
        merge_traces([tmp_path / "a", tmp_path / "c"], tmp_path / "ac")


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "no header", "half a header", "unknown key"])
def test_damaged_files_are_refused(tmp_path: Path, damage: str) -> None:
    out = tmp_path / "t"
    traces.write(out, traces.header(), PROMPTS)
    chunk, head = out / "chunk-00000.safetensors", out / "trace.json"
    data = chunk.read_bytes()
    match damage:
        case "truncated":
            chunk.write_bytes(data[:-1])
        case "flipped":
            chunk.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        case "missing":
            chunk.unlink()
        case "no header":
            head.unlink()
        case "half a header":
            head.write_text(head.read_text()[:50])
        case "unknown key":
            head.write_text(json.dumps(json.loads(head.read_text()) | {"more": 1}))
    with pytest.raises(TraceError):
        list(Trace(out).requests())


@pytest.mark.parametrize(
    ("name", "at", "value", "message"),
    [
        ("ids", (0, 0, 0), 6, "name experts from 6"),
        ("ids", (0, 0, slice(None)), 1, "picks one expert twice"),
        ("next_ids", (0, 0, 0, 0), 200, "name experts from 6"),
        ("probabilities", (0, 0, 0), np.nan, "within"),
        ("probabilities", (0, 0, 0), 1.5, "within"),
        ("weights", (0, 0, 0), np.inf, "not all finite"),
        ("embeddings", (0, 0), np.nan, "not all finite"),
        ("iterations", (0, 2), 0, "impossible"),
        ("iterations", (0, 2), 2, "rows"),
        ("iterations", (0, 3), 2, "impossible"),
        ("iterations", (0, 0), -1, "impossible"),
    ],
)
def test_impossible_values_are_refused(
    tmp_path: Path, name: str, at: tuple[int, ...], value: float, message: str
) -> None:
    traces.write(tmp_path, traces.header(), PROMPTS)
    header = Trace(tmp_path).header
    arrays = {key: array.copy() for key, array in read_chunk(tmp_path, header, header.chunks[0]).items()}
    assert check_chunk(header, header.chunks[0], arrays) is None
    arrays[name][at] = value
    assert message in str(check_chunk(header, header.chunks[0], arrays))


@pytest.mark.parametrize(("row", "column", "value"), [(1, 1, 2), (0, 1, 1), (4, 0, 0), (4, 0, 2)])
def test_iterations_that_follow_on_nothing_are_refused(tmp_path: Path, row: int, column: int, value: int) -> None:
    import hashlib

    traces.write(tmp_path, traces.header(), PROMPTS)
    header = Trace(tmp_path).header
    file = tmp_path / header.chunks[0].file
    arrays = {key: array.copy() for key, array in load(file.read_bytes()).items()}
    arrays["iterations"][row, column] = value
    data = save(arrays)
    file.write_bytes(data)
    record = header.chunks[0].model_copy(update={"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)})
    (tmp_path / "trace.json").write_text(header.model_copy(update={"chunks": (record,)}).model_dump_json())
    with pytest.raises(TraceError, match=r"follows no iteration|begins where it cannot"):
        list(Trace(tmp_path).requests())


def test_impossible_headers_are_refused() -> None:
    for change in (
        {"top_k": 9}, {"layers": 0}, {"experts": 1 << 20}, {"distances": 9}, {"format_version": 2}, {"layers": 1 << 40},
        {"layers": 1 << 10, "experts": 1 << 13},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="validation error"):
            traces.header(**change)  # type: ignore[arg-type]
    assert isinstance(traces.header(), TraceHeader)


@pytest.mark.parametrize("claim", ["rows", "forwards", "requests"])
def test_a_chunk_holds_no_more_than_its_bytes(claim: str, tmp_path: Path) -> None:
    """What a header says of a chunk is compared with the file's size before anything is made of it."""
    traces.write(tmp_path, traces.header(), PROMPTS)
    header = Trace(tmp_path).header
    record = header.chunks[0].model_copy(update={claim: 1 << 40})
    (tmp_path / "trace.json").write_text(header.model_copy(update={"chunks": (record,)}).model_dump_json())
    with pytest.raises(TraceError, match=r"chunk-00000.safetensors' has \d+ bytes, by '.*trace.json' its rows and"):
        Trace(tmp_path)


def test_a_profile_of_too_many_experts_is_refused() -> None:
    with pytest.raises(TraceError, match=r"pairs of 65536 experts in 1 layers take 128\.00 GiB"):
        routing_profile(traces.header(1, 65536), ())


def test_counts_of_pairs_for_a_split_are_refused_before_they_are_made() -> None:
    """Guards 32 GiB a layer for a trace that names expert 65,535."""
    with pytest.raises(TraceError, match=r"pairs of 65536 experts in 1 layers take 64\.00 GiB; take a policy without"):
        first_split(traces.header(1, 65536), replay_policy("moepic", None), Budget(share=0.25))


def test_a_trace_allocates_no_more_expert_maps_than_it_has_forwards(tmp_path: Path) -> None:
    """Guards 11.7 GiB for a trace of three forwards of 48 layers of 65,536 experts: there were always 1,000 maps."""
    traces.write(tmp_path, traces.header(), PROMPTS)
    header = Trace(tmp_path).header
    assert context_of(header).map_capacity == header.forwards + 1
    assert context_of(traces.header()).map_capacity == 1000  # of no file: synthetic


RECORDED = [list(range(3, 40)), [5, 9, 70], list(range(60, 20, -1))]
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
        manifest = read_manifest(folder / "store")
        record_with(worker, manifest, Texts(RECORDED), folder / "trace", sampling, chunk_bytes=1000)
    with serving.serving(store, serving.settings(BUDGET)) as worker:
        serving_tokens(worker)
        counted = worker.stats().as_dict()
    return folder / "store", folder / "trace", counted


def serving_tokens(worker: object) -> list[list[int]]:
    from tiermoe.actors.requests import GenerationRequest

    out = []
    for i, prompt in enumerate(RECORDED):
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        events = worker.submit(GenerationRequest(f"s{i}", tuple(prompt), sampling))  # type: ignore[attr-defined]
        out.append([token for event in events for token in event.token_ids])
    return out


def test_the_trace_holds_each_token_in_its_phase(recorded: tuple[Path, Path, dict]) -> None:
    trace = Trace(recorded[1])
    assert trace.header.complete
    assert len(trace.header.chunks) > 3  # requests run over chunks
    requests = list(trace.requests())
    assert [r.prompt_tokens for r in requests] == [len(p) for p in RECORDED]
    for request, prompt in zip(requests, RECORDED, strict=True):
        phases = [step.decode for step in request.iterations]
        assert phases == [False] + [True] * (TOKENS - 1)
        assert request.iterations[0].tokens.tolist() == prompt
        np.testing.assert_allclose(request.embedding, request.iterations[0].embedding, atol=1e-3)


def test_forced_text_is_routed_as_the_same_tokens_sampled(recorded: tuple[Path, Path, dict], tmp_path: Path) -> None:
    """Teacher-forced: the first tokens are prefilled, the others decoded one by one, and the trace says so."""
    from tiermoe.actors.store.files import ExpertStore

    store, path, _ = recorded
    sampled = list(Trace(path).requests())
    tokens = [np.concatenate([step.tokens for step in request.iterations]).tolist() for request in sampled]
    rest = [[*all_[len(prompt) :], 0] for all_, prompt in zip(tokens, RECORDED, strict=True)]
    with serving.serving(ExpertStore(str(store)), serving.settings(1.0)) as worker:
        texts = Texts(RECORDED, rest)
        header = record_with(worker, read_manifest(store), texts, tmp_path / "t", SamplingParams())
    assert (header.origin, header.complete) == ("text, teacher-forced", True)
    assert header.costs is not None
    assert Trace(path).header.origin == "sampled at 0"
    for request, other in zip(Trace(tmp_path / "t").requests(), sampled, strict=True):
        assert request.prompt_tokens == other.prompt_tokens
        for step, same in zip(request.iterations, other.iterations, strict=True):
            assert step.decode == same.decode
            assert step.tokens.tolist() == same.tokens.tolist()
            assert step.ids.tolist() == same.ids.tolist()
            np.testing.assert_allclose(step.probabilities, same.probabilities, atol=2e-3)


def test_repeated_ngrams_are_counted_in_each_request(tmp_path: Path) -> None:
    loop, text = [1, 2] * 8, list(range(16))
    traces.write(tmp_path / "t", traces.header(), [loop, text, text], decodes=0)
    assert Trace(tmp_path / "t").header.repeated_8grams == pytest.approx(7 / 27)  # 9 in each; 7 in the loop
    merged = merge_traces([tmp_path / "t", tmp_path / "t"], tmp_path / "both")
    assert merged.repeated_8grams == pytest.approx(7 / 27)


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
        serving.logits(worker, RECORDED[0], "eager")
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
    engine = SimulatedEngine(trace.header, machine, Budget(share=BUDGET), Policies(Lru()), check=True)
    figures = result(engine, serve(engine, trace.requests()))
    assert counted["misses"] > 0
    assert counted["hits"] > 0
    for name in COUNTERS:
        assert [layer[name] for layer in figures["layers"]] == [layer[name] for layer in counted["layers"]], name
    assert (figures["executor"], counted["executor"]) == ("simulated", "emulated")
    assert figures["slots"] == counted["slots"]
    assert figures["expert_budget_bytes"] == counted["expert_budget_bytes"]


_ONE = pytest.mark.parametrize("recorded", ["qwen3_moe"], indirect=True)  # the writer knows no architecture


@_ONE
def test_an_interrupt_keeps_what_ran(recorded: tuple[Path, Path, dict], tmp_path: Path) -> None:
    from collections.abc import Iterator

    from tiermoe.actors.store.files import ExpertStore

    store = recorded[0]

    def interrupted() -> Iterator[list[int]]:
        yield from RECORDED[:2]
        raise KeyboardInterrupt

    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    engine = serving.serving(ExpertStore(str(store)), serving.settings(1.0))
    with engine as worker, pytest.raises(KeyboardInterrupt):
        record_with(worker, read_manifest(store), Texts(interrupted()), tmp_path / "t", sampling)  # type: ignore[arg-type]
    trace = Trace(tmp_path / "t")
    assert not trace.header.complete
    assert [(r.prompt_tokens, len(r.iterations)) for r in trace.requests()] == [(37, TOKENS), (3, TOKENS)]


@_ONE
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
        record_with(worker, read_manifest(store), Texts(RECORDED), tmp_path / "t", sampling, chunk_bytes=1000)
    (request,) = Trace(tmp_path / "t").requests()
    assert request.prompt_tokens == 37
