"""Ledger lines: JSON objects, each with the sha256 of the line before it, so that a changed or missing line shows.

``{"event": …, "at": …, …, "prev": "<64 hex>"}``; the first line's ``prev`` is 64 zeros. The digest is taken over the
previous line without its newline.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

GENESIS = "0" * 64


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a ledger's bytes say.

    Attributes:
        entries: the whole, well-formed lines, in order.
        whole_bytes: where the last whole line ends; what follows is a torn line.
        broken: (line number from 1, reason) for each line that does not fit the chain.
        tip: the ``prev`` of the next line.
    """

    entries: list[dict[str, Any]]
    whole_bytes: int
    broken: list[tuple[int, str]]
    tip: str


def encode_line(entry: dict[str, Any], prev: str) -> bytes:
    """The line of ``entry`` after the line with digest ``prev``."""
    text = json.dumps(entry | {"prev": prev}, separators=(",", ":"), ensure_ascii=False)
    # A path that is not UTF-8 has surrogates in it; as escapes they are JSON, and come back as they were.
    return text.encode(errors="backslashreplace") + b"\n"


def digest(line: bytes) -> str:
    """What the line after ``line`` carries as ``prev``."""
    return hashlib.sha256(line.rstrip(b"\n")).hexdigest()


def decode_ledger(data: bytes) -> Decoded:
    """Every line of a ledger, the chain checked. Never raises: damage is part of the answer."""
    whole = data.rfind(b"\n") + 1
    entries: list[dict[str, Any]] = []
    broken: list[tuple[int, str]] = []
    tip = GENESIS
    for number, line in enumerate(data[:whole].split(b"\n")[:-1], start=1):
        entry = decode_line(line + b"\n")
        if entry is None:
            broken.append((number, "not a ledger line"))
        else:
            if entry.pop("prev") != tip:
                broken.append((number, "does not follow the line before it"))
            entries.append(entry)
        tip = digest(line)
    return Decoded(entries, whole, broken, tip)


def decode_line(line: bytes) -> dict[str, Any] | None:
    """One line with its newline, ``prev`` still in it; None for a torn one, and for what is no ledger line."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if line.endswith(b"\n") and isinstance(entry, dict) and "prev" in entry else None
