"""A body into what is generated for it: checked, its prompts in tokens, its grammar, and the form of its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from .answers import ChatForm, CheckedRequest, CompletionForm
from .grammar import compiled, forced_call
from .keys import ANYONE, Key
from .model import Echo, ServedModel
from .reasoning import ReasoningParser
from .refusals import refused
from .runs import Choice
from .scanning import Parser, plain_parser
from .schema import ChatBody, CompletionBody, GenerationBody
from .thinking import hides_reasoning, splits_reasoning

_MANY_SCORES = 2**20  # of the prompts of one request, which come at once; each takes some 200 bytes
CALLS_STAY_TEXT = "tool calls (they stay text: how the model writes them is not known, see --tool-format)"


async def chat(model: ServedModel, body: ChatBody, key: Key | None = ANYONE) -> CheckedRequest:
    """Check and tokenize a chat.

    Args:
        key: whose request it is.

    Raises:
        ApiError: 400 or 404.
    """
    body.check()
    model.check(body)
    tools, display = body.offered_tools, body.display
    parser = _tool_parser(model, body, offered=bool(tools))
    marks = model.reasoning if splits_reasoning(body) else None
    if (parser is not plain_parser and model.special_calls) or (marks is not None and model.special_reasoning):
        display = replace(display, skip_special=False)
    grammar = await _grammar(model, body, key)
    text = await model.chat_text(body, body.messages, tools=tools, key=key)
    ids = await model.prompt_ids(text, special=body.add_special_tokens, parameter="messages")
    body = model.with_defaults(body)
    tokens = model.tokens_for(body, len(ids))
    model.check_length(len(ids), tokens, "messages")
    choices = tuple(
        Choice(ids, sampling, display, cache_salt=body.cache_salt)
        for sampling in body.sampling(tokens, body.wanted_logprobs, grammar=grammar)
    )
    parsers = tuple(parser() for _ in choices)
    if marks is not None and grammar is None:  # a grammar is of the whole answer, which then has no reasoning
        opened = text.rstrip().endswith(marks.begin.rstrip())
        parsers = tuple(ReasoningParser(marks, calls, opened) for calls in parsers)
    form = ChatForm(
        model.token_bytes, bool(body.logprobs), parsers, body.parallel_tool_calls is not False,
        reasoning=not hides_reasoning(body),
    )  # fmt: skip
    return CheckedRequest(model.name, choices, len(ids), form, body)


async def chat_tokens(model: ServedModel, body: ChatBody, key: Key | None = ANYONE) -> int:
    """Tokens of a chat's prompt, also where it is longer than the model takes. Raises ApiError: 400 or 404."""
    body.check()
    model.check(body)
    tools = body.offered_tools
    refuse_tools(model, offered=bool(tools))
    text = await model.chat_text(body, body.messages, tools=tools, key=key)
    return await model.count(text, special=body.add_special_tokens)


async def completion(model: ServedModel, body: CompletionBody, key: Key | None = ANYONE) -> CheckedRequest:
    """Check and tokenize the prompts of a completion.

    Args:
        key: whose request it is.

    Raises:
        ApiError: 400 or 404.
    """
    body.check()
    model.check(body)
    given, special = body.prompts, body.add_special_tokens
    # an empty list: says what is wrong
    grammar = await _grammar(model, body, key)
    prompts = tuple([await model.prompt_ids(prompt, special=special) for prompt in given or [""]])
    body = model.with_defaults(body)
    wanted = model.tokens_for(body, max(map(len, prompts)))
    tokens, prompt_tokens, scored = max(1, wanted), sum(map(len, prompts)), body.logprobs if body.echo else None
    for ids in prompts:
        model.check_length(len(ids), tokens, "prompt")
    if scored is not None and (scores := prompt_tokens * body.choices * (1 + scored)) > _MANY_SCORES:
        message = f"{scores} log-probabilities of prompts; ask for at most {_MANY_SCORES} at a time"
        raise refused(message, "logprobs")
    each = body.sampling(tokens, body.logprobs, scored, grammar)
    choices = [Choice(ids, one, body.display, wanted > 0, body.cache_salt) for ids in prompts for one in each]
    echoes: tuple[Echo, ...] | None = None
    if body.echo:
        echoes = tuple([await model.echo_of(text, ids) for text, ids in zip(given, prompts, strict=True)])
    form = CompletionForm(model.token_bytes, prompts, echoes, body.choices, body.logprobs is not None)
    return CheckedRequest(model.name, tuple(choices), prompt_tokens, form, body, len(prompts))


async def _grammar(model: ServedModel, body: GenerationBody, key: Key | None) -> str | None:
    """What the text must follow: the request's grammar, or that of a tool call that must come.

    Raises:
        ApiError: 400, it is refused.
    """
    forced = body.forced_functions if isinstance(body, ChatBody) else {}
    given, turn = body.constraint, "" if key is None else key.name
    if not forced:
        return None if given is None else await model.offload.grammars.run(turn, partial(compiled, given))
    if given is not None:
        raise refused(f"'{given[0]}' and a forced tool call; leave one out", given[0])
    assert isinstance(body, ChatBody)
    found, several = model.calling.format, model.calling.several and body.parallel_tool_calls is not False
    if found is None or found.grammar is None:
        raise refused("this model's tool calls cannot be forced; set tool_choice to auto", "tool_choice")
    make = partial(found.grammar, forced, several and body.tool_choice == "required")
    return await model.offload.grammars.run(turn, lambda: forced_call(make, forced))


def refuse_tools(model: ServedModel, *, offered: bool) -> None:
    """Refuse tools that the model cannot call. offered: whether it is shown any. Raises ApiError: 400."""
    if offered and model.template is not None and model.calling.refusal is not None:
        raise refused(model.calling.refusal, "tools")


def _tool_parser(model: ServedModel, body: ChatBody, *, offered: bool) -> Callable[[], Parser]:
    """What makes a parser of a choice's text. Where it is not known how the model calls, the client is told.

    Args:
        offered: whether the model is shown any tools.

    Raises:
        ApiError: 400, there are tools and the model cannot call any.
    """
    refuse_tools(model, offered=offered)
    found = model.calling.format
    if found is None or not (found.always or offered):
        if found is None and offered and model.template is not None:
            body.ignore(CALLS_STAY_TEXT)
        return plain_parser
    return partial(found.parser, body.functions)
