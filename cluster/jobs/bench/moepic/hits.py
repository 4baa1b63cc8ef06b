"""Hit rates by cache size on recorded routing: Table 1, and how much rho and omega of LCP matter."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from rich.progress import Progress

from .....actors.policies.eviction import EvictionPolicy
from .....actors.policies.moepic import Lcp
from ....simulate.hit_rates import POLICIES, Ids, hit_rates, policies, token_ids
from ..recorded import Recorded
from .work import SHARES, Workload


def hit_table(recorded: Recorded, work: Workload, progress: Progress | None) -> dict[str, Any]:
    """As plain values.

    Returns:
        experts: of a layer. sizes: of its cache. rates: by policy, one for each size, over all layers; what is learnt
        from is played first and not counted. lcp: rho, omega and hit rate at `lcp_size`, half of the experts.
    """
    header = recorded.header
    sizes = sorted({max(1, round(share * header.experts)) for share in SHARES})
    half = sizes[len(sizes) // 2]
    makers = {f"{rho:g} {omega}": partial(_lcp, rho, omega) for rho in work.rhos for omega in work.omegas}
    task = None
    if progress is not None:
        task = progress.add_task("hit rates on the trace", total=len(POLICIES) * len(sizes) + len(makers))

    def stepped() -> None:
        if progress is not None and task is not None:
            progress.advance(task)

    ids, _ = token_ids(header, [*recorded.learn, *recorded.measure])
    learnt, _ = token_ids(header, recorded.learn)
    counted = np.arange(ids.shape[1]) >= learnt.shape[1]
    table = hit_rates(ids, sizes, policies(), counted, stepped)
    grid = {row.policy: row.overall for row in hit_rates(ids, [half], makers, counted, stepped)}
    return {
        "experts": header.experts, "sizes": sizes, "tokens": int(counted.sum()),
        "rates": {name: [row.overall for row in table if row.policy == name] for name in POLICIES},
        "lcp_size": half,
        "lcp": [{"rho": rho, "omega": omega, "hit_rate": grid[f"{rho:g} {omega}"]}
                for rho in work.rhos for omega in work.omegas],
    }  # fmt: skip


def _lcp(rho: float, omega: int, ids: Ids) -> EvictionPolicy:
    return Lcp(rho, omega, one_layer=True)
