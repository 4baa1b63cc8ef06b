"""The topology planner: every refusal says what is short, where and by how much."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from topology_cases import NDP, a_node, plan

from tiermoe.cluster.topology.spec import NodeInfo
from tiermoe.errors import BudgetError, ConfigError

_SNUG, _ROOMY = a_node("a", CPU=3, GPU=1), a_node("a", CPU=9, GPU=1)


@pytest.mark.parametrize(
    ("nodes", "changes", "says"),
    [
        ([_ROOMY], {"shards": 2},
         r"shard 1 fits on no node: node a \(GPU: needs 1, has 0 free of 1, short of 1\)"),
        ([a_node("a", CPU=2, GPU=1), a_node("b", CPU=8)], {},
         r"the lead .* node a \(CPU: needs 3, has 2 free of 2, short of 1\), node b \(GPU: .* short of 1\)"),
        ([a_node("a", CPU=3, GPU=1, memory=3000)], {},
         r"node a \(host memory: needs 3.00 KiB .* has 2.93 KiB, short of 72 B\)"),
        ([a_node("a", CPU=3, memory=4000)], {"gpu": False},
         r"host memory: needs 4.20 KiB .* short of 304 B"),
        ([_SNUG], {"store_nodes": "marked"},
         r"no node has the resource store: short of 1"),
        ([_SNUG, a_node("s", store=1)], {"store_nodes": "marked"},
         r"store 0 fits on no node: node s \(CPU: needs 1, has 0"),
        ([_SNUG, a_node("s", CPU=1, store=1, memory=3071)], {"store_nodes": "marked"},
         r"node s \(host memory: .* short of 1 B"),
        ([_ROOMY], {"ndp": NDP},
         r"needs 1 of the resource ndp, the nodes have none: short of 1"),
        ([a_node("a", CPU=9, GPU=1, ndp=1)], {"ndp": replace(NDP, workers=3)},
         r"needs 3 of the resource ndp, the nodes have 1 \(a\): short of 2"),
        ([_ROOMY, a_node("m", CPU=1, ndp=1)], {"ndp": NDP},
         r"NDP worker 0 fits on no node: node m \(CPU: needs 2"),
        ([_ROOMY, a_node("m", CPU=2, ndp=1, memory=1000)], {"ndp": NDP},
         r"node m \(host memory: .* short of 280 B"),
        ([a_node("a", CPU=9, GPU=1, ndp=1)], {"ndp": replace(NDP, capacity_bytes=1000)},
         r"NDP worker 0 holds 1.25 KiB .* short of 280 B"),
        ([_SNUG], {"lead": "z"},
         r"cluster.lead is 'z', which is no living node; give one of a at"),
        ([a_node("a", CPU=2, GPU=1), a_node("b", CPU=9, GPU=9)], {"lead": "a"},
         r"the lead fits on no node: node a \(CPU: needs 3, has 2 free of 2, short of 1\);"),
        ([_SNUG], {"store_layout": "sliced", "store_copies": 2},
         r"store.copies is 2, but only 1 node holds a store: short of 1"),
        ([a_node("a", CPU=3, GPU=1, memory=3000)], {"store_layout": "sliced"},
         r"store 0 fits on no node: node a \(host memory"),
        ([a_node("a", CPU=3, GPU=1, alive=False)], {}, r"none of 1 nodes is alive"),
        ([_SNUG, _SNUG], {}, r"two nodes have the id 'a'"),
        ([a_node("a", CPU=99, GPU=64)], {"shards": 9, "ownership": "expert"},
         r"gives a shard none by the rule 'expert'; lower cluster.shards to 8"),
    ],
)  # fmt: skip
def test_it_says_what_is_short_where_and_by_how_much(
    nodes: list[NodeInfo], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(nodes, **changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gpu_memory_bytes": 1000}, "the lead needs 1.20 KiB of GPU memory .*: short of 232 B"),
        ({"preload": True}, "keeps all experts resident: 32 of 192 B on the fullest of 1 GPUs"),
        ({"ndp": replace(NDP, hot_per_layer=2)}, "keeps 2 experts in each of 4 layers, the budgets hold 4"),
    ],
)
def test_a_budget_that_does_not_fit(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BudgetError, match=says):
        plan([a_node("a", CPU=9, GPU=1, ndp=1)], **changes)


def test_all_resident_needs_each_gpus_share_only() -> None:
    nodes = [a_node("a", CPU=9, GPU=4)]
    assert plan(nodes, shards=4, preload=True, budget_bytes=8 * 192).lead.nbytes.slots == 8 * 192
    with pytest.raises(BudgetError, match="8 of 192 B on the fullest of 4 GPUs"):
        plan(nodes, shards=4, preload=True, budget_bytes=8 * 192 - 1)
