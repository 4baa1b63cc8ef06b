"""The work folder of a run: tokenizer, tokenised corpus, held-out passages; and the order in which rows are read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from corpus import KINDS, Document, collect, default_roots, installed_licences
from passages import choose_passages, write_passages
from tiermoe.errors import TierMoeError

VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"
MIXTURE = {"python": 0.40, "c": 0.24, "prose": 0.36}
TOKENIZER_BYTES_PER_KIND = 8_000_000
_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class CorpusTooSmallError(TierMoeError):
    """This machine has too little text of some kind to train on."""


def prepare(work_dir: Path, least_bytes_per_kind: int = 5_000_000) -> dict[str, Any]:
    """Fill ``work_dir`` unless it is filled; returns the corpus summary. Raises CorpusTooSmallError."""
    summary_path = work_dir / "corpus.json"
    if summary_path.exists():
        return dict(json.loads(summary_path.read_text()))
    work_dir.mkdir(parents=True, exist_ok=True)
    documents = collect(default_roots())
    summary = summarise(documents)
    for kind in KINDS:
        if summary["train_bytes"].get(kind, 0) < least_bytes_per_kind:
            raise CorpusTooSmallError(
                f"found {summary['train_bytes'].get(kind, 0)} bytes of kind {kind}, need {least_bytes_per_kind}",
                "install packages with sources, headers or documentation",
            )
    tokenizer = train_tokenizer(_tokenizer_sample(documents))
    tokenizer.save(str(work_dir / "tokenizer.json"))
    (work_dir / "token_bytes.json").write_text(json.dumps(token_byte_lengths(tokenizer)))
    tokenise(documents, tokenizer, work_dir / "tokens")
    write_passages(choose_passages(documents, installed_licences()), work_dir / "heldout")
    summary_path.write_text(json.dumps(summary, indent=1))
    return summary


def summarise(documents: list[Document]) -> dict[str, Any]:
    """Documents and bytes of the two parts by kind, and the bytes by root."""
    parts = ("train_documents", "train_bytes", "heldout_documents", "heldout_bytes", "root_bytes")
    summary: dict[str, Counter[str]] = {name: Counter() for name in parts}
    for document in documents:
        part = "heldout" if document.held_out else "train"
        summary[f"{part}_documents"][document.kind] += 1
        summary[f"{part}_bytes"][document.kind] += document.size
        summary["root_bytes"][document.name.split("/")[0]] += document.size
    return {name: dict(counts) for name, counts in summary.items()}


def _tokenizer_sample(documents: list[Document]) -> Iterator[str]:
    for kind in KINDS:
        left = TOKENIZER_BYTES_PER_KIND
        for document in documents:
            if document.kind == kind and not document.held_out and left > 0:
                left -= len(document.text[:20_000])
                yield document.text[:20_000]


def train_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE trained on ``texts``; id 0 is ``<|endoftext|>``, the only special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=24,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_byte_lengths(tokenizer: Tokenizer) -> list[int]:
    """The bytes of each token id; 0 for the special token."""
    size = tokenizer.get_vocab_size()
    # A byte-level token spells each byte as one character.
    return [0 if i == 0 else len(tokenizer.id_to_token(i)) for i in range(size)]


def tokenise(documents: list[Document], tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``{train,heldout}-{kind}.bin``: uint16 ids, ``<|endoftext|>`` before each document."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        for held_out, name in ((False, "train"), (True, "heldout")):
            chosen = [d.text for d in documents if d.kind == kind and d.held_out == held_out]
            with (folder / f"{name}-{kind}.bin").open("wb") as out:
                starts = range(0, len(chosen), 256)
                for start in track(starts, description=f"tokenise {name} {kind}"):
                    for encoding in tokenizer.encode_batch(chosen[start : start + 256]):
                        out.write(np.array([0, *encoding.ids], dtype=np.uint16).tobytes())


class BatchStream:
    """Rows of tokens, drawn without replacement within a kind and a row length.

    ``drawn`` counts the rows of each (kind, length); with the seed it determines the rest, so that a run can resume.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._seed = seed
        self._tokens = {kind: np.memmap(folder / f"train-{kind}.bin", dtype=np.uint16, mode="r") for kind in KINDS}
        self._orders: dict[tuple[str, int, int], NDArray[np.int64]] = {}
        self.drawn: dict[str, int] = {}

    def next_rows(self, rows: int, length: int) -> NDArray[np.int64]:
        """Array [rows, length + 1]: inputs and, shifted by one, targets."""
        rng = np.random.default_rng([self._seed, sum(self.drawn.values()), length])
        kinds = rng.choice(len(KINDS), size=rows, p=[MIXTURE[kind] for kind in KINDS])
        return np.stack([self._row(KINDS[kind], length) for kind in kinds])

    def _row(self, kind: str, length: int) -> NDArray[np.int64]:
        key = f"{kind}:{length}"
        index = self.drawn.get(key, 0)
        self.drawn[key] = index + 1
        tokens = self._tokens[kind]
        blocks = (len(tokens) - 1) // length
        start = int(self._order(kind, length, index // blocks, blocks)[index % blocks]) * length
        return tokens[start : start + length + 1].astype(np.int64)

    def _order(self, kind: str, length: int, epoch: int, blocks: int) -> NDArray[np.int64]:
        key = (kind, length, epoch)
        if key not in self._orders:
            rng = np.random.default_rng([self._seed, KINDS.index(kind), length, epoch])
            self._orders[key] = rng.permutation(blocks)
        return self._orders[key]
