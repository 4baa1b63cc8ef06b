"""/metrics as Prometheus reads it, and the dashboard that asks for it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_api import FakeBackend, ask
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

import tiermoe
from tiermoe.actors.engine.stats import EngineStats, HostMemoryStats, LayerStats
from tiermoe.actors.policies.drafts import DraftStats
from tiermoe.cluster.api.metrics import RuntimeCounters
from tiermoe.cluster.attach import Sample
from tiermoe.proto.options import Traffic

_TO_NDP = Traffic(7, 6, 700, 600, 0.5).of_client() | {"rows_sent": 7, "rows_received": 6}
_LEADS = EngineStats(
    [LayerStats(hits=5, misses=3, late_prefetches=1, ndp_experts=2, bytes_loaded_demand=96)],
    host_memory=HostMemoryStats(
        slots=4, budget_bytes=128, hits=2, misses=1, bytes_demand=32, bytes_prefetch=64, bytes_wasted=16,
        waited_s=0.125, gbps=1.0, read_bytes=100, longest_s=0.25,
    ),
)  # fmt: skip
_SAMPLES = (
    Sample(
        "d", "lead", "lead", "10.0.0.1", "n1", 0, 1, 5.0, 10, 0.5, _LEADS.counters() | {"steps": 4, "step_s": 2.5},
        {"ndp/0": _TO_NDP, "store/1": Traffic(messages_received=2, bytes_received=64, waited_s=0.25).of_client()},
    ),
    Sample(
        "d", "ndp/0", "ndp", "10.0.0.2", "n2", 1, 2, 5.0, 10, 0.5,
        {"batches": 7, "rows": 7, "pairs": 20, "busy_s": 0.25} | Traffic(6, 7, 600, 700, 0.0, 0.375).of_server(),
    ),
    Sample("d", "store/1", "store", "10.0.0.2", "n2", 0, problem="it does not answer"),
    Sample("d", "matcher", "matcher", None, None, 0, 3, 5.0, 1, 0.5, {"search_s": 1.0, "update_s": 2.0}),
    Sample("d", "store/0", "store", "10.0.0.1", "n1", 0, 4, 5.0, 1, 0.5, {"experts_sent": 2, "expert_bytes_sent": 64}),
)  # fmt: skip
_DASHBOARD = Path(tiermoe.__file__).parent / "configs" / "grafana" / "tiermoe.json"


@pytest.fixture(scope="module")
def page() -> str:
    """After two requests, one refused. The runtime is not asked at every scrape."""
    backend = FakeBackend(cached=1)
    backend.samples = list(_SAMPLES)

    async def call(http: httpx.AsyncClient) -> str:
        await http.post("/v1/completions", json={"prompt": "hi", "n": 2, "keep_alive": 5})
        await http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2})
        await http.post("/v1/completions", json={"prompt": ""})
        first = await http.get("/metrics")
        asked = backend.asked
        assert (await http.get("/metrics")).status_code == 200
        assert backend.asked == asked
        return first.text

    return ask(backend, call)


@pytest.fixture(scope="module")
def families(page: str) -> dict[str, Metric]:
    found = list(text_string_to_metric_families(page))
    assert len({family.name for family in found}) == len(found)
    return {family.name: family for family in found}


def test_values(families: dict[str, Metric]) -> None:
    values = {
        ("request_success_total", "stop"): 2, ("request_success_total", "length"): 1, ("prompt_tokens_total",): 9,
        ("generation_tokens_total",): 8, ("time_to_first_token_seconds_count",): 3,
        ("inter_token_latency_seconds_count",): 5, ("e2e_request_latency_seconds_count",): 3,
        ("request_queue_time_seconds_count",): 3, ("expert_hits_total",): 5,
        ("expert_bytes_loaded_total", "prefetch"): 64, ("kv_cache_usage_ratio",): 0.25,
        ("prefix_cache_queries_total",): 9, ("prefix_cache_hits_total",): 3,
        ("request_prompt_tokens_count",): 3, ("request_prompt_tokens_sum",): 9,
        ("request_generation_tokens_count",): 3, ("request_generation_tokens_sum",): 8,
        ("request_prefill_time_seconds_count",): 3, ("request_decode_time_seconds_count",): 3,
        ("request_time_per_output_token_seconds_count",): 3,
    }  # fmt: skip
    found = {(s.name, *s.labels.values()): s.value for family in families.values() for s in family.samples}
    assert {key: found[f"tiermoe_{key[0]}", *key[1:]] for key in values} == values
    counters = (
        "expert_misses", "expert_late_prefetches", "expert_near_data", "expert_other_gpu", "expert_bytes_wasted",
        "blocked_io_seconds", "ndp_tokens", "substitutions",
    )  # fmt: skip
    wanted = [*(f"{name}_total" for name in counters), "num_requests_running", "num_requests_waiting"]
    assert {(f"tiermoe_{name}",) for name in wanted} <= set(found)


def test_each_process_counts_by_node_worker_and_kind(families: dict[str, Metric]) -> None:
    """A process without an answer is down and has no counters; memory and CPU are on Ray's dashboard."""
    lead, near, away = ("10.0.0.1", "lead", "lead"), ("10.0.0.2", "ndp/0", "ndp"), ("10.0.0.2", "store/1", "store")
    values = {
        ("worker_up", *lead): 1, ("worker_up", *away): 0, ("worker_up", "", "matcher", "matcher"): 1,
        ("worker_restarts_total", *near): 1, ("worker_restarts_total", *lead): 0,
        ("worker_experts_total", *lead, "slot"): 5, ("worker_experts_total", *lead, "loaded"): 2,
        ("worker_experts_total", *lead, "waited"): 1, ("worker_experts_total", *lead, "near_data"): 2,
        ("worker_expert_bytes_loaded_total", *lead, "demand"): 96, ("worker_step_seconds_total", *lead): 2.5,
        ("peer_rows_sent_total", *lead, "ndp/0"): 7, ("peer_rows_received_total", *lead, "ndp/0"): 6,
        ("peer_bytes_sent_total", *lead, "ndp/0"): 700, ("peer_wait_seconds_total", *lead, "ndp/0"): 0.5,
        ("peer_bytes_received_total", *lead, "store/1"): 64, ("peer_wait_seconds_total", *lead, "store/1"): 0.25,
        ("worker_host_memory_hits_total", *lead): 2, ("worker_host_memory_misses_total", *lead): 1,
        ("worker_disk_bytes_read_total", *lead, "demand"): 32, ("worker_disk_bytes_read_total", *lead, "prefetch"): 64,
        ("worker_disk_bytes_wasted_total", *lead): 16, ("worker_disk_wait_seconds_total", *lead): 0.125,
        ("worker_rows_total", *near): 7, ("worker_busy_seconds_total", *near): 0.25,
        ("worker_answering_seconds_total", *near): 0.375, ("worker_bytes_received_total", *near): 700,
        ("worker_store_bytes_total", "10.0.0.1", "store/0", "store"): 64,
        ("worker_search_seconds_total", "", "matcher", "matcher"): 1,
    }  # fmt: skip
    labels, found, of_processes = ("node", "worker", "kind", "place", "cause", "peer"), {}, []
    for sample in (s for family in families.values() for s in family.samples):
        if sample.name.startswith(("tiermoe_worker_", "tiermoe_peer_")):
            assert set(labels[:3]) <= set(sample.labels) <= set(labels)
            of_processes.append(sample)
            key = (sample.labels[label] for label in labels if label in sample.labels)
            found[sample.name.removeprefix("tiermoe_"), *key] = sample.value
    assert {key: found[key] for key in values} == values
    assert {s.name for s in of_processes if s.labels["worker"] == "store/1"} == {
        "tiermoe_worker_up", "tiermoe_worker_restarts_total"
    }  # fmt: skip
    assert not re.search("rss|cpu|(?<!host_)memory", " ".join(s.name for s in of_processes))


def test_every_query_of_the_dashboard_is_of_a_metric_and_labels_that_are_there(page: str) -> None:
    board: dict[str, Any] = json.loads(_DASHBOARD.read_text(encoding="utf-8"))
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    labels: dict[str, set[str]] = {}
    for sample in samples:
        labels.setdefault(sample.name, {"instance"}).update(sample.labels)
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    queries += [item["definition"] for item in board["templating"]["list"] if "definition" in item]
    assert len(queries) > 20
    for query in queries:
        names = set(re.findall(r"tiermoe_\w+", query))
        assert names, query
        assert names <= set(labels), (query, names - set(labels))
        by = {word for group in re.findall(r"by \(([^)]*)\)", query) for word in group.split(", ")}
        assert by <= set().union(*(labels[name] for name in names)), query
        assert query.count("(") == query.count(")")


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = json.loads(_DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not own & cells
        assert at["x"] + at["w"] <= 24
        cells |= own


def test_drafts_are_counted() -> None:
    counters = RuntimeCounters()
    counters.stats = EngineStats(drafts=DraftStats(4, 20, 14, 48.0, -0.25)).as_dict()
    found = {sample.name: sample.value for family in counters.collect() for sample in family.samples}
    names = ("steps_total", "tokens_total", "accepted_tokens_total", "extra_experts_total", "saved_seconds")
    assert [found[f"tiermoe_draft_{name}"] for name in names] == [4, 20, 14, 48.0, -0.25]
    counters.stats = EngineStats().as_dict()
    assert not any("draft" in family.name for family in counters.collect())
