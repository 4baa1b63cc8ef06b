"""The rotary embedding of GGUF files as llama.cpp computes it, from the keys `rope.*`.

    rope_of   of all layers, or of those with a sliding window
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, dequantize
from numpy.typing import NDArray

from ...errors import CheckpointError
from .gguf_architectures import ARCHITECTURES, FREQUENCIES, RopeKeys
from .gguf_header import REWRITE, Header, Tensor, count, no_number, shortest, tensor_bytes, unsupported


@dataclass(frozen=True)
class Rope:
    """A rotary embedding with the numbers of `llama_context` and `ggml_rope_yarn`.

    Attributes:
        kind: "none", "linear", "yarn" or "longrope".
        factor: that positions are divided by.
        original: positions before scaling.
        attention: factor of sine and cosine, beside yarn's own.
        factors: `rope_freqs.weight`: what each frequency is divided by.
    """

    kind: str
    base: float
    dimensions: int
    factor: float = 1.0
    original: int = 0
    attention: float = 1.0
    factors: tuple[float, ...] = ()

    def frequencies(self, truncate: bool = True) -> tuple[NDArray[np.float64], float]:
        """The frequency of each pair of dimensions, and the factor of sine and cosine.

        Args:
            truncate: yarn's range of corrected dimensions is one of whole numbers, as llama.cpp has it.
        """
        plain = self.base ** (-np.arange(0, self.dimensions, 2) / self.dimensions)
        if self.factors:
            plain = plain / np.array(self.factors)
        if self.kind != "yarn":
            return plain / self.factor, self.attention
        low, high = (self._dimension(turns) for turns in (32.0, 1.0))  # yarn_beta_fast, yarn_beta_slow
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(0.0, low), min(self.dimensions - 1.0, high)
        ramp = np.clip((np.arange(self.dimensions // 2) - low) / max(0.001, high - low), 0, 1)
        own = 1 + 0.1 * math.log(self.factor) if self.factor > 1 else 1.0
        return plain * (1 - ramp) + plain / self.factor * ramp, self.attention * own

    def _dimension(self, turns: float) -> float:
        return self.dimensions * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.base))

    def parameters(self, header: Header) -> dict[str, Any]:
        """As transformers' configurations have it: `rope_parameters`.

        Raises:
            UnsupportedModelError: it has no such form.
        """
        found: dict[str, Any] = {"rope_type": "default", "rope_theta": self.base}
        if self.kind == "longrope" or (self.kind == "yarn" and self.factors):
            raise unsupported(header, "rope.scaling.type", self.kind)
        if self.kind == "yarn":
            own = self.frequencies()[1]
            return found | {"rope_type": "yarn", "factor": self.factor, "attention_factor": own,
                            "original_max_position_embeddings": self.original}  # fmt: skip
        if self.factors or self.attention != 1:  # transformers' only form with a divisor for each frequency
            each = [self.factor * one for one in self.factors or (1.0,) * (self.dimensions // 2)]
            return found | {"rope_type": "longrope", "factor": 1.0, "attention_factor": self.attention,
                            "short_factor": each, "long_factor": each,
                            "original_max_position_embeddings": self.original}  # fmt: skip
        return found if self.factor == 1 else found | {"rope_type": "linear", "factor": self.factor}


def rope_of(header: Header, head_dim: int, layers: str = "") -> Rope:
    """The rotary embedding of the metadata.

    Args:
        head_dim: of queries and keys, if no key gives the rotated width.
        layers: of these alone, which may have a base and a width of their own; by transformers' name of their kind.

    Raises:
        UnsupportedModelError: of an unknown type. CheckpointError: a value is malformed.
    """
    known = ARCHITECTURES[header.architecture]
    keys = known.ropes.get(layers, RopeKeys())
    kind = header.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise unsupported(header, "rope.scaling.type", kind)
    key = "rope.scaling.factor" if header.get("rope.scaling.factor") is not None else "rope.scale_linear"
    factor, attention = _number(header, key, 0.0), _number(header, "rope.scaling.attn_factor", 1.0)
    base, dimensions = _number(header, "rope.freq_base", 10000.0), _number(header, "rope.dimension_count", head_dim)
    base, dimensions = _number(header, keys.base, base), _number(header, keys.width, dimensions)
    original = _number(header, "rope.scaling.original_context_length", 0) or count(header, "context_length")
    sections = header.get("rope.dimension_sections") or []
    if isinstance(sections, list) and any(sections[3:]):  # the fourth position of text is 0, where the others are equal
        raise unsupported(header, "rope.dimension_sections", sections)
    if base <= 1 or factor < 0 or dimensions < 2 or original < 1:
        raise CheckpointError(f"{header.name}: its keys {header.architecture}.rope.* are out of range", REWRITE)
    factor = 1.0 if kind == "none" or factor == 0 else factor
    if not keys.scaled:
        kind, factor, attention = "none", 1.0, 1.0
    divisors = header.tensors.get(FREQUENCIES) if keys.divided and FREQUENCIES in known.rope else None
    factors = () if divisors is None else tuple(float(value) for value in floats(divisors))
    factors = () if all(value == 1 for value in factors) else factors
    return Rope(kind, base, int(dimensions), factor, int(original), attention, factors)


def _number(header: Header, key: str, default: float) -> float:
    value = header.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise no_number(header, key, value)
    return shortest(value)


def floats(tensor: Tensor) -> NDArray[np.float32]:
    """The numbers of a small tensor. Raises CheckpointError: unreadable."""
    nbytes = tensor_bytes(tensor.path.name, tensor.shape, tensor.kind)
    try:
        raw = np.fromfile(tensor.path, np.uint8, nbytes, offset=tensor.offset)
        return dequantize(raw, GGMLQuantizationType(tensor.kind)).reshape(-1)
    except (OSError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{tensor.path} has a tensor that cannot be read ({error})", REWRITE) from error
