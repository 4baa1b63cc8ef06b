"""The process that renders chat templates: `python -m tiermoe.cluster.api.rendering`, started by `templates.py` alone.

A chat template is a program that came with a checkpoint: it may loop for ever, or fill the memory. Jinja's sandbox, in
which transformers runs it, bounds neither, and Python cannot end a thread. So it runs in a process that can be killed
(`proto/bounded.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...proto.bounded import serve

RESULT_CHARACTERS = 32 * 2**20  # eight times a body
_WORDS = 10_000  # of one template, at most


class Rendering:
    """The jobs: `load`, then `template` and any number of `compile` and `render`."""

    memory_bytes = 2**30

    def __init__(self) -> None:
        self._tokenizer: Any = None
        self.carry_out: dict[str, Callable[..., Any]] = {
            "load": self._load, "template": self._template, "compile": self._compile, "render": self._render
        }  # fmt: skip

    def _load(self, folder: str, class_name: str) -> tuple[Any, dict[str, Any]]:
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

    def _template(self, source: str | dict[str, str], tokens: Mapping[str, Any]) -> None:
        from transformers import PreTrainedTokenizerFast

        # without a vocabulary: its templates are wanted, and tokens are made by `tokenizers` alone
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_object=_no_vocabulary(), chat_template=source, **tokens)

    def _compile(self, source: str) -> dict[str, list[str]]:
        """Names that the template reads, and the words in it: what callers may give, and which values it compares."""
        from jinja2 import nodes
        from transformers.utils.chat_template_utils import _compile_jinja_template

        tree = _compile_jinja_template(source).environment.parse(source)
        names = {found.name for found in tree.find_all(nodes.Name) if found.ctx == "load"}
        words = {found.value for found in tree.find_all(nodes.Const) if isinstance(found.value, str)}
        return {"names": sorted(names)[:_WORDS], "words": sorted(word for word in words if len(word) <= 16)[:_WORDS]}

    def _render(self, messages: list[dict[str, Any]], given: Mapping[str, Any]) -> str:
        text = str(self._tokenizer.apply_chat_template(messages, tokenize=False, **given))
        if len(text) > RESULT_CHARACTERS:
            raise ValueError(f"the prompt would have more than {RESULT_CHARACTERS} characters")
        return text


def _no_vocabulary() -> Any:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.BPE())


def _prepare(_: bytes) -> type[Rendering]:
    from transformers import PreTrainedTokenizerFast  # noqa: F401  (before the forks)
    from transformers.utils.chat_template_utils import render_jinja_template

    render_jinja_template([], chat_template="")  # imports jinja2
    return Rendering


if __name__ == "__main__":
    serve(_prepare)
