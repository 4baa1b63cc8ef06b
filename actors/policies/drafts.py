"""How many drafted tokens a step verifies: the number with the best expected tokens over predicted time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

LONGEST = 32  # tokens of a match that are counted
_MARGIN = 1.1  # tokens a second with drafts over those without, at least
_SHARE = 0.01  # of the seconds of steps without drafts: what wrong predictions may cost
_FIRST, _MOST_SAVED = 2.0, 16.0  # of the account, in steps without drafts: at the start, and at most
_KNOWN = 4  # steps without drafts before the first with some
_FIRST_PROBE, _PROBE = 12, 48  # steps with drafts in a row at first, and at most; then `_PAUSE` without
_PAUSE = 2  # steps; the first has its inputs made anew, the second says what a step takes now
_AGAIN = 1 / 4  # weight of that one in a mean
_DECAY = 1 / 16  # weight of the last step in a mean
_FORGET = 0.98  # of earlier tokens and steps, in counts and fits
_SURE = 4  # match of a class that may pay, before any was measured
_OUTLIER = 4.0  # of the prediction: longer steps were interrupted


class Proposal(NamedTuple):
    """Tokens that may follow a request's last one: how many, and of how many before them the source is the same."""

    tokens: int
    match: int


class Verified(NamedTuple):
    """What became of a request's drafts. drafted may be 0."""

    match: int
    drafted: int
    accepted: int


class StepTime(NamedTuple):
    """What was measured of a step that only decodes.

    needed, missed: experts, over all layers, and those of them that were not resident. waited_s: part of `seconds` in
    which the compute waited for these.
    """

    seconds: float
    needed: int
    missed: int
    waited_s: float


class DecodeCounts(NamedTuple):
    """Of all forwards so far without rows of a prompt.

    needed: experts, per forward and layer. missed: those that were not resident. waited_s: for these. copy_s: what a
    planner takes a copy of one to cost; 0: there is none.
    """

    needed: int
    missed: int
    waited_s: float
    copy_s: float


@dataclass
class DraftStats:
    """Counters of drafts since the last reset.

    Attributes:
        steps: that verified drafts. drafted, accepted: tokens of them.
        extra_experts: that these steps needed beyond a step without drafts, over all layers.
        saved_s: predicted seconds of the same tokens without drafts, less those that passed. It may be negative.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    extra_experts: float = 0.0
    saved_s: float = 0.0

    def reset(self) -> None:
        """Zero the counters."""
        self.__init__()  # type: ignore[misc]


@dataclass
class _Plain:
    """Means of steps without drafts, of one number of requests."""

    seconds: float = 0.0
    rest_s: float = 0.0  # without waits for experts
    needed: float = 0.0
    missed: float = 0.0
    steps: int = 0

    def add(self, step: StepTime, least: float = _DECAY) -> None:
        self.steps += 1
        weight = max(least, 1 / self.steps)
        self.seconds += weight * (step.seconds - self.seconds)
        self.rest_s += weight * (step.seconds - step.waited_s - self.rest_s)
        self.needed += weight * (step.needed - self.needed)
        self.missed += weight * (step.missed - self.missed)


@dataclass
class _Line:
    """y = base + slope * x by least squares, with forgetting. Sums begin with what is thought before."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float, weight: float = 1.0) -> None:
        for name, value in (("weight", 1.0), ("x", x), ("y", y), ("xx", x * x), ("xy", x * y)):
            setattr(self, name, _FORGET * getattr(self, name) + weight * value)

    def at(self, x: float) -> float:
        spread = self.weight * self.xx - self.x * self.x
        slope = (self.weight * self.xy - self.x * self.y) / spread if spread > 1e-12 else 0.0
        slope = max(0.0, slope)
        return (self.y - slope * self.x) / self.weight + slope * x


@dataclass
class DraftPricing:
    """Chooses how many tokens of each request's proposal a step verifies.

    Rule: a step of n requests with R rows (n, and one for each drafted token) is predicted to take

        t(R) = rest(R) + price * missed(R),        missed(R) = missed(n) * (R / n) ** growth

    where `rest` is a line through measured steps with drafts; `growth` is fitted to the experts that were not resident
    in them, of all that their rows needed; `price` is what one of these costs now: measured seconds of waits over
    experts that were waited for, else `copy_s` of the caller. A proposal whose source agrees with the request over
    `match` tokens is right in each token with the odds p of its class (powers of two of `match`), which accepted tokens
    teach. Expected tokens are n + sum over requests of p + p^2 + .. + p^k. As t depends on R alone, the best k of all
    requests are a prefix of all p^j in falling order; all prefixes are compared with t(n) by the tokens a second, and
    no drafts win unless the gain is 10%.

    Bound: the account has `saved` seconds of steps with drafts (predicted without drafts, less measured) and 1% of the
    seconds of steps without. Where it is empty, nothing is drafted: predictions that are wrong cost that share.

    State: means of steps without drafts by n, two fits, odds by class. Cost: O(drafts log drafts) a step. No clock: the
    caller measures.

    Args:
        most: drafted tokens of a request, at most.
        experts, top_k: of a layer, for the growth before it was measured.
        stats: counts what came of it; one object for good.
    """

    most: int
    experts: int
    top_k: int
    stats: DraftStats = field(default_factory=DraftStats)

    def __post_init__(self) -> None:
        union = (1 - (1 - self.top_k / self.experts) ** 4) * self.experts / self.top_k  # of four rows over one's
        growth = math.log(max(1.0, union)) / math.log(4)
        self._growth = [4.0 * growth, 4.0]  # sums of xy and xx, x = log(R / n), y = log(missed(R) / missed(n))
        self._rest = _Line()
        self._plain: dict[int, _Plain] = {}
        self._odds: dict[int, list[float]] = {}  # by class of match: accepted and tried tokens
        self._waited_s = self._missed = 0.0  # of late
        self._account: float | None = None  # seconds
        self._in_a_row, self._probe = 0, _FIRST_PROBE  # steps with drafts since the last without, and at most
        self._pause = 0  # steps without drafts to come
        self.copy_s = 0.0

    # -- the decision --------------------------------------------------------------------------------------------------

    def choose(self, proposals: Sequence[Proposal], room: int) -> list[int]:
        """Drafted tokens of each request, of a step that carries just these.

        Args:
            room: drafted tokens of all requests, at most.
        """
        return self._best(proposals, room) if self._may(len(proposals)) else [0] * len(proposals)

    def promises(self, requests: int) -> bool:
        """Whether drafts of the best class that was measured would be chosen: else it is not worth to make them."""
        best = max((1 << (size - 1) for size in self._odds), default=_SURE, key=self.odds)
        likely = Proposal(self.most, max((best, _SURE), key=self.odds))
        return self._may(requests) and any(self._best([likely] * requests, 1 << 16))

    def _may(self, requests: int) -> bool:
        """Whether steps of so many requests are known, none is to be measured, and the account has something."""
        plain, saved = self._plain.get(requests), self._account
        return plain is not None and plain.steps >= _KNOWN and not self._pause and saved is not None and saved > 0

    def _best(self, proposals: Sequence[Proposal], room: int) -> list[int]:
        counts, plain = [0] * len(proposals), self._plain[len(proposals)]
        gains = sorted(
            ((self.odds(proposal.match) ** place, request, place)
             for request, proposal in enumerate(proposals)
             for place in range(1, min(proposal.tokens, self.most) + 1)),
            key=lambda gain: (-gain[0], gain[1], gain[2]),
        )[: max(0, room)]  # fmt: skip
        tokens, best, taken = float(len(proposals)), _MARGIN * len(proposals) / plain.seconds, 0
        for number, (gain, _, _) in enumerate(gains, start=1):
            tokens += gain
            if (rate := tokens / self.seconds(len(proposals), len(proposals) + number)) > best:
                best, taken = rate, number
        for _, request, _ in gains[:taken]:
            counts[request] += 1
        return counts

    def odds(self, match: int) -> float:
        """That a drafted token is right whose proposal has this match, if those before it are."""
        size = _class_of(match)
        accepted, tried = self._odds.get(size, (0.0, 0.0))
        before = 1.0 - 0.9 / size  # 0.1, 0.55, 0.7, 0.78, ..: worth four tokens
        return (accepted + 4.0 * before) / (tried + 4.0)

    def seconds(self, requests: int, rows: int) -> float:
        """Predicted, of a step of so many requests and rows. `requests` is known."""
        plain = self._plain[requests]
        if rows == requests:
            return plain.seconds
        missed = plain.missed * (rows / requests) ** self.growth
        rest = plain.rest_s * self._rest_over(rows - requests)
        return rest + max(plain.seconds - plain.rest_s, 0.0) + self.price * (missed - plain.missed)

    @property
    def growth(self) -> float:
        """Exponent of the experts that a step waits for, by its rows."""
        return min(1.0, max(0.0, self._growth[0] / self._growth[1]))

    @property
    def price(self) -> float:
        """Seconds that one expert costs now that is not resident."""
        return self._waited_s / self._missed if self._missed >= 1.0 and self._waited_s > 0 else self.copy_s

    def _rest_over(self, drafted: int) -> float:
        """The rest of a step with so many drafts, over that of one without."""
        if not self._rest.weight:
            return 1.1 + 0.05 * drafted
        return max(1.0, self._rest.at(drafted))

    # -- what was measured ---------------------------------------------------------------------------------------------

    def took(self, step: StepTime, verified: Sequence[Verified]) -> None:
        """A step ended. verified: of each request."""
        requests, drafted = len(verified), sum(one.drafted for one in verified)
        self._waited_s += _DECAY * (step.waited_s - self._waited_s)
        self._missed += _DECAY * (step.missed - self._missed)
        plain = self._plain.setdefault(requests, _Plain())
        if not drafted:
            self._took_plain(step, plain)
            return
        for one in verified:
            if one.drafted:
                self._learn_odds(one)
        accepted = sum(one.accepted for one in verified)
        self._in_a_row += 1
        if self._in_a_row >= self._probe:
            self._pause, self._probe = _PAUSE, min(2 * self._probe, _PROBE)
        expected_s = self.seconds(requests, requests + drafted)
        measured_s = min(step.seconds, _OUTLIER * expected_s)
        saved_s = plain.seconds * (requests + accepted) / requests - measured_s
        self._add(saved_s, plain)
        self.stats.steps += 1
        self.stats.drafted += drafted
        self.stats.accepted += accepted
        self.stats.extra_experts += max(0.0, step.needed - plain.needed)
        self.stats.saved_s += saved_s
        rows = math.log((requests + drafted) / requests)
        more = math.log((step.missed + 0.5) / (plain.missed + 0.5))
        self._growth = [_FORGET * self._growth[0] + rows * more, _FORGET * self._growth[1] + rows * rows]
        if not self._rest.weight:
            self._rest.add(1, self._rest_over(1))
            self._rest.add(8, self._rest_over(8))
        self._rest.add(drafted, min(_OUTLIER, (step.seconds - step.waited_s) / max(plain.rest_s, 1e-9)))

    def spent(self, seconds: float, requests: int) -> None:
        """Seconds that went into drafts of so many requests, of which none was chosen."""
        if (plain := self._plain.get(requests)) is not None:
            self._add(-seconds, plain)

    def _took_plain(self, step: StepTime, plain: _Plain) -> None:
        after_drafts, self._in_a_row = self._in_a_row > 0, 0
        measured, self._pause = self._pause > 0, max(0, self._pause - 1)
        known = plain.steps >= _KNOWN
        if known and step.seconds > _OUTLIER * plain.seconds:
            return
        if known and after_drafts:  # its inputs are made anew, which drafts are to pay for
            self._add(min(0.0, plain.seconds - step.seconds), plain)
        else:
            plain.add(step, _AGAIN if measured else _DECAY)
        if self._account is None:
            self._account = _FIRST * step.seconds if known else None
        else:
            self._add(_SHARE * step.seconds, plain)

    def _add(self, seconds: float, plain: _Plain) -> None:
        if self._account is not None:
            self._account = min(self._account + seconds, _MOST_SAVED * plain.seconds)

    def _learn_odds(self, one: Verified) -> None:
        counts = self._odds.setdefault(_class_of(one.match), [0.0, 0.0])
        tried = one.accepted + (one.accepted < one.drafted)
        counts[0] = _FORGET**tried * counts[0] + one.accepted
        counts[1] = _FORGET**tried * counts[1] + tried


def _class_of(match: int) -> int:
    """1, 2 to 3, 4 to 7, ..: 1, 2, 3, .."""
    return max(1, min(match, LONGEST)).bit_length()


class NgramIndex:
    """Where the last tokens of a text stood before: prompt-lookup drafts (Saxena 2023).

    State: the text; by each run of `LENGTH` tokens, the places behind its latest occurrences. Cost: O(1) a token to
    add; a proposal compares at most `_OCCURRENCES` places over at most `LONGEST` tokens.
    """

    LENGTH = 3
    _OCCURRENCES = 8

    def __init__(self) -> None:
        self._text: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}

    def __len__(self) -> int:
        return len(self._text)

    def extend(self, tokens: Iterable[int]) -> None:
        """Take the next tokens of the text."""
        text = self._text
        for token in tokens:
            if len(text) >= self.LENGTH:  # the run before this token, which is followed by it
                found = self._places.setdefault(tuple(text[-self.LENGTH :]), [])
                found.append(len(text))
                del found[: -self._OCCURRENCES]
            text.append(token)

    def propose(self, most: int) -> tuple[list[int], int]:
        """`most` tokens that followed the longest match of the last ones, the latest of equals, and its length.

        No tokens, and 0: the last `LENGTH` tokens did not stand anywhere before.
        """
        text, best, length = self._text, 0, 0
        for place in reversed(self._places.get(tuple(text[-self.LENGTH :]), ())):
            match = self.LENGTH
            while match < min(place, LONGEST) and text[place - 1 - match] == text[-1 - match]:
                match += 1
            if match > length:
                best, length = place, match
        if not length:
            return [], 0
        found = text[best : best + most]
        while len(found) < most:  # the source reaches the end of the text, which repeats itself
            found += found[: most - len(found)]
        return found, length
