"""What the driver reads of a checkpoint, and text into token ids; without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..actors.requests import SamplingParams
from ..actors.settings import KvSettings
from ..actors.tokenizer import is_tokenizer_file, is_vocabulary, read_tokenizer
from ..errors import CheckpointError, RequestError
from .checkpoints.weight_files import OTHER_CONFIG, read_json_object, refuse_unreadable
from .host import shown

_MAX_TOKENS = 1_000_000
_MAX_TEMPERATURE = 2.0
_MAX_SEED = 2**63 - 1

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")  # the names in use


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """The model's tokenizer, with the ids and texts of transformers' `AutoTokenizer`, without truncation and padding.

    Raises:
        CheckpointError: the folder has none, one of its files is malformed, or `tokenizers` cannot carry it out.
    """
    folder = model_dir.absolute()
    files = sorted(file for file in folder.iterdir() if is_tokenizer_file(file.name)) if folder.is_dir() else []
    whole = folder / "tokenizer.json"
    for file in files:
        if file == whole or whole not in files or not is_vocabulary(file.name):  # others do not count beside it
            refuse_unreadable(file)
    try:
        return read_tokenizer(folder).tokenizer()
    except CheckpointError as error:
        what = error.what
        for path in (*files, folder):  # of a GGUF file the folder is in the cache
            what = what.replace(f"'{path}'", f"'{shown(path)}'")
        raise CheckpointError(what, error.remedy) from error


def load_model_config(model_dir: Path) -> dict[str, Any]:
    """The text model's part of config.json.

    Raises:
        CheckpointError: config.json is not a JSON object, or gives two numbers of experts.
    """
    config = read_json_object(model_dir / "config.json")
    inner = config.get("text_config")  # multimodal checkpoints nest the language model
    config = inner if isinstance(inner, dict) else config
    counts = {name: config[name] for name in EXPERT_COUNTS if isinstance(config.get(name), int)}
    if len(set(counts.values())) > 1:
        found = " and ".join(f"{name} {count}" for name, count in counts.items())
        raise CheckpointError(f"'{shown(model_dir / 'config.json')}' has {found}", OTHER_CONFIG)
    return config


def encode_prompt(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Token ids of a prompt.

    Raises:
        RequestError: the prompt is empty, not encodable, or yields no token.
    """
    if not text:
        raise RequestError("the prompt is empty", "pass a PROMPT with at least one character")
    try:
        ids = tuple(tokenizer.encode(text).ids)
    except (TypeError, UnicodeEncodeError) as error:
        raise RequestError("the prompt is not valid Unicode text", "pass UTF-8 text") from error
    if not ids:
        raise RequestError("the prompt yields no token", "pass a longer PROMPT")
    return ids


def check_vocabulary(ids: Iterable[int], model_config: Mapping[str, Any], model_dir: Path) -> None:
    """Raise CheckpointError if the model, by its configuration as from `load_model_config`, has no such token."""
    highest, vocabulary = max(ids, default=0), model_config.get("vocab_size")
    if isinstance(vocabulary, int) and highest >= vocabulary:
        raise CheckpointError(
            f"the tokenizer of '{shown(model_dir)}' gives token {highest}, the model has {vocabulary}",
            "pass a checkpoint with its own tokenizer",
        )


def check_length(prompt_tokens: int, max_tokens: int, model_config: dict[str, Any], kv: KvSettings) -> None:
    """Refuse a request that cannot fit, before anything is started.

    Args:
        model_config: as from `load_model_config`; `max_position_embeddings` bounds the positions where it is there.

    Raises:
        RequestError: prompt and generation exceed the model's positions or the KV cache.
    """
    asked = f"{prompt_tokens} prompt tokens and {max_tokens} to generate"
    positions = model_config.get("max_position_embeddings")
    if isinstance(positions, int) and prompt_tokens + max_tokens > positions:
        raise RequestError(
            f"{asked} exceed the model's {positions} positions", "shorten the prompt or lower --max-tokens"
        )
    if prompt_tokens + max_tokens > kv.request_tokens:
        limit = "the KV cache of" if kv.max_model_len is None else "--max-model-len, which is"
        raise RequestError(
            f"{asked} exceed {limit} {kv.request_tokens} tokens",
            "shorten the prompt, lower --max-tokens, or raise --kv-tokens, and --max-model-len where that is set",
        )


def sampling_params(
    max_tokens: int, temperature: float, top_p: float, top_k: int, seed: int | None
) -> SamplingParams:
    """Checked sampling options.

    Raises:
        RequestError: a value is out of range; the message names its option.
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    try:
        if not 1 <= max_tokens <= _MAX_TOKENS:
            raise RequestError(f"max_tokens is {max_tokens}", f"give a number from 1 to {_MAX_TOKENS}")
        params.check()
        if temperature > _MAX_TEMPERATURE:
            raise RequestError(f"temperature is {temperature}", f"give 0 (greedy) to {_MAX_TEMPERATURE:g}")
        if seed is not None and seed > _MAX_SEED:
            raise RequestError(f"seed is {seed}", "give a number from 0 to 2^63-1")
    except RequestError as error:
        name, _, rest = error.what.partition(" ")
        raise RequestError(f"--{name.replace('_', '-')} {rest}", error.remedy) from None
    return params
