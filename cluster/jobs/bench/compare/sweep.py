"""What a comparison runs: every policy at every budget and link, on which prompts, how often."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .....actors.policy_settings import PolicySettings
from .....actors.settings import LinkSettings
from .....errors import ConfigError
from ....config import RunConfig, engine_settings, load_policy
from ....host import cpu, versions
from .lists import require_each_once

Prompt = tuple[int, ...]
WARM_UP_TOKENS = 8  # of the first prompt, where nothing else is served before measuring


@dataclass(frozen=True)
class Group:
    """Cells that are measured together, in turn: all policies at one budget and link (gigabytes per second).

    gbps None: the link is not throttled, or is the hardware's own.
    """

    budget: str
    gbps: float | None

    @property
    def name(self) -> str:
        return f"budget {self.budget}, " + ("no emulated link" if self.gbps is None else f"{self.gbps:g} GB/s")


@dataclass(frozen=True)
class Sweep:
    """A comparison, checked before anything is started.

    Args:
        base: everything but policy, budget and the link's speed.
        policies: names in configs/policies, or YAML files.
        budgets: as for `parse_budget`. links: gigabytes (1e9) per second; None: no emulated link.
        prompts: token ids. warm: prompts that are served first and not counted, in their order.
        repeats: counted repetitions. max_tokens: generated for each prompt. batch: prompts in flight together.
        fresh: each repetition takes its own share of the prompts, so that a policy which learns meets none twice.
        quality_documents: held-out documents on which policies that are not lossless are scored.
        files: YAML files of those policies that go by another name than that of a preset or a file.

    Raises:
        ConfigError: a list is empty or names something twice, a number is out of range, there are fewer prompts than
            repetitions, or a policy does not fit a budget.
    """

    base: RunConfig
    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    links: tuple[float | None, ...]
    prompts: tuple[Prompt, ...]
    warm: tuple[Prompt, ...] = ()
    repeats: int = 5
    max_tokens: int = 32
    batch: int = 1
    fresh: bool = False
    quality_documents: int = 6
    files: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lists: tuple[tuple[str, Sequence[Any]], ...] = (
            ("policies", self.policies), ("budgets", self.budgets), ("links", self.links),
        )  # fmt: skip
        for option, values in lists:
            require_each_once(option, values)
        if any(gbps is not None and not 0 < gbps < float("inf") for gbps in self.links):
            raise ConfigError("--links must be above 0", "give gigabytes per second, or none")
        for option, number in (
            ("repeat", self.repeats), ("max-tokens", self.max_tokens), ("batch", self.batch),
            ("quality-documents", self.quality_documents), ("prompts", len(self.prompts)),
        ):  # fmt: skip
            if number < 1:
                raise ConfigError(f"--{option} is {number}", "give at least 1")
        if self.fresh and len(self.prompts) < self.repeats:
            what = f"{len(self.prompts)} prompts cannot be new in each of {self.repeats} repetitions"
            raise ConfigError(what, "give more prompts, fewer repetitions, or leave --fresh out")
        for group in self.groups:
            for policy in self.policies:
                engine_settings(self.config(policy, group))

    @property
    def groups(self) -> list[Group]:
        return [Group(budget, gbps) for budget in self.budgets for gbps in self.links]

    def config(self, policy: str, group: Group) -> RunConfig:
        """How one cell runs."""
        link = LinkSettings(gbps=group.gbps, latency_us=self.base.link.latency_us if group.gbps is not None else 0.0)
        policy = self.files.get(policy, policy)
        return self.base.model_copy(update={"policy": policy, "budget": group.budget, "link": link})

    def preset(self, policy: str) -> PolicySettings:
        """Of one of the policies."""
        return load_policy(self.files.get(policy, policy))

    def round(self, number: int) -> range:
        """Indices of the prompts of a repetition; shares of one sweep have the same size."""
        if not self.fresh:
            return range(len(self.prompts))
        share = len(self.prompts) // self.repeats
        return range(number * share, (number + 1) * share)

    @property
    def warm_up(self) -> tuple[Prompt, ...]:
        """What is served before the first counted repetition."""
        if self.warm:
            return self.warm
        return (self.prompts[0][:WARM_UP_TOKENS],) if self.fresh else self.prompts

    def settings(self) -> dict[str, Any]:
        """For the report, as plain values."""
        return {
            "policies": list(self.policies), "budgets": list(self.budgets), "links_gbps": list(self.links),
            "latency_us": self.base.link.latency_us, "prompts": len(self.prompts),
            "prompt_tokens": sum(map(len, self.prompts)), "warm_prompts": len(self.warm),
            "warm_tokens": sum(map(len, self.warm)), "repeats": self.repeats, "prompts_of_a_repetition":
            len(self.round(0)), "max_tokens": self.max_tokens, "batch": self.batch, "fresh": self.fresh,
            "threads": self.base.worker_threads, "model": self.base.model_dir.name,
        }  # fmt: skip

    def fingerprint(self) -> dict[str, Any]:
        """Whatever changes a figure, by name: a sweep goes on only with figures of the same."""
        matcher = self.base.matcher.warm
        return {
            **self.settings(),
            "prompts": digest(self.prompts),
            "warm": digest(self.warm),
            "presets": {name: self.preset(name).model_dump(mode="json") for name in self.policies},
            "maps": None if matcher is None else hashlib.sha256(Path(matcher).read_bytes()).hexdigest(),
            "quality_documents": self.quality_documents,
            **surroundings(self.base),
        }


def surroundings(base: RunConfig) -> dict[str, Any]:
    """What changes figures of any benchmark, by name: settings besides policy and budget, checkpoint, machine."""
    return {
        "config": base.model_dump(mode="json", exclude={"policy", "budget", "ray", "store"}),
        "checkpoint": digest((base.model_dir / "config.json").read_text(encoding="utf-8")),
        "hardware": cpu(),
        "versions": versions(),
    }


def digest(value: Any) -> str:
    """Of plain values."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
