"""What the cases of one shape run on: experts in host memory, a model around them, and the routing that is replayed."""

from __future__ import annotations

from dataclasses import dataclass

from .host_experts import HostExperts
from .locality import Locality, RoutingTrace
from .options import Context
from .random_models import RandomModel, build_random_model
from .record import Record
from .replay import Replay
from .shapes import RealShape


@dataclass(frozen=True)
class Staged:
    """What all cases of one shape share."""

    context: Context
    record: Record
    shape: RealShape
    built: RandomModel
    host: HostExperts
    replay: Replay


def stage(
    context: Context, record: Record, shape: RealShape, host: HostExperts, layers: int, locality: Locality,
    trace: RoutingTrace,
) -> Staged:  # fmt: skip
    """Fill `host`, which the caller closes, with the experts of so many MoE layers, and build a model around them."""
    for layer in range(layers):
        host.add(shape.expert, context.dtype, context.device, seed=layer)
    built = build_random_model(shape, layers, context.dtype, context.device)
    replay = Replay(trace, locality.recalls, built.router_weights(), context.device, context.dtype)
    return Staged(context, record, shape, built, host, replay)
