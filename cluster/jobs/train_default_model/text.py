"""Turns files into plain text: decompression, markup stripping, rejection of what is not text."""

from __future__ import annotations

import ast
import gzip
import html
import re


class NotTextError(ValueError):
    """The bytes are not text that is worth training on."""


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
    """Text of a manual page: macro lines lose their macro, unknown requests are dropped."""
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
