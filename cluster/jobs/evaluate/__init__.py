"""`tiermoe eval`: what a policy costs in quality, against the same model without loss."""

from .quality import EvaluationOptions

__all__ = ["EvaluationOptions"]
