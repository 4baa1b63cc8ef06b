"""What does not go together: the one table of settings that are valid alone and refused with others.

A policy's options refuse within the policy (`PolicySettings`). `cluster.config` has the rows that need the run's Ray.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..errors import BudgetError, ConfigError
from .settings import EngineSettings


class Refusal(NamedTuple):
    """A row of the table: whether it applies, what does not go together, and the remedy."""

    applies: bool
    what: str
    remedy: str


def refuse_first(table: Iterable[Refusal]) -> None:
    """Raises ConfigError: that of the first row that applies."""
    for row in table:
        if row.applies:
            raise ConfigError(row.what, row.remedy)


def check_combination(settings: EngineSettings, form: str | None = None) -> None:
    """Refuse settings that do not go together, or a policy that cannot use experts as their checkpoint publishes them.

    Args:
        form: such as "fp8_block"; None: neurons in full precision, which all policies can use, or not known yet.

    Raises:
        BudgetError: a share that does not hold what the policy preloads. ConfigError: any other row.
    """
    policy, gpus, share = settings.policy, settings.shards.count, settings.budget.share
    several, published = gpus > 1, form is not None
    split, low = policy.split.kind != "off", policy.low_bit
    if policy.preload == "all" and share is not None and share * gpus < 1 - 1e-9:  # 1/3 on each of 3 is all
        where = "on the device, but the budget is" if gpus == 1 else f"on {gpus} GPUs, but the budget of each is"
        raise BudgetError(
            f"policy '{policy.name}' keeps every expert {where} {share:.4g} of them",
            "pass --budget 1.0, or choose a policy that loads on demand",  # the fullest GPU may have more than 1 / G
        )
    ndp = settings.ndp
    refuse_first((
        Refusal(
            settings.link.layer_us is not None and (several or policy.uses_ndp),
            "link.layer_us stops the clock between layers, which other processes that compute experts do not see",
            "leave it out, or use one shard and a policy without NDP workers",
        ),
        Refusal(
            gpus == 1 and policy.on_miss.uses_hops,
            f"policy '{policy.name}' penalises buddies on other GPUs (kappa), and there is one GPU",
            "leave kappa out, or use several shards",
        ),
        Refusal(
            several and policy.pre_evict.kind != "off",
            f"policy '{policy.name}' frees slots ahead of a layer, which it does on one GPU; there are to be "
            f"{gpus} GPUs",
            "use one shard, or a policy without pre_evict, such as next-gate",
        ),
        Refusal(
            several and split,
            f"policy '{policy.name}' splits the experts of one GPU, there are to be {gpus}",
            "use one shard, or a policy without split",
        ),
        Refusal(
            several and low is not None,
            f"policy '{policy.name}' loads replicas into the memory of one GPU; there are to be {gpus} GPUs",
            "use one shard, or a policy without on_miss low-bit, such as next-gate",
        ),
        Refusal(
            several and policy.placement.kind == "monde",
            f"policy '{policy.name}' weighs the link of one GPU, whose content it must know in every layer, against "
            f"near-data execution; there are to be {gpus} GPUs",
            "use one shard, or a placement with a hot set, such as context-ndp-full",
        ),
        Refusal(
            published and split,
            f"policy '{policy.name}' splits experts by neurons, and this checkpoint publishes them as {form}, whole",
            "choose a policy without split, such as next-gate, or use the unquantized checkpoint",
        ),
        Refusal(
            published and policy.evict_writeback,
            f"policy '{policy.name}' copies evicted experts back, which is for comparisons in full precision only; "
            f"this checkpoint publishes its experts as {form}",
            "leave evict_writeback out, or use the unquantized checkpoint",
        ),
        Refusal(
            published and low is not None,
            f"policy '{policy.name}' loads misses as replicas of {low and low.bits} bits beside slots of full "
            f"precision, and this checkpoint publishes its experts as {form}",
            "choose a policy that loads experts as they are, such as next-gate, or one that computes replicas on NDP "
            "workers, such as context-ndp-3bit, or use the unquantized checkpoint",
        ),
        Refusal(
            bool(ndp.cores) and (len(ndp.cores) < ndp.worker_threads or len(set(ndp.cores)) < len(ndp.cores)),
            f"ndp.cores is {list(ndp.cores)}, for {ndp.worker_threads} threads",
            f"name at least {ndp.worker_threads} cores, each once, or lower ndp.threads",
        ),
    ))  # fmt: skip
