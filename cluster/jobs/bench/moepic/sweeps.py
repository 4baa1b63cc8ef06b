"""The three sweeps of the page: budgets and links, ablation, theta and zeta."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ....config import RunConfig, load_policy
from ..compare.sweep import Sweep
from ..prompt_split import Split
from .findings import OWN
from .variants import write_variant
from .work import Workload

FIXED = "moepic-no-cca"  # moepic with a fixed split
NAMES = ("budgets", "ablation", "sensitivity")


def sweeps(
    config: RunConfig, split: Split, repeats: int, work: Workload, links: Sequence[float], folder: Path
) -> dict[str, Sweep]:  # fmt: skip
    """By name, in their order.

    Args:
        links: gigabytes (1e9) per second; ablation and sensitivity are of the first.
        folder: for the presets that are changed.

    Raises:
        ConfigError: a policy is unknown or does not fit a budget.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        name: write_variant(folder, name, name, {"split": {"tau": work.tau}})
        for name in dict.fromkeys((OWN, *work.policies, *work.ablation))
        if configures_itself(name)
    }
    varied = {OWN: files[OWN]} if OWN in files else {}
    for theta in work.thetas:
        name = f"theta {theta:g}"
        varied[name] = write_variant(folder, name, FIXED, {"split": {"theta": theta}})
    for zeta in work.zetas:
        name = f"zeta {zeta:g}"
        varied[name] = write_variant(folder, name, OWN, {"split": {"tau": work.tau, "zeta": zeta}})

    def sweep(policies: Sequence[str], budgets: Sequence[str], gbps: Sequence[float], files: dict[str, str]) -> Sweep:
        return Sweep(
            config, tuple(policies), tuple(budgets), tuple(gbps), split.measure, split.learn, repeats, work.max_tokens,
            fresh=True, quality_documents=work.quality_documents, files=files,
        )  # fmt: skip

    return {
        "budgets": sweep(work.policies, work.budgets, links, files),
        "ablation": sweep(work.ablation, work.ablation_budgets, links[:1], files),
        "sensitivity": sweep((OWN, *(n for n in varied if n != OWN)), work.sensitivity_budgets, links[:1], varied),
    }


def configures_itself(policy: str) -> bool:
    """Whether a preset has a configurator, so that `tau` is for it."""
    return load_policy(policy).split.kind == "adaptive"


def sweep_files(folder: Path) -> tuple[Path, ...]:
    """Results of the sweeps in the order of `NAMES`, then of the other parts, beside which unfinished ones are kept."""
    return tuple(folder / f"moepic-{name}.json" for name in (*NAMES, "parts"))
