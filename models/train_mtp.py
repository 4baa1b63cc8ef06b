"""Fits a head for drafts (multi-token prediction) to the model that ships with tiermoe, on one CPU core.

text      of this machine, as `train.py` collects it; no held-out document. Half of the rows go on as the model
          goes on, at the temperatures at which it is sampled: these are the texts that the head will see
teacher   the model, which stays as it is: its hidden states of all rows, made once, and its scores of them
head      one decoder layer of the model's class with a dense MLP, on a token's embedding and the state before it
loss      cross entropy with the teacher's scores of the token behind that; the head's states again, as in a chain
export    `mtp.safetensors` beside the weights, by the names that Qwen's checkpoints have

python models/train_mtp.py [--minutes 20] [--again]
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from tiermoe.actors.engine.model.mtp import FILE, head_on_meta
from train import KINDS, MIXTURE, MODEL_DIR, Optimizer, Tokens, collect, is_held_out, machine_roots, rows_of

CHAIN = 2  # drafts in a row that the loss looks at
CHAIN_WEIGHT = 0.5  # of each further one, over that of the one before
SCORED = 256  # tokens of a step, drawn at random, whose scores the loss looks at: they take most of the time
STATE_WEIGHT = 3.0  # of the states' squared error, in their variance, over that of the cross entropy
PROMPT = 64  # tokens of the rows that the model continues
TEMPERATURES = (0.6, 1.0)  # of these, in turn
TOGETHER = 64  # rows that the model reads or continues at once
WARM_UP_STEPS = 10
NAMES = {  # of a checkpoint, by those of transformers' `MtpModel`
    "eh_proj.weight": "fc.weight", "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight", "post_norm.weight": "norm.weight",
}  # fmt: skip


def training_tokens(tokenizer: Tokenizer, count: int) -> Tokens:
    """About so many tokens of this machine's text, of documents that are not held out, by kind."""
    wanted = {kind: int(count * share) for kind, share in zip(KINDS, MIXTURE, strict=True)}
    found: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for name, kind, text in collect(machine_roots()):
        if not is_held_out(name) and len(found[kind]) < wanted[kind]:
            found[kind] += [0, *tokenizer.encode(text).ids]
        if all(len(found[kind]) >= wanted[kind] for kind in KINDS):
            break
    return [np.array(found[kind], np.uint16) for kind in KINDS]


@torch.no_grad()
def rows_and_states(model: Any, text: Tokens, count: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`count` rows [TOGETHER, L] of the text, every other part continued by the model, and their states [.., L, H]."""
    torch.manual_seed(seed)
    for part in range(-(-count // TOGETHER)):
        rows = rows_of(text, seed, part, TOGETHER, length)[:, :-1]
        if part % 2:
            rows = model.generate(
                rows[:, :PROMPT], max_length=length, do_sample=True, suppress_tokens=[0], top_k=0,
                temperature=TEMPERATURES[part // 2 % len(TEMPERATURES)],
            )  # fmt: skip
        yield rows, model.model(rows, use_cache=False).last_hidden_state.to(torch.bfloat16)


def new_head(model: Any, seed: int) -> Any:
    """The head with its first weights: unsure, and without a way from a token to itself, which is rarely right."""
    head = head_on_meta(model, ["mtp.layers.0.mlp.gate_proj.weight"])  # dense
    head.layers.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in head.layers.named_parameters():
            if weight.dim() < 2:
                weight.fill_(1.0)
                continue
            gain = 0.2 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            weight.copy_(torch.randn(weight.shape, generator=generator) * gain / weight.shape[1] ** 0.5)
        head.layers[0].post_norm.weight.copy_(model.model.norm.weight / 3)
    return head


def losses(model: Any, head: Any, rows: Tensor, states: Tensor) -> tuple[Tensor, list[float]]:
    """The loss of rows [B, L] with states [B, L, H], and how often the head's first choice is the model's, by place."""
    total, hits, given = torch.zeros(()), list[float](), states
    for place in range(1, CHAIN + 1):
        ids, positions = rows[:, place:], torch.arange(place, rows.shape[1])[None]
        given = head.forward_layer(0, given[:, :-1], positions.expand_as(ids), None, input_ids=ids)
        chosen = torch.randperm(ids.numel())[:SCORED]
        with torch.no_grad():
            teacher = model.lm_head(states[:, place:].flatten(0, 1)[chosen]).float()
        found = head.shared_head(given.flatten(0, 1)[chosen]).float()
        off = F.mse_loss(given, states[:, place:]) / states.var()
        total = total + CHAIN_WEIGHT ** (place - 1) * (F.cross_entropy(found, teacher.softmax(-1)) + STATE_WEIGHT * off)
        hits.append(float((found.argmax(-1) == teacher.argmax(-1)).float().mean()))
    return total, hits


def command(
    out: Annotated[Path, typer.Option(help="Folder of the model.")] = MODEL_DIR,
    minutes: Annotated[float, typer.Option(help="Minutes of a core, once the teacher's states are there.")] = 20.0,
    tokens: Annotated[int, typer.Option(help="Tokens of the rows.")] = 400_000,
    rows: Annotated[int, typer.Option(help="Rows of a step.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens of a row.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the rows.")] = 0,
    again: Annotated[bool, typer.Option("--again", help="Begin with the head that is there.")] = False,
) -> None:
    """Fit a head for drafts to the model that ships with tiermoe."""
    model = Qwen3MoeForCausalLM.from_pretrained(out, dtype=torch.float32).eval().requires_grad_(False)
    model.set_experts_implementation("grouped_mm")
    head = new_head(model, seed)
    if again:
        read(head, out)
    text = training_tokens(Tokenizer.from_file(str(out / "tokenizer.json")), 2 * tokens)
    parts = list[tuple[Tensor, Tensor]]()
    for part in rows_and_states(model, text, tokens // length, length, seed):
        parts.append(part)
        print(f"{len(parts) * TOGETHER * length} tokens, {time.process_time():.0f} s", flush=True)
    ids, states = (torch.cat(one) for one in zip(*parts, strict=True))
    optimizer = Optimizer(dict(head.layers[0].named_parameters()))
    begun_s, step, mean, share = time.process_time(), 0, np.zeros(CHAIN), 0.0
    while share < 1:
        step += 1
        chosen = torch.randint(len(ids), (rows,))
        loss, hits = losses(model, head, ids[chosen], states[chosen].float())
        loss.backward()
        optimizer.step(step, min(1.0, step / WARM_UP_STEPS) * max(0.02, 1 - share))
        mean += 0.05 * (np.array(hits) - mean)
        if step % 50 == 0:
            right = ", ".join(f"{hit:.3f}" for hit in mean / (1 - 0.95**step))
            print(f"step {step}, {share:.0%}: loss {loss.item():.3f}, the model's own choice {right}", flush=True)
            export(head, out)
        share = (time.process_time() - begun_s) / (60 * minutes)
    export(head, out)


def export(head: Any, out: Path) -> None:
    """Write the head's weights in bfloat16 beside those of the model."""
    made = {NAMES.get(n, n.replace("mtp_block", "layers.0")): one for n, one in head.layers[0].named_parameters()}
    weights = {f"mtp.{name}": weight.detach().to(torch.bfloat16).contiguous() for name, weight in made.items()}
    save_file(weights, out / FILE, {"format": "pt"})


def read(head: Any, out: Path) -> None:
    """Read what `export` wrote."""
    own = {name: n for n, name in NAMES.items()}
    found = {name.removeprefix("mtp."): weight.float() for name, weight in load_file(out / FILE).items()}
    head.layers[0].load_state_dict({own.get(n, n.replace("layers.0", "mtp_block")): one for n, one in found.items()})


if __name__ == "__main__":
    typer.run(command)
