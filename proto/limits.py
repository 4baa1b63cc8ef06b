"""What a message may be at most, and the errors that say so."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError, MessageError, MessageTooLarge

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Bounds on what may be sent and what is accepted.

    Attributes:
        max_message_bytes: of a whole frame.
        layers, experts: of the model; ids lie below.

    Raises:
        ConfigError: a bound is out of range.
    """

    max_message_bytes: int = 64 * MIB
    layers: int = 1024
    experts: int = 4096

    def __post_init__(self) -> None:
        for name, least, most in (
            ("max_message_bytes", 4096, 2**31 - MIB),
            ("layers", 1, 2**16),
            ("experts", 1, 2**15),  # so that layer * experts + expert is an int32
        ):
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"{name} is {getattr(self, name)}", f"give a number from {least} to {most}")


def malformed(what: str) -> MessageError:
    """The error for a message that breaks the rules of its kind."""
    return MessageError(f"malformed message: {what}", "run the same version of tiermoe at both ends")


def too_large(size: int, most: int) -> MessageTooLarge:
    """The error for a message of `size` bytes where `most` are allowed."""
    return MessageTooLarge(
        f"a message of {size} bytes is larger than the {most} that the channel carries",
        "send fewer rows or experts at once, or raise max_message_bytes at both ends",
    )
