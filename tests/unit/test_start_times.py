"""What a start says about the seconds left, and the server about what it waits for; what starts first."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
from fake_api import FakeBackend, ask
from rich.console import Console

from tiermoe.cluster import actor_group
from tiermoe.cluster.actor_group import ActorGroup
from tiermoe.cluster.config import RunConfig, engine_settings
from tiermoe.cluster.launch import Launch
from tiermoe.cluster.report import steps as module
from tiermoe.cluster.report.steps import LastStart, Steps, left_s
from tiermoe.cluster.topology.spec import PlannedActor, Role, Topology

BEFORE = {"starting Ray": 4.0, "loading weights": 10.0, "probing": 1.0}


@pytest.mark.parametrize(
    ("step", "elapsed_s", "left"),
    [
        ("starting Ray", 0.0, 15.0),
        ("starting Ray", 6.0, 11.0),  # later than then
        ("starting Ray", 20.0, None),  # so late that nothing is known
        ("loading weights", 2.5, 8.5),
        ("probing", 0.0, 1.0),
        ("another step", 0.0, None),
    ],
)
def test_seconds_left_by_an_earlier_start(step: str, elapsed_s: float, left: float | None) -> None:
    assert left_s(BEFORE, step, elapsed_s) == left


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.mark.parametrize("terminal", [False, True])
def test_steps_say_what_is_left_only_where_it_is_known(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    out = io.StringIO()
    steps = Steps(Console(file=out, force_terminal=terminal, width=100), BEFORE)
    shown = []
    with steps:
        for step, took_s in (("starting Ray", 3.0), ("joining", 1.0), ("loading weights", 12.0)):
            steps(step)
            shown.append(steps.__rich__().plain)
            clock.now_s += took_s
        shown.append(steps.__rich__().plain)
    with steps:  # entered once more
        steps("probing")
        clock.now_s += 0.5
    assert shown == [
        "starting Ray ... (ready in about 15 s)", "joining ...", "loading weights ... (ready in about 11 s)",
        "loading weights ... (ready in about 1 s)",
    ]  # fmt: skip
    assert steps.seconds == {"starting Ray": 3.0, "joining": 1.0, "loading weights": 12.0, "probing": 0.5}
    if not terminal:
        assert out.getvalue().splitlines() == [*shown[:3], "probing ... (ready in about 1 s)"]


def test_starts_are_known_by_command_and_configuration(tmp_path: Path) -> None:
    file, config, other = tmp_path / "cache" / "starts.json", RunConfig(), RunConfig(budget="50%")
    assert LastStart("serve", config, file).seconds == {}
    LastStart("serve", config, file).remember(BEFORE)
    assert LastStart("serve", config, file).seconds == BEFORE
    assert list(LastStart("serve", config, file).seconds) == list(BEFORE)
    assert LastStart("up", config, file).seconds == LastStart("serve", other, file).seconds == {}
    for number in range(70):
        LastStart(f"c{number}", config, file).remember({"a": 1})
    assert LastStart("serve", config, file).seconds == {}  # the oldest is forgotten
    assert LastStart("c69", config, file).seconds == {"a": 1}


@pytest.mark.parametrize("text", ["", "[]", '{"x": 3}', "\x00", '{"KEY": {"a": "b"}}', '{"KEY": {"a": -1}}'])
def test_a_damaged_file_is_as_none(text: str, tmp_path: Path) -> None:
    file = tmp_path / "starts.json"
    last = LastStart("serve", RunConfig(), file)
    file.write_text(text.replace("KEY", last._key))
    damaged = LastStart("serve", RunConfig(), file)
    assert damaged.seconds == {}
    damaged.remember({"a": 1})
    assert LastStart("serve", RunConfig(), file).seconds == {"a": 1}
    LastStart("serve", RunConfig(), Path("/proc/none/starts.json")).remember({"a": 1})  # cannot be written


@pytest.mark.parametrize(
    ("plan", "health", "reason", "after"),
    [
        ({"start_s": BEFORE}, {"state": "loading weights", "since_s": 2.5}, "the runtime is loading weights, ready in "
         "about 8 s", "8"),
        ({}, {"state": "loading weights", "since_s": 2.5}, "the runtime is loading weights", "2"),
        ({"start_s": BEFORE}, {"state": "created"}, "the runtime is created", "2"),
    ],
)  # fmt: skip
def test_ready_says_what_it_waits_for(plan: dict[str, Any], health: dict[str, Any], reason: str, after: str) -> None:
    backend = FakeBackend()
    backend.plan |= plan
    backend.health = health

    async def call(http: httpx.AsyncClient) -> tuple[Any, ...]:
        response = await http.get("/ready")
        return response.status_code, response.json()["reason"], response.headers["retry-after"]

    assert ask(backend, call) == (503, reason, after)


def test_the_lead_is_the_first_process_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray starts as many processes at a time as there are cores. Before, the lead's libraries, which take longest, were
    read 2 s later where there was an NDP worker, whose directory and store came first."""
    made: list[str] = []

    def make(planned: PlannedActor, plain: type, *args: Any, **named: Any) -> Any:
        made.append(plain.__name__)
        return MagicMock()

    def planned(role: Role, *layers: int) -> PlannedActor:
        return PlannedActor(role, role, 0, "here", {}, layers=layers)

    topology = Topology((planned("directory"), planned("store", 0), planned("ndp"), planned("lead", 0)), (), ())
    monkeypatch.setattr(actor_group, "ExpertStore", MagicMock())
    monkeypatch.setattr(actor_group, "ray", MagicMock())
    config = RunConfig(policy="auto")
    launch = Launch(config, engine_settings(config), "store")
    group = ActorGroup("abcdef", MagicMock(topology=topology), MagicMock(make=make), launch)
    monkeypatch.setattr(group, "_wait", lambda *args: None)
    group.start(lambda: 1.0)
    assert made == ["GpuWorker", "EndpointDirectory", "StoreWorker", "NdpWorker"]
    assert group.directory is not None
