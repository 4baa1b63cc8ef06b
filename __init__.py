"""tiermoe: serve Mixture-of-Experts language models beyond their GPU memory budget."""

__version__ = "0.1.0"
