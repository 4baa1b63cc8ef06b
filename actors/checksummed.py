"""JSON manifests that carry their own digest: one byte string for each manifest, so any altered byte is noticed.

NumPy-free and torch-free, as the formats that use it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from ..errors import StoreError

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Checksummed(Generic[M]):
    """One kind of manifest.

    Attributes:
        model: what it says; a frozen, strict pydantic model.
        version_field: the field that tells the format's version, looked at before all others.
        version: the only one that is read.
        version_name: how errors call it, such as "store format".
        remedy: of every error.
    """

    model: type[M]
    version_field: str
    version: int
    version_name: str
    remedy: str

    def encode(self, manifest: M) -> bytes:
        """The only byte string that `decode` takes for this manifest."""
        body = manifest.model_dump(mode="json")
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        return (json.dumps({**body, "checksum": digest}, indent=1) + "\n").encode()

    def decode(self, data: bytes, where: str) -> M:
        """Read a manifest and check it against its digest, byte for byte.

        Args:
            where: the path to name in errors.

        Raises:
            StoreError: not a manifest, of another version, or altered.
        """
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{where} is not valid JSON ({first_problem(error)})", self.remedy) from error
        if not isinstance(body, dict):
            raise StoreError(f"{where} is not a manifest", self.remedy)
        version = body.get(self.version_field)
        if version != self.version:
            raise StoreError(f"{where} has {self.version_name} {version!r}, not {self.version}", self.remedy)
        body.pop("checksum", None)
        try:
            manifest = self.model.model_validate_json(json.dumps(body))
        except (ValidationError, ValueError) as error:
            raise StoreError(f"{where} is malformed ({first_problem(error)})", self.remedy) from error
        if self.encode(manifest) != data:
            raise StoreError(f"{where} does not match its checksum", self.remedy)
        return manifest


def first_problem(error: Exception) -> str:
    """The first complaint of a validation error, on one line."""
    if isinstance(error, ValidationError):
        item = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}".strip(": ")
    return str(error).splitlines()[0] if str(error) else type(error).__name__
