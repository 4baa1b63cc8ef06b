"""OpenTelemetry spans of requests, made of their records once they have ended: a sink that blocks on nothing.

    "chat MODEL" (server): the request, below the client's span where it sent `traceparent` (W3C Trace Context)
      queue    from the checked request to its first forward
      prefill  to the first token
      decode   to the last token

Attributes have the names of OpenTelemetry's semantic conventions for HTTP servers and generative AI. No span holds text
of a prompt or an answer. OpenTelemetry is imported here only, and only with `--otlp-endpoint`.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from ...errors import ConfigError
from ..host import versions
from .records import ChoiceTimes, RequestRecord

_REMEDY = "pip install 'tiermoe[otel]'"
_PATH = "/v1/traces"  # of OTLP over HTTP


def traces_url(endpoint: str) -> str:
    """Where an OTLP receiver takes traces.

    Args:
        endpoint: its URL, such as http://collector:4318; one with a path is used unchanged.

    Raises:
        ConfigError: it is not an http URL or https.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"OTLP endpoint '{endpoint}' is not an http URL", "give one such as http://127.0.0.1:4318")
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + _PATH


def make_exporter(endpoint: str) -> Any:
    """What sends spans to an OTLP receiver by HTTP.

    Raises:
        ConfigError: the endpoint is malformed, or the packages are not installed.
    """
    url = traces_url(endpoint)
    try:
        import opentelemetry.sdk.trace.export  # noqa: F401
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(f"spans need packages that are not installed ({error.name})", _REMEDY) from error
    return OTLPSpanExporter(endpoint=url)


class Tracer:
    """A sink of records. Spans are sent in batches, by a thread; when the receiver is slow or gone they are dropped.

    Args:
        exporter: of OpenTelemetry.
        at_once: send each span as it ends, on the caller's thread; for tests.
    """

    def __init__(self, exporter: Any, *, at_once: bool = False) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({SERVICE_NAME: "tiermoe", SERVICE_VERSION: versions()["tiermoe"]})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor((SimpleSpanProcessor if at_once else BatchSpanProcessor)(exporter))
        self._tracer = self._provider.get_tracer("tiermoe")
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, record: RequestRecord) -> None:
        """The spans of a request that asked for generation; others have none."""
        if record.asked is None:
            return
        from opentelemetry import trace

        shift_s = record.begun_ns / 1e9 - record.begun_s  # from `perf_counter` to the wall clock

        def nanoseconds(at_s: float) -> int:
            return round((at_s + shift_s) * 1e9)

        name = f"{record.asked.operation} {record.asked.model}"
        span = self._tracer.start_span(
            name, self._propagator.extract(dict(record.trace)), trace.SpanKind.SERVER, _attributes(record),
            start_time=record.begun_ns,
        )  # fmt: skip
        below = trace.set_span_in_context(span)
        for number, times in enumerate(record.choices):
            for part, begin_s, end_s in _parts(times, record.ended_s):
                choice = {"tiermoe.choice": number}
                child = self._tracer.start_span(part, below, attributes=choice, start_time=nanoseconds(begin_s))
                child.end(nanoseconds(end_s))
        if record.reason is not None:
            span.set_attribute("error.type", record.reason)
            if record.status >= 500 or record.status == 200:  # a client's mistake is not an error of the server
                span.set_status(trace.StatusCode.ERROR, record.reason)
        span.end(nanoseconds(record.ended_s))

    def close(self) -> None:
        """Send what is left. Idempotent."""
        self._provider.shutdown()


def _parts(times: ChoiceTimes, ended_s: float) -> list[tuple[str, float, float]]:
    """(name, begin, end) of the parts of a choice that it reached; the last ends with the request."""
    first_forward_s = times.submitted_s + times.waited_s
    if times.started_s is None or (times.first_s is None and not times.queue_s):
        return [("queue", times.submitted_s, times.started_s or ended_s)]
    parts = [("queue", times.submitted_s, first_forward_s)]
    if times.first_s is None or times.last_s is None:
        return [*parts, ("prefill", first_forward_s, max(first_forward_s, ended_s))]
    parts.append(("prefill", min(first_forward_s, times.first_s), times.first_s))
    return [*parts, ("decode", times.first_s, times.last_s)]


def _attributes(record: RequestRecord) -> dict[str, Any]:
    asked = record.asked
    assert asked is not None
    sampling = asked.sampling
    found: dict[str, Any] = {
        "http.request.method": record.method, "url.path": record.path, "http.response.status_code": record.status,
        "gen_ai.operation.name": asked.operation, "gen_ai.provider.name": "tiermoe",
        "gen_ai.request.model": asked.model, "gen_ai.response.model": asked.model,
        "gen_ai.request.max_tokens": sampling.max_tokens, "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p), "gen_ai.request.choice.count": max(1, len(record.choices)),
        "gen_ai.request.stream": asked.stream, "tiermoe.request_id": record.request_id,
    }  # fmt: skip
    if record.key is not None:
        found["tiermoe.key"] = record.key
    if record.choices:
        prompt, cached = record.prompt_tokens()
        found |= {
            "gen_ai.usage.input_tokens": prompt, "gen_ai.usage.cache_read.input_tokens": cached,
            "gen_ai.usage.output_tokens": sum(one.tokens for one in record.choices),
            "gen_ai.response.finish_reasons": [one.finish or "abort" for one in record.choices],
        }  # fmt: skip
    if record.ttft_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = record.ttft_s
    return found
