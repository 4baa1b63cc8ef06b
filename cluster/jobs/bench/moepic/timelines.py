"""Where a decode step's time goes, from the engine's timeline: computing, waiting for copies, the link."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import mean
from typing import Any

from .....actors.requests import GenerationRequest, SamplingParams
from .....errors import RuntimeFailure
from ....config import RunConfig, engine_settings
from ....local import LocalWorker
from ..serving import prepared_store, serve

Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class Decode:
    """Of each decode step, mean, in milliseconds.

    wait_ms: the compute waited for a copy. link_ms: the link carried one. idle_wait_ms: it waited while the link was
    idle, or busy with something else than demand and prefetch. experts_ms: layers' experts without those waits.
    rest_ms: attention, norms, head, sampling, scheduling.
    """

    steps: int
    token_ms: float
    wait_ms: float
    link_ms: float
    idle_wait_ms: float
    experts_ms: float

    @property
    def busy_ms(self) -> float:
        """Everything but waiting."""
        return self.token_ms - self.wait_ms

    @property
    def rest_ms(self) -> float:
        return self.busy_ms - self.experts_ms

    @property
    def link_share(self) -> float:
        """Part of the time in which the link carried a copy."""
        return self.link_ms / self.token_ms if self.token_ms else 0.0


def trace_decode(
    config: RunConfig, warm: Sequence[tuple[int, ...]], prompts: Sequence[tuple[int, ...]], max_tokens: int
) -> Decode:
    """Serve `warm`, then `prompts`, one at a time, with a timeline of each.

    Raises:
        RuntimeFailure: a request failed.
    """
    settings = engine_settings(config, trace=True)
    worker = LocalWorker(settings, prepared_store(config, settings))
    with closing(worker):
        worker.start()
        for prompt in warm:
            serve(worker.submit, [prompt], max_tokens)
        found = []
        for number, prompt in enumerate(prompts):
            worker.reset_stats()
            sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            events = list(worker.submit(GenerationRequest(f"timeline-{number}", prompt, sampling)))
            if events[-1].finish != "length":
                raise RuntimeFailure(f"a request ended with {events[-1].finish}", "run again; report it if it stays")
            found.append(decode_of(worker.trace_events(), len(worker.engine.layers)))
    return Decode(
        sum(d.steps for d in found),
        *(mean(getattr(d, name) for d in found)
          for name in ("token_ms", "wait_ms", "link_ms", "idle_wait_ms", "experts_ms")),
    )  # fmt: skip


def decode_of(events: Iterable[dict[str, Any]], layers: int) -> Decode:
    """Of the timeline of one request, whose prompt was one forward: from the end of its last layer to the last one's.

    Args:
        events: of `Timeline.events`. layers: MoE layers of the model.

    Raises:
        RuntimeFailure: there is no decode step in it.
    """
    spans: dict[str, Spans] = {}
    last: list[float] = []
    rows = {1: "compute", 2: "wait", 3: "link", 4: "link"}
    for event in events:
        kind = rows.get(event["tid"]) if event["ph"] == "X" else None
        if kind is not None:
            begin = event["ts"] / 1e3
            spans.setdefault(kind, []).append((begin, begin + event["dur"] / 1e3))
            if kind == "compute" and event["name"] == f"L{layers - 1} experts":
                last.append(begin + event["dur"] / 1e3)
    if len(last) < 2:
        raise RuntimeFailure("a timeline has no decode step", "generate at least two tokens")
    last.sort()
    begin, end = last[0], last[-1]
    compute, wait, link = (joined(spans.get(kind, ()), begin, end) for kind in ("compute", "wait", "link"))
    steps = len(last) - 1
    waited = length(wait)
    return Decode(
        steps, (end - begin) / steps, waited / steps, length(link) / steps,
        (waited - length(common(wait, link))) / steps, (length(compute) - length(common(compute, wait))) / steps,
    )  # fmt: skip


def joined(spans: Iterable[tuple[float, float]], begin: float, end: float) -> Spans:
    """The same time without overlaps, in order, cut to [begin, end]."""
    out: Spans = []
    for start, stop in sorted((max(a, begin), min(b, end)) for a, b in spans):
        if stop <= start:
            continue
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out


def common(a: Spans, b: Spans) -> Spans:
    """Time in both, of two results of `joined`."""
    out, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            out.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return out


def length(spans: Spans) -> float:
    return sum(stop - start for start, stop in spans)
