"""The work folder of a run: tokenizer, tokenised corpus, held-out passages. Made once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ....errors import TierMoeError
from .corpus import Document, collect
from .heldout import choose_passages, write_passages
from .sources import KINDS, default_roots, installed_licences
from .tokenizer import token_byte_lengths, train_tokenizer
from .tokens import tokenise

_TOKENIZER_BYTES_PER_KIND = 8_000_000
_SUMMARY = "corpus.json"


class CorpusTooSmallError(TierMoeError):
    """This machine has too little text of some kind to train on."""


def prepare(work_dir: Path, least_bytes_per_kind: int = 5_000_000) -> dict[str, Any]:
    """Fill ``work_dir`` unless it is filled already; returns the corpus summary.

    Raises CorpusTooSmallError.
    """
    summary_path = work_dir / _SUMMARY
    if summary_path.exists():
        return dict(json.loads(summary_path.read_text()))
    work_dir.mkdir(parents=True, exist_ok=True)
    documents = collect(default_roots())
    summary = summarise(documents)
    for kind in KINDS:
        if summary["train_bytes"].get(kind, 0) < least_bytes_per_kind:
            raise CorpusTooSmallError(
                f"found {summary['train_bytes'].get(kind, 0)} bytes of kind {kind}, need {least_bytes_per_kind}",
                "install packages with sources, headers or documentation"
            )
    tokenizer = train_tokenizer(_sample(documents))
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
        size = len(document.text.encode())
        summary[f"{part}_documents"][document.kind] += 1
        summary[f"{part}_bytes"][document.kind] += size
        summary["root_bytes"][document.name.split("/")[0]] += size
    return {name: dict(counts) for name, counts in summary.items()}


def _sample(documents: list[Document]) -> Iterator[str]:
    for kind in KINDS:
        left = _TOKENIZER_BYTES_PER_KIND
        for document in documents:
            if document.kind == kind and not document.held_out and left > 0:
                left -= len(document.text[:20_000])
                yield document.text[:20_000]
