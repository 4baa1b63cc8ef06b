"""Gates for pre-gated prefetch, trained on calibration text and kept in the store's folder."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ....actors.engine.model import RouterProbe
from ....actors.expert_store import ExpertStore
from ....actors.gate_file import GATES_NAME, encode_gates
from ....actors.policies.prefetch.next_gate import picks
from ....actors.policies.prefetch.pre_gated import PreGate
from ....errors import ConfigError
from ...report.tables import progress_on
from ...simulate.trace_writer import replace_file
from .calibration import read_windows
from .capture import capture, load_model, open_inputs
from .write import disk_errors

_BLOCK, _HELD_OUT = 512, 10  # of so many rows each so-manieth block is not trained on: recall is measured there
_EPOCHS, _BATCH, _RATE = 6, 256, 5e-4


@dataclass(frozen=True)
class Trained:
    """A layer's gate, and of the next layer's true experts the share that it and next-gate name on held-out rows.

    next_gate: NaN where the router cannot be asked.
    """

    gate: PreGate
    recall: float
    next_gate: float


def add_gates(store: Path, model_dir: Path, text: Path, console: Console | None = None) -> Path:
    """Train and write `gates.safetensors`, in place of one that is there; the console gets their recall.

    The model runs the text in full precision, with the inputs of its layers in a temporary folder beside the store;
    a tenth of the rows is not trained on.

    Args:
        model_dir: folder with the tokenizer and config.json: the checkpoint or the store itself.
        text: see `read_texts`.

    Raises:
        ConfigError: the text is none or too short, the model has one MoE layer, or the file cannot be written.
        StoreError: the store is not one, or the disk is full. UnsupportedModelError: experts of unusual gating.
    """
    console = Console(stderr=True) if console is None else console
    opened = ExpertStore(store, verify="stamp")
    manifest, layers = opened.manifest, len(opened.manifest.layers)
    if layers < 2:
        raise ConfigError("the model has one MoE layer, and gates foresee the next one", "prefetch with speculative")
    windows = read_windows(text, model_dir, console)
    model, blocks = load_model(store, manifest, "gates")
    with disk_errors(store.parent), tempfile.TemporaryDirectory(prefix=f".{store.name}.", dir=store.parent) as folder:
        work = Path(folder)
        with progress_on(console) as progress:
            running = progress.add_task("running the calibration text", total=windows.tokens)
            capture(model, blocks, opened.layers, windows, work, lambda n: progress.advance(running, n))
            task = progress.add_task("training gates", total=layers - 1)
            trained = []
            for layer in range(layers - 1):
                hidden, later = open_inputs(work, layer).hidden, open_inputs(work, layer + 1)
                router = blocks[layer + 1].router
                following = None if router is None else Following(router, later.hidden)
                trained.append(train_gate(hidden, later.ids, manifest.experts.num_experts, following, layer))
                progress.advance(task)
    console.print(_recalls(trained))
    path = store / GATES_NAME
    replace_file(path, encode_gates([t.gate for t in trained], manifest, windows.tokens))
    return path


@dataclass(frozen=True)
class Following:
    """Layer l + 1 where its router can be asked: the router, and its inputs [N, H]."""

    router: RouterProbe
    hidden: NDArray[np.float32]


def train_gate(
    hidden: NDArray[np.float32],
    ids: NDArray[np.integer],
    experts: int,
    following: Following | None = None,
    seed: int = 0,
) -> Trained:
    """Fit one gate; the same rows and seed give the same weights.

    Loss: cross-entropy of the scores' softmax with the probabilities that layer l + 1's router gives its own input, and
    the gate begins with that router's weights, so at next-gate's recall. (For layers 2 and 6 of the default model
    this names 0.86 and 0.87 of the true experts; targets of 1/K for each picked expert give 0.78 and 0.82, next-gate
    0.80 and 0.84.) Where the router cannot be
    asked: those targets, and zeros to begin with. torch's Adam.

    Args:
        hidden: inputs of layer l [N, H]. ids: the experts that layer l + 1's router picked [N, K].
        seed: of the order of rows.

    Raises:
        ValueError: fewer than two rows, or as many ids rows as there are not.
    """
    rows, width = hidden.shape
    if rows < 2 or len(ids) != rows:
        raise ValueError(f"{rows} rows of hidden states and {len(ids)} of ids cannot train a gate")
    block = min(_BLOCK, max(1, rows // _HELD_OUT))
    kept = np.arange(rows) // block % _HELD_OUT == _HELD_OUT - 1
    if not kept.any():
        kept[-1] = True
    gate = torch.nn.Linear(width, experts)
    with torch.no_grad():
        gate.weight.zero_()
        gate.bias.zero_()
        if following is not None:
            bias = following.router(torch.zeros(1, width)).float()[0]
            gate.weight.copy_((following.router(torch.eye(width)).float() - bias).T)
            gate.bias.copy_(bias)
    optimizer = torch.optim.Adam(gate.parameters(), lr=_RATE)
    rng, learned = np.random.default_rng(seed), np.flatnonzero(~kept)
    for _ in range(_EPOCHS):
        order = rng.permutation(learned)
        for start in range(0, len(order), _BATCH):
            at = np.sort(order[start : start + _BATCH])  # rows are in a mapped file
            target = _target(ids[at], experts, following, at)
            with torch.enable_grad():
                scores = torch.log_softmax(gate(torch.from_numpy(hidden[at])), dim=-1)
                loss = -(target * scores).sum(dim=1).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    made = PreGate(gate.weight.detach().numpy().copy(), gate.bias.detach().numpy().copy())
    held, true = hidden[kept], ids[kept]
    asked = float("nan")
    if following is not None:
        with torch.no_grad():
            asked = recall(following.router(torch.from_numpy(held)).float().numpy(), true)
    return Trained(made, recall(made(held), true), asked)


@torch.no_grad()
def _target(
    ids: NDArray[np.integer], experts: int, following: Following | None, at: NDArray[np.int64]
) -> torch.Tensor:
    """The distribution over experts that the scores of these rows are to have [n, E]."""
    if following is not None:
        return torch.softmax(following.router(torch.from_numpy(following.hidden[at])).float(), dim=-1)
    picked = torch.from_numpy(ids.astype(np.int64))
    return torch.zeros(len(ids), experts).scatter_(1, picked, 1 / ids.shape[1])


def recall(scores: NDArray[np.floating], ids: NDArray[np.integer]) -> float:
    """Of the experts picked [N, K] the share among the K highest scores [N, E] of their row."""
    named = picks(scores, ids.shape[1])
    return float(np.take_along_axis(named, ids.astype(np.int64), axis=1).mean())


def _recalls(trained: list[Trained]) -> Table:
    table = Table("layer foreseen", "gates", "next-gate", title="recall of the true top-k on held-out rows")
    for layer, one in enumerate(trained):
        table.add_row(f"{layer + 1}", f"{one.recall:.3f}", f"{one.next_gate:.3f}")
    means = np.array([(one.recall, one.next_gate) for one in trained]).mean(axis=0)
    table.add_row("mean", f"{means[0]:.3f}", f"{means[1]:.3f}")
    return table
