"""How the routers choose on held-out text: cache hit rates, entropy, overlap, next-router recall, halves of documents.

Every figure is of teacher-forced documents, read from their start, one after the other. The figures are those of
`tiermoe trace stats`; what it calls decode is here the second half of a document.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corpus import KINDS
from model import TrainingForward
from tiermoe.cluster.simulate import statistics
from tiermoe.cluster.simulate.statistics import CACHES, OVERLAP_DISTANCES, Routing


def heldout_documents(work_dir: Path, per_kind: int = 8, length: int = 512) -> NDArray[np.int64]:
    """The first tokens [documents, length + 1] of held-out documents that have as many, the kinds in turn."""
    starts: dict[str, NDArray[np.int64]] = {}
    files = {kind: np.fromfile(work_dir / "tokens" / f"heldout-{kind}.bin", dtype=np.uint16) for kind in KINDS}
    for kind, tokens in files.items():
        begins = np.flatnonzero(tokens == 0)
        long_enough = begins[np.diff(np.append(begins, len(tokens))) > length]
        starts[kind] = long_enough[np.linspace(0, len(long_enough) - 1, per_kind).astype(np.int64)]
    rows = [files[kind][starts[kind][i] :][: length + 1] for i in range(per_kind) for kind in KINDS]
    return np.stack(rows).astype(np.int64)


@torch.no_grad()
def routing_of(forward: TrainingForward, documents: NDArray[np.int64]) -> Routing:
    """The routing of the first tokens of ``documents`` [documents, length + 1], each a request."""
    config = forward.config
    experts, top_k, layers = config.num_experts, config.num_experts_per_tok, config.num_hidden_layers
    length = documents.shape[1] - 1
    chosen, entropy, found = [], np.zeros(layers), np.zeros(layers)
    for batch in torch.from_numpy(documents).split(6):
        inputs: list[Tensor] = []
        forward(batch.to(forward.device), 1.0, routing=inputs)
        scores = [h @ forward.router(layer).t() for layer, h in enumerate(inputs)]  # [N, E] of each layer
        early = [h @ forward.router(layer + 1).t() for layer, h in enumerate(inputs[:-1])]
        ids = torch.stack([one.topk(top_k, dim=-1).indices for one in scores], 1).cpu().numpy()  # [N, L, K]
        named = np.zeros((len(ids), layers, 1, top_k), ids.dtype)  # by the router of the layer after
        named[:, :-1, 0] = torch.stack([one.topk(top_k, dim=-1).indices for one in early], 1).cpu().numpy()
        probabilities = torch.stack(scores, 1).softmax(-1).cpu().numpy()
        entropy += statistics.entropies(probabilities).sum(0)
        found += np.nan_to_num(statistics.next_router_recall(named, ids)[0]) * len(ids)
        chosen.append(ids)
    tokens = length * len(documents)
    recall = found[None] / tokens
    recall[:, 0] = np.nan
    second_half = np.tile(np.arange(length) >= length // 2, len(documents))
    return Routing(
        np.concatenate(chosen).transpose(1, 0, 2), np.repeat(np.arange(len(documents)), length), second_half, experts,
        entropy / (tokens * math.log(experts)), recall,
    )  # fmt: skip


def routing_figures(forward: TrainingForward, documents: NDArray[np.int64]) -> dict[str, Any]:
    """Means over layers, on the first tokens of ``documents`` [documents, length + 1].

    ``hit_POLICY`` with a third of the experts resident, from an empty cache; ``own_cosine`` and ``other_cosine``:
    between the loads of the second half of a document and of the first half of the same, of another document;
    ``entropy``: of a token's router probabilities over its maximum; ``next_router``: share of a layer's experts that
    the router names when it reads the input of the layer before; ``overlap``: with the token 1, 2, 4, 8, 16, 32 before.
    """
    routing = routing_of(forward, documents)
    ids, request, experts = routing.ids, routing.request, routing.experts
    assert routing.entropy is not None
    assert routing.next_router is not None
    third = round(experts / 3)
    rates = statistics.cache_hits(ids, experts, [third])[:, 0, :, 0] / ids[0].size  # [CACHES, layers]
    cosines = statistics.phase_cosines(ids, request, routing.decode, experts)
    own, other = (float("nan"),) * 2 if cosines is None else (float(x.mean()) for x in cosines)
    skew = statistics.popularity(statistics.loads(ids, experts))
    overlaps = [float(statistics.overlap(ids, request, d).mean()) for d in OVERLAP_DISTANCES]
    lru, lfu = (rates[CACHES.index(name)] for name in ("lru", "lfu"))
    return {
        **{f"hit_{name}": round(100 * rate, 2) for name, rate in zip(CACHES, rates.mean(1).tolist(), strict=True)},
        "hit_uniform": round(100 * third / experts, 2),
        "own_cosine": round(own, 4),
        "other_cosine": round(other, 4),
        "entropy": round(float(routing.entropy.mean()), 4),
        "next_router": round(float(np.nanmean(routing.next_router)), 4),
        "gini": round(skew["gini"], 4),
        "max_load": round(skew["max_over_mean"], 3),
        "overlap": [round(share, 4) for share in overlaps],
        "lfu_over_lru_by_layer": [round(100 * float(x), 1) for x in lfu - lru],
        "entropy_by_layer": [round(float(x), 3) for x in routing.entropy],
    }


def main() -> None:
    """Print the figures of a checkpoint: ``python routing.py WORK_DIR [DOCUMENTS_PER_KIND LENGTH]``."""
    import sys

    from loop import LoopConfig, SharedState
    from model import default_config, new_model
    from optimizer import Budget

    work_dir = Path(sys.argv[1])
    per_kind, length = (int(number) for number in (*sys.argv[2:], 8, 512)[:2])
    config = default_config()
    shared = SharedState(config, dict(new_model(config, 0).named_parameters()), LoopConfig(work_dir, Budget(1)))
    shared.load(work_dir)
    forward = TrainingForward(config, shared.parameters, torch.bfloat16)
    print(json.dumps(routing_figures(forward, heldout_documents(work_dir, per_kind, length)), indent=1))


if __name__ == "__main__":
    main()
