"""What the actors need to know to start: frozen, validated, without defaults hidden elsewhere.

`cluster.config` builds these from YAML files and command-line options.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """Base: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class LinkSettings(Settings):
    """The host-to-device link that the CPU stand-in throttles copies to (ignored on CUDA)."""

    gbps: float | None = Field(default=None, gt=0, description="gigabytes (1e9) per second; none: unthrottled")
    latency_us: float = Field(default=0.0, ge=0, description="microseconds before each copy starts")


class PrefetchSettings(Settings):
    """Which experts of later layers are asked for ahead of their routing."""

    kind: Literal["none", "next-gate"] = "none"
    distance: int = Field(default=1, ge=1, le=8, description="layers ahead")
    top: int | None = Field(default=None, ge=1, description="experts per token; none: the router's top-k")
    min_useful: float = Field(
        default=0.25, ge=0, le=1, description="share of prefetched experts that must be used; below it prefetch rests"
    )


class PolicySettings(Settings):
    """A preset of configs/policies: one option per decision point."""

    name: str
    description: str = ""
    lossless: bool
    eviction: Literal["lru"] = "lru"
    prefetch: PrefetchSettings = PrefetchSettings()
    on_miss: Literal["load"] = "load"
    preload: Literal["none", "all"] = "none"


class KvSettings(Settings):
    """The KV cache, always bounded, and how requests share it.

    batching: continuous (transformers' paged cache), serial (one request after another), or auto: continuous
    where the model's attention allows it.
    """

    batching: Literal["auto", "continuous", "serial"] = "auto"
    page_size: int = Field(default=32, ge=4, description="tokens per page")
    num_blocks: int = Field(default=256, ge=2, le=1 << 20, description="pages per layer in all")
    max_batch_tokens: int = Field(default=512, ge=1, description="tokens of one forward pass")
    max_requests: int = Field(default=64, ge=1, description="requests of one forward pass")


class EngineSettings(Settings):
    """Everything a `GpuWorker` lead needs besides the store."""

    policy: PolicySettings
    budget: float | int = Field(description="float in (0, 1]: share of all routed-expert slot bytes; int: bytes")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    threads: int = Field(default=1, ge=1, description="torch intra-op threads of the worker")
    link: LinkSettings = LinkSettings()
    kv: KvSettings = KvSettings()
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    integrity_checks: bool = Field(default=False, description="check the cache's invariants after every forward")
    trace: bool = Field(default=False, description="record a timeline of compute, copies and waits")
