"""`tiermoe prepare --profile`: sums against direct loops, files that are whole, and refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import save_tiny_checkpoint
from traces import header, write
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tiermoe.actors.engine.cache.sources import host_weights
from tiermoe.actors.engine.model.model import build_model, find_blocks
from tiermoe.actors.policies.buddymoe.buddies import BuddyOptions, RoutingCounts, renormalised
from tiermoe.actors.store.artifacts import PROFILE_NAME, read_profile, read_profile_manifest
from tiermoe.actors.store.files import ExpertStore, LayerArrays
from tiermoe.actors.store.format import model_fingerprint, read_manifest
from tiermoe.cluster.cli import app
from tiermoe.cluster.jobs.prepare import capture, prepare
from tiermoe.cluster.jobs.prepare.calibration import Windows
from tiermoe.cluster.jobs.profile import ProfileOptions
from tiermoe.cluster.jobs.profile import collect_profile as collect
from tiermoe.cluster.jobs.profile.collect_profile import Collector, Partial, profile_text, profile_trace
from tiermoe.cluster.jobs.profile.profile_options import (
    alikeness,
    size_distributions,
    size_table,
    taken,
)
from tiermoe.errors import ConfigError, StoreError, TraceError
from tiermoe.kernels.expert_ffn import Operands, TorchKernel

SENTENCE = "Profiles say which experts of a layer are picked together, and which do the same. "


@pytest.fixture(scope="module")
def made(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(checkpoint, tmp_path_factory.mktemp("profile") / "store", progress=False)


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "store"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(SENTENCE * 13)  # four windows of 256 tokens
    return path


class _Noting:
    """Notes what an experts module is given, and lets the profiler answer."""

    def __init__(self, profiler: Any) -> None:
        self.profiler, self.seen = profiler, []
        self._forward = profiler.forward

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.seen.append((hidden.clone(), ids.clone(), weights.clone()))
        return self._forward(hidden, ids, weights)  # type: ignore[no-any-return]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])  # the second has biases and an activation of its own
@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_sums_are_those_of_direct_loops(
    model_type: str, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(capture, "ROWS_PER_FORWARD", 16)
    checkpoint = save_tiny_checkpoint(model_type, tmp_path / "model")
    opened = ExpertStore(prepare(checkpoint, tmp_path / "store", progress=False))
    model = build_model(tmp_path / "store", opened.manifest, torch.float32, torch.device("cpu"), "auto")
    windows = Windows(np.random.default_rng(0).integers(3, 100, (5, 8)))
    options = ProfileOptions(output_tokens=13, warmup_steps=2, warmup_weight=0.5)
    weights = host_weights(opened.layers)
    collector = Collector(model, find_blocks(model, opened.manifest), weights, windows, options)
    noting = [_Noting(profiler) for profiler in collector.profilers]
    for note in noting:
        note.profiler.forward = note.forward
    assert list(collector.run(0, lambda tokens: None)) == [2, 4, 5]
    found = collector.profile()

    with torch.no_grad():  # the profilers answer as the unmodified model does
        expected = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)(torch.from_numpy(windows.ids))
        got = model.lm_head(collected_hidden(model, collector, windows))
    assert torch.allclose(got, expected.logits, atol=1e-4)

    sampled = [n for n in range(40) if (n + 1) * 13 // 40 != n * 13 // 40]
    assert len(sampled) == 13 == collector.output_tokens
    for layer, note in enumerate(noting):
        hidden, ids, w = (torch.cat([seen[i] for seen in note.seen[:3]]) for i in range(3))
        experts = note.profiler
        count = len(experts.down)
        y = torch.stack([_run(experts, opened.layers[layer], e, hidden) for e in range(count)], dim=1).double()
        dots, norms = np.zeros((2, count, count))
        for t in sampled:
            for i, weight in zip(ids[t].tolist(), w[t].double().tolist(), strict=True):
                dots[i] += weight**2 * (y[t] @ y[t, i]).numpy()
                norms[i] += weight**2 * y[t].square().sum(1).numpy()
        assert found.outputs.dots[layer] == pytest.approx(dots, rel=1e-4, abs=1e-6)
        assert found.outputs.norms[layer] == pytest.approx(norms, rel=1e-4, abs=1e-6)
        routing = RoutingCounts(count)
        counts = np.tile([0.5, 0.5, 1, 1, 1, 1, 1, 1], 5)
        routing.add(ids.numpy(), renormalised(w.numpy()), counts)
        assert found.activations[layer] == pytest.approx(routing.pairs.activations)
        assert found.binary[layer] == pytest.approx(routing.pairs.binary)
        assert found.weighted[layer] == pytest.approx(routing.pairs.weighted)
        assert found.entropies[layer] == pytest.approx(routing.entropies)


def collected_hidden(model: Any, collector: Collector, windows: Windows) -> torch.Tensor:
    """The model's last hidden states with the profilers in place of its experts; the sums go on growing."""
    before = collector.state()
    with capture.watching(model, collector._blocks, collector.profilers):
        collector.announce(0, windows.ids)
        out = model.base_model(input_ids=torch.from_numpy(windows.ids), use_cache=False).last_hidden_state
    collector.resume(before)
    return out  # type: ignore[no-any-return]


def _run(experts: Any, layer: LayerArrays, expert: int, hidden: torch.Tensor) -> torch.Tensor:
    """By the reference kernel."""
    gate_up, down, *biases = (t[expert : expert + 1].float() for t in host_weights([layer])[0].tensors)
    kernel = TorchKernel(Operands(gate_up, down, *(biases or (None, None))), experts.block.gate)
    y = torch.empty(len(hidden), hidden.shape[1])
    kernel.run(hidden, torch.arange(len(hidden)), [(0, len(hidden), 0, down.shape[1], False)], 1, y)
    return experts.post(y)  # type: ignore[no-any-return]


def test_profile_and_read(store: Path, checkpoint: Path, text: Path) -> None:
    made = profile_text(store, checkpoint, text, progress=False)
    assert made.source.tokens == made.source.output_tokens == 1024
    assert (made.layers, made.experts, made.top_k) == (2, 8, 2)
    profile = read_profile(store, read_manifest(store))
    assert profile.activations.sum(1).tolist() == [2 * 1024] * 2
    assert profile.binary.sum((1, 2)).tolist() == [2 * 1024] * 2
    assert profile.entropies.sum(2).tolist() == [[1024] * 5] * 2
    assert profile.buddies(BuddyOptions(by="blend")).sizes.max() <= 7
    assert not (store.parent / "store.profile").exists()
    first = (store / PROFILE_NAME).stat().st_mtime_ns
    assert profile_text(store, checkpoint, text, progress=False) == made  # the same again: nothing to do
    assert (store / PROFILE_NAME).stat().st_mtime_ns == first
    other = profile_text(store, checkpoint, text, ProfileOptions(output_tokens=64), progress=False)
    assert other.arrays.file != made.arrays.file
    assert [p.name for p in store.glob("profile-*")] == [other.arrays.file]  # the old arrays are gone
    ExpertStore(store, verify="full")  # still a store


@pytest.fixture
def interrupted(checkpoint: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Profiles a store and stops after the first save; a list of the windows that each run starts with."""
    monkeypatch.setattr(capture, "ROWS_PER_FORWARD", 512)
    save, run, ran = Partial.save, Collector.run, list[int]()

    def stop(self: Partial, state: Any, done: int) -> None:
        save(self, state, done)
        raise KeyboardInterrupt

    def watched(self: Collector, done: int, advanced: Any) -> Any:
        ran.append(done)
        return run(self, done, advanced)

    def profile(store: Path, model: Path = checkpoint) -> list[int]:
        monkeypatch.setattr(Collector, "run", watched)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Partial, "save", stop)
            with pytest.raises(KeyboardInterrupt):
                profile_text(store, model, text, progress=False)
        return ran

    return profile


def test_an_interrupted_profile_resumes(
    store: Path, checkpoint: Path, text: Path, interrupted: Callable[..., list[int]]
) -> None:
    whole = profile_text(Path(shutil.copytree(store, store.parent / "other")), checkpoint, text, progress=False)
    ran = interrupted(store)
    assert read_profile_manifest(store, read_manifest(store)) is None
    assert profile_text(store, checkpoint, text, progress=False) == whole  # the arrays' digest is in it
    assert ran == [0, 2]  # windows of 256 tokens


def _traced(store: Path, out: Path, **changes: object) -> Path:
    manifest = read_manifest(store)
    shape = header(layers=2, experts=8, fingerprint=changes.pop("fingerprint", model_fingerprint(manifest)), **changes)  # type: ignore[arg-type]
    write(out, shape, [[1, 2, 3], [4, 5], [6, 7, 8, 9]], decodes=4)
    return out


def test_a_trace_gives_what_its_routing_says(store: Path, tmp_path: Path) -> None:
    trace = _traced(store, tmp_path / "trace")
    written = write(tmp_path / "again", header(layers=2, experts=8), [[1, 2, 3], [4, 5], [6, 7, 8, 9]], decodes=4)
    made = profile_trace(store, trace, ProfileOptions(warmup_steps=1, warmup_weight=0.0), progress=False)
    assert made.source.kind == "trace"
    assert made.source.output_tokens == 0
    assert made.source.tokens == 21
    profile = read_profile(store, read_manifest(store))
    assert profile.outputs is None
    for layer in range(2):
        counts = np.zeros(8)
        for request in written:
            ids = np.concatenate([step.ids[:, layer] for step in request])[1:]  # its first token is warm-up
            counts += np.bincount(ids.ravel(), minlength=8)
        assert profile.activations[layer].tolist() == counts.tolist()
        assert profile.binary[layer].sum() == counts.sum()
    assert size_distributions(profile)[-1]["by"] == "coactivation"
    assert alikeness(profile) == []


def test_refusals(store: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="another model"):
        profile_trace(store, _traced(store, tmp_path / "other", fingerprint="a" * 64), progress=False)
    with pytest.raises(TraceError, match="not a routing trace"):
        profile_trace(store, tmp_path / "nothing", progress=False)
    with pytest.raises(StoreError, match=r"has no profile.*--profile TEXT"):
        read_profile(store, read_manifest(store))
    for wrong in ({"output_tokens": 0}, {"warmup_steps": -1}, {"warmup_weight": 1.5}):
        with pytest.raises(ConfigError):
            ProfileOptions(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("damage", "named"),
    [("truncated", "do not match"), ("altered", "do not match"), ("missing", "cannot be read"),
     ("manifest", "checksum"), ("version", "profile version"), ("model", "another model")],
)  # fmt: skip
def test_a_damaged_profile_is_refused_and_made_again(damage: str, named: str, store: Path, tmp_path: Path) -> None:
    trace = _traced(store, tmp_path / "trace")
    made = profile_trace(store, trace, progress=False)
    arrays, manifest = store / made.arrays.file, read_manifest(store)
    data = arrays.read_bytes()
    if damage == "truncated":
        arrays.write_bytes(data[:-1])
    elif damage == "altered":
        arrays.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "missing":
        arrays.unlink()
    elif damage == "model":
        source = (manifest.source[0].model_copy(update={"nbytes": 1}), *manifest.source[1:])
        manifest = manifest.model_copy(update={"source": source})
    else:
        body = json.loads((store / PROFILE_NAME).read_bytes())
        body["top_k" if damage == "manifest" else "profile_version"] = 3
        (store / PROFILE_NAME).write_text(json.dumps(body, indent=1) + "\n")
    with pytest.raises(StoreError, match=named):
        read_profile(store, manifest)
    if damage not in ("altered", "model"):  # of those only the reader knows
        assert profile_trace(store, trace, progress=False) == made
        assert read_profile(store, read_manifest(store)).activations.sum() > 0


def test_what_a_profile_says(store: Path, checkpoint: Path, text: Path) -> None:
    profile_text(store, checkpoint, text, progress=False)
    profile = read_profile(store, read_manifest(store))
    rows = size_distributions(profile)
    assert len(rows) == 3 * 3 * 2
    for row in rows:
        assert 0 <= row["least"] <= row["most"] <= 7
        assert row["mean"] <= row["uncapped_mean"]
    means = [row["mean"] for row in rows if (row["by"], row["layer"]) == ("output", 1)]
    assert means == sorted(means)  # larger alpha, longer lists
    assert len(alikeness(profile)) == 2
    shares = taken(profile)
    assert {row["by"] for row in shares} == {"coactivation", "output", "blend"}
    assert all(0 <= row["taken"] <= 1 for row in shares)
    assert len(size_table(rows).rows) == 9


def test_by_whatever_path_a_profile_is_made_once(
    checkpoint: Path, text: Path, tmp_path: Path, interrupted: Callable[..., list[int]]
) -> None:
    """Model and store behind links: an interrupted profile resumes, and a second run finds what the first has made."""
    links = tmp_path / "links"
    links.mkdir()
    (links / "model").symlink_to(checkpoint)
    (tmp_path / "disk").mkdir()
    (links / "store").symlink_to(tmp_path / "disk" / "store")  # not there yet
    ran = interrupted(prepare(links / "model", links / "store", progress=False), links / "model")
    assert (links / "store").is_symlink()
    assert [path.name for path in links.iterdir() if path.name not in ("model", "store")] == []
    for model, out in (
        (checkpoint, tmp_path / "disk" / "store"), (links / "model", links / "store"), (links / "store", None),
        (links / "model", tmp_path / "disk" / ".." / "disk" / "store"),
    ):  # fmt: skip
        named = [str(model)] if out is None else [str(model), str(out)]
        done = CliRunner().invoke(app, ["prepare", *named, "--profile", str(text)])
        assert done.exit_code == 0, done.output
    assert ran == [0, 2]
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["store"]
