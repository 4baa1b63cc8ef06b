"""Layouts in which checkpoints publish their tokenizers: ids and texts are those of transformers' `AutoTokenizer`.

Before, tokenizer.json alone was read: with its truncation and padding, and without special tokens of other files.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fake_api import complete, post
from rich.console import Console
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from tiermoe import LLM
from tiermoe.actors import tokenizer as reader
from tiermoe.actors.gpu_worker import _vocabulary_of
from tiermoe.cluster.api.templates import load_chat_template
from tiermoe.cluster.config import check_model_dir
from tiermoe.cluster.detokenizer import IncrementalText
from tiermoe.cluster.jobs.evaluate.text import load_heldout, load_text
from tiermoe.cluster.jobs.prepare import prepare
from tiermoe.cluster.jobs.prepare.calibration import read_windows
from tiermoe.cluster.jobs.record.record_command import read_prompts
from tiermoe.cluster.prompt import encode_prompt, load_tokenizer
from tiermoe.errors import CheckpointError

_TEXT = [
    "The people of the town don't know what's in the book; they've read it, and we're here. I'm sure!",
    "def add(one, other):\n    return one + other  # 3.14\n",
    "Über die Brücke gehen 12 Leute , und 345 andere ' warten ' dort ? 大きな 🙂",
] * 4
_SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end|>")
TEXTS = (
    "hello", "", " leading and trailing ", "<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n",
    "a <|end|> b<|end|>c", "</s><s> x", "don't ' do ' it , now . 3.14 we're", "  two  spaces\n\n\tand tabs",
    "naïve 大 🙂 é",
    "word " * 300,
)  # fmt: skip


@cache
def _trained(kind: str) -> str:
    """A small tokenizer without special tokens, as JSON."""
    if kind == "byte-level":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    elif kind == "metaspace":
        made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=first)
    elif kind == "unigram":
        made = Tokenizer(models.Unigram())
        made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>")
    else:
        made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer()
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece(cleanup=False)
        first = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=first)
    made.train_from_iterator(_TEXT, trainer)
    parts = json.loads(made.to_str())
    parts["added_tokens"] = []
    return json.dumps(parts)


KINDS = ("byte-level", "metaspace", "unigram", "wordpiece")
Files = dict[str, Any]  # content by name; not text: as JSON


def _parts(kind: str) -> dict[str, Any]:
    return json.loads(_trained(kind))


def _added(kind: str, **flags: bool) -> list[dict[str, Any]]:
    """The special tokens, with ids behind the vocabulary where it has none of that name."""
    made, entries = Tokenizer.from_str(_trained(kind)), []
    for name in _SPECIAL:
        known = made.token_to_id(name)
        made.add_tokens([name]) if known is None else None
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        entries.append({"id": made.token_to_id(name), "content": name, **plain, **flags})
    return entries


def _decoder(kind: str, **flags: bool) -> dict[str, Any]:
    return {str(entry.pop("id")): entry for entry in _added(kind, **flags)}


def whole(kind: str) -> Files:
    return {"tokenizer.json": {**_parts(kind), "added_tokens": _added(kind)}}


def limited(kind: str) -> Files:
    limits = {
        "truncation": {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 128}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "<pad>"},
    }  # fmt: skip
    return {"tokenizer.json": {**_parts(kind), "added_tokens": _added(kind), **limits}}


def in_the_configuration(kind: str) -> Files:
    config = {"added_tokens_decoder": _decoder(kind), "bos_token": "<s>", "eos_token": "<|im_end|>"}
    return {"tokenizer.json": _parts(kind), "tokenizer_config.json": config}


def flags_in_the_configuration(kind: str) -> Files:
    entries = _added(kind, special=False, normalized=True)
    config = {"added_tokens_decoder": _decoder(kind, lstrip=True, rstrip=True)}
    return {"tokenizer.json": {**_parts(kind), "added_tokens": entries}, "tokenizer_config.json": config}


def single_words(kind: str) -> Files:
    return {"tokenizer.json": _parts(kind), "tokenizer_config.json": {
        "added_tokens_decoder": _decoder(kind, single_word=True, special=False, normalized=True)}}  # fmt: skip


def of_old(kind: str) -> Files:
    """added_tokens.json and special_tokens_map.json, as before transformers 4.34."""
    return {
        "tokenizer.json": _parts(kind), "added_tokens.json": {entry["content"]: entry["id"] for entry in _added(kind)},
        "special_tokens_map.json": {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>", "lstrip": False,
                                    "normalized": False, "rstrip": True, "single_word": False}},
    }  # fmt: skip


def further_special(kind: str) -> Files:
    return {"tokenizer.json": _parts(kind), "tokenizer_config.json": {"extra_special_tokens": list(_SPECIAL)}}


def additional_special(kind: str) -> Files:
    return {"tokenizer.json": _parts(kind), "special_tokens_map.json": {"additional_special_tokens": list(_SPECIAL)}}


def named_special(kind: str) -> Files:
    names = {"im_start_token": "<|im_start|>", "end_token": "<|end|>"}
    config = {"extra_special_tokens": names, "eos_token": "</s>"}
    return {"tokenizer.json": _parts(kind), "tokenizer_config.json": config}


def entries_of_the_vocabulary(kind: str) -> Files:
    """Special tokens that are ordinary entries, which only the configuration names."""
    parts = _parts(kind)
    vocabulary = parts["model"]["vocab"]
    for name in _SPECIAL:
        if isinstance(vocabulary, dict):
            vocabulary.setdefault(name, len(vocabulary))
        elif name not in {token for token, _ in vocabulary}:
            vocabulary.append([name, -9.0])
    config = {"eos_token": "<|im_end|>", "extra_special_tokens": ["<|im_start|>", "<|end|>"]}
    return {"tokenizer.json": parts, "tokenizer_config.json": config}


def cleaned_up(kind: str) -> Files:
    return {**whole(kind), "tokenizer_config.json": {"clean_up_tokenization_spaces": True}}


def cleaned_up_without_decoder(kind: str) -> Files:
    return {"tokenizer.json": {**whole(kind)["tokenizer.json"], "decoder": None},
            "tokenizer_config.json": {"clean_up_tokenization_spaces": True}}  # fmt: skip


def cleaned_up_bpe(kind: str) -> Files:
    key = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    return {**whole(kind), "tokenizer_config.json": {"clean_up_tokenization_spaces": True, key: True}}


def split_special(kind: str) -> Files:
    return {**whole(kind), "tokenizer_config.json": {"split_special_tokens": True}}


def ends_added(kind: str) -> Files:
    """Read where there is no tokenizer.json, else its post-processor counts."""
    return {**whole(kind), "tokenizer_config.json": {
        "add_bos_token": True, "add_eos_token": True, "bos_token": "<s>", "eos_token": "</s>"}}  # fmt: skip


def ends_in_a_template(kind: str) -> Files:
    made = Tokenizer.from_str(json.dumps(whole(kind)["tokenizer.json"]))
    ids = [(name, made.token_to_id(name)) for name in ("<s>", "</s>")]
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", pair="<s> $A $B", special_tokens=ids)
    return {"tokenizer.json": made.to_str(), "tokenizer_config.json": {"add_bos_token": False, "bos_token": "<s>"}}


def of_several_versions(kind: str) -> Files:
    return {
        "tokenizer.json": _parts(kind), "tokenizer.4.0.0.json": whole(kind)["tokenizer.json"],
        "tokenizer_config.json": {"fast_tokenizer_files": ["tokenizer.4.0.0.json", "tokenizer.json"]},
    }  # fmt: skip


LAYOUTS: tuple[Callable[[str], Files], ...] = (
    whole, limited, in_the_configuration, flags_in_the_configuration, single_words, of_old, further_special,
    additional_special, named_special, entries_of_the_vocabulary, cleaned_up, cleaned_up_without_decoder,
    cleaned_up_bpe, split_special, ends_added, ends_in_a_template, of_several_versions,
)  # fmt: skip


def _merges(kind: str) -> str:
    pairs = _parts(kind)["model"]["merges"]
    return "\n".join(["#version: 0.2", *(pair if isinstance(pair, str) else " ".join(pair) for pair in pairs)]) + "\n"


def _two_files(kind: str = "byte-level") -> Files:
    return {"vocab.json": _parts(kind)["model"]["vocab"], "merges.txt": _merges(kind)}


def _words() -> str:
    vocabulary = _parts("wordpiece")["model"]["vocab"]
    return "\n".join(sorted(vocabulary, key=vocabulary.get)) + "\n"


_QWEN2 = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "add_prefix_space": False}
_LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
OTHERS: dict[str, tuple[str | None, Files]] = {  # model type, and files
    "vocab.json, merges.txt": ("qwen3_moe", _two_files()),
    "vocab.json, merges.txt, a class": (None, {**_two_files(), "tokenizer_config.json": _QWEN2}),
    "vocab.json, merges.txt, added tokens": ("qwen2_moe", {
        **_two_files(), "tokenizer_config.json": {**_QWEN2, "added_tokens_decoder": _decoder("byte-level")}}),
    "vocab.json, merges.txt, tokens of old": ("qwen2_moe", {
        **_two_files(), "tokenizer_config.json": _QWEN2, "added_tokens.json": {"<|im_start|>": 500, "<|im_end|>": 501},
        "special_tokens_map.json": {"additional_special_tokens": ["<|im_start|>"]}}),
    "vocab.json, merges.txt, GPT-2": (None, {
        **_two_files(), "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}}),
    "vocab.json, merges.txt, a begin": (None, {
        **_two_files(), "tokenizer_config.json": {
            "tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "bos_token": "<s>"}}),
    "vocab.txt": ("bert", {"vocab.txt": _words(), "tokenizer_config.json": {"tokenizer_class": "BertTokenizer"}}),
    "vocab.txt, cased": (None, {"vocab.txt": _words(), "tokenizer_config.json": {
        "tokenizer_class": "BertTokenizer", "do_lower_case": False, "clean_up_tokenization_spaces": True}}),
    "Qwen2's class": ("qwen3_moe", {**in_the_configuration("byte-level"), "tokenizer_config.json": {
        **_QWEN2, "added_tokens_decoder": _decoder("byte-level")}}),
    "Qwen2's class, limited": ("qwen2_moe", {**limited("byte-level"), "tokenizer_config.json": _QWEN2}),
    "a model's class": ("qwen3_5_moe", whole("byte-level")),
    "OLMoE's class": ("olmoe", {**whole("byte-level"), "tokenizer_config.json": {
        "tokenizer_class": "GPTNeoXTokenizer", "add_eos_token": True, "eos_token": "</s>"}}),
    "Llama's class over bytes": ("mixtral", {**whole("byte-level"), "tokenizer_config.json": _LLAMA}),
    "Llama's class": ("mixtral", {**whole("metaspace"), "tokenizer_config.json": _LLAMA}),
    "Llama's class, not legacy": (None, {**whole("metaspace"), "tokenizer_config.json": {
        **_LLAMA, "legacy": False, "add_prefix_space": False}}),
    "Llama's class, ends": ("llama", {**limited("metaspace"), "tokenizer_config.json": {
        **_LLAMA, "add_eos_token": True, "add_bos_token": True}}),
    "T5's class": (None, {**whole("unigram"), "tokenizer_config.json": {"tokenizer_class": "T5Tokenizer"}}),
    "a class that is not there": ("mixtral", {**whole("metaspace"), "tokenizer_config.json": {
        "tokenizer_class": "NobodysTokenizer", "eos_token": "<|end|>"}}),
    "code that is not needed": (None, {**whole("byte-level"), "tokenizer_config.json": {
        "auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "PreTrainedTokenizerFast"}}),
}  # fmt: skip


def write(folder: Path, files: Files, model_type: str | None = None) -> Path:
    folder.mkdir()
    if model_type is not None:
        files = {"config.json": {"model_type": model_type}, **files}
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def theirs(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def check(folder: Path) -> None:
    """The same ids with and without special tokens, and the same texts, at once and piece by piece."""
    expected, ours = theirs(folder), load_tokenizer(folder)
    for text in TEXTS:
        ids = expected(text)["input_ids"]
        assert ours.encode(text).ids == ids
        plain = expected(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False).ids == plain
        for skip in (True, False):
            shown = expected.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == shown
            pieces = IncrementalText(ours, skip_special=skip)
            assert "".join(pieces.add([token]) for token in ids) + pieces.finish() == shown
    assert ours.get_vocab() == expected.get_vocab()
    assert ours.truncation is None
    assert ours.padding is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_equal_to_transformers(layout: Callable[[str], Files], kind: str, tmp_path: Path) -> None:
    check(write(tmp_path / "model", layout(kind)))


@pytest.mark.parametrize("case", OTHERS)
def test_equal_to_transformers_by_class(case: str, tmp_path: Path) -> None:
    model_type, files = OTHERS[case]
    check(write(tmp_path / "model", files, model_type))


def test_the_driver_reads_without_torch_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that reads imports no torch either; afterwards the cache has it, for any folder with these files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write(tmp_path / "model", _two_files(), "qwen3_moe")
    code = (
        "import sys; from pathlib import Path; from tiermoe.cluster.prompt import load_tokenizer\n"
        "print(load_tokenizer(Path(sys.argv[1])).encode('a <|endoftext|>').ids)\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    command = [sys.executable, "-c", code, str(folder)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert json.loads(shown) == theirs(folder)("a <|endoftext|>")["input_ids"]
    (cached,) = (tmp_path / "cache" / "tiermoe" / "tokenizers").iterdir()
    assert cached.stat().st_mode & 0o77 == 0
    monkeypatch.setattr(reader, "_read", lambda folder: pytest.fail("read again"))
    other = shutil.copytree(folder, tmp_path / "other")
    assert load_tokenizer(other).encode("a <|endoftext|>").ids == json.loads(shown)
    (other / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(pytest.fail.Exception, match="read again"):
        load_tokenizer(other)


def test_a_cache_that_is_damaged_or_not_writable_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write(tmp_path / "model", whole("byte-level"))
    ids = load_tokenizer(folder).encode("<|im_start|>a").ids
    (cached,) = (tmp_path / "cache" / "tiermoe" / "tokenizers").iterdir()
    for damaged in (b"", b"{}\n{}", b'{"no": 1}\n{}', b"\xff\n", cached.read_bytes()[:-100]):
        cached.write_bytes(damaged)
        assert load_tokenizer(folder).encode("<|im_start|>a").ids == ids
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert load_tokenizer(folder).encode("<|im_start|>a").ids == ids


_REFUSED: dict[str, tuple[Files, str]] = {
    "nothing": ({"tokenizer_config.json": {}, "merges.txt": ""}, r"no tokenizer in '.*model'; pass the folder of"),
    "cut": ({"tokenizer.json": "{"}, r"model/tokenizer\.json' cannot be read"),
    "cut configuration": ({**whole("byte-level"), "tokenizer_config.json": "{"}, r"_config\.json' is not valid JSON"),
    "no object": ({**whole("byte-level"), "added_tokens.json": "[]"}, r"added_tokens\.json' is not a JSON object"),
    "code of its own": (
        {**_two_files(), "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["own.Own", None]},
                                                   "tokenizer_class": "OwnTokenizer"}},
        r"OwnTokenizer, is Python code of the checkpoint, which is not run; pass a release"),
    "code beside a whole one": (
        {**whole("byte-level"), "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["own.Own", None]},
                                                          "tokenizer_class": "OwnTokenizer"}},
        r"is not run; if its tokenizer\.json gives the same tokens, remove auto_map from tokenizer_config\.json"),
    "a slow one": (
        {"vocab.txt": "a\n", "tokenizer_config.json": {"tokenizer_class": "BertJapaneseTokenizer"}},
        "is a BertJapaneseTokenizer, which is Python code of transformers"),
    "a flag that is none": (
        {**whole("byte-level"), "tokenizer_config.json": {"bos_token": 7}}, "the tokenizer's configuration in"),
}  # fmt: skip


@pytest.mark.parametrize("case", _REFUSED)
def test_what_transformers_does_not_load_is_refused_by_name(case: str, tmp_path: Path) -> None:
    files, says = _REFUSED[case]
    with pytest.raises(CheckpointError, match=says):
        load_tokenizer(write(tmp_path / "model", files))


@pytest.mark.parametrize(("file", "package"), [("tokenizer.model", "sentencepiece"), ("own.tiktoken", "tiktoken")])
def test_a_package_that_is_missing_is_named(
    file: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_version", lambda name: None if name in ("sentencepiece", "tiktoken") else "1")
    folder = write(tmp_path / "model", {file: "no model"}, "mixtral")
    with pytest.raises(CheckpointError, match=rf"is {file}, which {package} reads.*with: pip install {package}"):
        load_tokenizer(folder)


def test_a_vocabulary_that_does_not_count_may_be_a_pointer_of_git_lfs(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4998304776\n"
    check(write(tmp_path / "model", {**whole("metaspace"), "tokenizer.model": pointer}, "mixtral"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.model' is a git-lfs pointer"):
        load_tokenizer(write(tmp_path / "other", {"tokenizer.model": pointer}, "mixtral"))


def test_every_way_in_gives_these_ids(checkpoint: Path, tmp_path: Path) -> None:
    """`/tokenize`, completions, `LLM`, record, evaluation, calibration, grammars; of the checkpoint and its store."""
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    parts = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    limits = {name: limited("byte-level")["tokenizer.json"][name] for name in ("truncation", "padding")}
    (folder / "tokenizer.json").write_text(json.dumps({**parts, "added_tokens": [], **limits}))
    special = {str(i): {"content": name, "special": True} for i, name in enumerate(("<pad>", "<s>", "</s>"))}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": special, "bos_token": "<s>"}))
    prompt = "<s>" + 5 * "some text, " + "</s>"
    ids = theirs(folder)(prompt)["input_ids"]
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 2 + 5 * len("some text, "))
    (tmp_path / "text.txt").write_text(prompt)
    (tmp_path / "more.txt").write_text(9 * prompt)
    (folder / "heldout").mkdir()
    (folder / "heldout" / "notes.jsonl").write_text(json.dumps({"text": prompt}) + "\n")
    store = prepare(folder, tmp_path / "store", progress=False)
    assert LLM(str(folder)).stream(prompt).completion.prompt_token_ids == tuple(ids)
    assert load_heldout(folder).passages[0].ids == tuple(ids)
    for path in (folder, store):
        tokenizer = load_tokenizer(path)
        assert encode_prompt(tokenizer, prompt) == tuple(ids)
        assert post("/tokenize", {"prompt": prompt}, tokenizer=tokenizer).json()["tokens"] == ids
        assert post("/detokenize", {"tokens": ids}, tokenizer=tokenizer).json() == {"prompt": prompt}
        usage = complete({"prompt": prompt, "max_tokens": 1}, tokenizer=tokenizer)["usage"]
        assert usage["prompt_tokens"] == len(ids)
        assert read_prompts(tmp_path / "text.txt", path) == [tuple(ids)]
        assert load_text(path, tmp_path / "text.txt").passages[0].ids == tuple(ids)
        windows = read_windows(tmp_path / "more.txt", path, Console(quiet=True)).ids.ravel()
        assert windows.tolist() == (9 * ids)[: len(windows)]
        vocabulary, notes = _vocabulary_of(path)
        assert Tokenizer.from_str(vocabulary).encode(prompt).ids == ids
        assert notes == []


def test_a_chat_template_comes_with_every_layout(tmp_path: Path) -> None:
    """It was read beside a tokenizer.json only, and knew no token that the class for the type of the model has."""
    files = {**_two_files(), "chat_template.jinja": "{{ messages[0].content }}{{ eos_token }}"}
    folder = write(tmp_path / "model", files, "qwen3_moe")
    check_model_dir(folder)
    template = load_chat_template(folder, None)
    chat = [{"role": "user", "content": "hi"}]
    assert template.render(chat) == theirs(folder).apply_chat_template(chat, tokenize=False) == "hi<|endoftext|>"


def test_a_token_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    """Such as an added one without a row of the embedding; the evaluation ended with an IndexError of torch."""
    folder = write(tmp_path / "model", in_the_configuration("byte-level"))
    tokens = Tokenizer.from_str(_trained("byte-level")).get_vocab_size()
    (folder / "config.json").write_text(json.dumps({"model_type": "mixtral", "vocab_size": tokens}))
    (tmp_path / "text.txt").write_text(30 * "a plain text, ")
    (tmp_path / "more.txt").write_text(30 * "a text with <|end|>, ")
    load_text(folder, tmp_path / "text.txt")
    for use in (lambda: load_text(folder, tmp_path / "more.txt"),
                lambda: read_windows(tmp_path / "more.txt", folder, Console(quiet=True))):  # fmt: skip
        with pytest.raises(CheckpointError, match=rf"gives token {tokens + 4}, the model has {tokens}"):
            use()
