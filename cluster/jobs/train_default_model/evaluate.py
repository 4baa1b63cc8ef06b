"""Held-out figures during training, in bits per byte."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from .sources import KINDS

if TYPE_CHECKING:
    from .forward import TrainingForward


@torch.no_grad()
def stream_bits_per_byte(
    forward: TrainingForward, work_dir: Path, tokens_per_kind: int = 16384, length: int = 512
) -> dict[str, float]:
    """Bits per byte on rows of ``length`` tokens spread evenly over each kind's held-out documents.

    Also ``min_share``: the smallest load of an expert in any layer, as a multiple of the uniform share.
    """
    lengths = np.array(json.loads((work_dir / "token_bytes.json").read_text()))
    figures, total_bits, total_bytes, load = {}, 0.0, 0, None
    for kind in KINDS:
        tokens = np.fromfile(work_dir / "tokens" / f"heldout-{kind}.bin", dtype=np.uint16)
        rows = max(1, min(tokens_per_kind, len(tokens) - 1) // length)
        starts = np.linspace(0, len(tokens) - 1 - length, rows).astype(np.int64)
        chosen = np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64)
        bits = 0.0
        for batch in torch.from_numpy(chosen).split(8):
            losses = forward(batch.to(forward.device), 1.0)
            bits += float(losses.cross_entropy) / math.log(2)
            load = losses.load if load is None else load + losses.load
        size = int(lengths[chosen[:, 1:]].sum())
        figures[f"bpb_{kind}"] = round(bits / size, 4)
        total_bits, total_bytes = total_bits + bits, total_bytes + size
    assert load is not None
    share = load / load.sum(1, keepdim=True) * load.shape[1]
    return {**figures, "bpb": round(total_bits / total_bytes, 4), "heldout_min_share": round(float(share.min()), 4)}
