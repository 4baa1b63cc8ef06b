"""What a budget buys, and that the least budget that a refusal names is taken by every check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from policy_presets import POLICIES
from topology_cases import a_node

from tiermoe.actors import gpu_driver
from tiermoe.actors.budget import Budget
from tiermoe.actors.settings import EngineSettings
from tiermoe.actors.slot_budget import SlotSizes, divide, least_bytes, least_share
from tiermoe.cluster.config import engine_settings, load_policy, load_run_config
from tiermoe.cluster.jobs.options import check_budget
from tiermoe.cluster.topology.inputs import facts_of_store
from tiermoe.cluster.topology.planner import plan_topology
from tiermoe.cluster.topology.spec import cluster_spec
from tiermoe.errors import BudgetError, ConfigError

_NODE = a_node("a", CPU=99, ndp=1, memory=1e12)


@pytest.fixture(scope="module")
def store(mixtral_store: Any) -> Path:
    return Path(mixtral_store.describe().path)


def _said(refused: Callable[[str], object], budget: str) -> str:
    with pytest.raises(BudgetError, match=r"give at least \d+B|pass --budget 1\.0") as found:
        refused(budget)
    return found.value.remedy


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", POLICIES)
def test_the_budget_that_is_said_to_be_enough_is_taken(
    name: str, shards: int, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--budget 1KiB` said 98304B, which was refused as well: in another type, then for a split, then for replicas."""
    monkeypatch.setattr(gpu_driver, "ROOT", Path("/no-gpu"))
    several = {"shards": shards, "ownership": "expert"}  # not in equal parts
    given = {"policy": name, "threads": 1, "cluster": several}
    facts = facts_of_store(store, store)

    def checked(budget: str) -> EngineSettings:
        """As before Ray starts, in the plan, and in the worker."""
        config = load_run_config(None, given | {"budget": budget})
        found = engine_settings(config)
        check_budget(found, store)
        plan_topology(cluster_spec(config, found, facts, [_NODE]), facts, [_NODE])
        return found

    try:
        checked("1.0")
    except BudgetError:
        raise
    except ConfigError:
        assert shards > 1
        return
    remedies = [_said(checked, budget) for budget in ("1B", "1KiB", "1e-6", "0.0001%")]
    if "--budget 1.0" in remedies[-1]:
        remedies = remedies[:2]
    assert len(set(remedies)) == 1
    least = int(remedies[0].partition("give at least ")[2].partition("B")[0])
    _said(checked, f"{least - 1}B")
    checked(f"{least}B")
    checked(f"{-(-least // 1024)}KiB")
    if ", or a share of " in remedies[0]:
        share = remedies[0].partition("a share of ")[2].partition(",")[0]
        checked(share)
        checked(f"{float(share) * 100:.6f}%")


def test_a_type_that_is_not_known_here_is_refused_below_the_smaller_and_says_the_larger(store: Path) -> None:
    """Of a Ray that is joined, only the worker knows whether it computes in bfloat16 or in float32."""
    slot = 3 * 48 * 32 * 2  # I = 48, H = 32, bfloat16
    given = {"policy": "on-demand", "threads": 1, "ray": {"address": "head:6379"}}

    def checked(budget: int) -> None:
        check_budget(engine_settings(load_run_config(None, given | {"budget": f"{budget}B"})), store, local=False)

    checked(slot)
    with pytest.raises(BudgetError, match=f"give at least {2 * slot}B"):
        checked(slot - 1)


@pytest.mark.parametrize("name", ["on-demand", "moepic", "hobbit", "pre-gated", "all-resident"])
@pytest.mark.parametrize(("layers", "experts", "slot"), [(4, 8, 192), (27, 60, 17_301_504), (1, 3, 1000)])
def test_the_least_is_the_least(name: str, layers: int, experts: int, slot: int) -> None:
    policy = load_policy(name)
    replica = None if policy.low_bit is None else slot // 6
    sizes = SlotSizes(layers, experts, slot, 48, min(4, experts), replica)
    least = least_bytes(policy, sizes)
    assert least is not None
    assert divide(policy, Budget(nbytes=least), sizes).budget == least
    with pytest.raises(BudgetError, match=f"give at least {least}B"):
        divide(policy, Budget(nbytes=least - 1), sizes)
    if (share := least_share(least, slot, sizes.keys)) is not None:
        assert divide(policy, Budget(share=share), sizes).slots >= 1


def test_hot_experts_of_each_gpu_count() -> None:
    """3 hot experts of 4 on 2 GPUs are 2 on one of them in one layer, and 1 in the next: 3 slots of each GPU."""
    found = load_policy("static-ndp")
    policy = found.model_copy(update={"placement": found.placement.model_copy(update={"hot_per_layer": 3})})
    assert least_bytes(policy, SlotSizes(2, 4, 100, 8, 2, shards=2)) == 300
    assert least_bytes(policy, SlotSizes(2, 4, 100, 8, 2)) == 600
