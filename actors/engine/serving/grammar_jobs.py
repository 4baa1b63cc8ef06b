"""Grammars in processes that can be killed: `python -m tiermoe.actors.engine.serving.grammar_jobs` follows texts.

A grammar comes with a request. llguidance bounds the time of most of them by fuel, but a chain of rules overflows its
stack, which ends the process that it is in, and its converters take time that grows with the square of a text. So all
of it runs in processes that can be killed (`proto/bounded.py`): those of the server `convert` and `check`
(`cluster/api/rendering.py`), those of the lead compile with the model's vocabulary, and each follows the text of one
request. They are forked: read by each, a vocabulary of 150,000 tokens would take 0.9 s and 145 MB a request.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from ....errors import told
from ....proto.bounded import CarryOut, serve

MODULE = "tiermoe.actors.engine.serving.grammar_jobs"
_SPACE = r"[ \n\r\t]{0,32}"  # between the parts of a JSON text; without a bound a model may write it until max_tokens
_LONG_ROW = "Current row has"  # of llguidance, where the limit of items in a row is exceeded
_FIRST_S, _TOKEN_S = 0.5, 0.01  # of processor time that a text's tokens may take: at once, and for each of them
# llguidance's own defaults but for the states: a mask takes some 20 ms at most, the states 200 MB
_LIMITS = {
    "max_items_in_row": 2000, "initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "step_max_items": 50_000,
    "max_lexer_states": 100_000, "max_grammar_size": 500_000, "verbose_errors": False,
}  # fmt: skip


def convert(kind: str, text: str, checked: bool = True) -> str:
    """The grammar in llguidance's form.

    Args:
        kind: llguidance's name.
        checked: whether it is complete without a vocabulary.
    """
    import llguidance

    if kind == "json_schema":
        grammar = str(llguidance.LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": _SPACE}))
    elif kind == "choice":
        grammar = _choice(json.loads(text))
    else:
        grammar = str(llguidance.grammar_from(kind, text))
    if checked and (wrong := llguidance.LLMatcher.validate_grammar(grammar, limits=_limits())):
        raise ValueError(wrong)
    return grammar


def _choice(choices: Sequence[str]) -> str:
    """One of some texts, as one word: of alternatives in a rule, llguidance's form, the parser takes 2,000."""
    import llguidance

    words = [choice for choice in choices if choice]
    if not words:
        return 'start: ""'
    rule = str(llguidance.grammar_from("choice", json.dumps(words))).removeprefix("start: ")
    return f"start: CHOICE{'?' if len(words) < len(choices) else ''}\nCHOICE: {rule}"


def check(schemas: Sequence[str]) -> None:
    """Raise ValueError where one of the JSON schemas is no grammar."""
    for schema in schemas:
        convert("json_schema", schema)


class Following:
    """A text that follows its grammar: `begin`, then any number of `follow`.

    Args:
        tokens: the vocabulary, as llguidance has it.
        problem: why there is no vocabulary.
    """

    def __init__(self, tokens: Any, problem: str | None = None) -> None:
        self._tokens, self._problem = tokens, problem
        self._matcher: Any = None
        self._followed, self._begun_s = 0, 0.0

    def begin(self, grammar: str) -> str | None:
        """Compile a grammar; what it returns is why the vocabulary cannot be used."""
        from llguidance import LLMatcher

        if self._problem is not None:
            return self._problem
        self._matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=_limits())
        if self._matcher.is_error():
            raise ValueError(_first_line(self._matcher))
        self._followed, self._begun_s = 0, time.process_time()
        return None

    def follow(self, tokens: Sequence[int]) -> dict[str, str]:
        """What may come after these tokens: `bits`, one for each token, in base64; `error`: why nothing may."""
        matcher = self._matcher
        self._followed += len(tokens)
        # the requests of a batch wait for the slowest one
        if time.process_time() - self._begun_s > _FIRST_S + _TOKEN_S * self._followed:
            return {"error": f"the grammar is too complex: it takes more than {_TOKEN_S:g} s a token"}
        if tokens and not matcher.consume_tokens(tokens):
            why = _first_line(matcher)
            if _LONG_ROW in why:
                return {"error": f"the grammar is too complex: it has too many alternatives at one place ({why})"}
            return {"error": f"the text does not follow its grammar: {why}"}
        if tokens and matcher.is_stopped():
            return {}
        bits = matcher.compute_bitmask()
        if matcher.is_error():
            why = _first_line(matcher)
            if not self._followed and "NoExtension" in why:  # llguidance's word for it
                return {"error": "no text follows the grammar, such as a rule that always needs itself"}
            return {"error": f"the grammar is too complex: {why}"}
        return {"bits": base64.b64encode(bits).decode()}


def _limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(**_LIMITS)


def _first_line(matcher: Any) -> str:
    """Of its error; the rest is the parser's state."""
    return str(matcher.get_error()).partition("\n")[0][:300]


def _prepare(given: bytes) -> Callable[[], CarryOut]:
    import llguidance  # before the forks

    said, tokens, problem = json.loads(given), None, None
    try:
        tokens = llguidance.LLTokenizer(said["tokenizer"], n_vocab=said["vocabulary"], eos_token=said["ends"])
    except ValueError as error:
        problem = told(error)[:200]

    def jobs() -> CarryOut:
        following = Following(tokens, problem)
        return {"begin": following.begin, "follow": following.follow}

    return jobs


if __name__ == "__main__":
    serve(_prepare)
