"""Policies by kind: what a preset's sections become, and classes that are not in this repository."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from policy_presets import POLICIES
from pydantic import ValidationError

from tiermoe.actors.policies.eviction import Lfu
from tiermoe.actors.policies.moepic import Lcp
from tiermoe.actors.policies.registry import PolicyContext, kinds, make, options
from tiermoe.actors.policies.slot_classes import make_eviction
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.cluster.config import load_policy
from tiermoe.errors import ConfigError

FIFO = """
from tiermoe.actors.policies.eviction import EvictionPolicy
from tiermoe.actors.policies.registry import PolicyOptions

class Fifo(EvictionPolicy):
    class Options(PolicyOptions):
        skip: int = 0

    @classmethod
    def make(cls, options, context):
        made = cls()
        made.order, made.skip = [], options.skip
        return made

    def admitted(self, key):
        self.order.append(key)

    def used(self, keys):
        pass

    def removed(self, key):
        self.order.remove(key)

    def victims(self, count, evictable):
        return [key for key in self.order[self.skip :] if evictable(key)][: max(0, count)]

class NoPolicy:
    pass
"""


def preset(**sections: object) -> PolicySettings:
    return PolicySettings.model_validate({"name": "x", "lossless": True} | sections)


def test_a_section_is_a_kind_or_its_options() -> None:
    assert preset(eviction="lcp") == preset(eviction={"kind": "lcp"}) == preset(eviction={"kind": "lcp", "rho": 0.25})
    assert preset(eviction={"kind": "lcp", "rho": 0.5}).eviction == Lcp.Options(kind="lcp", rho=0.5)
    assert preset(prefetch={"min_useful": 0.5}).prefetch.kind == "none"
    made = make("eviction", preset(eviction={"kind": "lfu", "half_life": 2.0}).eviction, PolicyContext(2, 3))
    assert isinstance(made, Lfu)


@pytest.mark.parametrize("name", POLICIES)
def test_presets_come_back_from_what_is_sent(name: str) -> None:
    policy = load_policy(name)
    assert PolicySettings.model_validate(policy.model_dump()) == policy
    assert PolicySettings.model_validate_json(policy.model_dump_json()) == policy


_BUDDIES = {"lossless": False, "on_miss": "substitute"}
_LOW_BIT = {"lossless": False, "on_miss": "low-bit"}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"eviction": {"kind": "lru", "rho": 0.5}}, "eviction lru does not use rho"),
        ({"eviction": {"kind": "lcp", "rho": 1.5}}, "less than 1"),
        ({"eviction": {"kind": "lcp", "roh": 0.5}}, "Extra inputs"),
        ({"eviction": 3}, "give a kind"),
        ({"placement": "auto"}, "need each other"),
        ({"eviction": "worth"}, "need each other"),
        ({"eviction": "worth", "placement": {"kind": "auto", "hot_per_layer": 2}}, "leave hot_per_layer"),
        ({"eviction": "worth", "placement": "auto", "prefetch": "popularity"}, "leave prefetch"),
        ({"eviction": "fifo"}, "no eviction policy 'fifo'; there are lru, .*; or give my_package.module:Class"),
        ({"eviction": "no_package.fifo:Fifo"}, "No module named 'no_package'; .*PYTHONPATH"),
        # moepic's split
        ({"split": {"kind": "off", "theta": 0.4}}, "leave theta out"),
        ({"split": {"kind": "fixed", "tau": 10}}, "tau: only an adaptive split"),
        ({"split": {"kind": "fixed", "theta": 1.5}}, "less than or equal to 1"),
        ({"split": {"kind": "fixed"}, "preload": "all"}, "leave preload out"),
        ({"split": {"kind": "fixed"}, "placement": {"kind": "monde"}}, "moves whole experts"),
        (
            {"split": {"kind": "fixed"}, "eviction": "expert-map", "prefetch": {"kind": "expert-map"}},
            "split those of each apart",
        ),
        # activeevict
        ({"eviction": "importance"}, "pre_evict"),
        ({"lossless": False, "routing": {"kind": "budget-aware"}}, "pre_evict"),
        ({"routing": {"kind": "budget-aware"}, "pre_evict": {"kind": "release-target"}}, "not lossless"),
        ({"pre_evict": {"kind": "release-target"}, "preload": "all"}, "preload"),
        ({"pre_evict": {"kind": "release-target"}, "split": {"kind": "fixed"}}, "split"),
        ({"evict_writeback": True, "split": {"kind": "fixed"}}, "split"),
        # buddymoe
        (_BUDDIES | {"on_miss": "load", "substitution": {"rho": 3}}, "does not use substitution's rho"),
        (_BUDDIES | {"on_miss": "drop", "substitution": {"rho": 3}}, "does not use substitution's rho"),
        (_BUDDIES | {"on_miss": "random", "substitution": {"alpha": 0.5}}, "does not use substitution's alpha"),
        (_BUDDIES | {"substitution": {"tau": 0.5, "percentile": 10}}, "either given or a percentile"),
        (_BUDDIES | {"substitution": {"beta": 0.5, "link_ms": 1}}, "adapts to link_ms"),
        (_BUDDIES | {"substitution": {"temperature": 1.1}}, "of the gates by entropy"),
        (_BUDDIES | {"substitution": {"mix": 0.1}}, "of the ranking by a blend"),
        (_BUDDIES | {"substitution": {"by": "output", "weighted": True}}, "leaves out"),
        # hobbit
        (_LOW_BIT | {"on_miss": "load", "low_bit": {"bits": 2}}, "does not use low_bit"),
        (_LOW_BIT | {"preload": "all"}, "leave preload out"),
        (_LOW_BIT | {"pre_evict": {"kind": "release-target"}}, "leave split and pre_evict out"),
        (_LOW_BIT | {"eviction": "expert-map", "prefetch": {"kind": "expert-map"}}, "maps weigh experts in full"),
        (_LOW_BIT | {"low_bit": {"guesses": False}, "prefetch": "none"}, "guesses is of prefetch next-gate"),
        (_LOW_BIT | {"lossless": True}, "not lossless"),
        (_LOW_BIT | {"placement": {"kind": "context"}}, "leave routing and on_miss out"),
    ],
)
def test_refused(sections: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        preset(**sections)


def test_options_of_another_kind_that_say_nothing_are_left_out() -> None:
    """As presets that were written out whole, or that change another preset's kind, have them."""
    assert preset(eviction={"kind": "lru", "rho": 0.25}) == preset()


def test_former_sections() -> None:
    former = preset(lossless=False, on_miss="substitute", substitution={"alpha": 0.75})
    assert former == preset(lossless=False, on_miss={"kind": "substitute", "alpha": 0.75})
    former = preset(lossless=False, on_miss="low-bit", low_bit={"bits": 2})
    assert former == preset(lossless=False, on_miss={"kind": "low-bit", "bits": 2})
    former = preset(eviction="importance", pre_evict={"kind": "release-target", "alpha": 1.0})
    assert former == preset(eviction={"kind": "importance", "alpha": 1.0}, pre_evict="release-target")


def test_a_class_outside_of_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_fifo.py").write_text(FIFO)
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nlossless: true\neviction: {kind: 'my_fifo:Fifo', skip: 1}\n")
    policy = load_policy(str(file))
    for split in (False, True):
        made = make_eviction(policy.eviction, PolicyContext(2, 3), split=split)
        for key in (2, 0, 1):
            made.admitted(key)
        assert made.victims(3, lambda key: True) == [0, 1]
    for kind, message in (("my_fifo:Lifo", "no class Lifo"), ("my_fifo:NoPolicy", "is no policy: .*EvictionPolicy")):
        file.write_text(f"name: mine\nlossless: true\neviction: '{kind}'\n")
        with pytest.raises(ConfigError, match=message):
            load_policy(str(file))
    sys.modules.pop("my_fifo")


def test_every_kind_of_eviction_is_made_or_says_why_not() -> None:
    for kind in kinds("eviction"):
        chosen = options("eviction", kind)
        made = make("eviction", chosen, PolicyContext(2, 3))
        if made.per_layer:
            make_eviction(chosen, PolicyContext(2, 3), split=True).admitted(4)
        else:
            with pytest.raises(ValueError, match="no order for the experts of one layer"):
                make_eviction(chosen, PolicyContext(2, 3), split=True)
