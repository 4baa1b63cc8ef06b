"""Typed errors. Each message says what is wrong and what to do about it, in one line.

The command line maps every `TierMoeError` to exit code 2 (the user can mend it) except
`RuntimeFailure` and its kin, which exit with 1.
"""

from __future__ import annotations

_STEPS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


class TierMoeError(Exception):
    """Base of all errors that a user can act on.

    Args:
        what: what is wrong, with the offending value.
        remedy: what to do about it.
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what, remedy)  # both as args, so that the error survives a process boundary
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


class ConfigError(TierMoeError):
    """A configuration file, preset or option is unknown, malformed or out of range."""


class BudgetError(ConfigError):
    """The expert budget is out of range or too small for one expert."""


class PolicyError(TierMoeError):
    """A policy from outside of this repository raised an exception, or gave an answer that its hook may not give."""


class CheckpointError(TierMoeError):
    """A checkpoint is missing, truncated, mis-shaped, non-finite or has no routed experts."""


class FormError(CheckpointError):
    """Weights in a published quantized form have parts of other names, types, shapes or values than the form."""


class UnsupportedModelError(CheckpointError):
    """The architecture does not use the experts interface, or its experts differ in shape."""


class StoreError(TierMoeError):
    """An expert store is missing, incomplete, of another format version, or its bytes do not match."""


class TraceError(TierMoeError):
    """A routing trace is missing, truncated, of another format version or model, or its bytes do not match."""


class RequestError(TierMoeError):
    """A generation request is malformed: empty or over-long prompt, sampling value out of range."""


class RuntimeFailure(TierMoeError):
    """The runtime itself failed: an actor died, a start-up or request deadline passed."""


class OutputError(RuntimeFailure):
    """Standard output cannot be written."""


class OutputClosed(OutputError):
    """The reader of standard output, such as `head`, has ended."""


class NotServing(RuntimeFailure):
    """The lead has died and is being started again; requests can be sent once it serves."""


class LoopDied(NotServing):
    """The lead's generation loop died in a step that carried the request; the lead is started again."""


class ChannelError(RuntimeFailure):
    """A channel between two processes did not do what was asked."""


class ChannelRefused(ChannelError):
    """A channel could not be opened: nobody there, wrong token or certificate, another protocol version."""


class MessageError(ChannelError):
    """A message is malformed: wrong shapes, numbers out of range or not finite, bytes that are no message."""


class MessageTooLarge(MessageError):
    """A message is larger than what the channel carries."""


class DeadlinePassed(ChannelError):
    """No answer came before the deadline of the call."""


class PeerLost(ChannelError):
    """The process at the other end died, stopped answering, or the channel was closed."""


class RemoteFailure(ChannelError):
    """The other side answered with an error.

    Args:
        kind: name of the error's class there.
    """

    def __init__(self, what: str, remedy: str, kind: str = "RuntimeFailure") -> None:
        super().__init__(what, remedy)
        self.args = (what, remedy, kind)
        self.kind = kind


def size(nbytes: float) -> str:
    """Bytes with a binary unit, such as 1.50 MiB."""
    for step, unit in _STEPS:
        if nbytes >= step:
            return f"{nbytes / step:.2f} {unit}"
    return f"{nbytes:.0f} B"


def reason(error: Exception) -> str:
    """Why a file was refused, for a message that names the file: of an `OSError` neither its number nor its path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def exit_code(error: TierMoeError) -> int:
    """Of a command that the error ends: 1 the runtime failed, 2 the user can correct it."""
    return 1 if isinstance(error, RuntimeFailure) else 2


def told(error: BaseException) -> str:
    """What an exception says, in one line; empty where it says nothing, or cannot."""
    try:
        return " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    except BaseException:  # of a class from outside
        return ""


def rebuilt(kind: str, text: str) -> TierMoeError:
    """An error that another process raised, from the name of its class and its text.

    A class that is not here gives a `TierMoeError`, and a text without a remedy gets one.
    """
    found = globals().get(kind)
    cls = found if isinstance(found, type) and issubclass(found, TierMoeError) else TierMoeError
    what, _, remedy = text.rpartition("; ")
    if not what:
        what = text
        remedy = "change the request" if issubclass(cls, RequestError) else "run again, and report it if it stays"
    return cls(what, remedy)
