"""`bench draft-table`: drafts of a head for a published shape, simulated, by budget, link and acceptance.

Synthetic routing of a text is replayed on a stated machine, in steps of as many rows as the pricing chooses
(`policies.drafts`, on the virtual clock). Each draft is right with the same chance if those before it are. Rows of
rejected drafts have the routing of another text at the same place. A draft takes the time of one of the model's layers,
with its experts resident.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from rich.progress import Progress

from tiermoe.actors.budget import Budget
from tiermoe.actors.policies.drafts import DraftPricing, Proposal, StepTime, Verified
from tiermoe.cluster.config import load_policy
from tiermoe.cluster.jobs.bench.metrics import Report, advancing, ratio
from tiermoe.cluster.jobs.replay import checked_prefetch, popularity
from tiermoe.cluster.simulate.executor import SimulatedEngine, context_of, eviction_of, policies_of
from tiermoe.cluster.simulate.machine import Machine, load_machine
from tiermoe.cluster.simulate.shapes import shape_named
from tiermoe.cluster.simulate.synthetic import FAMILIES, Generator
from tiermoe.cluster.simulate.trace import Iteration, TraceHeader

from .auto_cells import header_of, request_of
from .cases import DraftTable

_PROMPT, _WARM_UP = 64, 400  # tokens of a prompt; tokens that decode before the clock counts
_SURE = 4  # of each proposal: one class, whose odds the pricing learns


class Rows:
    """The routing of a text and of another one, by token."""

    def __init__(self, header: TraceHeader, case: DraftTable) -> None:
        shape = shape_named(case.shape)
        generator = Generator(FAMILIES[case.family], header.layers, shape.experts, shape.top_k, 1, _PROMPT)
        count = _PROMPT + _WARM_UP + case.max_tokens + case.tokens + 1
        self.right, self.wrong = (
            request_of(header, number, rows, _PROMPT)
            for number, rows in enumerate(generator.requests(2, count, header.distances))
        )

    def step(self, place: int, right: int, wrong: int) -> Iteration:
        """The rows of a step whose last token is the `place`-th that decodes, with drafts that are right and wrong."""
        parts = [self.right.iterations[1 + place + i] for i in range(1 + right)]
        parts += [self.wrong.iterations[1 + place + 1 + right + i] for i in range(wrong)]
        names = ("tokens", "probabilities", "ids", "weights", "next_ids", "next_probabilities")
        joined: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return replace(parts[0], **joined)


def draft_table(case: DraftTable, progress: Progress | None) -> Report:
    """Tokens a second with drafts over those without.

    Raises:
        ConfigError: the shape or the machine is unknown.
    """
    shape = shape_named(case.shape)
    header = header_of(case.shape, shape.moe_layers, shape.experts, shape.top_k, 1)
    slot_bytes = int(3 * shape.hidden * shape.intermediate * case.bits / 8)
    rows = Rows(header, case)
    report = Report("draft-table", "simulated", settings=case.settings(prompt=_PROMPT, warm_up=_WARM_UP))
    advance = advancing(progress, "replaying", len(case.budgets) * len(case.link_gbps) * (len(case.accepted) + 1))
    for budget in case.budgets:
        for link in case.link_gbps:
            machine = _machine(header, case, link, slot_bytes)
            plain_s, _ = _token_s(rows, header, machine, case, budget, None)
            advance()
            row: dict[str, Any] = {"budget": budget, "link_gbps": link, "off_tokens_per_s": 1 / plain_s}
            for chance in case.accepted:
                drafted_s, drafted = _token_s(rows, header, machine, case, budget, chance)
                row |= {f"ratio_{chance:g}": ratio(plain_s, drafted_s), f"drafts_{chance:g}": drafted}
                advance()
            report.rows.append(row)
    return report


def _machine(header: TraceHeader, case: DraftTable, link_gbps: float, slot_bytes: int) -> Machine:
    """The machine of the case, with experts of its bits instead of the header's 16."""
    whole = load_machine(header, case.machine, link_gbps, None, case.policy)
    share = slot_bytes / header.slot_bytes
    return whole.model_copy(update={"link_gbps": link_gbps / share, "expert_s": whole.expert_s * share})


def _token_s(
    rows: Rows, header: TraceHeader, machine: Machine, case: DraftTable, budget: float, chance: float | None
) -> tuple[float, float]:
    """Seconds a token, and drafts a step. chance: that a draft is right; None: there are none."""
    settings, resident = load_policy(case.policy), Budget(share=budget)
    eviction = eviction_of(settings, header)
    prefetch = checked_prefetch(settings, replace(context_of(header), eviction=eviction), header)
    popular = popularity(header, [rows.wrong])
    engine = SimulatedEngine(header, machine, resident, policies_of(
        settings, header, machine, resident, eviction, prefetch, popular,
    ))  # fmt: skip
    engine.forward([("text", rows.right.iterations[0])])
    pricing, draw = DraftPricing(case.tokens), random.Random(3)
    layer_s = machine.dense(1) + machine.experts(header.top_k, header.top_k)
    place, steps, drafts, begun_s, begun = 0, 0, 0, 0.0, 0
    for right, wrong in _chosen(pricing, draw, chance):
        pricing.miss_s, pricing.absent = engine.cache.copy_s(), engine.cache.absent()
        if place >= _WARM_UP + case.max_tokens:
            break
        if not begun and place >= _WARM_UP:
            begun_s, begun, steps, drafts = engine.clock.now_s, place, 0, 0
        before_s, before = engine.clock.now_s, _counts(engine)
        engine.clock.advance((right + wrong) * layer_s)
        engine.forward([("text", rows.step(place, right, wrong))])
        needed, missed, waited_s = (now - then for now, then in zip(_counts(engine), before, strict=True))
        step = StepTime(engine.clock.now_s - before_s, int(needed), int(missed), waited_s)
        pricing.took(step, [Verified(_SURE, right + wrong, right)])
        place, steps, drafts = place + 1 + right, steps + 1, drafts + right + wrong
    return (engine.clock.now_s - begun_s) / (place - begun), drafts / steps


def _chosen(pricing: DraftPricing, draw: random.Random, chance: float | None) -> Iterator[tuple[int, int]]:
    """Of each step: how many drafts are right, and how many behind them are not."""
    while True:
        count = 0 if chance is None else pricing.choose([Proposal(pricing.most, _SURE)], pricing.most)[0]
        right = 0
        while chance is not None and right < count and draw.random() < chance:
            right += 1
        yield right, count - right


def _counts(engine: SimulatedEngine) -> tuple[float, float, float]:
    """Experts that steps needed so far, those of them that were not resident, and seconds of waits for these."""
    totals = engine.cache.core.totals
    return totals.decode_hits + totals.decode_misses, totals.decode_misses, totals.decode_blocked_io_s
