"""What a checkpoint publishes about how its text is made: the defaults of sampling in generation_config.json.

    read_defaults    the file's values, checked; those of config.json where a folder has no such file, as transformers

A server gives them to what a request leaves out, as vLLM does. `tiermoe run` and `tiermoe.LLM` stay greedy and have a
number of tokens of their own, so that two runs compare; all else is the file's, as in transformers' `generate`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ...actors.requests import PENALTY, REPETITION, SamplingParams
from ...errors import CheckpointError, ConfigError
from ..host import shown
from .weight_files import CONFIG, optional_json

GENERATION_CONFIG = "generation_config.json"
GenerationConfigMode = Literal["auto", "none"]

# by field: the least and the greatest value, and whether the least is one; those of the server's parameters
_RANGES: Mapping[str, tuple[float, float, bool]] = {
    "temperature": (0, 2, True), "top_p": (0, 1, False), "top_k": (-1, 2**31, True), "min_p": (0, 1, True),
    "repetition_penalty": (*REPETITION, True), "presence_penalty": (*PENALTY, True),
    "frequency_penalty": (*PENALTY, True), "max_new_tokens": (1, 2**31, True),
}  # fmt: skip
_WHOLE = ("top_k", "max_new_tokens")
_OF_A_SERVER = ("temperature", "max_new_tokens")
# fields that change a text and are not carried out, with the values that change nothing; `penalty_last_n` and what
# follows are llama.cpp's
_NOT_CARRIED_OUT: Mapping[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,),
    "bad_words_ids": (), "suppress_tokens": (), "begin_suppress_tokens": (), "sequence_bias": (),
    "forced_bos_token_id": (), "forced_eos_token_id": (), "force_words_ids": (), "constraints": (),
    "num_beams": (1,), "num_beam_groups": (1,), "diversity_penalty": (0,), "penalty_alpha": (0,), "dola_layers": (),
    "min_length": (0,), "min_new_tokens": (0,), "max_length": (20,), "stop_strings": (), "max_time": (),
    "typical_p": (1,), "top_h": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "guidance_scale": (1,),
    "exponential_decay_length_penalty": (), "watermarking_config": (), "token_healing": (False,),
    "penalty_last_n": (-1,), "xtc_probability": (0,), "mirostat": (0,), "sequence": (),
}  # fmt: skip


@dataclass(frozen=True)
class GenerationDefaults:
    """The values of what a request leaves out; None: the checkpoint does not say.

    Attributes:
        file: that says so, for people.
        not_carried_out: fields of it that change the text in transformers, and not here.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_new_tokens: int | None = None
    file: str = field(default=GENERATION_CONFIG, metadata={"value": False})
    not_carried_out: tuple[str, ...] = field(default=(), metadata={"value": False})

    @property
    def values(self) -> dict[str, float]:
        """The values that the checkpoint says, by name."""
        names = [each.name for each in fields(self) if each.metadata.get("value", True)]
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def completed(self, params: SamplingParams, given: Collection[str] = ()) -> SamplingParams:
        """Options of `run` and `LLM` with the defaults of those that are not among the `given` ones."""
        left = {name: value for name, value in self.values.items() if name not in (*_OF_A_SERVER, *given)}
        return replace(params, **left)  # type: ignore[arg-type]  # each by its name

    def said(self, *, server: bool) -> str | None:
        """A line for people about the values that are in force; None: there is none."""
        found = {name: value for name, value in self.values.items() if server or name not in _OF_A_SERVER}
        if not found:
            return None
        listed = ", ".join(f"{name} {value:g}" for name, value in found.items())
        return f"defaults of {self.file}: {listed}; --generation-config none turns them off"

    @property
    def warning(self) -> str | None:
        """A line for people about fields that are not carried out; None: there is none."""
        if not self.not_carried_out:
            return None
        return (
            f"{self.file} has {', '.join(self.not_carried_out)}: not carried out, so the text may differ from that of "
            "transformers' generate"
        )


NO_DEFAULTS = GenerationDefaults()


def read_defaults(folder: Path, mode: str = "auto") -> GenerationDefaults:
    """The defaults of sampling that a checkpoint or its store publishes.

    Args:
        mode: "auto", or "none": as if the checkpoint said nothing.

    Raises:
        ConfigError: an unknown mode. CheckpointError: the file is malformed, or a value is out of range.
    """
    check_mode(mode)
    if mode == "none":
        return NO_DEFAULTS
    path = folder / GENERATION_CONFIG
    found = optional_json(path)
    if found is None:
        path = folder / CONFIG
        found = optional_json(path) or {}
        inner = found.get("text_config")
        found |= inner if isinstance(inner, dict) else {}
    values = {name: _checked(path, name, found[name]) for name in _RANGES if found.get(name) is not None}
    if values.get("top_k") is not None:
        values["top_k"] = max(0, values["top_k"])
    left = tuple(name for name, neutral in _NOT_CARRIED_OUT.items() if _changes(found.get(name), neutral))
    return GenerationDefaults(**values, file=path.name, not_carried_out=left)


def check_mode(mode: str) -> None:
    """Raise ConfigError: an unknown mode of `read_defaults`."""
    known = get_args(GenerationConfigMode)
    if mode not in known:
        raise ConfigError(f"--generation-config is '{mode}'", f"give one of {', '.join(known)}")


def _checked(path: Path, name: str, value: Any) -> Any:
    """A value within its range. Raises CheckpointError: it is not, and the message names the file."""
    least, most, closed = _RANGES[name]
    number, whole = isinstance(value, int | float) and not isinstance(value, bool), name in _WHOLE
    if not number or not (least < value <= most or (closed and value == least)) or (whole and value != int(value)):
        kind = "a whole number" if whole else "a number"
        upper = "" if most == 2**31 else f" to {most:g}"
        wanted = f"{kind} from {least:g}{upper}" if closed else f"{kind} over {least:g} and up to {most:g}"
        what = f"'{shown(path)}' has {name} = {repr(value)[:40]}, not {wanted}"
        raise CheckpointError(what, "correct it, or pass --generation-config none")
    return int(value) if whole else float(value)


def _changes(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a field has a value other than none, an empty one, and the neutral ones."""
    return value is not None and value not in ([], {}, "") and value not in neutral
