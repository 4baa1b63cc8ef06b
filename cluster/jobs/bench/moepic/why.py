"""Why a bar is missed: from the timelines of moepic and of the best baseline, and on which links it would hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from .findings import LIMIT, OWN
from .timelines import Decode

Cause = Literal["floor", "host", "link", "late"]
_SATURATED = 0.9  # part of the time in which the link carries something


def cause_of(own: Decode, floor_ms: float, limit_ms: float) -> Cause:
    """What alone keeps TPOT over the limit.

    floor: a step with everything resident takes longer. host: moepic's own step does, its waits left out. link: the
    link is busy nearly all the time. late: it waits, and the link is not.

    Args:
        floor_ms: of a step with everything resident. limit_ms: what TPOT may be.
    """
    if floor_ms > limit_ms:
        return "floor"
    if own.busy_ms > limit_ms:
        return "host"
    return "link" if own.link_share >= _SATURATED else "late"


def explained(record: Mapping[str, Any], floor_ms: float) -> str:
    """One missed cell in words.

    Args:
        record: budget, link_gbps, best, and the timelines of both as plain values ("own", "other").
        floor_ms: see `cause_of`.
    """
    own, other, best = Decode(**record["own"]), Decode(**record["other"]), record["best"]
    limit_ms = LIMIT * other.token_ms
    text = (
        f"**Budget {record['budget']}, {record['link_gbps']:g} GB/s.** Of the timelines: a token of moepic takes "
        f"{own.token_ms:.1f} ms ({best}: {other.token_ms:.1f}), of which the compute waits {own.wait_ms:.1f} ms "
        f"({other.wait_ms:.1f}), experts take {own.experts_ms:.1f} ms ({other.experts_ms:.1f}) and all else "
        f"{own.rest_ms:.1f} ms ({other.rest_ms:.1f}); the link is busy {own.link_share:.0%} of the time "
        f"({other.link_share:.0%}), and {own.idle_wait_ms:.1f} ms are waited while it is idle. The bar asks for "
        f"{limit_ms:.1f} ms, a step with everything resident takes {floor_ms:.1f} ms. "
    )
    reasons: dict[Cause, str] = {
        "floor": (
            f"No cache can hold the bar here: {best} takes only {other.token_ms / floor_ms:.2f} times what computing "
            f"alone does, and the bar needs {1 / LIMIT:.2f} times."
        ),
        "host": (
            f"Not copies but the host keeps it: without any wait moepic's step takes {own.busy_ms:.1f} ms, "
            f"{own.busy_ms - floor_ms:.1f} ms more than with everything resident ({best}'s "
            f"{other.busy_ms - floor_ms:.1f} ms more)."
        ),
        "link": (
            "The link is saturated: what moepic moves for a token takes as long as the token itself, so that fewer "
            "bytes would help, and not earlier ones."
        ),
        "late": (
            "It waits for copies that were not asked for in time, while the link has room: wrong guesses, or a window "
            "that is too short for what was guessed."
        ),
    }
    return text + reasons[cause_of(own, floor_ms, limit_ms)]


def where_it_holds(rows: Sequence[Mapping[str, Any]], budget: float) -> str | None:
    """The simulated links on which moepic's TPOT is at most 0.7 of the best baseline's.

    Args:
        rows: policy, budget, link_gbps, tpot_ms, ratio (loading over computing), as `simulated.tpot_by_link` gives.
    """
    mine = [row for row in rows if row["budget"] == budget]
    links = sorted({row["link_gbps"] for row in mine})
    over: dict[float, float] = {}
    for gbps in links:
        tpot = {row["policy"]: row["tpot_ms"] for row in mine if row["link_gbps"] == gbps}
        others = [value for name, value in tpot.items() if name != OWN]
        if OWN in tpot and others and min(others):
            over[gbps] = tpot[OWN] / min(others)
    if not over:
        return None
    ratios = {row["link_gbps"]: row["ratio"] for row in mine}
    holds = [gbps for gbps, value in over.items() if value <= LIMIT]
    if holds:
        each = (f"{gbps:g} GB/s (loading {ratios[gbps]:.1f} times computing: {over[gbps]:.2f})" for gbps in holds)
        where = ", ".join(each)
        return f"Simulated at budget {budget:g}, the bar holds with link.gbps at {where}."
    best = min(over, key=lambda gbps: over[gbps])
    return (
        f"Simulated at budget {budget:g}, the bar holds on none of {', '.join(f'{g:g}' for g in links)} GB/s; moepic "
        f"is best at {best:g} GB/s (loading {ratios[best]:.1f} times computing), with {over[best]:.2f} of the best "
        "baseline's TPOT."
    )
