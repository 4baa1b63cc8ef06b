"""Gates for pre-gated prefetch, trained on calibration text and kept in the store's folder."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
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
from ...report.progress import progress_on
from ...simulate.trace_writer import replace_file
from .calibration import read_windows
from .capture import capture, load_model, open_inputs
from .write import disk_errors

_HELD_OUT = 0.1  # share of the rows, the last ones, that recall is measured on
_EPOCHS, _BATCH, _RATE = 6, 256, 1e-3


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
    the last tenth of the rows is not trained on.

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
                hidden, ids = open_inputs(work, layer).hidden, open_inputs(work, layer + 1).ids
                router = blocks[layer + 1].router
                trained.append(train_gate(hidden, ids, manifest.experts.num_experts, router, layer))
                progress.advance(task)
    console.print(_recalls(trained))
    path = store / GATES_NAME
    replace_file(path, encode_gates([t.gate for t in trained], manifest, windows.tokens))
    return path


def train_gate(
    hidden: NDArray[np.float32], ids: NDArray[np.integer], experts: int, router: RouterProbe | None = None,
    seed: int = 0, advanced: Callable[[], None] | None = None,
) -> Trained:  # fmt: skip
    """Fit one gate; the same rows and seed give the same weights.

    Loss: cross-entropy of the scores' softmax with the distribution that gives each picked expert 1/K. torch's Adam, on
    the first nine tenths of the rows. It begins with the weights of the next layer's router, so at next-gate's recall,
    where that can be asked, else with zeros.

    Args:
        hidden: inputs of layer l [N, H]. ids: the experts that layer l + 1's router picked [N, K]. router: layer l+1's.
        seed: of the order of rows. advanced: called after each pass over the rows.

    Raises:
        ValueError: fewer than two rows, or as many ids rows as there are not.
    """
    rows, width = hidden.shape
    if rows < 2 or len(ids) != rows:
        raise ValueError(f"{rows} rows of hidden states and {len(ids)} of ids cannot train a gate")
    first = rows - max(1, int(rows * _HELD_OUT))
    gate = torch.nn.Linear(width, experts)
    with torch.no_grad():
        gate.weight.zero_()
        gate.bias.zero_()
        if router is not None:
            bias = router(torch.zeros(1, width)).float()[0]
            gate.weight.copy_((router(torch.eye(width)).float() - bias).T)
            gate.bias.copy_(bias)
    optimizer = torch.optim.Adam(gate.parameters(), lr=_RATE)
    order = torch.Generator().manual_seed(seed)
    picked = torch.from_numpy(ids.astype(np.int64))
    with torch.enable_grad():
        for _ in range(_EPOCHS):
            for chosen in torch.randperm(first, generator=order).split(_BATCH):
                at = np.sort(chosen.numpy())  # rows are in a mapped file
                scores = torch.log_softmax(gate(torch.from_numpy(hidden[at])), dim=-1)
                loss = -scores.gather(1, picked[at]).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if advanced is not None:
                advanced()
    made = PreGate(gate.weight.detach().numpy().copy(), gate.bias.detach().numpy().copy())
    held, true = np.array(hidden[first:]), ids[first:]
    asked = float("nan")
    if router is not None:
        with torch.no_grad():
            asked = recall(router(torch.from_numpy(held)).float().numpy(), true)
    return Trained(made, recall(made(held), true), asked)


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
