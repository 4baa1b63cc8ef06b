"""A chat's messages into one prompt, by the model's own Jinja template or one that the user gives.

Templates come with checkpoints and are programs: they run in Jinja's sandbox, with the names that transformers gives
them (`apply_chat_template`), and cannot reach Python's objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from ...errors import ConfigError
from ..prompt import read_json_object
from .errors import refused

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """One compiled template.

    Args:
        source: Jinja.
        tokens: texts of special tokens, by the names that templates use.

    Raises:
        ConfigError: it does not compile.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        self._tokens = dict(tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template does not compile: {error}", "correct it") from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt, ready for the assistant's answer.

        Raises:
            ApiError: 400, the template refuses these messages.
        """
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._tokens)
        except Exception as error:  # a template is a program, and this one came with a checkpoint
            raise refused(f"the model's chat template refuses the messages: {error}", "messages") from error


def load_chat_template(folder: Path, file: Path | None) -> ChatTemplate | None:
    """The template of a file, else that of the checkpoint's folder; None: neither is there.

    Raises:
        ConfigError: the file cannot be read. CheckpointError: tokenizer_config.json is malformed.
    """
    settings = _tokenizer_settings(folder)
    source = _read(file) if file is not None else _own_source(folder, settings)
    tokens = {name: _text(settings[name]) for name in _SPECIAL if settings.get(name) is not None}
    return None if source is None else ChatTemplate(source, tokens)


def _own_source(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """transformers' order: chat_template.jinja, then tokenizer_config.json, where several may be named."""
    if (folder / "chat_template.jinja").is_file():
        return _read(folder / "chat_template.jinja")
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found if isinstance(found, str) else None


def _tokenizer_settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json_object(path) if path.is_file() else {}


def _read(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat template '{path}' cannot be read: {error}", "give a readable UTF-8 file") from error


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)  # no HTML escapes, unlike Jinja's own


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
