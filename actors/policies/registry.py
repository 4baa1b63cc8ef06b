"""Policies by decision point and kind.

A class registers itself for a point with a kind, its options and its constructor:

    @register("eviction", "lcp")
    class Lcp(EvictionPolicy):
        class Options(PolicyOptions):
            rho: float = 0.25

        @classmethod
        def make(cls, options: Options, context: PolicyContext) -> Lcp: ...

A preset's `eviction: {kind: lcp, rho: 0.5}` becomes `Lcp.Options`, `eviction: lcp` is short for `{kind: lcp}`, and
`make("eviction", options, context)` gives the policy. For eviction, prefetch, routing and on_miss, the points with a
`policy_base`, `kind: my_package.fifo:Fifo` names a class outside this repository, without registration; what such a
class raises is a `PolicyError` (`foreign`). Kinds without code of their own register only their options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar, Literal, Protocol, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from ..base_settings import Settings
from .foreign import called, failure, guard_options, made

UNKNOWN_KEY = "unknown_option"  # type of pydantic's finding; its context has `key`, and `known` ones
Point = Literal["eviction", "prefetch", "routing", "on_miss", "pre_evict", "placement", "precision", "split"]
C = TypeVar("C", bound=type)


class PolicyOptions(Settings):
    """The options of one policy: a section of a preset.

    Attributes:
        refusal: the error for options of this class under another kind, formatted with point, kind and keys.
    """

    kind: str
    refusal: ClassVar[str] = "{point} {kind} does not use {keys}"

    @property
    def needs(self) -> frozenset[str]:
        """Artifacts of `tiermoe prepare` that it needs: of gates, predictors and profile."""
        return frozenset()

    def check(self, policy: Preset) -> None:
        """Raises ValueError: conflicts with the preset's other sections; the message says what to leave out."""


class Preset(Protocol):
    """What `PolicyOptions.check` reads of a preset (`policy_settings.PolicySettings`)."""

    @property
    def eviction(self) -> PolicyOptions: ...
    @property
    def prefetch(self) -> PolicyOptions: ...
    @property
    def routing(self) -> PolicyOptions: ...
    @property
    def pre_evict(self) -> PolicyOptions: ...
    @property
    def placement(self) -> PolicyOptions: ...
    @property
    def precision(self) -> PolicyOptions: ...
    @property
    def split(self) -> PolicyOptions: ...
    @property
    def maps(self) -> PolicyOptions | None: ...
    @property
    def uses_ndp(self) -> bool: ...

    lossless: bool
    preload: Literal["none", "all"]
    evict_writeback: bool


@dataclass(frozen=True)
class PolicyContext:
    """What policies are made from besides their options.

    Attributes:
        layers, experts: L MoE layers of E experts. top_k: of the routers. hidden: H, width of embeddings.
        one_layer: an eviction policy orders the experts of one layer alone.
        renormalise: whether the model normalises the weights of the experts that it picks.
        seed: of policies that draw.
        eviction: the cache's policy, which prefetch may inform of its predictions; None: no cache.
        map_capacity: C, of expert maps that are searched where the policy runs.
        predictors, profile: of `tiermoe prepare`, see `StridePrefetch`, `ExpertProfile`.
        expert_bytes: of one expert. gpus: that share the experts.
    """

    layers: int
    experts: int
    top_k: int = 1
    hidden: int = 0
    one_layer: bool = False
    renormalise: bool = True
    seed: int = 0
    eviction: object | None = None
    map_capacity: int = 1000
    predictors: Any = None
    profile: Any = None
    expert_bytes: int = 1
    gpus: int = 1


class NotPrepared(ValueError):
    """An artifact of `tiermoe prepare` is missing; the message continues after the policy's name.

    Attributes:
        remedy: the command that makes it.
    """

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


_BASES: dict[str, type] = {}  # point -> what a policy of it is a subclass of
_ANSWERS: dict[str, Callable[[PolicyContext], Any]] = {}  # point -> makes what checks the answers of a policy
_CLASSES: dict[str, dict[str, Any]] = {}  # point -> kind -> class


def policy_base(*points: Point, answers: Callable[[PolicyContext], Any]) -> Callable[[C], C]:
    """A decorator: policies of these points are subclasses of the class.

    Args:
        answers: makes what checks the answers of a policy from outside of this repository (`foreign.made`).
    """

    def registered(cls: C) -> C:
        _BASES.update(dict.fromkeys(points, cls))
        _ANSWERS.update(dict.fromkeys(points, answers))
        return cls

    return registered


def register(point: Point, *kinds: str) -> Callable[[C], C]:
    """A decorator: these kinds name the class at this point."""

    def registered(cls: C) -> C:
        for kind in kinds:
            _CLASSES.setdefault(point, {})[kind] = cls
        return cls

    return registered


def kinds(point: Point) -> list[str]:
    """The registered kinds of a point, in order of registration."""
    return list(_CLASSES[point])


def policy_class(point: Point, kind: str) -> Any:
    """The class that a kind names.

    Raises:
        ValueError: there is no such kind, module or class, or the class is no policy for this point.
        PolicyError: its module raises an exception when it is imported.
    """
    known = _CLASSES[point]
    if kind in known:
        return known[kind]
    module, colon, name = kind.partition(":")
    if not colon:
        raise ValueError(f"no {point} policy '{kind}'; there are {', '.join(known)}; or give my_package.module:Class")
    found = called(kind, "import", getattr, _imported(point, kind, module), name, None)
    if found is None:
        raise ValueError(f"{point} '{kind}': module {module} has no class {name}")
    base = _BASES.get(point, PolicyOptions)
    if not isinstance(found, type) or not issubclass(found, base):
        raise ValueError(f"{point} '{kind}' is no policy: it must be a subclass of {base.__module__}.{base.__name__}")
    chosen = _options_of(found)
    if not isinstance(chosen, type) or not issubclass(chosen, PolicyOptions):
        raise ValueError(f"{point} '{kind}' is no policy: its Options are no {PolicyOptions.__name__}")
    guard_options(chosen, kind)
    return found


def _imported(point: Point, kind: str, module: str) -> ModuleType:
    """The module of a class outside this repository; raises as `policy_class`."""
    try:
        found: ModuleType = called(kind, "import", import_module, module, passing=ModuleNotFoundError)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):  # not one that the module imports
            raise ValueError(f"{point} '{kind}': {error}; the folder of the package must be on PYTHONPATH") from error
        raise failure(kind, "import", error) from error
    return found


def options(point: Point, value: Any, default: str = "") -> Any:
    """The options in a section of a preset, validated by the policy that it names.

    Args:
        value: a kind, a mapping of options, or options. default: the kind of a mapping without one.

    Raises:
        ValueError: there is no such policy, or the options are of another kind.
        ValidationError: a value is out of range. PydanticCustomError: a key is unknown (`UNKNOWN_KEY`).
    """
    if isinstance(value, PolicyOptions):
        return value
    values = {"kind": value} if isinstance(value, str) else dict(value) if isinstance(value, Mapping) else None
    if values is None:
        raise ValueError(f"{point} is {value!r}; give a kind, or a mapping with kind and its options")
    kind = str(values.setdefault("kind", default))
    cls = options_class(point, kind)
    foreign: dict[type[PolicyOptions], list[str]] = {}
    strangers = set(values) - set(_keys(cls)) if kind in _CLASSES[point] else set()
    for key in sorted(strangers):
        owner = next((o for o in map(_options_of, _CLASSES[point].values()) if key in o.model_fields), None)
        if owner is not None:
            if values[key] == owner.model_fields[key].get_default():
                del values[key]  # of no effect
            else:
                foreign.setdefault(owner, []).append(key)
    for owner, keys in foreign.items():
        raise ValueError(owner.refusal.format(point=point, kind=kind, keys=", ".join(keys)))
    try:
        return called(kind, "Options()", cls.model_validate, values, passing=ValueError)
    except ValidationError as error:
        raise _unknown_key(cls, error) or error from None


def _unknown_key(cls: type[PolicyOptions], error: ValidationError) -> PydanticCustomError | None:
    """What says which keys there are, if the first finding is a key that there is not: pydantic does not."""
    finding = error.errors(include_url=False, include_context=False)[0]
    if finding["type"] != "extra_forbidden":
        return None
    model: Any = cls
    for part in finding["loc"][:-1]:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        members = () if field is None else (field.annotation, *get_args(field.annotation))
        model = next((m for m in members if isinstance(m, type) and issubclass(m, BaseModel)), None)
        if model is None:
            return None
    key, known = ".".join(map(str, finding["loc"])), sorted(_keys(model))
    context = {"key": key, "known": ", ".join(known)}
    return PydanticCustomError(UNKNOWN_KEY, "Extra inputs are not permitted: '{key}'; known keys: {known}", context)


def _keys(model: type[BaseModel]) -> list[str]:
    """The names by which values of its fields are given."""
    fields = model.model_fields.items()
    by_name = model.model_config.get("populate_by_name") or model.model_config.get("validate_by_name")
    aliases = [field.validation_alias for _, field in fields if isinstance(field.validation_alias, str)]
    return aliases + [name for name, field in fields if by_name or not isinstance(field.validation_alias, str)]


def make(point: Point, options: PolicyOptions, context: PolicyContext) -> Any:
    """The policy in its first state; None for a kind without code.

    Raises:
        NotPrepared: `context` lacks an artifact. ValueError: options and context are incompatible.
        PolicyError: the class is from outside of this repository, and raises something else.
    """
    kind = options.kind
    cls = policy_class(point, kind)
    if issubclass(cls, PolicyOptions):
        return None
    if kind in _CLASSES[point]:
        return cls.make(options, context)
    return made(kind, cls, _BASES[point], _ANSWERS[point](context), options, context, passing=NotPrepared)


def options_class(point: Point, kind: str) -> type[PolicyOptions]:
    """The options of a kind; raises as `policy_class`."""
    return _options_of(policy_class(point, kind))


def _options_of(cls: Any) -> type[PolicyOptions]:
    found: type[PolicyOptions] = cls if issubclass(cls, PolicyOptions) else cls.Options
    return found
