"""`tiermoe prepare --profile`: which experts of a layer stand in for each other."""

from .profile_options import ProfileOptions

__all__ = ["ProfileOptions"]
