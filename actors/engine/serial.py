"""Requests one after another through `generate`: for models whose caches cannot be paged.

State-space and linear-attention layers, and attention whose keys and values differ in width, have no
place in transformers' paged cache; `generate` runs them all.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from ...errors import RuntimeFailure
from ..requests import GenerationRequest
from ..settings import KvSettings
from .batcher import open_streams
from .logprobs import PromptScorer, prompt_rows
from .sampling import Pick, seed_of
from .sequences import SequenceRows, SequenceWatcher
from .streams import Stream, Streams


class _Progress(BaseStreamer):
    """One request under way: what it has generated, whether to stop, how to sample."""

    def __init__(self, stream: Stream, streams: Streams) -> None:
        self._stream, self._streams = stream, streams
        self._sampling = stream.request.sampling
        self._seed = seed_of(self._sampling)
        self.generated: list[int] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.generated.extend(value.reshape(-1).tolist())
        self._streams.deliver(self._stream.name, self.generated)

    def end(self) -> None:
        return None

    def stopped(self) -> bool:
        return not self._streams.is_open(self._stream.name)

    def sample(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores [1, V] with all mass on the drawn token."""
        scores = scores.clone()
        pick = Pick(self._sampling, self._seed, len(self.generated), self._stream.name)
        pick.force(scores[0], self._streams.eos, self._streams.note)
        return scores

    @property
    def plain(self) -> bool:
        """Whether every token is the argmax of the model's own scores."""
        return Pick(self._sampling, self._seed, 0).plain


class SerialBatcher:
    """One request at a time, first come first served.

    Args:
        model: a transformers model on its device.
        kv: its token capacity bounds a request, as with continuous batching.
        because: why requests are not batched, for the plan's notes.
        watcher: told before each forward pass whose rows it carries; None: nobody.
    """

    def __init__(self, model: Any, kv: KvSettings, because: str, watcher: SequenceWatcher | None = None) -> None:
        self.serial_because = because
        self.streams = open_streams(model, kv, watcher)
        self._watcher = watcher
        self.failure: str | None = None
        self._model = model
        self._scorer = PromptScorer(model, self.streams.note_prompt)
        self._used_tokens = 0  # of the request under way
        # `generate` fills what a request leaves open from here: a checkpoint's penalties, beams or minimal length
        # would give other tokens than continuous batching does.
        model.generation_config = GenerationConfig()
        self._queue: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tiermoe-serial", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> Stream:
        """Queue a request now. Raises RequestError or RuntimeFailure like `ContinuousBatcher.submit`."""
        if self.failure is not None:
            raise RuntimeFailure(f"generation stopped: {self.failure}", "restart the worker")
        stream = self.streams.open(request)
        self._queue.put(stream)
        return stream

    def cancel(self, stream: Stream) -> bool:
        """End a request at its next token; False if it had ended."""
        return self.streams.abort(stream.name, "cancelled")

    def close(self) -> None:
        """Stop after the token under way. Safe to call twice."""
        self.streams.close()
        self._queue.put(None)
        self._thread.join()
        self._scorer.close()

    @property
    def kv_usage(self) -> float:
        """Tokens of the request under way over those that one may have."""
        return self._used_tokens / self.streams.capacity_tokens

    def _run(self) -> None:
        while (stream := self._queue.get()) is not None:
            if not self.streams.is_open(stream.name):
                continue
            try:
                self._generate(stream)
            except Exception as error:  # the request reports it; a broken engine also refuses later ones
                if isinstance(error, RuntimeFailure):
                    self.failure = str(error)
                self.streams.abort(stream.name, "error", f"{type(error).__name__}: {error}", error)

    @torch.no_grad()
    def _generate(self, stream: Stream) -> None:
        request, sampling = stream.request, stream.request.sampling
        progress = _Progress(stream, self.streams)
        ids = torch.tensor([request.prompt_ids], device=self._model.device)
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=sampling.max_tokens,
            eos_token_id=None if sampling.ignore_eos else (self.streams.eos or None),
            pad_token_id=0,
        )
        wanted = prompt_rows(
            stream.name, request.prompt_ids, sampling.prompt_logprobs, 0, len(request.prompt_ids), 0
        )
        self._scorer.expect([wanted] if wanted is not None else [])
        self.streams.begin(stream.name)
        watching = self._model.register_forward_pre_hook(self._announce(stream.name), with_kwargs=True)
        try:
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                streamer=progress,
                logits_processor=LogitsProcessorList([] if progress.plain else [_Sample(progress)]),
                stopping_criteria=StoppingCriteriaList([_Stop(progress)]),
            )
        finally:
            watching.remove()
            self._used_tokens = 0
        self.streams.finish(stream.name, progress.generated)

    def _announce(self, name: str) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
        """A hook for the model that tells the watcher of each forward pass; the first one carries the prompt."""
        first = True

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal first
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            self._used_tokens += ids.shape[1]
            if self._watcher is not None:
                self._watcher.begin_forward([SequenceRows(name, 0, ids.shape[1], decode=not first)])
            first = False

        return hook


class _Sample(LogitsProcessor):
    def __init__(self, progress: _Progress) -> None:
        self._progress = progress

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self._progress.sample(scores)


class _Stop(StoppingCriteria):
    def __init__(self, progress: _Progress) -> None:
        self._progress = progress

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._progress.stopped(), device=input_ids.device)
