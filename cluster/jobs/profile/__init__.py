"""`tiermoe prepare --profile`: which experts of a layer stand in for each other."""

from .command import ProfileOptions

__all__ = ["ProfileOptions"]
