"""The tokenizer of a GGUF file: ids of llama.cpp on strings on which tokenizers differ, or a refusal by name.

The ids in tests/golden/gguf.json are llama.cpp's; `tests/llama_reference.py` writes them.
"""

from __future__ import annotations

import importlib.util
import json
import random
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import llama_reference
import pytest
from gguf_vocabularies import SPECIAL, TEXTS, byte_level, sentencepiece, vocabularies
from ggufs import vocabulary
from tokenizers import Tokenizer

from tiermoe.cluster.api.templates import load_chat_template
from tiermoe.cluster.checkpoints.gguf_header import read_gguf
from tiermoe.cluster.checkpoints.gguf_tokenizer import save_tokenizer
from tiermoe.cluster.checkpoints.hub import locate
from tiermoe.cluster.prompt import load_tokenizer
from tiermoe.errors import CheckpointError, UnsupportedModelError

GOLDEN = json.loads(llama_reference.GOLDEN.read_text())
NAMES = [name for name, found in GOLDEN.items() if "ids" in found]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return vocabularies(tmp_path_factory.mktemp("vocabularies"))


def made(file: Path) -> Tokenizer:
    save_tokenizer(read_gguf([file], texts=True), file.parent)
    return load_tokenizer(file.parent)


def settings(file: Path, name: str) -> dict[str, Any]:
    return json.loads((file.parent / name).read_text())


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_llama_cpp(name: str, files: Mapping[str, Path]) -> None:
    """Leading spaces, runs of spaces, special tokens, bytes, marks, digits of every script, ends of lines."""
    tokenizer = made(files[name])
    for text, ids in zip(TEXTS, GOLDEN[name]["ids"], strict=True):
        assert tokenizer.encode(text).ids == ids, text
    ends = settings(files[name], "generation_config.json")["eos_token_id"]
    assert sorted(ends) == GOLDEN[name]["ends"]


def test_the_vocabularies_are_those_that_were_recorded(files: Mapping[str, Path]) -> None:
    assert list(files) == NAMES


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
def test_ids_of_random_texts_are_those_of_llama_cpp(files: Mapping[str, Path]) -> None:
    random_ = random.Random(1)
    known = [chr(c) for c in range(0x250) if unicodedata.category(chr(c)) != "Cn"] + list("漢かアनม👍🏽\u0301Ж\u3000")
    letters = [random_.choice(known) for _ in range(40)] + list(" \n\t'019.,!aAbB\u2581")
    texts = ["".join(random_.choice(letters) for _ in range(random_.randint(1, 40))) for _ in range(400)]
    texts += ["".join(random_.choice(TEXTS)[:9] for _ in range(5)) for _ in range(400)]
    for file in files.values():
        tokenizer = made(file)
        assert [tokenizer.encode(text).ids for text in texts] == llama_reference.tokens(file, texts)["ids"]


@pytest.mark.parametrize("name", ["llama", "llama without prefix", "gpt2 qwen2"])
def test_decoding_gives_the_text(name: str, files: Mapping[str, Path]) -> None:
    tokenizer = made(files[name])
    for text in TEXTS:
        if not any(token in text for token in (*SPECIAL, "\u2581")):
            assert tokenizer.decode(tokenizer.encode(text).ids) == text


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "an unknown pre-tokenizer": (lambda file: byte_level(file, "kimi-k2"), "'tokenizer.ggml.pre' = 'kimi-k2'"),
    "an unknown model": (lambda file: vocabulary(file, "t5", ["a"], [1]), "'t5'"),
    "no model": (lambda file: vocabulary(file, "none", ["a"], [1]), "'none'"),
    "a token twice": (lambda file: vocabulary(file, "llama", ["a", "b", "a"], [1] * 3), "'a' occurs twice"),
    "a merge without a token": (
        lambda file: vocabulary(file, "gpt2", ["a", "b"], [1, 1], merges=["a b"]), "'a b'"),
    "no merges": (lambda file: vocabulary(file, "gpt2", ["a"], [1]), "merges"),
    "a letter that is no token": (
        lambda file: vocabulary(file, "llama", ["a", "ab"], [1, 1], scores=[0.0, 0.0]), "'b', which is not a token"),
    "merges of one score": (
        lambda file: vocabulary(file, "llama", ["a", "b", "c", "ab", "bc"], [1] * 5, scores=[0.0] * 5), "one score"),
    "bos without a token": (
        lambda file: byte_level(file, "qwen2", add_bos_token=True, bos_token_id=99999), "add_bos_token"),
    "suppressed tokens": (lambda file: byte_level(file, "qwen2", suppress_tokens=[3]), "suppress_tokens"),
    "scores of too few tokens": (lambda file: vocabulary(file, "llama", ["a", "b"], [1, 1], scores=[0.0]), "scores"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_give_other_ids_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    make, named = REFUSED[kind]
    with pytest.raises(CheckpointError) as raised:
        made(make(tmp_path / "m.gguf"))
    assert named in raised.value.what
    assert "m.gguf" in raised.value.what


def test_of_special_tokens_that_overlap_the_first_counts(tmp_path: Path) -> None:
    """As in OLMoE's own tokenizer, which has such tokens; llama.cpp would take the longer."""
    tokens = ["|||IP|||", "|||MAIL|||", "|", "I", "P", "M", "A", "L", "MA"]
    file = vocabulary(tmp_path / "m.gguf", "gpt2", tokens, [4, 4] + [1] * 7, merges=["M A"], pre="olmo")
    assert made(file).encode("|||IP|||MAIL|||").ids == [0, 8, 3, 7, 2, 2, 2]
    assert made(file).encode("|||MAIL||||||IP|||").ids == [1, 0]


def test_a_model_that_strips_after_special_tokens_is_refused(tmp_path: Path) -> None:
    header = read_gguf([sentencepiece(tmp_path / "m.gguf")], texts=True)
    header.metadata["general.name"] = "Phi-3.5-MoE"
    with pytest.raises(UnsupportedModelError, match=r"phi-3\.5-moe"):
        save_tokenizer(header, tmp_path)


def test_more_tokens_than_embeddings(tmp_path: Path) -> None:
    from ggufs import model, rewrite

    file = sentencepiece(tmp_path / "v.gguf")
    tokens = read_gguf([file], texts=True).metadata["tokenizer.ggml.tokens"]
    keys = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens}
    out = rewrite(model(tmp_path / "m.gguf", "llama"), tmp_path / "out" / "m.gguf", keys)[0]
    with pytest.raises(CheckpointError, match="embeddings of 64"):
        made(out)


def test_special_tokens_and_ends(tmp_path: Path) -> None:
    """llama.cpp ends at tokens that it knows by their text, and at the named ones; also where their type is normal."""
    tokens = [*SPECIAL, "a", "b", "<|eot_id|>", "<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<x>", "<y>"]
    types = [2, 3, 3, 3, 3, 4, 1, 1, 1, 1, 1, 3, 3, 3]
    keys = {"merges": ["a b"], "pre": "qwen2", "eos_token_id": 12, "eot_token_id": 13, "padding_token_id": 5}
    file = vocabulary(tmp_path / "m.gguf", "gpt2", [*tokens, "ab"], [*types, 1], **keys)
    tokenizer = made(file)
    assert tokenizer.encode("ab<|eot_id|>").ids == [14, 8]
    found = settings(file, "generation_config.json")
    assert found["eos_token_id"][:2] == [12, 13]
    assert set(found["eos_token_id"]) == {2, 4, 8, 9, 10, 11, 12, 13}
    assert found["pad_token_id"] == 5
    assert settings(file, "tokenizer_config.json")["eos_token"] == "<x>"


def test_tokens_after_the_end_of_a_message(tmp_path: Path) -> None:
    """gpt-oss: `<|end|>` ends a message, `<|return|>` and `<|call|>` the generation; its channels are text."""
    tokens = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "a", "b", "ab"]
    keys = {"merges": ["a b"], "pre": "gpt-4o", "eos_token_id": 4}
    file = vocabulary(tmp_path / "m.gguf", "gpt2", tokens, [3] * 6 + [1] * 3, **keys)
    tokenizer = made(file)
    assert sorted(settings(file, "generation_config.json")["eos_token_id"]) == [4, 5]
    assert tokenizer.decode([3, 8, 1, 4]) == "<|channel|>ab<|end|>"


def test_defaults_of_sampling(tmp_path: Path) -> None:
    """`general.sampling` by transformers' names; what has none there is named to the user as not carried out."""
    from ggufs import rewrite

    from tiermoe.cluster.checkpoints.generation import read_defaults

    tokens = [*SPECIAL, "a", "b", "ab"]
    plain = vocabulary(tmp_path / "m.gguf", "gpt2", tokens, [2, 3, 3, 3, 3, 4, 1, 1, 1], merges=["a b"], pre="qwen2")
    keys = {
        "general.sampling.temp": 0.7, "general.sampling.top_k": 20, "general.sampling.top_p": 0.95,
        "general.sampling.min_p": 0.0, "general.sampling.penalty_last_n": 64, "general.sampling.mirostat": 2,
    }  # fmt: skip
    file = rewrite(plain, tmp_path / "sampled" / "m.gguf", keys)[0]
    made(file)
    found = read_defaults(file.parent)
    assert found.values == {"temperature": 0.7, "top_p": 0.95, "top_k": 20, "min_p": 0.0}
    assert found.not_carried_out == ("mirostat",)
    file = rewrite(file, tmp_path / "penalized" / "m.gguf", {"general.sampling.penalty_repeat": 1.1})[0]
    made(file)
    found = read_defaults(file.parent)
    assert found.values["repetition_penalty"] == 1.1
    assert found.not_carried_out == ("penalty_last_n", "mirostat")  # of which tokens: here of all


def test_chat_templates(tmp_path: Path) -> None:
    one = byte_level(_file(tmp_path, "one"), "qwen2")
    header = read_gguf([one], texts=True)
    header.metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}"
    save_tokenizer(header, one.parent)
    template = load_chat_template(one.parent, None)
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "<s>hi"
    header.metadata["tokenizer.chat_template.tool_use"] = "tools"
    save_tokenizer(header, one.parent)
    named = settings(one, "tokenizer_config.json")["chat_template"]
    assert [entry["name"] for entry in named] == ["default", "tool_use"]
    assert load_chat_template(one.parent, None) is not None


def test_templates_and_ends_come_along_with_a_tokenizer_beside(
    files: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a vocabulary that no tokenizer is made of; a file beside counts more than the metadata."""
    from ggufs import model, rewrite

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keys = {"tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": ["a", "</s>", "b"], "tokenizer.ggml.eot_token_id": 2,
            "tokenizer.ggml.eos_token_id": 0, "tokenizer.chat_template": "{{ messages }}"}  # fmt: skip
    out = rewrite(model(tmp_path / "m.gguf", "llama"), tmp_path / "out" / "m.gguf", keys)[0]
    with pytest.raises(UnsupportedModelError, match="'t5'"):
        locate(str(out))
    made(files["llama"])
    (out.parent / "tokenizer.json").write_bytes((files["llama"].parent / "tokenizer.json").read_bytes())
    folder = locate(str(out))
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 2, 1]
    assert load_chat_template(folder, None) is not None
    (out.parent / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert json.loads((locate(str(out)) / "generation_config.json").read_text()) == {"eos_token_id": 5}


def test_a_class_of_transformers_does_not_change_the_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The type of the model, or a tokenizer_config.json beside the file, names one that makes its own tokenizer."""
    from ggufs import model, rewrite

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    alone = made(byte_level(_file(tmp_path, "alone"), "qwen2"))
    (tmp_path / "alone" / "config.json").write_text('{"model_type": "qwen3_5_moe"}')
    assert load_tokenizer(tmp_path / "alone").to_str() == alone.to_str()
    keys = {f"tokenizer.ggml.{name}": value for name, value in {
        "model": "gpt2", "pre": "default", "tokens": ["a", "b", "ab", "<x>"], "merges": ["a b"],
        "token_type": [1, 1, 1, 3]}.items()}  # fmt: skip
    file = rewrite(model(tmp_path / "m.gguf", "qwen3moe"), tmp_path / "out" / "m.gguf", keys)[0]
    (file.parent / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "Qwen2Tokenizer", "chat_template": "own", "eos_token": "<x>", "extra_special_tokens": ["b"]
    }))  # fmt: skip
    folder = locate(str(file))
    assert load_tokenizer(folder).encode("abb<x>").ids == [2, 1, 3]
    assert load_tokenizer(folder).get_vocab_size() == 4
    assert load_chat_template(folder, None).render([{"role": "user", "content": "hi"}]) == "own"
    (file.parent / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json' is not valid JSON"):
        load_tokenizer(locate(str(file)))


def _file(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name / "m.gguf"
