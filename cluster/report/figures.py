"""The figures of a report, as SVG by matplotlib. The same numbers give the same text."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .files import new_canvas, room_around, series_style, write_caption
from .results import PERCENTS, Measurement

LIMITS = ("all-resident", "belady")  # policies that bound the others
_PHASES = ("all", "prefill", "decode")
_SIZE = (6.2, 3.9)  # inches of one panel
_HEATED = 12  # maps of residency in one report
_HEAD = re.compile(r"^.*?(?=<svg)", re.DOTALL)


@dataclass(frozen=True)
class Panel:
    """One drawing. about: what its numbers have in common (setting), below the title."""

    svg: str
    about: str
    shown: Sequence[Measurement]


@dataclass(frozen=True)
class Figure:
    """A subject of the report: its panels, and what each file lacks for it."""

    title: str
    says: str
    panels: Sequence[Panel]
    lacking: Mapping[str, str]


@dataclass(frozen=True)
class _Kind:
    """A kind of figure. has: whether a measurement can be shown in it. needs: in words.

    draw: (axes, measurements of one panel).
    """

    title: str
    says: str
    needs: str
    has: Callable[[Measurement], bool]
    draw: Callable[[Any, Sequence[Measurement]], None]
    single: bool = False  # a panel for each measurement
    bars: bool = False  # a line for each measurement


def figures(found: Sequence[Measurement]) -> Iterator[Figure]:
    """All figures, in the order of the page; one without panels says which files lack what."""
    for number, kind in enumerate(_KINDS):
        shown = [one for one in found if kind.has(one)]
        files = dict.fromkeys(one.file for one in found)
        lacking = {file: kind.needs for file in files if not any(one.file == file for one in shown)}
        groups: dict[Any, list[Measurement]] = {}
        for place, one in enumerate(shown):
            groups.setdefault((one.origin, one.setting, place if kind.single else ""), []).append(one)
        if kind.single and len(groups) > _HEATED:
            groups = dict(list(groups.items())[:_HEATED])
            lacking = lacking | {"the rest": f"only the first {_HEATED} are drawn"}
        panels = [
            Panel(_svg(kind, of, f"{number}-{place}"), of[0].setting, of) for place, of in enumerate(groups.values())
        ]
        yield Figure(kind.title, kind.says, panels, lacking)


def _svg(kind: _Kind, shown: Sequence[Measurement], salt: str) -> str:
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        width, height = _SIZE
        canvas = new_canvas((width, max(height, 1.0 + 0.2 * len(shown)) if kind.bars else height))
        axes = canvas.subplots()
        kind.draw(axes, shown)
        axes.tick_params(labelsize=8)
        write_caption(canvas, f"{shown[0].origin.executor} | {shown[0].origin.model} | {shown[0].origin.machine}")
        out = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        canvas.savefig(out, format="svg", metadata=nothing)
    return _HEAD.sub("", out.getvalue())  # without the XML head, which names a DTD's address


# -- lines over memory -------------------------------------------------------------------------------------------------


def _over_memory(axes: Any, shown: Sequence[Measurement], label: str, value: Callable[[Measurement], Any]) -> None:
    """A line for each policy over its peak expert memory; limits are dashed."""
    policies = dict.fromkeys(one.policy for one in shown)
    for number, policy in enumerate(sorted(policies, key=lambda name: name in LIMITS)):
        of = sorted((one for one in shown if one.policy == policy), key=lambda one: one.memory_bytes or 0.0)
        x, y = [(one.memory_bytes or 0.0) / 1e6 for one in of], [value(one) for one in of]
        ends = [[max(0.0, v.middle - v.low) for v in y], [max(0.0, v.high - v.middle) for v in y]]
        limit = policy in LIMITS
        style = series_style(LIMITS.index(policy) if limit else number, own=limit)
        axes.errorbar(
            x, [v.middle for v in y], yerr=ends, label=policy, ms=4, lw=1.1, capsize=2, elinewidth=0.7,
            linestyle="--" if limit else "-", **style,
        )  # fmt: skip
        if policy == "all-resident":
            axes.axhline(max(v.middle for v in y), color=style["color"], linestyle=":", lw=0.8)
    axes.set_xlabel("peak expert memory, MB", fontsize=8)
    axes.set_ylabel(label, fontsize=8)
    room_around(axes, from_zero=True)
    axes.legend(fontsize=6, ncols=1 + len(policies) // 9)


def _speed(axes: Any, shown: Sequence[Measurement]) -> None:
    def tokens(one: Measurement) -> Any:
        assert one.tpot_ms is not None
        middle, low, high = one.tpot_ms
        return type(one.tpot_ms)(1e3 / middle, 1e3 / high, 1e3 / low)

    _over_memory(axes, shown, "decode speed, tokens/s of a request", tokens)


def _tpot(axes: Any, shown: Sequence[Measurement]) -> None:
    _over_memory(axes, shown, "time per output token, ms", lambda one: one.tpot_ms)


def _ttft(axes: Any, shown: Sequence[Measurement]) -> None:
    _over_memory(axes, shown, "time to first token, ms", lambda one: one.ttft_ms)


# -- bars --------------------------------------------------------------------------------------------------------------


def _names(shown: Sequence[Measurement]) -> list[str]:
    several = len({one.budget for one in shown}) > 1
    return [f"{one.policy} @ {one.budget}" if several else one.policy for one in shown]


def _hits(axes: Any, shown: Sequence[Measurement]) -> None:
    high = 0.8 / len(_PHASES)
    for number, phase in enumerate(_PHASES):
        places = [i + (number - 1) * high for i, one in enumerate(shown) if phase in (one.hit_rates or {})]
        rates = [100 * (one.hit_rates or {})[phase] for one in shown if phase in (one.hit_rates or {})]
        if rates:
            axes.barh(places, rates, height=high, label=phase)
    axes.set_yticks(range(len(shown)), _names(shown))
    axes.set_xlim(0, 100)
    axes.invert_yaxis()
    axes.set_xlabel("expert hit rate, %", fontsize=8)
    axes.legend(fontsize=6)


def _blocked(axes: Any, shown: Sequence[Measurement]) -> None:
    left = [0.0] * len(shown)
    causes = dict.fromkeys(name for one in shown for name, value in (one.blocked_s or {}).items() if value)
    for cause in causes or ("copies",):
        values = [(one.blocked_s or {}).get(cause, 0.0) for one in shown]
        axes.barh(range(len(shown)), values, left=left, height=0.7, label=cause)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(range(len(shown)), _names(shown))
    axes.invert_yaxis()
    axes.set_xlabel("seconds that the compute waited for", fontsize=8)
    axes.legend(fontsize=6)


# -- quality, residency, latency ---------------------------------------------------------------------------------------


def divergence(one: Measurement) -> float | None:
    """KL divergence from lossless in nats; 0 for a lossless policy without a score."""
    if one.quality and "kl_nats" in one.quality:
        return max(0.0, one.quality["kl_nats"])
    return 0.0 if one.lossless else None


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (divergence, speed) those that no other point beats in both, by rising divergence."""
    best, front = float("-inf"), []
    for divergent, speed in sorted(points, key=lambda point: (point[0], -point[1])):
        if speed > best:
            front.append((divergent, speed))
            best = speed
    return front


def _quality(axes: Any, shown: Sequence[Measurement]) -> None:
    points = []
    for number, (one, name) in enumerate(zip(shown, _names(shown), strict=True)):
        assert one.tpot_ms is not None
        points.append((divergence(one) or 0.0, 1e3 / one.tpot_ms.middle))
        axes.plot(*points[-1], ms=5, lw=0, label=name, **series_style(number))
    front = pareto(points)
    axes.step([x for x, _ in front], [y for _, y in front], where="post", color="black", lw=0.8, label="Pareto front")
    axes.set_xlabel("KL divergence from lossless, nats (0: the same tokens)", fontsize=8)
    axes.set_ylabel("decode speed, tokens/s of a request", fontsize=8)
    room_around(axes, from_zero=True)
    axes.legend(fontsize=6, ncols=1 + len(shown) // 12)


def _residency(axes: Any, shown: Sequence[Measurement]) -> None:
    """Uses of each resident expert over the most used of its layer; absent experts stay white."""
    (one,) = shown
    layers = one.residency or ()
    rows = [
        [use / max(1, *uses) if state == 2 else float("nan") for state, use in zip(states, uses, strict=True)]
        for states, uses in layers
    ]  # fmt: skip
    picture = axes.imshow(rows, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
    axes.figure.colorbar(picture, label="uses, over the layer's most used expert")
    axes.set_title(f"{one.policy} @ {one.budget}", fontsize=9)
    axes.set_xlabel("expert", fontsize=8)
    axes.set_ylabel("MoE layer", fontsize=8)


def _latency(axes: Any, shown: Sequence[Measurement]) -> None:
    for number, (one, name) in enumerate(zip(shown, _names(shown), strict=True)):
        axes.plot(one.latencies_ms or (), PERCENTS, lw=1.2, label=name, color=series_style(number)["color"])
    axes.set_xscale("log")
    axes.set_xlabel("time between tokens, ms", fontsize=8)
    axes.set_ylabel("share of tokens that came within it, %", fontsize=8)
    axes.set_ylim(0, 100)
    axes.legend(fontsize=6)


_KINDS = (
    _Kind("Decode speed against expert memory",
          "Points are medians, bars the range of the repetitions. Dashed: all experts resident, and Belady's optimum.",
          "time per output token with peak expert memory", lambda m: bool(m.tpot_ms and m.memory_bytes), _speed),
    _Kind("Time per output token against expert memory", "",
          "time per output token with peak expert memory", lambda m: bool(m.tpot_ms and m.memory_bytes), _tpot),
    _Kind("Time to first token against expert memory", "",
          "time to first token with peak expert memory", lambda m: bool(m.ttft_ms and m.memory_bytes), _ttft),
    _Kind("Hit rate by phase", "An expert that a layer needs is a hit if it was resident when the routing was known. "
          "A forward with a row of a prompt is prefill.",
          "hits and misses", lambda m: m.hit_rates is not None, _hits, bars=True),
    _Kind("Blocked I/O by cause", "Copies are demand loads and prefetches that were late.",
          "seconds of waits", lambda m: m.blocked_s is not None, _blocked, bars=True),
    _Kind("Quality against speed", "No policy is both faster and nearer to lossless than one on the front.",
          "time per output token with a divergence from lossless",
          lambda m: m.tpot_ms is not None and divergence(m) is not None, _quality),
    _Kind("Residency", "At the end of the measurement; white: not resident.",
          "residency of experts", lambda m: m.residency is not None, _residency, single=True),
    _Kind("Latency between tokens", "", "times between tokens", lambda m: m.latencies_ms is not None, _latency),
)  # fmt: skip
