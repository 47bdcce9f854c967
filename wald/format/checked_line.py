"""A line of JSON with a checksum, which tells a whole line from a half-written one.

``crc`` is the CRC-32C of the same line without that field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from wald.format.checksum import crc32c


def encode_line(fields: Mapping[str, Any]) -> bytes:
    """The line of ``fields``, which are not empty and have no "crc" of their own."""
    text = json.dumps(fields).encode()
    return b'%b, "crc": "%08x"}\n' % (text[:-1], crc32c(text))


def decode_line(line: bytes) -> dict[str, Any] | None:
    """The fields of a line; None if it is half-written, or something else."""
    try:
        fields = json.loads(line)
        crc = fields.pop("crc")
        return fields if crc == f"{crc32c(json.dumps(fields).encode()):08x}" else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
