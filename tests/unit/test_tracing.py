"""Spans of requests, as an exporter gets them."""

from __future__ import annotations

import builtins
from typing import Any

import httpx
import pytest
from fake_api import FakeBackend, ask

from tiermoe.cluster.api.settings import LimitSettings
from tiermoe.cluster.api.tracing import Tracer, make_exporter, traces_url
from tiermoe.errors import ConfigError

memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
_PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def spans_of(body: dict[str, Any], headers: dict[str, str] | None = None, backend: FakeBackend | None = None,
             **options: Any) -> Any:  # fmt: skip
    exporter = memory.InMemorySpanExporter()
    tracer = Tracer(exporter, at_once=True)

    async def call(http: httpx.AsyncClient) -> None:
        await http.get("/health")
        await http.post("/v1/completions", json=body, headers=headers)

    ask(backend or FakeBackend(cached=1), call, sinks=[tracer], **options)
    tracer.close()
    return exporter.get_finished_spans()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_its_parts_in_order_below_it(stream: bool) -> None:
    *parts, whole = spans_of({"prompt": "xyz", "max_tokens": 3, "temperature": 0.5, "stream": stream})
    assert [span.name for span in parts] == ["queue", "prefill", "decode"]
    assert whole.name == "text_completion fake"
    assert whole.parent is None
    assert {span.parent.span_id for span in parts} == {whole.context.span_id}
    assert whole.start_time <= parts[0].start_time
    assert parts[-1].end_time <= whole.end_time
    assert all(span.start_time <= span.end_time for span in (*parts, whole))
    attributes = dict(whole.attributes)
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    wanted = {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "tiermoe", "gen_ai.request.model": "fake",
        "gen_ai.request.max_tokens": 3, "gen_ai.request.temperature": 0.5, "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 3, "gen_ai.usage.cache_read.input_tokens": 1, "http.response.status_code": 200,
        "http.request.method": "POST", "url.path": "/v1/completions", "gen_ai.request.stream": stream,
    }  # fmt: skip
    assert {name: attributes[name] for name in wanted} == wanted
    assert not any("xyz" in str(value).lower() for value in attributes.values())  # nor can an id hold it by chance
    assert whole.status.is_ok or whole.status.is_unset
    assert whole.resource.attributes["service.name"] == "tiermoe"


def test_each_choice_has_its_parts() -> None:
    *parts, whole = spans_of({"prompt": "abc", "n": 2})
    assert [(span.name, span.attributes["tiermoe.choice"]) for span in parts] == [
        (name, number) for number in (0, 1) for name in ("queue", "prefill", "decode")
    ]
    assert whole.attributes["gen_ai.request.choice.count"] == 2


def test_spans_continue_the_clients_trace() -> None:
    *_, whole = spans_of({"prompt": "abc"}, {"traceparent": _PARENT, "tracestate": "vendor=1"})
    assert f"{whole.context.trace_id:032x}" == _PARENT.split("-")[1]
    assert f"{whole.parent.span_id:016x}" == _PARENT.split("-")[2]
    assert whole.context.trace_state.get("vendor") == "1"
    assert spans_of({"prompt": "abc"}, {"traceparent": _PARENT[:-2] + "00"}) == ()  # not sampled, says the client
    assert spans_of({"prompt": "abc"}, {"traceparent": "nonsense"})[-1].parent is None


def test_a_failure_is_an_error_and_a_refusal_is_none() -> None:
    backend = FakeBackend()
    backend.failure = "the worker died"
    *_, whole = spans_of({"prompt": "abc"}, backend=backend)
    assert (whole.attributes["error.type"], whole.status.is_ok) == ("unavailable", False)
    assert whole.attributes["http.response.status_code"] == 503
    limits = LimitSettings(waiting=1)
    (refused,) = spans_of({"prompt": "abc", "n": 3}, backend=FakeBackend(max_requests=1), limits=limits)
    assert (refused.attributes["error.type"], refused.status.is_unset) == ("rate_limit_exceeded", True)
    assert spans_of({"prompt": ""}) == ()  # nothing was to be generated


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://h:4318", "http://h:4318/v1/traces"),
        ("https://h:4318/", "https://h:4318/v1/traces"),
        ("http://h/otlp/v1/traces", "http://h/otlp/v1/traces"),
    ],
)
def test_the_address_of_a_receiver(given: str, url: str) -> None:
    assert traces_url(given) == url


@pytest.mark.parametrize("given", ["h:4318", "grpc://h:4317", "http://", ""])
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="OTLP endpoint"):
        make_exporter(given)


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **named: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        return real(name, *args, **named)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError) as raised:
        make_exporter("http://127.0.0.1:4318")
    assert "opentelemetry" in raised.value.what
    assert raised.value.remedy == "pip install 'tiermoe[otel]'"
