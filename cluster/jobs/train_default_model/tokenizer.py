"""The byte-level BPE of the default model: 4096 entries, one special token."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"
_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def train_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Any:
    """A ``tokenizers.Tokenizer`` trained on ``texts``; id 0 is ``<|endoftext|>``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

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


def token_byte_lengths(tokenizer: Any) -> list[int]:
    """Bytes that each token id stands for; 0 for the special token."""
    size = tokenizer.get_vocab_size()
    # A byte-level token spells each byte as one character.
    return [0 if i == 0 else len(tokenizer.id_to_token(i)) for i in range(size)]


def save_pretrained(tokenizer: Any, folder: Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` as transformers expects them."""
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = _CHAT_TEMPLATE
    wrapped.save_pretrained(folder, save_jinja_files=False)
