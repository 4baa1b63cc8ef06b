"""The tokenizer of a GGUF file: the ids are those of llama.cpp (`llama-vocab.cpp`), or the file is refused.

    save_tokenizer    tokenizer.json, and the files of `save_settings`
    save_settings     tokenizer_config.json with the chat templates, and generation_config.json

Two of llama.cpp's models are made, by `tokenizer.ggml.model`:

    llama   SentencePiece's BPE: neighbours merge by the score of the token that they make; bytes stand for what is in
            no token; a space before the text, and before what follows a special token
    gpt2    BPE over bytes: merges by rank, within pieces that `tokenizer.ggml.pre` names the expressions of

llama.cpp does not normalize text, and a piece of text that is a control or user-defined token is that token. Of two
such pieces that overlap it takes the longer, here the first is taken, as in models' own tokenizers.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ...actors.tokenizer import GGUF_MARK
from ...errors import CheckpointError, UnsupportedModelError
from .gguf_header import REWRITE, Header, shortest

TOKENS = "tokenizer.ggml.tokens"
_BESIDE = "put the model's own tokenizer.json beside it"
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # `tokenizer.ggml.token_type`
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's sign for a space

# --- pieces of text, by `tokenizer.ggml.pre` -----------------------------------------------------------------------

_SHORT = "'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = rf"{_SHORT}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)"
_LLAMA3 = rf"{_ANY_CASE}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ANY_CASE}|{_WORD}|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"  # of letters outside ASCII the case does not count
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = rf"{_CASED[0]}{_ANY_CASE}?|{_CASED[1]}{_ANY_CASE}?|\p{{N}}{{1,3}}|{_SLASHED}"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SLASHED}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}", "[一-龥\u3040-\u309f゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)  # fmt: skip
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"(?:(?!\s)[一-龥ࠀ-一가-\ud7ff])+", r"\p{N}")
_BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED = rf"{_ANY_CASE}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r"[\p{P}\$\+<=>\^~\|`]+"


@dataclass(frozen=True)
class _Pieces:
    """How text is cut before merging. expressions: one after the other. whole: a piece that is a token stays one."""

    expressions: tuple[str, ...]
    whole: bool = False
    add_bos: bool = False


_PRE: Mapping[str, _Pieces] = {
    **dict.fromkeys(("", "default"), _Pieces((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
                    _Pieces((_LLAMA3,), whole=True, add_bos=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _Pieces((_LLAMA3,))),
    **dict.fromkeys(("glm4", "glm5"), _Pieces((_LLAMA3,), whole=True)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat",
                     "mellum", "a.x-4.0"), _Pieces((_GPT2,))),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
                    _Pieces((r"\p{N}", _GPT2))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open",
                     "grok-2"), _Pieces((_QWEN2,))),
    "qwen35": _Pieces((_QWEN35,)),
    "falcon": _Pieces((_MARKS, _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-coder": _Pieces(_DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"), _Pieces(_DEEPSEEK3)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _Pieces((_GPT4O,))),
    "tekken": _Pieces((_TEKKEN,), whole=True, add_bos=True),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _Pieces((_BAILING,))),
    "seed-coder": _Pieces((_SEED,)),
}  # fmt: skip

# --- tokens that end a generation, by their text (llama.cpp's list) ------------------------------------------------

_ENDS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
))  # fmt: skip
_FILL_IN = {  # what fills in a middle: those of the first three, too, end a generation
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
                "<|code_prefix|>", "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
                "<|code_suffix|>", "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
                "<|code_middle|>", "<|middle|>"),
}  # fmt: skip
_SAMPLING = {  # llama.cpp's names of `general.sampling`, and those in generation_config.json
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty", "penalty_last_n": "penalty_last_n",
    "xtc_probability": "xtc_probability", "mirostat": "mirostat", "sequence": "sequence",
}  # fmt: skip
_SHOWN = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))  # gpt-oss: text, not control


def save_tokenizer(header: Header, folder: Path) -> None:
    """Write the tokenizer of a GGUF file and its settings.

    Args:
        header: read with `texts`.

    Raises:
        UnsupportedModelError: ids would not be llama.cpp's: an unknown model, pre-tokenizer or feature.
        CheckpointError: the vocabulary is malformed.
    """
    _Vocabulary(header).tokenizer().save(str(folder / "tokenizer.json"))
    save_settings(header, folder, made=True)


def save_settings(header: Header, folder: Path, made: bool = False) -> None:
    """Write a GGUF file's special tokens, chat templates and tokens that end a generation.

    Args:
        header: read with `texts`.
        made: the folder's tokenizer.json is made of the same file, and its ids are llama.cpp's.

    Raises:
        CheckpointError: the vocabulary is malformed.
    """
    for name, content in _Vocabulary(header).settings(made).items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")


class _Vocabulary:
    """The tokens of a file, with what llama.cpp makes of them when it loads it."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._model = self._get("model")
        self.tokens = self._strings("tokens")
        self.tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(self.tokens)]
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(token for i, token in enumerate(self.tokens) if self.ids[token] != i)
            raise self._malformed(f"the token {twice!r} occurs twice")
        self._types = self._special_types(self._numbers("token_type", 1))

    # -- metadata

    def _get(self, key: str, default: Any = None) -> Any:
        return self._header.metadata.get(f"tokenizer.ggml.{key}", default)

    def _refused(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._header.name}: {what}", _BESIDE)

    def _malformed(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._header.name}: {what}", REWRITE)

    def _strings(self, key: str) -> list[str]:
        found = self._get(key)
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise self._malformed(f"the key 'tokenizer.ggml.{key}' is missing, or is not a list of strings")
        return found

    def _numbers(self, key: str, default: int) -> list[float]:
        """A number for each token."""
        found = self._get(key)
        if found is None:
            return [default] * len(self.tokens)
        if not isinstance(found, list) or len(found) < len(self.tokens) or any(isinstance(one, str) for one in found):
            raise self._malformed(f"the key 'tokenizer.ggml.{key}' has not a number for each token")
        return found[: len(self.tokens)]

    def _token(self, key: str, default: int | None = None) -> int | None:
        """A special token's id; one outside the vocabulary is as none, as in llama.cpp."""
        found = self._get(f"{key}_token_id", default)
        if found is None or not isinstance(found, int) or found >= len(self.tokens):
            found = default
        return found if found is not None and 0 <= found < len(self.tokens) else None

    def _refuse_unsupported(self) -> None:
        if self._model not in ("llama", "gpt2"):
            raise self._refused(f"the tokenizer model {self._model!r} is not supported")
        embedding = self._header.tensors.get("token_embd.weight")
        if embedding is not None and embedding.shape and len(self.tokens) > embedding.shape[0]:
            raise self._malformed(f"there are {len(self.tokens)} tokens, and embeddings of {embedding.shape[0]}")
        if self._get("suppress_tokens"):
            raise self._refused("the key 'tokenizer.ggml.suppress_tokens' is not supported")
        name = str(self._header.metadata.get("general.name", "")).lower()
        if "phi-3" in name or "phi3" in name:  # llama.cpp lets special tokens take the spaces after them
            raise self._refused(f"the tokenizer of a model named {name!r} is not supported")

    def _special_types(self, types: Sequence[float]) -> list[int]:
        """Types of tokens, where llama.cpp goes by some tokens' text."""
        found = [int(kind) for kind in types]
        absent = {key for key in _FILL_IN if self._token(key) is None}
        controls = _ENDS | {text for key in absent for text in _FILL_IN[key]}
        for token, i in self.ids.items():
            if token in _SHOWN or (token == "<|end|>" and self._continues_after_end()):
                found[i] = _USER_DEFINED
            elif token in controls:
                found[i] = _CONTROL
        return found

    def _continues_after_end(self) -> bool:
        """Whether `<|end|>` ends a message only, as in gpt-oss."""
        calls = "<|call|>" in self.ids or "<|calls|>" in self.ids
        return calls and ("<|return|>" in self.ids or "<|flush|>" in self.ids)

    # -- the tokenizer

    def tokenizer(self) -> Tokenizer:
        """Ids as `llama_tokenize` gives them, with special tokens added and parsed. Raises as `save_tokenizer`."""
        self._refuse_unsupported()
        pieces = None if self._model == "llama" else self._pieces()
        made = Tokenizer(self._sentencepiece() if pieces is None else self._byte_level(pieces))
        if pieces is None:
            prefix = self._get("add_space_prefix", True)
            steps = [normalizers.Prepend(_SPACE)] if prefix else []
            made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
            strip = [decoders.Strip(" ", 1, 0)] if prefix else []
            made.decoder = decoders.Sequence(
                [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
            )
        else:
            splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in pieces.expressions]
            by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            made.pre_tokenizer = pre_tokenizers.Sequence([*splits, by_byte])
            made.decoder = decoders.ByteLevel()
        made.add_tokens(
            [
                AddedToken(self.tokens[i], special=kind != _USER_DEFINED, normalized=False)
                for i, kind in enumerate(self._types)
                if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
            ]
        )
        if (template := self._template(pieces is None or pieces.add_bos)) is not None:
            made.post_processor = template
        return made

    def _pieces(self) -> _Pieces:
        pre = self._get("pre", "")
        if pre not in _PRE:
            raise self._refused(f"the key 'tokenizer.ggml.pre' = {pre!r} is not supported")
        return _PRE[pre]

    def _byte_level(self, pieces: _Pieces) -> models.BPE:
        merges: dict[tuple[str, str], None] = {}
        for merge in self._strings("merges"):
            left, _, right = merge[1:].partition(" ")
            pair = (merge[:1] + left, right)
            if any(part not in self.ids for part in (*pair, "".join(pair))):
                raise self._refused(f"the merge {merge!r} has a part or a result that is not a token")
            merges.setdefault(pair)  # the first of two equal ones counts
        return models.BPE(dict(self.ids), list(merges), ignore_merges=pieces.whole)

    def _sentencepiece(self) -> models.BPE:
        """Neighbours merge by the score of the token that they make, so each way to make one is a merge.

        Raises:
            UnsupportedModelError: two merges that overlap have one score, and llama.cpp would go by their places.
        """
        scores = self._numbers("scores", 0)
        ways: dict[int, list[tuple[str, str]]] = {}
        for token, i in self.ids.items():
            kind = self._types[i]
            if kind == _BYTE or (kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and _SPACE not in token):
                continue  # text never has such a token, since it is taken out before
            found = [(token[:at], token[at:]) for at in range(1, len(token))]
            if unknown := [part for pair in found for part in pair if len(part) == 1 and part not in self.ids]:
                raise self._refused(f"the token {token!r} has the character {unknown[0]!r}, which is not a token")
            ways[i] = [pair for pair in found if pair[0] in self.ids and pair[1] in self.ids]
        self._refuse_ties(scores, ways)
        # the longer of one score first: a run of spaces then grows from its left, as in llama.cpp
        order = sorted((i for i in ways if ways[i]), key=lambda i: (-scores[i], -len(self.tokens[i]), i))
        unknown_token = self._token("unknown", 0)
        return models.BPE(
            dict(self.ids), [pair for i in order for pair in ways[i]], byte_fallback=True,
            unk_token=None if unknown_token is None else self.tokens[unknown_token],
        )  # fmt: skip

    def _refuse_ties(self, scores: Sequence[float], ways: Mapping[int, Sequence[tuple[str, str]]]) -> None:
        tied: dict[float, list[int]] = defaultdict(list)
        for i, pairs in ways.items():
            if pairs:
                tied[scores[i]].append(i)
        for group in tied.values():
            begins: dict[str, set[int]] = defaultdict(set)
            for i in group:
                for left, _ in ways[i]:
                    begins[left].add(i)
            for i in group:
                run = self.tokens[i] if len(set(self.tokens[i])) == 1 else ""
                after = {j for _, right in ways[i] for j in begins.get(right, ()) if j != i}
                if other := {j for j in after if not run or set(self.tokens[j]) != set(run)}:
                    names = f"{self.tokens[i]!r} and {self.tokens[min(other)]!r}"
                    raise self._refused(f"the tokens {names} have one score, so their order depends on their places")

    def _template(self, by_default: bool) -> processors.TemplateProcessing | None:
        """What is put before and after a text."""
        added = {"bos": self._get("add_bos_token", by_default), "eos": self._get("add_eos_token", False)}
        named: list[tuple[str, int]] = []
        parts = ["$A"]
        for name, wanted in added.items():
            if not wanted:
                continue
            if (token := self._token(name, self._default(name))) is None:
                raise self._malformed(f"the key 'tokenizer.ggml.add_{name}_token' is set, and there is no such token")
            named.append((self.tokens[token], token))
            parts = [self.tokens[token], *parts] if name == "bos" else [*parts, self.tokens[token]]
        if not named:
            return None
        return processors.TemplateProcessing(single=parts, pair=[*parts, "$B:1"], special_tokens=named)

    def _default(self, name: str) -> int | None:
        return {"bos": 1, "eos": 2, "unknown": 0}.get(name) if self._model == "llama" else None

    # -- the other files of a tokenizer

    def settings(self, made: bool) -> dict[str, Any]:
        """tokenizer_config.json and generation_config.json. made: tokenizer.json is from here, too."""
        keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "cls": "cls",
                "mask": "mask"}  # fmt: skip
        found = {name: self._token(key, self._default(key)) for name, key in keys.items()}
        tokens: dict[str, Any] = {f"{name}_token": self.tokens[i] for name, i in found.items() if i is not None}
        template = self._chat_template()
        generation: dict[str, Any] = {"eos_token_id": self._ends(found["eos"])}
        generation |= {f"{name}_token_id": found[name] for name in ("bos", "pad") if found[name] is not None}
        generation |= self._sampling()
        return {
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast", **tokens, "clean_up_tokenization_spaces": False,
                **({GGUF_MARK: True} if made else {}), **({} if template is None else {"chat_template": template}),
            },
            "generation_config.json": generation,
        }  # fmt: skip

    def _ends(self, eos: int | None) -> list[int]:
        """Tokens that end a generation: the named ones, and those that llama.cpp knows by their text."""
        named: Iterable[int | None] = (eos, *(self._token(key) for key in ("eot", "eom")))
        texts = {i for token, i in self.ids.items() if token in _ENDS}
        for key in ("fim_pad", "fim_rep", "fim_sep"):
            given = self._token(key)
            texts |= {self.ids[t] for t in _FILL_IN[key] if t in self.ids} if given is None else {given}
        found = dict.fromkeys(i for i in (*named, *sorted(texts)) if i is not None)
        if self._continues_after_end():
            found.pop(self.ids.get("<|end|>", -1), None)
        if "<|tool_response>" in self.ids:  # Gemma: an ordinary token
            found.pop(self.ids.get("</s>", -1), None)
        return list(found)

    def _sampling(self) -> dict[str, Any]:
        """The file's defaults of sampling: those of transformers by its names, of others what has no such name."""
        prefix = "general.sampling."
        known = {
            key.removeprefix(prefix): shortest(value)
            for key, value in self._header.metadata.items()
            if key.startswith(prefix)
        }
        if known.get("penalty_repeat", 1) == 1:
            known.pop("penalty_last_n", None)  # tokens of which the repetition is penalized
        return {_SAMPLING[name]: value for name, value in known.items() if name in _SAMPLING}

    def _chat_template(self) -> str | list[dict[str, str]] | None:
        """One template, or several by their names."""
        key = "tokenizer.chat_template"
        known = self._header.metadata
        named = {name.removeprefix(f"{key}."): text for name, text in known.items() if name.startswith(f"{key}.")}
        default = known.get(key)
        if not named:
            return default
        given = {**({"default": default} if default is not None else {}), **named}
        return [{"name": name, "template": text} for name, text in given.items()]
