"""The job that trains the default model on text that a development machine has anyway.

``train_default_model`` prepares the corpus, trains, exports, measures and writes the card; it is
loaded on first use, because it needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .job import TrainingReport, train_default_model

__all__ = ["TrainingReport", "train_default_model"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import job

        return getattr(job, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
