"""Prefetch that hurts rests, and comes back to probe."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tiermoe.actors.policies.prefetch import PrefetchGovernor


def governor(min_useful: float = 0.5) -> PrefetchGovernor:
    return PrefetchGovernor(min_useful, window=4, rest=3)


def answers(tested: PrefetchGovernor, layers: int) -> list[bool]:
    return [tested.allows() for _ in range(layers)]


def test_allows_before_a_window_has_closed() -> None:
    tested = governor()
    tested.wasted(3)
    assert answers(tested, 5) == [True] * 5


def test_rests_exactly_as_long_as_told_after_a_bad_window() -> None:
    tested = governor()
    tested.used(1)
    tested.wasted(3)
    assert tested.allows() is False
    assert tested.resting
    assert answers(tested, 4) == [False, False, True, True]
    assert not tested.resting


def test_a_window_at_the_threshold_is_good() -> None:
    tested = governor()
    tested.used(2)
    tested.wasted(2)
    assert answers(tested, 3) == [True] * 3


def test_each_window_is_judged_alone() -> None:
    tested = governor()
    tested.used(4)
    assert tested.allows()
    tested.wasted(4)
    assert not tested.allows()


def test_zero_never_rests() -> None:
    tested = governor(min_useful=0.0)
    for _ in range(5):
        tested.wasted(10)
        assert tested.allows()


def test_what_was_prefetched_before_the_rest_is_not_held_against_the_next_window() -> None:
    """Guards a rest that never ended: leftovers evicted during it filled the next window before one probe."""
    tested = governor()
    tested.wasted(4)
    assert not tested.allows()
    tested.wasted(4)
    assert answers(tested, 6) == [False, False, True, True, True, True]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["used", "wasted", "layer"]), max_size=80),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    st.integers(1, 6),
    st.integers(1, 5),
)
def test_follows_the_transcription(events: list[str], min_useful: float, window: int, rest: int) -> None:
    tested = PrefetchGovernor(min_useful, window, rest)
    outcomes: list[bool] = []
    layers_to_rest, fresh = 0, False
    for event in events:
        if event != "layer":
            getattr(tested, event)()
            outcomes.append(event == "used")
            continue
        expected = True
        if layers_to_rest:
            layers_to_rest -= 1
            expected = False
        elif fresh:
            outcomes, fresh = [], False
        elif len(outcomes) >= window:
            if sum(outcomes) < min_useful * len(outcomes):
                layers_to_rest, fresh, expected = rest - 1, True, False
            outcomes = []
        assert tested.allows() is expected
