"""Part `ray`: `tiermoe run` on this device through Ray, where Ray and the command line's packages are installed."""

from __future__ import annotations

import subprocess
import sys
import time

from .build import FOR_RAY, missing
from .run_parts import Context, Record, end

PROMPT, TOKENS, TOY_TOKENS = "def read_config(path):", 64, 4
_RESERVE_S = 4.0  # of the part's time, to end what hangs
_SHOWN = 1500  # characters of what the command printed


def run(context: Context, record: Record) -> None:
    """The command's seconds, and what it printed: text and report."""
    if lacking := missing(FOR_RAY):
        record.note(f"`tiermoe run` did not run: {', '.join(lacking)} not installed")
        return
    options = ["--device", context.device.type, "--max-tokens", str(TOY_TOKENS if context.toy else TOKENS), "-v"]
    command = [sys.executable, "-m", "tiermoe.cluster.cli", "run", PROMPT, *options]
    begin_s = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=context.root, start_new_session=True
    )
    try:
        printed, _ = process.communicate(timeout=max(1.0, context.left_s - _RESERVE_S))
    finally:
        end(process)  # also what it has started
    record.row("ray", command=" ".join(["tiermoe", *command[3:]]), status=process.returncode,
               seconds=time.monotonic() - begin_s)  # fmt: skip
    record.note(printed.decode(errors="replace")[-_SHOWN:])
    record.check("`tiermoe run` through Ray: status", process.returncode, "<=", 0, always=True)
