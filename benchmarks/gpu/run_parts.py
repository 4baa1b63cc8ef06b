"""The runner: one child with a time limit for each part; results are merged and written after each."""

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
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from tiermoe.actors.engine.make_device import cuda_usable
from tiermoe.cluster.host import versions
from tiermoe.cluster.jobs.bench.metrics import Bar, rounded
from tiermoe.cluster.report.files import write_json
from tiermoe.errors import ConfigError, TierMoeError

from . import build, page

Sizes = Literal["real", "toy"]
ROOT = Path(__file__).resolve().parents[2]  # of the clone

_GRACE_S = 8.0  # of a child past its deadline, to write its results
_LAST_WORDS = 2000
_LEAST_S = 5.0  # a part with less time left does not start
_EMPTY: dict[str, Any] = {"rows": [], "checks": [], "goals": [], "notes": []}


@dataclass(frozen=True)
class Part:
    """One child process. seconds: its limit at real sizes unless earlier parts leave it more; a toy run has `TOY_S`.

    measure: module beside this one, and its function of (context, record).
    """

    name: str
    seconds: float
    measure: str = "decode.run"

    def load(self) -> Callable[[Context, Record], None]:
        """The function; imported only in the child that runs it."""
        module, _, function = self.measure.partition(".")
        found: Callable[[Context, Record], None] = getattr(import_module(f".{module}", __package__), function)
        return found


# What is learned soonest and decides most first, in case the run is cut off. Those of `FIRST` take twelve minutes of a
# GPU at most; the others have what is left, or another call.
FIRST = (
    Part("mapped", 40, "transfers.mapped"), Part("machine", 15, "transfers.machine"), Part("qwen", 90),
    Part("qwen3", 60), Part("forms", 120, "forms.run"), Part("published", 120, "decode.published"),
    Part("recovery", 60, "checks.recovery"), Part("prompt", 60, "prompt.run"), Part("ray", 60, "through_ray.run"),
)  # fmt: skip
PARTS = (
    *FIRST, Part("tests", 110, "checks.run"), Part("served", 40, "served.run"), Part("host", 60, "decode.host"),
    Part("loads", 25, "transfers.loads"), Part("references", 60, "references.run"), Part("ndp", 15, "near_data.run"),
)  # fmt: skip
TOTAL_S, TOY_S = 500.0, 500.0  # of a call: a device may end a command after ten minutes
BUILD_S = 30.0  # of the build before it; what it takes beyond that is the parts' loss
CELLS = ("served", "timeline", "form", "prompt")  # kinds of rows that a later call that resumes does not measure again
NO_TIME = "no time was left"  # in a note: a later call that resumes may have it


@dataclass(frozen=True)
class Context:
    """The arguments of a part: `deadline_s` of `time.monotonic`, `root` of the clone."""

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
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def synchronize(self) -> None:
        """Wait for the device; only where clocks start and stop."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass
class Record:
    """The results of a part so far, written to its file after every one.

    rows: measurements, each with its `kind`. checks: limits that must hold. goals: limits that need not hold.
    notes: sentences. On the stand-in nothing about speed is judged.
    """

    part: str
    file: Path | None
    judged: bool = True
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    goals: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def resume(self, before: Any) -> None:
        """Take over the cells that an earlier call measured, and what it judged of them; not what is measured anew."""
        if not isinstance(before, dict):
            return
        self.rows = [row for row in before["rows"] if row["kind"] in CELLS]
        self.checks = [check for check in before["checks"] if check["ok"]]
        self.goals = list(before["goals"])

    def measured(self, kind: str, **values: Any) -> bool:
        """Whether there is a row of this kind with these values."""
        return any(values.items() <= row.items() for row in self.rows_of(kind))

    def rows_of(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == kind]

    def row(self, kind: str, **values: Any) -> None:
        self.rows.append({"kind": kind} | values)
        self.write()

    def note(self, text: str) -> None:
        """Add a sentence, once."""
        if text not in self.notes:
            self.notes.append(text)
            self.write()

    def has_time(self, context: Context, seconds: float, what: str) -> bool:
        """Whether so much time is left for it; if not, a note says so."""
        if context.left_s < seconds:
            self.note(f"{what}: {NO_TIME}")
        return context.left_s >= seconds

    @contextlib.contextmanager
    def trying(self, case: str, must_run: bool = False) -> Iterator[None]:
        """A case whose error is a note and costs only itself.

        Args:
            must_run: an error fails the run, unless it is a refusal or a lack of memory.
        """
        try:
            yield
        except (TierMoeError, torch.OutOfMemoryError) as error:
            self.note(f"{case}: {str(error)[:400]}")
        except Exception as error:
            if "CUDA error" in str(error):  # the context is gone, for every later case too
                raise
            self.note(f"{case} failed: {''.join(traceback.format_exception(error)[-3:])[-700:]}")
            if must_run:
                self.check(f"{case}: ran", 0, ">=", 1, always=True)

    def check(self, name: str, value: float, op: str, limit: float, always: bool = False) -> None:
        """Judge a limit that must hold. always: on the stand-in too."""
        if self.judged or always:
            self._judge(self.checks, Bar(name, float(value), op, limit))

    def goal(self, name: str, value: float, op: str, limit: float) -> None:
        if self.judged:
            self._judge(self.goals, Bar(name, float(value), op, limit))

    def _judge(self, bars: list[dict[str, Any]], bar: Bar) -> None:
        bars.append(vars(bar) | {"ok": bar.ok})
        self.write()

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = rounded(
            {"rows": self.rows, "checks": self.checks, "goals": self.goals, "notes": self.notes}
        )
        for bar in (*found["checks"], *found["goals"]):
            bar["value"] = None if math.isnan(bar["value"]) else bar["value"]  # JSON has no such number
        return found

    def write(self) -> None:
        if self.file is not None:
            write_json(self.file, self.as_dict())


def device_of(name: str) -> torch.device:
    """The device to run on.

    Raises:
        ConfigError: there is no GPU that CUDA can use.
    """
    if name == "cpu":
        return torch.device("cpu")
    cuda_usable(required=True)
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


def run_part(name: str, device: str, sizes: Sizes, deadline_s: float, record_file: Path) -> None:
    """In a child: run one part, with results and errors in `record_file`.

    Args:
        deadline_s: of `time.monotonic`, which all processes share; importing torch counts.
    """
    record = Record(name, record_file, judged=device != "cpu")
    record.resume(_read_json(record_file))
    try:
        context = Context(device_of(device), sizes, deadline_s, ROOT)
        record.write()
        (part,) = chosen_parts(name)
        part.load()(context, record)
    except TierMoeError as error:
        record.note(f"the part ended early: {error}")
        record.check(f"{name}: ran to its end", 0, ">=", 1, always=True)
        sys.exit(3)


@dataclass(frozen=True)
class Plan:
    out: Path
    device: str
    sizes: Sizes
    parts: tuple[Part, ...]
    seconds: float
    resume: bool = False


def run_all(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the parts; return the document, which gpu.json and gpu.md show after every part.

    Parts that do not run now stay as an earlier call on the same device left them.

    Raises:
        ConfigError: there is no such device, or the folder cannot be written.
    """
    device_of(plan.device)
    plan.out.mkdir(parents=True, exist_ok=True)
    document = _begun(plan)
    until_s = time.monotonic() + plan.seconds
    for number, part in enumerate(plan.parts):
        earlier = document["parts"].get(part.name) if plan.resume else None
        if earlier is not None and finished(earlier):
            say(f"{part.name}: done by an earlier call")
            continue
        limit_s = TOY_S if plan.sizes == "toy" else limit_of(plan.parts[number:], until_s - time.monotonic())
        if limit_s < _LEAST_S:
            found = _EMPTY | {"outcome": f"not run: {NO_TIME}", "seconds": 0.0}
        else:
            say(f"{part.name} (at most {limit_s:.0f} s) ...")
            found = _child(part, plan, limit_s, earlier)
        document["parts"][part.name] = found
        _write(plan.out, document, say)
        bad = [check["name"] for check in found.get("checks", ()) if not check["ok"]]
        failed = f"; failed: {'; '.join(bad)}" if bad else ""
        say(f"{part.name}: {found['outcome']} in {found['seconds']:.0f} s{failed}")
    return document


def finished(found: Mapping[str, Any]) -> bool:
    """Whether a part ended well and left nothing out for want of time."""
    return found["outcome"] == "done" and not any(NO_TIME in note for note in found["notes"])


def limit_of(parts: Sequence[Part], left_s: float) -> float:
    """Seconds for the first of the remaining parts: its own, and its share of the spare time."""
    spare_s = max(0.0, left_s - sum(part.seconds for part in parts))
    return min(parts[0].seconds + spare_s / len(parts), left_s)


def failures(document: dict[str, Any], parts: Sequence[Part]) -> list[str]:
    """The checks of these parts that do not hold, and the parts that did not end well."""
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
    """The document of an earlier call, if it is usable."""
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


def _child(part: Part, plan: Plan, limit_s: float, earlier: Mapping[str, Any] | None = None) -> dict[str, Any]:
    begin_s = time.monotonic()
    with TemporaryDirectory() as scratch:
        record, log = Path(scratch) / "record.json", Path(scratch) / "log"
        command = [
            sys.executable, "-m", __package__, "--part", part.name, "--record", str(record), "--device", plan.device,
            "--sizes", plan.sizes, "--deadline", str(begin_s + limit_s),
        ]  # fmt: skip
        if earlier is not None:
            write_json(record, dict(earlier))
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
    """End a child that leads its own session, with its descendants."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _write(out: Path, document: dict[str, Any], say: Callable[[str], None]) -> None:
    """Write the data, then the page: a page that cannot be written costs nothing else."""
    write_json(out / "gpu.json", document)
    try:
        page.write(out, ROOT, document)
    except Exception as error:
        say(f"the page could not be written ({type(error).__name__}: {error}); gpu.json has the data, see --page-only")


def _parser() -> argparse.ArgumentParser:
    """The options, by argparse: typer is not needed."""
    names = ", ".join(part.name for part in PARTS)
    made = argparse.ArgumentParser(prog="bench gpu", description="Checks and measurements on a GPU.")
    made.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of gpu.json and gpu.md")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the stand-in, to try the script")
    made.add_argument("--sizes", choices=("real", "toy"), default="real", help="toy: seconds of work, for tests")
    made.add_argument("--parts", default="", help=f"only these, separated by commas; of {names}")
    made.add_argument("--seconds", type=float, default=TOTAL_S, help="for all parts together")
    made.add_argument("--spent", type=float, default=0.0, help=argparse.SUPPRESS)  # seconds of the build before it
    made.add_argument("--resume", action="store_true", help="run what an earlier call on this device had no time for")
    made.add_argument("--page-only", action="store_true", help="write the page from what gpu.json has, measure nothing")
    made.add_argument("--part", help=argparse.SUPPRESS)  # in a child: the one part that it runs
    made.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    made.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every part ended and every check holds; 1: not so; 2: nothing could start."""
    asked = _parser().parse_args(arguments)
    if asked.part is not None:
        run_part(asked.part, asked.device, asked.sizes, asked.deadline, asked.record)
        return 0
    try:
        if asked.page_only:
            page.write(asked.out, ROOT, read_document(asked.out))
            return 0
        parts = chosen_parts(asked.parts)
        seconds = asked.seconds - max(0.0, asked.spent - BUILD_S)
        document = run_all(Plan(asked.out, asked.device, asked.sizes, parts, seconds, asked.resume), build.say)
    except TierMoeError as error:
        build.say(str(error))
        return 2
    failed = failures(document, parts)
    for name in failed:
        build.say(f"failed: {name}")
    build.say(f"{len(parts)} of {len(PARTS)} parts; see {asked.out / 'gpu.md'}")
    return 1 if failed else 0
