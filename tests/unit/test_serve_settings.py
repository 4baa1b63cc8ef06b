"""What `tiermoe serve` is started with: a file and options over it, checked before anything starts."""

from __future__ import annotations

from pathlib import Path

from tiermoe.cluster.api.settings import LimitSettings
from tiermoe.cluster.jobs import serve


def test_options_come_over_the_servers_configuration(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("request_log: json\nmodel_name: a\nlimits: {waiting: 3, body_s: 5}\n")
    found = serve.ServerOptions(server_config=file, model_name="b", max_waiting=0).settings()
    assert (found.model_name, found.request_log) == ("b", "json")
    assert (found.limits.waiting, found.limits.body_s) == (0, 5)
    plain = serve.ServerOptions(chat_template=Path("a.jinja")).settings()
    assert (plain.limits, plain.request_log) == (LimitSettings(), "text")
    assert Path(str(plain.chat_template)).is_absolute()
    pages = serve.ServerOptions(allow_origin=["https://a.example/", "*"], allowed_host=[]).settings()
    assert (pages.allow_origins, pages.allowed_hosts) == (("https://a.example", "*"), ())
