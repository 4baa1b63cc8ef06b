"""A policy: one option for each decision point, frozen and validated (configs/policies)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from .base_settings import Settings

PrefetchKind = Literal[
    "none", "next-gate", "speculative", "pre-gated", "random", "expert-map", "blend", "activation-matrix", "stride",
    "layerwise", "popularity",
]
EvictionKind = Literal["lru", "lfu", "lfu-decay", "expert-map", "expert-map-decay", "lcp", "random", "importance"]


class PrefetchSettings(Settings):
    """Which experts of later layers are asked for ahead of their routing.

    expert-map: what the matcher finds in the maps of similar iterations (fMoE). blend: that and next-gate, by their
    measured precision. Both fall back to next-gate while the matcher is of no use.
    """

    kind: PrefetchKind = "none"
    distance: int = Field(
        default=1, ge=0, le=8, description="layers ahead; 0, for layerwise only: the rest of the layer that runs"
    )
    top: int | None = Field(
        default=None, ge=1, description="experts per token, or per layer and sequence; none: the router's top-k"
    )
    min_useful: float = Field(
        default=0.25, ge=0, le=1, description="share of prefetched experts that must be used; below it prefetch rests"
    )
    synchronous: bool = Field(default=False, description="the forward waits until what was asked for has arrived")
    semantic: bool = Field(default=True, description="of maps: forecast the first layers by the prompt's embedding")
    dynamic: bool = Field(default=True, description="of maps: ask for more experts where the match is less similar")

    @model_validator(mode="after")
    def _consistent(self) -> PrefetchSettings:
        if self.distance == 0 and self.kind != "layerwise":
            raise ValueError(f"prefetch {self.kind} looks at least one layer ahead")
        if self.kind == "layerwise" and self.distance > 1:
            raise ValueError("layer-wise prefetch is for this layer (0) or the next (1)")
        if self.kind in ("speculative", "pre-gated", "random") and self.distance != 1:
            raise ValueError(f"prefetch {self.kind} is for the next layer: leave distance out")
        if not self.uses_maps and not (self.semantic and self.dynamic):
            raise ValueError(f"semantic and dynamic are of expert maps, which prefetch {self.kind} does not use")
        if self.uses_maps and self.synchronous:
            raise ValueError("the forward never waits for the matcher: leave synchronous out")
        if self.kind == "expert-map" and self.top is not None:
            raise ValueError("how many experts are asked for is what the maps say: leave top out")
        return self

    @property
    def uses_maps(self) -> bool:
        """Whether a matcher of expert maps takes part."""
        return self.kind in ("expert-map", "blend")


class PreEvictSettings(Settings):
    """Slots that are freed before the next layer's router runs (ActiveEvict). Who gives one up is `eviction`'s affair.

    release-target: as many as `policies.pre_evict.PreEviction` says. alpha, gamma, window: of eviction importance.
    """

    kind: Literal["off", "release-target"] = "off"
    tau: float = Field(default=0.02, ge=0, le=1, description="gap between two probabilities that makes them uncertain")
    r_max: int = Field(default=2, ge=0, le=64, description="slots freed for uncertainty at most")
    alpha: float = Field(default=0.5, ge=0, le=1, description="weight of recent use against the predicted probability")
    gamma: float = Field(default=0.97, gt=0, le=1, description="what a use counts after one further token")
    window: int = Field(default=128, ge=1, le=1 << 16, description="tokens of a layer after which a use is forgotten")


class PlacementSettings(Settings):
    """Which experts belong to the GPUs and which to the NDP workers.

    cache: none belongs to an NDP worker, the caches decide. context: after a sequence's prefill its most important
    experts, fixed for its decode. static: the most popular ones of the calibration text, for good. monde: in every
    layer those with the most tokens, as far as moving them pays.
    """

    kind: Literal["cache", "context", "static", "monde"] = "cache"
    alpha: float = Field(default=0.5, ge=0, le=1, description="weight of activation counts against routing scores")
    hot_per_layer: int | None = Field(
        default=None, ge=0, description="experts of a layer over all GPUs; none: as many as the budgets hold"
    )


class PrecisionSettings(Settings):
    """On which replicas the NDP workers compute.

    full: on the store's own weights. uniform: all experts at `bits`. prefix-split: `bits` on average, where the loss
    table says that they gain most, never more for a less important expert.
    """

    kind: Literal["full", "uniform", "prefix-split"] = "full"
    bits: float | None = Field(default=None, ge=1, le=8)

    @model_validator(mode="after")
    def _has_bits(self) -> PrecisionSettings:
        if (self.kind == "full") != (self.bits is None):
            raise ValueError(f"precision {self.kind} takes {'no bits' if self.kind == 'full' else 'bits'}")
        if self.kind == "uniform" and self.bits not in (1, 2, 3, 4, 8):
            raise ValueError("uniform precision takes 1, 2, 3, 4 or 8 bits")
        if self.kind == "prefix-split" and self.bits is not None and self.bits > 4:
            raise ValueError("prefix-split takes 1 to 4 bits on average")
        return self

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of the replicas that may be used, ascending."""
        if self.kind == "prefix-split":
            return (1, 2, 3, 4)
        return () if self.bits is None else (int(self.bits),)


class RoutingSettings(Settings):
    """How many of the experts that the router picks a token uses.

    exact: all. adaptive: without the least important ones, as far as the layer's sensitivity allows (AdapMoE).
    budget-aware: as many as are here or fit into free slots (ActiveEvict).
    """

    kind: Literal["exact", "adaptive", "budget-aware"] = "exact"
    narrowest: int = Field(default=1, ge=1, description="of budget-aware: experts that every token keeps")
    threshold: float | None = Field(
        default=None, ge=0, description="of adaptive: nats that a layer may cost a token, by its sensitivity"
    )

    @model_validator(mode="after")
    def _consistent(self) -> RoutingSettings:
        if (self.kind == "adaptive") != (self.threshold is not None):
            raise ValueError(f"routing {self.kind} takes {'a' if self.kind == 'adaptive' else 'no'} threshold")
        return self


class SubstitutionSettings(Settings):
    """How experts that are not on the device are replaced (BuddyMoE); random and drop take the gates alone.

    Gates: percentile or tau, gamma, beta or link_ms, rho. Without any, all misses are replaced.
    """

    rho: int | None = Field(default=None, ge=1, description="replacements of a token in a layer; none: no limit")
    search: int | None = Field(default=None, ge=1, description="H, ranks of a buddy list that are tried; none: all")
    percentile: float | None = Field(
        default=None, ge=0, le=100, description="of each layer's token entropies; tokens below it keep their experts"
    )
    tau: float | None = Field(default=None, ge=0, le=1, description="the same as one entropy for all layers")
    temperature: float = Field(default=1.0, ge=0.8, le=1.2, description="of the entropy")
    gamma: float | None = Field(default=None, gt=0, description="tokens with that margin keep their experts")
    beta: float | None = Field(
        default=None, ge=0, le=1, description="share of the requested experts that miss; from it on all are loaded"
    )
    link_ms: float | None = Field(
        default=None, ge=0, description="milliseconds of link for a layer's loads, to which beta adapts; instead of it"
    )
    eta: float = Field(default=0.0, ge=0, description="weight of the router's own probability of a buddy")
    kappa: float = Field(default=0.0, ge=0, le=1, description="penalty of a buddy on another GPU than the lead's")
    reuse: float = Field(default=0.0, ge=0, lt=1, description="factor on a buddy that the token has already; 0: once")
    fallback: Literal["load", "drop"] = Field(default="load", description="of a miss without a buddy on the device")
    weights: Literal["slot", "buddy"] = Field(default="slot", description="whose routing weight a buddy gets")
    by: Literal["coactivation", "output", "blend"] = Field(default="coactivation", description="ranking of buddies")
    alpha: float = Field(default=0.95, gt=0, le=1, description="CFT: coverage of a buddy list")
    alpha_last: float | None = Field(
        default=None, gt=0, le=1, description="of the last layer, in equal steps from alpha in the first; none: alike"
    )
    max_buddies: int = Field(default=16, ge=1, le=1 << 16, description="K_max")
    weighted: bool = Field(default=False, description="co-activation weighted by probability")
    epsilon: float = Field(default=1.0, ge=0, description="Laplace smoothing of co-activation, in tokens")
    mix: float = Field(default=0.5, ge=0, le=1, description="co-activation's part of a blend")

    @model_validator(mode="after")
    def _consistent(self) -> SubstitutionSettings:
        if self.percentile is not None and self.tau is not None:
            raise ValueError("tau is either given or a percentile")
        if self.beta is not None and self.link_ms is not None:
            raise ValueError("beta is either given or adapts to link_ms")
        if self.temperature != 1.0 and self.percentile is None and self.tau is None and self.gamma is None:
            raise ValueError("temperature is of the gates by entropy and margin, of which there is none")
        if self.by != "blend" and self.mix != 0.5:
            raise ValueError("mix is of the ranking by a blend")
        if self.by == "output" and (self.weighted or self.epsilon != 1.0):
            raise ValueError("weighted and epsilon are of co-activation, which the ranking by output leaves out")
        return self

    def given(self) -> set[str]:
        """Options that are not as by default."""
        return {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}


_GATES = {"rho", "percentile", "tau", "temperature", "gamma", "beta", "link_ms"}
_ON_MISS_TAKES = {
    "load": set(),
    "drop": _GATES - {"rho"},
    "random": _GATES | {"reuse", "fallback"},
    "substitute": set(SubstitutionSettings.model_fields),
    "low-bit": set(),
}


class SplitSettings(Settings):
    """How experts are cut in two, a cached top and a bottom that is loaded for each use (MoEpic).

    off: not at all. fixed: every layer alike, at `theta`. adaptive: it begins so, and each layer's ratio and share of
    the memory follow what is measured.
    """

    kind: Literal["off", "fixed", "adaptive"] = "off"
    theta: float = Field(default=0.5, ge=0, le=1, description="share of an expert's neurons in its top; 0: no cache")
    buffer: int | None = Field(
        default=None, ge=1,
        description="full experts of memory for bottoms; none: top-k, and room for the bottoms of two layers' top-k",
    )  # fmt: skip
    tau: int = Field(default=5000, ge=1, description="tokens between configurations")
    zeta: float = Field(default=0.01, gt=0, lt=1, description="share of a layer's memory that is moved at a time")
    min_gain: float = Field(default=0.01, ge=0, lt=1, description="predicted gain below which nothing is changed")
    allocation: Literal["moepic", "dynamic-programming"] = "moepic"

    @model_validator(mode="after")
    def _consistent(self) -> SplitSettings:
        fields = type(self).model_fields
        changed = {name for name, field in fields.items() if getattr(self, name) != field.default} - {"kind"}
        if self.kind == "off" and changed:
            raise ValueError(f"split is off: leave {', '.join(sorted(changed))} out, or give its kind")
        if self.kind == "fixed" and changed - {"theta", "buffer"}:
            raise ValueError(f"{', '.join(sorted(changed - {'theta', 'buffer'}))}: only an adaptive split has that")
        if self.allocation == "dynamic-programming" and self.theta != 1:
            raise ValueError("dynamic programming gives layers whole experts: say theta 1")
        return self


class LowBitSettings(Settings):
    """How experts that matter little to their tokens are loaded on a miss (HOBBIT): as replicas, in slots of their own.

    A token's experts of which more important ones have up to t1 of its routing weight are loaded in full, those up to
    t2 as replicas, the others not at all (`policies.mixed_precision`).
    """

    bits: Literal[1, 2, 3, 4, 8] = Field(default=4, description="of the replicas")
    share: float = Field(default=0.25, gt=0, lt=1, description="of the expert memory, for slots of replicas")
    t1: float = Field(default=0.6, ge=0, le=1)
    t2: float = Field(default=0.9, ge=0, le=1)
    guesses: bool = Field(default=True, description="next-gate prefetch asks for replicas by the same thresholds")

    @model_validator(mode="after")
    def _consistent(self) -> LowBitSettings:
        if self.t1 > self.t2:
            raise ValueError(f"t1 {self.t1} is above t2 {self.t2}")
        return self


class PolicySettings(Settings):
    """A preset of configs/policies: one option per decision point."""

    name: str
    description: str = ""
    lossless: bool
    eviction: EvictionKind = "lru"
    prefetch: PrefetchSettings = PrefetchSettings()
    routing: RoutingSettings = RoutingSettings()
    on_miss: Literal["load", "substitute", "random", "drop", "low-bit"] = "load"
    substitution: SubstitutionSettings = SubstitutionSettings()
    low_bit: LowBitSettings = LowBitSettings()
    preload: Literal["none", "all"] = "none"
    pre_evict: PreEvictSettings = PreEvictSettings()
    evict_writeback: bool = Field(
        default=False, description="copy an evicted expert back to the host before its slot is used again"
    )
    placement: PlacementSettings = PlacementSettings()
    precision: PrecisionSettings = PrecisionSettings()
    split: SplitSettings = SplitSettings()

    @model_validator(mode="after")
    def _consistent(self) -> PolicySettings:
        if self.split.kind != "off":
            self._refuse_beside_split()
        if self.lossless and self.precision.kind != "full":
            raise ValueError("a policy on quantized replicas is not lossless")
        if not self.uses_ndp and self.precision.kind != "full":
            raise ValueError("precision is that of the NDP worker, which placement cache does not use")
        if self.uses_ndp and (self.prefetch.kind != "none" or self.preload != "none"):
            raise ValueError(f"placement {self.placement.kind} decides what is loaded: leave prefetch and preload out")
        if self.eviction.startswith("expert-map") and not self.prefetch.uses_maps:
            raise ValueError(f"eviction {self.eviction} goes by maps, which prefetch {self.prefetch.kind} does not use")
        unused = self.substitution.given() - _ON_MISS_TAKES[self.on_miss]
        if unused:
            raise ValueError(f"on_miss {self.on_miss} does not use substitution's {', '.join(sorted(unused))}")
        if self.on_miss != "load" and self.routing.kind != "exact":
            raise ValueError(f"on_miss {self.on_miss} is for exact routing")
        self._check_low_bit()
        if self.pre_evict.kind == "off" and self.eviction == "importance":
            raise ValueError("eviction importance goes by what pre_evict predicts: set pre_evict.kind")
        if self.pre_evict.kind != "off" and (self.uses_ndp or self.preload != "none"):
            raise ValueError("pre_evict is for caches that fill on demand: leave placement and preload out")
        if self.routing.kind == "budget-aware" and self.pre_evict.kind == "off":
            raise ValueError("routing budget-aware goes by the slots that pre_evict frees: set pre_evict.kind")
        if self.reroutes:
            if self.lossless:
                raise ValueError("a policy that changes the routing is not lossless")
            if self.uses_ndp:
                raise ValueError(
                    f"placement {self.placement.kind} follows the model's own routing: leave routing and on_miss out"
                )
        return self

    def _check_low_bit(self) -> None:
        if self.on_miss != "low-bit":
            if self.low_bit != LowBitSettings():
                raise ValueError(f"on_miss {self.on_miss} does not use low_bit")
            return
        if self.split.kind != "off" or self.pre_evict.kind != "off":
            raise ValueError("on_miss low-bit divides the slots itself: leave split and pre_evict out")
        if self.preload != "none":
            raise ValueError("on_miss low-bit is for caches that fill on demand: leave preload out")
        if self.eviction.startswith("expert-map") or self.prefetch.uses_maps:
            raise ValueError("maps weigh experts in full only: on_miss low-bit takes another eviction and prefetch")
        if not self.low_bit.guesses and self.prefetch.kind != "next-gate":
            raise ValueError(f"low_bit.guesses is of prefetch next-gate, not of {self.prefetch.kind}")

    def _refuse_beside_split(self) -> None:
        if self.split.kind == "adaptive" and self.eviction not in ("lcp", "lru", "lfu", "random"):
            raise ValueError(f"hit rates of every cache size cannot be counted for eviction {self.eviction}")
        if self.uses_ndp:
            raise ValueError(f"placement {self.placement.kind} moves whole experts: leave split out")
        if self.preload != "none":
            raise ValueError("split experts are never resident as a whole for good: leave preload out")
        if self.pre_evict.kind != "off" or self.evict_writeback:
            raise ValueError("pre_evict and evict_writeback go by whole experts: leave split out")
        if self.eviction.startswith("expert-map"):
            raise ValueError(f"eviction {self.eviction} weighs the experts of all layers, split those of each apart")

    @property
    def reroutes(self) -> bool:
        """Whether a rule may change what the router picked."""
        return self.routing.kind != "exact" or self.on_miss != "load"

    @property
    def needs_profile(self) -> bool:
        """Whether the store must have a profile of its experts."""
        return self.on_miss == "substitute" or self.substitution.percentile is not None

    @property
    def uses_ndp(self) -> bool:
        """Whether experts are computed by NDP workers."""
        return self.placement.kind != "cache"

    @property
    def replica_widths(self) -> tuple[int, ...]:
        """Widths of the replicas that the store must have; those also come with the popularity of experts."""
        if self.on_miss == "low-bit":
            return (self.low_bit.bits,)
        return self.precision.widths or ((4,) if self.placement.kind == "static" else ())

    @property
    def guess_precisions(self) -> tuple[float, float] | None:
        """T1 and T2 of prefetch that asks for replicas, too; None where it asks for experts in full."""
        low = self.low_bit
        mixed = self.on_miss == "low-bit" and self.prefetch.kind == "next-gate" and low.guesses
        return (low.t1, low.t2) if mixed else None
