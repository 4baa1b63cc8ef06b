"""A step of the same requests has the inputs that transformers makes, number by number, and gives the same tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fake_gpu import FakeGpu
from quick import quick
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM, GenerationConfig

from tiermoe.actors.engine.serving import repeat
from tiermoe.actors.engine.serving.batcher import open_streams
from tiermoe.actors.engine.serving.batching import _batching_config
from tiermoe.actors.engine.serving.sampling import PromptScorer
from tiermoe.actors.engine.serving.steps import Batch, StepManager, Steps
from tiermoe.actors.policies.routing import SequenceRows
from tiermoe.actors.requests import GenerationRequest, SamplingParams
from tiermoe.actors.settings import KvSettings
from tiermoe.kernels import _cpu

PROMPTS = [(5, 6, 7), tuple(range(10, 21)), (9,)]
SAMPLING = [{}, {"temperature": 2.0, "seed": 3}, {"max_tokens": 9, "min_tokens": 4}]
TOKENS = 24


class Recording(Steps):
    """Steps that keep what every decode step gets and gives.

    repeats: whether steps may be repeated; else transformers makes the inputs of every step.
    """

    def __init__(self, *args: Any, repeats: bool) -> None:
        super().__init__(*args)
        self._repeating = repeats
        self.repeated = 0
        self.every: list[tuple[dict[str, Any], list[int]]] = []
        self.found: list[tuple[dict[str, Any], list[int], list[SequenceRows]]] = []

    def prepare(self, processor: Any) -> Batch | None:
        if not self._repeating:
            self.disturb()
        return super().prepare(processor)

    def compute(self, batch: Batch) -> list[int]:
        inputs = dict(flat(batch.inputs))
        tokens = super().compute(batch)
        self.every.append((inputs, tokens))
        self.repeated += batch.repeat is not None
        if len(batch.rows) == batch.rows[-1].stop:  # prompts aside
            self.found.append((inputs, tokens, list(batch.rows)))
        return tokens


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors and numbers in dictionaries and lists, by path; copies."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(part, f"{name}/{key}")
    elif isinstance(value, torch.Tensor):
        yield name, value.clone()
    elif value is None or isinstance(value, int):
        yield name, value


class Ahead(Recording):
    """Steps on a GPU that is late: the host goes on with `tokens`, those of each step, without waiting for it."""

    def __init__(self, *args: Any, gpu: FakeGpu, tokens: list[list[int]]) -> None:
        super().__init__(*args, gpu, repeats=True)
        self._device, self._known = gpu, iter(tokens)
        self.seen: list[dict[str, Any]] = []  # what the forwards read, once they ran

    def compute(self, batch: Batch) -> list[int]:
        inputs, seen = batch.inputs, dict[str, Any]()
        self.seen.append(seen)
        fixed = {name: value for name, value in flat(inputs) if not isinstance(value, torch.Tensor)}
        named = list(tensors_of(inputs))

        def forward() -> None:
            seen.update(fixed | {name: value.clone() for name, value in named})

        self._device.kernel([value for _, value in named], forward)
        if batch.repeat is None:
            self._device.finish()  # transformers writes its inputs in place, and waits
        self.repeated += batch.repeat is not None
        return next(self._known)


def tensors_of(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Those of `flat`, in place."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_of(part, f"{name}/{key}")
    elif isinstance(value, torch.Tensor):
        yield name, value


def served(
    model: Any, repeats: bool, num_blocks: int, gpu: FakeGpu | None = None, known: list[list[int]] | None = None
) -> tuple[Any, list[list[int]]]:
    """The steps of all requests, and their tokens.

    gpu: one that has `known`, the tokens of each step.
    """
    kv = KvSettings(page_size=4, num_blocks=num_blocks, max_batch_tokens=32)
    streams = open_streams(model, kv)
    config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
    manager = StepManager(model=model, generation_config=config, continuous_batching_config=_batching_config(model, kv))
    scorer = PromptScorer(model, streams.note_prompt)
    if gpu is None:
        steps = manager.steps = Recording(model, streams, None, scorer, repeats=repeats)
    else:
        steps = manager.steps = Ahead(model, streams, None, scorer, gpu=gpu, tokens=known)
    processor, opened = manager._create_batch_processor(), []
    if gpu is not None:
        processor.inputs_and_outputs.compute_stream = gpu.compute = gpu.stream(name="forward")
        gpu.default = gpu.stream(name="default")
    for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLING, strict=True)):
        params = SamplingParams(**{"max_tokens": TOKENS, "ignore_eos": True, **sampling})
        stream = streams.open(GenerationRequest(f"r{i}", prompt, params))
        manager.add_request(list(prompt), stream.name, params.max_tokens, eos_token_id=-1)
        opened.append(stream)
        with torch.no_grad():
            for _ in range(3):  # the next one comes while these decode
                assert steps.step(processor)
    with torch.no_grad():
        while steps.step(processor):
            pass
    return steps, [[token for event in stream for token in event.token_ids] for stream in opened]


@pytest.mark.parametrize(
    ("architecture", "overrides", "attention", "dtype"),
    [
        ("mixtral", {}, "sdpa", torch.float32),
        ("mixtral", {"sliding_window": 6}, "sdpa", torch.float32),
        # layers of both kinds, whose masks have the model's type
        ("gpt_oss", {"sliding_window": 7}, "paged|eager", torch.float32),
        pytest.param("gpt_oss", {"sliding_window": 7}, "paged|eager", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("num_blocks", [32, 13])  # 13: not enough for all at once
def test_a_repeated_step_is_the_one_that_transformers_makes(
    architecture: str, overrides: dict[str, Any], attention: str, dtype: torch.dtype, num_blocks: int
) -> None:
    config = tiny_config(architecture)
    for name, value in overrides.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()
    ours, tokens = served(model, True, num_blocks)
    theirs, expected = served(model, False, num_blocks)
    assert tokens == expected
    assert [len(found) for found in tokens] == [TOKENS, TOKENS, 9]
    assert theirs.repeated == 0 < ours.repeated
    if num_blocks == 32:
        assert ours.repeated > 0.5 * len(ours.found)
    assert len(ours.found) == len(theirs.found)
    for (inputs, picked, rows), (wanted, best, others) in zip(ours.found, theirs.found, strict=True):
        assert (picked, rows) == (best, others)
        for name in wanted.keys() - {"/logits_processor_args"}:
            if num_blocks == 13 and "_index" in name:
                continue  # after one gave way, blocks are given out in another order
            found, value = inputs[name], wanted[name]
            assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value, name


@pytest.mark.parametrize(
    ("architecture", "idle"),
    quick(itertools.product(("mixtral", "gpt_oss"), (True, False)), fast=[("mixtral", True), ("gpt_oss", False)]),
)
def test_a_gpu_reads_the_numbers_of_its_own_step(architecture: str, idle: bool) -> None:
    """Guards against copies beside the forward's stream, and from memory that the next step writes to meanwhile."""
    config = tiny_config(architecture)
    if architecture == "gpt_oss":
        config.sliding_window = 7
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="paged|eager").eval()
    ours, tokens = served(model, True, 32)
    for seed in range(4):
        gpu = FakeGpu(seed)
        gpu.idle = idle
        ahead, found = served(model, True, 32, gpu, [picked for _, picked in ours.every])
        gpu.finish()
        assert found == tokens
        assert ahead.repeated == ours.repeated > 0
        for seen, (wanted, _) in zip(ahead.seen, ours.every, strict=True):
            for name, value in wanted.items():
                if name.split("/")[1] in ("cu_seq_lens_q", "logits_indices", "logits_processor_args"):
                    continue  # written in place by transformers, at once here
                assert torch.equal(seen[name], value) if isinstance(value, torch.Tensor) else seen[name] == value, name
        assert "copy" not in gpu.calls  # by kernels: the copy engine may have 64 MiB of prefetches before it
        assert gpu.synchronized < ahead.repeated  # the copies of the step before are not waited for


def test_a_repeat_ends_at_its_horizon_and_another_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "_HORIZON", 3)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("mixtral"), attn_implementation="sdpa").eval()
    ours, tokens = served(model, True, 32)
    _, expected = served(model, False, 32)
    assert tokens == expected
    assert 0.5 * len(ours.found) < ours.repeated <= 0.75 * len(ours.found)


@pytest.mark.parametrize(
    ("columns", "tokens", "match"),
    [(4, [1], "one token for each row"), (2, [1, 2], "no room for a step in the column: 2")],
)
def test_the_native_call_refuses_what_does_not_fit(columns: int, tokens: list[int], match: str) -> None:
    ids, positions, starts = (np.zeros(3, np.int32) for _ in range(3))
    slots, read, write = (np.zeros(2 * columns, np.int64) for _ in range(3))
    arrays = [array.ctypes.data for array in (slots, read, write, starts)]
    header = np.array([2, ids.ctypes.data, positions.ctypes.data, 1, 0, 0, 2, columns, *arrays, 0, 0, 0], np.int64)
    with pytest.raises(ValueError, match=match):
        _cpu.decode_next(header.ctypes.data, tokens)
