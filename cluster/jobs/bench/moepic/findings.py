"""What the figures say, in sentences that are made from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from ..figures import Row, cells, paired
from ..metrics import Bar
from .calibration import Calibration

OWN = "moepic"
BASELINES = ("pre-gated", "mixtral-offloading", "adapmoe", "moe-infinity")
LIMIT = 0.7  # of the best baseline's TPOT, where loading is two to three times computing
BAR_BUDGETS = ("0.25", "0.5")
# Table 3: TTFT and TPOT without a part over those with it.
PAPER_ABLATION = {"moepic-no-sp": (1.05, 1.32), "moepic-no-lcp": (1.09, 1.19), "moepic-no-cca": (1.21, 1.46)}
PAPER_LOWER = (0.3751, 0.6573)  # section 4.2: the part of the baselines' TPOT that MoEpic saves, least and most
PAPER_MEMORY = (0.3745, 0.5004)  # section 4.3: the part of the caching baselines' memory that it saves
PAPER_GAIN = {"lru": 5.83, "lfu": 1.53}  # Table 1, 30 of 60 experts (its text has the two the other way round)
CONFIGURED = "configurator.reconfigurations"


def best_baseline(of: Mapping[str, Row]) -> str | None:
    """The baseline with the lowest TPOT of a cell; None where there is none."""
    found = [name for name in BASELINES if name in of]
    return min(found, key=lambda name: float(of[name]["tpot_ms"])) if found else None


def bars_of(rows: Sequence[Row], calibration: Calibration) -> list[Bar]:
    """One for each budget of the issue and each link in the regime: moepic's TPOT over that of the best baseline."""
    bars = []
    for (budget, gbps), of in cells(rows, "budgets").items():
        best = best_baseline(of)
        if budget in BAR_BUDGETS and calibration.in_regime(gbps) and OWN in of and best is not None:
            name = f"tpot over {best}, budget {budget}, {gbps:g} GB/s"
            bars.append(Bar(name, paired(of[OWN], of[best], "tpot_s"), "<=", LIMIT))
    return bars


def missed(rows: Sequence[Row], calibration: Calibration) -> list[tuple[str, float, str]]:
    """Budget, link and best baseline of the cells whose bar is missed."""
    found = []
    for (budget, gbps), of in cells(rows, "budgets").items():
        best = best_baseline(of)
        if best is None or OWN not in of or budget not in BAR_BUDGETS or not calibration.in_regime(gbps):
            continue
        if not paired(of[OWN], of[best], "tpot_s") <= LIMIT:
            found.append((budget, gbps, best))
    return found


def of_bars(bars: Sequence[Mapping[str, Any]]) -> str:
    """Whether it holds, in words."""
    if not bars:
        return (
            "No cell of this run is one that the bar is for: budget 0.25 or 0.5, and a link on which loading is two to "
            "three times computing."
        )
    held = sum(bool(bar["ok"]) for bar in bars)
    return (
        f"The bar: at budgets 0.25 and 0.5 and where loading is two to three times computing, moepic's TPOT is at most "
        f"{LIMIT:g} of the best baseline's. It holds in {held} of {len(bars)} cells."
    )


def against_baselines(rows: Sequence[Row]) -> Iterator[str]:
    """One sentence for each baseline: in how many cells moepic's TPOT and TTFT are lower, and by how much."""
    by_cell = cells(rows, "budgets")
    for baseline in (*BASELINES, "cache-only", "prefetch-only", "on-demand"):
        both = [of for of in by_cell.values() if baseline in of and OWN in of]
        if not both:
            continue
        tpot, ttft = ([paired(of[OWN], of[baseline], name) for of in both] for name in ("tpot_s", "ttft_s"))
        paper = f" (the paper: {PAPER_LOWER[0]:.0%} to {PAPER_LOWER[1]:.0%} lower)" if baseline in BASELINES else ""
        yield (
            f"**{baseline}**: moepic's TPOT is lower in {sum(r < 1 for r in tpot)} of {len(both)} cells, "
            f"{_changed(mean(tpot))} on average{paper}, between {_changed(min(tpot))} and {_changed(max(tpot))}; TTFT "
            f"is {_changed(mean(ttft))} on average."
        )


def ablation_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Table 3, for each cell: TTFT and TPOT, and both over moepic's in the same repetition; as plain values."""
    found = []
    for (budget, gbps), of in cells(rows, "ablation").items():
        for name in (OWN, *PAPER_ABLATION):
            if name in of and OWN in of:
                found.append({
                    "budget": budget, "link_gbps": gbps, "policy": name, "ttft_ms": of[name]["ttft_ms"],
                    "ttft_over": paired(of[name], of[OWN], "ttft_s"), "tpot_ms": of[name]["tpot_ms"],
                    "tpot_over": paired(of[name], of[OWN], "tpot_s"), "hit_rate": of[name]["hit_rate"],
                })  # fmt: skip
    return found


def of_ablation(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What leaving each part out costs, mean over the cells, beside the paper's figure."""
    parts = {
        "moepic-no-sp": "the speculative prefetcher (random guesses instead)",
        "moepic-no-lcp": "LCP (random eviction instead)",
        "moepic-no-cca": "the configurator (uniform, theta 0.5 instead)",
    }
    for name, what in parts.items():
        tpot = [float(row["tpot_over"]) for row in found if row["policy"] == name]
        ttft = [float(row["ttft_over"]) for row in found if row["policy"] == name]
        if tpot:
            paper_ttft, paper_tpot = PAPER_ABLATION[name]
            yield (
                f"Without {what} TPOT is {mean(tpot):.2f} times moepic's (the paper: {paper_tpot:.2f}), TTFT "
                f"{mean(ttft):.2f} times ({paper_ttft:.2f})."
            )


def of_sensitivity(rows: Sequence[Row]) -> Iterator[str]:
    """The best fixed theta against the configurator's, and how much zeta matters."""
    for (budget, gbps), of in cells(rows, "sensitivity").items():
        thetas = {name: row for name, row in of.items() if name.startswith("theta ")}
        if thetas:
            best = min(thetas, key=lambda name: float(thetas[name]["tpot_ms"]))
            worst = max(thetas, key=lambda name: float(thetas[name]["tpot_ms"]))
            text = (
                f"Budget {budget}, {gbps:g} GB/s: of the fixed splits {best} is the fastest "
                f"({thetas[best]['tpot_ms']:.1f} ms) and {worst} the slowest ({thetas[worst]['tpot_ms']:.1f} ms)"
            )
            if OWN in of:
                over = paired(of[OWN], thetas[best], "tpot_s")
                text += f"; moepic, which configures itself, takes {over:.2f} times the fastest's"
            yield text + "."
        zetas = {name: float(row["tpot_ms"]) for name, row in of.items() if name.startswith("zeta ")}
        if len(zetas) > 1:
            low, high = min(zetas, key=lambda n: zetas[n]), max(zetas, key=lambda n: zetas[n])
            yield (
                f"zeta changes TPOT by {zetas[high] / zetas[low] - 1:.1%} at most: {low} gives {zetas[low]:.1f} ms, "
                f"{high} {zetas[high]:.1f} ms (the paper: 12% more at 0.05 than at 0.01)."
            )


def of_table1(hits: Mapping[str, Sequence[float]]) -> str | None:
    """LCP against the better of LRU and LFU, mean over the sizes; None where one of them is missing."""
    if not {"lcp", "lru", "lfu"} <= hits.keys():
        return None
    over = {name: 100 * mean(a - b for a, b in zip(hits["lcp"], hits[name], strict=True)) for name in ("lru", "lfu")}
    better = min(over, key=lambda name: over[name])
    verdict = "at least equals" if over[better] >= 0 else "does not reach"
    text = (
        f"On average over the sizes LCP {verdict} {better.upper()}, the better of LRU and LFU: {over[better]:+.2f} "
        f"points (over LRU {over['lru']:+.2f}, over LFU {over['lfu']:+.2f}; the paper: {PAPER_GAIN['lru']:+.2f} and "
        f"{PAPER_GAIN['lfu']:+.2f} at half of the experts)."
    )
    if "belady" in hits:
        gap = 100 * mean(a - b for a, b in zip(hits["belady"], hits["lcp"], strict=True))
        text += f" Belady's rule, which knows the future, has {gap:.1f} points more than LCP."
    return text


def of_configurator(rows: Sequence[Row]) -> str | None:
    """Whether it changed the cut while repetitions were counted; None where no row says anything of it."""
    mine = [row for row in rows if row["policy"] == OWN and CONFIGURED in row["spread"]]
    if not mine:
        return None
    changed = sum(sum(row["spread"][CONFIGURED]["values"]) > 0 for row in mine)
    return f"The configurator changed moepic's cut in counted repetitions of {changed} of {len(mine)} cells."


def of_footprints(found: Sequence[Mapping[str, Any]]) -> str | None:
    """How much less memory moepic takes than each baseline, over the targets that both reach; None where none."""
    by = {(row["policy"], row["target_ms"]): row["bytes"] for row in found if row["bytes"] and not row["at_most"]}
    parts = []
    for baseline in BASELINES:
        saved = [
            1 - by[OWN, target] / nbytes
            for (policy, target), nbytes in by.items()
            if policy == baseline and (OWN, target) in by
        ]
        if saved:
            parts.append(f"{baseline} {mean(saved):.0%} ({len(saved)})")
    if not parts:
        return None
    return (
        f"Memory that moepic saves at the same TPOT, mean over the targets that both reach between measured budgets "
        f"(how many): {', '.join(parts)} (the paper: {PAPER_MEMORY[0]:.0%} to {PAPER_MEMORY[1]:.0%})."
    )


def of_quality(rows: Sequence[Row]) -> Iterator[str]:
    """What each policy that is not lossless costs in quality, over all its cells."""
    lossy: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("perplexity_ratio") is not None:
            lossy.setdefault(row["policy"], []).append(row)
    for name, found in lossy.items():
        perplexity = [float(row["perplexity_ratio"]) for row in found]
        agreement = [float(row["top1_agreement"]) for row in found]
        yield (
            f"**{name}** is not lossless: perplexity is {min(perplexity):.4f} to {max(perplexity):.4f} times that of "
            f"the lossless policies, the most likely token the same in {min(agreement):.1%} to {max(agreement):.1%} of "
            "the places; its TPOT is that of other tokens."
        )


def _changed(ratio: float) -> str:
    return f"{1 - ratio:.0%} lower" if ratio <= 1 else f"{ratio - 1:.0%} higher"
