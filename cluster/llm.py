"""`tiermoe.LLM`: a model in a Python program. `tiermoe run` is this class with a terminal around it.

    check -> prepare -> deploy -> generate, as often as wanted -> close
"""

from __future__ import annotations

import time
import uuid
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from rich.console import Console
from tokenizers import Tokenizer

from ..actors.requests import Generation, GenerationRequest, SamplingParams, TokenEvent
from ..errors import RuntimeFailure
from .checkpoints.generation import GenerationDefaults, check_mode, read_defaults
from .config import RunConfig, load_run_config
from .detokenizer import IncrementalText
from .jobs.options import checked_settings, deployed
from .prompt import check_length, encode_prompt, load_model_config, load_tokenizer, sampling_params
from .report.steps import LastStart, Steps

if TYPE_CHECKING:
    from .deploy import Deployment

Prompt = str | Sequence[int]
Generate = Callable[[GenerationRequest], Iterator[TokenEvent]]


@dataclass
class Completion:
    """What a model said to one prompt.

    Attributes:
        text: without the prompt.
        finish: "stop" or "length".
        ttft_s: seconds to the first token. tpot_s: mean seconds of each further one; None: there is none.
        between_s: seconds between tokens, as they arrive here; tokens that come together share theirs.
    """

    prompt_token_ids: tuple[int, ...]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: str | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    between_s: list[float] = field(default_factory=list)


class LLM:
    """A model and the runtime that serves it.

    The runtime starts with the `with` block, or else with the first request; it ends with the block, or with `close`.

    Args:
        model: folder, or org/name[@revision] of a Hugging Face hub; None: the model of the project.
        policy: name in configs/policies, or a YAML file; None: the configuration's.
        budget: memory of each GPU for experts, such as 0.25, "25%" or "8GB"; None: the configuration's.
        config: YAML file, or a name in configs/clusters; of its `cluster.replicas` one is started.
        options: any other key of a configuration file, sections as mappings: `threads=2, link={"gbps": 2}`.
        progress: show downloads, preparation and the steps of the start on standard error.
        timeline: record one, see `timeline`.
        generation_config: "auto": penalties, top-p, top-k and min-p of the model's generation_config.json are the
            defaults of `generate`; "none": they are not.

    Attributes:
        config: with the model as a folder.
        defaults: of sampling, that the model publishes.
        startup_steps_s: seconds of each step of the last start.

    Raises:
        TierMoeError: the configuration, the model or the budget is refused; no process was started.
    """

    def __init__(
        self, model: str | None = None, *, policy: str | None = None, budget: str | float | None = None,
        config: str | None = None, progress: bool = False, timeline: bool = False,
        generation_config: str = "auto", **options: Any,
    ) -> None:
        chosen = load_run_config(config, {"model": model, "policy": policy, "budget": budget} | options)
        notices = Console(stderr=True) if progress else Console(stderr=True, quiet=True)
        self._begin(chosen, notices, timeline, generation_config)

    @classmethod
    def of(
        cls, config: RunConfig, notices: Console, timeline: bool = False, generation_config: str = "auto"
    ) -> LLM:
        """The model of a checked configuration, with notices about its start on a console. Raises as the class."""
        made = cls.__new__(cls)
        made._begin(config, notices, timeline, generation_config)
        return made

    def _begin(self, config: RunConfig, notices: Console, timeline: bool, generation_config: str) -> None:
        if (replicas := config.cluster.replicas) > 1:
            config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"replicas": 1})})
            notices.print(
                f"one of {replicas} replica groups is started: `tiermoe serve` and `up` use them all", soft_wrap=True
            )
        check_mode(generation_config)
        self.config, self._settings = checked_settings(config, trace=timeline)
        self.defaults = read_defaults(self.config.model_dir, generation_config)
        say_defaults(self.defaults, notices)
        self._notices = notices
        self.startup_steps_s: dict[str, float] = {}
        self._tokenizer: Tokenizer = load_tokenizer(self.config.model_dir)
        self._model_config = load_model_config(self.config.model_dir)
        self._stack: ExitStack | None = None
        self._deployment: Deployment | None = None
        self._made: Deployment | None = None  # from before its start on

    def __enter__(self) -> LLM:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> Deployment:
        """Prepare the model's store where it is missing, and start the runtime; the running one where there is one.

        Raises:
            TierMoeError: what was refused, or did not start in time. Nothing stays behind.
        """
        if self._deployment is None:
            last = LastStart("run", self.config)
            with ExitStack() as stack, Steps(self._notices, last.seconds) as steps:
                made = self._made = deployed(self.config, self._settings, self._notices, steps)
                self._deployment = stack.enter_context(made)
                self.startup_steps_s = steps.seconds
                self._stack = stack.pop_all()
            last.remember(steps.seconds)
        return self._deployment

    def close(self) -> None:
        """End the runtime with its processes, files and Ray. Idempotent; `generate` starts a new one."""
        stack, self._stack, self._deployment = self._stack, None, None
        if stack is not None:
            stack.close()

    def abandon(self) -> bool:
        """End a runtime by force, even while it starts; False: there is none. Only for the end of a process."""
        return self._made is not None and self._made.abandon()

    @overload
    def generate(self, prompts: str, **sampling: Any) -> Completion: ...

    @overload
    def generate(self, prompts: Sequence[Prompt], **sampling: Any) -> list[Completion]: ...

    def generate(self, prompts: str | Sequence[Prompt], **sampling: Any) -> Completion | list[Completion]:
        """Continue one text, or several at once: texts, or sequences of token ids.

        Args:
            sampling: `max_tokens` (64), `temperature` (0.0: greedy), `top_p` (1.0), `top_k` (0: all), `seed`. Those of
                `defaults` come in place of `top_p` and `top_k` that are not given, and penalties of theirs count.

        Returns:
            The completion of a text, or those of several in their order.

        Raises:
            RequestError: a prompt or an option is refused. RuntimeFailure: the runtime failed.
        """
        asked = [prompts] if isinstance(prompts, str) else list(prompts)
        streams = [self.stream(prompt, **sampling) for prompt in asked]  # all are checked before the first starts
        deployment = self.start()
        with ThreadPoolExecutor(max(1, min(len(streams), self.config.kv.max_num_seqs))) as pool:
            try:
                done = list(pool.map(lambda stream: stream.finished(), streams))
            except BaseException:  # Ctrl-C, or one of them failed: the others end now
                pool.shutdown(wait=False, cancel_futures=True)
                for stream in streams:
                    deployment.cancel(stream.request_id)
                raise
        return done[0] if isinstance(prompts, str) else done

    def stream(self, prompt: Prompt, **sampling: Any) -> TextStream:
        """Continue one prompt; iterate over the result for its text, piece by piece. Arguments as `generate`.

        Raises:
            RequestError: the prompt or an option is refused; iterating raises RuntimeFailure where the runtime fails.
        """
        return self.stream_of(prompt, _sampling(**sampling), tuple(sampling))

    def stream_of(self, prompt: Prompt, params: SamplingParams, given: Collection[str] = ()) -> TextStream:
        """`stream` with checked sampling options; in place of those that are not among the given ones the model's."""
        params = self.defaults.completed(params, given)
        ids = encode_prompt(self._tokenizer, prompt) if isinstance(prompt, str) else tuple(prompt)
        check_length(len(ids), params.max_tokens, self._model_config, self.config.kv)
        return TextStream(lambda request: self.start().generate(request), self._tokenizer, ids, params)

    @property
    def plan(self) -> dict[str, Any]:
        """The effective plan: what is where, with how many bytes. Starts the runtime."""
        return self.start().plan

    def stats(self) -> dict[str, Any]:
        """Counters since the start: hits, misses, bytes by cause, waits. Raises RuntimeFailure: not running."""
        return self._running().stats().as_dict()

    def residency(self) -> list[tuple[Sequence[int], Sequence[int]]]:
        """States (0 absent, 1 loading, 2 resident) and uses of each layer's experts, on the first GPU.

        Raises:
            RuntimeFailure: not running.
        """
        return [(layer.states, layer.uses) for layer in self._running().residency()]

    def timeline(self) -> list[dict[str, Any]]:
        """Chrome trace events, with `timeline=True`. Raises RuntimeFailure: not running."""
        return self._running().trace_events()

    def _running(self) -> Deployment:
        if self._deployment is None:
            raise RuntimeFailure("the model is not running", "call `generate`, or use it in a `with` block")
        return self._deployment


class TextStream:
    """The continuation of one prompt, which is generated while it is iterated over; leaving early cancels it.

    Attributes:
        completion: what there is of it so far.
        sampling: how its tokens are picked.

    Args:
        generate: sends a request to a runtime and streams its tokens.
    """

    def __init__(
        self, generate: Generate, tokenizer: Tokenizer, ids: tuple[int, ...], sampling: SamplingParams
    ) -> None:
        self._generate, self._tokenizer, self.sampling = generate, tokenizer, sampling
        self.completion = Completion(ids)
        self.request_id = uuid.uuid4().hex

    def __iter__(self) -> Iterator[str]:
        done = self.completion = Completion(self.completion.prompt_token_ids)
        request = GenerationRequest(self.request_id, done.prompt_token_ids, self.sampling)
        generation, text = Generation(request.request_id), IncrementalText(self._tokenizer)
        done.token_ids = generation.token_ids
        last_s: float | None = None
        for event in self._generate(request):
            generation.add(event)
            if count := len(event.token_ids):
                now_s = time.perf_counter()
                if last_s is not None:
                    done.between_s += [(now_s - last_s) / count] * count
                last_s = now_s
            done.finish = generation.finish
            if piece := text.add(event.token_ids):
                done.text += piece
                yield piece
        done.ttft_s, done.tpot_s = generation.ttft_s, generation.tpot_s
        if rest := text.finish():
            done.text += rest
            yield rest

    def finished(self) -> Completion:
        """Iterate to the end."""
        for _ in self:
            pass
        return self.completion


def say_defaults(defaults: GenerationDefaults, notices: Console) -> None:
    """Say which defaults of sampling a model brings, and which it brings in vain: to a program as a warning."""
    if (said := defaults.said(server=False)) is not None:
        notices.print(said, soft_wrap=True, markup=False)
    if defaults.warning is not None and notices.quiet:
        warnings.warn(defaults.warning, stacklevel=4)  # where the `LLM` is made
    elif defaults.warning is not None:
        notices.print(defaults.warning, soft_wrap=True, markup=False)


def _sampling(
    max_tokens: int = 64, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0, seed: int | None = None
) -> SamplingParams:
    return sampling_params(max_tokens, temperature, top_p, top_k, seed)
