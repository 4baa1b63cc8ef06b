"""The runner: parts one after another, each a child with a time limit; findings are merged and written after each."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from .....errors import ConfigError, TierMoeError
from ....host import versions
from ....report.files import write_json
from ..metrics import Bar, rounded
from . import build, page

Sizes = Literal["real", "toy"]
ROOT = Path(__file__).resolve().parents[4]  # of the clone

_GRACE_S = 8.0  # of a child past its deadline, to write what it has
_LAST_WORDS = 2000
_LEAST_S = 5.0  # a part that has less left is not begun
_EMPTY: dict[str, Any] = {"rows": [], "checks": [], "goals": [], "notes": []}


@dataclass(frozen=True)
class Part:
    """One child process. seconds: its limit at real sizes, if earlier parts leave it no more; a toy run has `TOY_S`."""

    name: str
    seconds: float


# most important first: a run that is cut off has lost the least
PARTS = (
    Part("machine", 25), Part("loads", 30), Part("qwen", 90), Part("tests", 130), Part("mixtral", 65),
    Part("host", 35), Part("deepseek", 70), Part("ndp", 20),
)  # fmt: skip
TOTAL_S, TOY_S = 445.0, 300.0  # the build before it takes up to half a minute


@dataclass(frozen=True)
class Context:
    """What a part is given.

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


@dataclass
class Record:
    """What a part has found so far, written to its file after every finding.

    rows: what was measured, each with its `kind`. checks: they fail the run where they do not hold. goals: they do not.
    notes: what a reader must know. On the stand-in nothing about speed is judged.
    """

    part: str
    file: Path | None
    judged: bool = True
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    goals: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def row(self, kind: str, **values: Any) -> None:
        """One more measurement."""
        self.rows.append({"kind": kind} | values)
        self.write()

    def note(self, text: str) -> None:
        """One more sentence; none twice."""
        if text not in self.notes:
            self.notes.append(text)
            self.write()

    def check(self, name: str, value: float, op: str, limit: float, always: bool = False) -> None:
        """A limit that must hold. always: on the stand-in too."""
        if self.judged or always:
            self._judge(self.checks, Bar(name, float(value), op, limit))

    def goal(self, name: str, value: float, op: str, limit: float) -> None:
        """A limit that is aimed at."""
        if self.judged:
            self._judge(self.goals, Bar(name, float(value), op, limit))

    def _judge(self, bars: list[dict[str, Any]], bar: Bar) -> None:
        bars.append(vars(bar) | {"ok": bar.ok})
        self.write()

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        found: dict[str, Any] = rounded(
            {"rows": self.rows, "checks": self.checks, "goals": self.goals, "notes": self.notes}
        )
        for bar in (*found["checks"], *found["goals"]):
            bar["value"] = None if math.isnan(bar["value"]) else bar["value"]  # JSON has no such number
        return found

    def write(self) -> None:
        """Replace the file; whoever reads it finds it whole."""
        if self.file is not None:
            write_json(self.file, self.as_dict())


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


def chosen_parts(names: str) -> tuple[Part, ...]:
    """The parts of a comma-separated list, in their own order; empty: all.

    Raises:
        ConfigError: there is no such part.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = [part.name for part in PARTS]
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(f"there is no part '{unknown[0]}'", f"choose of {', '.join(known)}")
    return tuple(part for part in PARTS if not wanted or part.name in wanted)


def runs() -> dict[str, Callable[[Context, Record], None]]:
    """What each part runs; imported only in the child that runs it."""
    from . import checks, decode, near_data, transfers

    return {
        "machine": transfers.machine, "loads": transfers.loads, "tests": checks.run, "host": decode.host,
        "ndp": near_data.run, **{name: partial(decode.run, name=name) for name in ("qwen", "mixtral", "deepseek")},
    }  # fmt: skip


def run_part(name: str, device: str, sizes: Sizes, deadline_s: float, record_file: Path) -> None:
    """In a child: one part, whose findings go to `record_file` as they come. An error is kept with what it says.

    Args:
        deadline_s: of `time.monotonic`, which all processes share: importing torch takes of a part's time, too.
    """
    record = Record(name, record_file, judged=device != "cpu")
    try:
        context = Context(device_of(device), sizes, deadline_s, ROOT)
        record.write()
        runs()[name](context, record)
    except TierMoeError as error:
        record.note(f"the part ended early: {error}")
        record.check(f"{name}: ran to its end", 0, ">=", 1, always=True)
        sys.exit(3)


@dataclass(frozen=True)
class Plan:
    """What one call is to run."""

    out: Path
    device: str
    sizes: Sizes
    parts: tuple[Part, ...]
    seconds: float


def run_all(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the parts; the document, which lies in gpu.json and on gpu.md all the time.

    Parts that are not run now keep what an earlier call found on the same device.

    Raises:
        ConfigError: there is no such device, or the folder cannot be written.
    """
    device_of(plan.device)
    plan.out.mkdir(parents=True, exist_ok=True)
    document = _begun(plan)
    until_s = time.monotonic() + plan.seconds
    for number, part in enumerate(plan.parts):
        limit_s = TOY_S if plan.sizes == "toy" else limit_of(plan.parts[number:], until_s - time.monotonic())
        if limit_s < _LEAST_S:
            found = _EMPTY | {"outcome": "not run: no time was left", "seconds": 0.0}
        else:
            say(f"{part.name} (at most {limit_s:.0f} s) ...")
            found = _child(part, plan, limit_s)
        document["parts"][part.name] = found
        _write(plan.out, document, say)
        bad = [check["name"] for check in found.get("checks", ()) if not check["ok"]]
        failed = f"; failed: {'; '.join(bad)}" if bad else ""
        say(f"{part.name}: {found['outcome']} in {found['seconds']:.0f} s{failed}")
    return document


def limit_of(parts: Sequence[Part], left_s: float) -> float:
    """Seconds that the first of the parts to come may take: its own, and its share of what nobody needs."""
    spare_s = max(0.0, left_s - sum(part.seconds for part in parts))
    return min(parts[0].seconds + spare_s / len(parts), left_s)


def failures(document: dict[str, Any], parts: Sequence[Part]) -> list[str]:
    """What failed of these parts: checks that do not hold, and parts that did not come to their end."""
    out = []
    for part in parts:
        found = document["parts"].get(part.name)
        if found is None:
            continue
        if found["outcome"] != "done":
            out.append(f"{part.name}: {found['outcome']}")
        out += [check["name"] for check in found.get("checks", ()) if not check["ok"]]
    return out


def read_document(out: Path) -> dict[str, Any] | None:
    """What an earlier call has left; None: nothing of use."""
    found = _read_json(out / "gpu.json")
    return found if isinstance(found, dict) and isinstance(found.get("parts"), dict) else None


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _begun(plan: Plan) -> dict[str, Any]:
    mine = {
        "name": "gpu", "device": plan.device, "sizes": plan.sizes, "device_name": _device_name(plan.device),
        "versions": versions() | build.package_versions(build.NEEDED | build.USED_IF_THERE),
    }  # fmt: skip
    before = read_document(plan.out)
    same = before is not None and all(before.get(key) == mine[key] for key in ("device", "sizes", "device_name"))
    parts = before["parts"] if before is not None and same else {}
    known = {part.name for part in PARTS}
    return mine | {"parts": {name: found for name, found in parts.items() if name in known}}


def _device_name(device: str) -> str:
    return "cpu (stands in for a GPU)" if device == "cpu" else torch.cuda.get_device_name(device_of(device))


def _child(part: Part, plan: Plan, limit_s: float) -> dict[str, Any]:
    """Run one part; what it found, however it ended."""
    begin_s = time.monotonic()
    with TemporaryDirectory() as scratch:
        record, log = Path(scratch) / "record.json", Path(scratch) / "log"
        command = [
            sys.executable, "-m", __package__, "--part", part.name, "--record", str(record), "--device", plan.device,
            "--sizes", plan.sizes, "--deadline", str(begin_s + limit_s),
        ]  # fmt: skip
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code = process.wait(limit_s + _GRACE_S)
                outcome = "done" if code == 0 else f"ended with status {code}"
            except subprocess.TimeoutExpired:
                outcome = f"cut off after {limit_s + _GRACE_S:.0f} s"
            finally:
                end(process)
        found: dict[str, Any] = dict(_read_json(record) or _EMPTY)
        last_words = log.read_text(encoding="utf-8", errors="replace")[-_LAST_WORDS:]
    found |= {
        "outcome": outcome, "seconds": time.monotonic() - begin_s,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    if outcome != "done":
        found["log"] = last_words
    return found


def end(process: subprocess.Popen[bytes]) -> None:
    """End a child that leads its own session, and whatever it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _write(out: Path, document: dict[str, Any], say: Callable[[str], None]) -> None:
    """The data first: a page that cannot be written costs neither them nor the parts that follow."""
    write_json(out / "gpu.json", document)
    try:
        page.write(out, ROOT, document)
    except Exception as error:
        say(f"the page could not be written ({type(error).__name__}: {error}); gpu.json has the data, see --page-only")


def _parser() -> argparse.ArgumentParser:
    """The options; plain argparse, which every Python has."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every part came to its end and every check holds, 1 when not, 2 where nothing could be begun."""
    asked = _parser().parse_args(arguments)
    if asked.part is not None:
        run_part(asked.part, asked.device, asked.sizes, asked.deadline, asked.record)
        return 0
    try:
        if asked.page_only:
            page.write(asked.out, ROOT, read_document(asked.out))
            return 0
        parts = chosen_parts(asked.parts)
        document = run_all(Plan(asked.out, asked.device, asked.sizes, parts, asked.seconds), _say)
    except TierMoeError as error:
        _say(str(error))
        return 2
    failed = failures(document, parts)
    for name in failed:
        _say(f"failed: {name}")
    _say(f"{len(parts)} of {len(PARTS)} parts; see {asked.out / 'gpu.md'}")
    return 1 if failed else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
