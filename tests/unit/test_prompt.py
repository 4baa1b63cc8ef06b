"""Prompts into tokens and back, and the limits of a request."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import save_byte_tokenizer
from tokenizers import Tokenizer

from tiermoe.actors.settings import KvSettings
from tiermoe.cluster.detokenizer import IncrementalText
from tiermoe.cluster.prompt import (
    check_length,
    encode_prompt,
    load_model_config,
    load_tokenizer,
)
from tiermoe.errors import CheckpointError, RequestError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(directory)
    return load_tokenizer(directory)


def test_characters_come_whole_and_prompts_without_any_are_refused(tokenizer: Tokenizer) -> None:
    stream = IncrementalText(tokenizer)
    assert [stream.add([token]) for token in tokenizer.encode("é!").ids] == ["", "é", "!"]
    for text, words in (("", "prompt is empty"), ("\udcff", "not valid Unicode")):
        with pytest.raises(RequestError, match=words):
            encode_prompt(tokenizer, text)


def test_two_numbers_of_experts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_local_experts": 32, "num_experts": 1000000000}')
    with pytest.raises(CheckpointError, match="num_local_experts 32 and num_experts 1000000000"):
        load_model_config(tmp_path)


def test_length_limits() -> None:
    kv = KvSettings(page_size=4, num_blocks=4)
    check_length(8, 8, {"max_position_embeddings": 16}, kv)
    check_length(8, 8, {}, kv)
    with pytest.raises(RequestError, match="9 prompt tokens and 8 to generate exceed the model's 16 positions"):
        check_length(9, 8, {"max_position_embeddings": 16}, kv)
    with pytest.raises(RequestError, match=r"KV cache of 16 tokens.*--kv-tokens"):
        check_length(9, 8, {"max_position_embeddings": 99}, kv)


def test_broken_model_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="not a JSON object"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 7}}')
    assert load_model_config(tmp_path) == {"max_position_embeddings": 7}
