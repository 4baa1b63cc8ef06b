"""The program that trains the default model (models/tiny-moe/train), on a tiny configuration and corpus."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from corpus import (
    KINDS,
    Document,
    Root,
    collect,
    is_held_out,
)
from data import token_byte_lengths, train_tokenizer
from export import Figures, RunFacts, calibration_section, export, measure, model_card
from loop import LoopConfig, SharedState, Worker
from model import CausalAttention, TrainingForward, default_config, new_model
from optimizer import Budget, Phase
from passages import choose_passages, read_passages, write_passages
from routing import heldout_documents, routing_figures
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.simulate.statistics import CACHES
from train import command

PHASES = (Phase(2.0, 32, 256),)


def tiny_config() -> Any:
    return default_config(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16,
    )  # fmt: skip


def sentences(seed: int, count: int) -> str:
    rng = np.random.default_rng(seed)
    words = ["def", "return", "value", "self", "the", "of", "expert", "struct", "int", "(x):", "{", "}"]
    return "\n\n".join(f"{i} " + " ".join(rng.choice(words, 40)) for i in range(count)) + "\n"


@pytest.fixture
def work_dir(tmp_path: Path) -> Path:
    tokenizer = train_tokenizer([sentences(i, 20) for i in range(4)], vocabulary=300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "token_bytes.json").write_text(json.dumps(token_byte_lengths(tokenizer)))
    (tmp_path / "tokens").mkdir()
    for kind in KINDS:
        for part in ("train", "heldout"):
            ids = [0, *tokenizer.encode(sentences(KINDS.index(kind), 60)).ids]
            np.array(ids, dtype=np.uint16).tofile(tmp_path / "tokens" / f"{part}-{kind}.bin")
    return tmp_path


def start(work_dir: Path) -> tuple[SharedState, LoopConfig]:
    loop = LoopConfig(
        work_dir, Budget(tokens=100_000), workers=1, phases=PHASES, compute_dtype=torch.float32, micro_tokens=128
    )
    config = tiny_config()
    return SharedState(config, dict(new_model(config, seed=1).named_parameters()), loop), loop


# Corpus


def make_tree(folder: Path) -> Root:
    for i in range(40):
        path = folder / f"package{i % 3}" / f"module{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(sentences(i, 12))
    return Root("site-packages", "python", folder, (".py",), 1_000_000)


def test_split_depends_on_the_normalised_path_only(tmp_path: Path) -> None:
    first, second = collect([make_tree(tmp_path / "a")]), collect([make_tree(tmp_path / "elsewhere" / "b")])
    assert [(d.name, d.held_out, d.text) for d in first] == [(d.name, d.held_out, d.text) for d in second]
    assert not any(str(tmp_path) in d.name for d in first)


def test_split_is_pinned_and_about_one_in_forty() -> None:
    names = [f"stdlib/module{i}.py" for i in range(4000)]
    held_out = [name for name in names if is_held_out(name)]
    assert held_out[:3] == PINNED
    assert 60 <= len(held_out) <= 140


PINNED = ["stdlib/module2.py", "stdlib/module10.py", "stdlib/module28.py"]


def test_a_training_document_that_repeats_a_held_out_one_is_dropped(tmp_path: Path) -> None:
    held = PINNED[0].split("/")[1]
    (tmp_path / held).write_text(sentences(1, 12))
    (tmp_path / "copy.py").write_text(sentences(1, 12) + "x = 1\n")
    documents = collect([Root("stdlib", "python", tmp_path, (".py",), 1_000_000, group_depth=0)])
    assert [d.name for d in documents] == [PINNED[0]]


def test_tokenizer_returns_every_byte() -> None:
    tokenizer = train_tokenizer([sentences(0, 30)], vocabulary=300)
    text = "def f(x):\n    return 'é€'\t\n\n\n  # 1234567\r\n"
    ids = tokenizer.encode(text).ids
    lengths = token_byte_lengths(tokenizer)
    assert tokenizer.decode(ids) == text
    assert sum(lengths[i] for i in ids) == len(text.encode())
    assert lengths[tokenizer.token_to_id("<|endoftext|>")] == 0


# Held-out passages


def test_passages_are_bounded_licensed_and_survive_the_file(tmp_path: Path) -> None:
    documents = [Document(f"stdlib/module{i}.py", "python", sentences(i, 40)) for i in range(400)]
    documents.append(Document("include/unknown/a.h", "c", sentences(3, 40)))
    passages = choose_passages(documents, {}, bytes_per_kind=12_000)
    assert {p.kind for p in passages} == {"python"}
    assert all(1500 <= len(p.text.encode()) <= 4001 and p.source.endswith("(PSF-2.0)") for p in passages)
    assert all(is_held_out(p.source.split(" ")[0]) for p in passages)
    assert passages == choose_passages(documents[::-1], {}, bytes_per_kind=12_000)
    write_passages(passages, tmp_path)
    assert read_passages(tmp_path) == passages


# Mathematics


def test_blocked_attention_matches_torch() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 200, 8, requires_grad=True) for _ in range(3))
    reference = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    mine = CausalAttention.apply(q, k, v)
    upstream = torch.randn_like(reference)
    expected = torch.autograd.grad(reference, (q, k, v), upstream)
    torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)
    for got, want in zip(torch.autograd.grad(mine, (q, k, v), upstream), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_training_forward_matches_transformers() -> None:
    config = tiny_config()
    model = new_model(config, seed=0)
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    tokens = torch.randint(0, config.vocab_size, (3, 41), generator=torch.Generator().manual_seed(0))
    losses = TrainingForward(config, parameters, torch.float32)(tokens, 1 / 120)
    losses.cross_entropy.backward()
    mine = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    logits = model(tokens[:, :-1]).logits
    reference = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    reference.backward()
    torch.testing.assert_close(losses.cross_entropy, reference)
    assert losses.load.sum(1).tolist() == [240, 240]
    for name, parameter in parameters.items():
        torch.testing.assert_close(mine[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


# Routing


def test_routing_figures_of_held_out_documents(work_dir: Path) -> None:
    for kind in KINDS:
        path = work_dir / "tokens" / f"heldout-{kind}.bin"
        tokens = np.fromfile(path, dtype=np.uint16)
        tokens[::100] = 0  # documents of 100 tokens
        tokens.tofile(path)
    rows = heldout_documents(work_dir, 2, 64)
    assert rows.shape == (6, 65)
    assert ((rows == 0) == (np.arange(65) == 0)).all()
    shared, _ = start(work_dir)
    figures = routing_figures(TrainingForward(shared.config, shared.parameters, torch.float32), rows)
    rates = [figures[f"hit_{name}"] for name in CACHES]
    assert max(rates) == rates[CACHES.index("belady")] > 100 * 3 / 8
    assert 0.5 < figures["entropy"] < 1.0
    assert 0 < figures["next_router"] <= 1
    assert len(figures["overlap"]) == 6
    assert 0 < figures["other_cosine"] < 1


# The loop


def test_a_resumed_run_reaches_the_same_state(work_dir: Path) -> None:
    straight, loop = start(work_dir)
    Worker(0, straight, loop, threading.Barrier(1), {}).run(max_steps=4)
    cut, _ = start(work_dir)
    Worker(0, cut, loop, threading.Barrier(1), {}).run(max_steps=2)
    resumed, _ = start(work_dir)
    drawn = resumed.load(work_dir)
    Worker(0, resumed, loop, threading.Barrier(1), drawn).run(max_steps=2)
    assert resumed.counters[:2].tolist() == straight.counters[:2].tolist()
    for name, parameter in straight.parameters.items():
        torch.testing.assert_close(resumed.parameters[name], parameter, rtol=0, atol=0, msg=name)


# Export and card


def test_exported_folder_loads_and_its_figures_are_in_the_card(work_dir: Path) -> None:
    shared, _ = start(work_dir)
    documents = [Document(f"stdlib/module{i}.py", "python", sentences(i, 40)) for i in range(200)]
    write_passages(choose_passages(documents, {}, bytes_per_kind=1500), work_dir / "heldout")
    out = work_dir / "model"
    export(shared.config, shared.parameters, work_dir, out)
    figures = measure(out, sample_tokens=2, routing_tokens=64)
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert names <= {path.name for path in out.iterdir()}
    assert sum(figures.shares[0]) == pytest.approx(1.0, abs=1e-4)
    card = model_card(figures, facts())
    assert f"| all | {figures.bits_per_byte['all']:.3f} |" in card


def facts() -> RunFacts:
    counts = {"python": 1, "c": 2, "prose": 3}
    names = ("train_documents", "train_bytes", "heldout_documents", "heldout_bytes")
    return RunFacts(12_300_000, 900, 61.0, "2 cores of an Example, CPU", dict.fromkeys(names, counts))


ROUTING = {
    "hit_random": 40.0, "hit_lru": 44.0, "hit_lfu": 47.0, "hit_belady": 66.0, "hit_uniform": 34.4, "own_cosine": 0.9,
    "other_cosine": 0.7, "entropy": 0.7, "next_router": 0.7, "gini": 0.2, "max_load": 2.5, "overlap": [0.25] * 6,
}  # fmt: skip


def test_a_new_card_keeps_the_section_on_the_calibration_text(tmp_path: Path) -> None:
    """Guards a loss: the section is written by hand, and the card was written anew without it."""
    figures = Figures({"all": 1.5}, 200_000, [[0.5, 0.5]], [0.1], {"c": "int main"}, ROUTING)
    section = "## Calibration text\n\n`calibration/` is held out twice.\nAnd more.\n"
    card = model_card(figures, facts(), section)
    assert f"\n\n{section}\n## Router health\n" in card
    (tmp_path / "README.md").write_text(card)
    assert calibration_section(tmp_path) is None  # the folder ships no such text
    (tmp_path / "calibration").mkdir()
    assert model_card(figures, facts(), calibration_section(tmp_path)) == card
    (tmp_path / "README.md").write_text(model_card(figures, facts()))
    assert calibration_section(tmp_path) is None
    shipped = str(calibration_section(default_model_dir()))
    assert shipped.startswith("## Calibration text\n\n`calibration/` (")
    assert shipped in (default_model_dir() / "README.md").read_text()


def test_command_refuses_a_run_without_end() -> None:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, ["--minutes", "0", "--tokens", "0"])
    assert result.exit_code == 2
    assert CliRunner().invoke(app, ["--device", "abacus"]).exit_code == 2
