"""NDP workers on published checkpoints: replicas below the published width, the published form from that width on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from published import PROMPTS, RELEASES, SIZES, TOKENS, q4_k_m, write, write_gguf
from quick import quick
from serving import greedy, settings
from tiny_models import save_tiny_checkpoint
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from typer.testing import CliRunner

from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.ndp_worker import NdpWorker
from tiermoe.actors.policies.context_ndp import prefix_split
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import NdpSettings
from tiermoe.actors.store.files import ExpertStore
from tiermoe.actors.store.replicas import describe_replicas, read_tables
from tiermoe.cluster.checkpoints.hub import locate
from tiermoe.cluster.cli import app
from tiermoe.cluster.config import load_hardware, load_policy
from tiermoe.cluster.jobs.prepare import ensure_replicas, prepare
from tiermoe.errors import ConfigError, TierMoeError
from tiermoe.kernels.fit import fit_layer
from tiermoe.kernels.pack import PackedShape
from tiermoe.kernels.packed_ffn import PackedLayer, Threads
from tiermoe.proto.messages import ExpertBatch, Message
from tiermoe.proto.peers import LocalDirectory, PeerLink

GROUP = 64
# Of scores that differ by 5 from token to token. Replicas round their inputs to 8 bits, so that the last bit of an
# expert's result before them, which has another order of sums here, can move a score by up to 0.08.
CLOSE = 0.15
NAMES = {
    "fp8": "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "mxfp4": "RedHatAI/Qwen3-30B-A3B-MXFP4",
    "nvfp4": "nvidia/Qwen3-30B-A3B-NVFP4", "int4": "Qwen/Qwen3-30B-A3B-GPTQ-Int4",
}  # fmt: skip
BELOW = {"fp8": (1, 2, 3, 4), "mxfp4": (1, 2, 3), "nvfp4": (1, 2, 3), "int4": (1, 2, 3), "gguf": (1, 2, 3)}


def checkpoint(form: str, folder: Path) -> tuple[Path, Path]:
    """A published checkpoint of two layers, and the plain one of its dequantized values."""
    if form != "gguf":
        return write(next(release for release in RELEASES if release.name == NAMES[form]), folder)
    plain = save_tiny_checkpoint("qwen3_moe", folder / "plain", **{**SIZES, "head_dim": 64})
    file, oracle = write_gguf(plain, folder / "gguf", "qwen3moe", q4_k_m)
    shutil.copy(plain / "config.json", file.parent)
    return locate(str(file.parent)), oracle


class Near(NdpWorker):
    """Notes the width at which it computes each expert, by (layer, expert)."""

    def __init__(self, *args: Any) -> None:
        self.widths: dict[tuple[int, int], int] = {}
        super().__init__(*args)

    def handle(self, message: Message) -> Message:
        if isinstance(message, ExpertBatch):
            for expert, bits in zip(message.experts.tolist(), message.bits.tolist(), strict=True):
                assert self.widths.setdefault((message.layer, expert), bits) == bits  # fixed during decode
        return super().handle(message)


@contextmanager
def served(store: Path, policy: PolicySettings, budget: float) -> Iterator[tuple[GpuWorker, Near]]:
    board, ndp = LocalDirectory(), NdpSettings(hardware=vars(load_hardware("paper-ndp")), deadline_s=5.0)
    with closing(Near(ndp, str(store), board)) as near:
        chosen = settings(budget, policy=policy, ndp=ndp)
        with closing(GpuWorker(chosen, ExpertStore(store).describe(), [PeerLink(board, name="ndp/0")])) as worker:
            worker.start()
            yield worker, near


class Reference:
    """transformers' model of the dequantized weights, whose cold experts may be replicas while it decodes.

    Replicas are made here, of the model's own weights.
    """

    def __init__(self, oracle: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(oracle, dtype=torch.float32).eval()
        self._experts = [layer.mlp.experts for layer in self.model.model.layers]
        self._threads = Threads(1)
        self._layers: dict[tuple[int, int], PackedLayer] = {}
        self._cold: dict[tuple[int, int], int] = {}
        ALL_EXPERTS_FUNCTIONS.register("mixed-widths", self._forward)
        self.model.set_experts_implementation("mixed-widths")

    def check(self, prompt: Sequence[int], tokens: Sequence[int], cold: dict[tuple[int, int], int]) -> None:
        """Each greedy token is the best one behind those before it, or scores `CLOSE` to it.

        cold: width of replicas by (layer, expert), 0: as dequantized.
        """
        cache, ids = None, torch.tensor([list(prompt)])
        for at, token in enumerate(tokens):
            with torch.no_grad():
                found = self.model(ids, past_key_values=cache, use_cache=True)
            scores = found.logits[0, -1]
            assert scores[token] >= scores.max() - CLOSE, (at, token, int(scores.argmax()))
            cache, ids, self._cold = found.past_key_values, torch.tensor([[token]]), cold
        self._cold = {}
        assert len(tokens) == TOKENS or tokens[-1] == self.model.config.eos_token_id

    def _forward(self, module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        layer, out = next(i for i, e in enumerate(self._experts) if e is module), torch.zeros_like(hidden)
        for row, expert in [(r, e) for r in range(len(ids)) for e in ids[r].tolist()]:
            weight = weights[row][ids[row] == expert]
            bits = self._cold.get((layer, expert), 0)
            x = hidden[row : row + 1]
            if bits:
                y = np.empty((1, hidden.shape[1]), np.float32)
                one = np.ones(1, np.float32)
                self._packed(layer, bits).run([(expert, 0, 1)], np.zeros(1, np.int32), one, x.numpy().copy(), y)
                y = torch.from_numpy(y)
            else:
                gate, up = (x @ module.gate_up_proj[expert].T).chunk(2, dim=1)
                y = (torch.nn.functional.silu(gate) * up) @ module.down_proj[expert].T
            out[row] += weight * y[0]
        return out

    def _packed(self, layer: int, bits: int) -> PackedLayer:
        if (layer, bits) not in self._layers:
            module = self._experts[layer]
            gate, up = module.gate_up_proj.detach().chunk(2, dim=1)
            gate_up = torch.stack([gate, up], dim=2).contiguous().numpy()  # [E, I, 2, H]
            down = module.down_proj.detach().transpose(1, 2).contiguous().numpy()  # [E, I, H]
            (fitted,), _ = fit_layer(gate_up, down, "float32", (bits,), GROUP, self._threads)
            shape = PackedShape(gate_up.shape[3], gate_up.shape[1], bits, GROUP)
            self._layers[layer, bits] = PackedLayer(fitted.arrays, shape, "silu", self._threads)
        return self._layers[layer, bits]


FORMS = quick(["fp8", "mxfp4", "gguf", "nvfp4", "int4"], fast=["mxfp4", "gguf"])


@pytest.mark.parametrize("form", FORMS)
def test_replicas_below_the_published_width_and_the_form_from_there_on(form: str, tmp_path: Path) -> None:
    published, oracle = checkpoint(form, tmp_path)
    store = prepare(published, tmp_path / "store", progress=False)
    ensure_replicas(store, published, (1, 2, 3, 4), GROUP, progress=False)
    view = describe_replicas(store)
    assert view.widths == BELOW[form]
    assert view.manifest.method == "data-free"
    reference = Reference(oracle)
    for budget in (1.0, 0.25):
        with served(store, load_policy("context-ndp-2bit"), budget) as (worker, near):
            used: set[int] = set()
            for prompt in PROMPTS:
                near.widths.clear()
                (found,) = greedy(worker, [prompt], TOKENS)
                reference.check(prompt, found, near.widths)
                used.update(near.widths.values())
                if near.widths:
                    _check_allocation(worker, near, form, read_tables(view).losses)
            assert used <= {0, *BELOW[form]}
            assert bool(used) == (budget < 1)


def _check_allocation(worker: GpuWorker, near: Near, form: str, losses: np.ndarray) -> None:
    """The paper's allocation over the replicas and the published form, which loses nothing."""
    table = np.zeros((*losses.shape[:2], 4))
    table[..., : losses.shape[2]] = losses
    placer: Any = worker.engine._placer
    for layer in range(len(table)):
        order = [e for e in placer._hot.order(layer) if e not in placer._hot.hot(layer)]
        widths = prefix_split(table[layer, order], (1, 2, 3, 4), 2)
        expected = {e: b if b in BELOW[form] else 0 for e, b in zip(order, widths, strict=True)}
        assert {e: b for (at, e), b in near.widths.items() if at == layer}.items() <= expected.items()


def test_a_form_at_most_as_wide_needs_no_replicas(tmp_path: Path) -> None:
    """context-ndp-uniform at 4 bits on MXFP4: all cold experts are computed as published, and nothing is made."""
    published, oracle = checkpoint("mxfp4", tmp_path)
    store = prepare(published, tmp_path / "store", progress=False)
    assert ensure_replicas(store, published, (4, 8), GROUP, progress=False) == store
    assert describe_replicas(store) is None
    policy = load_policy("context-ndp-uniform")
    wider = policy.model_copy(update={"precision": policy.precision.model_copy(update={"bits": 4})})
    reference = Reference(oracle)
    with served(store, wider, 0.25) as (worker, near):
        for prompt, found in zip(PROMPTS, greedy(worker, PROMPTS, TOKENS), strict=True):
            reference.check(prompt, found, {})
        assert set(near.widths.values()) == {0}


def test_what_is_refused_and_what_is_said(tmp_path: Path) -> None:
    published, _ = checkpoint("mxfp4", tmp_path)
    store = prepare(published, tmp_path / "store", progress=False)
    run = CliRunner()
    wide = run.invoke(app, ["prepare", str(published), str(store), "--bits", "2,4"])
    assert wide.exit_code
    with pytest.raises(ConfigError, match=r"mxfp4, 4 bits a weight: replicas of 4 bits are no smaller"):
        raise wide.exception  # type: ignore[misc]
    text = tmp_path / "text.txt"
    text.write_text("a text " * 100)
    calibrated = ["--bits", "2", "--calibration", str(text)]
    for paths, said in (((published, tmp_path / "new"), "unquantized checkpoint"), ((store,), "made without a text")):
        refused = run.invoke(app, ["prepare", *map(str, paths), *calibrated])
        with pytest.raises(TierMoeError, match=r"mxfp4|quantized form") as error:
            raise refused.exception  # type: ignore[misc]
        assert said in str(error.value)
    assert not (tmp_path / "new").exists()
    assert run.invoke(app, ["prepare", str(published), str(store), "--bits", "2"]).exit_code == 0
    view = describe_replicas(store)
    assert view.widths == (2,)
    preset = load_policy("context-ndp-2bit")
    lacking = pytest.raises(ConfigError, match=r"needs replicas of 1, 2, 3 bits, the store has \(2,\)")
    with lacking, served(store, preset, 0.25):
        pass
    said = run.invoke(app, ["plan", "--model", str(published), "--policy", "context-ndp-2bit", "--budget", "0.25"])
    assert said.exit_code == 0
    flat = " ".join(said.stdout.split())
    assert "replicas of 1, 2, 3 bits" in flat
    assert "published form (mxfp4) from 4 bits on" in flat
