"""What clients ask of a model's reasoning, in the words of each API, as variables of the model's chat template.

    OpenAI, vLLM     reasoning_effort: none, minimal, low, medium, high, xhigh
    OpenRouter       reasoning: {effort, max_tokens, enabled, exclude}        LM Studio: reasoning: on, off, low, ...
    Anthropic        thinking: {type, budget_tokens}                          DeepSeek, GLM, Kimi: thinking: {type}
    Ollama           think: true, false, low, medium, high
    Qwen             enable_thinking, thinking_budget                         vLLM: thinking_token_budget

A template knows some of `enable_thinking`, `thinking` or `thinking_mode` (a switch), `reasoning_effort` or
`thinking_effort`, `thinking_budget` and `clear_thinking`. A wish is given to the variable that carries it out; an
effort also turns a switch on, and a template with efforts alone gets the lowest one where thinking is to be off. What
no variable carries out is ignored by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .messages import Body
from .parameters import integral

_Level = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "default", "auto"]
Effort = _Level | None
Budget = Annotated[int, BeforeValidator(integral), Field(ge=-1)]  # tokens; -1: no limit

VARIABLES = (
    "enable_thinking", "thinking", "thinking_mode", "reasoning_effort", "thinking_effort", "thinking_budget",
    "clear_thinking",
)  # fmt: skip
LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SWITCHES, _EFFORTS = VARIABLES[:2], VARIABLES[3:5]
_MODES = {True: "enabled", False: "disabled"}  # of MiniMax M3
_FITTED = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}  # of templates that do not name a level
_UNSET = (None, "default", "auto")


class Reasoning(Body):
    """OpenRouter's form, and that of `/v1/responses`."""

    effort: Effort = None
    max_tokens: Budget | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    summary: Any = None  # of OpenAI's service, as what follows; there is none here
    generate_summary: Any = None
    context: Any = None
    mode: Any = None


class Thinking(Body):
    """Anthropic's form."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools", "auto"] | None = None
    budget_tokens: Budget | None = None
    clear_thinking: bool | None = None  # of former turns
    display: Any = None
    keep: Any = None


@dataclass(frozen=True)
class Wish:
    """One part of what a request asks for.

    kind: of what: switch, effort, budget, clear, or other (nothing carries it out).
    """

    name: str
    kind: str
    value: Any


def wishes(given: Any) -> Iterator[Wish]:
    """Those of a body with the parameters above; later ones win."""
    yield Wish("reasoning_effort", "effort", given.reasoning_effort)
    if isinstance(found := given.reasoning, Reasoning):
        yield Wish("reasoning.effort", "effort", found.effort)
        yield Wish("reasoning.max_tokens", "budget", found.max_tokens)
        yield Wish("reasoning.enabled", "switch", found.enabled)
        for name in ("summary", "generate_summary", "context", "mode"):
            yield Wish(f"reasoning.{name}", "other", getattr(found, name))
    else:
        yield _of_word("reasoning", found)
    if isinstance(found := given.thinking, Thinking):
        switch = {"enabled": True, "disabled": False}.get(found.type or "")
        yield Wish("thinking.type", "switch", switch)
        yield Wish("thinking.budget_tokens", "budget", found.budget_tokens)
        yield Wish("thinking.clear_thinking", "clear", found.clear_thinking)
        yield Wish("thinking.display", "other", found.display)
        yield Wish("thinking.keep", "other", found.keep)
    else:
        yield _of_word("thinking", found)
    yield _of_word("think", given.think)
    yield Wish("enable_thinking", "switch", given.enable_thinking)
    yield Wish("thinking_budget", "budget", given.thinking_budget)
    yield Wish("thinking_token_budget", "budget", given.thinking_token_budget)


def _of_word(name: str, value: Any) -> Wish:
    if value in ("on", "off"):
        value = value == "on"
    return Wish(name, "effort" if isinstance(value, str) else "switch", value)


def variables(
    given: Any, known: Collection[str], named: Collection[str] = ()
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(the template's variables that carry the wishes out, the names of those that none does).

    Args:
        given: a body with the parameters above.
        known: variables that the template reads.
        named: levels of effort that are written in it.
    """
    found: dict[str, Any] = {}
    ignored = []

    efforts = [name for name in _EFFORTS if name in known]

    def switch(on: bool) -> bool:
        mine: dict[str, Any] = {name: on for name in _SWITCHES if name in known}
        if "thinking_mode" in known:
            mine["thinking_mode"] = _MODES[on]
        if not mine and not on:
            mine = dict.fromkeys(efforts, _fitted("none", named))
        found.update(mine)
        return bool(mine)

    def effort(level: str) -> bool:
        switched = switch(level != "none")
        if level != "none" and efforts:
            found.update(dict.fromkeys(efforts, _fitted(level, named)))
            return True
        return switched

    def budget(tokens: int) -> bool:
        if tokens < 0:  # as much as it likes
            return True
        if tokens == 0:
            return switch(False)
        found.update({"thinking_budget": tokens} if "thinking_budget" in known else {})
        return "thinking_budget" in known

    def clear(on: bool) -> bool:
        found.update({"clear_thinking": on} if "clear_thinking" in known else {})
        return "clear_thinking" in known

    carry: dict[str, Callable[[Any], bool]] = {
        "switch": switch, "effort": effort, "budget": budget, "clear": clear, "other": lambda _: False
    }  # fmt: skip
    for wish in wishes(given):
        if wish.value not in _UNSET and not carry[wish.kind](wish.value):
            ignored.append(wish.name)
    return found, tuple(ignored)


def _fitted(level: str, named: Collection[str]) -> str:
    if level == "medium" and "medium" not in named and {"low", "high"} <= set(named):
        return "high"  # the template has these alone
    return level if level in named else _FITTED.get(level, level)


def splits_reasoning(given: Any) -> bool:
    """Whether an answer is to have the reasoning apart from its content: not as llama.cpp's and SGLang's servers leave
    it there on demand."""
    return given.reasoning_format not in ("none", "raw") and given.separate_reasoning is not False


def hides_reasoning(given: Any) -> bool:
    """Whether an answer is to leave the reasoning out."""
    return (
        given.include_reasoning is False
        or given.reasoning_format == "hidden"
        or (isinstance(given.reasoning, Reasoning) and given.reasoning.exclude is True)
        or (isinstance(given.thinking, Thinking) and given.thinking.type == "disabled")
    )
