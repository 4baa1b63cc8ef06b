"""How many drafted tokens a step verifies: the number with the best expected tokens over predicted time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

LONGEST = 32  # tokens of a match that are counted
_MARGIN = 1.1  # tokens a second with drafts over those without, at least
_SHARE = 0.01  # of the seconds of steps without drafts: what wrong predictions may cost
_FIRST, _MOST_SAVED = 1.0, 16.0  # of the account, in steps without drafts: at the start, and at most
_KNOWN = 4  # steps without drafts before the first with some
_FIRST_PROBE, _PROBE = 12, 48  # steps with drafts in a row at first, and at most; then `_PAUSE` without
_PAUSE = 2  # steps; the first has its inputs made anew, the second says what a step takes now
_AGAIN = 1 / 4  # weight of that one in a mean
_DECAY = 1 / 16  # weight of the last step in a mean
_FORGET = 0.98  # of earlier tokens and steps, in counts and fits
_AGE = 0.995  # the same, of steps without drafts
_BEFORE = 4.0  # weight of what is thought before, in tokens and rows
_SURE = 4  # match of a class that may pay, before any was measured
_ASK, _READ = 0.2, 0.01  # of a step: thought of a head's forward, and of each token that it reads, before any ran
_MANY_READ = 16  # tokens: less is a part of each forward
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

    needed: experts, per forward and layer. missed: those that were not resident. waited_s: for these.
    """

    needed: int
    missed: int
    waited_s: float


class MissPrice(NamedTuple):
    """miss_s: seconds of an expert that is not resident, copied or computed elsewhere; 0: not known. absent: share of
    all experts that are not resident now.
    """

    miss_s: float
    absent: float


class CountedExperts(Protocol):
    """By which drafts are priced; on the thread that runs forwards."""

    def decode_counts(self) -> DecodeCounts: ...

    def miss_price(self) -> MissPrice: ...


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

    @property
    def price(self) -> float:
        """Seconds of waits for one expert that is missed."""
        return max(0.0, self.seconds - self.rest_s) / max(self.missed, 1.0)

    def add(self, step: StepTime, least: float = _DECAY) -> None:
        self.steps += 1
        weight = max(least, 1 / self.steps)
        self.seconds += weight * (step.seconds - self.seconds)
        self.rest_s += weight * (step.seconds - step.waited_s - self.rest_s)
        self.needed += weight * (step.needed - self.needed)
        self.missed += weight * (step.missed - self.missed)


@dataclass
class _Mean:
    """Mean of what was counted, with forgetting, and of what was thought before."""

    total: float = 0.0
    count: float = 0.0

    def add(self, total: float, count: int) -> None:
        self.total = _FORGET**count * self.total + total
        self.count = _FORGET**count * self.count + count

    def age(self, steps: int) -> None:
        """So many steps passed in which nothing was counted."""
        self.total, self.count = _AGE**steps * self.total, _AGE**steps * self.count

    def over(self, before: float) -> float:
        return (self.total + _BEFORE * before) / (self.count + _BEFORE)


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


class _Costs(NamedTuple):
    """Seconds of a step without drafts, and its rest; of the experts that a draft's row misses if it is right, if it is
    wrong, and of a wrong one at worst, with what they displace.

    over: the rest of a step with so many drafts, over that of one without.
    """

    plain_s: float
    rest_s: float
    right_s: float
    wrong_s: float
    lost_s: float

    def seconds(self, over: float, drafted: int, right: float) -> float:
        rest_s = self.rest_s * (over - 1.0)
        return self.plain_s + rest_s + right * self.right_s + (drafted - right) * self.wrong_s

    def most_lost_s(self, over: float, drafted: int) -> float:
        return self.rest_s * (over - 1.0) + drafted * self.lost_s


@dataclass
class DraftPricing:
    """Chooses how many tokens of each request's proposal a step verifies.

    Rule: a step of n requests that drafts D tokens, of which A are right, is predicted to take

        t(D, A) = t(0) + rest * (over(D) - 1) + price * (A * right + (D - A) * wrong)

    where t(0) and its part `rest`, without waits for experts, are those of measured steps without drafts; `over` is a
    line through measured steps with drafts; `price` is measured seconds of waits over experts that were waited for,
    else `miss_s`. `right` and `wrong` are experts that the row of such a draft misses: those that a right one misses,
    the next step would have; both are thought to be as many as a step without drafts misses, until they are measured.

    A proposal whose source agrees with the request over `match` tokens is right in each token with the odds p of its
    class (powers of two of `match`), which accepted tokens teach. Expected tokens are n + A, where A is the sum over
    requests of p + p^2 + .. + p^k. A likelier draft takes no longer, so the best k of all requests are a prefix of all
    p^j in falling order; all prefixes are compared with t(0) by the tokens a second, and no drafts win unless the gain
    is 10%.

    Bound: this is a hope, and an account pays for it. It begins with the seconds of one step and gets 1% of those of
    each step without drafts. A step with drafts adds what its tokens would have taken, less what it took and what its
    wrong drafts displaced: an expert loaded for nothing makes a cache of any order miss at most one more later. The
    step is chosen only if the account has its loss should every draft be wrong (`most_lost_s`), where a wrong one
    misses, until that is measured, as many as any row would (the share of all that is not resident), each for `miss_s`;
    and only with up to twice the drafts of the largest step so far. So N steps take at most 1.01 N + 1 steps' time,
    and what a step takes beyond its worst prediction, which is paid back before the next.

    State: means of steps without drafts by n, a fit, two means of experts, odds by class. Cost: O(drafts log drafts) a
    step. No clock: the caller measures.

    Args:
        most: drafted tokens of a request, at most.
        stats: counts what came of it; one object for good.

    Attributes:
        miss_s: seconds of one expert that is not resident, where nothing hides them; 0: not known.
        absent: share of all experts that are not resident now.
    """

    most: int
    stats: DraftStats = field(default_factory=DraftStats)

    def __post_init__(self) -> None:
        self._right, self._wrong = _Mean(), _Mean()  # experts that rows of drafts missed
        self._ask, self._read = _Mean(), _Mean()  # seconds of a head, by request and by token
        self._rest = _Line()
        self._plain: dict[int, _Plain] = {}
        self._odds: dict[int, _Mean] = {}  # by class of match: accepted of tried tokens
        self._waited_s = self._missed = 0.0  # of late
        self._account: float | None = None  # seconds
        self._reach = 1  # drafted tokens of a step, at most: twice as many as were measured
        self._in_a_row, self._probe = 0, _FIRST_PROBE  # steps with drafts since the last without, and at most
        self._pause = 0  # steps without drafts to come
        self.miss_s, self.absent = 0.0, 1.0

    # -- the decision --------------------------------------------------------------------------------------------------

    def choose(self, proposals: Sequence[Proposal], room: int) -> list[int]:
        """Drafted tokens of each request, of a step that carries just these.

        Args:
            room: drafted tokens of all requests, at most.
        """
        return self._best(proposals, room) if self.knows(len(proposals)) else [0] * len(proposals)

    def promises(self, requests: int, unread: int) -> bool:
        """Whether drafts of the best class that was measured would be chosen: else a head is not asked for any.

        Args:
            unread: tokens that it would read first, of all requests. Their time is for the account alone.
        """
        if not self.knows(requests):
            return False
        best = max((1 << (size - 1) for size in self._odds), default=_SURE, key=self.odds)
        likely, rest_s = Proposal(self.most, max((best, _SURE), key=self.odds)), self._plain[requests].rest_s
        asked_s = requests * self._ask.over(_ASK * rest_s)
        read_s = unread * self._read.over(_READ * rest_s) if unread > _MANY_READ * requests else 0.0
        return any(self._best([likely] * requests, 1 << 16, asked_s, read_s))

    def knows(self, requests: int) -> bool:
        """Whether steps of so many requests are known, and none is to be measured."""
        plain = self._plain.get(requests)
        return plain is not None and plain.steps >= _KNOWN and not self._pause and self._account is not None

    def _best(
        self, proposals: Sequence[Proposal], room: int, asked_s: float = 0.0, read_s: float = 0.0
    ) -> list[int]:
        """asked_s, read_s: of making them, which is still to come: each time, and now."""
        requests, account = len(proposals), (self._account or 0.0) - asked_s - read_s
        counts, plain_s = [0] * requests, self._plain[requests].seconds
        gains = sorted(
            ((self.odds(proposal.match) ** place, request, place)
             for request, proposal in enumerate(proposals)
             for place in range(1, min(proposal.tokens, self.most) + 1)),
            key=lambda gain: (-gain[0], gain[1], gain[2]),
        )[: max(0, min(room, self._reach))]  # fmt: skip
        right, best, taken, costs = 0.0, _MARGIN * requests / plain_s, 0, self._costs(requests)
        for number, (gain, _, _) in enumerate(gains, start=1):
            right += gain
            over = self._rest_over(number)
            if costs.most_lost_s(over, number) > account:
                break
            if (rate := (requests + right) / (costs.seconds(over, number, right) + asked_s)) > best:
                best, taken = rate, number
        for _, request, _ in gains[:taken]:
            counts[request] += 1
        return counts

    def odds(self, match: int) -> float:
        """That a drafted token is right whose proposal has this match, if those before it are."""
        size = _class_of(match)
        before = 1.0 - 0.9 / size  # 0.1, 0.55, 0.7, 0.78, ..
        return self._odds.get(size, _Mean()).over(before)

    def seconds(self, requests: int, drafted: int, right: float) -> float:
        """Predicted, of a step of so many requests, which are known, and drafted tokens, of which some are right."""
        costs = self._costs(requests)
        return costs.seconds(self._rest_over(drafted), drafted, right) if drafted else costs.plain_s

    def most_lost_s(self, requests: int, drafted: int) -> float:
        """Seconds that a step takes longer than one without drafts, if none of them is right."""
        return self._costs(requests).most_lost_s(self._rest_over(drafted), drafted)

    def _costs(self, requests: int) -> _Costs:
        plain, price = self._plain[requests], self.price
        one = plain.missed / requests
        wrong = self._wrong.over(one)
        most = self._wrong.over(self.absent * plain.needed / requests)
        return _Costs(
            plain.seconds, plain.rest_s, price * min(self._right.over(one), wrong), price * wrong,
            (max(price, self.miss_s) + plain.price) * most,
        )  # fmt: skip

    @property
    def price(self) -> float:
        """Seconds that one expert costs now that is not resident, of late; waits may hide a part."""
        return self._waited_s / self._missed if self._missed >= 1.0 and self._waited_s > 0 else self.miss_s

    def _rest_over(self, drafted: int) -> float:
        """The rest of a step with so many drafts, over that of one without."""
        if not self._rest.weight:
            return 1.1 + 0.05 * drafted
        return max(1.0, self._rest.at(drafted))

    # -- what was measured ---------------------------------------------------------------------------------------------

    def took(self, step: StepTime, verified: Sequence[Verified], asked_s: float = 0.0, steps: int = 1) -> None:
        """A step ended.

        Args:
            verified: of each request. asked_s: seconds of a head in it.
            steps: without drafts that it stands for, itself included.
        """
        requests, drafted = len(verified), sum(one.drafted for one in verified)
        self._waited_s += _DECAY * (step.waited_s - self._waited_s)
        self._missed += _DECAY * (step.missed - self._missed)
        plain = self._plain.setdefault(requests, _Plain())
        if not drafted:
            self._took_plain(step, plain, steps)
            return
        for one in verified:
            if one.drafted:
                self._learn_odds(one)
        accepted = sum(one.accepted for one in verified)
        self._in_a_row += 1
        if self._in_a_row >= self._probe:
            self._pause, self._probe = _PAUSE, min(2 * self._probe, _PROBE)
        expected_s = max(self.seconds(requests, drafted, accepted), plain.seconds + self.most_lost_s(requests, drafted))
        measured_s = min(step.seconds, _OUTLIER * expected_s)
        tokens, more = (requests + accepted) / requests, max(0.0, step.missed - plain.missed)
        # tokens in a step share waits with their neighbours; the mean of other steps may credit them with too many
        saved_s = min(tokens * plain.seconds - measured_s, tokens * plain.rest_s - (measured_s - step.waited_s))
        if wrong := drafted - accepted:
            more = max(0.0, more - accepted * self._right.over(plain.missed / requests))
            self._wrong.add(more, wrong)
            saved_s -= plain.price * more  # they took the place of others, which are to be copied again
        else:
            self._right.add(more, accepted)
        self._add(saved_s, plain)
        self.stats.steps += 1
        self.stats.drafted += drafted
        self.stats.accepted += accepted
        self.stats.extra_experts += max(0.0, step.needed - plain.needed)
        self.stats.saved_s += saved_s
        self._reach = max(self._reach, 2 * drafted)
        if not self._rest.weight:
            self._rest.add(1, self._rest_over(1))
            self._rest.add(8, self._rest_over(8))
        rest_s = step.seconds - step.waited_s - asked_s
        self._rest.add(drafted, min(_OUTLIER, max(0.0, rest_s / max(plain.rest_s, 1e-9))))

    def asked(self, seconds: float, requests: int, unread: int, chosen: bool) -> None:
        """A head took so long for drafts of so many requests, and read so many tokens. chosen: any of them was."""
        plain = self._plain[requests]
        if unread > _MANY_READ * requests:
            self._read.add(max(0.0, seconds - requests * self._ask.over(_ASK * plain.rest_s)), unread)
        else:
            self._ask.add(seconds, requests)
        if not chosen:
            self._add(-seconds, plain)

    def _took_plain(self, step: StepTime, plain: _Plain, steps: int) -> None:
        self._wrong.age(steps)
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
            self._add(_SHARE * step.seconds * steps, plain)

    def _add(self, seconds: float, plain: _Plain) -> None:
        if self._account is not None:
            self._account = min(self._account + seconds, _MOST_SAVED * plain.seconds)

    def _learn_odds(self, one: Verified) -> None:
        tried = one.accepted + (one.accepted < one.drafted)
        self._odds.setdefault(_class_of(one.match), _Mean()).add(one.accepted, tried)


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
