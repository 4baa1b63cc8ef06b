"""Buddy expert substitution (Algorithm 1 of BuddyMoE) on tensors: as fast as the device of the routing allows.

The reference is `actors/policies/buddymoe/substitution.py`; the arguments are described there. All implementations
give its ids, weights and counts to the last bit:

- `substitute_arrays`: C++ on NumPy arrays, one token after another. Microseconds for a decode batch.
- `substitute_torch.py`: vectorised torch on any device, one slot after another for all tokens at once.
- `triton/substitute.py`: a Triton kernel, one program for each token.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from . import _substitute
from .substitute_torch import substitute_tensors
from .substitute_types import BuddyLists, BuddyTensors, Options, ReplacedArrays, ReplacedTensors


def replaceable_arrays(
    ids: NDArray[np.int64], resident: NDArray[np.bool_], beta: float | None, shard_of: NDArray[np.int64] | None = None
) -> NDArray[np.bool_]:
    """The distribution gate in C++; see `policies/substitution_gates.py`.

    Raises:
        ValueError: an array is not contiguous or of another type or shape, or an expert or shard does not exist.
    """
    out = np.empty(len(resident), np.bool_)
    shards = 1 if shard_of is None else int(shard_of.max()) + 1
    _substitute.replaceable(ids, resident, math.inf if beta is None else beta, shard_of, shards, out)
    return out


def substitute_arrays(
    ids: NDArray[np.int64],
    weights: NDArray[np.float32],
    probabilities: NDArray[np.float32] | None,
    replace: NDArray[np.bool_],
    reach: NDArray[np.float32],
    buddies: BuddyLists,
    options: Options,
    tau: float | None = None,
) -> ReplacedArrays:
    """In C++ without the interpreter lock.

    Raises:
        ValueError: an array is not contiguous or of another type or shape, an expert does not exist, or the router's
            probabilities are needed and missing.
    """
    out_ids, out_weights = np.empty_like(ids), np.empty_like(weights)
    (tokens, top_k), (experts, ranks) = ids.shape, buddies.ids.shape
    numbers = (
        tokens, top_k, experts, ranks,
        top_k if options.rho is None else options.rho,
        ranks if options.search is None else min(options.search, ranks),
        -math.inf if tau is None else tau,
        math.inf if options.gamma is None else options.gamma,
        options.temperature, math.log(top_k), options.eta, options.reuse,
        options.fallback == "drop", options.weights == "buddy", options.renormalise,
    )  # fmt: skip
    substituted, dropped = _substitute.substitute(
        ids, weights, probabilities, replace, reach, buddies.ids, buddies.similarity, out_ids, out_weights, numbers
    )
    return ReplacedArrays(out_ids, out_weights, substituted, dropped)


class _HostBuddies(NamedTuple):
    ids: Any
    similarity: Any


def substitute(
    ids: torch.Tensor,
    weights: torch.Tensor,
    probabilities: torch.Tensor | None,
    replace: torch.Tensor,
    reach: torch.Tensor,
    buddies: BuddyTensors,
    options: Options,
    tau: float | None = None,
) -> ReplacedTensors:
    """By C++ where the routing is on the CPU, by Triton on a GPU, by torch where Triton is not installed.

    Raises:
        ValueError: as `substitute_arrays`.
    """
    if ids.device.type == "cpu":
        host = _HostBuddies(buddies.ids.numpy(), buddies.similarity.numpy())
        some = None if probabilities is None else probabilities.numpy()
        out = substitute_arrays(ids.numpy(), weights.numpy(), some, replace.numpy(), reach.numpy(), host, options, tau)
        counts = torch.tensor((out.substituted, out.dropped))
        return ReplacedTensors(torch.from_numpy(out.ids), torch.from_numpy(out.weights), counts)
    try:
        from .triton.substitute import substitute_triton
    except ImportError:
        return substitute_tensors(ids, weights, probabilities, replace, reach, buddies, options, tau)
    return substitute_triton(ids, weights, probabilities, replace, reach, buddies, options, tau)
