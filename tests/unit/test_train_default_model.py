"""The program that trains the default model (models/tiny-moe/train), on a tiny configuration and corpus."""

from __future__ import annotations

import json
import math
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
    NotTextError,
    Root,
    collect,
    is_held_out,
    licence_of,
    plain_text,
    strip_html,
    strip_roff,
)
from data import token_byte_lengths, train_tokenizer
from export import Figures, RunFacts, bars, calibration_section, export, measure, model_card, normalised_entropy
from loop import LoopConfig, RouterLosses, SharedState, Worker, stream_bits_per_byte
from model import CausalAttention, Losses, TrainingForward, burst_loss, default_config, new_model
from optimizer import Budget, Phase, orthogonalise, phase_at, rate_at
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


def test_a_paragraph_that_every_file_repeats_is_kept_a_few_times_only(tmp_path: Path) -> None:
    licence = "Permission is hereby granted, free of charge, to any person obtaining a copy. " * 4
    for i in range(12):
        (tmp_path / f"m{i}.py").write_text(licence + "\n\n" + sentences(i, 6))
    documents = collect([Root("stdlib", "python", tmp_path, (".py",), 1_000_000, group_depth=0)])
    assert len(documents) == 12
    assert sum("Permission" in d.text for d in documents) == 4


def test_markup_is_stripped_and_data_refused() -> None:
    assert strip_roff(b'.TH LS 1\n.SH NAME\nls \\- list \\fBfiles\\fR\n.B "\\-a"\n') == "NAME\nls - list files\n-a\n"
    assert strip_html(b"<head><title>x</title></head><p>a &lt; b</p><script>no</script>") == "a < b\n"
    with pytest.raises(NotTextError):
        plain_text(b"\x00\x01")
    with pytest.raises(NotTextError):
        plain_text(b"0," * 5000)


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


def test_only_permissive_licences_are_shipped() -> None:
    packages = {"numpy": "BSD-3-Clause"}
    assert licence_of("site-packages/numpy/ma/core.py", packages) == "BSD-3-Clause"
    assert licence_of("site-packages/other/core.py", packages) is None
    assert licence_of("include/linux/fs.h", packages) is None
    assert licence_of("include/X11/Xlib.h", packages) == "MIT"
    assert licence_of("doc/nodejs/README.md", packages) == "MIT"
    assert licence_of("doc/git/README.md", packages) is None


# Mathematics


def test_orthogonalise_brings_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((3, 16, 48), (3, 48, 16)):
        singular = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert 0.6 < float(singular.min()) <= float(singular.max()) < 1.3


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


def test_schedule_warms_up_holds_and_falls() -> None:
    assert [rate_at(0.0, 1), rate_at(0.2, 40), rate_at(1.0, 999)] == [1 / 40, 1.0, 0.01]
    assert Budget(tokens=100, minutes=1).progress(tokens=50, active_s=45) == 0.75
    assert phase_at(0.0).length < phase_at(0.999).length == 2048


# Routing


def test_bursts_cost_and_popularity_does_not() -> None:
    rng = np.random.default_rng(0)
    popular = torch.tensor([4.0, 2, 1, 1]).repeat(2, 512, 1)
    even = torch.from_numpy(rng.gumbel(size=(2, 512, 4))).float()
    bursts = torch.from_numpy(rng.gumbel(size=(2, 32, 4))).float().repeat_interleave(16, dim=1)
    assert float(burst_loss((popular + even).softmax(-1))) < 0.05
    assert float(burst_loss((popular + bursts).softmax(-1))) > 0.3


def test_balance_weight_follows_the_skew() -> None:
    router = RouterLosses(skew=0.1, balance_range=(0.001, 0.1), balance_step=0.5)
    balance, recent = torch.tensor([0.01, 0.01, 0.09]), torch.full((3, 4), 0.25)
    recent[1:] = torch.tensor([0.7, 0.1, 0.1, 0.1])
    router.follow(balance, recent)
    assert balance.tolist() == pytest.approx([0.01 * math.exp(-0.5), 0.01 * math.exp(0.5), 0.1])


def test_the_burst_loss_waits_for_the_first_steps() -> None:
    router = RouterLosses(burst=0.02, burst_from=0.1, z=0.0)
    one = torch.ones(2)
    losses = Losses(torch.tensor(0.0), one, 10 * one, one, load=torch.zeros(2, 4))
    balance = torch.tensor([0.01, 0.03])
    assert float(router.total(losses, balance, 0.0)) == pytest.approx(0.04)
    assert float(router.total(losses, balance, 0.1)) == float(router.total(losses, balance, 1.0)) == pytest.approx(0.44)


def test_balance_follows_the_recent_load() -> None:
    """The gradient lowers the experts of the load that is given, whatever this micro-batch chooses."""
    config = tiny_config()
    parameters = dict(new_model(config, seed=0).named_parameters())
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    forward = TrainingForward(config, parameters, torch.float32)
    tokens = torch.randint(0, 300, (2, 33), generator=torch.Generator().manual_seed(0))
    recent = torch.zeros(2, 8)
    recent[:, 5] = 1.0
    inputs: list[torch.Tensor] = []
    losses = forward(tokens, 1.0, recent, inputs)
    likely = [(h @ forward.router(layer).t()).softmax(-1)[:, 5].mean() for layer, h in enumerate(inputs)]
    torch.testing.assert_close(losses.balance, 8 * torch.stack(likely))


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


def test_two_steps_lower_the_loss(work_dir: Path) -> None:
    shared, loop = start(work_dir)
    worker = Worker(0, shared, loop, threading.Barrier(1), {})
    rows = torch.from_numpy(np.fromfile(work_dir / "tokens" / "train-c.bin", dtype=np.uint16)[:257].astype(np.int64))

    def loss() -> float:
        forward = TrainingForward(shared.config, shared.parameters, torch.float32)
        with torch.no_grad():
            return float(forward(rows.unsqueeze(0), 1 / 256).cross_entropy)

    before = loss()
    worker.run(max_steps=2)
    assert loss() < before
    assert shared.counters[:2].tolist() == [2, 512]


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


def test_two_workers_give_the_gradient_of_one(work_dir: Path) -> None:
    """Each worker adds its rows' part; the owner of a parameter sums the parts."""
    one, loop = start(work_dir)
    Worker(0, one, loop, threading.Barrier(1), {}).run(max_steps=1)
    config = tiny_config()
    pair = LoopConfig(**{**loop.__dict__, "workers": 2})
    two = SharedState(config, dict(new_model(config, seed=1).named_parameters()), pair)
    owners = two.optimizer.owners(2)
    assert set(owners.values()) == {0, 1}
    for rank in range(2):
        worker = Worker(rank, two, pair, threading.Barrier(2), {})
        worker.accumulate(worker._stream.next_rows(8, 32), 0.0)
    name = "model.layers.0.self_attn.q_proj.weight"
    before = two.parameters[name].clone()
    for rank in range(2):
        owned = [name for name, owner in owners.items() if owner == rank]
        two.optimizer.step(owned, 1, rate_at(0, 1), 0.8505)
    moved = two.parameters[name] - before
    wanted = one.parameters[name] - before
    assert torch.nn.functional.cosine_similarity(moved.flatten(), wanted.flatten(), dim=0) > 0.95


def test_held_out_figures_of_an_untrained_model_are_those_of_chance(work_dir: Path) -> None:
    shared, _ = start(work_dir)
    forward = TrainingForward(shared.config, shared.parameters, torch.float32)
    figures = stream_bits_per_byte(forward, work_dir, tokens_per_kind=256, length=64)
    assert {"bpb", "heldout_min_share", *(f"bpb_{kind}" for kind in KINDS)} == set(figures)
    assert 1.0 < figures["bpb"] < 9.0


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


def test_card_states_figures_and_names_a_missed_bar() -> None:
    shares = [[0.25, 0.25, 0.25, 0.25], [0.01, 0.33, 0.33, 0.33]]
    figures = Figures(
        {"python": 1.2, "c": 1.25, "prose": 1.3, "all": 1.24}, 200_000, shares, [0.1, 0.2], {"c": "int main"}, ROUTING
    )
    assert list(bars(figures).values()) == [True, False, True, True, True, False]
    card = model_card(figures, facts())
    for text in (
        "12.3 M tokens",
        "2 cores of an Example",
        "| c | 1.250 |",
        "0.0100 (0.04x)",
        "| 0.200 |",
        "MISSED",
        "int main",
    ):
        assert text in card
    assert normalised_entropy(shares[0]) == pytest.approx(1.0)


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
