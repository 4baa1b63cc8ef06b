"""The format of a routing trace: a folder with `trace.json` and chunks in safetensors.

A chunk holds whole forward passes, in the order in which they ran, one request after the other (t rows in all, n
forward passes, r requests that begin in the chunk, u tokens that no earlier chunk has embedded):

    tokens                 int32   [t]            the input token of each row
    probabilities          float16 [t, L, E]      softmax of the router's logits
    ids                    uint8   [t, L, K]      the experts picked, in the model's order (uint16 above 256 experts)
    weights                float16 [t, L, K]      their routing weights
    next_ids               uint8   [t, L, D, K]   the experts that the router of layer l + d picks on layer l's input,
                                                  d = 1..D, greatest logit first; where l + d >= L layer l + d - L, for
                                                  the next forward (zeros in older traces)
    next_probabilities     float16 [t, L, D, K]   their softmax probabilities
    iterations             int64   [n, 4]         request, iteration in it, rows, 1 for decode and 0 for prefill
    requests               int64   [r, 2]         request, tokens of its prompt
    prompt_embeddings      float32 [r, H]         mean of the input embeddings of the prompt's tokens
    embedding_tokens       int32   [u]            with `embeddings` gives the mean input embedding of any iteration
    embeddings             float16 [u, H]

Layers are MoE layers, counted from 0. A row takes 4 + L * (2E + K * (s + 2) * (1 + D)) bytes, s = 1 or 2 for an
expert's number: 996 for the default model, 1476 for Mixtral-8x7B with D = 4; besides, 2H + 4 for each distinct token.
`trace.json` is rewritten, whole, after each chunk: what is on disk is a valid trace at any moment.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

HEADER_NAME = "trace.json"
MAX_DISTANCE = 8
PREFILL, DECODE = 0, 1
Count = Annotated[int, Field(ge=1, strict=True)]
Whole = Annotated[int, Field(ge=0, strict=True)]
Seconds = Annotated[float, Field(ge=0)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Costs(_Frozen):
    """What computing took where the trace was recorded, in seconds: medians, for simulated machines.

    forward_s: of a forward outside its layers (embedding, head, sampling, scheduling). dense_s, dense_row_s: of a
    layer's attention, norms and router, at one row and for each further one. expert_s, expert_row_s: of one expert
    at one row, and for each further one; what a layer costs besides its experts is in their time.
    """

    forward_s: Seconds
    dense_s: Seconds
    dense_row_s: Seconds
    expert_s: Seconds
    expert_row_s: Seconds


class ChunkRecord(_Frozen):
    """One chunk. requests: that begin in it. first_request: added to its request numbers, which are those of the trace
    that it was written for: merged traces have several that begin at 0."""

    file: Annotated[str, Field(pattern=r"^chunk-[0-9]{5}\.safetensors$")]
    bytes: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    rows: Count
    forwards: Count
    requests: Whole
    first_request: Whole


class TraceHeader(_Frozen):
    """What a trace holds.

    Attributes:
        model: name. fingerprint: of the checkpoint's files, so that traces of two models are not taken together.
        layers, experts, top_k, hidden: L, E, K and H. distances: D.
        slot_bytes: of one expert, in the dtype that it was computed in.
        expert_dtype: that dtype.
        complete: everything that was asked for was recorded; False while recording and after an interrupt.
    """

    format_version: Literal[1] = 1
    model: str
    fingerprint: str
    layers: Count
    experts: Annotated[int, Field(ge=1, le=65536, strict=True)]
    top_k: Count
    hidden: Count
    distances: Annotated[int, Field(ge=0, le=MAX_DISTANCE, strict=True)]
    slot_bytes: Count
    expert_dtype: str
    costs: Costs | None = None
    complete: bool = False
    chunks: tuple[ChunkRecord, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> TraceHeader:
        if self.top_k > self.experts:
            raise ValueError(f"top-{self.top_k} of {self.experts} experts")
        if len({chunk.file for chunk in self.chunks}) != len(self.chunks):
            raise ValueError("two chunks have one name")
        return self

    @property
    def id_dtype(self) -> type[np.unsignedinteger[Any]]:
        return np.uint8 if self.experts <= 256 else np.uint16

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        picked = self.top_k * (np.dtype(self.id_dtype).itemsize + 2)
        return 4 + self.layers * (2 * self.experts + picked * (1 + self.distances))

    @property
    def rows(self) -> int:
        return sum(chunk.rows for chunk in self.chunks)

    @property
    def requests(self) -> int:
        return sum(chunk.requests for chunk in self.chunks)

    def row_arrays(self) -> dict[str, tuple[type[np.generic], tuple[int, ...]]]:
        """dtype and shape after the rows of each array that has a row per token."""
        layers, top, d = self.layers, self.top_k, self.distances
        return {
            "tokens": (np.int32, ()),
            "probabilities": (np.float16, (layers, self.experts)),
            "ids": (self.id_dtype, (layers, top)),
            "weights": (np.float16, (layers, top)),
            "next_ids": (self.id_dtype, (layers, d, top)),
            "next_probabilities": (np.float16, (layers, d, top)),
        }

    def same_model(self, other: TraceHeader) -> bool:
        """Whether two traces can be taken together."""
        kept = {"layers", "experts", "top_k", "hidden", "distances", "slot_bytes", "fingerprint", "expert_dtype"}
        return self.model_dump(include=kept) == other.model_dump(include=kept)
