"""Trains the model that ships with tiermoe, from text to checkpoint: `make train-default-model`, or `--help`.

    corpus     text of this machine, without repetitions, a hash of its path says what is held out
    tokens     a byte-level BPE of 4096 entries, and the corpus as its ids
    model      Qwen3MoeForCausalLM of transformers: 16 layers, 32 experts, 4 a token
    losses     cross entropy, and two of each router: balance of the load, and no bursts
    optimizer  Muon for matrices, AdamW for the rest
    loop       rows from short to long; the same command resumes
    export     the folder as `from_pretrained` reads it, and bits per byte of the held-out passages

docs/default-model-notes.md says why each choice was made.
"""

from __future__ import annotations

import ctypes
import gzip
import hashlib
import json
import math
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import typer
from numpy.typing import NDArray
from rich.progress import track
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

MODEL_DIR = Path(__file__).resolve().parent / "tiny-moe"
KINDS = ("python", "c", "prose")
MIXTURE = (0.40, 0.24, 0.36)  # shares of the rows, by kind
CONTEXT = 2048
Tokens = list[NDArray[np.uint16]]  # of each kind
END_OF_TEXT = "<|endoftext|>"  # token 0, before each document

# Corpus

MAX_DOCUMENT_CHARS = 120_000
HELD_OUT_PER_MILLE = 25
MAX_REPEATED_LINES = 0.6  # of a document, which is a near-duplicate above
MAX_PARAGRAPH_REPEATS = 4  # such as licences


class Root(NamedTuple):
    """A folder of text. `name` replaces its path, so that the split is the same on every machine.

    Attributes:
        group_chars: bound of one package's text; a package is a folder of the root where `grouped`, else the root.
    """

    name: str
    kind: str
    path: Path
    suffixes: tuple[str, ...]
    group_chars: int
    grouped: bool = True


class Document(NamedTuple):
    """A text and its name: the path below its root, such as `stdlib/json/decoder.py`."""

    name: str
    kind: str
    text: str


def plain_text(raw: bytes) -> str:
    """Decode UTF-8, gunzipped where needed. Raises ValueError: binary, generated or minified."""
    text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8")
    if "\x00" in text or len(text) / (text.count("\n") + 1) > 160:
        raise ValueError("no text, or data")
    text = text.replace("\r\n", "\n").replace("\f", "").replace("\x1f", "").expandtabs(8)
    return re.sub(r"\n{4,}", "\n\n\n", re.sub(r" +\n", "\n", text)).strip("\n") + "\n"


_SECTIONS = "SH|SS|Sh|Ss|PP|P|LP|TP|IP|Pp"
_MACRO = re.compile(rf"^\.\s*({_SECTIONS}|B|I|BR|IR|RB|RI|BI|IB|Nm|Fl|Ar|Nd)\b ?(.*)$")
_ESCAPES = {
    r"\\f(\[\w*\]|\(..|.)|\\s[-+]?\d|\\[&|^/,:%]": "", r"\\\*?\((?:aq|cq)": "'", r"\\\*?\((?:lq|rq|dq)": '"',
    r"\\\*?\(em": "--", r"\\-": "-", r"\\ |\\~": " ", r"\\e": r"\\",
}  # fmt: skip


def manual_text(raw: bytes) -> str:
    """Text of a manual page: lines of macros lose their macro, those of others are left out."""
    lines = []
    for line in plain_text(raw).splitlines():
        macro = _MACRO.match(line)
        if line.startswith((".", "'")) and macro is None:
            continue
        if macro is not None:
            line = macro[2].replace('"', "")
            lines += [""] * (macro[1] in _SECTIONS.split("|"))
        for pattern, replacement in _ESCAPES.items():
            line = re.sub(pattern, replacement, line)
        lines.append(line)
    return plain_text("\n".join(lines).encode())


def machine_roots() -> list[Root]:
    """Where a development machine has text."""
    paths, share = sysconfig.get_paths(), Path("/usr/share")
    stdlib, site = Path(paths["stdlib"]), Path(paths["purelib"])
    pages = (".md", ".rst", ".txt", ".pod", ".md.gz", ".rst.gz", ".txt.gz", "NEWS.gz", "README.gz", "README", "NEWS")
    manuals = tuple(f".{section}.gz" for section in "12345678")
    return [
        Root("stdlib", "python", stdlib, (".py",), 14_000_000, False),
        Root("site-packages", "python", site, (".py", ".pyi"), 6_000_000),
        Root("include", "c", Path("/usr/include"), (".h",), 9_000_000),
        Root("include-python", "c", Path(paths["include"]), (".h",), 2_000_000, False),
        Root("site-packages-docs", "prose", site, (".md", ".rst", ".txt", "METADATA"), 400_000),
        Root("doc", "prose", share / "doc", (*pages, "copyright"), 2_500_000),
        Root("man", "prose", share / "man", manuals, 3_500_000),
        Root("info", "prose", share / "info", (".info.gz",), 4_000_000, False),
        Root("perl", "prose", share / "perl", (".pod",), 3_000_000),
    ]


def path_hash(name: str) -> int:
    """64 bits of SHA-256 of a document's name."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", errors="replace")).digest()[:8], "big")


def is_held_out(name: str) -> bool:
    """Whether the document of this name is held out (2.5% of names)."""
    return path_hash(name) % 1000 < HELD_OUT_PER_MILLE


def collect(roots: list[Root]) -> Iterator[Document]:
    """Documents without repetitions, in the order of their hash, held-out ones first: of two copies these stay."""
    named = [(f"{root.name}/{path.relative_to(root.path).as_posix()}", root, path)
             for root in roots for path in root.path.rglob("*") if _is_text(root, path)]  # fmt: skip
    taken, paragraphs, seen = Counter[str](), Counter[int](), set[int]()
    for name, root, path in sorted(named, key=lambda one: (not is_held_out(one[0]), path_hash(one[0]))):
        group = "/".join(name.split("/")[: 1 + root.grouped])
        if taken[group] > root.group_chars:
            continue
        try:
            text = (manual_text if root.name == "man" else plain_text)(path.read_bytes())[:MAX_DOCUMENT_CHARS]
        except (OSError, EOFError, ValueError):
            continue
        lines = {hash(line) for line in map(str.strip, text.splitlines()) if len(line) > 20}
        if len(lines & seen) > MAX_REPEATED_LINES * len(lines):
            continue
        seen |= lines
        kept = []
        for paragraph in re.split(r"(?<=\n\n)", text):
            key = hash(re.sub(r"[\W\d]+", " ", paragraph))
            paragraphs[key] += len(paragraph) >= 160
            if paragraphs[key] <= MAX_PARAGRAPH_REPEATS:
                kept.append(paragraph)
        if len(text := "".join(kept)) > 200:
            taken[group] += len(text)
            yield Document(name, root.kind, text)


def _is_text(root: Root, path: Path) -> bool:
    first = path.relative_to(root.path).parts[0]
    if root.name == "stdlib" and first in ("site-packages", "pydoc_data"):  # roots of their own
        return False
    if (root.name == "man" and not first.startswith("man")) or "vendored" in str(path):  # translations; copies
        return False
    if not path.name.endswith(root.suffixes) or path.name.startswith("RECORD") or path.is_symlink():
        return False
    return path.is_file() and path.stat().st_size <= 2_000_000


# Tokens

_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SAMPLE_CHARS = 8_000_000  # of each kind, for the tokenizer


def train_tokenizer(documents: list[Document], vocabulary: int = 4096) -> Tokenizer:
    """A byte-level BPE of the training documents' beginnings, the same of each kind."""
    texts, left = [], dict.fromkeys(KINDS, SAMPLE_CHARS)
    for name, kind, text in documents:
        if left[kind] > 0 and not is_held_out(name):
            texts.append(text[:20_000])
            left[kind] -= len(texts[-1])
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END_OF_TEXT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False, max_token_length=24,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def prepare(work_dir: Path, roots: list[Root], least_bytes: int) -> Tokens:
    """The training tokens of each kind, from the work folder, which is filled first where it is not."""
    if not (work_dir / "tokenizer.json").exists():
        documents = list(track(collect(roots), description="corpus"))
        tokenizer = train_tokenizer(documents)
        for kind in KINDS:
            texts = [d.text for d in documents if d.kind == kind and not is_held_out(d.name)]
            if (size := sum(len(text.encode()) for text in texts)) < least_bytes:
                raise typer.BadParameter(f"{size} bytes of {kind}, {least_bytes} are needed: install packages with it")
            with (work_dir / f"{kind}.bin").open("wb") as out:
                for start in track(range(0, len(texts), 256), description=f"tokens of {kind}"):
                    for encoding in tokenizer.encode_batch(texts[start : start + 256]):
                        out.write(np.array([0, *encoding.ids], np.uint16).tobytes())
        tokenizer.save(str(work_dir / "tokenizer.json"))  # last: the folder is whole
    return [np.memmap(work_dir / f"{kind}.bin", np.uint16, "r") for kind in KINDS]


def rows_of(tokens: Tokens, seed: int, step: int, count: int, length: int) -> Tensor:
    """The rows [count, length + 1] of a step: inputs and, shifted by one, targets."""
    rng = np.random.default_rng([seed, step])
    chosen = [tokens[kind] for kind in rng.choice(len(KINDS), count, p=MIXTURE)]
    starts = [int(rng.integers(len(ids) - length)) for ids in chosen]
    rows = [ids[start : start + length + 1] for ids, start in zip(chosen, starts, strict=True)]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


# Model


def new_model(seed: int) -> Any:
    """The model with its first weights: variance by fan-in, outputs into the residual stream scaled by depth.

    The embedding is large beside the layers' outputs, and the last norm small, so that the logits are not. With a small
    embedding all tokens of a row look alike to the routers in the first hundred steps, and most experts get no token.
    """
    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=16, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=64,
        norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], tie_word_embeddings=True, rms_norm_eps=1e-6,
        max_position_embeddings=CONTEXT, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).float()
    model.set_experts_implementation("grouped_mm")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(0.2 if name == "model.norm.weight" else 1.0)
                continue
            gain = 0.6
            if name.endswith("gate.weight"):  # logits of unit variance: a router that chooses from the first step
                gain = 1.0
            elif name.endswith(("o_proj.weight", "down_proj")):
                gain = 1 / math.sqrt(2 * config.num_hidden_layers)
            std = 0.3 if name.endswith("embed_tokens.weight") else gain / math.sqrt(parameter.shape[-1])
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model


# Losses

BURST_DISTANCES = (1, 2, 4, 8, 16, 32, 64)  # tokens
BURST_WEIGHT, BURST_FROM = 0.01, 0.03  # reached at this progress
SKEW = 0.24  # variance of the relative load that the balance loss aims at
BALANCE_FIRST, BALANCE_RANGE, BALANCE_STEP = 0.1, (2e-4, 0.1), 0.06  # the step is of the logarithm
LOAD_MEMORY = 0.7  # share of the earlier steps in the load that the balance loss sees


class RouterLosses:
    """The losses of the routers, and each layer's weight of the one on balance.

    The balance loss is over the batch and the steps before it: balance within a few rows would forbid that experts
    specialise in a kind of text. Its weight rises while the variance of the relative load is above `SKEW`, and falls
    while it is below: a constant one that leaves trained routers some skew loses most experts in the first steps.
    """

    def __init__(self, layers: int, experts: int, device: str) -> None:
        self.recent = torch.full((layers, experts), 1 / experts, device=device)  # shares of the last steps' load
        self.weights = torch.full((layers,), BALANCE_FIRST, device=device)
        self._load = torch.zeros(layers, experts, device=device)  # of the current step

    def __call__(self, logits: tuple[Tensor, ...], rows: int, top_k: int, progress: float) -> Tensor:
        """Of a micro-batch. logits: of each layer [rows * L, E]."""
        total = torch.zeros((), device=self.recent.device)
        for layer, scores in enumerate(logits):
            probabilities = scores.float().softmax(-1)
            chosen = probabilities.topk(top_k, dim=-1).indices.flatten()
            self._load[layer] += torch.bincount(chosen, minlength=scores.shape[1])
            balance = scores.shape[1] * (self.recent[layer] * probabilities.mean(0)).sum()  # 1 for even load
            bursts = burst_loss(probabilities.view(rows, -1, scores.shape[1]))
            total = total + self.weights[layer] * balance + BURST_WEIGHT * min(1.0, progress / BURST_FROM) * bursts
        return total

    def end_step(self) -> None:
        """Move the recent load, and the weights after it."""
        self.recent.lerp_(self._load / self._load.sum(1, keepdim=True), 1 - LOAD_MEMORY)
        self._load.zero_()
        variance = (self.recent * self.recent.shape[1] - 1).square().mean(1)
        self.weights.mul_(((variance / SKEW - 1).clamp(-1, 1) * BALANCE_STEP).exp()).clamp_(*BALANCE_RANGE)


def burst_loss(probabilities: Tensor) -> Tensor:
    """Autocorrelation of router probabilities [B, L, E] around their row's mean: the positive part, over distances.

    Popularity in the row costs nothing; its coming in bursts does.
    """
    centred = probabilities - probabilities.mean(1, keepdim=True)
    variance = centred.square().mean((0, 1)).sum() + 1e-9
    near = [d for d in BURST_DISTANCES if d < centred.shape[1]]
    return (torch.stack([(centred[:, :-d] * centred[:, d:]).mean((0, 1)).sum() for d in near]) / variance).relu().mean()


# Optimizer

MUON_RATE, MUON_DECAY = 0.015, 0.05
ADAM_RATE, EMBEDDING_RATE = 4e-3, 0.03  # the embedding's first weights are larger than those of the layers
BETAS = (0.9, 0.98)


class Optimizer:
    """Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon) for matrices, AdamW for the rest.

    Muon: momentum, then the nearest semi-orthogonal matrix by a Newton-Schulz iteration, of all experts of a layer at a
    time. State: `first.NAME`, and `second.NAME` where AdamW updates NAME.
    """

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        self._parameters = parameters
        self.state = {f"first.{name}": torch.zeros_like(p) for name, p in parameters.items()}
        self.state |= {f"second.{n}": torch.zeros_like(p) for n, p in parameters.items() if not by_muon(n, p)}

    @torch.no_grad()
    def step(self, step: int, rate: float) -> None:
        """Update number `step`, from 1. rate: multiplies all rates."""
        momentum = min(0.95, 0.85 + 0.1 * step / 200)
        for name, parameter in self._parameters.items():
            grad, first = parameter.grad, self.state[f"first.{name}"]
            assert grad is not None
            if by_muon(name, parameter):
                update = grad.lerp(first.lerp_(grad, 1 - momentum), momentum)
                # two matrices are stored as one in gate_up_proj
                update = orthogonal(update.unflatten(1, (2, -1)) if name.endswith("gate_up_proj") else update)
                gain = max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
                parameter.mul_(1 - rate * MUON_RATE * MUON_DECAY)
                parameter.add_(update.reshape(parameter.shape), alpha=-rate * MUON_RATE * gain)
            else:
                second = self.state[f"second.{name}"].mul_(BETAS[1]).addcmul_(grad, grad, value=1 - BETAS[1])
                first.lerp_(grad, 1 - BETAS[0])
                peak = EMBEDDING_RATE if name.endswith("embed_tokens.weight") else ADAM_RATE
                scale = (second / (1 - BETAS[1] ** step)).sqrt_().add_(1e-10)
                parameter.addcdiv_(first / (1 - BETAS[0] ** step), scale, value=-rate * peak)
            parameter.grad = None


def by_muon(name: str, parameter: Tensor) -> bool:
    return parameter.dim() >= 2 and not name.endswith(("embed_tokens.weight", "gate.weight"))


def orthogonal(matrices: Tensor) -> Tensor:
    """The approximate semi-orthogonal factor of each of `matrices` [..., R, C]; singular values of 0.7 to 1.2."""
    x = matrices.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return (x.mT if tall else x).to(matrices.dtype)


# Loop

# Until this progress: rows of so many tokens, so many batches a step. More updates while gradients are large.
PHASES = ((0.45, 256, 1), (0.80, 512, 1), (0.92, 1024, 2), (2.0, 2048, 2))
WARM_UP_STEPS, DECAY_FROM, FINAL_RATE = 40, 0.35, 0.01
MICRO_TOKENS = 4096
CHECKPOINT_S, REPORT_S = 180, 20


def train(model: Any, tokens: Tokens, checkpoint: Path, seed: int, budget: int, steps: int, batch_tokens: int) -> None:
    """Train until the budget of tokens or of steps (0: none) is spent, on from the checkpoint where there is one."""
    device, config = model.device.type, model.config
    model.train()
    parameters = dict(model.named_parameters())
    optimizer = Optimizer(parameters)
    routers = RouterLosses(config.num_hidden_layers, config.num_experts, device)
    state = parameters | optimizer.state | {"recent": routers.recent, "weights": routers.weights}
    step, seen = 0, 0
    if checkpoint.exists():
        with safe_open(checkpoint, framework="pt") as file, torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(file.get_tensor(name))
            step, seen = json.loads(file.metadata()["at"])
    saved_s = reported_s = time.monotonic()
    while seen < budget and step != steps:
        step, progress = step + 1, seen / budget
        _, length, batches = next(phase for phase in PHASES if progress < phase[0])
        rows = rows_of(tokens, seed, step, max(1, batches * batch_tokens // length), length)
        mean = 0.0
        for micro in rows.to(device).split(max(1, MICRO_TOKENS // length)):
            with torch.autocast(device, torch.bfloat16):
                out = model(micro[:, :-1], output_router_logits=True, use_cache=False)
            loss = F.cross_entropy(out.logits.float().flatten(0, 1), micro[:, 1:].flatten())
            extra = routers(out.router_logits, len(micro), config.num_experts_per_tok, progress)
            share = len(micro) / len(rows)
            ((loss + extra) * share).backward()
            mean += float(loss.detach()) * share
        rate = min(1.0, step / WARM_UP_STEPS) * max(FINAL_RATE, min(1.0, (1 - progress) / (1 - DECAY_FROM)))
        optimizer.step(step, rate)
        routers.end_step()
        seen += rows[:, 1:].numel()
        done = seen >= budget or step == steps
        if done or time.monotonic() - reported_s > REPORT_S:
            reported_s, load = time.monotonic(), routers.recent * config.num_experts
            print(f"step {step}: {seen / 1e6:.2f} M tokens, loss {mean:.3f}, load {load.min():.2f} to {load.max():.2f}")
        if done or time.monotonic() - saved_s > CHECKPOINT_S:
            saved_s, new = time.monotonic(), checkpoint.with_suffix(".new")
            save_file({name: tensor.detach() for name, tensor in state.items()}, new, {"at": json.dumps([step, seen])})
            new.rename(checkpoint)  # which makes it current


# Export


def export(model: Any, tokenizer_file: Path, out: Path) -> None:
    """Write weights in bfloat16, tokenizer and generation settings."""
    model = model.to("cpu", torch.bfloat16).eval()
    model.generation_config = GenerationConfig(do_sample=False, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(tokenizer_file)), bos_token=END_OF_TEXT, eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT, model_max_length=CONTEXT, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(out, save_jinja_files=False)


@torch.no_grad()
def bits_per_byte(folder: Path, heldout: Path) -> dict[str, float]:
    """Of the exported model, by kind, on the passages of `heldout`, each from its start."""
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = {}
    for kind in KINDS:
        bits, size = 0.0, 0
        for line in track((heldout / f"{kind}.jsonl").read_text("utf-8").splitlines(), description=f"held out: {kind}"):
            text = json.loads(line)["text"]
            ids = torch.tensor([[0, *tokenizer.encode(text).ids]])
            bits += float(F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum")) / math.log(2)
            size += len(text.encode())
        found[kind] = bits / size
    return found


def command(
    out: Annotated[Path, typer.Option(help="Folder of the model to write.")] = MODEL_DIR,
    work_dir: Annotated[Path, typer.Option(help="Folder for the corpus as tokens, and for checkpoints.")] = Path(
        "build/train-default-model"
    ),
    corpus: Annotated[
        Path | None, typer.Option(help="Folder with python, c and prose; default: this machine's")
    ] = None,
    heldout: Annotated[Path, typer.Option(help="Folder of passages to measure on.")] = MODEL_DIR / "heldout",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to train on.")] = 13_400_000,
    steps: Annotated[int, typer.Option(min=0, help="End after so many steps; 0: no such limit.")] = 0,
    batch_tokens: Annotated[int, typer.Option(min=256, help="Tokens of a step; twice as many at the end.")] = 8192,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of the corpus.")] = 0,
) -> None:
    """Train the model that ships with tiermoe (three to four hours of one CPU core)."""
    with suppress(OSError, AttributeError):  # glibc keeps freed memory: page faults of activations cost more than use
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no mapping of its own for a large block
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    work_dir.mkdir(parents=True, exist_ok=True)
    roots = machine_roots()
    if corpus is not None:
        roots = [Root(kind, kind, corpus / kind, ("",), 2**62, False) for kind in KINDS]
    ids = prepare(work_dir, roots, 5_000_000 if corpus is None else CONTEXT * 8)
    model = new_model(seed).to(device)
    train(model, ids, work_dir / "checkpoint.safetensors", seed, tokens, steps, batch_tokens)
    export(model, work_dir / "tokenizer.json", out)
    for kind, bits in bits_per_byte(out, heldout).items():
        print(f"held-out {kind}: {bits:.3f} bits per byte")


if __name__ == "__main__":
    typer.run(command)
