"""What a run is: where, how big, which parts, how long each may take."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from .....errors import ConfigError

Sizes = Literal["real", "toy"]


@dataclass(frozen=True)
class Part:
    """One child process. seconds: its limit at real sizes, if earlier parts leave it no more; a toy run has `TOY_S`."""

    name: str
    title: str
    seconds: float


# most important first: a run that is cut off has lost the least
PARTS = (
    Part("machine", "The machine: links and memories", 25),
    Part("loads", "Host-to-device bandwidth during expert loads", 30),
    Part("qwen", "Decode, Qwen1.5-MoE-A2.7B", 90),
    Part("tests", "Tests on the GPU: token identity, integrity, kernels", 130),
    Part("mixtral", "Decode, Mixtral-8x7B", 65),
    Part("host", "Host time of an MoE layer, and kernels", 35),
    Part("deepseek", "Decode, DeepSeek-V2-Lite", 70),
    Part("ndp", "Near-data kernels on the cores", 20),
)
TOTAL_S, TOY_S = 445.0, 300.0  # the build before it takes up to half a minute


@dataclass(frozen=True)
class Context:
    """What a part is told.

    Attributes:
        deadline_s: of `time.monotonic`, by which it should have ended by itself.
        root: of the clone.
    """

    device: torch.device
    sizes: Sizes
    deadline_s: float
    root: Path

    @property
    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    @property
    def toy(self) -> bool:
        return self.sizes == "toy"

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and compute."""
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def synchronize(self) -> None:
        """Wait for the device; for clocks, never on a path that is measured as such."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def parser() -> argparse.ArgumentParser:
    """The options of `python -m tiermoe.cluster.jobs.bench.gpu`; plain argparse, which every Python has."""
    names = ", ".join(part.name for part in PARTS)
    made = argparse.ArgumentParser(prog="bench gpu", description="Checks and measurements on a GPU.")
    made.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of gpu.json and gpu.md")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the stand-in, to try the script")
    made.add_argument("--sizes", choices=("real", "toy"), default="real", help="toy: seconds of work, for tests")
    made.add_argument("--parts", default="", help=f"only these, separated by commas; of {names}")
    made.add_argument("--seconds", type=float, default=TOTAL_S, help="for all parts together")
    made.add_argument("--page-only", action="store_true", help="write the page from what gpu.json has, measure nothing")
    made.add_argument("--part", help=argparse.SUPPRESS)  # in a child: the one part that it runs
    made.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    made.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    return made


def chosen_parts(names: str) -> tuple[Part, ...]:
    """The parts of a comma-separated list, in their own order; empty: all.

    Raises:
        ConfigError: there is no such part.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {part.name for part in PARTS}
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(f"there is no part '{unknown[0]}'", f"choose of {', '.join(part.name for part in PARTS)}")
    return tuple(part for part in PARTS if not wanted or part.name in wanted)


def device_of(name: str) -> torch.device:
    """The device to run on.

    Raises:
        ConfigError: there is no GPU.
    """
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here", "run it on a machine with one, or try it with --device cpu")
    return torch.device("cuda", torch.cuda.current_device())
