"""Small vocabularies of GGUF files, and strings on which tokenizers differ.

The merges are the pairs of neighbours in those strings, so that a piece that is cut elsewhere gives other tokens.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

from ggufs import vocabulary
from tokenizers import pre_tokenizers

TEXTS = (
    "", " ", "  ", "   ", "\t", "\n", "\n\n\n", "\t\n", " \n", "\r\n\r\n", "Hello world", " Hello world",
    "  Hello  world  ", "Hello\nworld", "Hello, y'all! How are you \U0001f601 ?我想在apple工作1314151天\uff5e",
    "I'm you're HE'S WE'LL they'd 've 'T \u017f '\u017f", "3 33 333 3333 33333 333333 1234567890",
    "\uff13\uff14 \u0661\u0662\u0663 \u2167 \u00bd \u00b2", "a\u0301 e\u0301\u0301 n\u0303 \u00f1",
    "नमस्ते दुनिया", "ไทย สวัสดี",
    "한국어 텍스트 ㄱㄴ", "日本語 カタカナ ひらがな", "中文\uff0c標點。",
    "\U0001f680 (normal) \U0001f636\u200d\U0001f32b\ufe0f \u2705",
    "\u00a0nbsp\u00a0", "\u3000ideographic", "a\u200bb\u200dc", "\ufeffbom", "x\u0085y\u2028z",
    "--- === ____ ....... !!!!!! ''''''```````\"\"\"\"", "<s>", "</s>", "<s>hi</s> there<unk>", " <s> hi", "<0x0A>",
    "\u2581\u2581 under \u2581", "def f(x):\n    return x**2  # ok\n\n\tif a:\n\t\tpass\n", "http://a.b/c?d=e&f=g",
    "CamelCaseWORDS mixedCASE XMLHttp",
    "na\u00efve \u0152UVRE \u00c0\u00c9 stra\u00dfe \u0391\u0392\u0393 \u03b1\u03b2 Жук",
    "\x00\x01\x7f", "a" * 37, " " * 40, "ab" * 20, "\n" * 9, "\t" * 7, "! \r\n!", "'", "s's", "100%",
    "$1,000.00 + \u20ac5 <= ^ ~ | `", "//\n//", "\u201cquotes\u201d \u2026", "\U0001d49c math", "\U00020000\U00020001",
    "<|im_start|>user\n  x<|im_end|>\n", "a<|im_end|> b", "\U0010ffff\ue000", "  <pad>  <pad>",
)  # fmt: skip
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>")
UNKNOWN, NORMAL, CONTROL, USER_DEFINED, BYTE = 2, 1, 3, 4, 6
_TYPES = (UNKNOWN, CONTROL, CONTROL, CONTROL, CONTROL, USER_DEFINED)
_SPACE = "\u2581"


def byte_level(file: Path, pre: str | None, **keys: object) -> Path:
    """A vocabulary of tokenizer.ggml.model `gpt2`."""
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [piece for text in TEXTS for piece, _ in spelled.pre_tokenize_str(text)]
    pairs = _pairs(words)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *letters, *(left + right for left, right in pairs), "[unused0]"]
    types = [*_TYPES, *[NORMAL] * (len(letters) + len(pairs)), 5]
    named = {} if pre is None else {"pre": pre}
    given = {"bos_token_id": 1, "eos_token_id": 2, **named, **keys}
    return vocabulary(file, "gpt2", tokens, types, merges=[f"{left} {right}" for left, right in pairs], **given)


def sentencepiece(file: Path, **keys: object) -> Path:
    """A vocabulary of tokenizer.ggml.model `llama`: without the later letters, and with runs of one score."""
    words = [_SPACE + text.replace(" ", _SPACE) for text in TEXTS]
    letters = sorted({letter for word in words for letter in word if letter < "\u3000" and letter not in "\t\r\x00"})
    pairs = [pair for pair in _pairs(words) if all(part in letters for part in pair) and pair != (_SPACE, _SPACE)]
    threes = [(a + b, c) for (a, b) in pairs[:40] for (x, c) in pairs[:60] if x == b]
    runs = [_SPACE * n for n in (2, 4, 8, 3, 16, 5, 6, 12, 7)]
    made = [token for token in dict.fromkeys(map("".join, (*pairs, *threes))) if token not in SPECIAL]
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    tokens = [*SPECIAL, *bytes_, *made, *letters, *runs]
    types = [*_TYPES, *[BYTE] * 256, *[NORMAL] * (len(made) + len(letters) + len(runs))]
    scores = [0.0] * (len(SPECIAL) + 256) + [-float(i) for i in range(len(made))] + [-1e6] * len(letters)
    scores += [-1e9] * len(runs)
    return vocabulary(file, "llama", tokens, types, scores=scores, **keys)


def _pairs(words: list[str]) -> list[tuple[str, str]]:
    """Neighbouring letters, the most frequent first."""
    found = Counter(pair for word in words for pair in pairwise(word))
    return [pair for pair, _ in sorted(found.items(), key=lambda item: (-item[1], item[0]))]


def vocabularies(folder: Path) -> dict[str, Path]:
    """Every tokenizer model and every list of expressions for pieces, with the flags that change ids."""
    pres = ("default", "llama-bpe", "dbrx", "glm4", "gpt-2", "olmo", "smollm", "qwen2", "qwen35", "falcon",
            "deepseek-coder", "deepseek-v3", "gpt-4o", "tekken", "bailingmoe", "seed-coder")  # fmt: skip
    found = {f"gpt2 {pre}": byte_level(_file(folder, pre), pre) for pre in pres}
    found["gpt2 without pre"] = byte_level(_file(folder, "none"), None)
    both = {"add_bos_token": True, "add_eos_token": True}
    found["gpt2 qwen2, bos and eos"] = byte_level(_file(folder, "ends"), "qwen2", **both)
    found["llama"] = sentencepiece(_file(folder, "llama"))
    found["llama without prefix"] = sentencepiece(_file(folder, "bare"), add_space_prefix=False)
    found["llama, eos and no bos"] = sentencepiece(_file(folder, "eos"), add_bos_token=False, add_eos_token=True)
    return found


def _file(folder: Path, name: str) -> Path:
    (folder / name).mkdir(parents=True)
    return folder / name / "vocabulary.gguf"
