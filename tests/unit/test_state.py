"""A forward that is only tried leaves the model as it was, whatever the model's modules assign."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from serving import greedy, prepared, reference_greedy, serving, settings
from tiny_models import VOCAB, save_tiny_checkpoint
from torch import nn
from transformers import AutoModelForCausalLM

from tiermoe.actors.engine.dense.native import NativeDense
from tiermoe.actors.engine.model.lengths import lengths_of
from tiermoe.actors.engine.model.model import attach, register_implementation
from tiermoe.actors.engine.model.state import State


class Norm(nn.Module):
    """The last norm of a model; `assign` is called with it and its input in each forward."""

    shared: ClassVar[list[int]] = []
    counts = 0

    def __init__(self, norm: nn.Module, config: Any, assign: Callable[[Any, torch.Tensor], object]) -> None:
        super().__init__()
        self.norm, self.config, self._assign = norm, config, assign
        self.register_buffer("scale", torch.ones(3), persistent=False)
        self.seen: list[int] = []
        self.by_name: dict[str, Any] = {"a": [1]}
        self.steps = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self._assign(self, hidden)
        return self.norm(hidden)


def _drops(module: Any, hidden: torch.Tensor) -> None:
    module._buffers.pop("scale", None)


ASSIGNMENTS: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "a number": lambda m, x: setattr(m, "steps", m.steps + 1),
    "an attribute that was not there": lambda m, x: setattr(m, "last", x.mean()),
    "a tensor of the trace in a buffer": lambda m, x: m.register_buffer("scale", x.mean() * m.scale, persistent=False),
    "a buffer's numbers": lambda m, x: m.scale.add_(1.0),
    "a buffer is gone": _drops,
    "an item of a list": lambda m, x: m.seen.append(x.shape[1]),
    "an entry of a dictionary": lambda m, x: m.by_name.update(b=x),
    "a list in a dictionary": lambda m, x: m.by_name["a"].append(2),
    "the configuration": lambda m, x: setattr(m.config, "hidden_act", "none"),
    "a list of the configuration": lambda m, x: m.config.layer_types.append("none"),
    "the class": lambda m, x: setattr(Norm, "counts", Norm.counts + 1),
    "a list of the class": lambda m, x: Norm.shared.append(1),
    "a hook": lambda m, x: m.register_forward_hook(lambda *_: None),
    "a module": lambda m, x: m.add_module("late", nn.Linear(2, 2)),
    "it fails": lambda m, x: (setattr(m, "steps", m.steps + 1), 1 // 0),
}


class _Experts:
    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return hidden * weights.mean()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("state"))


@pytest.mark.parametrize("what", ASSIGNMENTS)
def test_a_trace_that_is_given_up_leaves_the_model_alone(what: str, checkpoint: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.model.norm = Norm(model.model.norm, model.config, ASSIGNMENTS[what])
    lengths_of(model)
    before, state, random = dict(vars(model.model.norm)), State(model), torch.random.get_rng_state()
    model.set_experts_implementation("eager")
    native = NativeDense(model, 1, required=False)
    assert any("eagerly" in note for note in native.notes)
    assert "forward" not in vars(model.model)
    assert [name for name in state.restore() if "experts_implementation" not in name] == []
    assert vars(model.model.norm).keys() == before.keys()
    assert torch.equal(torch.random.get_rng_state(), random)
    assert (Norm.counts, Norm.shared, model.model.norm.steps) == (0, [], 0)
    assert torch.equal(model.model.norm.scale, torch.ones(3))


def test_what_a_forward_changes_is_named(checkpoint: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.set_experts_implementation(register_implementation())
    for layer in model.model.layers:
        attach(layer.mlp.experts, _Experts())
    native = NativeDense(model, 1, required=False)
    assert native.notes == []  # it lowers
    native.close()
    model.model.norm = Norm(model.model.norm, model.config, ASSIGNMENTS["a number"])
    (note,) = NativeDense(model, 1, required=False).notes
    assert "a forward changes model.norm.steps" in note


def test_a_worker_serves_a_model_that_assigns_in_its_forward(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`compile: auto` on a CPU: a tensor of the trace stayed in a buffer, and every request failed."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

    plain = modeling.Qwen3MoeRMSNorm.forward

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        self.mean = hidden.mean() + getattr(self, "mean", 0.0)
        return plain(self, hidden)

    monkeypatch.setattr(modeling.Qwen3MoeRMSNorm, "forward", forward)
    prompts = [[5, 6, 7, 8], list(range(20, 40))]
    assert max(map(max, prompts)) < VOCAB
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    expected = reference_greedy(reference, prompts, 12)
    store = prepared(checkpoint, tmp_path / "store")
    with serving(store, settings(0.5, "next-gate")) as worker:
        assert greedy(worker, prompts, 12) == expected
        notes = " ".join(worker.plan()["notes"])
    assert "runs the dense part eagerly" in notes
