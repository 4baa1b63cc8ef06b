"""Prompts from a file: one text a line, or one JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path

from ....errors import RequestError
from ...prompt import encode_prompt, load_tokenizer

_TEXT_KEYS = ("prompt", "text")
_REMEDY = 'give lines of text, or JSON lines with "prompt", "text" or "token_ids"'


def read_prompts(file: Path, model_dir: Path, limit: int | None = None) -> list[tuple[int, ...]]:
    """Token ids of each prompt; empty lines are passed over.

    Args:
        file: `.jsonl` for JSON lines, anything else is text. limit: prompts to read at most.

    Raises:
        RequestError: the file cannot be read, has no prompt, or a line is malformed.
        CheckpointError: the model's tokenizer cannot be read.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"prompts '{file}' cannot be read: {error}", "give a readable UTF-8 file") from error
    tokenizer = load_tokenizer(model_dir)
    prompts: list[tuple[int, ...]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (limit is not None and len(prompts) >= limit):
            continue
        prompt = _prompt_of(line, f"{file}:{number}") if file.suffix == ".jsonl" else line
        try:
            prompts.append(encode_prompt(tokenizer, prompt) if isinstance(prompt, str) else prompt)
        except RequestError as error:
            raise RequestError(f"{file}:{number}: {error.what}", error.remedy) from error
    if not prompts:
        raise RequestError(f"'{file}' has no prompt", _REMEDY)
    return prompts


def _prompt_of(line: str, where: str) -> str | tuple[int, ...]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{where} is no JSON: {error}", _REMEDY) from error
    if isinstance(entry, dict):
        for key in _TEXT_KEYS:
            if isinstance(entry.get(key), str):
                return str(entry[key])
        ids = entry.get("token_ids")
        if isinstance(ids, list) and ids and all(type(i) is int for i in ids):
            return tuple(ids)
    raise RequestError(f"{where} has no prompt", _REMEDY)
