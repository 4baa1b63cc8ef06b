"""Part `ndp`: the near-data kernels on all cores, 1 to 4 bits, against what those cores read of memory."""

from __future__ import annotations

from ....host import usable_cores
from ..kernel_threads import BITS, COLD_BYTES, bench_kernel_threads
from .options import Context
from .record import Record

REPEATS = 3
SHAPES = ((2048, 1408), (4096, 14336))  # Qwen1.5-MoE-A2.7B (and DeepSeek-V2-Lite), Mixtral-8x7B
TOY_SHAPES, TOY_BYTES = ((64, 96),), 1 << 20


def run(context: Context, record: Record) -> None:
    """Half of the cores and all of them: more than memory needs may be slower than fewer."""
    cores = usable_cores()
    shapes, cold_bytes = (TOY_SHAPES, TOY_BYTES) if context.toy else (SHAPES, COLD_BYTES)
    for threads in sorted({1} if context.toy else {max(1, cores // 2), max(1, cores - 2), cores}, reverse=True):
        if context.left_s < 6.0:
            record.note(f"near-data kernels on {threads} threads: no time was left")
            continue
        report = bench_kernel_threads(threads, REPEATS, shapes=shapes, cold_bytes=cold_bytes)
        names = ["read", *("1 bit" if bits == 1 else f"{bits} bits" for bits in BITS)]
        for hidden, neurons in shapes:
            rows = [row for row in report.rows if (row["hidden"], row["intermediate"]) == (hidden, neurons)]
            found = {(row["case"], row["measure"]): row["median"] for row in rows}
            record.row(
                "ndp kernel", threads=threads, hidden=hidden, intermediate=neurons,
                instruction_set=report.settings["instruction_set"],
                gbps={name: found[name, "gbps"] for name in names},
                of_read={name: found[name, "of_read"] for name in names[1:]},
                us_per_expert={name: found[name, "us_per_expert"] for name in names[1:]},
            )  # fmt: skip
