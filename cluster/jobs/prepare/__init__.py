"""`tiermoe prepare`: turn a safetensors checkpoint into an expert store."""

from .make_store import default_store_dir, ensure_prepared, is_store, prepare
from .replicas import ensure_replicas

__all__ = ["default_store_dir", "ensure_prepared", "ensure_replicas", "is_store", "prepare"]
