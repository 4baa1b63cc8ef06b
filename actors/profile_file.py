"""A profile of a store's experts on disk: `profile.json`, which carries its own digest, and the arrays that it names.

    profile.json                  what was profiled, and the arrays' file with its length and SHA-256
    profile-DIGEST.safetensors    activations [L, E], binary, weighted [L, E, E], entropies [L, 5, 1024], and where
                                  inputs were seen dots, norms [L, E, E]; float32

The arrays' file is named after its bytes, and `profile.json` is written last: a store has the old profile or the new
one, never a mixture. Buddy lists are made from it as a policy asks for them, so that another alpha needs no profiling.

NumPy and no torch: a lead and a simulator read it alike.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ..errors import StoreError
from .checksummed import Checksummed
from .policies.entropy import BINS, TEMPERATURES
from .policies.expert_profile import ExpertProfile, Outputs
from .store_format import Count, FileRecord, Manifest, Sha256, _Frozen, model_fingerprint
from .tensor_file import Bytes

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
