"""How much the loss moves when a layer's output does: measured on calibration text, kept in the store's folder.

For layer l with output y_l (of its routed experts) and the loss L of a text, the sum over its tokens:

    F_i = mean over tokens of (dL / dy_{l,i})^2      diagonal of the (empirical) Fisher information
    u   = mean output of a token's more important experts - that of the others, by weight: half of the K each
    s_l = 1/2 * sum over i of F_i * mean over tokens of u_i^2

Experts that carry d of a token's weight change y by about d * u when they are dropped, so L by d^2 * s_l to second
order, for the expected gradient vanishes at a trained model. With top-2 this is AdapMoE's estimate (arXiv 2408.10284):
the Hessian is replaced by the Fisher information's diagonal, from one backward pass over the text; no finite
differences. Where the model does not normalise its weights u is the mean output of the less important experts.

The pass is in float32. Experts are read from the store's mapped files one at a time, and again in the backward pass,
so there is no second copy of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils.checkpoint import checkpoint

from ....actors.engine.model import MoeBlock, build_model, find_blocks
from ....actors.engine.sources import host_weights
from ....actors.expert_store import ExpertStore
from ....actors.sensitivity_file import SENSITIVITY_NAME, encode_sensitivity
from ....errors import StoreError
from ...report.tables import progress_on
from ...simulate.trace_writer import replace_file
from .calibration import Windows, read_windows

IMPLEMENTATION = "tiermoe-differentiable"  # name under which transformers knows experts that a gradient passes
MAX_TOKENS = 1 << 14  # of the text that are used


def add_sensitivity(store: Path, model_dir: Path, text: Path, console: Console | None = None) -> Path:
    """Measure and write `sensitivity.safetensors`, in place of one that is there.

    Args:
        model_dir: folder with the tokenizer and config.json: the checkpoint or the store itself.
        text: see `read_texts`; the first `MAX_TOKENS` tokens are used.

    Raises:
        ConfigError: the text is none or too short, or the file cannot be written. StoreError: the store is not one, or
            the model's gradients are not finite.
    """
    console = Console(stderr=True) if console is None else console
    opened = ExpertStore(store, verify="stamp")
    windows = read_windows(text, model_dir, console)
    windows = Windows(windows.ids[: max(1, MAX_TOKENS // windows.ids.shape[1])])
    model = build_model(store, opened.manifest, torch.float32, torch.device("cpu"), "auto")
    blocks = find_blocks(model, opened.manifest)
    with progress_on(console) as progress:
        task = progress.add_task("measuring sensitivity", total=windows.tokens)
        found = measure(
            model, blocks, [layer.tensors for layer in host_weights(opened.layers)], windows,
            lambda n: progress.advance(task, n),
        )  # fmt: skip
    if not all(0 <= s < float("inf") for s in found):
        raise StoreError(f"the gradients of {opened.manifest.architecture} on '{text}' are not finite",
                         "give other calibration text")  # fmt: skip
    console.print("sensitivity by layer, nats per squared dropped weight: " + ", ".join(f"{s:.3g}" for s in found))
    path = store / SENSITIVITY_NAME
    replace_file(path, encode_sensitivity(found, opened.manifest, windows.tokens))
    return path


def measure(
    model: Any, blocks: Sequence[MoeBlock], tensors: Sequence[Sequence[Any]], windows: Windows, advance: Any
) -> tuple[float, ...]:
    """s_l of each MoE layer.

    Args:
        model: in float32, its experts on meta. tensors: of each layer's experts, as `LayerWeights` has them.
        advance: called with the tokens just run.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)
    before = model.config._experts_implementation
    layers = [_Layer(block, held) for block, held in zip(blocks, tensors, strict=True)]
    for block, layer in zip(blocks, layers, strict=True):
        block.experts.tiermoe_watched = layer
    model.set_experts_implementation(IMPLEMENTATION)
    try:
        with torch.enable_grad():
            for row in windows.ids:
                ids = torch.from_numpy(row)[None]
                logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
                loss = torch.nn.functional.cross_entropy(logits.float(), ids[0, 1:], reduction="sum")
                loss.backward()
                for layer in layers:
                    layer.collect()
                advance(len(row))
    finally:
        model.set_experts_implementation(before)
        for block in blocks:
            del block.experts.tiermoe_watched
    return tuple(layer.sensitivity for layer in layers)


def _experts_forward(module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return module.tiermoe_watched.forward(hidden, ids, weights)


class _Layer:
    """In place of an MoE layer's experts: answers in full precision, lets gradients pass and sums what s_l needs."""

    def __init__(self, block: MoeBlock, tensors: Sequence[torch.Tensor]) -> None:
        self._block, self._tensors = block, tensors
        self._output: torch.Tensor | None = None
        self._rows = 0
        self._gradient: torch.Tensor | float = 0.0  # sums over rows of squares, float64 [H]
        self._change: torch.Tensor | float = 0.0

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [T, H], ids [T, K], weights [T, K] -> [T, H]."""
        top_k = ids.shape[1]
        flat = ids.reshape(-1)
        y = hidden.new_zeros(len(flat), hidden.shape[1])  # [T * K, H]
        for expert in flat.unique().tolist():
            pairs = (flat == expert).nonzero()[:, 0]
            rows = checkpoint(self._expert, hidden[pairs // top_k], expert, use_reentrant=False)
            y = y.index_copy(0, pairs, rows)
        if self._block.post is not None:
            y = self._block.post(y)
        y = y.view(*ids.shape, -1)  # [T, K, H]
        self._add_change(y.detach(), weights.detach().float())
        out = (y * weights.unsqueeze(2)).sum(dim=1).to(hidden.dtype)
        if not out.requires_grad:
            out.requires_grad_(True)  # the first layer: all that comes before is fixed
        out.retain_grad()
        self._output = out
        return out

    def collect(self) -> None:
        """A backward pass has ended."""
        if self._output is not None and self._output.grad is not None:
            self._gradient = self._gradient + self._output.grad.double().square().sum(dim=0)
            self._rows += len(self._output)
        self._output = None

    @property
    def sensitivity(self) -> float:
        """s_l so far; 0 where nothing ran."""
        if not self._rows:
            return 0.0
        product = torch.as_tensor(self._gradient) * torch.as_tensor(self._change)
        return 0.5 * float(product.sum()) / self._rows**2

    def _expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        gate_up, down, *biases = self._tensors
        up = gate_up[expert].float()  # [I, G, H]
        pre = x @ up.reshape(-1, up.shape[-1]).T
        if biases:
            pre = pre + biases[0][expert].float().reshape(-1)
        out = self._block.gate(pre) @ down[expert].float()
        return out + biases[1][expert].float() if biases else out

    def _add_change(self, y: torch.Tensor, weights: torch.Tensor) -> None:
        """u^2 of each token, summed [H]. y [T, K, H], weights [T, K]."""
        top_k = weights.shape[1]
        if top_k < 2:
            return
        order = weights.argsort(dim=1, descending=True, stable=True)
        kept, dropped = order[:, : top_k - top_k // 2], order[:, top_k - top_k // 2 :]
        change = _mean(y, weights, dropped)
        if self._block.normalised:
            change = _mean(y, weights, kept) - change
        self._change = self._change + change.double().square().sum(dim=0)


def _mean(y: torch.Tensor, weights: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The weighted mean of some of each token's experts' outputs [T, H]; places [T, k]."""
    chosen = weights.gather(1, places).clamp_min(1e-12)  # [T, k]
    rows = y.gather(1, places.unsqueeze(2).expand(-1, -1, y.shape[2]))
    return (rows * chosen.unsqueeze(2)).sum(dim=1) / chosen.sum(dim=1, keepdim=True)
