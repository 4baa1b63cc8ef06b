"""Trains files for policies in a store: gates predict the next layer's experts for pre-gated prefetch, predictors those
of some layers ahead for the stride policy.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from ....actors.engine.model.model import MoeBlock, RouterProbe
from ....actors.policies.baselines import PreGate, train_predictor
from ....actors.store.artifacts import (
    GATES_NAME,
    PredictorsOf,
    encode_gates,
    encode_predictors,
    predictors_file,
)
from ....actors.store.files import ExpertStore
from ....actors.store.format import model_fingerprint, read_manifest
from ....errors import ConfigError, TraceError, UnsupportedModelError
from ...report.tables import Grid, grid, progress_on, show
from ...simulate.predictors import TRAINING_ROWS, predictors_for, train_predictors
from ...simulate.trace import HEADER_NAME, Trace
from .calibration import MAX_TOKENS as TEXT_TOKENS
from .calibration import Windows, read_windows
from .capture import capture, load_model, open_inputs
from .writer import disk_errors, write_artifact

_BLOCK, _HELD_OUT = 512, 10  # every tenth block of 512 rows is held out to measure recall
_EPOCHS, _BATCH, _RATE = 6, 256, 5e-4


def add_gates(
    store: Path, model_dir: Path, text: Path, console: Console | None = None, most: int = TEXT_TOKENS
) -> Path:
    """Train and write (or replace) `gates.safetensors`; print the recall on a held-out tenth of the rows.

    The model runs the text in full precision, with the inputs of its layers in a temporary folder beside the store.

    Args:
        model_dir: folder with the tokenizer and config.json: the checkpoint or the store itself.
        text: see `read_texts`.
        most: tokens of it.

    Raises:
        ConfigError: the text is missing or too short, or the model has one MoE layer.
        StoreError: not a store, or the disk is full. UnsupportedModelError: experts of unusual gating.
    """
    console = Console(stderr=True) if console is None else console
    manifest = read_manifest(store)
    layers = len(manifest.layers)
    if layers < 2:
        raise ConfigError("the model has one MoE layer, and gates predict the next one", "use speculative prefetch")
    trained = []
    with _running(store, model_dir, text, "gates", console, most) as (blocks, windows, work, progress):
        for layer in progress.track(range(layers - 1), description="training gates"):
            hidden, later = open_inputs(work, layer).hidden, open_inputs(work, layer + 1)
            router = blocks[layer + 1].router
            following = None if router is None else NextRouter(router, later.hidden)
            trained.append(train_gate(hidden, later.ids, manifest.experts.num_experts, following, layer))
    show(console, _recalls(trained))
    data = encode_gates([t.gate for t in trained], manifest, windows.tokens, windows.record().sha256)
    return write_artifact(store, GATES_NAME, data, console)


@contextmanager
def _running(
    store: Path, model_dir: Path, text: Path, what: str | None, console: Console, most: int = TEXT_TOKENS
) -> Iterator[tuple[list[MoeBlock], Windows, Path, Progress]]:
    """The model's MoE layers, the text, a folder with the inputs of each layer on it, and progress bars.

    The folder is beside the store, and removed at the end. what, most: as of `load_model` and `read_windows`.
    """
    opened = ExpertStore(store, verify="stamp")
    windows = read_windows(text, model_dir, console, most)
    model, blocks = load_model(store, opened.manifest, what)
    with (
        disk_errors(store.parent),
        tempfile.TemporaryDirectory(prefix=f".{store.name}.", dir=store.parent) as folder,
        progress_on(console) as progress,
    ):
        running = progress.add_task("running the calibration text", total=windows.tokens)
        capture(model, blocks, opened.layers, windows, Path(folder), lambda n: progress.advance(running, n))
        yield blocks, windows, Path(folder), progress


@dataclass(frozen=True)
class TrainedGate:
    """A layer's gate, and the recall of it and of next-gate on held-out rows; next_gate: NaN without router logits."""

    gate: PreGate
    recall: float
    next_gate: float


@dataclass(frozen=True)
class NextRouter:
    """The router of layer l + 1, and its inputs [N, H]."""

    router: RouterProbe
    hidden: NDArray[np.float32]


def train_gate(
    hidden: NDArray[np.float32],
    ids: NDArray[np.integer],
    experts: int,
    following: NextRouter | None = None,
    seed: int = 0,
) -> TrainedGate:
    """Fit one gate; the same rows and seed give the same weights.

    The loss is the cross-entropy of the scores' softmax with the router's probabilities in layer l + 1. Training starts
    from that router's weights, so at next-gate's recall. (Recall in layers 2 and 6 of the default model: 0.86 and 0.87;
    with targets of 1/K for each picked expert 0.78 and 0.82; next-gate 0.80 and 0.84.) Without router logits: targets
    of 1/K, and initial weights of zero.

    Args:
        hidden: inputs of layer l [N, H]. ids: the experts that layer l + 1's router picked [N, K].
        seed: of the order of rows.

    Raises:
        ValueError: fewer than two rows, or another number of rows in `ids`.
    """
    rows, width = hidden.shape
    if rows < 2 or len(ids) != rows:
        raise ValueError(f"{rows} rows of hidden states and {len(ids)} of ids cannot train a gate")
    block = min(_BLOCK, max(1, rows // _HELD_OUT))
    apart = np.arange(rows) // block % _HELD_OUT == _HELD_OUT - 1
    if not apart.any():
        apart[-1] = True
    gate = torch.nn.Linear(width, experts)
    with torch.no_grad():
        gate.weight.zero_()
        gate.bias.zero_()
        if following is not None:
            bias = following.router(torch.zeros(1, width)).float()[0]
            gate.weight.copy_((following.router(torch.eye(width)).float() - bias).T)
            gate.bias.copy_(bias)
    optimizer = torch.optim.Adam(gate.parameters(), lr=_RATE)
    rng, learned = np.random.default_rng(seed), np.flatnonzero(~apart)
    for _ in range(_EPOCHS):
        order = rng.permutation(learned)
        for start in range(0, len(order), _BATCH):
            at = np.sort(order[start : start + _BATCH])  # ascending, as rows are in a mapped file
            target = _target(ids[at], experts, following, at)
            with torch.enable_grad():
                scores = torch.log_softmax(gate(torch.from_numpy(hidden[at])), dim=-1)
                loss = -(target * scores).sum(dim=1).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    made = PreGate(gate.weight.detach().numpy().copy(), gate.bias.detach().numpy().copy())
    unseen, true = hidden[apart], ids[apart]
    asked = float("nan")
    if following is not None:
        with torch.no_grad():
            asked = recall(following.router(torch.from_numpy(unseen)).float().numpy(), true)
    return TrainedGate(made, recall(made(unseen), true), asked)


@torch.no_grad()
def _target(
    ids: NDArray[np.integer], experts: int, following: NextRouter | None, at: NDArray[np.int64]
) -> torch.Tensor:
    """The target distribution over experts of rows `at` [n, E]."""
    if following is not None:
        return torch.softmax(following.router(torch.from_numpy(following.hidden[at])).float(), dim=-1)
    picked = torch.from_numpy(ids.astype(np.int64))
    return torch.zeros(len(ids), experts).scatter_(1, picked, 1 / ids.shape[1])


def recall(scores: NDArray[np.floating], ids: NDArray[np.integer]) -> float:
    """Share of the picked experts [N, K] that are among the K highest scores [N, E] of their row."""
    predicted = np.zeros(scores.shape, np.bool_)
    np.put_along_axis(predicted, np.argsort(-scores, axis=1, kind="stable")[:, : ids.shape[1]], True, axis=1)
    return float(np.take_along_axis(predicted, ids.astype(np.int64), axis=1).mean())


def _recalls(trained: list[TrainedGate]) -> Grid:
    means = np.array([(one.recall, one.next_gate) for one in trained]).mean(axis=0)
    rows = [(f"{layer}", one.recall, one.next_gate) for layer, one in enumerate(trained, start=1)]
    cells = [(layer, f"{gates:.3f}", f"{asked:.3f}") for layer, gates, asked in [*rows, ("mean", *means)]]
    return grid("recall of the true top-k on held-out rows", ("layer foreseen", "gates", "next-gate"), cells)


def add_predictors(store: Path, model_dir: Path, source: Path, stride: int, console: Console | None = None) -> Path:
    """Train and write (or replace) `predictors-STRIDE.safetensors` on a recorded trace, or a text that the model runs.

    The model runs a text in windows, not token by token; the routing of a row is the same.

    Args:
        model_dir: folder with the tokenizer and config.json: the checkpoint or the store itself.
        source: folder of a trace, or a text, see `read_texts`.

    Raises:
        TraceError, StoreError: as `add_predictors_of_trace`. ConfigError: the text is missing or too short.
        UnsupportedModelError: a layer exposes no router.
    """
    if (source / HEADER_NAME).is_file():
        return add_predictors_of_trace(store, source, stride, console=console)
    console = Console(stderr=True) if console is None else console
    manifest = read_manifest(store)
    layers = len(manifest.layers)
    if not 0 < stride < layers:
        raise TraceError(f"no layer of {layers} is {stride} ahead", "give a smaller stride")
    trained = []
    with _running(store, model_dir, source, None, console, TRAINING_ROWS) as (blocks, windows, work, progress):
        routers = [block.router for block in blocks]
        for layer in progress.track(range(layers - stride), description="training predictors"):
            if (router := routers[layer]) is None:
                what = f"MoE layer {layer} exposes no router logits"
                raise UnsupportedModelError(what, "train predictors of a model whose routers can be asked")
            with torch.no_grad():
                hidden = torch.from_numpy(np.array(open_inputs(work, layer).hidden))
                probabilities = torch.softmax(router(hidden).float(), dim=-1).numpy()
            trained.append(train_predictor(probabilities, open_inputs(work, layer + stride).ids))
    of = PredictorsOf(model_fingerprint(manifest), layers, manifest.experts.num_experts, stride)
    data = encode_predictors(trained, of, windows.record().sha256)
    return write_artifact(store, predictors_file(stride), data, console)


def add_predictors_of_trace(
    store: Path, trace: Path, stride: int, requests: int | None = None, console: Console | None = None
) -> Path:
    """Train and write (or replace) `predictors-STRIDE.safetensors` on the trace's first `requests`; None: all.

    Raises:
        TraceError: the trace is corrupt, of another model, or no layer is that far ahead.
        StoreError: not a store, or the disk is full.
    """
    found = Trace(trace)
    header = found.header
    if header.fingerprint != model_fingerprint(read_manifest(store)):
        raise TraceError(f"'{trace}' was recorded on another model than '{store}'", "record one on this model")
    console = Console(stderr=True) if console is None else console
    with progress_on(console) as progress:
        task = progress.add_task("training predictors", total=max(0, header.layers - stride))
        learned = islice(found.requests(), requests)
        trained = train_predictors(header, learned, stride, advanced=lambda: progress.advance(task))
    digest = hashlib.sha256((trace / HEADER_NAME).read_bytes()).hexdigest()
    data = encode_predictors(trained, predictors_for(header, stride), digest)
    return write_artifact(store, predictors_file(stride), data, console)
