"""Measures what the lossy actions of a quality budget cost, in KL divergence from the lossless model.

Of a text the model runs once as it is, and then once for each action and layer: half of that layer's experts are taken
for missing, at random and anew for each window, and every missing pair that is not its token's heaviest is changed by
the action. With d the share of its weight that a token moves,

    nats[action, layer] = sum over tokens of KL(lossless || changed) / sum over tokens of d^2

to second order; KL of all tokens counts, of those too that only attend to changed ones.

Then the whole rule runs as it is served: in all layers at once, token by token, on a cache of a quarter of each layer's
experts that the least recently used ones leave, after a prefix that runs exactly, at prices that charge a token
`LEVEL_NATS` on average. The greatest ratio of measured to charged KL, two standard errors over windows included,
multiplies all numbers. So what the sum over layers, the choice of light pairs and the experts that a cache lacks cost
beyond the parts is charged, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from ....actors.engine.cache.slots import LayerWeights
from ....actors.engine.cache.sources import host_weights
from ....actors.engine.model.model import MoeBlock
from ....actors.policies.quality import ACTIONS, LossTable, changed, choose, offers_of
from ....actors.policies.routing import MissCosts
from ....actors.store.artifacts import LOSSES_NAME, encode_losses
from ....actors.store.files import ExpertStore
from ....errors import StoreError, UnsupportedModelError
from ...report.tables import progress_on, show
from .calibration import LOSS_TOKENS, Windows, read_windows
from .capture import Watcher, load_model, watching
from .writer import write_artifact

LEVEL_NATS = (0.005, 0.02, 0.05)  # a level each of `needs.py`
_RESIDENT, _SLOTS = 0.5, 0.25  # of a layer's experts: in the measurement of one action, and of the whole rule
_WINDOW, _PREFIX = 128, 32  # tokens of a window at most, and of its prefix that runs exactly
_MOST_LOGITS = 1 << 26  # of a forward
_PLENTY = 1e30  # nats of an account in a measurement
_EACH = MissCosts(1.0, float("inf"), 0.0)  # a miss is the unit of time

Act = Callable[[int, NDArray[Any], NDArray[Any], NDArray[Any]], tuple[NDArray[Any], NDArray[Any]]]
"""(layer, ids [T, K], weights [T, K], probabilities [T, E]) -> ids and weights that run."""


def add_losses(store: Path, model_dir: Path, text: Path, console: Console | None = None) -> Path:
    """Measure and write (or replace) `losses.safetensors`, on `LOSS_TOKENS` tokens of a text.

    Args:
        model_dir: folder with the tokenizer and config.json: the checkpoint or the store itself.
        text: see `read_texts`.

    Raises:
        ConfigError: the text is missing or too short. UnsupportedModelError: a layer exposes no router.
        StoreError: not a store, the disk is full, or the model's probabilities are not finite.
    """
    console = Console(stderr=True) if console is None else console
    opened = ExpertStore(store, verify="stamp")
    windows = _spread(read_windows(text, model_dir, console))
    model, blocks = load_model(store, opened.manifest, None)
    with progress_on(console) as progress:
        vocabulary = model.config.get_text_config().vocab_size
        task = progress.add_task("measuring losses", total=runs_of(windows, len(blocks), vocabulary))
        table, ratios = measure(
            model, blocks, host_weights(opened.layers), windows, lambda: progress.advance(task)
        )  # fmt: skip
    if not all(np.isfinite(of).all() for of in table.nats.values()):
        what = f"the probabilities of {opened.manifest.architecture} on '{text}' are not finite"
        raise StoreError(what, "give other calibration text")
    for name, of in table.nats.items():
        show(console, f"nats of {name} by layer, for all of a token's weight: " + ", ".join(f"{n:.3g}" for n in of))
    levels = ", ".join(f"{ratio:.2f} at {nats:g}" for nats, ratio in zip(LEVEL_NATS, ratios, strict=True))
    show(console, f"KL of the whole rule over the sum of its parts, at most: {levels}")
    data = encode_losses(table, opened.manifest, windows.tokens, windows.record().sha256)
    return write_artifact(store, LOSSES_NAME, data, console)


def measure(
    model: Any, blocks: Sequence[MoeBlock], experts: Sequence[LayerWeights], windows: Windows,
    advance: Callable[[], None] = lambda: None,
) -> tuple[LossTable, list[float]]:  # fmt: skip
    """The losses, and the ratio of measured to charged KL at each of `LEVEL_NATS`, before it multiplied them.

    Args:
        model: in float32, its experts on meta. experts: of each layer, in the store's type.

    Raises:
        UnsupportedModelError: a layer exposes no router.
    """
    mute = [layer for layer, block in enumerate(blocks) if block.router is None]
    if mute:
        what = f"MoE layer {mute[0]} exposes no router logits"
        raise UnsupportedModelError(what, "use --quality lossless, or a model whose routers can be asked")
    layers, count = len(blocks), len(experts[0].tensors[0])
    changing = [_RerouteWatcher(i, block, of) for i, (block, of) in enumerate(zip(blocks, experts, strict=True))]
    sums = np.zeros((2, len(ACTIONS), layers))  # of KL, of d^2
    windows_of_width = windows.ids
    step = max(1, _MOST_LOGITS // (windows_of_width.shape[1] * model.config.get_text_config().vocab_size))
    batches = [windows_of_width[start : start + step] for start in range(0, len(windows_of_width), step)]
    references = list[torch.Tensor]()
    with watching(model, blocks, changing), torch.no_grad():
        for number, ids in enumerate(batches):
            reference = _log_probs(model, ids)
            references.append(reference)
            advance()
            residents = np.stack([_residents(layers, count, number * step + i) for i in range(len(ids))])
            for layer, action in itertools.product(range(layers), range(len(ACTIONS))):
                act = changing[layer].act = _ActEverywhere(ACTIONS[action], residents, blocks[layer].normalised)
                kl = _kl(reference, _log_probs(model, ids))
                changing[layer].act = None
                sums[:, action, layer] += kl.sum(), act.moved
                advance()
        nats = np.divide(sums[0], sums[1], out=np.zeros_like(sums[0]), where=sums[1] > 0)
        table = LossTable(dict(zip(ACTIONS, nats, strict=True)))
        ratios = _ratios(model, changing, batches, table, references, count, advance)
    factor = max([1.0, *ratios])
    return LossTable({name: of * factor for name, of in table.nats.items()}), ratios


def runs_of(windows: Windows, layers: int, vocabulary: int) -> int:
    """Forward passes of `measure`; it calls `advance` after each."""
    step = max(1, _MOST_LOGITS // (windows.ids.shape[1] * vocabulary))
    return -(-len(windows.ids) // step) * (2 + layers * len(ACTIONS) + len(LEVEL_NATS))


def _spread(windows: Windows) -> Windows:
    """Windows of `_WINDOW` tokens at most, of `LOSS_TOKENS` in all, evenly spread over the text."""
    width = min(_WINDOW, windows.ids.shape[1])
    windows_of_width = windows.ids[:, : windows.ids.shape[1] // width * width].reshape(-1, width)
    taken = min(len(windows_of_width), max(1, LOSS_TOKENS // width))
    return Windows(windows_of_width[(2 * np.arange(taken) + 1) * len(windows_of_width) // (2 * taken)])


def _ratios(
    model: Any, changing: Sequence[_RerouteWatcher], batches: Sequence[NDArray[np.int64]], table: LossTable,
    references: Sequence[torch.Tensor], experts: int, advance: Callable[[], None],
) -> list[float]:  # fmt: skip
    """Measured over charged KL of the whole rule, and two standard errors, at each of `LEVEL_NATS`."""
    normalised = [one.block.normalised for one in changing]
    width = batches[0].shape[1]
    prefix = min(_PREFIX, width // 4)

    def run(price: float) -> tuple[NDArray[np.float64], NDArray[np.float64], list[float]]:
        charged, measured, offered = list[float](), list[float](), list[float]()
        for ids, reference in zip(batches, references, strict=True):
            rule = _ActAtPrice(table, experts, width, prefix, price, normalised)
            for one in changing:
                one.act = rule
            measured += _kl(reference, _log_probs(model, ids)).tolist()
            charged += [rule.charged.get(window, 0.0) for window in range(len(ids))]
            offered += rule.offered
            advance()
        for one in changing:
            one.act = None
        return np.array(charged), np.array(measured), offered

    _, _, offered = run(0.0)
    spent, tokens = np.cumsum(np.sort(offered)), sum(len(ids) for ids in batches) * (width - prefix)
    ratios = []
    for level in LEVEL_NATS:
        within = int(np.searchsorted(spent, level * tokens, side="right"))
        charged, measured, _ = run(float(np.sort(offered)[within - 1]) if within else 0.0)
        ratios.append(_upper(measured, charged) if charged.sum() > 0 else 1.0)
    return ratios


def _upper(measured: NDArray[np.float64], charged: NDArray[np.float64]) -> float:
    """The ratio of two sums over windows, and two of its standard errors."""
    ratio = float(measured.sum() / charged.sum())
    error = float(np.sqrt(((measured - ratio * charged) ** 2).sum()) / charged.sum())
    return ratio + 2.0 * error


class _RerouteWatcher(Watcher):
    """The experts of a layer, with its routing changed by `act`, if there is one."""

    def __init__(self, index: int, block: MoeBlock, weights: LayerWeights) -> None:
        super().__init__(block, weights)
        self.index = index
        self.act: Act | None = None

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.act is not None:
            assert self.block.router is not None  # `measure` refused
            p = torch.softmax(self.block.router(hidden).float(), dim=-1).numpy()
            found, shares = self.act(self.index, ids.numpy(), weights.float().numpy(), p)
            ids, weights = torch.from_numpy(found), torch.from_numpy(shares).to(weights.dtype)
        return super().forward(hidden, ids, weights)


class _ActEverywhere:
    """One action for every missing pair that may be changed. resident: of each window [N, L, E]. moved: sum of d^2."""

    def __init__(self, action: str, resident: NDArray[np.bool_], normalised: bool) -> None:
        self._one = LossTable({action: np.ones(resident.shape[1])})
        self._resident, self._normalised = resident, normalised
        self.moved = 0.0

    def __call__(
        self, layer: int, ids: NDArray[Any], weights: NDArray[Any], probabilities: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        amplitudes, width = self._one.amplitudes(layer, ACTIONS), len(ids) // len(self._resident)
        out_ids, out = ids.copy(), weights.copy()
        for t in range(len(ids)):
            row, here = slice(t, t + 1), self._resident[t // width, layer]
            offers = offers_of(ids[row], weights[row], probabilities[row], here, amplitudes, (False,)).offers
            if offers:
                self.moved += sum(offer.amplitudes[0] for offer in offers) ** 2
                out_ids[row], out[row], _ = changed(
                    ids[row], weights[row], probabilities[row], here, offers, self._normalised
                )  # fmt: skip
        return out_ids, out


class _ActAtPrice:
    """The rule of a quality budget at a fixed price in nats a miss, each window as one request is served.

    charged: nats by window. offered: nats of every offer.
    """

    def __init__(
        self, table: LossTable, experts: int, width: int, prefix: int, price: float, normalised: Sequence[bool]
    ) -> None:
        self._experts, self._width, self._prefix, self._price = experts, width, prefix, price
        self._normalised = normalised
        self._amplitudes = [table.amplitudes(layer, ACTIONS) for layer in range(len(normalised))]
        self.charged, self.offered = dict[int, float](), list[float]()

    def __call__(
        self, layer: int, ids: NDArray[Any], weights: NDArray[Any], probabilities: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        amplitudes, slots = self._amplitudes[layer], max(ids.shape[1], round(_SLOTS * self._experts))
        out_ids, out, held = ids.copy(), weights.copy(), dict[int, None]()  # by last use
        for t in range(len(ids)):
            row, place = slice(t, t + 1), t % self._width
            held = held if place else {}
            if place >= self._prefix and len(held) >= slots:
                here = np.zeros(self._experts, np.bool_)
                here[list(held)] = True
                found = offers_of(ids[row], weights[row], probabilities[row], here, amplitudes, (False,))
                choice = choose(found.offers, found.misses, (0,), (_PLENTY,), _EACH, self._price)
                self.offered += choice.nats
                if choice.avoided:
                    window = t // self._width
                    self.charged[window] = self.charged.get(window, 0.0) + choice.spent[0]
                    out_ids[row], out[row], _ = changed(
                        ids[row], weights[row], probabilities[row], here, choice.avoided, self._normalised[layer]
                    )  # fmt: skip
            for expert in out_ids[t].tolist():
                held.pop(expert, None)
                held[expert] = None
            while len(held) > slots:
                del held[next(iter(held))]
        return out_ids, out


def _residents(layers: int, experts: int, seed: int) -> NDArray[np.bool_]:
    """[L, E], half of each layer's experts at random."""
    rng = np.random.default_rng(seed)
    scores = rng.random((layers, experts))
    return np.asarray(scores <= np.quantile(scores, _RESIDENT, axis=1, keepdims=True))


def _log_probs(model: Any, ids: NDArray[np.int64]) -> torch.Tensor:
    """[N, W, V] of the tokens of windows [N, W]."""
    logits = model(input_ids=torch.from_numpy(ids), use_cache=False).logits
    return torch.log_softmax(logits.float(), -1)


def _kl(reference: torch.Tensor, found: torch.Tensor) -> NDArray[np.float64]:
    """Sum over the tokens of each window [N] of KL(reference || found), of log-probabilities [N, W, V]."""
    return (reference.exp() * (reference - found)).sum(-1).clamp_min(0.0).double().sum(-1).numpy()
