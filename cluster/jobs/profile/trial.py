"""The quality of each way to choose substitutes, with a random part of each layer's experts resident.

Every expert is in memory and only the routing changes, so quality alone is measured, on held-out text, against the
unchanged model. The rules are plain: no gates, no limits, slot by slot; only the choice of the substitute differs. The
served policy is `policies/buddymoe`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress

from ....actors.engine.layer import MoeLayer
from ....actors.engine.model.model import RouterProbe
from ....actors.policies.buddymoe.buddies import BuddyOptions, BuddyTable, ExpertProfile
from ....actors.store.artifacts import read_profile
from ....actors.store.format import read_manifest
from ....errors import ConfigError
from ...config import engine_settings
from ..bench.serving import prepared_store, run_config, start_worker
from ..evaluate.quality import EvaluationOptions, Quality
from ..evaluate.scoring import LOSSLESS, Evaluation
from ..record.job import Forward, router_probes, wrapped

Ids = NDArray[np.int64]
Weights = NDArray[np.float32]
Rule = Callable[[int, Ids, Weights, Weights], tuple[Ids, Weights]]
"""(layer, ids [T, K], weights [T, K], router probabilities [T, E]) -> ids and weights that run instead."""
Scores = Callable[[int, Ids, Weights], NDArray[Any]]
"""(layer, wanted experts [T], router probabilities [T, E]) -> score of each expert as substitute [T, E]."""
Make = Callable[[NDArray[np.bool_], int], Rule]  # (resident [L, E], seed) -> rule
DROP = "drop, rest renormalised"  # the better way to drop, with which rules are compared


def resident_at_random(layers: int, experts: int, rate: float, seed: int) -> NDArray[np.bool_]:
    """[L, E]: which experts are resident, `rate` of each layer's."""
    generator = np.random.default_rng(seed)
    resident = np.zeros((layers, experts), bool)
    for row in resident:
        row[generator.permutation(experts)[: round(rate * experts)]] = True
    return resident


def substitute(resident: NDArray[np.bool_], scores: Scores, scale: NDArray[Any] | None = None) -> Rule:
    """Slot by slot, the unused resident expert of the greatest positive score replaces an absent one, or it is dropped.

    Args:
        resident: [L, E].
        scale: [L, E, E], factor of the slot's routing weight; None: 1.
    """

    def rule(layer: int, ids: Ids, weights: Weights, probabilities: Weights) -> tuple[Ids, Weights]:
        ids, weights, rows = ids.copy(), weights.copy(), np.arange(len(ids))
        free = np.broadcast_to(resident[layer], (len(ids), resident.shape[1])).copy()  # [T, E]
        free[rows[:, None], ids] = False  # a token uses no expert twice
        for slot in range(ids.shape[1]):
            wanted = ids[:, slot]
            absent = ~resident[layer][wanted]
            scored = np.where(free, scores(layer, wanted, probabilities), 0.0)
            best = scored.argmax(axis=1)
            found = absent & (scored[rows, best] > 0)
            if scale is not None:
                weights[found, slot] *= scale[layer][wanted[found], best[found]].astype(np.float32)
            weights[absent & ~found, slot] = 0.0
            ids[found, slot] = best[found]
            free[rows[found], best[found]] = False
        return ids, weights

    return rule


def by_table(table: NDArray[Any]) -> Scores:
    """Scores from a table [L, E, E] of j (last) for i."""
    return lambda layer, wanted, probabilities: table[layer][wanted]


def by_router(layer: int, wanted: Ids, probabilities: Weights) -> NDArray[Any]:
    """The router's own next choice."""
    return probabilities


def at_random(experts: int, seed: int) -> Scores:
    """An independent draw for every token and slot."""
    generator = np.random.default_rng(seed)
    return lambda layer, wanted, probabilities: 1 - generator.random((len(wanted), experts))


def own_weight(rule: Rule) -> Rule:
    """After `rule`, experts are weighed by their own probability; the sum of weights stays."""

    def reweighed(layer: int, ids: Ids, weights: Weights, probabilities: Weights) -> tuple[Ids, Weights]:
        found, shares = rule(layer, ids, weights, probabilities)
        own = np.where(shares > 0, np.take_along_axis(probabilities, found, axis=1), np.float32(0))
        total = own.sum(axis=1, keepdims=True)
        factor = np.divide(weights.sum(axis=1, keepdims=True), total, out=np.zeros_like(total), where=total > 0)
        return found, own * factor

    return reweighed


def drop(resident: NDArray[np.bool_], renormalise: bool) -> Rule:
    """Absent experts contribute nothing; with `renormalise` the resident ones take over their weight."""

    def rule(layer: int, ids: Ids, weights: Weights, probabilities: Weights) -> tuple[Ids, Weights]:
        shares = np.where(resident[layer, ids], weights, np.float32(0))
        if renormalise:
            left = shares.sum(axis=1, keepdims=True)
            factor = np.divide(weights.sum(axis=1, keepdims=True), left, out=np.ones_like(left), where=left > 0)
            shares = shares * factor
        return ids, shares

    return rule


def rules(profile: ExpertProfile) -> dict[str, Make]:
    """The rows of the table. Raises ConfigError: the profile has no output similarity."""
    outputs, experts = profile.outputs, profile.experts
    if outputs is None:
        what = "the store's profile has no output similarity"
        raise ConfigError(what, "profile it on text: `tiermoe prepare MODEL --profile TEXT`")

    def made(scores: Scores, scale: NDArray[Any] | None = None) -> Make:
        return lambda resident, seed: substitute(resident, scores, scale)

    def ranked(options: BuddyOptions) -> Make:
        return made(by_table(_scores(profile.buddies(options), experts)))

    def own(make: Make) -> Make:
        return lambda resident, seed: own_weight(make(resident, seed))

    every = BuddyOptions(alpha=1.0, max_buddies=experts)
    alike, nearness = np.maximum(outputs.cosine(), 0.0), 1 / (outputs.error() + 1e-6)
    slot: dict[str, Make] = {  # the slot's weight is the substitute's
        "random": lambda resident, seed: substitute(resident, at_random(experts, seed)),
        "coactivation": ranked(every),
        "coactivation, weighted": ranked(replace(every, weighted=True)),
        "output": ranked(replace(every, by="output")),
        "output, least error": made(by_table(nearness)),
        "blend": ranked(replace(every, by="blend")),
        "router's next best": made(by_router),
        "output and router": made(lambda layer, wanted, probabilities: alike[layer][wanted] * probabilities),
    }
    return {
        **slot,
        "coactivation, CFT 0.95, 16 at most": ranked(BuddyOptions()),
        "output, CFT 0.95, 16 at most": ranked(BuddyOptions(by="output")),
        "output, weight scaled": made(by_table(alike), outputs.scale()),
        **{f"{name}, own weight": own(make) for name, make in slot.items()},
        "drop": lambda resident, seed: drop(resident, renormalise=False),
        DROP: lambda resident, seed: drop(resident, renormalise=True),
    }


def _rerouted(layers: Sequence[MoeLayer], routers: Sequence[RouterProbe], rule: Rule) -> AbstractContextManager[None]:
    """Change the routing of an engine's layers while no request is in flight."""

    def changed(layer: MoeLayer, forward: Forward) -> Forward:
        def run(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            probabilities = torch.softmax(routers[layer.index](hidden).float(), dim=-1).numpy()
            found, shares = rule(layer.index, ids.numpy(), weights.float().numpy(), probabilities)
            return forward(hidden, torch.from_numpy(found), torch.from_numpy(shares).to(weights.dtype))

        return run

    return wrapped(layers, changed)


def trial(
    model: str | None,
    rates: Sequence[float],
    seeds: Sequence[int],
    options: EvaluationOptions,
    progress: Progress | None = None,
    store: Path | None = None,
    only: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """One row for each rule and rate, the mean over seeds, each with other resident experts.

    Args:
        store: of the model; None: that in the cache folder. only: rules to run; None: all.

    Raises:
        ConfigError: the store's profile has no output similarity, or there is no such rule. StoreError: no profile.
    """
    config = run_config(model, policy=LOSSLESS, budget="1.0", link={"gbps": None}, store=store and str(store))
    folder = prepared_store(config, engine_settings(config))
    profile = read_profile(folder, read_manifest(folder))
    made = rules(profile)
    chosen = list(made) if only is None else list(only)
    if unknown := sorted(set(chosen) - set(made)):
        raise ConfigError(f"there is no rule '{unknown[0]}'", f"give some of: {', '.join(made)}")
    evaluation = Evaluation(config.model_dir, options, config)
    reference = evaluation.reference(progress)
    rows: list[dict[str, Any]] = [
        {"rule": "unchanged", "rate": 1.0, "nll_nats": float(torch.cat(reference.nll).mean()), "kl_nats": 0.0,
         "top1_agreement": 1.0}
    ]  # fmt: skip
    with closing(start_worker(config)) as worker:
        routers = router_probes(worker.model, read_manifest(folder), "compare on")
        for rate in rates:
            found = {}
            for name in chosen:
                measured = []
                for seed in seeds:
                    resident = resident_at_random(profile.layers, profile.experts, rate, seed)
                    with _rerouted(worker.engine.layers, routers, made[name](resident, seed)):
                        measured.append(evaluation.measure(worker, progress))
                found[name] = _pooled(name, measured)
            rows += [{"rule": name, "rate": rate, **_figures(found, name)} for name in chosen]
    return rows


def _pooled(name: str, measured: Sequence[Quality]) -> Quality:
    """The mean of several draws on the same text, document by document."""
    first = measured[0]
    sums = {key: np.mean([quality.sums[key] for quality in measured], axis=0) for key in first.sums}
    return Quality(name, False, first.executor, sums, first.options)


def _figures(found: dict[str, Quality], name: str) -> dict[str, Any]:
    """Means, and the paired difference from dropping with its interval, if dropping was measured."""
    quality = found[name]
    row = {"nll_nats": float(quality.sums["nll"].sum() / quality.sums["tokens"].sum())}
    row |= {key: quality[key].value for key in ("kl_nats", "top1_agreement", "choice_accuracy")}
    if DROP in found:
        less = quality.minus(found[DROP], "kl_nats")
        row |= {"kl_over_drop": less.value, "kl_over_drop_low": less.low, "kl_over_drop_high": less.high}
    return row


def _scores(table: BuddyTable, experts: int) -> NDArray[np.float64]:
    """[L, E, E] of the lists: greater for a better buddy, zero for others."""
    layers, _, width = table.ids.shape
    scores = np.zeros((layers, experts, experts))
    ranks = np.where(np.arange(width) < table.sizes[:, :, None], width - np.arange(width), 0)
    np.put_along_axis(scores, table.ids.astype(np.int64), ranks.astype(np.float64), axis=2)
    return scores
