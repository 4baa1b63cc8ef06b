"""`tiermoe report`: what is read from result files, and a page that is whole without a network.

No browser is needed: a parser checks that tags are balanced, and that nothing refers to another address.
"""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import traces
from commands import Command

from tiermoe.cluster.config import configs_dir
from tiermoe.cluster.jobs.bench import page, run
from tiermoe.cluster.jobs.bench.metrics import Report, Spread
from tiermoe.cluster.jobs.replay import replay_trace
from tiermoe.cluster.jobs.report import report_command
from tiermoe.cluster.report.results import measurements, percentiles, read_results
from tiermoe.errors import ConfigError

_DOCS = configs_dir().parent / "docs" / "results"
_VOID = {"meta", "br", "img"}
COMMON = {"hardware": {"model": "<CPU & co>", "cores": 2}, "executor": "emulated", "versions": {"python": "3"}}


def row(policy: str, budget: str, tpot_ms: float, **more: Any) -> dict[str, Any]:
    spread = {"tpot_s": vars(Spread.of([tpot_ms / 1e3, tpot_ms / 500])), "expert_bytes_peak": vars(Spread.of([4e6]))}
    found = {"section": "s", "context": "", "policy": policy, "budget": budget, "link_gbps": 2.0, "lossless": True,
             "tpot_ms": tpot_ms, "ttft_ms": 9.0, "hit_rate": 0.5, "blocked_io_s": 0.25, "spread": spread}  # fmt: skip
    return found | more


def compared(**more: Any) -> dict[str, Any]:
    rows = [row("on-demand", "0.25", 4.0), row("all-resident", "1.0", 2.0), row("drop", "0.25", 3.0, lossless=False)]
    return Report("compare", "emulated", rows, settings={"model": "models/tiny"}).as_dict() | COMMON | more


def ran() -> dict[str, Any]:
    return COMMON | {
        "name": "run", "date": "2026-01-01", "model": "tiny", "policy": "next-gate", "lossless": True, "ttft_s": 0.1,
        "tpot_s": 0.002, "finish": "length", "hits": 6, "misses": 2, "decode_hits": 3, "decode_misses": 0,
        "expert_bytes_peak": 4096, "blocked_io_s": 0.5, "writeback_blocked_s": 0.1, "ndp_wait_s": 0.2,
        "plan": {"slots": 1, "experts": 4, "link": {"gbps": 16.0, "latency_us": 10.0, "layer_us": None}},
        "between_ms": percentiles([1.0, 2.0, 3.0]), "residency": [[[2, 0], [5, 0]], [[0, 2], [0, 1]]],
    }  # fmt: skip


def evaluated(policy: str = "drop") -> dict[str, Any]:
    return COMMON | {
        "name": "eval", "model": "/x/tiny", "policy": policy, "lossless": False, "budget": "0.25", "kl_nats": 0.125,
        "perplexity_ratio": 1.1, "top1_agreement": 0.9,
    }  # fmt: skip


def written(folder: Path, **records: dict[str, Any]) -> list[Path]:
    paths = [folder / f"{name}.json" for name in records]
    for path, record in zip(paths, records.values(), strict=True):
        path.write_text(json.dumps(record))
    return paths


class Checked(HTMLParser):
    """Fails on unbalanced tags; collects addresses and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.tags: dict[str, int] = {}
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        named = ("src", "href", "xlink:href", "srcset", "data", "action")
        self.addresses += [value or "" for name, value in attrs if name in named]
        self.addresses += [found for _, value in attrs for found in re.findall(r"url\(([^)]*)\)", value or "")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_names_where_figures_come_from(tmp_path: Path) -> None:
    trace = traces.write(tmp_path / "trace", traces.header(), [[1, 2, 3], [7]]) and tmp_path / "trace"
    served = [{"server": "tiermoe 0.25", "streams": 2, "tpot_p50_ms": 3.0, "ttft_p50_ms": 8.0, "between_ms": []}]
    paths = written(
        tmp_path, compare=compared(), run=ran(), eval=evaluated(), replay=replay_trace(trace, "next-gate", budget=0.5),
        serve=COMMON | {"name": "serve", "settings": {"model": "tiny"}, "rows": served},
    )  # fmt: skip
    report_command(paths, tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    checked = Checked(page)
    assert [address for address in checked.addresses if not address.startswith(("#", "data:image/"))] == []
    assert set(re.findall(r"https?://[^\s\"'<]+", page)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "<script" not in page
    assert "@import" not in page
    assert len(page) < 1e6
    for figure in ("Decode speed against expert memory", "Hit rate by phase", "Pareto front", "Residency", "Latency"):
        assert figure in checked.text
    assert checked.text.index("Decode speed") < checked.text.index("Time to first token")  # the one plot comes first
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert len(captions) == checked.tags["svg"]
    for said in captions:
        assert re.match(r"executor: (emulated|simulated); machine: .+; model: .+; .*python \S+.*; from \w+.json", said)
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):  # an image is seen without its page, too
        assert re.search(r"(emulated|simulated) \| \S+ \| ", svg)
    assert "&lt;CPU &amp; co&gt;" in page
    assert "Not shown: serve.json (time per output token with peak expert memory)" in checked.text


def test_belady_is_a_limit_of_what_loads_on_demand(tmp_path: Path) -> None:
    traces.write(tmp_path / "t", traces.header(experts=16), [[1, 2, 3], [7], [5, 6]], decodes=20)
    records = {
        kind: replay_trace(tmp_path / "t", eviction=kind, budget=0.5) for kind in ("lru", "lfu", "random", "belady")
    }
    rates = {kind: record["hit_rate"] for kind, record in records.items()}
    assert rates["belady"] > 1.05 * max(rates["lru"], rates["lfu"], rates["random"])
    found = measurements({"name": "replays", "rows": list(records.values())}, "r.json")
    assert [one.policy for one in found] == ["on-demand"] * 3 + ["belady"]
    with pytest.raises(ConfigError, match="one request after the other"):
        replay_trace(tmp_path / "t", "next-gate", eviction="belady", budget=0.5)


def test_quality_of_eval_joins_speeds_of_the_same_origin(tmp_path: Path) -> None:
    found = read_results(written(tmp_path, a=compared(), b=evaluated(), c=evaluated("hobbit")))
    drop = next(one for one in found if one.policy == "drop")
    assert (drop.quality or {})["kl_nats"] == 0.125
    assert [one.policy for one in found if one.file == "c.json"] == ["hobbit"]  # without a speed it stays alone
    assert not [one for one in found if one.file == "b.json"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({k: v for k, v in ran().items() if k != "executor"}, "'r.json' lacks 'executor'"),
        (ran() | {"plan": {"experts": 4}}, "'r.json' lacks 'plan.slots'"),
        (ran() | {"hits": "many"}, "'r.json': 'hits'"),
        ({"name": "recall", "rows": []}, "a result of 'recall', which compares no policies"),
        ([], "does not hold a JSON object"),
    ],
)
def test_a_file_that_lacks_a_key_is_named(tmp_path: Path, record: Any, message: str) -> None:
    (tmp_path / "r.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_results([tmp_path / "r.json"])


@pytest.mark.parametrize("text", [None, "{"])
def test_a_file_that_is_no_json_is_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "r.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"r\.json"):
        read_results([path])


def test_results_of_the_documentation_are_read() -> None:
    found = read_results([_DOCS / f"{name}.json" for name in ("moepic", "buddymoe", "fmoe", "activeevict")])
    assert {one.file for one in found} == {"moepic.json", "buddymoe.json", "fmoe.json", "activeevict.json"}
    assert all(one.tpot_ms for one in found if one.file == "moepic.json")


def test_what_cannot_be_shown_is_named_and_the_rest_is_shown(tmp_path: Path, command: Command) -> None:
    others = written(
        tmp_path,
        plan={"model": "m", "spec": {}, "topology": {}, "prediction": {}, "notes": []},
        doctor={"cpu": {}, "memory": {}, "devices": [], "model": None},
        stats={"name": "trace-stats", "rows": 3},
    )
    for other, name in zip(others, ("plan", "doctor", "trace-stats"), strict=True):
        line = command.refusal("report", other, "--out", tmp_path)
        assert f"'{other.name}' is a result of '{name}', which compares no policies" in line
    code, out, err = command("report", *written(tmp_path, run=ran()), *others, "--out", tmp_path)
    assert (code, out.count("report.html")) == (2, 1)
    assert [line.split("'")[1] for line in err.splitlines() if line.startswith("not shown: ")] == [
        other.name for other in others
    ]


def test_results_come_before_their_figures(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report("compare", "emulated", [row("on-demand", "0.25", 4.0)], settings={"model": "m"})
    journal = type("Journal", (), {"discard": lambda self: None})()
    monkeypatch.setattr(run, "run_experiment", lambda *a, **k: (report, journal))

    def fail(*args: object) -> None:
        raise ConfigError("cannot draw", "buy a pen")

    monkeypatch.setattr(page, "write_folder", fail)
    args = ("--policies", "on-demand", "--prompts", "p.txt", "--out", tmp_path / "out")
    code, printed, err = command("bench", "compare", *args, "--json")
    assert code == 2
    assert "cannot draw" in err
    assert json.loads(printed)["rows"][0]["policy"] == "on-demand"
