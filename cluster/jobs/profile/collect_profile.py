"""Profiles the experts of a store and writes the profile into its folder, atomically.

    text   runs through the model; sums are saved in OUT.profile after each forward, so an interrupted run resumes
    trace  its routing is counted; a trace has no expert inputs, so there is no output similarity

The sums are of the routing and of products of outputs. On a sample of the tokens all experts run, in blocks of at most
`BLOCK_BYTES` of outputs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from safetensors import SafetensorError
from safetensors.numpy import load

from ....actors.engine.cache.slots import LayerWeights
from ....actors.engine.cache.sources import host_weights
from ....actors.engine.model.model import MoeBlock, experts_per_token
from ....actors.policies.buddymoe.buddies import ExpertProfile, Outputs, RoutingCounts, renormalised, warmup_weights
from ....actors.store.artifacts import (
    PROFILE_FILE,
    PROFILE_VERSION,
    ProfileManifest,
    ProfileSource,
    encode_arrays,
    encode_tensors,
    read_profile_manifest,
)
from ....actors.store.files import ExpertStore
from ....actors.store.format import Manifest, model_fingerprint, read_manifest
from ....errors import StoreError, TraceError
from ...report.tables import progress_on
from ...simulate.predictors import routing_profile
from ...simulate.trace import HEADER_NAME, Trace
from ..prepare.calibration import Windows, read_windows
from ..prepare.capture import Watcher, batches, load_model, run_batch, watching
from ..prepare.writer import beside, disk_errors, locked, publish, write_file
from . import ProfileOptions

BLOCK_BYTES = 256 << 20
State = dict[str, NDArray[np.float64]]
_WORK = ".profile"
_ALGORITHM = 1  # changed when the same text gives other sums


class LayerProfiler(Watcher):
    """Sums one layer's routing, and the products of its experts' outputs (see `Outputs`): dots, norms float64 [E, E].

    sampled, token_weights: set before each forward; its rows on which all experts run, and the weight of each row.
    """

    def __init__(self, block: MoeBlock, weights: LayerWeights) -> None:
        super().__init__(block, weights)
        experts, _, hidden = self.down.shape
        self.routing = RoutingCounts(experts)
        self.dots, self.norms = torch.zeros(2, experts, experts, dtype=torch.float64)
        self.sampled: torch.Tensor = torch.zeros(0, dtype=torch.int64)
        self.token_weights: NDArray[np.float64] = np.zeros(0)
        self._rows = max(1, BLOCK_BYTES // (4 * experts * hidden))

    def see(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        self.routing.add(ids.numpy(), renormalised(weights.float().numpy()), self.token_weights)
        for rows in self.sampled.split(self._rows):
            x = hidden[rows].float()
            y = torch.stack([self.post(self.expert(e, x)) for e in range(len(self.down))], dim=1)  # [n, E, H]
            self._add(y, ids[rows], weights[rows])

    def sums(self) -> State:
        """The sums, not copied: writing to the arrays changes them."""
        pairs = self.routing.pairs
        return {
            "activations": pairs.activations,
            "binary": pairs.binary,
            "weighted": pairs.weighted,
            "entropies": self.routing.entropies,
            "dots": self.dots.numpy(),
            "norms": self.norms.numpy(),
        }

    def _add(self, y: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """y [n, E, H] of all experts; ids [n, K] and routing weights [n, K] of the picked ones."""
        picked = y.gather(1, ids.unsqueeze(2).expand(-1, -1, y.shape[2]))  # [n, K, H]
        squares = weights.double().square().unsqueeze(2)  # [n, K, 1]
        dots = torch.bmm(picked, y.transpose(1, 2)).double() * squares  # [n, K, E]
        norms = y.square().sum(2).double().unsqueeze(1) * squares
        self.dots.index_add_(0, ids.reshape(-1), dots.reshape(-1, y.shape[1]))
        self.norms.index_add_(0, ids.reshape(-1), norms.reshape(-1, y.shape[1]))


class Collector:
    """The profilers of all layers. model: dense weights in float32. blocks, weights: its MoE layers and experts."""

    def __init__(
        self,
        model: Any,
        blocks: Sequence[MoeBlock],
        weights: Sequence[LayerWeights],
        windows: Windows,
        options: ProfileOptions,
    ) -> None:
        self._model, self._blocks, self._windows, self._options = model, blocks, windows, options
        self.profilers = [LayerProfiler(*layer) for layer in zip(blocks, weights, strict=True)]
        self.output_tokens = min(options.output_tokens, windows.tokens)

    def run(self, done: int, advanced: Callable[[int], None]) -> Iterator[int]:
        """Run the windows from `done` on; yields their number after each forward, `advanced` gets its tokens."""
        with watching(self._model, self._blocks, self.profilers):
            for start, ids in batches(self._windows, done):
                self.announce(start * ids.shape[1], ids)
                run_batch(self._model, ids)
                advanced(ids.size)
                yield start + len(ids)

    def state(self) -> State:
        """The sums over all layers."""
        layers = [profiler.sums() for profiler in self.profilers]
        return {name: np.stack([sums[name] for sums in layers]) for name in layers[0]}

    def resume(self, state: State) -> None:
        """Continue from sums of `state`."""
        for layer, profiler in enumerate(self.profilers):
            for name, into in profiler.sums().items():
                into[...] = state[name][layer]

    def profile(self) -> ExpertProfile:
        state = self.state()
        dots, norms = state.pop("dots"), state.pop("norms")
        return ExpertProfile(**state, outputs=Outputs(dots, norms))

    def announce(self, first: int, ids: NDArray[np.int64]) -> None:
        """Set every layer's sampled rows and token weights of the next forward."""
        total, wanted = self._windows.tokens, self.output_tokens
        numbers = np.arange(first, first + ids.size)
        # exactly `wanted` of all tokens, evenly: the rounded share changes there
        sampled = torch.from_numpy(np.flatnonzero((numbers + 1) * wanted // total != numbers * wanted // total))
        steps = numbers % ids.shape[1]
        counts = warmup_weights(steps, self._options.warmup_steps, self._options.warmup_weight)
        for profiler in self.profilers:
            profiler.sampled, profiler.token_weights = sampled, counts


class Partial:
    """The sums of an unfinished profile in a work folder, which is made now.

    Args:
        key: of everything that the sums depend on; sums of another key do not count.

    Raises:
        StoreError: the folder cannot be written.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._path, self._key = folder / "sums.safetensors", key
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def save(self, state: State, done: int) -> None:
        """Replace the saved sums by those of the first `done` windows. Raises StoreError: the disk is full."""
        write_file(self._path, encode_tensors(state, {"key": self._key, "done": str(done)}))

    def load(self, like: State) -> tuple[State, int] | None:
        """The saved sums and their number of windows; None without sums of this key that look like `like`."""
        try:
            data = self._path.read_bytes()
            size = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + size])["__metadata__"]
            state, done = load(data), int(header["done"])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError):
            return None
        fits = set(state) == set(like) and all(
            state[name].dtype == a.dtype and state[name].shape == a.shape and np.isfinite(state[name]).all()
            for name, a in like.items()
        )
        return (state, done) if fits and header.get("key") == self._key else None


def profile_text(
    store: Path, model_dir: Path, text: Path, options: ProfileOptions | None = None, *, progress: bool = True
) -> ProfileManifest:
    """Profile a store's experts on text. A profile of the same text and options stays, any other one is replaced.

    Args:
        model_dir: folder with the tokenizer and config.json: the checkpoint or the store itself.
        text: file or folder, see `read_texts`.

    Raises:
        ConfigError: no text, or too little. StoreError: the store is damaged, or the disk is full.
    """
    options = ProfileOptions() if options is None else options
    console = Console(stderr=True, quiet=not progress)
    manifest = read_manifest(store)
    windows = read_windows(text, model_dir, console)
    outputs = min(options.output_tokens, windows.tokens)
    source = options.source("text", windows.record().sha256, windows.tokens, outputs)
    with locked(store, console):
        present = _present(store, manifest, source)
        if present is not None:
            return present
        opened = ExpertStore(store, verify="stamp")
        model, blocks = load_model(store, manifest, None)
        collector = Collector(model, blocks, host_weights(opened.layers), windows, options)
        key = json.dumps([_ALGORITHM, model_fingerprint(manifest), source.model_dump()], sort_keys=True)
        partial = Partial(beside(store, _WORK), key)
        first = 0
        if (earlier := partial.load(collector.state())) is not None:
            state, first = earlier
            collector.resume(state)
        with progress_on(console) as bar:
            task = bar.add_task("profiling experts", total=windows.tokens, completed=first * windows.ids.shape[1])
            for done in collector.run(first, lambda tokens: bar.advance(task, tokens)):
                partial.save(collector.state(), done)
        return _publish(store, manifest, collector.profile(), experts_per_token(model.config), source)


def profile_trace(
    store: Path, trace: Path, options: ProfileOptions | None = None, *, progress: bool = True
) -> ProfileManifest:
    """Profile a store's experts from a recorded trace. Another profile is replaced.

    Raises:
        TraceError: the trace is corrupt, empty or of another model. StoreError: not a store, or the disk is full.
    """
    options = ProfileOptions() if options is None else options
    console = Console(stderr=True, quiet=not progress)
    manifest, found = read_manifest(store), Trace(trace)
    header = found.header
    if header.fingerprint != model_fingerprint(manifest):
        raise TraceError(f"'{trace}' was recorded on another model than '{store}'", "record one on this model")
    if not header.rows:
        raise TraceError(f"'{trace}' has no rows to profile", "record a longer trace")
    digest = hashlib.sha256((trace / HEADER_NAME).read_bytes()).hexdigest()
    source = options.source("trace", digest, header.rows, 0)
    with locked(store, console):
        present = _present(store, manifest, source)
        if present is not None:
            return present
        with progress_on(console) as bar:
            task = bar.add_task("profiling experts", total=header.requests)
            profile = routing_profile(
                header, found.requests(), options.warmup_steps, options.warmup_weight, lambda: bar.advance(task)
            )
        return _publish(store, manifest, profile, header.top_k, source)


def _present(store: Path, manifest: Manifest, source: ProfileSource) -> ProfileManifest | None:
    """The store's profile if it is of this source, and whole."""
    try:
        found = read_profile_manifest(store, manifest)
    except StoreError:
        return None
    if found is None or found.source != source:
        return None
    path = store / found.arrays.file
    return found if path.is_file() and path.stat().st_size == found.arrays.nbytes else None


def _publish(
    store: Path, manifest: Manifest, profile: ExpertProfile, top_k: int, source: ProfileSource
) -> ProfileManifest:
    """Put the files into the store, `profile.json` last, and remove files that it does not name."""
    data, record = encode_arrays(profile)
    made = ProfileManifest(
        profile_version=PROFILE_VERSION,
        fingerprint=model_fingerprint(manifest),
        layers=profile.layers,
        experts=profile.experts,
        top_k=top_k,
        source=source,
        arrays=record,
    )
    write_file(store / record.file, data)
    publish(store, beside(store, _WORK), (), made, (record,), PROFILE_FILE)
    return made
