"""A policy from outside of this repository that fails says so in one line: class, hook, file, line, exception."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiermoe.actors.policies.prefetch import LayerSeen, Span, Wanted
from tiermoe.actors.policies.registry import NotPrepared, PolicyContext, make, options
from tiermoe.actors.policies.routing import RerouteView
from tiermoe.actors.policies.slot_classes import make_eviction
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.cluster.config import load_policy
from tiermoe.errors import ConfigError, PolicyError, StoreError

HEAD = """
from functools import lru_cache
import numpy as np
from pydantic import Field, field_validator
from tiermoe.actors.policies.eviction import EvictionPolicy, Lfu, Lru, first_evictable
from tiermoe.actors.policies.prefetch import PrefetchOptions, PrefetchPolicy, Wanted, WantedKeys
from tiermoe.actors.policies.registry import NotPrepared, PolicyOptions
from tiermoe.actors.policies.routing import MissOptions, Rerouted, Rerouting, RoutingOptions
from tiermoe.errors import StoreError
"""
FIFO = """
class Fifo(EvictionPolicy):
    def __init__(self): self.order = {}
    def admitted(self, key): self.order[key] = None
    def used(self, keys): pass
    def removed(self, key): del self.order[key]
    def victims(self, count, evictable): return first_evictable(self.order, count, evictable)
"""
CONTEXT = PolicyContext(2, 4, top_k=2)
SEEN = LayerSeen(0, [Span("a", 0, 1, False)], np.array([[0, 1]]), None, lambda distance: None)
IDS, WEIGHTS = np.array([[0, 1]]), np.array([[0.75, 0.25]], np.float32)
VIEW = RerouteView(np.ones(4, bool), 0, 2)


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Writes the source of a module in a package, and gives the kind of its class Fifo; `#!` marks the failing line."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_policies").mkdir()
    (tmp_path / "my_policies" / "__init__.py").touch()

    def write(source: str) -> str:
        (tmp_path / "my_policies" / "broken.py").write_text(HEAD + source)
        return "my_policies.broken:Fifo"

    yield write
    for name in [name for name in sys.modules if name.split(".")[0] == "my_policies"]:
        del sys.modules[name]


def line_of(source: str) -> int:
    """The number of the marked line."""
    return next(i for i, line in enumerate((HEAD + source).splitlines(), 1) if "#!" in line)


def failing(source: str, hook: str, said: str) -> str:
    """The pattern of the whole message."""
    at = rf", broken\.py:{line_of(source)}"
    shown = f"policy my_policies.broken:Fifo failed in {re.escape(hook)}{at}: {said}"
    return f"^{shown}; mend it, or choose another policy$"


def eviction(kind: str) -> Any:
    return make("eviction", options("eviction", kind), CONTEXT)


@pytest.mark.parametrize(
    ("hook", "call"),
    [
        ("admitted(self, key)", lambda it: it.admitted(1)),
        ("used(self, keys)", lambda it: it.used([1])),
        ("removed(self, key)", lambda it: it.removed(1)),
        ("routed(self, keys, counts, tokens)", lambda it: it.routed([1], [1], 1)),
        ("ranked(self, keys)", lambda it: it.ranked([1])),
        ("victims(self, count, evictable)", lambda it: it.victims(1, lambda key: True)),
    ],
)
def test_each_hook_of_eviction(broken: Any, hook: str, call: Any) -> None:
    source = FIFO + f"    def {hook}:\n        return {{}}['boom']  #!\n"
    policy = eviction(broken(source))
    with pytest.raises(PolicyError, match=failing(source, f"{hook.split('(')[0]}()", "KeyError: 'boom'")) as found:
        call(policy)
    assert isinstance(found.value.__cause__, KeyError)  # with its traceback


@pytest.mark.parametrize(
    ("hook", "call"),
    [
        ("begin_forward(self, spans)", lambda it: it.begin_forward(SEEN.spans)),
        ("observed(self, seen)", lambda it: it.observed(SEEN)),
        ("end(self, sequence)", lambda it: it.end("a")),
    ],
)
def test_each_hook_of_prefetch(broken: Any, hook: str, call: Any) -> None:
    source = "class Fifo(PrefetchPolicy):\n    name = 'x'\n    def observed(self, seen): return []\n"
    source += f"    def {hook}:\n        raise RuntimeError()  #!\n"
    policy = make("prefetch", options("prefetch", broken(source)), CONTEXT)
    with pytest.raises(PolicyError, match=failing(source, f"{hook.split('(')[0]}()", "RuntimeError")):
        call(policy)


def test_a_property_and_a_static_method(broken: Any) -> None:
    source = (
        "class Fifo(PrefetchPolicy):\n    name = 'x'\n    @property\n    def looks_ahead(self): return self.gone  #!\n"
        "    @staticmethod\n    def observed(seen): return [Wanted(seen.layer + 4, 1.0)]\n"
    )
    policy = make("prefetch", options("prefetch", broken(source)), CONTEXT)
    with pytest.raises(PolicyError, match=failing(source, "looks_ahead", "AttributeError: .*'gone'")):
        _ = policy.looks_ahead
    assert policy.observed(SEEN) == [Wanted(4, 1.0)]


@pytest.mark.parametrize("point", ["routing", "on_miss"])
@pytest.mark.parametrize(
    ("hook", "call"),
    [
        ("measured(self, link_bytes_per_s)", lambda it: it.measured(1.0)),
        ("keeps(self, ids, view)", lambda it: it.keeps(IDS, VIEW)),
        (
            "reroute(self, layer, ids, weights, probabilities, view)",
            lambda it: it.reroute(0, IDS, WEIGHTS, None, VIEW),
        ),
    ],
)
def test_each_hook_of_rerouting(broken: Any, point: Any, hook: str, call: Any) -> None:
    base = "MissOptions" if point == "on_miss" else "RoutingOptions"
    source = f"class Fifo(Rerouting):\n    name, Options = 'x', {base}\n"
    source += "    def reroute(self, *given): return None\n"
    source += f"    def {hook}:\n        assert 1 == 2, 'two\\nlines'  #!\n"
    rule = make(point, options(point, broken(source)), CONTEXT)
    with pytest.raises(PolicyError, match=failing(source, f"{hook.split('(')[0]}()", "AssertionError: two lines")):
        call(rule)


def test_the_line_is_the_last_one_of_the_users_own_code(broken: Any, tmp_path: Path) -> None:
    """Not that of NumPy, of this repository's helpers or of the hook, but of a function, a lambda, another module."""
    (tmp_path / "my_policies" / "helper.py").write_text("def key(found):\n    return found[3]\n")
    cases = {
        "return [helper()]": "def helper():\n    return np.zeros(2).reshape(7)  #!\n",
        "return first_evictable([1], count, lambda key: {}[key])  #!": "",
        "return first_evictable(None, count, evictable)  #!": "",
    }
    for body, extra in cases.items():
        source = extra + FIFO + f"    def victims(self, count, evictable): {body}\n"
        policy = eviction(broken(source))
        with pytest.raises(PolicyError, match=f"victims\\(\\), broken.py:{line_of(source)}: "):
            policy.victims(1, lambda key: True)
        del sys.modules["my_policies.broken"]
    source = "from .helper import key\n" + FIFO + "    def victims(self, count, evictable): return key({})\n"
    with pytest.raises(PolicyError, match=r"failed in victims\(\), helper.py:2: KeyError: 3"):
        eviction(broken(source)).victims(1, lambda key: True)


@pytest.mark.parametrize(
    ("source", "hook", "said"),
    [
        (FIFO.replace("def __init__(self): ", "def __init__(self):\n        int('x')  #!\n        "), "__init__()",
         "ValueError: invalid literal for int.*"),
        (FIFO + "    @classmethod\n    def make(cls, options, context):\n        context.nothing  #!\n", "make()",
         "AttributeError: .*"),
        (FIFO + "    @classmethod  #!\n    def make(cls, options, context):\n        return None\n", "make()",
         "TypeError: it answered None, not a EvictionPolicy"),
        (FIFO + "    @classmethod\n    def make(cls, options, context):\n        exit_code = 3\n"
         "        raise SystemExit(exit_code)  #!\n", "make()", "SystemExit: 3"),
    ],
)  # fmt: skip
def test_making_it(broken: Any, source: str, hook: str, said: str) -> None:
    with pytest.raises(PolicyError, match=failing(source, hook, said)):
        eviction(broken(source))


def test_a_class_that_lacks_a_hook(broken: Any) -> None:
    source = "class Fifo(EvictionPolicy):\n    def used(self, keys): pass\n"
    with pytest.raises(PolicyError, match=r"failed in __init__\(\).*abstract"):
        eviction(broken(source))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f(:  #!\n", "SyntaxError: .*"),
        ("if True:\npass  #!\n", "IndentationError: .*"),
        ("import no_such_module  #!\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("from numpy import no_such_name  #!\n", "ImportError: cannot import name .*"),
        ("from . import no_such_sibling  #!\n", "ImportError: cannot import name .*"),
        ("x = {}['boom']  #!\n", "KeyError: 'boom'"),
        ("raise SystemExit('bye')  #!\n", "SystemExit: bye"),
        ("class Fifo(EvictionPolicy):\n    class Options(PolicyOptions):\n        x: No = 3  #!\n", "NameError: .*"),
    ],
)
def test_a_module_that_cannot_be_imported(broken: Any, source: str, said: str) -> None:
    kind = broken(source)
    with pytest.raises(PolicyError, match=failing(source, "import", said)):
        PolicySettings.model_validate({"name": "x", "lossless": True, "eviction": kind})


def test_options(broken: Any) -> None:
    """A ValueError refuses a value, as anywhere; another exception is a failure."""
    own = (
        "class Fifo(Lru):\n    class Options(PolicyOptions):\n        spare: int = 0\n"
        "        @field_validator('spare')\n        @classmethod\n        def _even(cls, value):\n"
        "            if value == 1: raise ValueError('give an even number')\n"
        "            return value if value != 3 else {}['boom']  #!\n"
        "        def check(self, policy):\n            if self.spare == 5: raise ValueError('leave spare out')\n"
        "            if self.spare == 7: policy.nothing\n"
        "        @property\n        def needs(self): return frozenset([1 // (self.spare - 9)])\n"
    )
    kind = broken(own)

    def preset(spare: int) -> PolicySettings:
        sections = {"eviction": {"kind": kind, "spare": spare}}
        return PolicySettings.model_validate({"name": "x", "lossless": True} | sections)

    assert preset(2).eviction.model_dump() == {"kind": kind, "spare": 2}
    with pytest.raises(ValueError, match="give an even number"):
        preset(1)
    with pytest.raises(ValueError, match="leave spare out"):
        preset(5)
    with pytest.raises(PolicyError, match=failing(own, "Options()", "KeyError: 'boom'")):
        preset(3)
    with pytest.raises(PolicyError, match=r"failed in Options.check\(\), broken.py:\d+: AttributeError"):
        preset(7)
    with pytest.raises(PolicyError, match=r"failed in Options.needs, broken.py:\d+: ZeroDivisionError"):
        _ = preset(9).needs


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("None", "TypeError: it answered None, not a list of keys"),
        ("(key for key in self.order)", "TypeError: it answered a generator, not a list of keys"),
        ("np.array([1])", "TypeError: it answered a ndarray, not a list of keys"),
        ("[1.0]", "TypeError: it answered a float as a key"),
        ("[7]", "ValueError: it answered key 7, which has no slot"),
        ("[3]", "ValueError: it answered key 3, which cannot be evicted now .*"),
        ("[1, 1]", "ValueError: it answered a key twice: .*"),
        ("[1, 2, 0]", "ValueError: it answered 3 keys where 2 were asked for"),
        ("[1]", "ValueError: it answered 1 of 2 keys, and could have answered key 0"),
    ],
)
def test_wrong_victims(broken: Any, answer: str, said: str) -> None:
    source = FIFO + f"    def victims(self, count, evictable):  #!\n        return {answer}\n"
    policy = eviction(broken(source))
    for key in range(4):
        policy.admitted(key)
    with pytest.raises(PolicyError, match=failing(source, "victims()", said)):
        policy.victims(2, lambda key: key != 3)


def test_right_victims(broken: Any) -> None:
    policy = eviction(broken(FIFO + "    def ranked(self, keys): return tuple(np.array(keys))\n"))
    for key in (2, 0, 1):
        policy.admitted(key)
    assert policy.victims(2, lambda key: key != 0) == [2, 1]
    assert policy.victims(3, lambda key: key != 0) == [2, 1]
    policy.removed(2)
    assert policy.victims(1, lambda key: True) == [0]
    assert policy.victims(0, lambda key: True) == []
    assert [type(key) for key in policy.ranked([1, 0])] == [int, int]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("None", "TypeError: it answered None, not a list of Wanted"),
        ("(Wanted(4, 1.0) for _ in '1')", "TypeError: it answered a generator, not a list of Wanted"),
        ("[4, 5]", "TypeError: it answered a list with something in it that is no Wanted.*"),
        ("[Wanted(8, 1.0)]", "ValueError: it answered key 8; keys are 0 to 7"),
        ("[Wanted(-1, 1.0)]", "ValueError: it answered key -1; keys are 0 to 7"),
        ("[Wanted(4.0, 1.0)]", "TypeError: it answered a float as a key"),
        ("[Wanted('4', 1.0)]", "TypeError: .*"),
        ("[Wanted(4, 1.0), Wanted(4, 0.5)]", "ValueError: it answered a key twice: .*"),
        ("WantedKeys([[4, 9]], [1.0, 0.5])", "ValueError: it answered key 9; keys are 0 to 7"),
        ("WantedKeys([[4, 5]], [1.0])", "ValueError: it answered 1 priorities for 2 keys"),
    ],
)
def test_wrong_prefetches(broken: Any, answer: str, said: str) -> None:
    source = "class Fifo(PrefetchPolicy):\n    name = 'x'\n"
    source += f"    def observed(self, seen):  #!\n        return {answer}\n"
    policy = make("prefetch", options("prefetch", broken(source)), CONTEXT)
    with pytest.raises(PolicyError, match=failing(source, "observed()", said)):
        policy.observed(SEEN)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("None", "TypeError: it answered None, not Rerouted"),
        ("Rerouted([[0, 1]], weights)", "TypeError: it answered ids that are a list, not int64 .*"),
        ("Rerouted(ids[:, :1], weights)", "TypeError: it answered ids that are int64 .*"),
        ("Rerouted(ids, weights[:, :1])", "TypeError: it answered weights that are float32 .*"),
        ("Rerouted(ids + 3, weights, substituted=2)", "ValueError: it answered ids that are no experts; .*"),
        ("Rerouted(ids, weights * np.nan, dropped=1)", "ValueError: it answered weights that are not finite"),
        ("Rerouted(ids + 1, weights)", "ValueError: it answered another routing, and counts no pair .*"),
    ],
)
def test_wrong_routings(broken: Any, answer: str, said: str) -> None:
    source = "class Fifo(Rerouting):\n    name, Options = 'x', RoutingOptions\n"
    source += f"    def reroute(self, layer, ids, weights, probabilities, view):  #!\n        return {answer}\n"
    rule = make("routing", options("routing", broken(source)), CONTEXT)
    with pytest.raises(PolicyError, match=failing(source, "reroute()", said)):
        rule.reroute(0, IDS, WEIGHTS, None, VIEW)


def test_errors_of_ours_and_interrupts_pass(broken: Any) -> None:
    policy = eviction(broken(FIFO + "    def used(self, keys): raise keys[0]\n    def removed(self, key): key()\n"))
    for error in (StoreError("gone", "wait"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            policy.used([error])
    with pytest.raises(PolicyError, match="SystemExit: 3"):  # it would end a thread without a word
        policy.used([SystemExit(3)])
    cli: dict[str, Any] = {"__name__": "tiermoe.cluster.cli"}
    exec("def ended(): raise SystemExit(143)", cli)  # as by SIGTERM's handler, in the midst of a hook
    with pytest.raises(SystemExit):
        policy.removed(cli["ended"])


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("raise GeneratorExit", "GeneratorExit"),
        ("raise BaseException('boom')", "BaseException: boom"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),  # its own: the program has a handler
        ("import argparse; argparse.ArgumentParser(add_help=False).parse_args(['x'])", "SystemExit: 2"),
        ("raise Silent", "Silent"),
    ],
)
def test_whatever_is_raised_is_one_line(broken: Any, raised: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exceptions that are no `Exception`, and one that cannot say what it is, ended a command with a traceback."""
    monkeypatch.setattr(signal, "getsignal", lambda number: lambda *_: None)
    source = "class Silent(BaseException):\n    def __str__(self): raise KeyError\n" + FIFO
    policy = eviction(broken(source + f"    def used(self, keys):\n        {raised}  #!\n"))
    with pytest.raises(PolicyError, match=rf"failed in used\(\), broken.py:\d+: {said}; mend it"):
        policy.used([1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"spar": 8}, "unknown key 'eviction.spar'; did you mean 'spare'?"),
        ({"zzz": 8}, "unknown key 'eviction.zzz'; known keys: inner, kind, spare"),
        ({"inner": {"dept": 1}}, "unknown key 'eviction.inner.dept'; did you mean 'depth'?"),
        ({"rho": 0.25}, "unknown key 'eviction.rho'; known keys: inner, kind, spare"),  # another policy's default
    ],
)
def test_an_unknown_option_names_those_of_the_policy(
    broken: Any, tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    """`known keys: kind` was all that a preset's reader said."""
    kind = broken(
        "from pydantic import BaseModel\nclass Inner(BaseModel, extra='forbid'):\n    depth: int = 0\n" + FIFO
        + "    class Options(PolicyOptions):\n        spare: int = 0\n        inner: Inner = Inner()\n"
    )  # fmt: skip
    preset = tmp_path / "own.yaml"
    preset.write_text(json.dumps({"name": "own", "lossless": True, "eviction": {"kind": kind, **given}}))
    with pytest.raises(ConfigError) as refused:
        load_policy(str(preset))
    assert message in str(refused.value)


def test_what_its_base_refuses_stays_a_refusal(broken: Any) -> None:
    kind = broken("class Fifo(Lfu):\n    @classmethod\n    def make(cls, options, context):\n"
                  "        raise NotPrepared('needs a profile', 'make one')\n")  # fmt: skip
    with pytest.raises(NotPrepared):
        eviction(kind)


@pytest.mark.parametrize(
    "source",
    [
        FIFO + "    @staticmethod\n    def make(options, context): return Fifo()\n",
        FIFO.replace("self.order = {}", "self.order = {}; self.victims = self._first")
        + "    def _first(self, count, evictable): return first_evictable(self.order, count, evictable)\n",
        FIFO.replace("class Fifo(EvictionPolicy):", "class Mixin:") + "class Fifo(Mixin, EvictionPolicy): pass\n",
        FIFO.replace("class Fifo(EvictionPolicy):", "class Base(EvictionPolicy):\n    __slots__ = ('order',)")
        + "class Fifo(Base): __slots__ = ()\n",
    ],
)
def test_however_it_is_written_it_works_and_is_guarded(broken: Any, source: str) -> None:
    chosen = options("eviction", broken(source))
    for split in (True, False):
        policy = make_eviction(chosen, CONTEXT, split=split)
        policy.admitted(1)
        assert policy.victims(1, lambda key: True) == [1]
    with pytest.raises(PolicyError, match=r"^policy my_policies.broken:Fifo failed in removed\(\), \w+.py:\d+: Key"):
        policy.removed(3)
    with pytest.raises(PolicyError, match=r"failed in victims\(\), \w+.py:\d+: TypeError"):
        policy.victims(1, None)
