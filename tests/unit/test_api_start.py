"""What the server is started with: chat templates, key files, options, its port."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tiermoe.cluster.api.settings import read_key
from tiermoe.cluster.api.text import load_chat_template
from tiermoe.cluster.cli import main
from tiermoe.cluster.config import configs_dir, default_model_dir
from tiermoe.errors import ConfigError


def test_the_plain_template_that_ships() -> None:
    template = load_chat_template(default_model_dir(), configs_dir() / "serve" / "plain-chat.jinja")
    assert template is not None
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert template.render(messages) == "system: Be brief.\nuser: hi\nassistant:"


def test_templates_are_found_in_transformers_order(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path, None) is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "{{ bos_token }}D"}]
    settings = {"chat_template": named, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = load_chat_template(tmp_path, None)
    assert found is not None
    assert found.render([]) == "<s>D"
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert load_chat_template(tmp_path, None).render([]) == "own file"  # type: ignore[union-attr]
    (tmp_path / "bad").write_text("{% for %}")
    with pytest.raises(ConfigError, match="does not compile"):
        load_chat_template(tmp_path, tmp_path / "bad")


@pytest.mark.parametrize("text", ["", " \n", "two words", "naïve"])
def test_key_files_that_hold_no_key(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="key file"):
        read_key(str(tmp_path / "key"))


def test_a_key_file() -> None:
    assert read_key(None) is None
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key("/nowhere/key")


def test_applications_are_checked_before_anything_starts() -> None:
    build = pytest.importorskip("tiermoe.cluster.api.app").build
    for args in ({"colour": "red"}, {"limits": {"waiting": -1}}, {"deployment": "abcdef", "config": "laptop"}):
        with pytest.raises(ConfigError):
            build(args)


def test_a_port_is_ours_alone() -> None:
    server = pytest.importorskip("tiermoe.cluster.api.app")
    held = server.PortReservation("127.0.0.1", 0)
    try:
        with pytest.raises(ConfigError, match="choose another --port"):
            server.PortReservation("127.0.0.1", held.port)
        with socket.socket() as proxy:  # as Serve binds it
            proxy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            proxy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            proxy.bind(("127.0.0.1", held.port))
    finally:
        held.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--api-key-file", "/nowhere/key"], "cannot be read"),
        (["--chat-template", "/nowhere/template"], "cannot be read"),
        (["--deployment", "abcdef"], "--attach"),
        (["--attach", "127.0.0.1:1", "--budget", "25%"], "--budget"),
        (["--policy", "nothing"], "no policy"),
    ],
    ids=str,
)
def test_the_command_refuses_before_it_starts_anything(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", "--device", "cpu", *options])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1
