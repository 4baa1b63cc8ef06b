"""What each way of choosing buddies costs in quality, with a part of each layer's experts at hand at random.

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

from ....actors.engine.model import RouterProbe, find_blocks
from ....actors.policies.buddies import BuddyOptions, BuddyTable
from ....actors.policies.expert_profile import ExpertProfile
from ....actors.profile_file import read_profile
from ....actors.store_format import Manifest, read_manifest
from ....errors import ConfigError, UnsupportedModelError
from ...config import engine_settings
from ..bench.serving import prepared_store, run_config, start_worker
from ..evaluate.job import LOSSLESS, Evaluation
from ..evaluate.options import EvaluationOptions
from ..evaluate.quality import Quality
from .substitutes import Rule, at_random, drop, next_best, own_weight, resident_at_random, substitute, substitute_likely

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
