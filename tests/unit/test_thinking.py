"""What clients ask of a model's reasoning, as variables of its chat template; the rest is ignored by name."""

from __future__ import annotations

from typing import Any

import pytest
from fake_api import FakeBackend, events, post

from tiermoe.cluster.api import tools
from tiermoe.cluster.api.schema import ReasoningBody
from tiermoe.cluster.api.templates import ChatTemplate
from tiermoe.cluster.api.thinking import variables

# what models read, and the levels that some name
QWEN, DEEPSEEK, OSS, SEED = {"enable_thinking"}, {"thinking"}, {"reasoning_effort"}, {"thinking_budget"}
_USER = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("body", "known", "given", "ignored"),
    [
        ({"reasoning_effort": "none"}, QWEN, {"enable_thinking": False}, ()),
        ({"reasoning_effort": "low"}, QWEN, {"enable_thinking": True}, ()),
        ({"reasoning_effort": "high"}, DEEPSEEK, {"thinking": True}, ()),
        ({"reasoning_effort": "high"}, OSS, {"reasoning_effort": "high"}, ()),
        ({"reasoning_effort": "none"}, OSS, {"reasoning_effort": "low"}, ()),
        ({"reasoning_effort": "minimal"}, OSS, {"reasoning_effort": "low"}, ()),
        ({"reasoning_effort": "xhigh"}, OSS, {"reasoning_effort": "high"}, ()),
        ({"reasoning_effort": "none"}, QWEN | OSS, {"enable_thinking": False}, ()),
        ({"reasoning_effort": "low"}, QWEN | OSS, {"enable_thinking": True, "reasoning_effort": "low"}, ()),
        ({"reasoning_effort": "high"}, (), {}, ("reasoning_effort",)),
        ({"reasoning_effort": None}, (), {}, ()),
        ({"reasoning_effort": "auto"}, QWEN, {}, ()),
        ({"reasoning": {"effort": "high"}}, OSS, {"reasoning_effort": "high"}, ()),
        ({"reasoning": {"enabled": False}}, QWEN, {"enable_thinking": False}, ()),
        ({"reasoning": {"max_tokens": 100.0}}, SEED, {"thinking_budget": 100}, ()),
        ({"reasoning": {"effort": "low", "max_tokens": 9}}, OSS, {"reasoning_effort": "low"},
         ("reasoning.max_tokens",)),
        ({"reasoning": {"summary": "detailed"}}, QWEN, {}, ("reasoning.summary",)),
        ({"reasoning": "off"}, QWEN, {"enable_thinking": False}, ()),
        ({"thinking": {"type": "disabled"}}, QWEN, {"enable_thinking": False}, ()),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, QWEN, {"enable_thinking": True},
         ("thinking.budget_tokens",)),
        ({"thinking": {"type": "adaptive"}}, QWEN, {}, ()),
        ({"thinking": {"clear_thinking": False}}, {"clear_thinking"}, {"clear_thinking": False}, ()),
        ({"thinking": True}, DEEPSEEK, {"thinking": True}, ()),
        ({"think": False}, QWEN, {"enable_thinking": False}, ()),
        ({"think": "medium"}, OSS, {"reasoning_effort": "medium"}, ()),
        ({"think": True}, OSS, {}, ("think",)),
        ({"enable_thinking": False}, DEEPSEEK, {"thinking": False}, ()),
        ({"enable_thinking": False}, (), {}, ("enable_thinking",)),
        ({"thinking_budget": 0}, QWEN, {"enable_thinking": False}, ()),
        ({"thinking_budget": -1}, (), {}, ()),
        ({"thinking_token_budget": 8}, SEED, {"thinking_budget": 8}, ()),
        ({"thinking": {"type": "enabled"}}, {"thinking_mode"}, {"thinking_mode": "enabled"}, ()),  # MiniMax M3
        ({"reasoning_effort": "none"}, {"thinking_mode"}, {"thinking_mode": "disabled"}, ()),
        ({"reasoning_effort": "max"}, {"thinking", "thinking_effort"}, {"thinking": True, "thinking_effort": "high"},
         ()),  # Kimi K3
    ],
)  # fmt: skip
def test_a_wish_is_given_to_the_variable_that_carries_it_out(
    body: dict[str, Any], known: set[str], given: dict[str, Any], ignored: tuple[str, ...]
) -> None:
    assert variables(ReasoningBody.model_validate(body), known) == (given, ignored)


def test_a_level_that_the_template_names_is_given_as_it_is() -> None:
    for level in ("none", "minimal", "xhigh", "max"):
        body = ReasoningBody.model_validate({"reasoning_effort": level})
        expected = "low" if level == "none" else level  # `none` turns thinking off; with efforts alone it is the lowest
        found, _ = variables(body, OSS, {level, "low"})
        assert found == {"reasoning_effort": level if level == "none" else expected}
    medium = ReasoningBody.model_validate({"reasoning_effort": "medium"})
    for named, expected in ({"low", "high"}, "high"), ({"medium"}, "medium"), (set(), "medium"):
        assert variables(medium, OSS, named)[0] == {"reasoning_effort": expected}


@pytest.mark.parametrize(
    ("source", "known", "levels"),
    [
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ messages[0].content }}", DEEPSEEK,
         ()),
        ("{% if enable_thinking is defined and enable_thinking is false %}x{% endif %}{{ messages[0].content }}", QWEN,
         ()),
        ("{% if reasoning_effort == 'max' %}x{% endif %}{{ messages[0].thinking }} thinking {{ messages[0].content }}",
         OSS, ("max",)),
        ("{# enable_thinking #}{{ messages[0].content }} 'thinking_budget'", (), ()),
        ("{% generation %}{{ thinking_budget }}{% endgeneration %}{{ messages[0].content }}", SEED, ()),
    ],
)  # fmt: skip
def test_the_variables_of_a_template_are_those_that_it_reads(source: str, known: set[str], levels: tuple[str]) -> None:
    template = ChatTemplate(source, {})
    assert template.problem is None
    assert (template.variables, template.levels) == (frozenset(known), frozenset(levels))


def test_completions_have_no_template_and_ignore_them() -> None:
    body = {"prompt": "p", "reasoning_effort": "high", "think": True, "chat_template_kwargs": {}, "thinking": {}}
    response = post("/v1/completions", body)
    assert response.status_code == 200
    for name in list(body)[1:]:
        assert name in response.headers["warning"]


@pytest.mark.parametrize("hidden", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_can_be_left_out(hidden: dict[str, Any], stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said = b"<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes"
    harmony = tools.calling(None, "harmony")
    monkeypatch.setattr("tiermoe.cluster.api.model.calling", lambda *_: harmony)

    def shown(more: dict[str, Any]) -> tuple[str, str]:
        backend = FakeBackend({"hi": said}, step=100)
        backend.plan["max_prompt_tokens"] = 200
        response = post("/v1/chat/completions", _USER | more | {"stream": stream}, backend)
        parts = [chunk["choices"][0]["delta"] for chunk in events(response)] if stream else [
            response.json()["choices"][0]["message"]
        ]  # fmt: skip
        return tuple("".join(part.get(name, "") for part in parts) for name in ("reasoning_content", "content"))

    assert shown({}) == ("hm", "yes")
    assert shown(hidden) == ("", "yes")
