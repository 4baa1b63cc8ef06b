"""Runs calibration text through the full-precision model and keeps sums only: routing, and products of outputs.

In place of each MoE layer's experts stands a `LayerProfiler`. It answers in full precision, one expert at a time from
the store's mapped file, as `prepare/capture.py` does; nothing of the activations outlives a forward. On a sample of
the tokens it runs all experts and takes their products, in blocks of at most `BLOCK_BYTES` of outputs.

What an interrupted profile has summed so far, so that the next run goes on from there.

Profiles the experts of a store and puts the profile into its folder, whole or not at all.

    text   run it through the model, forward by forward, sums kept in OUT.profile: an interrupted run goes on
    trace  count its routing; a trace holds no inputs of experts, so there is no output similarity

`profile.json` comes last; until then the store has the profile that it had, or none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ....actors.engine.cache.slots import LayerWeights
from ....actors.engine.model.model import MoeBlock, attach, detach
from ....actors.policies.buddymoe.buddies import ExpertProfile, Outputs, RoutingCounts, renormalised, warmup_weights
from ....actors.store.artifacts import (
    PROFILE_NAME,
    PROFILE_VERSION,
    ProfileManifest,
    ProfileSource,
    encode_arrays,
    read_profile_manifest,
    stale_arrays,
)
from ....actors.store.files import ExpertStore
from ....actors.store.format import Manifest, model_fingerprint, read_manifest
from ....errors import StoreError, TraceError
from ....kernels.expert_ffn import Operands, TorchKernel
from ...report.tables import progress_on
from ...simulate.trace import HEADER_NAME, Trace
from ..prepare.calibration import Windows, read_windows
from ..prepare.job import beside, discard, locked
from ..prepare.writer import disk_errors, write_file
from .command import ProfileOptions

BLOCK_BYTES = 256 << 20
_ROWS_PER_FORWARD = 2048
State = dict[str, NDArray[np.float64]]


class Experts:
    """One layer's experts in float32, made one at a time from the mapped weights."""

    def __init__(self, block: MoeBlock, weights: LayerWeights) -> None:
        self._block, self._weights = block, weights
        self.count, self.neurons = weights.tensors[0].shape[:2]

    def kernel(self, expert: int) -> TorchKernel:
        """Runs that expert, as slot 0."""
        gate_up, down, *biases = (t[expert : expert + 1].float() for t in self._weights.tensors)
        gate_up_bias, down_bias = biases if biases else (None, None)
        return TorchKernel(Operands(gate_up, down, gate_up_bias, down_bias), self._block.gate)

    def post(self, y: torch.Tensor) -> torch.Tensor:
        """What the module does to each expert's output."""
        out: torch.Tensor = y if self._block.post is None else self._block.post(y)
        return out


class OutputSums:
    """Products of one layer's expert outputs; see `Outputs`.

    Attributes:
        dots, norms: float64 [E, E].
    """

    def __init__(self, experts: int, hidden: int) -> None:
        self.dots = torch.zeros(experts, experts, dtype=torch.float64)
        self.norms = torch.zeros(experts, experts, dtype=torch.float64)
        self.rows = max(1, BLOCK_BYTES // (4 * experts * hidden))

    def add(self, y: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """y [n, E, H] of all experts; ids [n, K] and routing weights [n, K] of the picked ones."""
        picked = y.gather(1, ids.unsqueeze(2).expand(-1, -1, y.shape[2]))  # [n, K, H]
        squares = weights.double().square().unsqueeze(2)  # [n, K, 1]
        dots = torch.bmm(picked, y.transpose(1, 2)).double() * squares  # [n, K, E]
        norms = y.square().sum(2).double().unsqueeze(1) * squares
        self.dots.index_add_(0, ids.reshape(-1), dots.reshape(-1, y.shape[1]))
        self.norms.index_add_(0, ids.reshape(-1), norms.reshape(-1, y.shape[1]))


class LayerProfiler:
    """In place of one MoE layer's experts.

    Args:
        sampled: rows of the running forward on which all experts are run; set before each.
        token_weights: how much each row of the running forward counts.
    """

    def __init__(self, experts: Experts, hidden: int) -> None:
        self._experts = experts
        self.routing = RoutingCounts(experts.count)
        self.outputs = OutputSums(experts.count, hidden)
        self.sampled: torch.Tensor = torch.zeros(0, dtype=torch.int64)
        self.token_weights: NDArray[np.float64] = np.zeros(0)

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [T, H], ids [T, K], weights [T, K] -> [T, H]."""
        shares = renormalised(weights.float().numpy())
        self.routing.add(ids.numpy(), shares, self.token_weights)
        for rows in self.sampled.split(self.outputs.rows):
            self.outputs.add(self._all(hidden[rows]), ids[rows], weights[rows])
        return self._picked(hidden, ids, weights)

    def sums(self) -> State:
        """What it has summed so far, in place: whoever writes to the arrays changes the sums."""
        pairs, outputs = self.routing.pairs, self.outputs
        return {
            "activations": pairs.activations,
            "binary": pairs.binary,
            "weighted": pairs.weighted,
            "entropies": self.routing.entropies,
            "dots": outputs.dots.numpy(),
            "norms": outputs.norms.numpy(),
        }

    def _all(self, hidden: torch.Tensor) -> torch.Tensor:
        """Outputs of every expert [n, E, H]."""
        count, width = hidden.shape
        y = torch.empty(count, self._experts.count, width)
        rows, out = torch.arange(count), torch.empty(count, width)
        for expert in range(self._experts.count):
            group = (0, count, 0, self._experts.neurons, False)
            self._experts.kernel(expert).run(hidden.float(), rows, [group], 1, out)
            y[:, expert] = self._experts.post(out)
        return y

    def _picked(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        pairs = ids.reshape(-1).argsort(stable=True)
        y = torch.empty(len(pairs), hidden.shape[1])
        start = 0
        for expert, count in enumerate(ids.reshape(-1).bincount(minlength=self._experts.count).tolist()):
            if count:
                group = (start, start + count, 0, self._experts.neurons, False)  # all neurons of slot 0
                self._experts.kernel(expert).run(hidden.float(), pairs, [group], ids.shape[1], y)
            start += count
        y = self._experts.post(y)
        return (y.view(*ids.shape, -1) * weights.unsqueeze(2)).sum(dim=1).to(hidden.dtype)


class Collector:
    """All layers of a model, and how far the text has been run.

    Args:
        model, blocks, weights: the model with its dense part in float32, its MoE layers and their mapped experts.
        windows: the text.
    """

    def __init__(
        self,
        model: Any,
        blocks: Sequence[MoeBlock],
        weights: Sequence[LayerWeights],
        windows: Windows,
        options: ProfileOptions,
    ) -> None:
        self._model, self._blocks, self._windows, self._options = model, blocks, windows, options
        hidden = model.config.get_text_config().hidden_size
        layers = [Experts(block, held) for block, held in zip(blocks, weights, strict=True)]
        self._profilers = [LayerProfiler(experts, hidden) for experts in layers]
        self.output_tokens = min(options.output_tokens, windows.tokens)

    def run(self, done: int, advanced: Callable[[int], None]) -> Iterator[int]:
        """Run the windows from `done` on; yields how many are done after each forward.

        Args:
            advanced: called with the tokens just run.
        """
        ids, step = self._windows.ids, max(1, _ROWS_PER_FORWARD // self._windows.ids.shape[1])
        with self._attached():
            for start in range(done, len(ids), step):
                part = ids[start : start + step]
                self._announce(start * ids.shape[1], part)
                with torch.no_grad():
                    self._model.base_model(input_ids=torch.from_numpy(part), use_cache=False)
                advanced(part.size)
                yield start + len(part)

    def state(self) -> State:
        """Every sum so far, over all layers."""
        layers = [profiler.sums() for profiler in self._profilers]
        return {name: np.stack([sums[name] for sums in layers]) for name in layers[0]}

    def resume(self, state: State) -> None:
        """Go on from sums that `state` gave, of the same shapes."""
        for layer, profiler in enumerate(self._profilers):
            for name, into in profiler.sums().items():
                into[...] = state[name][layer]

    def profile(self) -> ExpertProfile:
        """What was found."""
        state = self.state()
        dots, norms = state.pop("dots"), state.pop("norms")
        return ExpertProfile(**state, outputs=Outputs(dots, norms))

    def _announce(self, first: int, part: NDArray[np.int64]) -> None:
        """Tell every layer which rows of the next forward are sampled, and how much each counts."""
        total, wanted = self._windows.tokens, self.output_tokens
        numbers = np.arange(first, first + part.size)
        # exactly `wanted` of all tokens, evenly: where the rounded share moves on
        sampled = torch.from_numpy(np.flatnonzero((numbers + 1) * wanted // total != numbers * wanted // total))
        steps = numbers % part.shape[1]
        counts = warmup_weights(steps, self._options.warmup_steps, self._options.warmup_weight)
        for profiler in self._profilers:
            profiler.sampled, profiler.token_weights = sampled, counts

    @contextmanager
    def _attached(self) -> Iterator[None]:
        handles = [
            attach(block.experts, profiler) for block, profiler in zip(self._blocks, self._profilers, strict=True)
        ]
        try:
            yield
        finally:
            for handle in handles:
                detach(handle)


_NAME = "sums.safetensors"


class Partial:
    """The sums of an unfinished profile in a work folder.

    Args:
        folder: made if it is not there.
        key: of everything that the sums depend on; sums of another key are thrown away.

    Raises:
        StoreError: the folder cannot be written.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._path, self._key = folder / _NAME, key
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def save(self, state: State, done: int) -> None:
        """Keep the sums of the first `done` windows, in place of what was kept.

        Raises:
            StoreError: the disk is full.
        """
        write_file(self._path, save(state, {"key": self._key, "done": str(done)}))

    def load(self, like: State) -> tuple[State, int] | None:
        """The kept sums and their windows; None where there are none of this key, or not as `like`."""
        try:
            data = self._path.read_bytes()
            size = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + size])["__metadata__"]
            state, done = load(data), int(header["done"])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError):
            return None
        same = header.get("key") == self._key and set(state) == set(like)
        if not same or any(
            state[name].dtype != held.dtype or state[name].shape != held.shape or not np.isfinite(state[name]).all()
            for name, held in like.items()
        ):
            return None
        return state, done


_WORK = ".profile"
_ALGORITHM = 1  # another number where the same text gives other sums


def profile_text(
    store: Path, model_dir: Path, text: Path, options: ProfileOptions | None = None, *, progress: bool = True
) -> ProfileManifest:
    """Profile a store's experts on text, in place of a profile that is there; one of the same text and options stays.

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
    source = ProfileSource(
        kind="text",
        sha256=windows.record().sha256,
        tokens=windows.tokens,
        output_tokens=min(options.output_tokens, windows.tokens),
        warmup_steps=options.warmup_steps,
        warmup_weight=options.warmup_weight,
    )
    with locked(store, console):
        present = _present(store, manifest, source)
        if present is not None:
            return present
        import torch

        from ....actors.engine.cache.sources import host_weights
        from ....actors.engine.model.model import build_model, experts_per_token, find_blocks  # torch: seconds

        opened = ExpertStore(store, verify="stamp")
        model = build_model(store, manifest, torch.float32, torch.device("cpu"), "auto")
        weights = host_weights(opened.layers)
        collector = Collector(model, find_blocks(model, manifest), weights, windows, options)
        partial = Partial(beside(store, _WORK), _key(manifest, source))
        kept, first = partial.load(collector.state()), 0
        if kept is not None:
            state, first = kept
            collector.resume(state)
        with progress_on(console) as bar:
            task = bar.add_task("profiling experts", total=windows.tokens, completed=first * windows.ids.shape[1])
            for done in collector.run(first, lambda tokens: bar.advance(task, tokens)):
                partial.save(collector.state(), done)
        return _publish(store, manifest, collector.profile(), experts_per_token(model.config), source)


def profile_trace(
    store: Path, trace: Path, options: ProfileOptions | None = None, *, progress: bool = True
) -> ProfileManifest:
    """Profile a store's experts from a recorded trace, in place of a profile that is there.

    Raises:
        TraceError: the trace is corrupt, empty or of another model. StoreError: the store is not one, or the disk is
            full.
    """
    options = ProfileOptions() if options is None else options
    console = Console(stderr=True, quiet=not progress)
    manifest, found = read_manifest(store), Trace(trace)
    header = found.header
    if header.fingerprint != model_fingerprint(manifest):
        raise TraceError(f"'{trace}' was recorded on another model than '{store}'", "record one on this model")
    if not header.rows:
        raise TraceError(f"'{trace}' has no rows to profile", "record some")
    source = ProfileSource(
        kind="trace",
        sha256=hashlib.sha256((trace / HEADER_NAME).read_bytes()).hexdigest(),
        tokens=header.rows,
        output_tokens=0,
        warmup_steps=options.warmup_steps,
        warmup_weight=options.warmup_weight,
    )
    with locked(store, console):
        present = _present(store, manifest, source)
        if present is not None:
            return present
        layers = [RoutingCounts(header.experts) for _ in range(header.layers)]
        with progress_on(console) as bar:
            task = bar.add_task("profiling experts", total=header.requests)
            for request in found.requests():
                row = 0
                for step in request.iterations:
                    steps = np.arange(row, row + len(step.tokens))
                    row += len(step.tokens)
                    counts = warmup_weights(steps, options.warmup_steps, options.warmup_weight)
                    for layer, routing in enumerate(layers):
                        routing.add(step.ids[:, layer], renormalised(step.weights[:, layer]), counts)
                bar.advance(task)
        profile = ExpertProfile(
            np.stack([layer.pairs.activations for layer in layers]),
            np.stack([layer.pairs.binary for layer in layers]),
            np.stack([layer.pairs.weighted for layer in layers]),
            np.stack([layer.entropies for layer in layers]),
            None,
        )
        return _publish(store, manifest, profile, header.top_k, source)


def _present(store: Path, manifest: Manifest, source: ProfileSource) -> ProfileManifest | None:
    """The store's profile if it is of this very source, and whole; a damaged one is made anew."""
    try:
        found = read_profile_manifest(store, manifest)
    except StoreError:
        return None
    if found is None or found.source != source:
        return None
    path = store / found.arrays.file
    return found if path.is_file() and path.stat().st_size == found.arrays.nbytes else None


def _key(manifest: Manifest, source: ProfileSource) -> str:
    return json.dumps([_ALGORITHM, model_fingerprint(manifest), source.model_dump()], sort_keys=True)


def _publish(
    store: Path, manifest: Manifest, profile: ExpertProfile, top_k: int, source: ProfileSource
) -> ProfileManifest:
    """Put the files into the store, `profile.json` last, and drop what it does not name."""
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
    write_file(store / PROFILE_NAME, made.encode())
    with disk_errors(store):
        for path in stale_arrays(store, made):
            path.unlink()
        discard(beside(store, _WORK))
    return made
