"""Scoring equals the unmodified model, announces prefill and decode rows, and an evaluation adds it up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serving import Tiny, prepared, serving, settings
from tiny_models import save_byte_tokenizer
from transformers import AutoModelForCausalLM

from tiermoe.actors.engine.serving.scoring import score_continuations_with, score_with
from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.policies.residency import State
from tiermoe.actors.requests import GenerationRequest, SamplingParams
from tiermoe.actors.settings import KvSettings
from tiermoe.cluster.jobs.evaluate import eval_command
from tiermoe.cluster.jobs.evaluate import scoring as job
from tiermoe.cluster.jobs.evaluate.quality import MEASURES, EvaluationOptions
from tiermoe.cluster.jobs.evaluate.scoring import Evaluation
from tiermoe.errors import CheckpointError, ConfigError, RequestError, RuntimeFailure

IDS = [5, 9, 77, 30, 12, 5, 64, 101, 8, 45, 3, 90, 17, 17, 33, 81, 29, 60, 4, 119]
OPTIONS = EvaluationOptions(windows=2, items=2, prefix=40, continuation=24, resamples=100)


def unmodified(checkpoint: Path, ids: Sequence[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([list(ids)])).logits[0].float(), -1)


# a plain one, sliding windows and sinks, an unpaged one, and one with a recurrent state
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "deepseek_v2", "jamba"])
def test_equals_the_unmodified_model(architecture: str, tiny: Callable[[str], Tiny]) -> None:
    checkpoint = tiny(architecture).checkpoint
    config = settings(0.5, kv=KvSettings(page_size=16, num_blocks=64, max_batch_tokens=7))
    with serving(tiny(architecture).store, config) as worker:
        before = worker._model.config._attn_implementation
        found = score_with(worker, IDS, 8)
        assert torch.allclose(found, unmodified(checkpoint, IDS)[7:-1], atol=1e-4)
        both = score_continuations_with(worker, IDS[:8], [IDS[8:12], IDS[2:6]])
        assert torch.allclose(both[0], found[:4], atol=1e-4)
        assert torch.allclose(both[1], unmodified(checkpoint, IDS[:8] + IDS[2:6])[7:-1], atol=1e-4)
        assert worker._model.config._attn_implementation == before


@pytest.fixture(scope="module")
def worker(tiny: Callable[[str], Tiny]) -> Iterator[GpuWorker]:
    with serving(tiny("qwen3_moe").store, settings(0.5)) as started:
        yield started


def test_refusals_of_scoring(worker: GpuWorker) -> None:
    for prefix in (0, -1, len(IDS)):
        with pytest.raises(RequestError, match="at least one token"):
            score_with(worker, IDS, prefix)
    with pytest.raises(RequestError, match="one length"):
        score_continuations_with(worker, IDS, [[1, 2], [3]])
    stream = worker.submit(GenerationRequest("long", (5, 6), SamplingParams(max_tokens=200, ignore_eos=True)))
    with pytest.raises(RuntimeFailure, match="1 requests"):
        score_with(worker, IDS, 8)
    worker.cancel("long")
    assert list(stream)[-1].finish == "cancelled"


# -- the evaluation ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that reads bytes, with five documents."""
    folder = Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("bytes") / "model"))
    (folder / "heldout").mkdir()
    rows = [{"text": f"{name} and {name} again,\nand once more\n" * 20} for name in ("one", "two", "red", "sky", "end")]
    (folder / "heldout" / "notes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def store(model: Path) -> Any:
    return prepared(model, model.with_name("store"))


@pytest.fixture
def started(store: Any, monkeypatch: pytest.MonkeyPatch) -> list[GpuWorker]:
    """`start_worker` on a store of this module; every worker that it started."""
    workers = list[GpuWorker]()

    def start(config: Any) -> GpuWorker:
        # `auto` measures at start and may choose another dense program, which differs in the last bit
        workers.append(GpuWorker(settings(0.5, compile="off"), store.describe()))
        workers[-1].start()
        return workers[-1]

    for module in (job, eval_command):
        monkeypatch.setattr(module, "start_worker", start)
    return workers


def closed(worker: GpuWorker) -> bool:
    cache = worker.engine.cache
    absent = next(key for key, state in enumerate(cache.states()) if state == State.ABSENT)
    try:
        return not cache.prefetch([absent])
    except RuntimeFailure as error:
        return "closed" in str(error)


def test_lossless_costs_nothing_and_noise_does(model: Path, started: list[GpuWorker]) -> None:
    evaluation = Evaluation(model, OPTIONS)
    worker = job.start_worker(evaluation._config)
    try:
        same = evaluation.measure(worker)
        assert same["top1_agreement"].value == same["choice_agreement"].value == 1.0
        assert same["perplexity_ratio"].value == 1.0
        assert 0 <= same["kl_nats"].value < 1e-5
        assert same["perplexity"] == same["reference_perplexity"]
        head = worker._model.get_output_embeddings().weight
        head.add_(0.3 * torch.randn(head.shape, generator=torch.Generator().manual_seed(0)))
        other = evaluation.measure(worker)
        assert other["kl_nats"].low > 0.001
        assert other["top1_agreement"].high < 1.0
        assert other["reference_perplexity"] == same["reference_perplexity"]
        assert other.minus(same, "kl_nats").low > 0.001
        assert other.as_dict()["tokens"] == 5 * 2 * 24
        assert other.as_dict()["items"] == 5 * 2
    finally:
        worker.close()
    assert [closed(w) for w in started] == [True, True]


@pytest.mark.parametrize(("lost", "measured"), [(1, True), (2, True), (None, False)])
def test_a_measurement_with_a_lost_ndp_worker_is_repeated(
    model: Path, started: list[GpuWorker], lost: int | None, measured: bool
) -> None:
    """lost: in how many measurements; None: in all."""
    evaluation = Evaluation(model, EvaluationOptions(documents=1, prefix=40, continuation=24))
    evaluation.reference()
    worker = job.start_worker(None)
    waited: list[float] = []
    try:
        forward, scored = worker._model.forward, worker.reset_stats
        measurements = 0

        def reset() -> None:
            nonlocal measurements
            measurements += 1
            scored()

        def losing(*args: Any, **kwargs: Any) -> Any:
            stats = worker.engine.stats()
            if lost is None or measurements <= lost:
                stats.count_loss("ndp", "it was silent")  # which a reset does not forget
                stats.layers[0].ndp_recomputed += 1
            return forward(*args, **kwargs)

        worker._model.forward, worker.reset_stats = losing, reset
        peer = SimpleNamespace(wait_for_the_first=waited.append)
        worker.engine.ndp = SimpleNamespace(members=[peer], peers={}, close=lambda: None)
        if measured:
            assert evaluation.measure(worker)["perplexity_ratio"].value == 1.0
        else:
            with pytest.raises(RuntimeFailure, match="NDP worker was lost or late in each of 3"):
                evaluation.measure(worker)
    finally:
        worker.close()
    assert len(waited) == (3 if lost is None else lost)


def test_an_interrupt_closes_the_worker(model: Path, started: list[GpuWorker], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "score_with", interrupt)
    with pytest.raises(KeyboardInterrupt):
        eval_command.evaluate(str(model), "on-demand", None, 1, OPTIONS, None)
    assert [closed(w) for w in started] == [True]


def test_the_record(model: Path, started: list[GpuWorker]) -> None:
    record, quality = eval_command.evaluate(str(model), "on-demand", "0.5", 1, OPTIONS, None)
    assert {"hardware", "versions", "executor", "perplexity", "kl_nats_high", "ndp_tokens", "seed"} <= record.keys()
    assert (record["executor"], record["documents"], record["windows_per_document"]) == ("emulated", 5, 2)
    assert record["perplexity"] == quality["perplexity"].value
    json.dumps(record, allow_nan=False)


def test_own_text_is_scored_without_choices(model: Path, started: list[GpuWorker], tmp_path: Path) -> None:
    """Each window counts as a document; what there is nothing to count from is in no figure, and no NaN in JSON."""
    file = tmp_path / "mine.txt"
    file.write_text("words of my own, in a row\n" * 30)
    options = EvaluationOptions(windows=None, prefix=40, continuation=24)
    record, quality = eval_command.evaluate(str(model), "on-demand", "0.5", 1, options, None, file)
    assert (record["text"], record["texts"], record["items"]) == (str(file), 1, 0)
    assert record["tokens"] == 24 * record["documents"] > 24 * 10
    assert record["perplexity_ratio"] == record["top1_agreement"] == 1.0
    assert record["perplexity_low"] < record["perplexity"] < record["perplexity_high"]
    assert not [key for key in record if "choice" in key]
    json.dumps(record, allow_nan=False)
    rows = eval_command.quality_table(quality).rows
    assert "bits per byte of text" in [row[0] for row in rows]
    assert set(eval_command._SHOWN) == set(MEASURES)  # each has words
    assert not [row for row in rows if "nan" in row]


def test_short_models_and_models_without_heldout_text_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="300 tokens exceed the model's 256 positions"):
        Evaluation(model, EvaluationOptions(prefix=200, continuation=100))
    (tmp_path / "config.json").write_text("{}")
    save_byte_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="no held-out passages"):
        Evaluation(tmp_path)
