"""The corpus: text of a development machine, without duplicates, split by a hash of the path.

Held-out documents come first, so the deduplication drops their repetitions from the training documents.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import html
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

KINDS = ("python", "c", "prose")
MAX_DOCUMENT_CHARS = 120_000
HELD_OUT_PER_MILLE = 25
MAX_REPEATED_LINES = 0.6
MAX_PARAGRAPH_REPEATS = 4


# Files to text


class NotTextError(ValueError):
    """The bytes are not useful training text."""


def plain_text(raw: bytes) -> str:
    """Decode UTF-8 (gunzipped where needed); raises NotTextError for binary or generated files."""
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError) as error:
            raise NotTextError("broken gzip") from error
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotTextError("not UTF-8") from error
    if "\x00" in text:
        raise NotTextError("binary")
    text = text.replace("\r\n", "\n").replace("\f", "").replace("\x1f", "").expandtabs(8)
    text = re.sub(r"[ ]+\n", "\n", text)
    lines = text.count("\n") + 1
    if len(text) / lines > 160:
        raise NotTextError("lines too long: data or minified")
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


def strip_html(raw: bytes) -> str:
    """Text of an HTML page, without scripts, styles and tags."""
    text = raw.decode("utf-8", errors="replace")
    text = re.sub(r"(?is)<(script|style|head|nav)\b.*?</\1>", "", text)
    text = html.unescape(re.sub(r"<[^>]*>", "", text))
    text = re.sub(r"\n[ \t]*(\n[ \t]*)+", "\n\n", text)
    return plain_text(text.encode("utf-8", errors="replace"))


_ROFF_ESCAPES = (
    (re.compile(r"\\f(\[\w*\]|\(..|.)"), ""),
    (re.compile(r"\\s[-+]?\d"), ""),
    (re.compile(r"\\\*?\((?:aq|cq)"), "'"),
    (re.compile(r"\\\*?\((?:lq|rq|dq)"), '"'),
    (re.compile(r"\\\*?\(em"), "--"),
    (re.compile(r"\\-"), "-"),
    (re.compile(r"\\[&|^/,:%]"), ""),
    (re.compile(r"\\ |\\~"), " "),
    (re.compile(r"\\e"), r"\\"),
)
_ROFF_TEXT = re.compile(r"^\.\s*(SH|SS|B|I|BR|IR|RB|RI|BI|IB|IP|TP|PP|P|LP|Sh|Ss|Nm|Fl|Ar|Nd|Pp)\b ?(.*)$")


def strip_roff(raw: bytes) -> str:
    """Text of a manual page: macro lines lose their macro; unknown requests are dropped."""
    lines = []
    for line in plain_text(raw).splitlines():
        if line.startswith(('.\\"', "'")):
            continue
        if line.startswith("."):
            match = _ROFF_TEXT.match(line)
            if match is None:
                continue
            macro, line = match.groups()
            line = line.replace('"', "")
            if macro in ("SH", "SS", "Sh", "Ss", "PP", "P", "LP", "TP", "IP", "Pp"):
                lines.append("")
        for pattern, replacement in _ROFF_ESCAPES:
            line = pattern.sub(replacement, line)
        lines.append(line)
    return plain_text("\n".join(lines).encode())


def topics_text(raw: bytes) -> str:
    """The Python language reference that pydoc carries as one dictionary literal."""
    module = ast.parse(raw)
    value = next(node.value for node in module.body if isinstance(node, ast.Assign))
    return plain_text("\n\n".join(ast.literal_eval(value).values()).encode())


# Where the text lies, and its licences


@dataclass(frozen=True)
class Root:
    """One folder of text.

    ``name`` replaces the machine's path, so that every machine has the same split into train and held-out;
    ``group_cap_bytes`` bounds the text of one package.
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
    """The roots that exist on this machine."""
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
    """Licence of a document that may certainly be redistributed, or None.

    ``name`` is a normalised path such as ``stdlib/json/decoder.py``; ``package_licences`` maps an installed top-level
    module or distribution to its permissive licence.
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


_PERMISSIVE_SPDX = {"MIT", "BSD-2-Clause", "BSD-3-Clause", "Apache-2.0", "PSF-2.0", "0BSD", "ISC", "Zlib", "CC0-1.0"}


def _permissive(metadata: Any) -> str | None:
    expression = metadata.get("License-Expression")
    if expression:
        parts = set(re.split(r"\s+(?:AND|OR)\s+|[()]", expression)) - {""}
        return expression if parts <= _PERMISSIVE_SPDX else None
    stated = f"{metadata.get('License') or ''}"[:200] + " ".join(metadata.get_all("Classifier") or ())
    if re.search("GPL|Mozilla|MPL", stated):
        return None
    marks = {"Apache": "Apache-2.0", "MIT": "MIT", "BSD": "BSD-3-Clause", "PSF": "PSF-2.0"}
    return next((spdx for mark, spdx in marks.items() if mark in stated), None)


# Documents


@dataclass(frozen=True)
class Document:
    """One text: its normalised path, its kind (of ``KINDS``), its content."""

    name: str
    kind: str
    text: str

    @property
    def held_out(self) -> bool:
        return is_held_out(self.name)

    @property
    def size(self) -> int:
        """Bytes of UTF-8."""
        return len(self.text.encode())


def path_hash(name: str) -> int:
    """64 bits of SHA-256 of a normalised path."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", errors="replace")).digest()[:8], "big")


def is_held_out(name: str) -> bool:
    """Whether the document of this normalised path is held out (2.5 % of paths)."""
    return path_hash(name) % 1000 < HELD_OUT_PER_MILLE


def collect(roots: Iterable[Root]) -> list[Document]:
    """Documents of all roots without duplicates, held-out first, then in the order of their hash."""
    named = [(name, root, path) for root in roots for name, path in _files(root)]
    named.sort(key=lambda item: (not is_held_out(item[0]), path_hash(item[0])))
    deduplicator = _Deduplicator()
    taken: Counter[str] = Counter()
    documents = []
    for name, root, path in named:
        group = "/".join(name.split("/")[: 1 + root.group_depth])
        if taken[group] > root.group_cap_bytes:
            continue
        try:
            text = deduplicator.reduce(root.read(path.read_bytes())[:MAX_DOCUMENT_CHARS])
        except (NotTextError, OSError, SyntaxError, ValueError):
            continue
        if len(text) > 200:
            taken[group] += len(text)
            documents.append(Document(name, root.kind, text))
    return documents


def _files(root: Root) -> Iterator[tuple[str, Path]]:
    for path in root.path.rglob("*"):
        relative = path.relative_to(root.path)
        if not path.name.endswith(root.suffixes) or path.is_symlink() or not path.is_file():
            continue
        if root.name == "stdlib" and relative.parts[0] in ("site-packages", "pydoc_data"):
            continue
        if root.name == "man" and not relative.parts[0].startswith("man"):  # translations
            continue
        if "vendored" in str(relative) or path.name.startswith("RECORD") or path.stat().st_size > 2_000_000:
            continue
        yield f"{root.name}/{relative.as_posix()}", path


class _Deduplicator:
    """Drops documents with mostly repeated lines, and paragraphs repeated too often."""

    def __init__(self) -> None:
        self._texts: set[int] = set()
        self._lines: set[int] = set()
        self._paragraphs: Counter[int] = Counter()

    def reduce(self, text: str) -> str:
        """The text without over-repeated paragraphs; raises NotTextError for a near-duplicate."""
        if hash(text) in self._texts:
            raise NotTextError("duplicate")
        self._texts.add(hash(text))
        lines = {hash(line) for line in map(str.strip, text.splitlines()) if len(line) > 20}
        if lines and len(lines & self._lines) > MAX_REPEATED_LINES * len(lines):
            raise NotTextError("near-duplicate")
        self._lines |= lines
        return "".join(part for part in re.split(r"(?<=\n\n)", text) if self._seldom(part))

    def _seldom(self, paragraph: str) -> bool:
        if len(paragraph) < 160:
            return True
        key = hash(re.sub(r"[\W\d]+", " ", paragraph))
        self._paragraphs[key] += 1
        return self._paragraphs[key] <= MAX_PARAGRAPH_REPEATS
