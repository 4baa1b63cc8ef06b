"""`tiermoe eval`: what a policy costs in quality, against the same model without loss."""

from .options import EvaluationOptions

__all__ = ["EvaluationOptions"]
