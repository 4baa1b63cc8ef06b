"""What the figures say, in sentences that are made from them: where the paper's order holds, and why where not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import mean

from ..figures import Row, cells, median_of, paired, per_token

OWN = "fmoe"
# Section 6.2: the part of each baseline's TPOT that fMoE saves, mean over the paper's models and data sets.
PAPER_SAVES = {"deepspeed-inference": 0.70, "mixtral-offloading": 0.61, "promoe": 0.55, "moe-infinity": 0.48}
PAPER_HITS = ("fmoe", "mixtral-offloading", "promoe", "moe-infinity", "deepspeed-inference")  # best first
_SOURCES = ("expert-map", "next-gate")


def against_baselines(rows: Sequence[Row], setting: str, tokens: int) -> Iterator[str]:
    """One sentence or two for each baseline: where fmoe's TPOT is lower, and what the counters say where it is not."""
    by_cell = cells(rows, setting)
    for baseline in (*PAPER_SAVES, "next-gate", "on-demand"):
        ratios = {
            cell: paired(of[OWN], of[baseline], "tpot_s")
            for cell, of in by_cell.items()
            if baseline in of and OWN in of
        }
        if not ratios:
            continue
        lost = [cell for cell, ratio in ratios.items() if not ratio < 1]
        paper = f" (the paper: {PAPER_SAVES[baseline]:.0%} lower)" if baseline in PAPER_SAVES else ""
        text = (
            f"**{baseline}**: fmoe's TPOT is lower in {len(ratios) - len(lost)} of {len(ratios)} cells, and "
            f"{_changed(mean(ratios.values()))} on average{paper}."
        )
        if lost:
            where = "In the others" if len(lost) < len(ratios) else "In them all"
            text += f" {where} ({_named(lost)}), " + _why(by_cell, lost, baseline, tokens)
        yield text


def hit_rate_order(rows: Sequence[Row], setting: str) -> str:
    """How often each neighbouring pair of the paper's order of hit rates holds."""
    by_cell = cells(rows, setting)
    parts = []
    for better, worse in pairwise(PAPER_HITS):
        both = [of for of in by_cell.values() if better in of and worse in of]
        holds = sum(of[better]["hit_rate"] > of[worse]["hit_rate"] for of in both)
        parts.append(f"{better} above {worse} in {holds} of {len(both)}")
    return "The paper's order of hit rates, pair by pair: " + "; ".join(parts) + " cells."


def waited_hits(rows: Sequence[Row], setting: str, tokens: int) -> str | None:
    """What a higher hit rate than fmoe's is worth where the forward waits for its prefetches; None where none is."""
    by_cell = cells(rows, setting)
    higher = [
        of for of in by_cell.values()
        if {OWN, "mixtral-offloading"} <= of.keys() and of["mixtral-offloading"]["hit_rate"] > of[OWN]["hit_rate"]
    ]  # fmt: skip
    if not higher:
        return None
    theirs, mine = ([per_token(of[name], tokens) for of in higher] for name in ("mixtral-offloading", OWN))
    longer = sum(a.blocked_ms > b.blocked_ms for a, b in zip(theirs, mine, strict=True))
    return (
        f"mixtral-offloading has the higher hit rate in {len(higher)} of {len(by_cell)} cells, "
        f"{mean(x.hit_rate for x in theirs):.1%} against {mean(x.hit_rate for x in mine):.1%} on average: it waits for "
        f"what it asked for one layer ahead, so that a hit can have been waited for. In {longer} of these cells it "
        f"waits longer for copies than fmoe, {mean(x.blocked_ms for x in theirs):.1f} ms for each token against "
        f"{mean(x.blocked_ms for x in mine):.1f} ms on average."
    )


def of_matcher(rows: Sequence[Row], setting: str, layers: int) -> str | None:
    """Whether the matcher's commands came in time, mean over fmoe's cells; None where no matcher took part."""
    mine = [row for row in rows if (row["setting"], row["policy"]) == (setting, OWN)]
    found = [row for row in mine if median_of(row, "matcher.lag_us_p50")]
    if not found:
        return None
    lag_ms = mean(median_of(row, "matcher.lag_us_p50") for row in found) / 1e3
    layer_ms = mean(row["tpot_ms"] for row in found) / layers
    commands = sum(median_of(row, "matcher.commands") for row in found)
    late = sum(median_of(row, "matcher.late") for row in found)
    queued = {name: sum(median_of(row, f"prefetch_sources.{name}.queued") for row in found) for name in _SOURCES}
    fallen = queued["next-gate"] / sum(queued.values()) if sum(queued.values()) else 0.0
    return (
        f"The matcher's commands reached fmoe's forward {lag_ms:.1f} ms after the context was published (median), "
        f"{lag_ms / layer_ms:.1f} times what a layer takes ({layer_ms:.2f} ms); {late / max(commands + late, 1):.1%} "
        f"of them came too late, and {fallen:.1%} of what fmoe prefetched were next-gate's guesses, to which it falls "
        "back while the matcher is of no use."
    )


def of_resting(rows: Sequence[Row], setting: str) -> str | None:
    """Where prefetch had turned itself off at the end of a repetition; None where it never had."""
    resting = [
        f"{row['policy']} at {row['budget']} and {row['link_gbps']:g} GB/s ({sum(map(bool, values))} of {len(values)})"
        for row in rows
        if row["setting"] == setting and any(values := row["spread"].get("prefetch_resting", {}).get("values", ()))
    ]
    return f"Prefetch had turned itself off at the end of repetitions of {', '.join(resting)}." if resting else None


def best_policies(rows: Sequence[Row], setting: str) -> str:
    """Which policy has the lowest TPOT in each cell."""
    best = []
    for (budget, gbps), of in cells(rows, setting).items():
        name = min(of, key=lambda policy: of[policy]["tpot_ms"])
        best.append(f"{name} at {budget} and {gbps:g} GB/s ({of[name]['tpot_ms']:.1f} ms)")
    return "Lowest TPOT: " + ", ".join(best) + "."


def ablation(rows: Sequence[Row], tokens: int) -> Iterator[str]:
    """What each step from T to T+S to T+S+delta changes, mean over the cells."""
    by_cell = cells(rows, "7:3")
    steps = (("fmoe-t", "fmoe-ts", "Semantic search (S)"), ("fmoe-ts", "fmoe", "Selection by delta"))
    for before, after, what in steps:
        both = [of for of in by_cell.values() if before in of and after in of]
        if not both:
            continue
        points = 100 * mean(of[after]["hit_rate"] - of[before]["hit_rate"] for of in both)
        won = sum(of[after]["hit_rate"] > of[before]["hit_rate"] for of in both)
        ratio = mean(paired(of[after], of[before], "tpot_s") for of in both)
        loaded = mean(per_token(of[after], tokens).loaded_mb / per_token(of[before], tokens).loaded_mb for of in both)
        yield (
            f"{what} {_moves(points)} the hit rate by {abs(points):.1f} points on average (higher in {won} of "
            f"{len(both)} cells), loads {loaded:.2f} times the bytes, and TPOT is {ratio:.2f} times what it was."
        )


def by_distance_and_capacity(figures: Sequence[Row]) -> Iterator[str]:
    """Where the simulated hit rate is highest, and how much of it distance and capacity decide."""
    for varied, unit in (("distance", "layers"), ("capacity", "maps")):
        found = [f for f in figures if f["varied"] == varied]
        if len(found) < 2:
            continue
        best = max(found, key=lambda f: float(f["hit_rate"]))
        first, last = found[0], found[-1]
        yield (
            f"By {varied}: highest at {best[varied]} {unit} ({best['hit_rate']:.1%}); {first['hit_rate']:.1%} at "
            f"{first[varied]}, {last['hit_rate']:.1%} at {last[varied]}."
        )


def of_correlation(found: Sequence[Row]) -> Iterator[str]:
    """Pearson's r of all pairs, and what its size says."""
    for search in ("semantic", "trajectory"):
        for row in found:
            if row["search"] == search and row["layer"] is None:
                r = row["r"]
                how = "with a store that goes on learning" if row["learns"] else "with a store that stays as it was"
                says = "cannot be given" if r is None else f"is {r:.2f}, {_strength(r)}"
                yield (
                    f"For the {search} search, {how}, r {says}: over {row['pairs']} matches the similarity is "
                    f"{row['mean_score']:.3f} on average, and {row['mean_hit']:.1%} of the true top-k are among the "
                    "map's most probable."
                )


def of_recall(found: Sequence[Row]) -> str:
    """Which source names most at each distance."""
    parts = []
    for distance in sorted({row["distance"] for row in found}):
        best = max((row for row in found if row["distance"] == distance), key=lambda row: float(row["recall"]))
        parts.append(f"{best['source']} at {distance} ({best['recall']:.3f})")
    return "The source that names most of the true top-k, by distance: " + ", ".join(parts) + "."


def of_balance(balance: Mapping[str, float], experts: int, top_k: int) -> str:
    """How even the routing is that all of them predict."""
    return (
        f"Routing on this model: the entropy of an expert's share is {balance['entropy']:.1%} of that of even routing; "
        f"the {top_k} most popular experts of a layer take {balance['top_share']:.1%} of all choices (even: "
        f"{top_k / experts:.1%}); {balance['persistence']:.1%} of a token's experts were used by the token before it "
        "in the same layer, and a cache has those without any prediction."
    )


def _why(
    by_cell: Mapping[tuple[str, float], Mapping[str, Row]], lost: Sequence[tuple[str, float]], baseline: str,
    tokens: int,
) -> str:  # fmt: skip
    mine = [per_token(by_cell[cell][OWN], tokens) for cell in lost]
    theirs = [per_token(by_cell[cell][baseline], tokens) for cell in lost]

    def of(name: str) -> tuple[float, float]:
        return mean(getattr(x, name) for x in mine), mean(getattr(x, name) for x in theirs)

    (blocked, their_blocked), (rest, their_rest) = of("blocked_ms"), of("rest_ms")
    text = (
        f"per generated token fmoe waits {blocked:.1f} ms for copies (theirs {their_blocked:.1f} ms) and takes "
        f"{rest:.1f} ms besides ({their_rest:.1f} ms): the difference is mostly "
    )
    if blocked - their_blocked <= rest - their_rest:
        return text + "not in copies, but in the host's work and what shares the processor with it."
    causes: Sequence[tuple[str, float, str, Callable[[float], str]]] = (
        ("hit_rate", -1, "its hit rate is lower", "{:.1%}".format),
        ("late", 1, "more of its misses were prefetches still on their way", "{:.1%}".format),
        ("wasted", 1, "more of what it prefetched left unused", "{:.1%}".format),
        ("loaded_mb", 1, "it moves more bytes for each token", "{:.2f} MB".format),
    )
    found = []
    for name, sign, what, shown in causes:
        own, other = of(name)
        if sign * (own - other) > 0:
            found.append(f"{what} ({shown(own)} against {shown(other)})")
    return text + "in copies: " + ("; ".join(found) if found else "no single counter explains it") + "."


def _changed(ratio: float) -> str:
    return f"{1 - ratio:.0%} lower" if ratio <= 1 else f"{ratio - 1:.0%} higher"


def _named(found: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{budget} at {gbps:g} GB/s" for budget, gbps in found)


def _moves(points: float) -> str:
    return "raises" if points >= 0 else "lowers"


def _strength(r: float) -> str:
    size = "hardly any" if abs(r) < 0.1 else "a weak" if abs(r) < 0.3 else "a moderate" if abs(r) < 0.6 else "a strong"
    return f"{size} {'positive' if r >= 0 else 'negative'} correlation"
