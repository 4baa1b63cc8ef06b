"""Rules for experts that are not at hand, one for each way of choosing a substitute: what the trial compares.

Plain on purpose: no gates, no limits, slot by slot. The served policy is `policies/substitution.py`; here only the
choice of the buddy differs from row to row.

What each way of choosing buddies costs in quality, with a part of each layer's experts at hand at random.

Every expert is in memory and only the routing is changed, as if the absent ones were not: quality alone is measured,
on held-out text, against the unchanged model. No gate, no limit on substitutions: the ranking is compared bare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress

from ....actors.engine.model.model import RouterProbe, find_blocks
from ....actors.policies.buddymoe.buddies import BuddyOptions, BuddyTable, ExpertProfile
from ....actors.store.artifacts import read_profile
from ....actors.store.format import Manifest, read_manifest
from ....errors import ConfigError, UnsupportedModelError
from ...config import engine_settings
from ..bench.serving import prepared_store, run_config, start_worker
from ..evaluate.quality import EvaluationOptions, Quality
from ..evaluate.scoring import LOSSLESS, Evaluation

Ids = NDArray[np.int64]
Weights = NDArray[np.float32]
Rule = Callable[[int, Ids, Weights, Weights], tuple[Ids, Weights]]
"""(layer, ids [T, K], weights [T, K], router probabilities [T, E]) -> ids and weights of what is run instead."""


def resident_at_random(layers: int, experts: int, rate: float, seed: int) -> NDArray[np.bool_]:
    """[L, E] with `rate` of each layer's experts resident."""
    generator = np.random.default_rng(seed)
    held = np.zeros((layers, experts), bool)
    for row in held:
        row[generator.permutation(experts)[: round(rate * experts)]] = True
    return held


def substitute(resident: NDArray[np.bool_], scores: NDArray[Any], scale: NDArray[Any] | None = None) -> Rule:
    """The resident expert of the greatest score takes the place of an absent one; none above zero: it is dropped.

    Args:
        resident: [L, E]. scores: [L, E, E], of j (last) for i.
        scale: [L, E, E], what the slot's routing weight is multiplied by; None: it stays as it is.
    """

    def rule(layer: int, ids: Ids, weights: Weights, probabilities: Weights) -> tuple[Ids, Weights]:
        factors = None if scale is None else scale[layer]
        return _in_turn(ids, weights, resident[layer], lambda wanted: scores[layer][wanted], factors)

    return rule


def substitute_likely(resident: NDArray[np.bool_], similarity: NDArray[Any]) -> Rule:
    """Like `substitute`, by similarity [L, E, E] times the router's probability for this token."""

    def rule(layer: int, ids: Ids, weights: Weights, probabilities: Weights) -> tuple[Ids, Weights]:
        return _in_turn(ids, weights, resident[layer], lambda wanted: similarity[layer][wanted] * probabilities)

    return rule


def next_best(resident: NDArray[np.bool_]) -> Rule:
    """The resident expert that the router itself would take next, of those that the token does not use yet."""

    def rule(layer: int, ids: Ids, weights: Weights, probabilities: Weights) -> tuple[Ids, Weights]:
        return _in_turn(ids, weights, resident[layer], lambda wanted: probabilities)

    return rule


def own_weight(rule: Rule) -> Rule:
    """After `rule`: every kept expert weighs what its own probability says, and the weights' sum is as before."""

    def reweighed(layer: int, ids: Ids, weights: Weights, probabilities: Weights) -> tuple[Ids, Weights]:
        found, kept = rule(layer, ids, weights, probabilities)
        own = np.where(kept > 0, np.take_along_axis(probabilities, found, axis=1), np.float32(0))
        total = own.sum(axis=1, keepdims=True)
        factor = np.divide(weights.sum(axis=1, keepdims=True), total, out=np.zeros_like(total), where=total > 0)
        return found, own * factor

    return reweighed


def at_random(resident: NDArray[np.bool_], seed: int) -> Rule:
    """Any resident expert that the token does not use yet; a draw of its own for every slot."""
    generator = np.random.default_rng(seed)

    def rule(layer: int, ids: Ids, weights: Weights, probabilities: Weights) -> tuple[Ids, Weights]:
        experts = resident.shape[1]
        return _in_turn(ids, weights, resident[layer], lambda wanted: 1 - generator.random((len(wanted), experts)))

    return rule


def _in_turn(
    ids: Ids,
    weights: Weights,
    resident: NDArray[np.bool_],
    scores_of: Callable[[Ids], NDArray[Any]],
    scale: NDArray[Any] | None = None,
) -> tuple[Ids, Weights]:
    """Slot by slot: the best of `scores_of` the wanted experts [T] -> [T, E]."""
    ids, weights = ids.copy(), weights.copy()
    rows = np.arange(len(ids))
    free = np.broadcast_to(resident, (len(ids), len(resident))).copy()  # [T, E]
    free[rows[:, None], ids] = False  # a token uses no expert twice
    for slot in range(ids.shape[1]):
        wanted = ids[:, slot]
        absent = ~resident[wanted]
        held = np.where(free, scores_of(wanted), 0.0)
        best = held.argmax(axis=1)
        found = absent & (held[rows, best] > 0)
        if scale is not None:
            weights[found, slot] *= scale[wanted[found], best[found]].astype(np.float32)
        weights[absent & ~found, slot] = 0.0
        ids[found, slot] = best[found]
        free[rows[found], best[found]] = False
    return ids, weights


def drop(resident: NDArray[np.bool_], renormalise: bool) -> Rule:
    """Absent experts contribute nothing; with `renormalise` the rest takes over their weight, where there is a rest."""

    def rule(layer: int, ids: Ids, weights: Weights, probabilities: Weights) -> tuple[Ids, Weights]:
        kept = np.where(resident[layer, ids], weights, np.float32(0))
        if renormalise:
            left = kept.sum(axis=1, keepdims=True)
            factor = np.divide(weights.sum(axis=1, keepdims=True), left, out=np.ones_like(left), where=left > 0)
            kept = kept * factor
        return ids, kept

    return rule


DROP = "drop, rest renormalised"  # the better of the two ways of dropping, with which rules are compared
Make = Callable[[NDArray[np.bool_], int], Rule]  # (resident [L, E], seed) -> rule


def rules(profile: ExpertProfile) -> dict[str, Make]:
    """The rows of the table.

    Raises:
        ConfigError: the profile has no output similarity.
    """
    outputs = profile.outputs
    if outputs is None:
        what = "the store's profile has no output similarity"
        raise ConfigError(what, "profile it on text: `tiermoe prepare MODEL --profile TEXT`")

    def ranked(options: BuddyOptions) -> Make:
        scores = _scores(profile.buddies(options), profile.experts)
        return lambda resident, seed: substitute(resident, scores)

    def own(make: Make) -> Make:
        return lambda resident, seed: own_weight(make(resident, seed))

    every = BuddyOptions(alpha=1.0, max_buddies=profile.experts)
    alike, nearness = np.maximum(outputs.cosine(), 0.0), 1 / (outputs.error() + 1e-6)
    slot: dict[str, Make] = {  # the slot's weight stays with the slot
        "random": at_random,
        "coactivation": ranked(every),
        "coactivation, weighted": ranked(replace(every, weighted=True)),
        "output": ranked(replace(every, by="output")),
        "output, least error": lambda resident, seed: substitute(resident, nearness),
        "blend": ranked(replace(every, by="blend")),
        "router's next best": lambda resident, seed: next_best(resident),
        "output and router": lambda resident, seed: substitute_likely(resident, alike),
    }
    return {
        **slot,
        "coactivation, CFT 0.95, 16 at most": ranked(BuddyOptions()),
        "output, CFT 0.95, 16 at most": ranked(BuddyOptions(by="output")),
        "output, weight scaled": lambda resident, seed: substitute(resident, alike, outputs.scale()),
        **{f"{name}, own weight": own(make) for name, make in slot.items()},
        "drop": lambda resident, seed: drop(resident, renormalise=False),
        DROP: lambda resident, seed: drop(resident, renormalise=True),
    }


@contextmanager
def rerouted(layers: Sequence[Any], routers: Sequence[RouterProbe], rule: Rule) -> Iterator[None]:
    """Change the routing of an engine's layers while no request is in flight; they are as before when it ends."""

    def changed(index: int, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            probabilities = torch.softmax(routers[index](hidden).float(), dim=-1).numpy()
            found, shares = rule(index, ids.numpy(), weights.float().numpy(), probabilities)
            return forward(hidden, torch.from_numpy(found), torch.from_numpy(shares).to(weights.dtype))

        return run

    for layer in layers:
        layer.forward = changed(layer.index, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's own again


def trial(
    model: str | None,
    rates: Sequence[float],
    seeds: Sequence[int],
    options: EvaluationOptions,
    progress: Progress | None = None,
    store: Path | None = None,
    only: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """One row for each rule and cache rate, the mean over the seeds: each draws the resident experts anew.

    Args:
        store: of the model; None: that in the cache folder. only: rules to run; None: all.

    Raises:
        ConfigError: the store's profile has no output similarity, or there is no such rule. StoreError: it has no
            profile.
    """
    config = run_config(model, policy=LOSSLESS, budget="1.0", link={"gbps": None}, store=store and str(store))
    folder = prepared_store(config, engine_settings(config))
    profile = read_profile(folder, read_manifest(folder))
    made = rules(profile)
    chosen = list(made) if only is None else list(only)
    if unknown := sorted(set(chosen) - set(made)):
        raise ConfigError(f"there is no rule '{unknown[0]}'", f"give some of: {'; '.join(made)}")
    evaluation = Evaluation(config.model_dir, options, config)
    reference = evaluation.reference(progress)
    rows: list[dict[str, Any]] = [
        {"rule": "unchanged", "rate": 1.0, "nll_nats": float(torch.cat(reference.nll).mean()), "kl_nats": 0.0,
         "top1_agreement": 1.0}
    ]  # fmt: skip
    with closing(start_worker(config)) as worker:
        routers = _routers(worker.model, read_manifest(folder))
        for rate in rates:
            found = {}
            for name in chosen:
                measured = []
                for seed in seeds:
                    resident = resident_at_random(profile.layers, profile.experts, rate, seed)
                    with rerouted(worker.engine.layers, routers, made[name](resident, seed)):
                        measured.append(evaluation.measure(worker, progress))
                found[name] = _pooled(name, measured)
            rows += [{"rule": name, "rate": rate, **_figures(found, name)} for name in chosen]
    return rows


def _routers(model: Any, manifest: Manifest) -> list[RouterProbe]:
    found = [block.router for block in find_blocks(model, manifest)]
    routers = [router for router in found if router is not None]
    if len(routers) != len(found):
        raise UnsupportedModelError("a layer exposes no router logits", "compare on a model whose routers can be asked")
    return routers


def _pooled(name: str, measured: Sequence[Quality]) -> Quality:
    """One quality from several draws on the same text: document by document, their mean."""
    first = measured[0]
    sums = {key: np.mean([quality.sums[key] for quality in measured], axis=0) for key in first.sums}
    return Quality(name, False, first.executor, sums, first.options)


def _figures(found: dict[str, Quality], name: str) -> dict[str, Any]:
    """Means, and the difference from dropping with its interval, paired by document, where dropping was measured."""
    quality = found[name]
    row = {"nll_nats": float(quality.sums["nll"].sum() / quality.sums["tokens"].sum())}
    row |= {key: quality[key].value for key in ("kl_nats", "top1_agreement", "choice_accuracy")}
    if DROP in found:
        less = quality.minus(found[DROP], "kl_nats")
        row |= {"kl_over_drop": less.value, "kl_over_drop_low": less.low, "kl_over_drop_high": less.high}
    return row


def _scores(table: BuddyTable, experts: int) -> NDArray[np.float64]:
    """[L, E, E] of the lists: greater for a better buddy, zero for who is none."""
    layers, _, width = table.ids.shape
    scores = np.zeros((layers, experts, experts))
    ranks = np.where(np.arange(width) < table.sizes[:, :, None], width - np.arange(width), 0)
    np.put_along_axis(scores, table.ids.astype(np.int64), ranks.astype(np.float64), axis=2)
    return scores
