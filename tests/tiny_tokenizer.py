"""A byte-level tokenizer with one token a byte, for tiny checkpoints that the command line serves."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 260  # three special tokens, 256 bytes, one more


def save_byte_tokenizer(directory: Path) -> Tokenizer:
    """Write tokenizer.json; ids 0-2 are padding, begin and end, then come the bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: i for i, name in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer
