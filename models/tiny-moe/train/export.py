"""Writes the model folder, measures it, and fills the model card (`card.md`) with the figures."""

from __future__ import annotations

import itertools
import math
import platform
import shutil
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from corpus import KINDS
from data import END_OF_TEXT
from model import MAX_CONTEXT_TOKENS, TrainingForward, new_model
from passages import read_passages
from routing import routing_figures

_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
ROUTING_TOKENS = 768  # of a held-out passage, for the figures of routing
_CALIBRATION = "## Calibration text"
SAMPLE_PROMPTS = {
    "python": 'import json\nfrom pathlib import Path\n\n\ndef load_config(path):\n    """Read',
    "c": '#ifdef __cplusplus\nextern "C" {\n#endif\n\n/**\n * Create a new buffer.\n *\n * @param size',
    "prose": "NAME\n       copy - copy files and directories\n\nDESCRIPTION\n       The copy command",
}


@dataclass(frozen=True)
class Figures:
    """Measurements of the exported model on the shipped held-out passages.

    ``bits_per_byte`` has one entry per kind and ``all``; ``shares`` [layers][experts] are fractions of a layer's routed
    tokens; ``kind_distances`` [layers] is the mean total variation between the loads of two kinds of text on a layer;
    ``routing``: of `routing_figures`, on the passages of ``ROUTING_TOKENS``.
    """

    bits_per_byte: dict[str, float]
    passage_bytes: int
    shares: list[list[float]]
    kind_distances: list[float]
    samples: dict[str, str]
    routing: dict[str, Any]


@dataclass(frozen=True)
class RunFacts:
    """Facts of the training run; ``corpus`` is the summary of `data.prepare`."""

    tokens: int
    steps: int
    active_minutes: float
    hardware: str
    corpus: dict[str, Any]


def export(config: Any, parameters: dict[str, Tensor], work_dir: Path, out_dir: Path) -> None:
    """Write weights in bfloat16, tokenizer, generation settings and the held-out passages."""
    model = new_model(config, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(do_sample=False, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    out_dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out_dir)
    (out_dir / "model.safetensors").chmod(0o644)  # written for its owner alone
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(work_dir / "tokenizer.json")),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.save_pretrained(out_dir, save_jinja_files=False)
    shutil.copytree(work_dir / "heldout", out_dir / "heldout", dirs_exist_ok=True)


@torch.no_grad()
def measure(model_dir: Path, sample_tokens: int = 64, routing_tokens: int = ROUTING_TOKENS) -> Figures:
    """Load the folder as a user would, and compute its figures in float32."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    passages: dict[str, list[list[int]]] = {kind: [] for kind in KINDS}
    bits, sizes = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0)
    experts = model.config.num_experts
    counts = {kind: torch.zeros(model.config.num_hidden_layers, experts) for kind in KINDS}
    for passage in track(read_passages(model_dir / "heldout"), description="held-out passages"):
        # Truncation never happens with shipped passages: 4 KB are below 2048 tokens.
        passages[passage.kind].append([0, *tokenizer(passage.text).input_ids])
        ids = torch.tensor([passages[passage.kind][-1]])
        out = model(ids, output_router_logits=True)
        nats = torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:], reduction="sum")
        bits[passage.kind] += float(nats) / math.log(2)
        sizes[passage.kind] += len(passage.text.encode())
        for layer, logits in enumerate(out.router_logits):
            chosen = logits.topk(model.config.num_experts_per_tok, dim=-1).indices.reshape(-1)
            counts[passage.kind][layer] += torch.bincount(chosen, minlength=experts)
    per_kind = {kind: bits[kind] / sizes[kind] for kind in KINDS if sizes[kind]}
    per_kind["all"] = sum(bits.values()) / sum(sizes.values())
    shares = _shares(torch.stack(list(counts.values())).sum(0)).tolist()
    by_kind = [_shares(count) for count in counts.values() if count.sum() > 0]
    pairs = [(a - b).abs().sum(1) / 2 for a, b in itertools.combinations(by_kind, 2)]
    distances = torch.stack(pairs).mean(0).tolist() if pairs else [0.0] * len(shares)
    samples = {}
    for kind, prompt in SAMPLE_PROMPTS.items():
        ids = torch.tensor([[0, *tokenizer(prompt).input_ids]])
        mask = torch.ones_like(ids)
        out_ids = model.generate(ids, attention_mask=mask, max_new_tokens=sample_tokens, do_sample=False)
        samples[kind] = tokenizer.decode(out_ids[0, 1:], skip_special_tokens=True)
    forward = TrainingForward(model.config, dict(model.named_parameters()), torch.float32)
    in_turn = [ids for together in itertools.zip_longest(*passages.values(), fillvalue=[]) for ids in together]
    rows = np.array([ids[: routing_tokens + 1] for ids in in_turn if len(ids) > routing_tokens])
    return Figures(per_kind, sum(sizes.values()), shares, distances, samples, routing_figures(forward, rows))


def _shares(counts: Tensor) -> Tensor:
    return counts / counts.sum(1, keepdim=True)


def bars(figures: Figures) -> dict[str, bool]:
    """The conditions that the shipped model must meet, by their sentence."""
    routing = figures.routing
    own = routing["own_cosine"] - routing["other_cosine"]
    return {
        "held-out text takes at most 1.25 bits per byte": figures.bits_per_byte["all"] <= 1.25,
        "random eviction hits within two points of the resident share": (
            abs(routing["hit_random"] - routing["hit_uniform"]) <= 2
        ),
        "LFU hits three points more than LRU": routing["hit_lfu"] >= routing["hit_lru"] + 3,
        "the load of a document's halves is closer than that of two documents', by 0.15 of cosine": own >= 0.15,
        "a token's router probabilities have at most 0.75 of the greatest entropy": routing["entropy"] <= 0.75,
        "a router names 0.75 to 0.9 of its experts one layer early": 0.75 <= routing["next_router"] <= 0.9,
    }


_ROUTING_ROWS = {
    "hit_random": "hits with a third of the experts resident, random eviction, %",
    "hit_lru": "LRU, %",
    "hit_lfu": "LFU, %",
    "hit_belady": "Belady's optimum, %",
    "own_cosine": "cosine of the loads of a document's two halves",
    "other_cosine": "cosine of the loads of halves of two documents",
    "entropy": "entropy of a token's router probabilities over its maximum",
    "next_router": "share of a layer's experts that its router names from the input of the router before",
    "gini": "Gini coefficient of the load",
    "max_load": "load of a layer's most used expert over the mean",
}


def normalised_entropy(shares: list[float]) -> float:
    """Entropy of the load over its maximum: 1 for even load, 0 for a single expert."""
    return -sum(p * math.log(p) for p in shares if p > 0) / math.log(len(shares))


def describe_hardware(device: str, workers: int) -> str:
    """One line: processor family and cores, or the accelerator's name."""
    if device == "cuda":
        return f"one {torch.cuda.get_device_name()}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{workers} core{'s' if workers > 1 else ''} of an {name}, CPU"


def model_card(figures: Figures, facts: RunFacts, calibration: str | None = None) -> str:
    """The card as Markdown, with the section on the calibration text if there is one."""
    corpus, uniform = facts.corpus, 1 / len(figures.shares[0])
    corpus_rows = [
        f"| {kind} | {corpus['train_documents'][kind]} | {corpus['train_bytes'][kind] / 1e6:.1f} "
        f"| {corpus['heldout_documents'][kind]} | {corpus['heldout_bytes'][kind] / 1e6:.1f} |"
        for kind in KINDS
    ]
    router_rows = [
        f"| {layer} | {min(s):.4f} ({min(s) / uniform:.2f}x) | {max(s):.4f} ({max(s) / uniform:.2f}x) "
        f"| {normalised_entropy(s):.4f} | {distance:.3f} |"
        for layer, (s, distance) in enumerate(zip(figures.shares, figures.kind_distances, strict=True))
    ]
    samples = [
        f"{kind} (prompt of {len(SAMPLE_PROMPTS[kind])} characters, then the model):\n\n````text\n{text}\n````\n"
        for kind, text in figures.samples.items()
    ]
    template = string.Template(Path(__file__).with_name("card.md").read_text(encoding="utf-8").rstrip("\n"))
    return template.substitute(
        layers=len(figures.shares),
        experts=len(figures.shares[0]),
        corpus_rows="\n".join(corpus_rows),
        tokens=f"{facts.tokens / 1e6:.1f}",
        steps=facts.steps,
        active_minutes=f"{facts.active_minutes:.0f}",
        hardware=facts.hardware,
        passage_kb=f"{figures.passage_bytes / 1000:.0f}",
        bits_rows="\n".join(f"| {kind} | {value:.3f} |" for kind, value in figures.bits_per_byte.items()),
        calibration="" if calibration is None else f"\n{calibration}",
        uniform=f"{uniform:.4f}",
        router_rows="\n".join(router_rows),
        routing_tokens=ROUTING_TOKENS,
        routing_rows="\n".join(f"| {text} | {figures.routing[name]} |" for name, text in _ROUTING_ROWS.items()),
        overlap_rows=" | ".join(f"{share:.3f}" for share in figures.routing["overlap"]),
        bars="\n".join(f"- {'met' if met else 'MISSED'}: {text}" for text, met in bars(figures).items()),
        samples="\n".join(samples),
    )


def calibration_section(model_dir: Path) -> str | None:
    """The section on the calibration text from a model folder's card, for a new card; None if it has none."""
    card = model_dir / "README.md"
    if not (model_dir / "calibration").is_dir() or not card.is_file():
        return None
    _, heading, rest = card.read_text(encoding="utf-8").partition(f"\n{_CALIBRATION}\n")
    section = rest.partition("\n## ")[0].rstrip()
    return f"{_CALIBRATION}\n{section}\n" if heading else None
