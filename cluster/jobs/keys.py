"""The configuration's keys as a page: `python -m tiermoe.cluster.jobs.keys [PAGE]` fills its table from the models.

A key's name, type, bounds, default and meaning are those of the field that reads it, and its option is the one that is
made from it. A test compares the page with what this writes.
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from ..api.settings import ApiSettings
from ..config import RunConfig
from ..yaml_file import option_name
from .bench.metrics import fill_tables, markdown
from .options import RUNTIME

PAGE = Path("docs") / "configuration.md"
_OPTIONS = frozenset((*RUNTIME, "cluster.replicas"))
_SUFFIXES = {
    "_s": "seconds", "_us": "microseconds", "_gbps": "1e9 bytes/s", "gbps": "1e9 bytes/s", "_gib": "GiB",
    "_mib": "MiB", "_bytes": "bytes",
}  # fmt: skip
_WORDS = {int: "whole number", float: "number", str: "text", bool: "yes or no", ByteSize: "bytes, or with a unit"}
_BOUNDS = ((Ge, "ge", "at least"), (Gt, "gt", "more than"), (Le, "le", "at most"), (Lt, "lt", "less than"))


@dataclass(frozen=True)
class Key:
    """One key. option: of the commands; empty: no option. unit: of a number; empty: it is not a number."""

    name: str
    option: str
    kind: str
    unit: str
    default: str
    meaning: str


def keys(model: BaseModel, prefix: str = "") -> Iterator[Key]:
    """All keys of a configuration, section by section; a section's default may differ from its class's."""
    sections: list[tuple[str, BaseModel]] = []
    for name, field in type(model).model_fields.items():
        value = getattr(model, name) if field.default_factory is None else None  # what depends on the machine
        if isinstance(value, BaseModel):
            sections.append((f"{prefix}{name}.", value))
            continue
        path = f"{prefix}{name}"
        option = f"`{option_name(*path.split('.'))}`" if path in _OPTIONS else ""
        unit = _unit(name, field)
        yield Key(path, option, _kind(field), unit, _shown(value), field.description or "")
    for below, section in sections:
        yield from keys(section, below)


def table(model: BaseModel) -> list[str]:
    """The keys of a configuration as a table in Markdown."""
    found = list(keys(model))
    options = ["option"] if any(key.option for key in found) else []
    rows = (
        (f"`{key.name}`", *([key.option] if options else []), key.kind, key.unit, key.default, key.meaning)
        for key in found
    )
    head = ("key", *options, "type", "unit", "default", "meaning")
    return markdown(head, ([cell.replace("|", "\\|") for cell in row] for row in rows))


def filled(page: str) -> str:
    """A page with its blocks `keys`, of a run, and `server` filled."""
    return fill_tables(page, {"keys": table(RunConfig()), "server": table(ApiSettings())}.__getitem__)


def _members(annotation: Any) -> Iterator[Any]:
    """The types of a union, without None and without what `Annotated` adds."""
    if typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        for member in typing.get_args(annotation):
            yield from _members(member)
    elif annotation is not types.NoneType:
        yield annotation


def _kind(field: FieldInfo) -> str:
    """The type in words, with its bounds."""
    words: list[str] = []
    for member in _members(field.annotation):
        origin = typing.get_origin(member)
        if origin is Literal:
            words += [f"`{value}`" for value in typing.get_args(member)]
        elif origin is tuple:
            (of, *_) = typing.get_args(member)
            of = typing.get_args(of)[0] if typing.get_origin(of) is Annotated else of
            words.append("list of texts" if of is str else "list of whole numbers")
        elif origin is dict or member is dict:
            words.append("mapping")
        else:
            words.append(_WORDS[member])
    limits = [
        f"{said} {getattr(found, name):.10g}"
        for bound, name, said in _BOUNDS
        for found in _metadata(field)
        if isinstance(found, bound)
    ]
    return ", ".join(dict.fromkeys([*words, *limits]))


def _metadata(field: FieldInfo) -> Iterator[Any]:
    """Bounds of the field, and of the members of its type."""
    yield from field.metadata
    for member in typing.get_args(field.annotation):
        if typing.get_origin(member) is Annotated:
            for more in typing.get_args(member)[1:]:
                yield from more.metadata if isinstance(more, FieldInfo) else [more]


def _unit(name: str, field: FieldInfo) -> str:
    """The unit that the field states, or that its name ends with; empty: it is not a number."""
    stated = field.json_schema_extra
    if isinstance(stated, dict) and "unit" in stated:
        return str(stated["unit"])
    return next((unit for suffix, unit in _SUFFIXES.items() if name.endswith(suffix)), "")


def _shown(value: Any) -> str:
    """A default for people; `-`: none."""
    if value is None or value == ():
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.10g}" if isinstance(value, int | float) else f"`{value}`"


def main(arguments: list[str]) -> int:
    """Fill the page; the exit code."""
    page = Path(arguments[0]) if arguments else PAGE
    page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
