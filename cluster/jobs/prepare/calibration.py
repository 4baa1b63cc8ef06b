"""Calibration text: files into windows of tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from ....actors.store.replicas import Calibration
from ....errors import ConfigError, reason
from ...prompt import check_vocabulary, load_model_config, load_tokenizer
from ...report.tables import show

WINDOW_TOKENS = 512
MAX_TOKENS = 1 << 16  # unless the caller says other; the expert inputs of every token and layer are written to disk
LEAST_TOKENS = 64
_FOLDER = "calibration"  # in the folder of a model that ships text
_REMEDY = "give UTF-8 text: a .txt file, a .jsonl file with a \"text\" in each line, or a folder of such"


@dataclass(frozen=True)
class Windows:
    """Token ids int64 [N, window] of one stream of all texts."""

    ids: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        return self.ids.size

    def record(self) -> Calibration:
        """The digest that identifies the text in manifests."""
        shape = f"{self.ids.shape}".encode()
        return Calibration(
            sha256=hashlib.sha256(shape + np.ascontiguousarray(self.ids, dtype="<i8").tobytes()).hexdigest(),
            tokens=self.tokens,
        )


def shipped_calibration(model_dir: Path) -> Path | None:
    """The calibration text that ships with a model, if any."""
    folder = model_dir / _FOLDER
    return folder if folder.is_dir() else None


def read_windows(path: Path, model_dir: Path, console: Console, most: int = MAX_TOKENS) -> Windows:
    """The windows of a calibration text for a model's tokenizer.

    Texts are tokenised one by one with special tokens, joined and split; a rest shorter than a window is dropped. Of
    more than `most` tokens, whole windows evenly spaced over the text are taken, and a line says so.

    Raises:
        ConfigError: no such file, not text, or less than `LEAST_TOKENS` tokens.
        CheckpointError: the model has no tokenizer, or another model's.
    """
    tokenizer = load_tokenizer(model_dir)
    stream = [token for text in read_texts(path) for token in tokenizer.encode(text).ids]
    if len(stream) < LEAST_TOKENS:
        raise ConfigError(
            f"calibration text '{path}' has {len(stream)} tokens",
            f"give at least {LEAST_TOKENS}, better ten thousand or more",
        )
    config = load_model_config(model_dir)
    check_vocabulary(stream, config, model_dir)
    longest = config.get("max_position_embeddings")
    window = min(WINDOW_TOKENS, len(stream), longest if isinstance(longest, int) else WINDOW_TOKENS)
    count = len(stream) // window
    windows = np.array(stream[: count * window], dtype=np.int64).reshape(count, window)
    if (taken := max(1, most // window)) < count:
        show(console, f"calibration uses {taken * window} of {len(stream)} tokens of {path}")
        windows = windows[np.linspace(0, count - 1, taken).astype(np.int64)]
    return Windows(windows)


def read_texts(path: Path) -> list[str]:
    """The texts of a file, or of a folder's .txt and .jsonl files by name. Raises ConfigError: none, or not text."""
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix in (".txt", ".jsonl") and p.is_file())
        if not files:
            raise ConfigError(f"calibration folder '{path}' has no .txt and no .jsonl file", _REMEDY)
    else:
        files = [path]
    return [text for file in files for text in _texts_of(file)]


def _texts_of(file: Path) -> Iterator[str]:
    if file.suffix not in (".txt", ".jsonl"):
        raise ConfigError(f"calibration file '{file}' is neither .txt nor .jsonl", _REMEDY)
    try:
        content = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"calibration file '{file}': {reason(error)}", _REMEDY) from error
    if file.suffix == ".txt":
        yield content
        return
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(f"calibration file '{file}', line {number} has no \"text\"", _REMEDY) from error
        if not isinstance(text, str):
            raise ConfigError(f"calibration file '{file}', line {number}: \"text\" is not a text", _REMEDY)
        yield text
