"""Chats into prompts, by transformers' own `apply_chat_template`, which needs no torch, in a process beside this one.

Chat templates come with checkpoints and are programs: transformers runs them in Jinja's sandbox, and `rendering.py` in
a process that can be killed. What a template makes of tools, documents and calls is seen by rendering some, once at the
start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...actors.tokenizer import has_tokenizer, read_tokenizer
from ...errors import CheckpointError, ConfigError, RuntimeFailure, reason
from ...proto.bounded import START_S
from ..checkpoints.weight_files import optional_json, read_json_object
from .refusals import ApiError, from_failure, refused
from .rendering import WORKERS
from .thinking import LEVELS, VARIABLES

RENDER_S = 5.0  # for one request; an ordinary chat takes under a millisecond, one of 4 MB a tenth of a second
_ASKED = "What is the value?"
_ANSWER = "plain words"
_REASON = "words of a thought"
_REASONING = ("reasoning_content", "reasoning", "thinking")  # fields of a message
_CALL = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": {}}}
_DOCUMENT = {"title": "A probe", "text": "words of a probe document", "contents": "words of a probe document"}
_PROCESSORS = ("chat_template.json", "processor_config.json")  # of multimodal models, older and newer


def end_helper() -> None:
    """End the processes that render, if this process has no more to render; the next use starts them again."""
    WORKERS.close()


class _TemplateTimeout(ApiError):
    """A template was not done in time."""


class ChatTemplate:
    """A model's chat template; of several the one named `tool_use` is for requests with tools, as in transformers.

    Args:
        source: Jinja, or several templates by name.
        tokens: texts of special tokens, by the names that templates use.
        name: what errors call it.

    Raises:
        RuntimeFailure: the process that renders does not start.

    Attributes:
        problem: why it cannot render any chat; None: it can.
        takes_documents: whether a prompt shows documents.
        takes_developer: whether it shows a developer's message; else it gets it as the system's.
        takes_late_system: whether it shows a system's message behind others; else it gets it as the user's.
        variables, levels: those of `thinking` that it reads, and the levels of effort that it names.
        text_arguments: it wants the arguments of calls as text, not as an object.
        call_ids: which ids of calls it wants, one of `CALL_IDS`.
    """

    def __init__(
        self, source: str | Mapping[str, str], tokens: Mapping[str, str], name: str = "the model's chat template"
    ) -> None:
        named = source if isinstance(source, str) else dict(source)
        self._template = json.dumps({"source": named, "tokens": dict(tokens)})
        self._name = name
        self.text_arguments = self._wants_parts = False
        self.call_ids = "given"
        self.problem: str | None = None
        self._overrun: _TemplateTimeout | None = None  # of a probe: no other is tried
        self._renders = True  # False: not even the shortest chat
        self.variables, self.levels = frozenset[str](), frozenset[str]()
        for text in (source,) if isinstance(source, str) else source.values():
            try:
                read = self._ask({"compile": {"source": text}})
                self.variables |= frozenset(VARIABLES).intersection(read["names"])
                self.levels |= frozenset(LEVELS).intersection(read["words"])
            except ValueError as error:
                self.problem = f"the chat template does not compile: {error}"
            except _TemplateTimeout as overrun:
                self.problem = overrun.message
        self.takes_developer = self.takes_late_system = True
        self._thinks_in_parts = self._thinks_alone = False
        self._wants_parts = self._needs_parts()
        if self._overrun is not None:
            self.problem, self._renders = self._overrun.message, False
        developer = [{"role": "developer", "content": _ANSWER}, _user()]
        self.takes_developer = _ANSWER in (self._tried(developer) or "")
        late = [_user(), {"role": "system", "content": _ANSWER}]
        self.takes_late_system = _ANSWER in (self._tried(late) or "")
        said = {"role": "assistant", "content": _ANSWER, "tool_calls": [_CALL]}
        thought = said | dict.fromkeys(_REASONING, _REASON)
        self._thinks_alone = self._tried([_user(), said]) is not None and self._tried([_user(), thought]) is None
        self._thinks_in_parts = self._needs_parts_of_thought()
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
            add_generation_prompt: whether it ends with the beginning of the assistant's answer.
            continue_final_message: whether the last message is to be gone on with.
            options: more variables for the template, such as `enable_thinking`.

        Waits for another process, for `RENDER_S` at most; may be called from several threads.

        Raises:
            ApiError: 400, the template refuses these messages, cannot be rendered, or not in time; 503, the process
                that renders it ended twice.
        """
        if not self._renders:
            raise refused(str(self.problem), "messages")
        given = {
            "tools": tools or None, "documents": documents or None, "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **{name: value for name, value in (options or {}).items() if name != "documents"},
        }  # fmt: skip
        adapted = [self._adapted(message) for message in _renamed(self._placed(messages), CALL_IDS[self.call_ids])]
        try:
            text = str(self._ask({"render": {"template": self._template, "messages": adapted, "given": given}}))
            # arguments of calls may have escapes of half a surrogate pair, which no tokenizer takes
            return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        except (ValueError, RecursionError) as error:
            why = self.problem or f"the model's chat template refuses the messages: {error}"
            raise refused(why, "messages") from error
        except RuntimeFailure as failure:
            raise from_failure(failure) from failure

    def call_text(self, tools: Sequence[Mapping[str, Any]], calls: Sequence[Mapping[str, Any]]) -> str:
        """What an answer with these calls is written as, between what every answer begins and ends with.

        Raises:
            ApiError: the template refuses them.
        """
        answers = ({"content": "", "tool_calls": calls}, {"content": _ANSWER})
        called, plain = (self._probed([_user(), {"role": "assistant", **answer}], tools=tools) for answer in answers)
        begin = _common(called, plain)
        begin = _opened(called, begin) or begin
        rest = called[begin:]
        end = len(rest) - _common(rest[::-1], plain[begin:][::-1])
        return rest[: _opened(rest, end) or end]

    def reasoned(self) -> list[str]:
        """Prompts in which it shows how a model reasons: with thinking on and off, and behind an answer that has it."""
        switches = [name for name in ("enable_thinking", "thinking") if name in self.variables]
        given: list[dict[str, Any]] = [{}]
        given += [{name: on} for name in switches for on in (True, False)]
        found = [self._tried([_user()], options=options) for options in given]
        answer = {"role": "assistant", "content": _ANSWER} | dict.fromkeys(_REASONING, _REASON)
        return [text for text in (*found, self._tried([_user(), answer])) if text is not None]

    def takes_out(self, begin: str, end: str) -> bool:
        """Whether it leaves out of an earlier answer what is between these marks."""
        answer = {"role": "assistant", "content": f"{begin}{_REASON}{end}{_ANSWER}"}
        shown = self._tried([_user(), answer, _user()]) or ""
        return _ANSWER in shown and _REASON not in shown

    def takes(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a prompt shows tools."""
        shown = self._tried([_user()], tools=tools) or ""
        return all(tool["function"]["name"] in shown for tool in tools)

    def _ask(self, request: Mapping[str, Any]) -> Any:
        """What a worker found.

        Raises:
            ValueError: it failed, and why. ApiError: 400, it was not done in time. RuntimeFailure: workers end.
        """
        try:
            return WORKERS.ask(request, RENDER_S)
        except TimeoutError:
            raise _TemplateTimeout(
                400, f"{self._name} was not rendered within {RENDER_S:g} s; send less, or start the server with "
                "another --chat-template", "messages",
            ) from None  # fmt: skip
        except OSError as error:
            what = f"the process that renders {self._name} ended twice"
            raise RuntimeFailure(what, "send less at a time") from error

    def _needs_parts(self) -> bool:
        """Whether it wants text as a list of parts."""
        if _ASKED in (self._tried([_user()]) or ""):
            return False
        self._wants_parts = True
        return _ASKED in (self._tried([_user()]) or "")

    def _needs_parts_of_thought(self) -> bool:
        """Whether it shows reasoning as a part of the content alone (Mistral's)."""
        answer = {"role": "assistant", "content": _ANSWER} | dict.fromkeys(_REASONING, _REASON)
        if _REASON in (self._tried([_user(), answer]) or _REASON):
            return False
        self._thinks_in_parts = True
        shown = self._tried([_user(), answer]) or ""
        return _REASON in shown and "type" not in shown  # and not the list itself

    def _tried(self, messages: Sequence[Mapping[str, Any]], **given: Any) -> str | None:
        """None: it refuses them."""
        try:
            return self._probed(messages, **given)
        except ApiError:
            return None

    def _probed(self, messages: Sequence[Mapping[str, Any]], **given: Any) -> str:
        """As `render`; once a probe was not done in time, no other one is tried."""
        if self._overrun is not None:
            raise self._overrun
        try:
            return self.render(messages, add_generation_prompt=messages[-1]["role"] == "user", **given)
        except _TemplateTimeout as overrun:
            self._overrun = overrun
            raise

    def _placed(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages with the roles that this template knows where they are. What becomes the user's is one message with
        the user's own beside it, since templates want roles to alternate."""
        found: list[dict[str, Any]] = []
        begun = moved = False  # behind the system's first messages; the last one was the system's
        for message in messages:
            made = dict(message)
            if made["role"] == "developer" and not self.takes_developer:
                made["role"] = "system"
            late = begun and made["role"] == "system" and not self.takes_late_system
            begun = begun or made["role"] != "system"
            if late:
                made["role"] = "user"
            if (late or moved) and made["role"] == "user" and found[-1]["role"] == "user":
                made["content"] = f"{found.pop()['content']}\n\n{made['content']}"
            moved = late or (moved and made["role"] == "user")
            found.append(made)
        return found

    def _adapted(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message in the form that this template wants."""
        made = dict(message)
        reasoning = next((made[name] for name in _REASONING if made.get(name)), None)
        if reasoning and made["content"] and "tool_calls" in made and self._thinks_alone:
            made |= {"reasoning_content": f"{reasoning}\n\n{made['content']}", "content": ""}
            made = {name: value for name, value in made.items() if name not in _REASONING[1:]}
        if self._wants_parts:
            made["content"] = [{"type": "text", "text": made["content"]}]
        if reasoning and self._thinks_in_parts:
            said = [{"type": "text", "text": message["content"]}] if message["content"] else []
            made["content"] = [{"type": "thinking", "thinking": reasoning}, *said]
        if self.text_arguments and "tool_calls" in made:
            made["tool_calls"] = [_with_text(call) for call in made["tool_calls"]]
        return made


def _user() -> dict[str, Any]:
    return {"role": "user", "content": _ASKED}


# by name, the id of a call in a chat: (its own id, its function's name, how many calls are before it) -> id
CALL_IDS: dict[str, Callable[[str, str, int], str]] = {
    "given": lambda own, name, place: own,
    "functions": lambda own, name, place: f"functions.{name}:{place}",  # Kimi's: templates write no other name
    "short": lambda own, name, place: hashlib.sha256(own.encode()).hexdigest()[:9],  # Mistral's: nine letters
}


def _renamed(messages: Sequence[dict[str, Any]], rename: Callable[[str, str, int], str]) -> list[dict[str, Any]]:
    """Messages with other ids of their calls, and of what these gave."""
    found, names = [], dict[str, str]()
    for message in messages:
        made = dict(message)
        if calls := made.get("tool_calls"):
            for call in calls:
                names[call["id"]] = rename(call["id"], call["function"]["name"], len(names))
            made["tool_calls"] = [{**call, "id": names[call["id"]]} for call in calls]
        if (own := made.get("tool_call_id")) is not None:
            made["tool_call_id"] = names.get(own, own)
        found.append(made)
    return found


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


def load_chat_template(folder: Path, file: Path | None) -> ChatTemplate | None:
    """The template of a file, else that of the checkpoint's folder; None: neither is there.

    Templates and special tokens are found where transformers finds them: chat_template.jinja, the folder
    additional_chat_templates, tokenizer_config.json, special_tokens_map.json; for multimodal models
    chat_template.json and processor_config.json.

    Raises:
        ConfigError: the file cannot be read, or does not compile. CheckpointError: a file of the folder is malformed.
    """
    settings = optional_json(folder / "tokenizer_config.json") or {}
    if file is None and not _has_template(folder, settings):
        return None  # and no process is started
    found, tokens = _transformers_own(folder, settings) if has_tokenizer(folder) else (None, {})
    source = (found or _processors_own(folder)) if file is None else _read(file)
    if not source:
        return None
    name = f"the chat template of '{folder.absolute().name}'" if file is None else f"the chat template '{file.name}'"
    template = ChatTemplate(source, tokens, name)
    if file is not None and template.problem is not None:
        raise ConfigError(f"'{file}': {template.problem}", "correct it")
    return template


def _has_template(folder: Path, settings: Mapping[str, Any]) -> bool:
    names = ("chat_template.jinja", "additional_chat_templates", *_PROCESSORS)
    return bool(settings.get("chat_template")) or any((folder / name).exists() for name in names)


def _transformers_own(folder: Path, settings: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    """The folder's templates and special tokens."""
    asked = {"folder": str(folder), "class_name": str(settings.get("tokenizer_class") or "")}
    try:
        source, tokens = WORKERS.ask({"load": asked}, START_S)
    except (ValueError, OSError) as failure:
        what = f"the tokenizer's configuration in '{folder}' cannot be read: {failure}"
        raise CheckpointError(what, "correct or remove it") from failure
    with contextlib.suppress(CheckpointError):  # a class may be chosen by the type of the model, and has tokens
        named = read_tokenizer(folder).special_tokens
        tokens = tokens if named is None else named
    return source, tokens


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
        return path.expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        what = f"chat template '{path}' cannot be read: {reason(error)}"
        raise ConfigError(what, "give a readable UTF-8 file") from error
