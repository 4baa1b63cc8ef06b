"""A policy preset: one section for each decision point, validated by the policy that it names (configs/policies)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from .base_settings import Settings
from .policies.activeevict import PreEvictOptions
from .policies.context_ndp import PlacementOptions, PrecisionOptions
from .policies.eviction import CacheOrder
from .policies.fmoe import MapOptions
from .policies.hobbit import LowBitOptions
from .policies.moepic.split import SplitOptions
from .policies.prefetch import PrefetchOptions, PrefetchPolicy
from .policies.registry import Point, PolicyContext, PolicyOptions, options, policy_class
from .policies.routing import MissOptions, RoutingOptions

_EVICTION_IN_PRE_EVICT = ("alpha", "gamma", "window")  # where presets had these options of eviction importance


def _section(point: Point, kind: str) -> BeforeValidator:
    """A section of a point: a kind, or a mapping whose kind defaults to `kind`."""
    return BeforeValidator(partial(options, point, default=kind))


class PolicySettings(Settings):
    """A preset of configs/policies: for each decision point a kind, or a mapping of a kind and the options of its class
    (`policies.registry`).
    """

    name: str
    description: str = ""
    lossless: bool
    eviction: Annotated[SerializeAsAny[PolicyOptions], _section("eviction", "lru")] = options("eviction", "lru")
    prefetch: Annotated[SerializeAsAny[PrefetchOptions], _section("prefetch", "none")] = PrefetchOptions()
    routing: Annotated[SerializeAsAny[RoutingOptions], _section("routing", "exact")] = RoutingOptions()
    on_miss: Annotated[SerializeAsAny[MissOptions], _section("on_miss", "load")] = MissOptions()
    preload: Literal["none", "all"] = "none"
    pre_evict: Annotated[SerializeAsAny[PreEvictOptions], _section("pre_evict", "off")] = PreEvictOptions()
    evict_writeback: bool = Field(
        default=False, description="copy an evicted expert back to the host before its slot is used again"
    )
    placement: Annotated[SerializeAsAny[PlacementOptions], _section("placement", "cache")] = PlacementOptions()
    precision: Annotated[SerializeAsAny[PrecisionOptions], _section("precision", "full")] = PrecisionOptions()
    split: Annotated[SerializeAsAny[SplitOptions], _section("split", "off")] = SplitOptions()

    @model_validator(mode="before")
    @classmethod
    def _former_sections(cls, values: Any) -> Any:
        """Accept the former sections `substitution` and `low_bit`, and options of eviction within pre_evict."""
        if not isinstance(values, Mapping):
            return values
        values = dict(values)
        for name in ("substitution", "low_bit"):
            if isinstance(section := values.pop(name, {}), Mapping) and section:
                kind = values.get("on_miss", "load")
                values["on_miss"] = (dict(kind) if isinstance(kind, Mapping) else {"kind": kind}) | dict(section)
        ahead = values.get("pre_evict")
        if values.get("eviction") == "importance" and isinstance(ahead, Mapping):
            moved = {name: ahead[name] for name in _EVICTION_IN_PRE_EVICT if name in ahead}
            values["pre_evict"] = {name: value for name, value in ahead.items() if name not in moved}
            values["eviction"] = {"kind": "importance", **moved}
        return values

    @model_validator(mode="after")
    def _consistent(self) -> PolicySettings:
        for section in (
            self.split, self.precision, self.placement, self.on_miss, self.eviction, self.prefetch, self.pre_evict,
            self.routing,
        ):  # fmt: skip
            section.check(self)
        if self.reroutes:
            if self.lossless:
                raise ValueError("a policy that changes the routing is not lossless")
            if self.uses_ndp:
                raise ValueError(
                    f"placement {self.placement.kind} follows the model's own routing: leave routing and on_miss out"
                )
        return self

    @property
    def needs(self) -> frozenset[str]:
        """Artifacts of `tiermoe prepare` that it needs: of gates, predictors and profile."""
        return self.prefetch.needs | self.routing.needs | self.on_miss.needs | self.eviction.needs

    @property
    def reroutes(self) -> bool:
        """Whether a rule may change what the router picked."""
        return self.routing.kind != "exact" or self.on_miss.kind != "load"

    @property
    def adapts_prefetch(self) -> bool:
        """Whether prefetch is paused while it does not pay; by times, so that residency is no longer repeatable."""
        chosen = self.lossless if self.prefetch.adaptive is None else self.prefetch.adaptive
        return chosen and self.prefetch.kind != "none"

    @property
    def uses_ndp(self) -> bool:
        """Whether experts are computed by NDP workers."""
        return self.placement.kind != "cache"

    @property
    def low_bit(self) -> LowBitOptions | None:
        """Options of low-bit replicas for misses; None: misses are loaded in full."""
        return self.on_miss if isinstance(self.on_miss, LowBitOptions) else None

    @property
    def maps(self) -> MapOptions | None:
        """Options of prefetch by expert maps, which a matcher carries out; None: no matcher."""
        return self.prefetch if isinstance(self.prefetch, MapOptions) else None

    @property
    def replica_widths(self) -> tuple[int, ...]:
        """Widths of the replicas that the store must have."""
        return self.precision.widths if self.low_bit is None else (self.low_bit.bits,)

    @property
    def needs_popularity(self) -> bool:
        """Whether it reads which experts a calibration text uses most, which calibrated replicas know, where there are
        such; without them it counts as requests run.
        """
        return bool(self.placement.kind == "static")

    @property
    def cache_order(self) -> CacheOrder | None:
        """The order that counts hits at every cache size; None: eviction has none."""
        order: CacheOrder | None = policy_class("eviction", self.eviction.kind).counted_as
        return order

    @property
    def shards_stream(self) -> bool:
        """Whether another GPU's pass that sweeps queues its part of the next layer by itself; a planner says what is
        queued.
        """
        return self.prefetch.streams and not self.placement.planned

    def make_prefetch(self, context: PolicyContext) -> PrefetchPolicy | None:
        """The prefetch policy in its first state; None: no prefetch.

        Raises:
            NotPrepared: `context` lacks an artifact. ValueError: this executor lacks what it needs.
        """
        return self.on_miss.make_prefetch(self.prefetch, context)
