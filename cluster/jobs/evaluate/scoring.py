"""An evaluation: the same windows and items, scored once without loss and then under any number of policies.

The lossless run's distribution at every scored token, and its choices, are the reference of every policy.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress

from ....actors.engine.serving.scoring import score_continuations_with, score_with
from ....errors import ConfigError, RuntimeFailure
from ...config import RunConfig, check_model_dir
from ...prompt import load_model_config
from ..local_worker import run_config, start_worker
from .quality import SUMS, EvaluationOptions, Quality
from .text import (
    CONTEXT,
    TOKENS,
    ChoiceTokens,
    Window,
    as_tokens,
    build_choices,
    load_heldout,
    load_text,
    split_windows,
)

_TRIES = 3  # to measure without a lost or late NDP worker
_RECONNECT_S = 30.0


@dataclass(frozen=True)
class WindowScore:
    """Scores of N tokens [N]. nll: -log p(token), nats. top1: likeliest token. kl: KL(lossless || policy)."""

    nll: torch.Tensor
    top1: torch.Tensor
    kl: torch.Tensor


def token_nll(log_probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """-log p(target), nats: log_probs [..., N, V], targets [..., N] -> [..., N]. Raises RuntimeFailure: not finite."""
    nll = -log_probs.gather(-1, targets[..., None])[..., 0]
    if not bool(torch.isfinite(nll).all()):
        raise RuntimeFailure("the model's probabilities are not finite", "check the store and its replicas")
    return nll


def kl_divergence(reference: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
    """KL(reference || policy) of log-probabilities [N, V] -> [N], nats.

    A rounded `reference` is normalised again, so negative values are rounding errors and become 0. Rounding to fp16
    adds less than 1e-5.
    """
    expected = torch.log_softmax(reference.float(), -1)
    p = expected.exp()
    terms = torch.where(p > 0, p * (expected - log_probs), 0.0)  # 0 * log(0 / q) is 0
    return terms.sum(-1).clamp_min(0.0)


def compare(reference: torch.Tensor, log_probs: torch.Tensor, targets: Any) -> WindowScore:
    """Compare log-probabilities [N, V] of lossless and of the policy at tokens [N]. Raises as `token_nll`."""
    nll = token_nll(log_probs, torch.as_tensor(targets))
    return WindowScore(nll, log_probs.argmax(-1), kl_divergence(reference, log_probs))


class Distributions:
    """Log-probabilities [windows, tokens, V] in fp16, in an unnamed temporary file: large vocabularies exceed memory.

    Raises:
        RuntimeFailure: the folder of temporary files has too little space.
    """

    def __init__(self, windows: int, tokens: int, vocabulary: int) -> None:
        shape = (windows, tokens, vocabulary)
        nbytes = int(np.prod(shape, dtype=np.int64)) * 2
        with tempfile.TemporaryFile() as file:
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, nbytes)  # a disk that fills up later kills the process
            except OSError as error:
                what = f"no room for {nbytes} bytes of log-probabilities in '{tempfile.gettempdir()}': {error.strerror}"
                raise RuntimeFailure(what, "score fewer windows, or set TMPDIR to a larger disk") from error
            self._values: Any = np.memmap(file, np.float16, "r+", shape=shape)  # outlives the file object

    def put(self, window: int, log_probs: torch.Tensor) -> None:
        """log_probs [tokens, V]."""
        self._values[window] = log_probs.to(torch.float16).numpy()

    def get(self, window: int) -> torch.Tensor:
        """[tokens, V] in fp16."""
        return torch.from_numpy(np.asarray(self._values[window]))


@dataclass
class Reference:
    """The lossless result. nll, top1: of each window, [tokens]. choices: of each item, the chosen candidate."""

    distributions: Distributions
    nll: list[torch.Tensor] = field(default_factory=list)
    top1: list[torch.Tensor] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)


_T = TypeVar("_T")
LOSSLESS = "on-demand"  # runs at any budget with the unmodified model's tokens


class Evaluation:
    """Held-out windows and multiple-choice items of one model, and the lossless policy's answers to them.

        evaluation = Evaluation(model_dir)
        evaluation.reference()
        for config in configs:
            with closing(start_worker(config)) as worker:
                quality = evaluation.measure(worker)

    Args:
        model_dir: a checkpoint with held-out text.
        options: sizes.
        config: gives the reference's device, dtype, threads and budget, not its policy and link. None: one thread,
            room for all experts.
        text: a user's text in place of the held-out one. It has no multiple choice, and each of its windows counts as
            a document, as one file is often all there is.

    Raises:
        CheckpointError: no model, no held-out text, or too little of it.
        ConfigError: windows or items exceed the model's positions, or the own text is refused.
    """

    def __init__(
        self, model_dir: Path, options: EvaluationOptions | None = None, config: RunConfig | None = None,
        text: Path | None = None,
    ) -> None:  # fmt: skip
        self.options = options = EvaluationOptions() if options is None else options
        check_model_dir(model_dir)
        _check_positions(model_dir, options, choices=text is None)
        heldout = load_heldout(model_dir) if text is None else load_text(model_dir, text)
        self.windows = split_windows(heldout, options)
        self.texts = len({window.document for window in self.windows})
        self.items: list[ChoiceTokens] = []
        if text is None:
            self.items = as_tokens(build_choices(heldout), heldout, options.documents, options.items or 1)
            self.documents = len(heldout.documents[: options.documents])
        else:
            self.windows = [replace(window, document=number) for number, window in enumerate(self.windows)]
            self.documents = len(self.windows)
        base = run_config(str(model_dir), budget="1.0") if config is None else config
        unthrottled = base.link.model_copy(update={"gbps": None, "latency_us": 0.0})
        exact = {"policy": LOSSLESS, "link": unthrottled, "kv": base.kv.model_copy(update={"dtype": "auto"})}
        self._config = base.model_copy(update={"model": str(model_dir)} | exact)
        self._reference: Reference | None = None

    def reference(self, progress: Progress | None = None) -> Reference:
        """Score everything without loss, on the first call.

        Raises:
            RuntimeFailure: no space for the distributions, or the model fails.
        """
        if self._reference is None:
            with closing(start_worker(self._config)) as worker:
                self._reference = self._without_loss(worker, progress)
        return self._reference

    def measure(self, worker: Any, progress: Progress | None = None) -> Quality:
        """Score a started, idle `GpuWorker` of the same model against the reference.

        Experts of an NDP worker that is lost or late are computed in full precision, which flatters the policy. So
        such a measurement is repeated once the NDP workers are connected again. Counters are those of the last one.

        Raises:
            RuntimeFailure: the worker serves a request, fails, or its NDP workers were lost or late each time.
        """
        self.reference(progress)
        for _ in range(_TRIES):
            worker.reset_stats()
            before = worker.stats().ndp_losses  # which no reset forgets
            sums = self._sums(worker, progress)
            if not _ndp_failures(worker, before):
                policy = worker.settings.policy
                lossless = policy.lossless and worker.settings.kv.coded is None
                return Quality(policy.name, lossless, worker.stats().executor, sums, self.options)
            for peer in worker.engine.ndp.members:
                peer.wait_for_the_first(_RECONNECT_S)
        raise RuntimeFailure(
            f"an NDP worker was lost or late in each of {_TRIES} measurements",
            "run it again on a machine with less load, or with a longer ndp.deadline_s",
        )

    def _sums(self, worker: Any, progress: Progress | None) -> dict[str, NDArray[np.float64]]:
        """Score everything once: sums by document [D], by name."""
        reference, policy = self.reference(progress), worker.settings.policy
        sums = {name: np.zeros(self.documents) for name in SUMS}
        before = worker.stats().total().bytes_loaded
        scored = self._windows(worker, policy.name, self.options.rows, progress)
        for i, (window, targets, log_probs) in enumerate(scored):
            found = compare(reference.distributions.get(i), log_probs, targets)
            loaded = worker.stats().total().bytes_loaded
            for name, value in {
                "tokens": len(targets),
                "bytes": window.nbytes,
                "nll": found.nll.sum(),
                "extra_nll": (found.nll - reference.nll[i]).sum(),
                "reference_nll": reference.nll[i].sum(),
                "agree": (found.top1 == reference.top1[i]).sum(),
                "kl": found.kl.sum(),
                "loaded": loaded - before,
            }.items():
                sums[name][window.document] += float(value)
            before = loaded
        choices = self._choices(worker, policy.name, self.options.rows, progress)
        for item, choice, expected in zip(self.items, choices, reference.choices, strict=True):
            sums["items"][item.document] += 1
            sums["correct"][item.document] += choice == item.answer
            sums["same_choice"][item.document] += choice == expected
            sums["reference_correct"][item.document] += expected == item.answer
        return sums

    def _without_loss(self, worker: Any, progress: Progress | None) -> Reference:
        reference = None
        for i, (_, targets, log_probs) in enumerate(self._windows(worker, "lossless", None, progress)):
            if reference is None:
                reference = Reference(Distributions(len(self.windows), *log_probs.shape))
            reference.distributions.put(i, log_probs)
            reference.nll.append(token_nll(log_probs, targets))
            reference.top1.append(log_probs.argmax(-1))
        assert reference is not None  # `split_windows` gives at least one
        reference.choices += self._choices(worker, "lossless", None, progress)
        return reference

    def _windows(
        self, worker: Any, name: str, rows: int | None, progress: Progress | None
    ) -> Iterator[tuple[Window, torch.Tensor, torch.Tensor]]:
        """Each window with its scored tokens [N] and their log-probabilities [N, V]."""
        prefix = self.options.prefix
        for window in _shown(self.windows, f"{name}: windows", progress):
            yield window, torch.tensor(window.ids[prefix:]), score_with(worker, window.ids, prefix, rows)

    def _choices(self, worker: Any, name: str, rows: int | None, progress: Progress | None) -> list[int]:
        """The likeliest candidate of each item; all have the same number of tokens."""
        found = []
        for item in _shown(self.items, f"{name}: choices", progress):
            log_probs = score_continuations_with(worker, item.context, item.candidates, rows)
            found.append(int(token_nll(log_probs, torch.tensor(item.candidates)).sum(-1).argmin()))
        return found


def _ndp_failures(worker: Any, before: int) -> int:
    """Losses of NDP workers since there were `before`, and experts computed without them because they were late."""
    stats = worker.stats()
    return int(stats.ndp_losses - before + stats.total().ndp_recomputed)


def _shown(things: Sequence[_T], what: str, progress: Progress | None) -> Iterable[_T]:
    return things if progress is None else progress.track(things, description=what)


def _check_positions(model_dir: Path, options: EvaluationOptions, choices: bool) -> None:
    positions = load_model_config(model_dir).get("max_position_embeddings")
    for tokens, what, remedy in (
        (options.prefix + options.continuation, "the windows'", "lower --prefix or --continuation"),
        *([(CONTEXT + TOKENS, "the multiple choices'", "use a model with more")] if choices else []),
    ):
        if isinstance(positions, int) and positions < tokens:
            raise ConfigError(f"{what} {tokens} tokens exceed the model's {positions} positions", remedy)
