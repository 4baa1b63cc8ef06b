"""The parts one after another, each a child with a time limit; what is found is merged and written after each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .....errors import TierMoeError
from ....host import versions
from ....report.files import write_json
from . import packages, page
from .options import PARTS, TOY_S, Context, Part, Sizes, device_of
from .record import Record

_GRACE_S = 8.0  # of a child past its deadline, to write what it has
_LAST_WORDS = 2000
_LEAST_S = 5.0  # a part that has less left is not begun

_EMPTY: dict[str, Any] = {"rows": [], "checks": [], "goals": [], "notes": []}

Run = Callable[[Context, Record], None]


def runs() -> dict[str, Run]:
    """What each part runs; imported only in the child that runs it."""
    from . import checks, decode, host_time, loads, machine, near_data

    single: dict[str, Run] = {
        "machine": machine.run, "loads": loads.run, "tests": checks.run, "host": host_time.run, "ndp": near_data.run,
    }  # fmt: skip
    return single | decode.parts()


def run_part(name: str, device: str, sizes: Sizes, deadline_s: float, record_file: Path) -> None:
    """In a child: one part, whose findings go to `record_file` as they come. An error is kept with what it says.

    Args:
        deadline_s: of `time.monotonic`, which all processes share: importing torch takes of a part's time, too.
    """
    record = Record(name, record_file, judged=device != "cpu")
    try:
        context = Context(device_of(device), sizes, deadline_s, Path(__file__).resolve().parents[4])
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
    try:
        found = json.loads((out / "gpu.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("parts"), dict) else None


def _begun(plan: Plan) -> dict[str, Any]:
    mine = {
        "name": "gpu", "device": plan.device, "sizes": plan.sizes, "device_name": _device_name(plan.device),
        "versions": versions() | packages.versions(packages.NEEDED | packages.USED_IF_THERE),
    }  # fmt: skip
    before = read_document(plan.out)
    same = before is not None and all(before.get(key) == mine[key] for key in ("device", "sizes", "device_name"))
    kept = before["parts"] if before is not None and same else {}
    known = {part.name for part in PARTS}
    return mine | {"parts": {name: found for name, found in kept.items() if name in known}}


def _device_name(device: str) -> str:
    if device == "cpu":
        return "cpu (stands in for a GPU)"
    import torch

    return torch.cuda.get_device_name(device_of(device))


def _child(part: Part, plan: Plan, limit_s: float) -> dict[str, Any]:
    """Run one part; what it found, however it ended."""
    begin_s = time.monotonic()
    with TemporaryDirectory() as scratch:
        record, log = Path(scratch) / "record.json", Path(scratch) / "log"
        command = [
            sys.executable, "-m", __package__, "--part", part.name, "--record", str(record), "--device", plan.device,
            "--sizes", plan.sizes, "--deadline", str(begin_s + limit_s),
        ]  # fmt: skip
        with log.open("w") as said:
            process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code = process.wait(limit_s + _GRACE_S)
                outcome = "done" if code == 0 else f"ended with status {code}"
            except subprocess.TimeoutExpired:
                outcome = f"cut off after {limit_s + _GRACE_S:.0f} s"
            except BaseException:
                _end(process)
                raise
            _end(process)
        found = _read(record)
        last_words = log.read_text(encoding="utf-8", errors="replace")[-_LAST_WORDS:]
    found |= {
        "outcome": outcome, "seconds": time.monotonic() - begin_s,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    if outcome != "done":
        found["log"] = last_words
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a child and whatever it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(record: Path) -> dict[str, Any]:
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return dict(_EMPTY)
    return dict(found)


def _write(out: Path, document: dict[str, Any], say: Callable[[str], None]) -> None:
    """The data first: a page that cannot be written costs neither them nor the parts that follow."""
    write_json(out / "gpu.json", document)
    try:
        text = page.render(document)
    except Exception as error:
        say(f"the page could not be written ({type(error).__name__}: {error}); gpu.json has the data, see --page-only")
    else:
        (out / "gpu.md").write_text(text, encoding="utf-8")
