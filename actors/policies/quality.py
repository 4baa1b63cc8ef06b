"""A quality budget for `auto`: misses that are worth more seconds than the KL divergence that avoiding them costs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from .registry import NotPrepared, PolicyContext, register
from .routing import (
    Ids,
    MissCosts,
    Rerouted,
    RerouteView,
    Rerouting,
    RoutingOptions,
    SequenceRows,
    Weights,
    take_ended,
)

if TYPE_CHECKING:
    from ..policy_settings import PolicySettings

SUBSTITUTE, NARROW, DROP = range(3)
ACTIONS = ("substitute", "narrow", "drop")
"""What avoids a miss. substitute: the token's best resident expert by the router's scores runs in its place, with its
own weight. narrow: its other experts take over the weight. drop: the weight is left out."""
_LATER = {"replica": "hobbit or context-ndp-3bit", "buddy": "buddymoe-own-weight"}  # actions that only presets have
_CARRIED = 4.0  # tokens' budgets that a token may spend at most, where earlier ones left some
_WEIGHT = 0.2  # of the last token in the price
_LEAST = 1e-12  # nats a second of a price, and seconds of a miss, so that ratios and means of them exist
_MOST_RISE = 2.0  # of the price from one token to the next, where all that was offered was affordable


@dataclass(frozen=True)
class LossTable:
    """Measured loss of the actions (`tiermoe prepare --losses`).

    nats: by action, of each layer [L]: KL(lossless || changed) of a token that moves all its weight in a layer; moving
    a share d of it costs nats * d^2. An action may be absent.
    """

    nats: Mapping[str, NDArray[np.float64]]

    def amplitudes(self, layer: int, allowed: Sequence[str]) -> list[float]:
        """sqrt(nats) of each of `ACTIONS` in a layer; infinite where it is not allowed or was not measured."""
        found = [float(self.nats[name][layer]) if name in allowed and name in self.nats else 0.0 for name in ACTIONS]
        return [math.sqrt(nats) if nats > 0 else math.inf for nats in found]  # 0: nothing was measured


class Offer(NamedTuple):
    """A miss that may be avoided.

    rows: the tokens that picked it. amplitudes, actions: of each, the action of least loss and sqrt of its nats.
    """

    expert: int
    rows: tuple[int, ...]
    amplitudes: tuple[float, ...]
    actions: tuple[int, ...]


class Choice(NamedTuple):
    """avoided: of the offers, in order of nats. nats: what each offer would cost in that order. spent: by account."""

    avoided: tuple[Offer, ...]
    nats: tuple[float, ...]
    spent: dict[int, float]


class _Reading(NamedTuple):
    """What may be avoided in a layer. misses: of the layer, those included that must run."""

    offers: list[Offer]
    misses: int


def offers_of(
    ids: Ids, weights: Weights, probabilities: NDArray[np.floating], available: NDArray[np.bool_],
    amplitudes: Sequence[float], exact: Sequence[bool],
) -> _Reading:  # fmt: skip
    """The misses of a layer that may be avoided.

    A token keeps its heaviest expert. A miss that an `exact` row needs is not offered, nor one that is the heaviest of
    a row. A row whose picks are not the most probable experts, or with fewer resident experts than misses beside its
    picks, has no substitutes.

    Args:
        ids, weights, probabilities: [T, K], [T, K], [T, E]. available: [E]. amplitudes: of each action. exact: [T].
    """
    needed = dict[int, list[tuple[int, float, int]]]()
    blocked = set[int]()
    least = min(amplitudes[NARROW], amplitudes[DROP])
    other = NARROW if amplitudes[NARROW] <= amplitudes[DROP] else DROP
    residents = int(np.count_nonzero(available))
    for t, picked in enumerate(ids.tolist()):
        here = available[ids[t]]
        missing = [k for k, there in enumerate(here.tolist()) if not there]
        if not missing:
            continue
        if exact[t]:
            blocked.update(picked[k] for k in missing)
            continue
        row = weights[t].tolist()
        heaviest, whole = max(range(len(row)), key=row.__getitem__), sum(row)
        amplitude, action = least, other
        if amplitudes[SUBSTITUTE] < least:
            p, enough = probabilities[t], residents - len(picked) + len(missing) >= len(missing)
            if enough and np.count_nonzero(p > p[ids[t]].min()) < len(picked):
                amplitude, action = amplitudes[SUBSTITUTE], SUBSTITUTE
        for k in missing:
            if k == heaviest or whole <= 0 or amplitude == math.inf:
                blocked.add(picked[k])
            else:
                needed.setdefault(picked[k], []).append((t, amplitude * row[k] / whole, action))
    offers = [
        Offer(expert, *(tuple(column) for column in zip(*rows, strict=True)))
        for expert, rows in needed.items() if expert not in blocked
    ]  # fmt: skip
    return _Reading(offers, len(blocked | needed.keys()))


def choose(
    offers: Sequence[Offer], misses: int, accounts: Sequence[int], balances: Sequence[float], costs: MissCosts,
    price: float,
) -> Choice:  # fmt: skip
    """The misses to avoid, greedy by nats, since each saves the same seconds as far as they are known apart.

    A row that moves amplitudes a1, a2 in a layer is charged (a1 + a2)^2. In order of nats, misses are taken that every
    row's account can pay; of these the first k are avoided with the greatest price * seconds(k) - nats(k).

    Args:
        misses: of the layer, the offers among them. accounts: of each row [T]. balances: nats of each account.
        price: nats that a saved second may cost.
    """
    moved, spent = dict[int, float](), dict[int, float]()
    order = sorted(offers, key=lambda offer: sum(a * a for a in offer.amplitudes))
    all_s, total, best, nats = costs.seconds(misses), 0.0, 0.0, list[float]()
    taken, kept, paid = list[Offer](), 0, spent
    for offer in order:
        more, due = 0.0, dict[int, float]()
        for t, a in zip(offer.rows, offer.amplitudes, strict=True):
            each = a * (a + 2.0 * moved.get(t, 0.0))
            due[accounts[t]] = due.get(accounts[t], 0.0) + each
            more += each
        nats.append(more)
        if any(spent.get(account, 0.0) + each > balances[account] for account, each in due.items()):
            continue
        for t, a in zip(offer.rows, offer.amplitudes, strict=True):
            moved[t] = moved.get(t, 0.0) + a
        spent = spent | {account: spent.get(account, 0.0) + each for account, each in due.items()}
        taken.append(offer)
        total += more
        value = price * (all_s - costs.seconds(misses - len(taken))) - total
        if value > best:
            best, kept, paid = value, len(taken), spent
    return Choice(tuple(taken[:kept]), tuple(nats), paid if kept else {})


def changed(
    ids: Ids, weights: Weights, probabilities: NDArray[np.floating], available: NDArray[np.bool_],
    avoided: Sequence[Offer], renormalise: bool,
) -> tuple[Ids, Weights, list[int]]:  # fmt: skip
    """The routing without some misses, and how many pairs each action changed.

    A pair that does not run has weight 0 and the id of its token's heaviest expert.
    """
    ids, weights, counts = ids.copy(), weights.copy(), [0, 0, 0]
    by_row = dict[int, list[tuple[int, int]]]()
    for offer in avoided:
        for t, action in zip(offer.rows, offer.actions, strict=True):
            by_row.setdefault(t, []).append((offer.expert, action))
    for t, changes in by_row.items():
        picked, row = ids[t].tolist(), weights[t].astype(np.float64)
        heaviest, whole, gone = picked[int(row.argmax())], float(row.sum()), 0.0
        spare = list[int]()
        scale = 0.0
        if any(action == SUBSTITUTE for _, action in changes):
            p = probabilities[t]
            scale = whole / float(p[ids[t]].sum())
            best = np.argsort(-np.where(available, p, -1.0), kind="stable").tolist()
            spare = [e for e in best if e not in picked][: len(changes)]
        for expert, action in changes:
            place = picked.index(expert)
            counts[action] += 1
            if action == SUBSTITUTE:
                ids[t, place] = spare.pop(0)
                row[place] = probabilities[t, ids[t, place]] * scale
                continue
            gone += row[place] if action == DROP else 0.0
            ids[t, place], row[place] = heaviest, 0.0
        if renormalise:
            row *= (whole - gone) / row.sum()
        weights[t] = row
    return ids, weights, counts


@dataclass(slots=True)
class Account:
    """A request's budget: decoded tokens, and nats charged to it. recent: tokens since the last reset."""

    tokens: int = 0
    spent: float = 0.0
    recent: int = 0


@dataclass(frozen=True)
class QualityReport:
    """What a quality budget was spent on since the last reset.

    Attributes:
        budget: nats a token. requests: that decoded. tokens: decoded.
        kl: nats charged, of a token. kl_most: of the request with most.
        avoided, paid: misses that were avoided; and that could have been, and were loaded or computed near data.
        substituted, narrowed, dropped: (token, expert) pairs, by action.
    """

    budget: float
    requests: int
    tokens: int
    kl: float
    kl_most: float
    avoided: int
    paid: int
    substituted: int
    narrowed: int
    dropped: int


@register("routing", "quality")
class QualityBudget(Rerouting):
    """Avoids misses of decoding tokens within a budget of KL divergence from lossless, apart for each request.

    State: of each request, its decoded tokens n and nats s charged; price, nats that a saved second may cost.

    Rule: a decoded token adds `kl` nats to its request's budget; an action whose nats (`LossTable`) are more than
    kl n - s is not taken, so a request's mean never exceeds `kl`, and no request pays for another. Rows of prompts run
    exactly. In a layer `choose` takes the misses whose seconds, by the planner's costs, are worth their nats. The price
    is that at which the last token would have spent what it had, at most four tokens' budgets, on its offers in order
    of nats a second; geometric mean with weight 0.2. The first token of all only sets it. Free slots are filled first.

    A miss is avoided for all rows that need it or for none; a miss that a row of a prompt needs is not avoided.

    Cost: O(misses log misses) a layer, and the router's probabilities where something is missing.

    Args:
        kl: nats a token. table: measured losses. actions: of `ACTIONS`. renormalise: as the model does.
    """

    class Options(RoutingOptions):
        refusal: ClassVar[str] = "routing {kind} takes no {keys}"
        kind: str = "quality"
        kl: float = Field(gt=0, description="with quality: mean nats of KL from lossless that a token may cost")
        actions: tuple[str, ...] = Field(
            default=ACTIONS, min_length=1, description="with quality: allowed actions: substitute, narrow, drop"
        )

        @field_validator("actions")
        @classmethod
        def _known(cls, actions: tuple[str, ...]) -> tuple[str, ...]:
            for name in actions:
                if name in _LATER:
                    raise ValueError(
                        f"a quality budget has no action {name} yet: take {', '.join(ACTIONS)}, or a preset with it, "
                        f"such as {_LATER[name]}"
                    )
                if name not in ACTIONS:
                    raise ValueError(f"a quality budget has no action '{name}': take {', '.join(ACTIONS)}")
            return actions

        @property
        def needs(self) -> frozenset[str]:
            return frozenset({"losses"})

        @property
        def planned(self) -> bool:
            return True

        def check(self, policy: PolicySettings) -> None:
            super().check(policy)
            if policy.placement.kind != "auto":
                raise ValueError("routing quality asks the planner what a miss costs: it is for placement auto")
            if policy.on_miss.kind != "load":
                raise ValueError("routing quality decides about misses itself: leave on_miss out")

    name: ClassVar[str] = "quality"
    needs_probabilities: bool = True

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> Rerouting:
        table = context.losses
        if table is None or any(len(of) != context.layers for of in table.nats.values()):
            raise NotPrepared(
                f"needs the measured losses of {context.layers} layers",
                "measure them with `tiermoe prepare MODEL --losses TEXT`",
            )
        return cls(options.kl, table, options.actions, context.renormalise)

    def __init__(self, kl: float, table: LossTable, actions: Sequence[str] = ACTIONS, renormalise: bool = True) -> None:
        layers = max((len(of) for of in table.nats.values()), default=0)
        self._amplitudes = [table.amplitudes(layer, actions) for layer in range(layers)]
        self._kl, self._renormalise = kl, renormalise
        self._accounts: dict[str, Account] = {}
        self._over: deque[str] = deque()
        self._costs: MissCosts | None = None
        self._price: float | None = None
        self._offered: list[tuple[float, float]] = []  # nats and seconds of this forward's offers
        self._target = 0.0  # nats that this forward's rows may spend
        self._of: list[Account] = []  # of this forward
        self._rows: list[int] = []  # account of each row, -1: exact
        self._exact: list[bool] = []
        self._pairs = [0] * len(ACTIONS)
        self.reset()

    def begin_forward(self, sequences: Sequence[SequenceRows], costs: MissCosts | None) -> None:
        self._set_price()
        for name in take_ended(self._over, sequences):
            self._end(name)
        self._costs, self._of, self._rows, self._target = costs, [], [], 0.0
        for s in sequences:
            number = -1
            if s.decode:
                account = self._accounts.setdefault(s.name, Account())
                account.tokens += s.stop - s.start
                account.recent += s.stop - s.start
                number = len(self._of)
                self._of.append(account)
                self._tokens += s.stop - s.start
                self._target += min(self._left(account), _CARRIED * self._kl * (s.stop - s.start))
            self._rows += [number] * (s.stop - s.start)
        self._exact = [number < 0 for number in self._rows]

    def end_sequence(self, name: str) -> None:
        self._over.append(name)  # from any thread

    def keeps(self, ids: Ids, view: RerouteView) -> bool:
        if not self._of or self._costs is None or len(ids) != len(self._rows):
            return True
        missing = ids[~view.available[ids]]
        return len(missing) == 0 or np.unique(missing).size <= view.vacant

    def reroute(
        self, layer: int, ids: Ids, weights: Weights, probabilities: NDArray[np.floating] | None, view: RerouteView
    ) -> Rerouted:
        assert probabilities is not None
        costs = self._costs
        if costs is None or self.keeps(ids, view):
            return Rerouted(ids, weights)
        found = offers_of(ids, weights, probabilities, view.available, self._amplitudes[layer], self._exact)
        if not found.offers:
            return Rerouted(ids, weights)
        balances = [self._left(account) for account in self._of]
        choice = choose(found.offers, found.misses, self._rows, balances, costs, self._price or 0.0)
        each_s = max(costs.seconds(found.misses) / found.misses, _LEAST)
        self._offered += [(nats, each_s) for nats in choice.nats]
        self._avoided += len(choice.avoided)
        self._paid += len(found.offers) - len(choice.avoided)
        if not choice.avoided:
            return Rerouted(ids, weights)
        for number, nats in choice.spent.items():
            self._of[number].spent += nats
            self._nats += nats
        ids, weights, counts = changed(
            ids, weights, probabilities, view.available, choice.avoided, self._renormalise
        )  # fmt: skip
        self._pairs = [a + b for a, b in zip(self._pairs, counts, strict=True)]
        return Rerouted(ids, weights, counts[SUBSTITUTE], counts[NARROW] + counts[DROP])

    def report(self) -> QualityReport:
        live = [account for account in list(self._accounts.values()) if account.recent]
        most = max([self._most, *(account.spent / account.tokens for account in live)])
        mean = self._nats / self._tokens if self._tokens else 0.0
        return QualityReport(
            self._kl, self._ended + len(live), self._tokens, mean, most, self._avoided, self._paid, *self._pairs
        )

    def reset(self) -> None:
        """Zero what `report` counts; the budgets of requests stay."""
        for account in list(self._accounts.values()):
            account.recent = 0
        self._tokens = self._ended = self._avoided = self._paid = 0
        self._nats = self._most = 0.0
        self._pairs = [0] * len(ACTIONS)

    def _left(self, account: Account) -> float:
        return self._kl * account.tokens - account.spent

    def _end(self, name: str) -> None:
        account = self._accounts.pop(name, None)
        if account is not None and account.recent:
            self._ended += 1
            self._most = max(self._most, account.spent / account.tokens)

    def _set_price(self) -> None:
        """Learn from the last forward's offers."""
        if not self._offered or self._target <= 0.0:
            self._offered = []
            return
        dearest = max(nats / seconds for nats, seconds in self._offered)
        found, before = price_of(self._offered, self._target), self._price
        if found == math.inf:
            found = max(dearest, _MOST_RISE * (before or 0.0))
        found = max(found, _LEAST)
        self._price = found if before is None else before ** (1 - _WEIGHT) * found**_WEIGHT
        self._offered = []


def price_of(offered: Sequence[tuple[float, float]], target: float) -> float:
    """The nats a second at which offers (nats, seconds) cost `target` nats together; infinite: all of them cost less.

    Raises:
        ValueError: there are no offers, or no positive target.
    """
    if not offered or target <= 0:
        raise ValueError("a price is of offers, and of a positive target")
    total, last = 0.0, 0.0
    for nats, seconds in sorted(offered, key=lambda one: one[0] / one[1]):
        if total + nats > target:
            return last or target / seconds  # the first is above it: what would be paid for its seconds
        total, last = total + nats, nats / seconds
    return math.inf
