"""Two distributions at every scored token, compared: the lossless one and the policy's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ....errors import RuntimeFailure


@dataclass(frozen=True)
class WindowScore:
    """Of each scored token [N]: what the policy found and how it compares.

    nll: -log p(token), nats. top1: the likeliest token. kl: KL(lossless || policy), nats.
    """

    nll: torch.Tensor
    top1: torch.Tensor
    kl: torch.Tensor


def token_nll(log_probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """-log p(target), nats: log_probs [..., N, V], targets [..., N] -> [..., N].

    Raises:
        RuntimeFailure: a value is not finite.
    """
    nll = -log_probs.gather(-1, targets[..., None])[..., 0]
    if not bool(torch.isfinite(nll).all()):
        raise RuntimeFailure("the model's probabilities are not finite", "check the store and its replicas")
    return nll


def kl_divergence(reference: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
    """KL(reference || policy) of log-probabilities [N, V] -> [N], nats.

    `reference` may have been rounded: it is normalised again, so that the result is never negative but for the sum's
    own rounding, which is cut off. Rounding to fp16 adds less than 1e-5.
    """
    expected = torch.log_softmax(reference.float(), -1)
    p = expected.exp()
    terms = torch.where(p > 0, p * (expected - log_probs), 0.0)  # 0 * log(0 / q) is 0
    return terms.sum(-1).clamp_min(0.0)


def compare(reference: torch.Tensor, log_probs: torch.Tensor, targets: Any) -> WindowScore:
    """Score a window: log-probabilities [N, V] of lossless and of the policy, and the tokens [N] that stand there.

    Raises:
        RuntimeFailure: a value is not finite.
    """
    nll = token_nll(log_probs, torch.as_tensor(targets))
    return WindowScore(nll, log_probs.argmax(-1), kl_divergence(reference, log_probs))
