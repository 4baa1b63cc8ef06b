"""`tiermoe bench compare` on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from ....errors import ConfigError, RequestError
from ...config import RunConfig, check_model_dir
from ...prompt import check_length, load_model_config
from ..record.command import read_prompts
from .compare.kept import Kept
from .compare.report import compare
from .compare.sweep import Prompt, Sweep
from .metrics import Report
from .serving import run_config

OWN_KEYS = ("policy", "budget", "link")

Policies = Annotated[str, typer.Option(help="Presets or YAML files, separated by commas.")]
Budgets = Annotated[str, typer.Option(help="Device memory for experts: shares or sizes, separated by commas.")]
Links = Annotated[str, typer.Option(help="Emulated links in 1e9 bytes per second, or none, separated by commas.")]
Prompts = Annotated[Path, typer.Option(help="Text, one prompt a line, or JSON lines.")]
Repeat = Annotated[int, typer.Option("--repeat", "--repeats", help="Counted repetitions of each cell.")]
MaxTokens = Annotated[int, typer.Option(help="Tokens to generate for each prompt.")]
Warm = Annotated[Path | None, typer.Option(help="Prompts served first, uncounted. (one round of --prompts)")]
Batch = Annotated[int, typer.Option(help="Prompts in flight together.")]
PromptTokens = Annotated[int | None, typer.Option(help="Cut prompts to so many tokens.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Each repetition takes its own share of the prompts.")]
QualityDocuments = Annotated[int, typer.Option(help="Held-out documents to score lossy policies on.")]


def sweep_of(
    base: RunConfig, policies: str, budgets: str, links: str, prompts: Path, warm: Path | None, repeats: int,
    max_tokens: int, batch: int, prompt_tokens: int | None, fresh: bool, quality_documents: int,
) -> Sweep:  # fmt: skip
    """The sweep that options ask for.

    Raises:
        ConfigError: see `Sweep`, or a link is no number. RequestError: a prompt does not fit, or a file is refused.
    """
    if prompt_tokens is not None and prompt_tokens < 1:
        raise ConfigError(f"--prompt-tokens is {prompt_tokens}", "give a number of at least 1")
    check_model_dir(base.model_dir)

    def read(file: Path | None) -> tuple[Prompt, ...]:
        if file is None:
            return ()
        found = tuple(prompt[:prompt_tokens] for prompt in read_prompts(file, base.model_dir))
        _check_lengths(file, found, max_tokens, base)
        return found

    return Sweep(
        base, parts(policies), parts(budgets), tuple(_link(part) for part in parts(links)), read(prompts),
        read(warm), repeats, max_tokens, batch, fresh, quality_documents,
    )  # fmt: skip


def measure(
    model: str | None, config: str | None, out: Path | None, progress: Progress, *, policies: str, budgets: str,
    links: str, prompts: Path, warm: Path | None, repeats: int, max_tokens: int, batch: int,
    prompt_tokens: int | None, fresh: bool, quality_documents: int,
) -> tuple[Report, Kept]:  # fmt: skip
    """The report of `tiermoe bench compare`, and what was kept beside `out`. Raises as `sweep_of` and `compare`."""
    sweep = sweep_of(
        run_config(model, config), policies, budgets, links, prompts, warm, repeats, max_tokens, batch, prompt_tokens,
        fresh, quality_documents,
    )  # fmt: skip
    return compare(sweep, out, progress)


def parts(text: str) -> tuple[str, ...]:
    """What an option names, separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(option: str, text: str) -> tuple[float, ...]:
    """The numbers of an option, separated by commas.

    Raises:
        ConfigError: one is none.
    """
    try:
        return tuple(float(part) for part in parts(text))
    except ValueError:
        raise ConfigError(f"--{option} has '{text}'", "give numbers separated by commas") from None


def _link(text: str) -> float | None:
    if text == "none":
        return None
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--links has '{text}'", "give gigabytes per second, or none") from None


def _check_lengths(file: Path, prompts: Sequence[Prompt], max_tokens: int, base: RunConfig) -> None:
    model_config = load_model_config(base.model_dir)
    for number, prompt in enumerate(prompts, start=1):
        try:
            check_length(len(prompt), max_tokens, model_config, base.kv)
        except RequestError as error:
            what = f"{file}: prompt {number}: {error.what}"
            raise RequestError(what, f"{error.remedy}, or pass --prompt-tokens") from error
