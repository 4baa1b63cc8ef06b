"""The model card: what was trained on what, and the figures that hold it to its bars."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .export import SAMPLE_PROMPTS, Figures
from .sources import KINDS

_FRONT = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [moe, code]
---
"""

_CALIBRATION = "## Calibration text"
_NEXT_SECTION = "\n## "


@dataclass(frozen=True)
class RunFacts:
    """How the weights came about."""

    tokens: int
    steps: int
    active_minutes: float
    hardware: str
    corpus: dict[str, Any]


def bars(figures: Figures, accelerator: bool) -> dict[str, bool]:
    """The conditions that the shipped model has to meet, by their sentence."""
    limit = 1.3 if accelerator else 1.8
    uniform = 1 / len(figures.shares[0])
    return {
        f"held-out text takes at most {limit} bits per byte": figures.bits_per_byte["all"] <= limit,
        "every expert of every layer gets at least 1/8 of the uniform share": figures.least_share >= uniform / 8,
    }


def normalised_entropy(shares: list[float]) -> float:
    """Entropy of the load over its maximum: 1 for even load, 0 for one expert alone."""
    return -sum(p * math.log(p) for p in shares if p > 0) / math.log(len(shares))


def describe_hardware(device: str, workers: int) -> str:
    """One generic line: processor family and cores, or the accelerator's name."""
    if device == "cuda":
        import torch

        return f"one {torch.cuda.get_device_name()}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{workers} core{'s' if workers > 1 else ''} of an {name}, CPU"


def model_card(figures: Figures, facts: RunFacts, accelerator: bool, calibration: str | None = None) -> str:
    """The card as Markdown.

    Args:
        calibration: the section on the calibration text (`calibration_section`).
    """
    parts = (
        _FRONT + _introduction(figures),
        _corpus_section(facts),
        _figures_section(figures),
        *([] if calibration is None else [calibration]),
        _router_section(figures),
        _bars_section(figures, accelerator),
        _samples_section(figures),
    )
    return "\n".join(parts)


def calibration_section(model_dir: Path) -> str | None:
    """The section on the calibration text from the card that lies in a model folder.

    Training does not make that text and cannot describe it, so a new card takes the section over.

    Returns:
        None where the folder ships no calibration text, or its card says nothing of it.
    """
    card = model_dir / "README.md"
    if not (model_dir / "calibration").is_dir() or not card.is_file():
        return None
    _, heading, rest = card.read_text(encoding="utf-8").partition(f"\n{_CALIBRATION}\n")
    return f"{_CALIBRATION}\n{rest.partition(_NEXT_SECTION)[0].rstrip()}\n" if heading else None


def _introduction(figures: Figures) -> str:
    return f"""# tiny-moe

A small Mixture-of-Experts language model that ships with tiermoe, so that everything in it can be run and
measured without a download: `Qwen3MoeForCausalLM`, {len(figures.shares)} layers, {len(figures.shares[0])} experts
each, 4 active per token, 28 M parameters of which about 6 M are active, 2048 tokens of context, a byte-level
BPE of 4096 entries. It continues Python, C headers and technical prose; it follows no instructions and knows
no facts worth trusting.
"""


def _corpus_section(facts: RunFacts) -> str:
    corpus = facts.corpus
    rows = "\n".join(
        f"| {kind} | {corpus['train_documents'][kind]} | {corpus['train_bytes'][kind] / 1e6:.1f} "
        f"| {corpus['heldout_documents'][kind]} | {corpus['heldout_bytes'][kind] / 1e6:.1f} |"
        for kind in KINDS
    )
    return f"""## Training

Text that a development machine has anyway: Python sources of the standard library and of installed packages
(`python`), headers below `/usr/include` (`c`), and package documentation, manual pages and READMEs (`prose`).
Duplicates, near-duplicates and paragraphs that repeat (licences) were dropped; a hash of the machine-independent
path decides whether a document is for training or held out.

| kind | training documents | training MB | held-out documents | held-out MB |
|---|---|---|---|---|
{rows}

The weights saw {facts.tokens / 1e6:.1f} M tokens of it in {facts.steps} steps, in {facts.active_minutes:.0f} active
minutes of {facts.hardware}. Matrices were optimised with Muon, embeddings, norms and routers with AdamW,
rows grew from 256 to 2048 tokens, with a load-balancing and a z-loss on the routers.
How to repeat it: `docs/default-model.md`.
"""


def _figures_section(figures: Figures) -> str:
    rows = "\n".join(f"| {kind} | {value:.3f} |" for kind, value in figures.bits_per_byte.items())
    return f"""## Held-out text

On the passages in `heldout/` ({figures.passage_bytes / 1000:.0f} KB, from held-out documents, freely
redistributable, source and licence with each), each read from its start:

| kind | bits per byte |
|---|---|
{rows}
"""


def _router_section(figures: Figures) -> str:
    uniform = 1 / len(figures.shares[0])
    rows = "\n".join(
        f"| {layer} | {min(s):.4f} ({min(s) / uniform:.2f}x) | {max(s):.4f} ({max(s) / uniform:.2f}x) "
        f"| {normalised_entropy(s):.4f} | {figures.kind_distances[layer]:.3f} |"
        for layer, s in enumerate(figures.shares)
    )
    return f"""## Router health

Share of a layer's routed tokens on the held-out passages (uniform: {uniform:.4f}). The last column says how far
routing depends on the text: the mean total variation between the loads of two kinds (0 where they are the same).

| layer | least used expert | most used expert | normalised entropy | distance between kinds |
|---|---|---|---|---|
{rows}
"""


def _bars_section(figures: Figures, accelerator: bool) -> str:
    rows = "\n".join(f"- {'met' if met else 'MISSED'}: {text}" for text, met in bars(figures, accelerator).items())
    return f"## Bars\n\n{rows}\n"


def _samples_section(figures: Figures) -> str:
    blocks = []
    for kind, text in figures.samples.items():
        prompt = SAMPLE_PROMPTS[kind]
        blocks.append(f"{kind} (prompt of {len(prompt)} characters, then the model):\n\n````text\n{text}\n````\n")
    return "## Greedy samples\n\n" + "\n".join(blocks)
