"""The budget of a device's expert memory, and the byte arithmetic of `budget: auto`: what of a device's free memory is
left for experts, and how expert slots and KV cache share it while requests come and go. Without torch.

    experts = min(all, (free - leads x (dense + kv + states + activations + graphs) - mapped - processes - margin)
                       / devices)
    margin  = MARGIN_BYTES + MARGIN_SHARE of what is free

On a GPU each process asks its own for the free memory, which other processes' use lowers, before it loads anything. The
CPU stand-in takes host memory, which the mapped experts and all processes of the run share: it is divided once, by the
driver.

That is the least: it leaves room for the whole KV cache. `Shares` has what else experts may have while requests do not
need it, and `SharingRule` decides when.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field, model_validator

from ..errors import BudgetError, ConfigError, size
from .base_settings import Settings

MARGIN_BYTES, MARGIN_SHARE = 512 << 20, 0.05  # workspaces of libraries; fragmentation, and what others take meanwhile
GRAPH_ROWS = 16  # a decode step of more rows is not recorded
_GRAPH_KEYS = 512  # of the shortest class of contexts; each next class is of twice as many (`attention.SPLIT`)
_GRAPH_BYTES = 384 << 10  # of one graph on the device, estimated: 1,200 of them took 0.3 to 0.6 GB
_MOST_RECORDINGS = 24
_UNITS = {
    "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_GIVEN = re.compile(r"(?P<number>[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(?P<unit>%|(?:[KMGT]i?)?B)?", re.IGNORECASE)
_REMEDY = "give a share in (0, 1] such as 0.25 or 25%, or bytes with their unit such as 512MiB or 8GB"


class AutoBudget(Settings):
    """The terms of `budget: auto` in bytes, as far as the driver knows them; a new one knows none.

    Attributes:
        free: of the device. None: not known yet.
        final: whether `free` holds; else the worker asks its device, and this is what the plan assumes.
        dense, kv, states, activations, graphs: of each lead; running states of as many requests as may run, and
            checkpoints of such where they are in this memory; activations of the largest forward; recorded steps.
        mapped, processes: host memory of mapped experts, and of the run's processes, where they share it with slots.
        leads, devices: that take their share of this memory.
        slot: of one expert. least: that the policy needs on each device (`slot_budget`). most: of all experts.
        chunk, tokens: rows of the largest forward, and tokens of the KV cache, for messages.
    """

    free: int | None = None
    final: bool = False
    dense: int = 0
    kv: int = 0
    states: int = 0
    activations: int = 0
    graphs: int = 0
    mapped: int = 0
    processes: int = 0
    leads: int = Field(default=1, ge=0)
    devices: int = Field(default=1, ge=1)
    slot: int = Field(default=1, ge=1)
    least: int = Field(default=1, ge=1)
    most: int = Field(default=1, ge=1)
    chunk: int = 0
    tokens: int = 0

    def measured(self, free: int, lead: bool = True) -> AutoBudget:
        """With the free memory of a worker's own device. lead: whether dense weights and KV cache go there."""
        if self.final:
            return self
        own = self if lead else self.model_copy(update={"dense": 0, "kv": 0, "states": 0, "graphs": 0})
        return own.model_copy(update={"free": free, "final": True})

    @property
    def terms(self) -> dict[str, int]:
        """By name in the order of the sum; `experts` is what is left for one device, which may be negative.

        Raises:
            ConfigError: the free memory is not known.
        """
        if self.free is None:
            raise ConfigError(
                "budget auto needs the GPU's free memory, which is not known here",
                "set cluster.gpu_memory, or give --budget a share or bytes, such as 25% or 8GB",
            )
        taken = {
            "dense": self.leads * self.dense, "kv": self.leads * self.kv, "states": self.leads * self.states,
            "activations": self.leads * self.activations, "graphs": self.leads * self.graphs,
            "mapped": self.mapped, "processes": self.processes,
            "margin": MARGIN_BYTES + int(MARGIN_SHARE * self.free),
        }  # fmt: skip
        left = (self.free - sum(taken.values())) // self.devices
        return {"free": self.free, **taken, "experts": min(left, self.most)}

    @property
    def in_terms(self) -> dict[str, int]:
        """`terms`, with the rows and tokens that they are for: of the plan. Raises as `terms`."""
        return {**self.terms, "chunk": self.chunk, "tokens": self.tokens}

    @property
    def nbytes(self) -> int:
        """Bytes for the experts of one device.

        Raises:
            BudgetError: less than the policy needs is left; the message has every term, and how much more free memory
                is enough. ConfigError: as `terms`.
        """
        terms, least = self.terms, max(self.slot, self.least)
        if terms["experts"] >= least:
            return terms["experts"]
        what = f"one takes {size(least)}" if least == self.slot else f"the policy needs {size(least)} at least"
        raise BudgetError(
            f"budget auto: {in_words(terms, self.chunk, self.tokens)}; {what}, which {self._more(least)}B more of free "
            "memory hold",
            "lower --kv-tokens or kv.max_batch_tokens, end what else uses the memory, or give --budget bytes",
        )

    def _more(self, least: int) -> int:
        """Further bytes of free memory that leave so many for each device; a share of them goes to the margin."""
        assert self.free is not None  # of `terms`
        taken = sum(self.terms.values()) - self.terms["free"] - self.terms["experts"]
        more = math.ceil((least * self.devices + taken - self.free) / (1 - MARGIN_SHARE))
        while (found := self.model_copy(update={"free": self.free + more}).terms["experts"]) < min(least, self.most):
            more += (least - found) * self.devices
        return more


class Budget(Settings):
    """The expert memory of each device, in the one of these terms that was given.

    Attributes:
        share: of the bytes of all experts. nbytes: bytes. auto: what is left of the device's memory.
        mapped: none: experts run where the store maps them, in host memory.
    """

    share: float | None = Field(default=None, gt=0, le=1)
    nbytes: int | None = Field(default=None, ge=0)
    auto: AutoBudget | None = None
    mapped: bool = False

    @model_validator(mode="after")
    def _one(self) -> Budget:
        if sum(term is not None for term in (self.share, self.nbytes, self.auto, self.mapped or None)) != 1:
            raise ValueError("a budget is a share, bytes, auto or mapped")
        return self

    @classmethod
    def parse(cls, given: str | float | int, auto: bool = False) -> Budget:
        """Read a budget: a plain number or percentage is a share of all routed experts, a number with a unit bytes.

        Args:
            auto: whether `auto` is taken, too.

        Raises:
            BudgetError: zero, negative, not finite, a share over 1, an unknown unit, or no number at all.
        """
        shown, remedy = str(given).strip(), f"{_REMEDY}, or auto" if auto else _REMEDY
        if auto and shown.lower() == "auto":
            return cls(auto=AutoBudget())
        match = _GIVEN.fullmatch(shown)
        if match is None:
            raise BudgetError(f"budget '{shown}' is not a share or a number of bytes", remedy)
        number, unit = float(match["number"]), (match["unit"] or "").upper()
        if unit in _UNITS:
            nbytes = number * _UNITS[unit]
            if not math.isfinite(nbytes) or nbytes < 1:
                raise BudgetError(f"budget '{shown}' is less than one byte or not finite", remedy)
            return cls(nbytes=int(nbytes))
        share = number / 100 if unit == "%" else number
        if not 0 < share <= 1:
            raise BudgetError(f"budget '{shown}' is a share outside (0, 1]", remedy)
        return cls(share=share)

    def bytes_of(self, slot_bytes: int, experts: int) -> int:
        """The budget in bytes, of which a share never loses a whole slot to rounding; of mapped experts, all of them.

        Args:
            slot_bytes: of one expert. experts: routed ones in all layers.

        Raises:
            BudgetError: it does not hold one expert. ConfigError: the device's memory is not known.
        """
        if self.auto is not None:
            return self.auto.nbytes
        if self.mapped:
            return slot_bytes * experts
        if self.share is not None:
            whole_slots = int(self.share * experts + 1e-9)  # 1/3 of three experts is one expert
            nbytes = max(int(self.share * experts * slot_bytes), whole_slots * slot_bytes)
        else:
            nbytes = self.nbytes or 0
        if nbytes < slot_bytes:
            least, total = math.ceil(1e6 / experts) / 1e6, slot_bytes * experts
            raise BudgetError(
                f"budget {size(nbytes)} holds no expert, which takes {size(slot_bytes)}, {size(slot_bytes - nbytes)} "
                f"more (all {experts}: {size(total)})",
                f"give at least {slot_bytes}B, or a share of {least:.6f}",
            )
        return nbytes


def in_words(terms: Mapping[str, int], chunk: int, tokens: int) -> str:
    """The sum of `AutoBudget.terms` as text."""
    what = {
        "dense": "dense weights", "kv": f"KV cache of {tokens} tokens", "states": "running states",
        "activations": f"activations of {chunk} tokens at once", "graphs": "decode graphs", "mapped": "mapped experts",
        "processes": "processes", "margin": "margin",
    }  # fmt: skip
    taken = ", ".join(f"{size(terms[name])} {label}" for name, label in what.items() if terms[name])
    left = terms["experts"]
    return f"{size(terms['free'])} free less {taken} leave {size(left) if left > 0 else 'nothing'} for experts"


@dataclass(frozen=True)
class Shares:
    """How one memory may be divided between expert slots and the KV cache.

    Attributes:
        slot_bytes: of one slot. least_slots: beside the whole KV cache. most_slots: of use.
        block_bytes: of one block, the unit in which the KV cache grows. least_blocks, most_blocks: of the KV cache.
    """

    slot_bytes: int
    least_slots: int
    most_slots: int
    block_bytes: int
    least_blocks: int
    most_blocks: int

    def slots(self, blocks: int) -> int:
        """The slots that fit beside so many blocks."""
        spare = (self.most_blocks - blocks) * self.block_bytes
        return min(self.most_slots, self.least_slots + spare // self.slot_bytes)


class SharingRule:
    """When the KV cache takes memory from the expert slots, and when it gives it back.

    State: the blocks of the KV cache now, and since which forward fewer have sufficed.

    Rule: demand is rounded up to eighths of the range, so that small changes move nothing. More than there is: at once,
    since requests wait. Less by two eighths or more in each of the last PATIENCE forwards: down to the greatest demand
    among them, and to the last block that is held. After KEEP forwards what only the prefix cache holds goes, too. O(1)

    A moment without work counts as a forward, ten a second: PATIENCE is some seconds, KEEP a minute or two. What a move
    costs is that experts, or keys of earlier prompts, must be made again at their next use.
    """

    PATIENCE, KEEP, PARTS = 64, 1024, 8

    def __init__(self, shares: Shares) -> None:
        self.shares, self.blocks = shares, shares.least_blocks
        self._range = shares.most_blocks - shares.least_blocks
        self._step = max(1, -(-self._range // self.PARTS))
        self._since: int | None = None
        self._greatest, self._due = 0, 0

    def wanted(self, demand: int, forward: int, held: int = 0) -> int:
        """The blocks that the KV cache is to have.

        Args:
            demand: blocks that requests need. forward: its number.
            held: blocks that there must be for those that requests or the prefix cache hold, wherever these lie.
        """
        blocks = self._rounded(demand)
        if not self._is_much_less(blocks):
            self._since = None
            return max(blocks, self.blocks)
        if self._since is None:
            self._since, self._greatest = forward, blocks
        self._greatest = max(self._greatest, blocks)
        kept = max(self._greatest, self._rounded(held))
        keeps = self._is_much_less(kept)
        self._due = self._since + (self.PATIENCE if keeps else self.KEEP)
        if forward < self._due:
            return self.blocks
        return kept if keeps else self._greatest

    def is_due(self, forward: int) -> bool:
        """Whether blocks have been idle for long enough at this forward, as far as `wanted` knows."""
        return self._since is not None and forward >= self._due

    def settled(self, blocks: int) -> None:
        """The KV cache has so many blocks now."""
        self.blocks, self._since = blocks, None

    def _rounded(self, demand: int) -> int:
        least = self.shares.least_blocks
        steps = -(-max(0, demand - least) // self._step)
        return min(self.shares.most_blocks, least + steps * self._step)

    def _is_much_less(self, blocks: int) -> bool:
        return self.blocks - blocks >= max(1, min(2 * self._step, self._range))


@dataclass(frozen=True)
class ModelSizes:
    """What activations depend on.

    Attributes:
        hidden, heads, head_size, vocabulary: of the model. mlp: width of its widest dense layer.
        kv: numbers that one token takes in the KV cache of one layer.
        top_k, intermediate, expert: experts of a token, their width, and numbers in one.
    """

    hidden: int
    heads: int
    head_size: int
    vocabulary: int
    mlp: int
    kv: int
    top_k: int
    intermediate: int
    expert: int


def coded_row_bytes(width: int) -> int:
    """Bytes of a head's key or value of `width` numbers in 8 bits: padded to 4 bytes, with a float32 scale."""
    return -(-width // 4) * 4 + 4


def activation_bytes(of: ModelSizes, rows: int, kv_tokens: int, seqs: int, item: int, attention: str) -> int:
    """Bytes of the tensors of the largest forward, beside weights and KV cache: an upper estimate.

    The parts of a layer follow each other, so the largest counts. Attention other than `flash` and `triton` gathers the
    keys and values of a layer, repeats them for each query head, and has a mask; `eager` has scores, too. Experts are
    counted as if all pairs ran together, and one of them dequantized.

    Args:
        rows: R, of the forward. kv_tokens: K, that the KV cache holds. seqs: requests of a forward at most.
        item: bytes of a number. attention: `EngineOptions.attention`.
    """
    width, keys = of.heads * of.head_size, kv_tokens + rows
    stream = 6 * rows * of.hidden  # residual, norms, sums
    attended, mask = 4 * rows * width, 0
    if attention not in ("flash", "triton"):
        attended += keys * (of.kv + 2 * width)
        mask = 2 * rows * keys
    if attention == "eager":
        attended += 2 * of.heads * rows * keys
    experts = rows * of.top_k * (3 * of.intermediate + 2 * of.hidden) + 2 * of.expert
    logits = rows * of.vocabulary * item + 3 * min(rows, seqs) * of.vocabulary * 4  # sampling is in float32
    return item * (stream + mask + max(attended, experts, 3 * rows * of.mlp)) + logits


def most_recordings(seqs: int, tokens: int) -> int:
    """Decode steps that are kept as CUDA graphs at most: one for each number of rows and each class of contexts.

    Args:
        seqs: requests of a forward at most. tokens: that the KV cache holds.
    """
    classes = 1 + (-(-tokens // _GRAPH_KEYS) - 1).bit_length()
    return min(_MOST_RECORDINGS, min(seqs, GRAPH_ROWS) * classes)


def graph_bytes(of: ModelSizes, layers: int, seqs: int, tokens: int, item: int) -> int:
    """Bytes of all recorded decode steps: a graph before, between and behind the experts, and the step's logits.

    Args:
        layers: MoE layers. seqs, tokens: as in `most_recordings`. item: bytes of a number.
    """
    logits = min(seqs, GRAPH_ROWS) * of.vocabulary * item
    return most_recordings(seqs, tokens) * ((layers + 1) * _GRAPH_BYTES + logits)
