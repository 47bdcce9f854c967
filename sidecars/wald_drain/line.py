"""A line of JSON with its checksum, by which a line that was half written is known.

``crc`` is the crc32c of the same line without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from crc32c import crc32c


def encode_line(told: Mapping[str, Any]) -> bytes:
    """The line of ``told``, which has no "crc" of its own."""
    return json.dumps({**told, "crc": _checksum(told)}).encode() + b"\n"


def decode_line(line: bytes) -> dict[str, Any] | None:
    """What a line says; None for one that was half written, or is something else."""
    try:
        told = json.loads(line)
        crc = told.pop("crc")
        return told if crc == _checksum(told) else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _checksum(told: Mapping[str, Any]) -> str:
    return f"{crc32c(json.dumps(told).encode()):08x}"
