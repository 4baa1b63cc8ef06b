"""Writes the model folder and measures what was written."""

from __future__ import annotations

import itertools
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from .heldout import read_passages
from .model import MAX_CONTEXT_TOKENS, new_model
from .sources import KINDS
from .tokenizer import save_pretrained

SAMPLE_PROMPTS = {
    "python": 'import json\nfrom pathlib import Path\n\n\ndef load_config(path):\n    """Read',
    "c": '#ifdef __cplusplus\nextern "C" {\n#endif\n\n/**\n * Create a new buffer.\n *\n * @param size',
    "prose": "NAME\n       copy - copy files and directories\n\nDESCRIPTION\n       The copy command",
}


@dataclass(frozen=True)
class Figures:
    """What the exported model does on the shipped held-out passages.

    ``bits_per_byte`` has one entry per kind and ``all``; ``shares`` [layers][experts] are fractions
    of the routed tokens of a layer; ``kind_distances`` [layers] is the mean total variation between
    the loads that two kinds of text put on a layer (0: routing ignores the kind).
    """

    bits_per_byte: dict[str, float]
    passage_bytes: int
    shares: list[list[float]]
    kind_distances: list[float]
    samples: dict[str, str]

    @property
    def least_share(self) -> float:
        """Smallest load of any expert in any layer, as a fraction."""
        return min(min(layer) for layer in self.shares)


def export(config: Any, parameters: dict[str, Tensor], work_dir: Path, out_dir: Path) -> None:
    """Write weights in bfloat16, tokenizer, generation settings and the held-out passages."""
    from tokenizers import Tokenizer
    from transformers import GenerationConfig

    model = new_model(config, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(do_sample=False, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    out_dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out_dir)
    (out_dir / "model.safetensors").chmod(0o644)  # written for its owner alone
    save_pretrained(Tokenizer.from_file(str(work_dir / "tokenizer.json")), out_dir, MAX_CONTEXT_TOKENS)
    shutil.copytree(work_dir / "heldout", out_dir / "heldout", dirs_exist_ok=True)


@torch.no_grad()
def measure(model_dir: Path, sample_tokens: int = 64) -> Figures:
    """Load the folder as a user would and compute its figures (float32 arithmetic)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    bits, sizes = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0)
    experts = model.config.num_experts
    counts = {kind: torch.zeros(model.config.num_hidden_layers, experts) for kind in KINDS}
    for passage in track(read_passages(model_dir / "heldout"), description="held-out passages"):
        # Truncation never happens with shipped passages: 4 KB are below 2048 tokens.
        ids = torch.tensor([[0, *tokenizer(passage.text).input_ids]])
        out = model(ids, output_router_logits=True)
        nats = torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:], reduction="sum")
        bits[passage.kind] += float(nats) / math.log(2)
        sizes[passage.kind] += len(passage.text.encode())
        for layer, logits in enumerate(out.router_logits):
            chosen = logits.topk(model.config.num_experts_per_tok, dim=-1).indices.reshape(-1)
            counts[passage.kind][layer] += torch.bincount(chosen, minlength=experts)
    per_kind = {kind: bits[kind] / sizes[kind] for kind in KINDS if sizes[kind]}
    per_kind["all"] = sum(bits.values()) / sum(sizes.values())
    shares = _shares(torch.stack(list(counts.values())).sum(0))
    samples = _samples(model, tokenizer, sample_tokens)
    return Figures(per_kind, sum(sizes.values()), shares.tolist(), _kind_distances(counts), samples)


def _shares(counts: Tensor) -> Tensor:
    return counts / counts.sum(1, keepdim=True)


def _kind_distances(counts: dict[str, Tensor]) -> list[float]:
    seen = [_shares(count) for count in counts.values() if count.sum() > 0]
    pairs = [(a - b).abs().sum(1) / 2 for a, b in itertools.combinations(seen, 2)]
    return torch.stack(pairs).mean(0).tolist() if pairs else [0.0] * len(seen[0])


def _samples(model: Any, tokenizer: Any, new_tokens: int) -> dict[str, str]:
    samples = {}
    for kind, prompt in SAMPLE_PROMPTS.items():
        ids = torch.tensor([[0, *tokenizer(prompt).input_ids]])
        mask = torch.ones_like(ids)
        out_ids = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
        samples[kind] = tokenizer.decode(out_ids[0, 1:], skip_special_tokens=True)
    return samples
