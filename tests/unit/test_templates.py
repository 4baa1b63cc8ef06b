"""Chat templates: rendered as transformers renders them, byte for byte, from all files that it reads; what fails."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_api import FakeBackend, ask, error, post
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tiermoe.cluster.api import templates
from tiermoe.cluster.api.offload import Offload
from tiermoe.cluster.api.refusals import ApiError
from tiermoe.cluster.api.rendering import WORKERS
from tiermoe.cluster.api.schema import _TEMPLATE_NAMES
from tiermoe.cluster.api.settings import ApiSettings
from tiermoe.cluster.api.templates import ChatTemplate, load_chat_template
from tiermoe.cluster.api.tools import calling
from tiermoe.cluster.config import configs_dir, default_model_dir
from tiermoe.cluster.jobs.serve import _say_what_chats_lack
from tiermoe.errors import CheckpointError, ConfigError
from tiermoe.proto.bounded import Worker

USER = {"role": "user", "content": "hi <b> & 'é' 🙂"}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"type": "object"}}}]
_ARGUMENTS = {"a": [1, {"b": None}], "c": "é"}
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": _ARGUMENTS}}

# a feature of published templates each
FEATURES = {
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.role }}"
    "{% if m.role == 'user' %}{% break %}{% endif %}{% endfor %}",
    "json": "{{ messages[0] | tojson }}{{ tools | tojson(indent=4) }}{{ tools | tojson(separators=(',', ':')) }}"
    "{{ messages[0].content | tojson(ensure_ascii=True) }}{{ {'b': 1, 'a': 2} | tojson(sort_keys=True) }}",
    "blocks": "{% if true %}\n    {% for m in messages %}\n  {{- m.content -}}\n{% endfor %}\n{% endif %}\n\nend\n",
    "namespace": "{% set ns = namespace(found=false, n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.found = true %}{% endfor %}{{ ns.n }}{{ ns.found }}",
    "macro": "{% macro show(m, k=2) %}[{{ m.role }}{{ k }}]{% endmacro %}"
    "{% for m in messages %}{{ show(m) }}{% endfor %}",
    "date": "{{ strftime_now('%Y') }}",
    "tokens": "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ image_token }}{{ audio_token }}{{ pad_token }}",
    "undefined": "{{ enable_thinking }}{% if enable_thinking is defined and not enable_thinking %}off{% endif %}"
    "{{ missing }}{{ documents }}",
    "documents": "{% for d in documents or [] %}{{ d.title }}: {{ d['text'] }}{% endfor %}",
    "prompt": "{{ messages[-1].content }}{% if add_generation_prompt %}<a>{% endif %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}",
    "calls": "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
    "{% endfor %}{{ m.content if m.content is defined and m.content is not none else 'none' }}{% endfor %}",
    "strings": "{{ messages[0]['content'].split(' ')[0].strip().title() }}{{ '%s' % 3 }}{{ 'a' ~ 1 }}{{ dict(a=1) }}"
    "{{ messages | map(attribute='role') | join(',') }}{{ messages[::-1][0].role }}",
    "sandbox": "{{ messages.append(1) }}",
    "private": "{% set ns = namespace(_x=1) %}",
    "refused": "{{ raise_exception('roles must alternate') }}",
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<img>", "audio_token": "<aud>"}
CHATS: list[dict[str, Any]] = [
    {"messages": [USER]},
    {"messages": [{"role": "system", "content": " s "}, USER, {"role": "assistant", "content": "a\n"}, USER]},
    {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning": "why"},
                  {"role": "tool", "content": "{}", "tool_call_id": "call00001"}], "tools": TOOLS},
    {"messages": [USER], "options": {"enable_thinking": False}, "documents": [{"title": "T", "text": "x"}]},
    {"messages": [USER, {"role": "assistant", "content": "So "}], "add_generation_prompt": False,
     "continue_final_message": True},
]  # fmt: skip


def checkpoint(folder: Path, files: dict[str, Any], tokenizer: Tokenizer | None = None) -> Path:
    """A folder with a tokenizer and these files, objects as JSON."""
    folder.mkdir(exist_ok=True)
    made = tokenizer or Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    made.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def theirs(tokenizer: PreTrainedTokenizerBase, chat: dict[str, Any]) -> str:
    given = {"add_generation_prompt": True} | {name: chat[name] for name in chat if name not in ("messages", "options")}
    return str(tokenizer.apply_chat_template(chat["messages"], tokenize=False, **given, **chat.get("options", {})))


def outcome(render: Any) -> str:
    try:
        return str(render())
    except Exception as failure:
        return f"refused: {str(failure).rpartition('messages: ')[2]}"[:200]  # ours are cut


@pytest.mark.parametrize("feature", FEATURES)
def test_equal_to_transformers(feature: str, tmp_path: Path) -> None:
    config = TOKENS | {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": FEATURES[feature]}
    folder = checkpoint(tmp_path / "model", {"tokenizer_config.json": config})
    tokenizer, ours = AutoTokenizer.from_pretrained(folder), load_chat_template(folder, None)
    assert ours is not None
    for chat in CHATS:
        assert outcome(lambda chat=chat: ours.render(**chat)) == outcome(lambda chat=chat: theirs(tokenizer, chat))


_NAMED = [{"name": "tool_use", "template": "T {{ tools }}"}, {"name": "default", "template": "{{ bos_token }}D"}]
_ADDED = {"__type": "AddedToken", "content": "<b>", "lstrip": False, "normalized": False, "rstrip": False,
          "single_word": False}  # fmt: skip
FILES: dict[str, dict[str, Any]] = {
    "in the configuration": {"tokenizer_config.json": {"chat_template": "{{ bos_token }}C", "bos_token": "<s>"}},
    "a list": {"tokenizer_config.json": {"chat_template": _NAMED, "bos_token": _ADDED}},
    "a list without a default": {"tokenizer_config.json": {"chat_template": _NAMED[:1]}},
    "a file before the configuration": {
        "tokenizer_config.json": {"chat_template": "C"}, "chat_template.jinja": "F{{ eos_token }}\n"},
    "further files": {
        "chat_template.jinja": "F", "additional_chat_templates/tool_use.jinja": "U",
        "additional_chat_templates/rag.jinja": "R", "tokenizer_config.json": {}},
    "the map of special tokens": {
        "tokenizer_config.json": {"chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token }}"},
        "special_tokens_map.json": {"bos_token": {"content": "<x>", "lstrip": False, "normalized": False,
                                                  "rstrip": False, "single_word": False}, "pad_token": "<p>"}},
    "added tokens before the map": {
        "tokenizer_config.json": {
            "chat_template": "{{ bos_token }}{{ pad_token }}", "bos_token": "<s>",
            "added_tokens_decoder": {"0": {"content": "<s>", "special": True}}},
        "special_tokens_map.json": {"bos_token": "<x>", "pad_token": "<p>"}},
    "a model's own tokens": {
        "tokenizer_config.json": {
            "chat_template": "{{ image_token }}{{ audio_token }}{{ boi_token }}", "image_token": "<i>",
            "extra_special_tokens": {"audio_token": "<a>", "boi_token": "<boi>"}}},
    "a class's tokens": {
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer", "chat_template": "{{ eos_token }}|{{ pad_token }}"}},
    "a class that is not there": {
        "tokenizer_config.json": {"tokenizer_class": "NobodysTokenizer", "chat_template": "{{ eos_token }}."}},
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_found_where_transformers_finds_it(case: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", FILES[case])
    named = case == "a class's tokens"
    tokenizer = AutoTokenizer.from_pretrained(folder) if not named else None
    ours = load_chat_template(folder, None)
    assert ours is not None
    if tokenizer is None:  # what the class says; AutoTokenizer rebuilds the vocabulary, which a stub has not
        assert ours.render([USER]) == "<|endoftext|>|<|endoftext|>"
        return
    for chat in ({"messages": [USER]}, {"messages": [USER], "tools": TOOLS}):
        ours_first = outcome(lambda chat=chat: ours.render(**chat))
        assert ours_first[:60] == outcome(lambda chat=chat: theirs(tokenizer, chat))[:60]


def test_a_processors_template_counts_where_there_is_no_other(tmp_path: Path) -> None:
    both = {"chat_template.json": {"chat_template": "J"}, "processor_config.json": {"chat_template": "P"}}
    assert _rendered(checkpoint(tmp_path / "a", both)) == "J"
    assert _rendered(checkpoint(tmp_path / "b", {"processor_config.json": {"chat_template": [_NAMED[1]]}})) == "D"
    assert _rendered(checkpoint(tmp_path / "c", both | {"chat_template.jinja": "F"})) == "F"
    assert load_chat_template(checkpoint(tmp_path / "d", {"tokenizer_config.json": {"bos_token": "<s>"}}), None) is None


def _rendered(folder: Path) -> str:
    template = load_chat_template(folder, None)
    return template.render([USER])


def test_a_file_of_ones_own_has_the_models_tokens(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", {"tokenizer_config.json": {"bos_token": "<s>", "chat_template": _NAMED}})
    (tmp_path / "own.jinja").write_text("{{ bos_token }}own")
    template = load_chat_template(folder, tmp_path / "own.jinja")
    assert template.render([USER]) == template.render([USER], tools=TOOLS) == "<s>own"
    (tmp_path / "bad").write_text("{% for %}")
    with pytest.raises(ConfigError, match="does not compile"):
        load_chat_template(tmp_path / "nothing", tmp_path / "bad")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_chat_template(folder, tmp_path / "missing")
    (folder / "tokenizer_config.json").write_text('{"bos_token": 7, "chat_template": "x"}')
    with pytest.raises(CheckpointError, match="tokenizer's configuration"):
        load_chat_template(folder, None)


def test_the_plain_template_that_ships() -> None:
    template = load_chat_template(default_model_dir(), configs_dir() / "serve" / "plain-chat.jinja")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert template.render(messages) == "system: Be brief.\nuser: hi\nassistant:"


def test_text_comes_in_parts_where_a_template_wants_them() -> None:
    """Templates of some multimodal models read nothing else."""
    template = ChatTemplate("{% for m in messages %}{{ m.content[0]['text'] }};{% endfor %}", {})
    assert template.render([USER, USER]) == f"{USER['content']};" * 2


_THOUGHT = {"role": "assistant", "content": "so", "reasoning_content": "hm"}
_THOUGHT_CALL = _THOUGHT | {"tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("of_one", "answer", "shown"),
    [
        # gpt-oss: one of both with a call
        ("{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}"
         "[{{ m.thinking }}]{{ m.content }}", _THOUGHT_CALL, "[hm\n\nso]"),
        ("{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}"
         "[{{ m.thinking }}]{{ m.content }}", _THOUGHT, "[hm]so"),
        # Ministral: a part of the content
        ("{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{{ '[THINK]' + part.thinking"
         " + '[/THINK]' if part.type == 'thinking' else part.text }}{% endfor %}{% endif %}", _THOUGHT_CALL,
         "[THINK]hm[/THINK]so"),
        ("{{ m.content }}", _THOUGHT, "so"), ("{{ m.reasoning_content }}{{ m.content }}", _THOUGHT_CALL, "hmso"),
    ],
)  # fmt: skip
def test_reasoning_comes_back_as_a_template_takes_it(of_one: str, answer: dict[str, Any], shown: str) -> None:
    template = ChatTemplate("{% for m in messages %}" + of_one + "{% endfor %}", {})
    assert template.render([USER, answer], add_generation_prompt=False).endswith(shown)


@pytest.mark.parametrize("source", ["{% for %}", "{% unknown %}", "{{ messages | nofilter }}"])
def test_a_template_that_does_not_compile_costs_chats_only(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert post("/v1/completions", {"prompt": "hi"}, template=source).status_code == 200
    folder = checkpoint(tmp_path / "model", {"chat_template.jinja": source})
    _say_what_chats_lack(ApiSettings(tokenizer=str(folder)))
    assert "chats are refused: the chat template does not compile" in capsys.readouterr().err


def test_one_of_two_that_does_not_compile() -> None:
    template = ChatTemplate({"default": "D", "tool_use": "{% for %}"}, {})
    assert template.render([USER]) == "D"
    with pytest.raises(ApiError, match="does not compile"):
        template.render([USER], tools=TOOLS)


def test_variables_that_transformers_takes_itself_are_refused() -> None:
    parameters = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"self", "kwargs"}
    assert parameters - {"documents"} <= set(_TEMPLATE_NAMES)


_LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def _loops_on(condition: str) -> ChatTemplate:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return ChatTemplate(f"{{% if {condition} %}}{_LOOP}{{% endif %}}{plain}", {}, "the chat template of 'm'")


def test_a_template_that_never_ends_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A nested loop froze the event loop of a server for good, and its start."""
    monkeypatch.setattr(templates, "RENDER_S", 0.5)
    template = load_chat_template(checkpoint(tmp_path / "model", {"chat_template.jinja": _LOOP}), None)
    assert template.problem.startswith("the chat template of 'model' was not rendered within 0.5 s; send less")
    for tools in ([], TOOLS):
        with pytest.raises(ApiError, match="the chat template of 'model' was not rendered") as caught:
            template.render([USER], tools=tools)
        assert (caught.value.status, caught.value.param) == (400, "messages")
    assert calling(template).refusal == template.problem
    (tmp_path / "own.jinja").write_text(_LOOP)
    with pytest.raises(ConfigError, match=r"the chat template 'own.jinja' was not rendered within 0.5 s"):
        load_chat_template(tmp_path / "nothing", tmp_path / "own.jinja")


def test_an_endless_template_delays_no_other_chat_and_its_process_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _loops_on("messages[0].content == 'loop'")
    monkeypatch.setattr(templates, "RENDER_S", 1.0)
    monkeypatch.setattr("fake_api.ChatTemplate", lambda *_: made)
    process = psutil.Process(WORKERS.idle[-1].pid)
    loop = {"messages": [{"role": "user", "content": "loop"}]}

    async def call(http: Any) -> None:
        hung = asyncio.ensure_future(http.post("/v1/chat/completions", json=loop))
        waiting = asyncio.ensure_future(http.post("/v1/chat/completions", json={"messages": [USER]}))
        answers = 0
        while not hung.done():
            assert (await http.get("/health")).status_code == 200
            assert (await http.post("/v1/completions", json={"prompt": "hi"})).status_code == 200
            answers += 1
            await asyncio.sleep(0.01)
        assert answers > 3
        status, param, message = error(hung.result())
        assert (status, param) == (400, "messages")
        assert message.startswith("the chat template of 'm' was not rendered within 1 s")
        assert (await waiting).status_code == 200

    ask(FakeBackend(), call)
    assert not psutil.wait_procs([process], timeout=20)[1]


def test_tools_that_never_end_cost_tools_only(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _loops_on("tools")
    assert made.problem is None
    monkeypatch.setattr(templates, "RENDER_S", 0.5)
    assert calling(made).refusal == "the model's chat template takes no tools; leave 'tools' out"
    monkeypatch.undo()
    assert made.render([USER]) == USER["content"]


@pytest.mark.parametrize(
    ("source", "why"),
    [("{% for i in range(400) %}{{ 'x' * 100000 }}{% endfor %}", "more than 33554432 characters"),
     ("{{ 'x' * 10**10 }}{{ messages }}", "needs more than 1024 MiB")],
)  # fmt: skip
def test_what_a_template_makes_is_bounded(source: str, why: str) -> None:
    with pytest.raises(ApiError, match=why) as caught:
        ChatTemplate(source, {}).render([USER])
    assert caught.value.status == 400


def test_a_process_that_ends_twice_over_a_chat_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    plain = Worker.ask

    def dies(self: Any, *given: Any) -> Any:
        os.kill(self.pid, signal.SIGKILL)
        return plain(self, *given)

    monkeypatch.setattr(Worker, "ask", dies)
    with pytest.raises(ApiError, match="the process that renders the model's chat template ended") as caught:
        template.render([USER])
    assert caught.value.status == 503
    monkeypatch.undo()
    assert template.render([USER]) == USER["content"]


def test_rendering_imports_no_torch(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", {
        "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "chat_template": FEATURES["calls"]}
    })  # fmt: skip
    code = (
        "import sys; from pathlib import Path; from tiermoe.cluster.api.tools import calling\n"
        "from tiermoe.cluster.api import templates\n"
        f"template = templates.load_chat_template(Path({str(folder)!r}), None); calling(template)\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
        "print(templates.WORKERS.helper.pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        helper = psutil.Process(int(server.stdout.readline()))
        workers = [child for child in helper.children() if child.status() != psutil.STATUS_ZOMBIE]
        family = [helper, *workers]
        assert len(family) > 1
        for process in family:
            assert not [part.path for part in process.memory_maps() if "libtorch" in part.path]
        server.kill()


def test_a_keys_chats_delay_no_others() -> None:
    """Templates that look at all messages for each message take seconds for long chats, and one client's others waited
    behind them, minutes for a flood. Long chats of a key delay not even its short ones."""

    async def run() -> None:
        offload, over = Offload(), threading.Event()
        flood = [asyncio.ensure_future(offload.chat("one", 2**20, over.wait)) for _ in range(64)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="64 long chats wait already"):
            await offload.chat("one", 2**20, over.wait)
        assert await offload.chat("other", 2**20, lambda: "long") == "long"
        assert await offload.chat("one", 100, lambda: "short") == "short"
        over.set()
        assert await asyncio.gather(*flood) == [True] * 64
        offload.close()

    asyncio.run(asyncio.wait_for(run(), 60))
