"""Chats into prompts, by transformers' own `apply_chat_template`, which needs no torch.

Chat templates come with checkpoints and are programs: transformers runs them in Jinja's sandbox. What a template makes
of tools, documents and calls is seen by rendering some, once at the start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from ...errors import CheckpointError, ConfigError, reason
from ..checkpoint_files import read_json_object
from .refusals import refused

_ASKED = "What is the value?"
_ANSWER = "plain words"
_DOCUMENT = {"title": "A probe", "text": "words of a probe document", "contents": "words of a probe document"}
_PROCESSORS = ("chat_template.json", "processor_config.json")  # of multimodal models, older and newer


class ChatTemplate:
    """A model's chat template; of several the one named `tool_use` is for requests with tools, as in transformers.

    Args:
        source: Jinja, or several templates by name.
        tokens: texts of special tokens, by the names that templates use.

    Attributes:
        problem: why it cannot render any chat; None: it can.
        takes_documents: whether a prompt shows documents.
        text_arguments: it wants the arguments of calls as text, not as an object.
    """

    def __init__(self, source: str | Mapping[str, str], tokens: Mapping[str, str]) -> None:
        from transformers import PreTrainedTokenizerFast
        from transformers.utils.chat_template_utils import render_jinja_template

        named = source if isinstance(source, str) else dict(source)
        # without a vocabulary: its templates are wanted, and tokens are made by `tokenizers` alone
        self._tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.BPE()), chat_template=named, **tokens
        )
        self.text_arguments = self._wants_parts = False
        self.problem: str | None = None
        for text in (source,) if isinstance(source, str) else source.values():
            try:
                render_jinja_template([], chat_template=text)  # compiles it
            except Exception as error:
                self.problem = f"the chat template does not compile: {_line(error)}"
        self._wants_parts = self._needs_parts()
        self.takes_documents = _DOCUMENT["text"] in (self._tried([_user()], documents=[_DOCUMENT]) or "")

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True,
        continue_final_message: bool = False, options: Mapping[str, Any] | None = None,
    ) -> str:  # fmt: skip
        """The prompt.

        Args:
            messages: arguments of their calls are objects.
            tools: JSON schemas of functions, in OpenAI's form.
            documents: with title and text.
            add_generation_prompt: whether it goes on to the assistant's answer.
            continue_final_message: whether the last message is to be gone on with.
            options: more variables for the template, such as `enable_thinking`.

        Raises:
            ApiError: 400, the template refuses these messages, or cannot be rendered.
        """
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [self._adapted(message) for message in messages], tools=tools or None, documents=documents or None,
                    add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
                    tokenize=False, **{name: value for name, value in (options or {}).items() if name != "documents"},
                )
            )  # fmt: skip
        except Exception as error:  # a template is a program, and this one came with a checkpoint
            why = self.problem or f"the model's chat template refuses the messages: {_line(error)}"
            raise refused(why, "messages") from error

    def call_text(
        self, tools: Sequence[Mapping[str, Any]], calls: Sequence[Mapping[str, Any]], *, as_text: bool
    ) -> str:
        """What an answer with these calls is written as, between what every answer begins and ends with.

        Args:
            as_text: whether the arguments are given as text.

        Raises:
            ApiError: the template refuses them.
        """
        self.text_arguments = as_text
        answers = ({"content": "", "tool_calls": calls}, {"content": _ANSWER})
        called, plain = (
            self.render([_user(), {"role": "assistant", **answer}], tools=tools, add_generation_prompt=False)
            for answer in answers
        )
        begin = _common(called, plain)
        begin = _opened(called, begin) or begin
        rest = called[begin:]
        end = len(rest) - _common(rest[::-1], plain[begin:][::-1])
        return rest[: _opened(rest, end) or end]

    def takes(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a prompt shows tools."""
        shown = self._tried([_user()], tools=tools) or ""
        return all(tool["function"]["name"] in shown for tool in tools)

    def _needs_parts(self) -> bool:
        """Whether it wants text as a list of parts."""
        if _ASKED in (self._tried([_user()]) or ""):
            return False
        self._wants_parts = True
        return _ASKED in (self._tried([_user()]) or "")

    def _tried(self, messages: Sequence[Mapping[str, Any]], **given: Any) -> str | None:
        """None: it refuses them."""
        try:
            return self.render(messages, add_generation_prompt=messages[-1]["role"] == "user", **given)
        except Exception:
            return None

    def _adapted(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as this template wants it."""
        made = dict(message)
        if self._wants_parts:
            made["content"] = [{"type": "text", "text": message["content"]}]
        if self.text_arguments and "tool_calls" in made:
            made["tool_calls"] = [_with_text(call) for call in made["tool_calls"]]
        return made


def _user() -> dict[str, Any]:
    return {"role": "user", "content": _ASKED}


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _opened(text: str, place: int) -> int | None:
    """Where the mark begins, such as `<|call|>` or `[ARGS]`, inside which a place is; None: it is inside none."""
    begin = max(text.rfind("<", 0, place), text.rfind("[", 0, place))
    return None if begin < 0 or any(letter in text[begin:place] for letter in ">] \n") else begin


def _common(one: str, other: str) -> int:
    """Characters that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def load_chat_template(folder: Path, file: Path | None) -> ChatTemplate | None:
    """The template of a file, else that of the checkpoint's folder; None: neither is there.

    Templates and special tokens are found where transformers finds them: chat_template.jinja, the folder
    additional_chat_templates, tokenizer_config.json, special_tokens_map.json; for multimodal models
    chat_template.json and processor_config.json.

    Raises:
        ConfigError: the file cannot be read, or does not compile. CheckpointError: a file of the folder is malformed.
    """
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    settings = read_json_object(folder / "tokenizer_config.json") if has_tokenizer else {}
    if file is None and not _has_template(folder, settings):
        return None  # and transformers is not imported
    found = _transformers_own(folder, settings) if (folder / "tokenizer.json").is_file() else None
    own = (found and found.chat_template) or _processors_own(folder)
    source = own if file is None else _read(file)
    if not source:
        return None
    template = ChatTemplate(source, {} if found is None else found.special_tokens_map)
    if file is not None and template.problem is not None:
        raise ConfigError(f"'{file}': {template.problem}", "correct it")
    return template


def _has_template(folder: Path, settings: Mapping[str, Any]) -> bool:
    names = ("chat_template.jinja", "additional_chat_templates", *_PROCESSORS)
    return bool(settings.get("chat_template")) or any((folder / name).exists() for name in names)


def _transformers_own(folder: Path, settings: Mapping[str, Any]) -> Any:
    """A tokenizer with the folder's templates and special tokens, and without its vocabulary."""
    import transformers

    name = str(settings.get("tokenizer_class") or "")
    plain = transformers.PreTrainedTokenizerFast
    named = getattr(transformers, name, None) if name.endswith(("Tokenizer", "TokenizerFast")) else None
    # a class has special tokens where the files name none
    for made in ([named] if isinstance(named, type) and issubclass(named, plain) else []) + [plain]:
        try:
            return made.from_pretrained(str(folder), tokenizer_object=Tokenizer(models.BPE()), local_files_only=True)
        except Exception as error:
            failure = error
    raise CheckpointError(
        f"the tokenizer's configuration in '{folder}' cannot be read: {_line(failure)}", "mend or remove it"
    ) from failure


def _processors_own(folder: Path) -> str | dict[str, str] | None:
    """The template of a multimodal model's processor."""
    for name in _PROCESSORS:
        found = read_json_object(folder / name).get("chat_template") if (folder / name).is_file() else None
        if isinstance(found, list):
            return {entry["name"]: entry["template"] for entry in found}
        if isinstance(found, (str, dict)) and found:
            return found
    return None


def _read(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"chat template '{path}' cannot be read: {reason(error)}"
        raise ConfigError(what, "give a readable UTF-8 file") from error
