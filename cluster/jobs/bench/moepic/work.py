"""Sizes of `tiermoe bench moepic`, and the policies that it compares."""

from __future__ import annotations

from dataclasses import dataclass

from .....errors import ConfigError
from ..compare.lists import require_budgets

POLICIES = (
    "on-demand", "cache-only", "prefetch-only", "pre-gated", "mixtral-offloading", "adapmoe", "moe-infinity", "moepic",
)  # fmt: skip
ABLATION = ("moepic", "moepic-no-sp", "moepic-no-lcp", "moepic-no-cca")
SHARES = (1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6)  # of a layer's experts: the cache sizes of Table 1


@dataclass(frozen=True)
class Workload:
    """What is run.

    budgets: shares of all experts. ratios: of each emulated link, loading over computing; links: gigabytes (1e9) per
    second, in their place. prompt_tokens, max_tokens: of each prompt. warm: prompts that are served first and not
    counted; prompts: of each repetition. tau: tokens between two configurations, in place of the presets'.
    trace_prompts: of the recorded trace, to learn from and to measure, with trace_tokens generated after each.
    ablation_budgets, sensitivity_budgets: of those two sections, on the first link.
    thetas, zetas, rhos, omegas: values of the sensitivity section.
    quality_documents: held-out documents on which policies that are not lossless are scored.

    Raises:
        ConfigError: a size or a budget is out of range, a budget is given twice, or the warm-up has no prompt
            after the first configuration.
    """

    budgets: tuple[str, ...] = ("0.125", "0.25", "0.5", "0.75")
    ratios: tuple[float, ...] = (2.5, 1.0)
    links: tuple[float, ...] = ()
    prompt_tokens: int = 32
    max_tokens: int = 20
    warm: int = 6
    prompts: int = 2
    tau: int = 240
    trace_prompts: tuple[int, int] = (16, 16)
    trace_tokens: int = 64
    quality_documents: int = 2
    policies: tuple[str, ...] = POLICIES
    ablation: tuple[str, ...] = ABLATION
    ablation_budgets: tuple[str, ...] = ("0.25", "0.5")
    sensitivity_budgets: tuple[str, ...] = ("0.25",)
    thetas: tuple[float, ...] = (0.1, 0.25, 0.4, 0.5, 0.75, 1.0)
    zetas: tuple[float, ...] = (0.005, 0.01, 0.02, 0.05)
    rhos: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75)
    omegas: tuple[int, ...] = (32, 128, 512)

    def __post_init__(self) -> None:
        for option in (
            "prompt_tokens", "max_tokens", "warm", "prompts", "tau", "trace_tokens", "quality_documents"
        ):  # fmt: skip
            if getattr(self, option) < 1:
                raise ConfigError(f"--{option.replace('_', '-')} is {getattr(self, option)}", "give at least 1")
        if self.max_tokens < 3:
            raise ConfigError(f"--max-tokens is {self.max_tokens}", "give at least 3: decode steps are measured")
        if not self.ratios and not self.links:
            raise ConfigError("--ratios names nothing", "give at least one, separated by commas")
        if any(not 0 < value < float("inf") for value in (*self.ratios, *self.links)):
            raise ConfigError("--ratios and --links must be above 0", "give numbers separated by commas")
        require_budgets("budgets", self.budgets)
        before = self.warm_tokens - self.warm_tokens // self.warm
        if before < self.tau:
            raise ConfigError(
                f"the warm-up has {before} tokens before its last prompt, the configurator runs after {self.tau}",
                "raise --warm, or lower --tau",
            )

    @property
    def warm_tokens(self) -> int:
        """Tokens that the model has seen when counting begins."""
        return self.warm * (self.prompt_tokens + self.max_tokens - 1)
