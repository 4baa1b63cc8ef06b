"""Files that `tiermoe prepare` trains or measures for policies, beside the store, and the matcher's expert maps.

All are safetensors files that name their model. A missing, malformed, non-finite or foreign file is refused; the
remedy is the command that makes it.

    gates.safetensors             I.weight [E, H], I.bias [E] of layers 0..L-2; float32
    predictors-STRIDE.safetensors I.mean, I.scale, I.b2 [E], I.w1 [E, D], I.b1 [D], I.w2 [D, E]; float32
    profile.json                  the source of the profile, and the arrays' file with its length and SHA-256
    profile-DIGEST.safetensors    activations [L, E], binary, weighted [L, E, E], entropies [L, 5, 1024]; of text also
                                  dots, norms [L, E, E]; float32
    expert maps                   embeddings [n, D], maps [L, n, J]; float32, written by the matcher

`profile.json` is written last and the arrays' file is named after its bytes, so a profile is replaced atomically.
NumPy without torch: a lead and a simulator read the same files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ...errors import StoreError, TierMoeError, TraceError, reason
from ..policies.baselines import Predictor, PreGate
from ..policies.buddymoe.buddies import BINS, TEMPERATURES, ExpertProfile, Outputs
from ..policies.fmoe.maps import checked_arrays
from ..policy_settings import PolicySettings
from .format import Bytes, ChecksummedManifest, Count, FileRecord, Manifest, Record, Sha256, model_fingerprint

Arrays = dict[str, NDArray[Any]]
Shape = tuple[int, ...]

GATES_NAME = "gates.safetensors"


@dataclass(frozen=True)
class Artifact:
    """One kind of file: `what` it holds (plural), the command that makes it (`remedy`), and its class of errors."""

    what: str
    remedy: str
    error: type[TierMoeError] = StoreError

    def encode(self, arrays: Mapping[str, NDArray[Any]], tag: Mapping[str, object]) -> bytes:
        """The file's bytes; `tag` is JSON that identifies the model."""
        return encode_tensors(arrays, {"tiermoe": json.dumps(dict(tag))})

    def read(self, path: Path) -> tuple[dict[str, Any], Arrays]:
        """The tag and the arrays of a file. Raises `error` when the file is missing or malformed."""
        try:
            metadata, arrays = _decode(path.read_bytes())
            return dict(json.loads(metadata["tiermoe"])), arrays
        except OSError as failure:
            raise self.refused(f"{self.what} '{path}' cannot be read: {failure.strerror}") from failure
        except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as failure:
            raise self.refused(f"'{path}' holds no {self.what}") from failure

    def read_of(self, path: Path, manifest: Manifest) -> Arrays:
        """The arrays of a file of this store's model. Raises as `read`, and when the file is of another model."""
        tag, arrays = self.read(path)
        if tag.get("fingerprint") != model_fingerprint(manifest):
            raise self.refused(f"'{path}' is of another model")
        return arrays

    def layer(self, path: Path, arrays: Arrays, layer: int, shapes: Mapping[str, Shape]) -> Arrays:
        """The float32 arrays `LAYER.NAME` of one layer by name, checked against their shapes. Raises as `read`."""
        for name, shape in shapes.items():
            if not _fits(arrays.get(f"{layer}.{name}"), np.float32, shape):
                raise self.refused(f"'{path}': {name} of layer {layer} has wrong values or a wrong shape")
        return {name: arrays[f"{layer}.{name}"] for name in shapes}

    def refused(self, why: str) -> TierMoeError:
        return self.error(why, self.remedy)


_GATES = Artifact("gates", "train them with `tiermoe prepare MODEL --gates TEXT`")


def encode_tensors(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None) -> bytes:
    """Arrays as the bytes of a safetensors file, whatever their order in memory; a scalar stays one.

    All of the package's arrays are written here: the library writes an array's memory as it lies, so that one in
    Fortran's order, such as a transposed one, would be read as other numbers. Weights go through `prepare.writer`.
    """
    whole = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    return save(whole, None if metadata is None else dict(metadata))


def _decode(data: bytes) -> tuple[dict[str, str], Arrays]:
    """Metadata and arrays. Raises SafetensorError, ValueError or AttributeError when malformed."""
    arrays = load(data)
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]).get("__metadata__", {}), arrays


def _fits(array: NDArray[Any] | None, dtype: Any, shape: Shape) -> bool:
    return array is not None and array.dtype == dtype and array.shape == shape and bool(np.isfinite(array).all())


def _layered(layers: Sequence[object], names: Sequence[str]) -> Arrays:
    return {f"{i}.{name}": getattr(one, name) for i, one in enumerate(layers) for name in names}


def _tag(manifest: Manifest, tokens: int, sha256: str) -> dict[str, object]:
    return {"fingerprint": model_fingerprint(manifest), "tokens": tokens, "sha256": sha256}


def encode_gates(gates: Sequence[PreGate], manifest: Manifest, tokens: int, sha256: str = "") -> bytes:
    """The gates of layers 0..L-2 as a file; tokens, sha256: of the training text."""
    return _GATES.encode(_layered(gates, ("weight", "bias")), _tag(manifest, tokens, sha256))


def gates_of(store: Path, manifest: Manifest) -> tuple[PreGate, ...]:
    """The gates in a store's folder. Raises StoreError: missing, malformed, not finite, or of another model."""
    path, experts = store / GATES_NAME, manifest.experts
    arrays = _GATES.read_of(path, manifest)
    shapes: dict[str, Shape] = {"weight": (experts.num_experts, experts.hidden), "bias": (experts.num_experts,)}
    return tuple(PreGate(**_GATES.layer(path, arrays, i, shapes)) for i in range(len(manifest.layers) - 1))


@dataclass(frozen=True)
class PredictorsOf:
    """What predictors belong to: the checkpoint's fingerprint, L layers of E experts, and the stride in layers."""

    fingerprint: str
    layers: int
    experts: int
    stride: int

    @property
    def artifact(self) -> Artifact:
        command = f"`tiermoe prepare MODEL --predictors TEXT --stride {self.stride}`"
        return Artifact("predictors", f"train them with {command}", TraceError)


def predictors_file(stride: int) -> str:
    """File name within a store's folder."""
    return f"predictors-{stride}.safetensors"


def encode_predictors(predictors: Sequence[Predictor], of: PredictorsOf, sha256: str = "") -> bytes:
    """The predictors of layers 0..L-stride-1 as a file; sha256: of the text, or of the trace's header."""
    tag = asdict(of) | {"sha256": sha256}
    return of.artifact.encode(_layered(predictors, [field.name for field in fields(Predictor)]), tag)


def predictors_of(store: Path, manifest: Manifest, stride: int) -> list[Predictor]:
    """The predictors in a store's folder. Raises as `read_predictors`."""
    of = PredictorsOf(model_fingerprint(manifest), len(manifest.layers), manifest.experts.num_experts, stride)
    return read_predictors(store / predictors_file(stride), of)


def read_predictors(path: Path, of: PredictorsOf) -> list[Predictor]:
    """Predictors of layers 0..L-stride-1.

    Raises:
        TraceError: the file is missing, malformed, not finite, or of another model or stride.
    """
    artifact, e, found = of.artifact, of.experts, []
    tag, arrays = artifact.read(path)
    if {name: tag.get(name) for name in asdict(of)} != asdict(of):
        raise artifact.refused(f"'{path}' is of another model or stride")
    for layer in range(of.layers - of.stride):
        d = len(arrays.get(f"{layer}.b1", ()))
        shapes = {"mean": (e,), "scale": (e,), "w1": (e, d), "b1": (d,), "w2": (d, e), "b2": (e,)}
        part = artifact.layer(path, arrays, layer, shapes)
        if not (part["scale"] > 0).all():
            raise artifact.refused(f"'{path}': a scale of layer {layer} is not positive")
        found.append(Predictor(**part))
    return found


FORMAT, VERSION = "tiermoe-expert-maps", "1"
_MAPS_REMEDY = "give a file that `tiermoe` wrote for this model, or none: the matcher then learns while it serves"


@dataclass(frozen=True)
class MapShape:
    """The model of expert maps: its name in the store's manifest, L layers of J experts, embeddings of width H."""

    model: str
    layers: int
    experts: int
    hidden: int


def map_shape(manifest: Manifest) -> MapShape:
    """The shape of a store's model."""
    return MapShape(manifest.model, len(manifest.layers), manifest.experts.num_experts, manifest.experts.hidden)


def _map_header(shape: MapShape, width: int) -> dict[str, str]:
    fixed = {"format": FORMAT, "version": VERSION}
    return fixed | {name: str(value) for name, value in asdict(shape).items()} | {"width": str(width)}


def save_maps(path: Path, arrays: Mapping[str, NDArray[np.float32]], shape: MapShape) -> None:
    """Write the arrays of `ExpertMapStore.arrays` atomically. Raises StoreError: it cannot be written."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(encode_tensors(arrays, _map_header(shape, arrays["embeddings"].shape[1])))
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        why = f"expert maps cannot be written to '{path}': {reason(error)}"
        raise StoreError(why, "free space or give another path") from error


def load_maps(path: Path, shape: MapShape, width: int) -> Arrays:
    """The expert maps of a file, checked against the model's shape and the width D of the matcher's embeddings.

    Raises:
        StoreError: the file is missing, damaged, or of another format, model, version or width.
    """
    try:
        header, arrays = _decode(path.read_bytes())
    except (OSError, SafetensorError, ValueError, AttributeError) as error:
        raise StoreError(f"expert maps cannot be read from '{path}': {reason(error)}", _MAPS_REMEDY) from error
    for name, value in _map_header(shape, width).items():
        if header.get(name) != value:
            raise StoreError(f"'{path}' has {name} {header.get(name)}, not {value}", _MAPS_REMEDY)
    try:
        checked_arrays(arrays, shape.layers, shape.experts, width)
    except ValueError as error:
        raise StoreError(f"the expert maps in '{path}' are damaged: {error}", _MAPS_REMEDY) from error
    return arrays


PROFILE_VERSION: Literal[1] = 1
PROFILE_NAME = "profile.json"
PROFILE_REMEDY = "make it with `tiermoe prepare MODEL --profile TEXT`"
PROFILE_FILE = re.compile(r"profile-[0-9a-f]{16}\.safetensors")  # names of the arrays' files


class ProfileSource(Record):
    """The source of a profile.

    Attributes:
        kind: text that the model ran, or a routing trace, which has no expert inputs.
        sha256: of the token ids, or of the trace's header.
        tokens, output_tokens: counted tokens; those of them that all experts ran on (0 for a trace).
        warmup_steps, warmup_weight: the first tokens of a sequence, and how much each of them counts.
    """

    kind: Literal["text", "trace"]
    sha256: Sha256
    tokens: Count
    output_tokens: Bytes
    warmup_steps: Bytes
    warmup_weight: Annotated[float, Field(ge=0, le=1)]


class ProfileManifest(ChecksummedManifest):
    """`profile.json`. fingerprint: of the checkpoint's files. layers, experts, top_k: L, E, K. arrays: their file."""

    file_name = PROFILE_NAME
    version_field, version, version_name = "profile_version", PROFILE_VERSION, "profile version"
    remedy = PROFILE_REMEDY

    profile_version: Literal[1]
    fingerprint: Sha256
    layers: Count
    experts: Count
    top_k: Count
    source: ProfileSource
    arrays: FileRecord

    def shapes(self) -> dict[str, Shape]:
        """Shapes of the arrays, all float32."""
        pairs = (self.layers, self.experts, self.experts)
        shapes: dict[str, Shape] = {"activations": pairs[:2], "binary": pairs, "weighted": pairs}
        shapes["entropies"] = (self.layers, len(TEMPERATURES), BINS)
        return shapes | ({"dots": pairs, "norms": pairs} if self.source.output_tokens else {})


def encode_arrays(profile: ExpertProfile) -> tuple[bytes, FileRecord]:
    """The arrays' file as bytes, and its record."""
    arrays = {name: getattr(profile, name) for name in ("activations", "binary", "weighted", "entropies")}
    if profile.outputs is not None:
        arrays |= {"dots": profile.outputs.dots, "norms": profile.outputs.norms}
    data = encode_tensors({name: array.astype(np.float32) for name, array in arrays.items()})
    digest = hashlib.sha256(data).hexdigest()
    return data, FileRecord(file=f"profile-{digest[:16]}.safetensors", nbytes=len(data), sha256=digest)


def read_profile_manifest(store: Path, manifest: Manifest) -> ProfileManifest | None:
    """The manifest of a store's profile; None without one. Raises StoreError: damaged, or of another model."""
    found = ProfileManifest.read(store)
    model = (model_fingerprint(manifest), len(manifest.layers), manifest.experts.num_experts)
    if found is not None and (found.fingerprint, found.layers, found.experts) != model:
        raise StoreError(f"'{store / PROFILE_NAME}' is of another model than its store", PROFILE_REMEDY)
    return found


def read_profile(store: Path, manifest: Manifest) -> ExpertProfile:
    """The profile in a store's folder; digest, shapes and values are checked.

    Raises:
        StoreError: the profile is missing, damaged, or of another model.
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
        raise StoreError(f"'{path}' is not a safetensors file", PROFILE_REMEDY) from error
    if (problem := _problem(arrays, found.shapes())) is not None:
        raise StoreError(f"'{path}': {problem}", PROFILE_REMEDY)
    wide = {name: array.astype(np.float64) for name, array in arrays.items()}
    dots, norms = wide.pop("dots", None), wide.pop("norms", None)
    return ExpertProfile(**wide, outputs=None if dots is None or norms is None else Outputs(dots, norms))


def _problem(arrays: Arrays, shapes: Mapping[str, Shape]) -> str | None:
    if set(arrays) != set(shapes):
        return f"its arrays are {', '.join(sorted(arrays))}"
    for name, shape in shapes.items():
        array = arrays[name]
        if array.dtype != np.float32 or array.shape != shape:
            return f"{name} is {array.dtype} {list(array.shape)}, not float32 {list(shape)}"
        if not np.isfinite(array).all() or (name != "dots" and (array < 0).any()):
            return f"{name} has numbers that it cannot have"
    return None


@dataclass(frozen=True)
class PolicyArtifacts:
    """The artifacts that a policy reads; None: not needed.

    gates: of layers 0..L-2 (`PreGatedPrefetch`). profile: for buddies and thresholds. predictors: of later layers
    (`StridePrefetch`).
    """

    gates: tuple[PreGate, ...] | None = None
    profile: ExpertProfile | None = None
    predictors: Sequence[Predictor] | None = None


# by need of a policy (`PolicySettings.needs`); `predictors` are of a stride
READERS: Mapping[str, Callable[[Path, Manifest], Any]] = {
    "gates": gates_of, "profile": read_profile,
}


def read_policy_artifacts(policy: PolicySettings, store: Path, manifest: Manifest) -> PolicyArtifacts:
    """Read what a policy needs from a store's folder. Raises StoreError: a file is missing, damaged or foreign."""
    found = {need: READERS[need](store, manifest) for need in READERS.keys() & policy.needs}
    if "predictors" in policy.needs:
        found["predictors"] = predictors_of(store, manifest, policy.prefetch.distance)
    return PolicyArtifacts(**found)
