"""The `--profile` options of `tiermoe prepare`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ....actors.profile_file import ProfileManifest, read_profile
from ....actors.store_format import read_manifest
from ....errors import ConfigError
from ..prepare.calibration import read_texts
from .options import OUTPUT_TOKENS, ProfileOptions
from .report import alikeness, size_distributions, size_table, taken


@dataclass(frozen=True)
class ProfileRequest:
    """What a command line asks to be profiled.

    Attributes:
        text, trace: one of them. figures: folder for heat maps; None: no heat maps.
    """

    text: Path | None
    trace: Path | None
    figures: Path | None
    options: ProfileOptions

    def run(self, store: Path, model_dir: Path) -> ProfileManifest:
        """Profile, and say on stderr how long the buddy lists are.

        Raises:
            ConfigError, StoreError, TraceError: as `profile_text`, `profile_trace` and `write_figures`.
        """
        from .job import profile_text, profile_trace

        if self.text is not None:
            made = profile_text(store, model_dir, self.text, self.options)
        else:
            assert self.trace is not None  # `profile_request` sees to it
            made = profile_trace(store, self.trace, self.options)
        profile = read_profile(store, read_manifest(store))
        console = Console(stderr=True)
        console.print(size_table(size_distributions(profile)))
        shares = ", ".join(f"{row['taken']:.0%} by {row['by']}" for row in taken(profile))
        console.print(f"a token that picks an expert has picked its best buddy too: {shares}", highlight=False)
        if alike := alikeness(profile):
            best = sum(row["best_cosine"] for row in alike) / len(alike)
            better = sum(row["better_than_none"] for row in alike) / len(alike)
            console.print(
                f"best buddy's output: cosine {best:.2f} on average, nearer than no output for {better:.0%} of the "
                "experts",
                highlight=False,
            )
        if self.figures is not None:
            from .figures import write_figures

            files = write_figures(self.figures, profile)
            console.print(f"{len(files)} files in {self.figures}", highlight=False)
        return made


def profile_request(
    text: Path | None,
    trace: Path | None,
    figures: Path | None,
    outputs: int | None,
    warmup: int | None,
    warmup_weight: float | None,
) -> ProfileRequest | None:
    """What the options ask for; None: nothing.

    Raises:
        ConfigError: both sources, options without a source or of the other one, a value out of range, or no text.
    """
    if text is not None and trace is not None:
        raise ConfigError("--profile and --profile-trace are both given", "leave one out: a store has one profile")
    given = {"--profile-figures": figures, "--profile-outputs": outputs, "--profile-warmup": warmup}
    if text is None and trace is None:
        for name, value in {**given, "--profile-warmup-weight": warmup_weight}.items():
            if value is not None:
                raise ConfigError(f"{name} is given without --profile", "add --profile TEXT, or leave it out")
        return None
    if trace is not None and outputs is not None:
        raise ConfigError("--profile-outputs is given with --profile-trace", "leave it out: a trace has no outputs")
    if warmup_weight is not None and warmup is None:
        raise ConfigError("--profile-warmup-weight is given without --profile-warmup", "add --profile-warmup TOKENS")
    options = ProfileOptions(
        OUTPUT_TOKENS if outputs is None else outputs, warmup or 0, 0.0 if warmup_weight is None else warmup_weight
    )
    if text is not None:
        read_texts(text)  # refused before anything is computed
    return ProfileRequest(text, trace, figures, options)
