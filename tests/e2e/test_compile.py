"""The dense part compiled: the experts stay one operator in it, all layers share its code, and tokens stay the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import greedy, logits, prepared, serving, settings
from tiny_models import save_tiny_checkpoint

from tiermoe.actors.engine.dense.compile import CompiledDense
from tiermoe.actors.engine.model.model import find_blocks
from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.settings import KvSettings
from tiermoe.actors.store.files import ExpertStore
from tiermoe.actors.store.format import read_manifest

PROMPTS = [[5, 9, 17, 4, 33, 2, 7], [8, 8, 3]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], ExpertStore]:
    def make(kind: str, layers: int) -> ExpertStore:
        path = tmp_path_factory.mktemp(f"{kind}{layers}")
        sizes = {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
        return prepared(save_tiny_checkpoint(kind, path / "model", **sizes), path / "store")

    return make


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Compiled code belongs to classes, which all tests of a process share."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Graphs:
    """A backend that runs graphs as they are and keeps the names of their operators."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.calls.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    @property
    def with_experts(self) -> list[list[str]]:
        return [calls for calls in self.calls if any("experts_at" in call for call in calls)]


def _compiled(store: ExpertStore, worker: GpuWorker) -> tuple[CompiledDense, Graphs]:
    graphs = Graphs()
    blocks = find_blocks(worker.model, read_manifest(Path(store.describe().path)))
    return CompiledDense(worker.model, [block.experts for block in blocks], "default", graphs), graphs


def test_layers_share_their_code_and_the_experts_break_no_graph(store: Callable[[str, int], ExpertStore]) -> None:
    made = {}
    for layers in (2, 5):
        torch.compiler.reset()
        described = store("qwen3_moe", layers)
        with serving(described, settings(0.5, kv=KvSettings(page_size=16, num_blocks=16), compile="off")) as worker:
            expected = [greedy(worker, [prompt], 6) for prompt in PROMPTS]  # so that their rows do not depend on timing
            dense, graphs = _compiled(described, worker)
            assert [greedy(worker, [prompt], 6) for prompt in PROMPTS] == expected
            dense.close()
            assert not any("forward" in vars(module) for module in worker.model.modules())
            made[layers] = len(graphs.calls)
            for calls in graphs.with_experts:
                at = next(i for i, call in enumerate(calls) if "experts_at" in call)
                assert any("topk" in call for call in calls[:at])  # the router before them
                assert any("add" in call for call in calls[at:])  # the residual after them
            assert graphs.with_experts
    assert made[5] == made[2]


def test_a_plain_forward_gives_the_same_logits(store: Callable[[str, int], ExpertStore]) -> None:
    described = store("qwen3_moe", 2)
    with serving(described, settings(1.0, kv=KvSettings(batching="serial", num_blocks=16), compile="off")) as worker:
        expected = logits(worker, PROMPTS[0], "eager")
        dense, graphs = _compiled(described, worker)
        torch.testing.assert_close(logits(worker, PROMPTS[0], "eager"), expected, rtol=0, atol=0)
        tokens = greedy(worker, PROMPTS[:1], 6)
        dense.close()
        assert greedy(worker, PROMPTS[:1], 6) == tokens
        assert graphs.with_experts


@pytest.mark.slow
@pytest.mark.parametrize("batching", ["continuous", "serial"])
def test_inductor_gives_the_same_tokens(batching: Any, store: Callable[[str, int], ExpertStore]) -> None:
    described, kv = store("qwen3_moe", 2), KvSettings(page_size=16, num_blocks=16, batching=batching)
    with serving(described, settings(0.5, kv=kv, compile="off")) as worker:
        expected = greedy(worker, PROMPTS, 6)
    with serving(described, settings(0.5, kv=kv, compile="default")) as worker:
        assert worker.plan()["compile"] == "default"
        assert greedy(worker, PROMPTS, 6) == expected
