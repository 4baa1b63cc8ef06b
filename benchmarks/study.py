"""What experiments find here by name: metric functions, simulated sections, random models. Importing registers them."""

from . import engine_metrics, papers, random_model, trace_metrics

__all__ = ["engine_metrics", "papers", "random_model", "trace_metrics"]
