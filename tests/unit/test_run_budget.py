"""A budget that the worker would refuse is refused before Ray starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import policy, prepared, settings
from tiny_models import save_tiny_checkpoint

from tiermoe.actors.settings import ShardSettings
from tiermoe.cluster.jobs.options import check_budget
from tiermoe.errors import BudgetError


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("budget")
    return Path(prepared(save_tiny_checkpoint("mixtral", folder / "checkpoint"), folder / "store").describe().path)


def test_bytes_for_one_expert_are_enough_and_one_less_is_not(store: Path) -> None:
    slot_bytes = 3 * 48 * 32 * 4  # I = 48, H = 32, fp32
    check_budget(settings(slot_bytes), store)
    with pytest.raises(BudgetError, match="holds no expert"):
        check_budget(settings(slot_bytes - 1), store)


def test_all_resident_needs_all(store: Path) -> None:
    all_bytes = 2 * 4 * 3 * 48 * 32 * 4  # 2 layers of 4 experts
    check_budget(settings(all_bytes, policy=policy(preload="all")), store)
    with pytest.raises(BudgetError, match="keeps all experts resident"):
        check_budget(settings(all_bytes - 1, policy=policy(preload="all")), store)


@pytest.mark.parametrize(
    ("shards", "ownership", "most"), [(2, "layer-expert", 4), (3, "layer-expert", 3), (3, "expert", 4)]
)
def test_all_resident_needs_what_the_fullest_gpu_owns(store: Path, shards: int, ownership: str, most: int) -> None:
    each = ShardSettings(count=shards, ownership=ownership)  # type: ignore[arg-type]
    needed = most * 3 * 48 * 32 * 4
    check_budget(settings(needed, policy=policy(preload="all"), shards=each), store)
    with pytest.raises(BudgetError, match=rf"on the fullest of {shards} GPUs; the budget is"):
        check_budget(settings(needed - 1, policy=policy(preload="all"), shards=each), store)
    share = most / 8
    check_budget(settings(share, policy=policy(preload="all"), shards=each), store)
