"""The processes that render chat templates, and convert and check grammars: `python -m tiermoe.cluster.api.rendering`.

A chat template is a program that came with a checkpoint: it may loop for ever, or fill the memory. Jinja's sandbox, in
which transformers runs it, bounds neither, and Python cannot end a thread. So it runs in a process that can be killed
(`proto/bounded.py`), from the one pool of a server.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from ...actors.engine.serving.grammar_jobs import check, convert
from ...proto.bounded import CarryOut, Workers, serve

WORKERS = Workers("tiermoe.cluster.api.rendering")  # of this process

RESULT_CHARACTERS = 32 * 2**20  # eight times a body
_WORDS = 10_000  # of one template, at most


def _load(folder: str, class_name: str) -> tuple[Any, dict[str, Any]]:
    """The templates and special tokens of a checkpoint's folder, as its tokenizer's class has them."""
    import transformers

    plain = transformers.PreTrainedTokenizerFast
    suits = class_name.endswith(("Tokenizer", "TokenizerFast"))
    named = getattr(transformers, class_name, None) if suits else None
    failure: Exception | None = None
    # a class has special tokens where the files name none
    for made in ([named] if isinstance(named, type) and issubclass(named, plain) else []) + [plain]:
        try:
            found = made.from_pretrained(folder, tokenizer_object=_no_vocabulary(), local_files_only=True)
            return found.chat_template, found.special_tokens_map
        except Exception as error:
            failure = error
    assert failure is not None
    raise failure


def _compile(source: str) -> dict[str, list[str]]:
    """Names that the template reads, and the words in it: what callers may give, and which values it compares."""
    from jinja2 import nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    tree = _compile_jinja_template(source).environment.parse(source)
    names = {found.name for found in tree.find_all(nodes.Name) if found.ctx == "load"}
    words = {found.value for found in tree.find_all(nodes.Const) if isinstance(found.value, str)}
    return {"names": sorted(names)[:_WORDS], "words": sorted(word for word in words if len(word) <= 16)[:_WORDS]}


def _render(template: str, messages: list[dict[str, Any]], given: Mapping[str, Any]) -> str:
    """A chat. template: JSON of its `source`, or sources by name, and special `tokens`."""
    text = str(_tokenizer(template).apply_chat_template(messages, tokenize=False, **given))
    if len(text) > RESULT_CHARACTERS:
        raise ValueError(f"the prompt would have more than {RESULT_CHARACTERS} characters")
    return text


@functools.lru_cache(maxsize=4)
def _tokenizer(template: str) -> Any:
    """A tokenizer without a vocabulary: its templates are wanted, and tokens are made by `tokenizers` alone."""
    from transformers import PreTrainedTokenizerFast

    said = json.loads(template)
    return PreTrainedTokenizerFast(tokenizer_object=_no_vocabulary(), chat_template=said["source"], **said["tokens"])


def _no_vocabulary() -> Any:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.BPE())


def _jobs() -> CarryOut:
    return {"load": _load, "compile": _compile, "render": _render, "convert": convert, "check": check}


def _prepare(_: bytes) -> Callable[[], CarryOut]:
    from transformers import PreTrainedTokenizerFast  # noqa: F401  (before the forks)
    from transformers.utils.chat_template_utils import render_jinja_template

    with contextlib.suppress(ImportError):
        import llguidance.gbnf_to_lark  # noqa: F401
    render_jinja_template([], chat_template="")  # imports jinja2
    return _jobs


if __name__ == "__main__":
    serve(_prepare)
