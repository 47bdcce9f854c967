"""The bytes of a record for people: as text, as JSON set out in lines, or in hexadecimal; no more than fits a page."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec
from markupsafe import Markup

from wald_gate.page.visible import marked

Form = Literal["text", "json", "hex"]
FORMS: tuple[Form, ...] = get_args(Form)
SHOWN_BYTES = 16 << 10
LINE_BYTES = 160
_LINE_HEX = 48
HEADERS_SHOWN = 50
_DEPTH = 40  # of JSON; each line of it is indented, so what is nested deeply takes many times its size
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_ROW = 16
_PRINTED = range(0x20, 0x7F)


@dataclass(frozen=True, slots=True)
class Shown:
    """A value in one form.

    Attributes:
        html: of all of it, or of its beginning.
        size, of: how many bytes of how many these are.
        note: why it is not in the form that was asked for.
    """

    form: Form
    html: Markup
    size: int
    of: int
    note: str = ""


def shown(value: bytes, wanted: Form | None = None) -> Shown:
    """A value, or the beginning of a long one.

    Args:
        wanted: None: JSON, if it is an object or an array, or text, if it is UTF-8, or hexadecimal.
    """
    part, note = value[:SHOWN_BYTES], ""
    if wanted in ("json", None):
        laid_out, note = _laid_out(value)
        if laid_out is not None and (wanted or value.lstrip()[:1] in (b"{", b"[")):
            return Shown("json", marked(laid_out, keep="\n"), len(value), len(value))
    if wanted == "hex" or (wanted is None and not _is_text(part)):
        return Shown("hex", Markup("{}").format(_dump(part)), len(part), len(value))
    text, size = _text(part, whole=len(part) == len(value))
    return Shown("text", marked(text, keep="\n"), size, len(value), note if wanted else "")


def line(value: bytes) -> Markup:
    """The beginning of a value in one line: what is no text in hexadecimal."""
    if not _is_text(value[:LINE_BYTES]):
        more = "…" if len(value) > _LINE_HEX else ""
        return Markup('<span class="quiet">{}{}</span>').format(value[:_LINE_HEX].hex(" "), more)
    text, size = _text(value[:LINE_BYTES], whole=len(value) <= LINE_BYTES)
    return marked(text) + (Markup('<span class="quiet">…</span>') if size < len(value) else "")


def headers(data: bytes | None) -> tuple[list[tuple[str, str]], int]:
    """The first headers, name and value each, and how many there are; headers that are no such object have no name."""
    if not data:
        return [], 0
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        return [("", _text(data[:SHOWN_BYTES], whole=True)[0])], 1
    first = list(found.items())[:HEADERS_SHOWN]
    return [(name[:SHOWN_BYTES], value[:SHOWN_BYTES]) for name, value in first], len(found)


def _is_text(part: bytes) -> bool:
    text, _ = _text(part, whole=False)
    return "\0" not in text and not any("\udc80" <= character <= "\udcff" for character in text)


def _text(part: bytes, *, whole: bool) -> tuple[str, int]:
    """The text, in which a byte that is no UTF-8 is a lone surrogate (PEP 383), and of how many bytes it is.

    Args:
        whole: whether nothing follows; else a character that is cut off at the end is left out.
    """
    if not whole:
        for cut in range(1, min(4, len(part) + 1)):
            if part[-cut] >= 0xC0:  # a character begins here
                length = 2 + (part[-cut] >= 0xE0) + (part[-cut] >= 0xF0)
                part = part[:-cut] if length > cut else part
                break
    return part.decode(errors="surrogateescape"), len(part)


def _laid_out(value: bytes) -> tuple[str | None, str]:
    """JSON with an element a line, its numbers and strings as they were sent; or None, and why not."""
    if len(value) > SHOWN_BYTES:
        return None, f"It is too long to be set out as JSON: more than {SHOWN_BYTES} bytes."
    try:
        compact = msgspec.json.format(value, indent=-1)
        compact.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None, "It is no JSON."
    depth = deepest = 0
    for byte in _STRING.sub(b"", compact):
        depth += (byte in b"[{") - (byte in b"]}")
        deepest = max(deepest, depth)
    if deepest > _DEPTH:
        return None, f"It is too deep to be set out as JSON: more than {_DEPTH} levels."
    return msgspec.json.format(value, indent=2).decode(), ""


def _dump(part: bytes) -> str:
    """Sixteen bytes a line, with their offset and what of them is printable ASCII."""
    lines = []
    for at in range(0, len(part), _ROW):
        row = part[at : at + _ROW]
        printed = "".join(chr(byte) if byte in _PRINTED else "." for byte in row)
        lines.append(f"{at:06x}  {row.hex(' '):{3 * _ROW - 1}}  {printed}")
    return "\n".join(lines)
