"""What `tiermoe serve` is started with: a file and options over it, checked before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Command

from tiermoe.cluster.api.settings import LimitSettings
from tiermoe.cluster.jobs import serve


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("colour: red", [], "unknown key 'colour'"),
        ("limits: {waiting: -1}", [], "key 'limits.waiting' is -1"),
        ("deployment: abcdef", [], "give --attach"),
        ("limits: {request_s: 5}", [], "set request_deadline_s"),
        ("tokenizer: /nowhere", [], "no tokenizer in '/nowhere'"),
        ("", ["--api-key-file", "/nowhere/key"], "cannot be read"),
        ("", ["--chat-template", "/nowhere/template"], "cannot be read"),
        ("", ["--deployment", "abcdef"], "--attach"),
        ("", ["--allow-origin", "https://a.example", "--allow-origin", "a.example"], "'a.example' is no origin; give"),
        ("", ["--allowed-host", "a.example:8000"], "'a.example:8000' is no host; give a name"),
        ("allow_origins: [https://a.example/x]", [], "'https://a.example/x' is no origin"),
        ("", ["--attach", "127.0.0.1:1", "--budget", "25%"], "belongs to the runtime"),
        ("", ["--port", "0", "--policy", "nothing"], "no policy"),
        ("", ["--edge-replicas", "2"], "start more servers with `tiermoe serve --attach`"),
        ("replicas: 2", [], "start more servers with `tiermoe serve --attach`"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused_in_one_line(
    text: str, options: list[str], words: str, tmp_path: Path, command: Command
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    if text:
        options = [*options, "--server-config", str(file)]
    assert words in command.refusal("serve", "--device", "cpu", "--port", "0", *options)


def test_options_come_over_the_servers_configuration(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("request_log: json\nmodel_name: a\nlimits: {waiting: 3, body_s: 5}\n")
    found = serve._settings(file, {"model_name": "b", "request_log": None, "limits": {"waiting": 0}})
    assert (found.model_name, found.request_log) == ("b", "json")
    assert (found.limits.waiting, found.limits.body_s) == (0, 5)
    plain = serve._settings(None, {"chat_template": Path("a.jinja"), "limits": {}})
    assert (plain.limits, plain.request_log) == (LimitSettings(), "text")
    assert Path(str(plain.chat_template)).is_absolute()
    pages = serve._settings(None, {"allow_origins": ["https://a.example/", "*"], "allowed_hosts": []})
    assert (pages.allow_origins, pages.allowed_hosts) == (("https://a.example", "*"), ())
