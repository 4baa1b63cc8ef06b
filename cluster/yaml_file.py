"""YAML files into dictionaries, and pydantic's findings into one line that a user can act on."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from ..actors.policies.registry import UNKNOWN_KEY
from ..errors import ConfigError, reason

_UNPREFIXED = ("cluster", "kv")  # sections whose command-line options do not begin with their name
# but for these, whose names say too little alone
_NAMED = {("kv", name): f"--kv-{name}" for name in ("tokens", "dtype")}


_MOST_NODES = 100_000  # of a file, its aliases written out


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice, since the second would silently win, and aliases without end."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        sizes: dict[int, int] = {}  # by the node; 0: it is being counted

        def size(node: yaml.Node) -> int:
            if id(node) not in sizes:
                sizes[id(node)] = 0
                pairs = isinstance(node, yaml.MappingNode)
                below = [n for pair in node.value for n in pair] if pairs else node.value
                sizes[id(node)] = 1 if isinstance(node, yaml.ScalarNode) else 1 + sum(map(size, below))
            if not 0 < sizes[id(node)] <= _MOST_NODES:
                problem = "an alias contains itself, or aliases repeat too much"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
            return sizes[id(node)]

        if node is not None:
            size(node)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key '{name}' occurs twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping.

    Raises:
        ConfigError: unreadable file, malformed YAML, a duplicate key, or something that is not a mapping.
    """
    try:
        # the loader derives from SafeLoader, so this is yaml.safe_load with one more check
        content = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=_StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read '{path}': {reason(error)}", "give a readable UTF-8 YAML file") from error
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            problem = f"line {error.problem_mark.line + 1}: {error.problem}"
        raise ConfigError(f"'{path}' is not valid YAML: {problem}", "correct that line") from error
    except (ValueError, RecursionError) as error:  # an invalid date or number, endless nesting
        raise ConfigError(f"'{path}' is not valid YAML: {error}", "correct that value") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"'{path}' is not a mapping of names to values", "write one `key: value` a line")
    return content


def merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`top` over `base`, sections joined key by key."""
    out = dict(base)
    for key, value in top.items():
        below = out.get(key)
        out[key] = merged(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return out


def option_name(*path: str) -> str:
    """The command-line option of a key: `--link-gbps` of link, gbps."""
    if path in _NAMED:
        return _NAMED[path]
    named = path[1:] if len(path) > 1 and path[0] in _UNPREFIXED else path
    return f"--{'-'.join(named).replace('_', '-')}"


def explain(
    error: ValidationError, model: type[BaseModel], source: str, options: Mapping[str, Any] | None = None
) -> ConfigError:
    """The first finding of pydantic as a ConfigError.

    Args:
        error: what pydantic found.
        model: the model that was being built.
        source: the file that the values came from.
        options: command-line options that overrode the file; a finding in one of them is reported as the option.
    """
    findings = error.errors(include_url=False)
    finding = findings[0]
    loc = [str(part) for part in finding["loc"]]
    parent, field = _locate(model, loc)
    if finding["type"] in ("extra_forbidden", UNKNOWN_KEY):
        known = sorted(parent.model_fields) if parent is not None else []
        if finding["type"] == UNKNOWN_KEY:  # of a policy's options
            loc, known = [*loc, *finding["ctx"]["key"].split(".")], finding["ctx"]["known"].split(", ")
        close = difflib.get_close_matches(loc[-1], known, n=1, cutoff=0.5)
        remedy = f"did you mean '{close[0]}'?" if close else f"known keys: {', '.join(known)}"
        return ConfigError(f"{source}: unknown key '{'.'.join(loc)}'", remedy)
    if finding["type"] == "missing":
        return ConfigError(f"{source}: key '{'.'.join(loc)}' is missing", "add it")
    path = loc[: len(field)]
    where = option_name(*path) if _is_given(options or {}, path) else f"{source}: key '{'.'.join(path)}'"
    # a value that is none of a union's members has a finding for each of them
    same = [found for found in findings if _same_value(found, finding, len(path))]
    first, *others = dict.fromkeys(str(found["msg"]).removeprefix("Value error, ") for found in same)
    message = ", or ".join((first, *(other.removeprefix("Input should be ") for other in others)))
    if finding["type"] == "value_error" and isinstance(finding["input"], Mapping):  # of keys that do not go together
        what, _, remedy = message.partition(": ")
        return ConfigError(": ".join(filter(None, (source, ".".join(path), what))), remedy or "correct one of them")
    return ConfigError(f"{where} is {finding['input']!r}", message[:1].lower() + message[1:])


def _same_value(one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
    """Whether two findings are of one value, below the same `depth` keys."""
    return one["input"] is other["input"] and one["loc"][:depth] == other["loc"][:depth]


def _locate(model: type[BaseModel], loc: list[str]) -> tuple[type[BaseModel] | None, list[str]]:
    """The model that holds the last key of `loc`, and the part of `loc` that names fields (not union members)."""
    current: type[BaseModel] | None = model
    parent: type[BaseModel] | None = model
    names: list[str] = []
    for part in loc:
        if current is None:
            break
        parent = current
        names.append(part)
        current = _submodel(current, part)
    return parent, names


def _submodel(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    if name not in model.model_fields:
        return None
    kind = model.model_fields[name].annotation
    members = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    return next((m for m in members if isinstance(m, type) and issubclass(m, BaseModel)), None)


def _is_given(options: Mapping[str, Any], path: list[str]) -> bool:
    current: Any = options
    for part in path:
        if not isinstance(current, Mapping) or part not in current:
            return False
        current = current[part]
    return True
