"""What `tiermoe prepare` measures and trains for policies: sensitivity, gates, and the files that hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serving
import torch
from tiny_models import VOCAB, save_tiny_checkpoint
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tiermoe.actors.engine.cache.sources import host_weights
from tiermoe.actors.engine.model.model import build_model, find_blocks
from tiermoe.actors.policies.baselines import PreGate
from tiermoe.actors.policies.quality import ACTIONS, LossTable
from tiermoe.actors.store import artifacts
from tiermoe.actors.store.artifacts import (
    encode_gates,
    encode_losses,
    encode_sensitivity,
    gates_of,
    losses_of,
    sensitivity_of,
)
from tiermoe.actors.store.format import read_manifest
from tiermoe.cluster.cli import app
from tiermoe.cluster.jobs.prepare import losses
from tiermoe.cluster.jobs.prepare.calibration import Windows
from tiermoe.cluster.jobs.prepare.measures import NextRouter, measure, recall, train_gate
from tiermoe.errors import StoreError

TOKENS = 12


def transcription(checkpoint: Path, windows: np.ndarray, normalised: bool) -> list[float]:
    """The formulas of `prepare.measures` on transformers' own model, expert by expert."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.set_experts_implementation("eager")
    model.requires_grad_(False)
    squares: dict[str, list[torch.Tensor]] = {}
    changes: dict[str, list[torch.Tensor]] = {}
    outputs: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {}

    def watch(name: str) -> Any:
        def run(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            forward, top_k = plain[name], ids.shape[1]
            one, fixed = torch.ones(1, 1), weights.detach()
            for t in range(len(hidden)):
                each = [forward(hidden[t : t + 1], ids[t : t + 1, k : k + 1], one)[0].detach() for k in range(top_k)]
                order = sorted(range(top_k), key=lambda k, t=t: -float(fixed[t, k]))  # type: ignore[misc]
                keep, drop = order[: top_k - top_k // 2], order[top_k - top_k // 2 :]

                def mean(places: list[int], each: list[Any] = each, t: int = t) -> torch.Tensor:
                    return sum(fixed[t, k] * each[k] for k in places) / sum(fixed[t, k] for k in places)

                change = mean(drop) - (mean(keep) if normalised else 0)
                changes.setdefault(name, []).append(change**2)
            out = forward(hidden, ids, weights)
            shift = torch.zeros_like(out, requires_grad=True)
            outputs[name] = shift
            return out + shift

        return run

    names = [name for name, module in model.named_modules() if name.endswith("experts") and hasattr(module, "act_fn")]
    for name in names:
        module = model.get_submodule(name)
        plain[name] = module.forward
        module.forward = watch(name)
    for row in windows:
        ids = torch.from_numpy(row)[None]
        logits = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1], -1)
        (-logits[range(len(row) - 1), ids[0, 1:]].sum()).backward()
        for name in names:
            grad = outputs[name].grad
            assert grad is not None
            squares.setdefault(name, []).extend(grad**2)
    return [
        0.5 * float((torch.stack(squares[name]).mean(0) * torch.stack(changes[name]).mean(0)).sum()) for name in names
    ]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "olmoe", "mixtral"])
def test_sensitivity_follows_the_formulas(model_type: str, tmp_path: Path) -> None:
    top_k = {} if model_type == "mixtral" else {"num_experts_per_tok": 3}
    checkpoint = save_tiny_checkpoint(model_type, tmp_path / "model", **top_k)
    opened = serving.prepared(checkpoint, tmp_path / "store")
    windows = np.random.default_rng(0).integers(3, VOCAB, (2, TOKENS))
    model = build_model(tmp_path / "store", opened.manifest, torch.float32, torch.device("cpu"), "auto")
    blocks, tensors = find_blocks(model, opened.manifest), host_weights(opened.layers)
    assert blocks[0].normalised == (model_type != "olmoe")
    found = measure(model, blocks, tensors, Windows(windows), lambda tokens: None)
    assert min(found) > 0
    np.testing.assert_allclose(found, transcription(checkpoint, windows, blocks[0].normalised), rtol=1e-3)
    again = measure(model, blocks, tensors, Windows(windows), lambda tokens: None)
    np.testing.assert_array_equal(found, again)


def test_a_gate_learns_what_it_is_shown() -> None:
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(1500, 12)).astype(np.float32)
    true = rng.normal(size=(8, 12)).astype(np.float32)
    ids = np.argsort(-(hidden @ true.T), axis=1)[:, :2]
    turn = np.linalg.qr(rng.normal(size=(12, 12)) * 0.3 + np.eye(12))[0].astype(np.float32)
    routes = torch.from_numpy(true @ turn)  # the next layer's input is this one's, turned

    def router(rows: torch.Tensor) -> torch.Tensor:
        return rows @ routes.T

    following = NextRouter(router, hidden @ turn)
    learned = train_gate(hidden, ids, 8, following)
    held = np.arange(1350, 1500)  # the tenth block of 150 rows
    assert learned.next_gate == pytest.approx(recall(hidden[held] @ routes.numpy().T, ids[held]))
    assert learned.next_gate < learned.recall
    assert learned.recall == pytest.approx(recall(learned.gate(hidden[held]), ids[held]))
    again = train_gate(hidden, ids, 8, following)
    np.testing.assert_array_equal(again.gate.weight, learned.gate.weight)
    alone = train_gate(hidden, ids, 8)
    assert np.isnan(alone.next_gate)
    assert alone.recall > 2 / 8
    with pytest.raises(ValueError, match="cannot train"):
        train_gate(hidden, ids[:5], 8)


def test_recall_is_the_share_of_true_experts_named() -> None:
    scores = np.array([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    assert recall(scores, np.array([[0, 3], [2, 3]])) == 0.75


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measures")
    serving.prepared(save_tiny_checkpoint("qwen3_moe", folder / "model"), folder / "store")
    return folder / "store"


def dropped_by_hand(checkpoint: Path, ids: np.ndarray, layer: int, resident: np.ndarray) -> tuple[float, float]:
    """KL, summed over tokens, if one layer drops missing pairs, and sum of d^2; on transformers' model."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.set_experts_implementation("eager")
    name = [n for n, module in model.named_modules() if n.endswith("experts") and hasattr(module, "act_fn")][layer]
    module, plain, moved = model.get_submodule(name), model.get_submodule(name).forward, [0.0]

    def run(hidden: torch.Tensor, picked: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gone = torch.from_numpy(~resident)[picked] & (weights < weights.max(dim=1, keepdim=True).values)
        moved[0] += float(((weights * gone).sum(1) / weights.sum(1)).square().sum())
        return plain(hidden, picked, weights * ~gone)

    with torch.no_grad():
        row = torch.from_numpy(ids)[None]
        before = torch.log_softmax(model(input_ids=row, use_cache=False).logits[0], -1)
        module.forward = run
        after = torch.log_softmax(model(input_ids=row, use_cache=False).logits[0], -1)
    return float((before.exp() * (before - after)).sum()), moved[0]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "olmoe"])
def test_losses_are_kl_over_the_square_of_the_weight_moved(model_type: str, tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint(model_type, tmp_path / "model", num_experts_per_tok=3)
    opened = serving.prepared(checkpoint, tmp_path / "store")
    windows = np.random.default_rng(0).integers(3, VOCAB, (1, TOKENS))
    model = build_model(tmp_path / "store", opened.manifest, torch.float32, torch.device("cpu"), "auto")
    blocks, tensors = find_blocks(model, opened.manifest), host_weights(opened.layers)
    table, ratios = losses.measure(model, blocks, tensors, Windows(windows))
    assert set(table.nats) == set(ACTIONS)
    assert len(ratios) == len(losses.LEVEL_NATS)
    factor = max([1.0, *ratios])
    resident = losses._residents(len(blocks), len(tensors[0].tensors[0]), 0)
    for layer in range(len(blocks)):
        kl, moved = dropped_by_hand(checkpoint, windows[0], layer, resident[layer])
        assert moved > 0
        assert table.nats["drop"][layer] == pytest.approx(factor * kl / moved, rel=2e-2)
    if not blocks[0].normalised:  # nobody takes over the weight of a pair that does not run
        np.testing.assert_allclose(table.nats["narrow"], table.nats["drop"])
    again, _ = losses.measure(model, blocks, tensors, Windows(windows))
    np.testing.assert_array_equal(again.nats["substitute"], table.nats["substitute"])


@pytest.mark.parametrize("kind", ["sensitivity", "gates", "losses"])
def test_files_are_read_and_damaged_ones_refused(store: Path, kind: str) -> None:
    manifest = read_manifest(store)
    other = manifest.model_copy(update={"source": ()})
    path, read = store / f"{kind}.safetensors", getattr(artifacts, f"{kind}_of")
    if kind == "sensitivity":
        good = encode_sensitivity((0.5, 2.0), manifest, 100)
        path.write_bytes(good)
        assert sensitivity_of(store, manifest) == (0.5, 2.0)
        refused = {
            good[:40]: "holds no sensitivities",
            b"": "holds no sensitivities",
            encode_sensitivity((0.5,), manifest, 100): "not one number",
            encode_sensitivity((0.5, float("nan")), manifest, 100): "not finite",
            encode_sensitivity((0.5, -1.0), manifest, 100): "negative",
            encode_sensitivity((0.5, 2.0), other, 100): "another model",
        }
    elif kind == "losses":
        whole = {name: np.array([0.5, 2.0]) for name in ACTIONS}
        path.write_bytes(encode_losses(LossTable(whole), manifest, 100))
        assert losses_of(store, manifest).nats["drop"].tolist() == [0.5, 2.0]
        refused = {
            b"": "holds no losses",
            encode_losses(LossTable({"drop": whole["drop"]}), manifest, 100): "losses of drop, not of substitute",
            encode_losses(LossTable(whole | {"drop": np.array([0.5])}), manifest, 100): "not one number of drop",
            encode_losses(LossTable(whole | {"narrow": np.array([0.5, np.inf])}), manifest, 100): "not finite",
            encode_losses(LossTable(whole | {"narrow": np.array([0.5, -1])}), manifest, 100): "negative",
            encode_losses(LossTable(whole), other, 100): "another model",
        }
    else:
        weight = np.ones((manifest.experts.num_experts, manifest.experts.hidden), np.float32)
        gate = PreGate(weight, weight[:, 0])
        path.write_bytes(encode_gates([gate], manifest, 100))
        (found,) = gates_of(store, manifest)
        np.testing.assert_array_equal(found.weight, weight)
        refused = {
            b"{}": "holds no gates",
            encode_gates([], manifest, 100): "weight of layer 0",
            encode_gates([PreGate(weight[:, 1:], weight[:, 0])], manifest, 100): "weight of layer 0",
            encode_gates([PreGate(weight * np.float32("inf"), weight[:, 0])], manifest, 100): "weight of layer 0",
            encode_gates([gate], other, 100): "another model",
        }
    for data, why in refused.items():
        path.write_bytes(data)
        with pytest.raises(StoreError, match=why) as raised:
            read(store, manifest)
        assert f"tiermoe prepare MODEL --{kind} TEXT" in str(raised.value)
    path.unlink()
    with pytest.raises(StoreError, match="cannot be read"):
        read(store, manifest)


@pytest.mark.parametrize("option", ["--gates", "--sensitivity", "--losses"])
def test_text_is_refused_before_anything_is_made(option: str, tmp_path: Path) -> None:
    (tmp_path / "text.bin").write_text("x")
    model = save_tiny_checkpoint("qwen3_moe", tmp_path / "model")
    result = CliRunner().invoke(app, ["prepare", str(model), str(tmp_path / "out"), option, str(tmp_path / "text.bin")])
    assert result.exit_code != 0
    assert not (tmp_path / "out").exists()
