"""What training does at each point of its budget: rate, row length, batch."""

from __future__ import annotations

from dataclasses import dataclass

_WARM_UP_STEPS = 40
_DECAY_FROM = 0.35
_FINAL_RATE = 0.01


@dataclass(frozen=True)
class Budget:
    """Where training ends: at a number of tokens, or of active CPU minutes of the first worker.

    CPU time and not wall time, so that a paused or preempted run keeps its schedule.
    """

    tokens: int | None = None
    minutes: float | None = None

    def progress(self, tokens: int, active_s: float) -> float:
        """The spent share, 0 to 1, of whichever limit is nearer."""
        shares = [0.0]
        if self.tokens:
            shares.append(tokens / self.tokens)
        if self.minutes:
            shares.append(active_s / (self.minutes * 60))
        return min(1.0, max(shares))


@dataclass(frozen=True)
class Phase:
    """Batch of one step: tokens over all workers, in rows of ``length`` tokens."""

    until: float
    length: int
    batch_tokens: int


# Short rows and small batches first: more updates while gradients are large.
PHASES = (
    Phase(0.45, 256, 8192),
    Phase(0.80, 512, 8192),
    Phase(0.92, 1024, 16384),
    Phase(2.00, 2048, 16384),
)


def phase_at(progress: float, phases: tuple[Phase, ...] = PHASES) -> Phase:
    """The phase of this progress."""
    return next(phase for phase in phases if progress < phase.until)


def rate_at(progress: float, step: int) -> float:
    """Multiplier of the learning rates: warm-up, constant, then linear to 1 %."""
    warm = min(1.0, step / _WARM_UP_STEPS)
    falling = (1 - progress) / (1 - _DECAY_FROM)
    return warm * max(_FINAL_RATE, min(1.0, falling))
