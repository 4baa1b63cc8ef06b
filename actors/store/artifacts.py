"""Small safetensors files beside a store that say which model they are of: written by `tiermoe prepare`.

Gates of the pre-gated policy in a file beside the store: written by `tiermoe prepare`, read by the lead.

Expert maps on disk: one safetensors file, for a warm start, for other replicas and for a restart.

Tensors `embeddings` [n, D] and `maps` [L, n, J], both float32, as `ExpertMapStore.arrays` gives them. The header says
which model they are of; a file of another one, of another version or with numbers that are not finite is refused.

Predictors of the stride policy in a file beside the store: written by `tiermoe prepare`, read by the lead.

A profile of a store's experts on disk: `profile.json`, which carries its own digest, and the arrays that it names.

    profile.json                  what was profiled, and the arrays' file with its length and SHA-256
    profile-DIGEST.safetensors    activations [L, E], binary, weighted [L, E, E], entropies [L, 5, 1024], and where
                                  inputs were seen dots, norms [L, E, E]; float32

The arrays' file is named after its bytes, and `profile.json` is written last: a store has the old profile or the new
one, never a mixture. Buddy lists are made from it as a policy asks for them, so that another alpha needs no profiling.

NumPy and no torch: a lead and a simulator read it alike.

How sensitive the loss is to each layer's output, in a file beside the store: measured by `tiermoe prepare`.

What `tiermoe prepare` measured or trained on calibration text, as far as a policy needs it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save, save_file

from ...errors import StoreError, TierMoeError, TraceError
from ..policies.baselines import Predictor, PreGate
from ..policies.buddymoe.buddies import BINS, TEMPERATURES, ExpertProfile, Outputs
from ..policies.fmoe.maps import checked_arrays
from ..policy_settings import PolicySettings
from .format import Bytes, Checksummed, Count, FileRecord, Manifest, Sha256, _Frozen, model_fingerprint


def encode_tagged(arrays: Mapping[str, NDArray[Any]], tag: Mapping[str, object]) -> bytes:
    """What the file holds; `tag` is JSON that says what the arrays are of."""
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return save(whole, {"tiermoe": json.dumps(dict(tag))})


def read_tagged(path: Path, what: str, error: type[TierMoeError], remedy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tag and the arrays of a file; what each array must be is the caller's to check.

    Args:
        what: plural name of the content, for messages.

    Raises:
        error: the file is missing or malformed.
    """
    try:
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        tag = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["tiermoe"])
        return dict(tag), load(data)
    except OSError as failure:
        raise error(f"{what} '{path}' cannot be read: {failure.strerror}", remedy) from failure
    except (ValueError, KeyError, TypeError, SafetensorError) as failure:
        raise error(f"'{path}' holds no {what}", remedy) from failure


GATES_NAME = "gates.safetensors"
_GATES_REMEDY = "train them with `tiermoe prepare MODEL --gates TEXT`"


def encode_gates(gates: Sequence[PreGate], manifest: Manifest, tokens: int) -> bytes:
    """What the file holds, of layers 0..L-2; tokens: of the text that they were trained on."""
    arrays = {f"{i}.{name}": getattr(gate, name) for i, gate in enumerate(gates) for name in ("weight", "bias")}
    return encode_tagged(arrays, {"fingerprint": model_fingerprint(manifest), "tokens": tokens})


def gates_of(store: Path, manifest: Manifest) -> tuple[PreGate, ...]:
    """Those that lie in a store's folder.

    Raises:
        StoreError: the file is missing, malformed, not finite, or of another model.
    """
    path, shape = store / GATES_NAME, manifest.experts
    tag, arrays = read_tagged(path, "gates", StoreError, _GATES_REMEDY)
    if tag.get("fingerprint") != model_fingerprint(manifest):
        raise StoreError(f"'{path}' is of another model", _GATES_REMEDY)
    found = []
    for layer in range(len(manifest.layers) - 1):
        parts = {}
        for name, dims in (("weight", (shape.num_experts, shape.hidden)), ("bias", (shape.num_experts,))):
            array = arrays.get(f"{layer}.{name}")
            if array is None or array.dtype != np.float32 or array.shape != dims or not np.isfinite(array).all():
                raise StoreError(f"'{path}': {name} of layer {layer} is not what it should be", _GATES_REMEDY)
            parts[name] = array
        found.append(PreGate(**parts))
    return tuple(found)


FORMAT, VERSION = "tiermoe-expert-maps", "1"
_MAPS_REMEDY = "give a file that `tiermoe` wrote for this model, or none: the matcher then learns while it serves"


@dataclass(frozen=True)
class MapShape:
    """The model that maps are of.

    Attributes:
        model: its name, as in the expert store's manifest.
        layers, experts: L MoE layers of J experts.
        hidden: H, width of its embeddings.
    """

    model: str
    layers: int
    experts: int
    hidden: int


def map_shape(manifest: Manifest) -> MapShape:
    """Of a store's model."""
    return MapShape(manifest.model, len(manifest.layers), manifest.experts.num_experts, manifest.experts.hidden)


def save_maps(path: Path, arrays: Mapping[str, NDArray[np.float32]], shape: MapShape) -> None:
    """Write the file whole or not at all: under another name first.

    Raises:
        StoreError: it cannot be written.
    """
    header = {"format": FORMAT, "version": VERSION} | {name: str(value) for name, value in asdict(shape).items()}
    header["width"] = str(arrays["embeddings"].shape[1])
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(dict(arrays), part, metadata=header)
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            part.unlink()
        why = f"expert maps cannot be written to '{path}': {error}"
        raise StoreError(why, "free space or give another path") from error


def load_maps(path: Path, shape: MapShape, width: int) -> dict[str, NDArray[Any]]:
    """The arrays of a file, checked.

    Args:
        shape: of the model that they must be of. width: D, of the embeddings that the store keeps.

    Raises:
        StoreError: there is no file, it is none of this kind, of another model or width, or damaged.
    """
    expected = {"format": FORMAT, "version": VERSION} | {name: str(value) for name, value in asdict(shape).items()}
    expected["width"] = str(width)
    try:
        with safe_open(path, framework="np") as file:
            header = file.metadata() or {}
            for name, value in expected.items():
                if header.get(name) != value:
                    raise StoreError(f"'{path}' has {name} {header.get(name)}, not {value}", _MAPS_REMEDY)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        checked_arrays(arrays, shape.layers, shape.experts, width)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"expert maps cannot be read from '{path}': {error}", _MAPS_REMEDY) from error
    except ValueError as error:
        raise StoreError(f"the expert maps in '{path}' are damaged: {error}", _MAPS_REMEDY) from error
    return arrays


_NAMES = tuple(field.name for field in fields(Predictor))
_PREDICTORS_REMEDY = "train them with `tiermoe prepare MODEL --predictors TRACE --stride {stride}`"


@dataclass(frozen=True)
class PredictorsOf:
    """The model and the stride that predictors are for.

    fingerprint: of the checkpoint's files. layers, experts: L and E. stride: layers ahead.
    """

    fingerprint: str
    layers: int
    experts: int
    stride: int


def predictors_file(stride: int) -> str:
    """Name within a store's folder."""
    return f"predictors-{stride}.safetensors"


def encode_predictors(predictors: list[Predictor], of: PredictorsOf) -> bytes:
    """What the file holds."""
    arrays = {
        f"{layer}.{name}": getattr(predictor, name)
        for layer, predictor in enumerate(predictors)
        for name in _NAMES
    }
    return encode_tagged(arrays, asdict(of))


def predictors_of(store: Path, manifest: Manifest, stride: int) -> list[Predictor]:
    """Those that lie in a store's folder. Raises as `read_predictors`."""
    of = PredictorsOf(model_fingerprint(manifest), len(manifest.layers), manifest.experts.num_experts, stride)
    return read_predictors(store / predictors_file(stride), of)


def read_predictors(path: Path, of: PredictorsOf) -> list[Predictor]:
    """Read them, refusing those of another model or stride.

    Raises:
        TraceError: the file is missing, malformed, not finite, or of another model or stride.
    """
    remedy = _PREDICTORS_REMEDY.format(stride=of.stride)
    kept, arrays = read_tagged(path, "predictors", TraceError, remedy)
    if kept != asdict(of):
        raise TraceError(f"'{path}' is of another model or stride", remedy)
    e, found = of.experts, []
    for layer in range(of.layers - of.stride):
        part: dict[str, Any] = {name: arrays.get(f"{layer}.{name}") for name in _NAMES}
        b1 = part["b1"]
        d = 0 if b1 is None else len(b1)
        shapes = {"mean": (e,), "scale": (e,), "w1": (e, d), "b1": (d,), "w2": (d, e), "b2": (e,)}
        for name, shape in shapes.items():
            array = part[name]
            if array is None or array.dtype != np.float32 or array.shape != shape or not np.isfinite(array).all():
                raise TraceError(f"'{path}': {name} of layer {layer} is not what it should be", remedy)
        if not (part["scale"] > 0).all():
            raise TraceError(f"'{path}': a scale of layer {layer} is not positive", remedy)
        found.append(Predictor(**part))
    return found


PROFILE_VERSION: Literal[1] = 1
PROFILE_NAME = "profile.json"
PROFILE_REMEDY = "make it with `tiermoe prepare MODEL --profile TEXT`"
_FILE = re.compile(r"^profile-[0-9a-f]{16}\.safetensors$")


class ProfileSource(_Frozen):
    """What was profiled.

    Attributes:
        kind: text that was run through the model, or a routing trace, which has no inputs of experts.
        sha256: of the token ids that were run, or of the trace's header.
        tokens: that were counted. output_tokens: of them, those on which all experts were run; 0 for a trace.
        warmup_steps, warmup_weight: tokens before that place in their sequence count so much.
    """

    kind: Literal["text", "trace"]
    sha256: Sha256
    tokens: Count
    output_tokens: Bytes
    warmup_steps: Bytes
    warmup_weight: Annotated[float, Field(ge=0, le=1)]


class ProfileManifest(_Frozen):
    """`profile.json`.

    Attributes:
        fingerprint: of the checkpoint's files. layers, experts, top_k: L, E and K.
        arrays: the file that holds them.
    """

    profile_version: Literal[1]
    fingerprint: Sha256
    layers: Count
    experts: Count
    top_k: Count
    source: ProfileSource
    arrays: FileRecord


_MANIFEST = Checksummed(ProfileManifest, "profile_version", PROFILE_VERSION, "profile version", PROFILE_REMEDY)


def encode_arrays(profile: ExpertProfile) -> tuple[bytes, FileRecord]:
    """The bytes of the arrays' file and its record."""
    held = {name: getattr(profile, name) for name in ("activations", "binary", "weighted", "entropies")}
    if profile.outputs is not None:
        held |= {"dots": profile.outputs.dots, "norms": profile.outputs.norms}
    data = save({name: np.ascontiguousarray(array, np.float32) for name, array in held.items()})
    digest = hashlib.sha256(data).hexdigest()
    return data, FileRecord(file=f"profile-{digest[:16]}.safetensors", nbytes=len(data), sha256=digest)


def encode_profile(manifest: ProfileManifest) -> bytes:
    """The only byte string that is read as this manifest."""
    return _MANIFEST.encode(manifest)


def stale_arrays(store: Path, manifest: ProfileManifest) -> list[Path]:
    """Files of arrays in a store's folder that this manifest does not name."""
    return [p for p in store.iterdir() if _FILE.match(p.name) and p.name != manifest.arrays.file]


def read_profile_manifest(store: Path, manifest: Manifest) -> ProfileManifest | None:
    """The profile that a store has; None where it has none.

    Raises:
        StoreError: it is damaged, or of another model.
    """
    path = store / PROFILE_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"'{path}' cannot be read ({error.strerror})", PROFILE_REMEDY) from error
    found = _MANIFEST.decode(data, str(path))
    shape = (found.fingerprint, found.layers, found.experts)
    if shape != (model_fingerprint(manifest), len(manifest.layers), manifest.experts.num_experts):
        raise StoreError(f"'{path}' is of another model than its store", PROFILE_REMEDY)
    return found


def read_profile(store: Path, manifest: Manifest) -> ExpertProfile:
    """The profile in a store's folder, checked: digests, shapes, finite and not negative where counts are.

    Raises:
        StoreError: there is none, it is damaged, or of another model.
    """
    found = read_profile_manifest(store, manifest)
    if found is None:
        raise StoreError(f"'{store}' has no profile of its experts", PROFILE_REMEDY)
    path = store / found.arrays.file
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"'{path}' cannot be read ({error.strerror})", PROFILE_REMEDY) from error
    if len(data) != found.arrays.nbytes or hashlib.sha256(data).hexdigest() != found.arrays.sha256:
        raise StoreError(f"'{path}' is truncated or altered: its bytes do not match", PROFILE_REMEDY)
    try:
        arrays = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise StoreError(f"'{path}' is no safetensors file", PROFILE_REMEDY) from error
    problem = _problem(arrays, found)
    if problem is not None:
        raise StoreError(f"'{path}': {problem}", PROFILE_REMEDY)
    wide = {name: array.astype(np.float64) for name, array in arrays.items()}
    dots, norms = wide.pop("dots", None), wide.pop("norms", None)
    outputs = None if dots is None or norms is None else Outputs(dots, norms)
    return ExpertProfile(**wide, outputs=outputs)


def _problem(arrays: dict[str, np.ndarray], manifest: ProfileManifest) -> str | None:
    """What is wrong with the arrays; None if nothing is."""
    layers, experts = manifest.layers, manifest.experts
    pairs = (layers, experts, experts)
    shapes = {"activations": (layers, experts), "binary": pairs, "weighted": pairs}
    shapes["entropies"] = (layers, len(TEMPERATURES), BINS)
    if manifest.source.output_tokens:
        shapes |= {"dots": pairs, "norms": pairs}
    if set(arrays) != set(shapes):
        return f"its arrays are {', '.join(sorted(arrays))}"
    for name, shape in shapes.items():
        array = arrays[name]
        if array.dtype != np.float32 or array.shape != shape:
            return f"{name} is {array.dtype} {list(array.shape)}, not float32 {list(shape)}"
        if not np.isfinite(array).all() or (name != "dots" and (array < 0).any()):
            return f"{name} has numbers that it cannot have"
    return None


SENSITIVITY_NAME = "sensitivity.safetensors"
_SENSITIVITY_REMEDY = "measure it with `tiermoe prepare MODEL --sensitivity TEXT`"


def encode_sensitivity(sensitivity: tuple[float, ...], manifest: Manifest, tokens: int) -> bytes:
    """What the file holds: float64 [L]; tokens: of the calibration text."""
    tag = {"fingerprint": model_fingerprint(manifest), "tokens": tokens}
    return encode_tagged({"sensitivity": np.array(sensitivity, np.float64)}, tag)


def sensitivity_of(store: Path, manifest: Manifest) -> tuple[float, ...]:
    """That which lies in a store's folder, in nats per squared dropped weight, see `policies.routing.AdaptiveGating`.

    Raises:
        StoreError: the file is missing, malformed, not finite, negative, or of another model.
    """
    path = store / SENSITIVITY_NAME
    tag, arrays = read_tagged(path, "sensitivities", StoreError, _SENSITIVITY_REMEDY)
    if tag.get("fingerprint") != model_fingerprint(manifest):
        raise StoreError(f"'{path}' is of another model", _SENSITIVITY_REMEDY)
    found = arrays.get("sensitivity")
    if found is None or found.dtype != np.float64 or found.shape != (len(manifest.layers),):
        raise StoreError(f"'{path}' has not one number for each of {len(manifest.layers)} layers", _SENSITIVITY_REMEDY)
    if not (np.isfinite(found).all() and (found >= 0).all()):
        raise StoreError(f"'{path}': a sensitivity is negative or not finite", _SENSITIVITY_REMEDY)
    return tuple(found.tolist())


@dataclass(frozen=True)
class Calibrated:
    """None where the policy does without.

    sensitivity: of each MoE layer, see `AdaptiveGating`. gates: of layers 0..L-2, for `PreGatedPrefetch`.
    profile: of the experts, for buddies and thresholds.
    """

    sensitivity: tuple[float, ...] | None = None
    gates: tuple[PreGate, ...] | None = None
    profile: ExpertProfile | None = None


def read_calibrated(policy: PolicySettings, store: Path, manifest: Manifest) -> Calibrated:
    """Read from a store's folder what a policy needs.

    Raises:
        StoreError: a file is missing, damaged or of another model; the remedy is the command that makes it.
    """
    return Calibrated(
        sensitivity=sensitivity_of(store, manifest) if policy.routing.kind == "adaptive" else None,
        gates=gates_of(store, manifest) if policy.prefetch.kind == "pre-gated" else None,
        profile=read_profile(store, manifest) if policy.needs_profile else None,
    )
