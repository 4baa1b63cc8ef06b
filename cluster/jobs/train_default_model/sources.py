"""Where a development machine keeps text: roots, their normalised names, their licences."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .text import plain_text, strip_html, strip_roff, topics_text

KINDS = ("python", "c", "prose")


@dataclass(frozen=True)
class Root:
    """One folder of text.

    ``name`` replaces the machine's path, so that the split into train and held-out is the same on
    every machine; ``group_cap_bytes`` bounds what one package below it may contribute.
    """

    name: str
    kind: str
    path: Path
    suffixes: tuple[str, ...]
    group_cap_bytes: int
    read: Callable[[bytes], str] = plain_text
    group_depth: int = 1


# By path prefix below /usr/include, the longest first where one contains another.
_PERMISSIVE_C = {
    "python3": "PSF-2.0",
    "openssl/": "Apache-2.0",
    "llvm-c-": "Apache-2.0 WITH LLVM-exception",
    "llvm-": "Apache-2.0 WITH LLVM-exception",
    "node/openssl/": "Apache-2.0",
    "node/v8": "BSD-3-Clause",
    "node/cppgc/": "BSD-3-Clause",
    "node/uv": "MIT",
    "node/node": "MIT",
    "X11/": "MIT",
    "GL/": "MIT",
    "unicode/": "Unicode-3.0",
    "zlib.h": "Zlib",
}
_PERMISSIVE_DOC = {"python3.": "PSF-2.0", "nodejs/": "MIT"}


def default_roots() -> tuple[Root, ...]:
    """The roots of this machine, the ones that exist only."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    site = Path(sysconfig.get_paths()["purelib"])
    share = Path("/usr/share")
    markup = (".md", ".rst", ".txt", ".pod", ".md.gz", ".rst.gz", ".txt.gz", "NEWS.gz", "README.gz")
    roots = [
        Root("stdlib", "python", stdlib, (".py",), 14_000_000, group_depth=0),
        Root("site-packages", "python", site, (".py", ".pyi"), 6_000_000),
        Root("include", "c", Path("/usr/include"), (".h",), 9_000_000),
        Root("include-python", "c", Path(sysconfig.get_paths()["include"]), (".h",), 2_000_000, group_depth=0),
        Root("site-packages-docs", "prose", site, (".md", ".rst", ".txt", "METADATA"), 400_000),
        Root("pydoc", "prose", stdlib / "pydoc_data", ("topics.py",), 1_000_000, topics_text),
        Root("doc", "prose", share / "doc", (*markup, "README", "NEWS", "copyright"), 2_500_000),
        Root("doc-html", "prose", share / "doc", (".html",), 3_000_000, strip_html),
        Root("man", "prose", share / "man", tuple(f".{n}.gz" for n in "12345678"), 3_500_000, strip_roff),
        Root("info", "prose", share / "info", (".info.gz",), 4_000_000, group_depth=0),
        Root("perl", "prose", share / "perl", (".pod",), 3_000_000),
    ]
    roots += [
        Root("cmake-help", "prose", path, (".rst",), 4_000_000, group_depth=0)
        for path in sorted(share.glob("cmake*/Help"))
    ]
    return tuple(root for root in roots if root.path.is_dir())


def licence_of(name: str, package_licences: dict[str, str]) -> str | None:
    """Licence of a document that may be redistributed freely, or None where that is not certain.

    ``name`` is a normalised path such as ``stdlib/json/decoder.py``; ``package_licences`` maps an
    installed top-level module or distribution to its permissive licence.
    """
    root, _, rest = name.partition("/")
    if "/test/" in name or "/_vendor/" in name or "/third_party/" in name or "/archs/" in name:
        return None
    if root in ("stdlib", "pydoc", "include-python"):
        return "PSF-2.0"
    if root == "cmake-help":
        return "BSD-3-Clause"
    if root in ("site-packages", "site-packages-docs"):
        return package_licences.get(rest.split("/")[0])
    table = {"include": _PERMISSIVE_C, "doc": _PERMISSIVE_DOC, "doc-html": _PERMISSIVE_DOC}.get(root, {})
    return next((licence for prefix, licence in table.items() if rest.startswith(prefix)), None)


def installed_licences() -> dict[str, str]:
    """Permissive licences of the installed distributions, by top-level module and metadata folder."""
    from importlib.metadata import distributions

    found: dict[str, str] = {}
    for dist in distributions():
        licence = _permissive(dist.metadata)
        name = dist.metadata["Name"]
        if licence is None or not name:
            continue
        stem = name.replace("-", "_")
        found[stem] = found[stem.lower()] = licence
        found[f"{stem.lower()}-{dist.version}.dist-info"] = licence
    return found


_SPDX_PERMISSIVE = {"MIT", "BSD-2-Clause", "BSD-3-Clause", "Apache-2.0", "PSF-2.0", "0BSD", "ISC", "Zlib", "CC0-1.0"}


def _permissive(metadata: Any) -> str | None:
    expression = metadata.get("License-Expression")
    if expression:
        parts = set(re.split(r"\s+(?:AND|OR)\s+|[()]", expression)) - {""}
        return expression if parts <= _SPDX_PERMISSIVE else None
    stated = f"{metadata.get('License') or ''}"[:200] + " ".join(metadata.get_all("Classifier") or ())
    if re.search("GPL|Mozilla|MPL", stated):
        return None
    marks = {"Apache": "Apache-2.0", "MIT": "MIT", "BSD": "BSD-3-Clause", "PSF": "PSF-2.0"}
    return next((spdx for mark, spdx in marks.items() if mark in stated), None)
