"""The default model's own routing on held-out text, and how well its routers foresee later layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from .....actors.engine.model.model import blocks_at
from .....errors import CheckpointError
from ....config import default_model_dir
from ..serving import heldout_prompts
from .locality import Locality, lru_hit_rates, popularity_of, recall

DOCUMENTS, TOKENS = 8, 96
DISTANCES = 3


def experts_modules(model: Any) -> list[str]:
    """Names of a model's modules with routed experts, in the order of its layers."""
    return [name for name, module in model.named_modules() if hasattr(module, "has_gate") and hasattr(module, "act_fn")]


@torch.no_grad()
def record_locality(
    device: torch.device, model_dir: Path | None = None, documents: int = DOCUMENTS, tokens: int = TOKENS
) -> tuple[Locality, int]:
    """What the routing of the default model, unmodified, is like on held-out text; and its MoE layers.

    The hidden state that a later layer's router is shown is the input of this layer's experts, as next-gate prefetch
    has it.

    Raises:
        CheckpointError: the model ships too little held-out text, or has a router that cannot be asked.
    """
    from transformers import AutoModelForCausalLM

    folder = default_model_dir() if model_dir is None else model_dir
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    names = experts_modules(model)
    experts = int(model.get_submodule(names[0]).gate_up_proj.shape[0])
    routers = [block.router for block in blocks_at(model, names, experts)]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def see(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden, ids = (*args, *kwargs.values())[:2]
        seen.append((hidden.reshape(-1, hidden.shape[-1]), ids))

    hooks = [model.get_submodule(name).register_forward_pre_hook(see, with_kwargs=True) for name in names]
    parts, probabilities = [], []
    foreseen: list[list[float]] = [[] for _ in range(DISTANCES)]
    try:
        for prompt in heldout_prompts(folder, documents, tokens):
            seen.clear()
            model(torch.tensor([prompt], device=device), use_cache=False)
            ids = [picked.cpu().numpy().astype(np.int64) for _, picked in seen]
            parts.append(np.stack(ids, axis=1))  # [T, L, K]
            for layer, (hidden, _) in enumerate(seen):
                for distance in range(min(DISTANCES + 1, len(names) - layer)):
                    router = routers[layer + distance]
                    if router is None:
                        raise CheckpointError("the model's routers cannot be asked", "use the default model")
                    scores = router(hidden).float()
                    if distance == 0:
                        probabilities.append(torch.softmax(scores, -1).sort(-1, descending=True)[0].mean(0).cpu())
                        continue
                    guess = scores.topk(ids[0].shape[1], dim=-1)[1].cpu().numpy()
                    foreseen[distance - 1].append(recall(guess, ids[layer + distance]))
    finally:
        for hook in hooks:
            hook.remove()
    found = np.concatenate(parts)
    return Locality(
        popularity_of(found, experts), tuple(torch.stack(probabilities).mean(0).tolist()),
        lru_hit_rates(found, experts), tuple(float(np.mean(values)) for values in foreseen), found.shape[2],
    ), len(names)  # fmt: skip
