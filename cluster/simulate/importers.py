"""Routing that other programs recorded, as a trace.

    vllm       JSON lines, one a request: `prompt_token_ids`, `token_ids` and `routed_experts` [rows, L, K] of an
               offline output (enable_return_routed_experts), as lists or as the server's base64 of a .npy file; or a
               response with `choices`, and `prompt_routed_experts` beside them (vLLM 0.21)
    megatron   JSON lines of Megatron-LM's RouterTracer, one a step and layer: `step`, `layer`, `top_indices`
               [tokens, K]. A step of several tokens is a request's prefill, a step of one token decodes. Blocks `mtp`
               are left out
    csv        a line a token and layer: columns `token` (its place), `layer`, and `experts` with ids between spaces, or
               `expert_0`, `expert_1`, ..; optionally `request`, `phase` (prefill or decode) and `token_id`

They have no probabilities, weights and embeddings: picked experts share equally, embeddings are random vectors of the
token ids, and the header says `probabilities: false`.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from ...errors import TraceError, reason, size
from .trace import TraceHeader
from .trace_writer import Rows, TraceWriter

HIDDEN = 64
_LEAST_LIMIT_BYTES = 1 << 28  # of a trace, whatever the file's size; a prefill takes five times its rows to write
_MOST_GROWTH = 1024  # bytes of a trace for each byte of the file
_BLOCK = 256  # rows of decode steps that are made at a time
_REMEDY = "compare it with docs/traces.md, Imports"
Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Imported:
    """A request: ids [t, L, K], the first `prompt` tokens of prefill. tokens: their ids [t]; None: not known."""

    ids: Ids
    prompt: int
    tokens: NDArray[np.int32] | None = None

    @property
    def known(self) -> NDArray[np.int32]:
        """The tokens' ids, or numbers in their place [t]."""
        return np.arange(len(self.ids), dtype=np.int32) if self.tokens is None else self.tokens


def import_trace(
    file: Path, out: Path, kind: str | None, model: str, experts: int | None, expert_bytes: int
) -> TraceHeader:
    """Write the routing of a file as a trace.

    Args:
        kind: of `FORMATS`; None: by the contents. experts: E; None: the greatest id and one.

    Raises:
        TraceError: the file cannot be read, or a line is malformed. ConfigError: `out` is not empty.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"'{file}' cannot be read: {reason(error)}", "give a readable text file") from error
    found = list(FORMATS[kind or detected(file, text)](file, text))
    if not found:
        raise TraceError(f"'{file}' has no routing", _REMEDY)
    layers, top_k = found[0].ids.shape[1:]
    for number, one in enumerate(found, start=1):
        if one.ids.shape[1:] != (layers, top_k):
            what = f"request {number} of '{file}' has {list(one.ids.shape[1:])} layers and experts a token"
            raise TraceError(f"{what}, not {[layers, top_k]}", "import one model's routing")
    greatest = max(int(one.ids.max()) for one in found)
    count = greatest + 1 if experts is None else experts
    if greatest >= count:
        raise TraceError(f"'{file}' names expert {greatest} of {count}", "give a greater --experts")
    try:
        header = TraceHeader(
            model=model, fingerprint="", layers=layers, experts=max(count, top_k), top_k=top_k, hidden=HIDDEN,
            distances=0, slot_bytes=expert_bytes, expert_dtype="bfloat16", origin=f"imported from {file.name}",
            probabilities=False,
        )  # fmt: skip
    except ValidationError as error:
        finding = error.errors(include_url=False)[0]
        where = ".".join(map(str, finding["loc"]))
        raise TraceError(f"'{file}' cannot become a trace: {where or 'header'}: {finding['msg']}", _REMEDY) from error
    total = sum(len(one.ids) for one in found)
    if total * header.row_bytes > max(_LEAST_LIMIT_BYTES, _MOST_GROWTH * len(text)):
        raise TraceError(
            f"'{file}' would be a trace of {size(total * header.row_bytes)}: {total} tokens, {layers} layers of "
            f"{header.experts} experts, as the greatest id is {greatest}",
            "correct the ids, or import fewer requests at a time",
        )
    writer = TraceWriter(out, header, _embed)
    for one in found:
        prompt = one.known[: max(1, one.prompt)]
        writer.begin(prompt.tolist())
        if one.prompt:
            writer.add(_rows(one, header, 0, one.prompt), decode=False)
        for first in range(one.prompt, len(one.ids), _BLOCK):
            rows = _rows(one, header, first, min(first + _BLOCK, len(one.ids)))
            for t in range(len(rows.tokens)):
                writer.add(rows.part(t, t + 1), decode=True)
    return writer.close(complete=True, repeats=all(one.tokens is not None for one in found))


def detected(file: Path, text: str) -> str:
    """The format of a file's contents. Raises TraceError: the format is unknown."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    if line.lstrip().startswith("{"):
        for key, kind in (("top_indices", "megatron"), ("routed_experts", "vllm")):
            if f'"{key}"' in line or f'prompt_{key}"' in line:
                return kind
    elif "layer" in line and "," in line:
        return "csv"
    raise TraceError(f"'{file}' has an unknown format", f"give one of {', '.join(FORMATS)} by --format, or {_REMEDY}")


def _rows(one: Imported, header: TraceHeader, first: int, stop: int) -> Rows:
    """The rows of some of its tokens."""
    ids, share = one.ids[first:stop], 1.0 / header.top_k
    probabilities = np.zeros((len(ids), header.layers, header.experts), np.float16)
    np.put_along_axis(probabilities, ids, share, axis=2)
    none = np.zeros((len(ids), header.layers, 0, header.top_k))
    return Rows(one.known[first:stop], probabilities, ids, np.full(ids.shape, share), none.astype(np.int64), none)


def _embed(tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """A fixed random vector for each token id [n, HIDDEN]."""
    rows = [np.random.default_rng(int(token)).normal(size=HIDDEN) for token in tokens]
    return np.asarray(rows, np.float32).reshape(-1, HIDDEN)


def _json_lines(file: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{where} is not JSON: {error}", _REMEDY) from error
        if not isinstance(entry, dict):
            raise TraceError(f"{where} is not an object", _REMEDY)
        yield where, entry


def _choices(value: Any, where: str, key: str, axes: int) -> Ids:
    """An array of expert ids with so many axes, from lists or from base64 of a .npy file."""
    try:
        found = _npy(base64.b64decode(value)) if isinstance(value, str) else value
        ids = np.asarray(found)
        fine = ids.ndim == axes and ids.dtype.kind in "iu" and ids.size and ids.min() >= 0 and ids.max() < 65536
    except (ValueError, TypeError, EOFError, OverflowError, RecursionError) as error:
        raise TraceError(f"{where}: {key} is not an array: {error}", _REMEDY) from error
    if not fine:
        raise TraceError(f"{where}: {key} is not an array of expert ids with {axes} axes", _REMEDY)
    ids = ids.astype(np.int64)
    ordered = np.sort(ids, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise TraceError(f"{where}: a token of {key} picks one expert twice", _REMEDY)
    return ids


def _npy(data: bytes) -> NDArray[Any]:
    """The array of a .npy file, whose header may say anything. Raises ValueError: it is not a whole .npy array."""
    file = io.BytesIO(data)
    major, _ = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(data) - file.tell():
        raise ValueError(f"its header says {dtype} {list(shape)}, behind it are {len(data) - file.tell()} bytes")
    file.seek(0)
    found: NDArray[Any] = np.load(file, allow_pickle=False)
    return found


def _token_ids(tokens: Sequence[Any]) -> NDArray[np.int32] | None:
    """Token ids as an array; None: some are not token ids."""
    fine = all(type(token) is int and 0 <= token < 1 << 31 for token in tokens)
    return np.asarray(tokens, np.int32) if fine else None


def _vllm(file: Path, text: str) -> Iterator[Imported]:
    for where, entry in _json_lines(file, text):
        choices = entry.get("choices", [entry])
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise TraceError(f"{where}: choices are not a list of objects", _REMEDY)
        prompt, before = entry.get("prompt_token_ids"), entry.get("prompt_routed_experts")
        for choice in choices:
            if choice.get("routed_experts") is None:
                raise TraceError(f"{where} has no routed_experts", "record with --enable-return-routed-experts")
            ids = _choices(choice["routed_experts"], where, "routed_experts", 3)
            own = choice.get("prompt_token_ids", prompt)
            if before is not None:
                first = _choices(before, where, "prompt_routed_experts", 3)
                if first.shape[1:] != ids.shape[1:]:
                    raise TraceError(f"{where}: prompt_routed_experts are of another shape", _REMEDY)
                ids, length = np.concatenate([first, ids]), len(first)
            elif isinstance(own, list):
                length = min(len(own), len(ids))
            else:
                raise TraceError(f"{where} does not say how long the prompt is", "keep prompt_token_ids in the file")
            lists = [part for part in (own, choice.get("token_ids")) if isinstance(part, list)]
            tokens = [token for part in lists for token in part]
            yield Imported(ids, length, _token_ids(tokens[: len(ids)]) if len(tokens) >= len(ids) else None)


def _megatron(file: Path, text: str) -> Iterator[Imported]:
    steps: dict[int, dict[int, Ids]] = {}
    where = str(file)
    for where, entry in _json_lines(file, text):
        if entry.get("block", "decoder") != "decoder":
            continue
        step, layer = entry.get("step"), entry.get("layer")
        if type(step) is not int or type(layer) is not int:
            raise TraceError(f"{where} has no step or no layer", _REMEDY)
        if layer in steps.setdefault(step, {}):
            raise TraceError(f"{where}: step {step} has layer {layer} twice", "import one rank's file")
        steps[step][layer] = _choices(entry.get("top_indices"), where, "top_indices", 2)
    layers = sorted({layer for step in steps.values() for layer in step})
    parts: list[Ids] = []
    for number, found in sorted(steps.items()):
        if sorted(found) != layers or len({ids.shape for ids in found.values()}) != 1:
            raise TraceError(f"'{file}': step {number} lacks a layer, or its layers differ", "leave that step out")
        ids = np.stack([found[layer] for layer in layers], axis=1)  # [t, L, K]
        if parts and len(ids) > 1:
            yield _joined(parts)
            parts = []
        parts.append(ids)
    if parts:
        yield _joined(parts)


def _joined(parts: list[Ids]) -> Imported:
    return Imported(np.concatenate(parts), len(parts[0]) if len(parts[0]) > 1 else 0)


def _csv(file: Path, text: str) -> Iterator[Imported]:
    try:
        yield from _csv_requests(file, csv.DictReader(io.StringIO(text), skipinitialspace=True))
    except csv.Error as error:
        raise TraceError(f"'{file}' is not a CSV file: {error}", _REMEDY) from error


def _csv_requests(file: Path, lines: csv.DictReader[str]) -> Iterator[Imported]:
    columns = lines.fieldnames or []
    own = sorted((name for name in columns if name.startswith("expert_")), key=lambda name: (len(name), name))
    if not {"token", "layer"} <= set(columns) or ("experts" in columns) == bool(own):
        remedy = f"name token, layer and experts, and {_REMEDY}"
        raise TraceError(f"{file}:1 has the columns {', '.join(columns)}", remedy)
    requests: dict[str, dict[int, dict[int, list[int]]]] = {}
    prompts: dict[str, set[int]] = {}
    names: dict[str, dict[int, int]] = {}
    for line in lines:
        where = f"{file}:{lines.line_num}"
        try:
            token, layer = int(line["token"]), int(line["layer"])
            ids = [int(x) for x in ([line[name] for name in own] or line["experts"].split())]
            name = line.get("request") or "0"
            if line.get("token_id"):
                names.setdefault(name, {})[token] = int(line["token_id"])
        except (TypeError, ValueError, AttributeError) as error:
            raise TraceError(f"{where} has values that are not whole numbers: {error}", _REMEDY) from error
        _choices(ids, where, "experts", 1)
        of_token = requests.setdefault(name, {}).setdefault(token, {})
        if layer in of_token or line.get("phase") not in (None, "", "prefill", "decode"):
            what = f"{where}: layer {layer} of token {token} is there twice, or its phase is unknown"
            raise TraceError(what, _REMEDY)
        of_token[layer] = ids
        if line.get("phase") == "prefill":
            prompts.setdefault(name, set()).add(token)
    for name, by_token in requests.items():
        order = sorted(by_token)
        lists = [[by_token[token][layer] for layer in sorted(by_token[token])] for token in order]
        if len({(len(one), *map(len, one)) for one in lists}) != 1:
            what = f"'{file}': tokens of request {name} have different layers or numbers of experts"
            raise TraceError(what, _REMEDY)
        first = [token in prompts.get(name, ()) for token in order]
        if sorted(first, reverse=True) != first:
            raise TraceError(f"'{file}': request {name} prefills after it decodes", _REMEDY)
        known = names.get(name, {})
        tokens = _token_ids([known[token] for token in order]) if set(known) == set(order) else None
        yield Imported(np.asarray(lists, np.int64), sum(first), tokens)


FORMATS: dict[str, Callable[[Path, str], Iterator[Imported]]] = {"vllm": _vllm, "megatron": _megatron, "csv": _csv}
