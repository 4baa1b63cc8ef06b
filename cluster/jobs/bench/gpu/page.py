"""docs/results/gpu.md from what gpu.json has: whole, cut off, or nothing yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..page_parts import paragraphs, table
from .options import PARTS

Row = Mapping[str, Any]

COMMAND = "cluster/jobs/bench/gpu/run.sh --out docs/results"
_HEAD = "# On a GPU"
_VERDICT = {True: "holds", False: "**missed**"}
_ABOUT = (
    f"`{COMMAND}` (or `tiermoe bench gpu --out docs/results`, `make gpu`) runs every check and measurement of this "
    "page in under eight minutes, without Ray and without a network; [how to run it](../gpu.md). The raw data are in "
    "gpu.json beside this page."
)
_NOTHING = (
    "**Nothing on this page has run on a GPU yet**: there was none to be had. What there is has run like this:\n\n"
    "| part | how it has run so far |\n|---|---|\n"
    "| expert cache, policies, prefetch, NDP worker, matcher | on the CPU that stands in for a GPU (emulated), by "
    "the same engine code |\n"
    "| copy streams, events, pinned memory | against a fake GPU, which carries out operations in any order that "
    "streams and events allow and reports hazards |\n"
    "| Triton kernels (experts, packed experts, substitution) | in Triton's interpreter, on CPU tensors; compiled to "
    "PTX for sm_80 and sm_90 without a device |\n"
    "| CUDA graphs of the dense part | not; compilation around the experts' operator on the CPU |\n"
    "| token identity | on the CPU; `tests/cuda/test_identity.py` is what will check it on a GPU |\n"
    "| the measurements below | all of them at toy sizes with `--device cpu --sizes toy`, which is a test: that the "
    "script runs, not a figure |\n\n"
    "So no speed, bandwidth or identity on a GPU is claimed."
)
_STAND_IN = (
    "**This is a trial on the CPU stand-in{sizes}: it shows that the script runs. No figure here says anything of a "
    "GPU, and no bar is judged.**"
)
_REPLAYED = (
    "Weights are random, so routers would choose at random: what they choose is replaced by a trace, in ours and in "
    "the references alike. The trace is synthetic. It is fitted to the routing of the default model on held-out text, "
    "recorded in the same run: the curve of experts' shares (resampled to this shape's number of experts, in another "
    "order in each layer), how soon experts are used again, how sure the router is, and how often a later layer's "
    "router, asked on an earlier layer's hidden state, names the experts that this layer then uses (its look-ahead "
    "answers with that recall here; the matrix product of the real router is still computed). It does not keep which "
    "experts of one layer go with which of another, so that fmoe, whose search follows such trajectories, finds less "
    "here than on a real model."
)
_HOW_DECODE = (
    "Batch 1, greedy, through transformers' own forward and cache, each token read by the host. After prompt and warm "
    "tokens, ours and the reference in turn, the same tokens of the trace; medians (range) of five pieces. The "
    "reference is the same model with all experts resident, run by the fastest of transformers' experts "
    "implementations in this run. Speed is the median of the pairs' ratios. The floor is the bytes that were loaded "
    "over the link's peak, plus the weights that a step reads over the device memory's bandwidth; copies that overlap "
    "with computing can beat the sum, nothing can beat the longer of the two."
)


def render(document: Mapping[str, Any] | None) -> str:
    """The page, in Markdown."""
    lines = [_HEAD, ""]
    if document is None or not document.get("parts"):
        return "\n".join([*lines, *paragraphs(_NOTHING, _ABOUT), *_planned()]).rstrip() + "\n"
    lines += paragraphs(_ABOUT)
    if document["device"] == "cpu":
        lines += paragraphs(_STAND_IN.format(sizes=", at toy sizes" if document["sizes"] == "toy" else ""))
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    lines += paragraphs(f"Device: **{document['device_name']}**. Versions: {versions}.")
    parts = document["parts"]
    lines += _verdicts(parts)
    for part in PARTS:
        lines += [f"## {part.title}", ""]
        found = parts.get(part.name)
        if found is None:
            lines += paragraphs("Not run yet.")
            continue
        if found["outcome"] != "done":
            lines += paragraphs(f"**This part did not come to its end: {found['outcome']}.** What it had found:")
        lines += _PAGES[part.name](found["rows"])
        lines += [f"- {note}" for note in found["notes"]] + ([""] if found["notes"] else [])
        if found.get("log"):
            lines += ["```", *found["log"].strip().splitlines()[-12:], "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def _planned() -> list[str]:
    """What a run will do."""
    lines = ["## What one run measures, in this order", ""]
    return lines + table(("part", "what", "at most s"), [(p.name, p.title, f"{p.seconds:.0f}") for p in PARTS])


def _verdicts(parts: Mapping[str, Any]) -> list[str]:
    """Every part's outcome, and every limit."""
    lines = table(
        ("part", "outcome", "seconds", "when"),
        [
            (name, parts[name]["outcome"], f"{parts[name]['seconds']:.0f}", parts[name].get("when", ""))
            if name in parts
            else (name, "not run yet", "", "")
            for name in (part.name for part in PARTS)
        ],
    )
    limits = [
        (kind, bar["name"], _number(bar["value"]), f"{bar['op']} {bar['limit']:g}", _VERDICT[bar["ok"]])
        for kind in ("checks", "goals")
        for found in parts.values()
        for bar in found.get(kind, ())
    ]
    if limits:
        lines += ["", *table(("", "limit", "value", "", ""), [(kind[:-1], *rest) for kind, *rest in limits])]
    return [*lines, ""]


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _of(rows: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]


def _spread(value: Mapping[str, float], digits: int = 2) -> str:
    return f"{value['median']:.{digits}f} ({value['minimum']:.{digits}f} to {value['maximum']:.{digits}f})"


def _machine(rows: Sequence[Row]) -> list[str]:
    lines: list[str] = []
    for row in _of(rows, "machine"):
        processor = row["cpu"]
        lines += paragraphs(
            f"Processor: {processor['model']}, {processor['cores']} cores "
            f"({', '.join(processor['instruction_sets'])})."
        )
        gpu = {name: row[name] for name in row if name not in ("kind", "cpu", "device") and row[name] is not None}
        lines += [*table(("GPU", ""), gpu.items()), ""] if "gpu" in gpu else []
    found = _of(rows, "peaks")
    body = [(name, f"{found[0][key]:.1f}") for name, key in _PEAKS] if found else []
    body += [(f"host memory read, {row['threads']} threads", f"{row['gbps']:.1f}") for row in _of(rows, "host read")]
    return [*lines, *table(("best of several", "1e9 bytes/s"), body), ""] if body else lines


_PEAKS = (
    ("host to device, one large pinned copy", "h2d_gbps"), ("device to host, the same", "d2h_gbps"),
    ("device memory, a copy within (read and written)", "hbm_gbps"),
)  # fmt: skip


def _loads(rows: Sequence[Row]) -> list[str]:
    lines = paragraphs(
        "Random experts through the expert cache's own copy queue, from asking until all of a batch have arrived; the "
        "share is of the largest pinned copy of the same process."
    )
    body = [
        (row["shape"], row["expert"], row["batch"], row["memory"],
         f"{row['gbps']:.1f} ({row['gbps_minimum']:.1f} to {row['gbps_maximum']:.1f})", f"{row['share']:.1%}")
        for row in _of(rows, "load")
    ]  # fmt: skip
    return [*lines, *table(("shape", "expert", "batch", "host memory", "1e9 bytes/s", "share of the peak"), body), ""]


def _decode(rows: Sequence[Row]) -> list[str]:
    lines: list[str] = []
    for row in _of(rows, "shape"):
        lines += paragraphs(
            f"{row['shape']}: {row['moe_layers']} of {row['all_moe_layers']} MoE layers, {row['experts']} experts of "
            f"{row['expert_bytes'] / (1 << 20):.4g} MiB, {row['top_k']} per token; {row['dtype']}; experts "
            f"{row['expert_memory_bytes'] / 1e9:.2f} GB in host memory ({', '.join(row['host_memory'])}), everything "
            f"else {row['dense_bytes'] / 1e9:.2f} GB on the device; set up in {row['setup_s']:.0f} s."
        )
    for row in _of(rows, "trace"):
        pairs = zip(row["hit_rates_here"], row["hit_rates"], strict=True)
        rates = ", ".join(f"{here:.0%} ({there:.0%})" for here, there in pairs)
        recalls = ", ".join(f"{value:.0%}" for value in row["recalls"])
        lines += paragraphs(
            _REPLAYED,
            f"LRU hit rates at 10%, 25%, 50% and 75% of a layer's experts, here (recorded, at that model's shape): "
            f"{rates}; fitted with share {row['fitted']['share']:g}, decay {row['fitted']['decay']:g}, root mean "
            f"square error {row['fitted']['error']:.3f}. Recall of the next layers' routers, by distance: {recalls}.",
        )
    references = [*_of(rows, "reference"), *_of(rows, "offload")]
    if references:
        times = [(row["case"], _spread(row["tpot_ms"])) for row in references]
        lines += [*table(("reference", "ms per token"), times), ""]
    cells = _of(rows, "decode")
    if not cells:
        return lines
    lines += paragraphs(_HOW_DECODE)
    head = (
        "resident", "preset", "lossless", "ms per token", "reference", "speed", "hit rate", "MB per token",
        "blocked ms", "floor ms: link + weights", "kernel",
    )  # fmt: skip
    body = [
        (f"{row['budget']:.0%}", row["preset"], "yes" if row["lossless"] else "no", _spread(row["tpot_ms"]),
         f"{row['reference_ms']['median']:.2f}", f"{row['speed']:.2f}", f"{row['hit_rate']:.1%}",
         f"{row['mb_per_token']:.1f}", f"{row['blocked_ms']:.2f}",
         f"{row['floor_link_ms']:.2f} + {row['floor_read_ms']:.2f}", row["kernels"]["decode"])
        for row in sorted(cells, key=lambda row: -row["budget"])
    ]  # fmt: skip
    lines += [*table(head, body), ""]
    near = [row for row in cells if "ndp" in row]
    if near:
        lines += paragraphs(
            "The NDP worker beside the GPU, another process on the cores, activations through shared memory; its "
            "kernel and what the round trip and waiting take beside it:"
        )
        calls = [
            (f"{row['budget']:.0%}", f"{n['calls_per_token']:.1f}", f"{n['experts_per_layer']:.2f}",
             f"{n['wait_us_per_call']:.0f}", f"{n['kernel_us_per_call']:.0f}", n["recomputed"],
             ", ".join(str(name) for name in n["transports"].values()))
            for row in near for n in (row["ndp"],)
        ]  # fmt: skip
        names = (
            "resident", "calls per token", "experts per layer", "waited us per call", "kernel us per call",
            "recomputed", "transport",
        )  # fmt: skip
        lines += [*table(names, calls), ""]
    return lines


def _tests(rows: Sequence[Row]) -> list[str]:
    found = _of(rows, "tests")
    body = [
        (row["folder"], *(row[count] for count in ("passed", "failed", "errors", "skipped")),
         "cut off" if row["cut_off"] else "")
        for row in found
    ]  # fmt: skip
    lines = [*table(("tests", "passed", "failed", "errors", "skipped", ""), body), ""] if body else []
    for failure in (failure for row in found for failure in row["failures"]):
        why = failure["why"].strip().splitlines() or [""]
        lines += [f"- `{failure['test']}`: {why[0][:300]}"]
    return [*lines, ""] if any(row["failures"] for row in found) else lines


def _host(rows: Sequence[Row]) -> list[str]:
    lines: list[str] = []
    kernels = _of(rows, "kernel")
    if kernels:
        lines += paragraphs(
            "Kernels of the experts, as measured at start on the slot pool; the fastest of a row class runs it."
        )
        body = [
            (row["shape"], row["kernel"], row["row_class"], row["rows"], row["experts"], f"{row['us']:.1f}",
             f"{row['device_us']:.1f}", f"{row['gbps']:.0f}", "chosen" if row["chosen"] else "")
            for row in kernels
        ]  # fmt: skip
        head = (
            "shape", "kernel", "rows", "of each expert", "experts", "us", "us on the device", "1e9 weight bytes/s", "",
        )  # fmt: skip
        lines += [*table(head, body), ""]
    parts = _of(rows, "host")
    if parts:
        lines += paragraphs(
            "Host time of one MoE layer in decode, microseconds, median over passes, by what it consists of. Outside "
            "kernels is all but launching them (kernels, combine) and waiting for the device to say what was routed."
        )
        names = list(dict.fromkeys(name for row in parts for name in row["parts_us"]))
        head = ("case", "outside kernels", *names, "experts: launches, copies, waits", "dense: launches, graphs",
                "ms per token", "layers")  # fmt: skip
        body = [
            (row["case"], f"{row['host_us']:.0f}", *(f"{row['parts_us'].get(name, 0):.1f}" for name in names),
             *_calls(row["calls"]), f"{row['tpot_ms']:.2f}", row["layers"])
            for row in parts
        ]  # fmt: skip
        lines += [*table(head, body), ""]
    return lines


def _calls(calls: Mapping[str, Mapping[str, float]] | None) -> tuple[str, str]:
    """Cells of what a layer gives the device."""
    if calls is None:
        return "", ""
    experts, dense = calls["experts"], calls["dense"]
    return (
        ", ".join(f"{experts[name]:.1f}" for name in ("launches", "copies", "waits")),
        ", ".join(f"{dense[name]:.1f}" for name in ("launches", "graphs")),
    )


def _ndp(rows: Sequence[Row]) -> list[str]:
    lines = paragraphs(
        "The NDP worker's kernels on packed weights that lie in memory and not in a cache, eight experts a call, one "
        "row; 1e9 bytes of packed weights per second, and their share of what the same threads read of the same memory."
    )
    found = _of(rows, "ndp kernel")
    if not found:
        return lines
    widths = list(found[0]["of_read"])
    body = [
        (row["threads"], f"{row['hidden']} x {row['intermediate']}", row["instruction_set"],
         f"{row['gbps']['read']:.1f}", *(f"{row['gbps'][width]:.1f} ({row['of_read'][width]:.0%})" for width in widths))
        for row in found
    ]  # fmt: skip
    return [*lines, *table(("threads", "expert", "set", "read", *widths), body), ""]


_PAGES: Mapping[str, Callable[[Sequence[Row]], list[str]]] = {
    "machine": _machine, "loads": _loads, "qwen": _decode, "mixtral": _decode, "deepseek": _decode, "tests": _tests,
    "host": _host, "ndp": _ndp,
}  # fmt: skip
