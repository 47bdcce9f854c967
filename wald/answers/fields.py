"""Times, segments and lines of ledgers as fields of JSON, alike in every answer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from wald.errors import InvalidInput
from wald.format.names import parse_segment_name
from wald.format.times import utc

_LEDGER_KEYS = {"base": "segment", "count": "records"}
_LEDGER_TIMES = {"at", "earliest", "latest"}
_LEDGER_ROUTE = ("route", "records", "first", "last", "payload_bytes")
_LEDGER_CHAIN = {"prev", "crc", "boot", "boottime"}


def time_fields(name: str, time_ns: int | None) -> dict[str, object]:
    """A time in JSON: ``<name>_ns`` in nanoseconds since 1970, and ``<name>`` for people, with all its digits."""
    return {f"{name}_ns": time_ns, name: None if time_ns is None else utc(time_ns, 9)}


def segment_fields(file: str | None) -> dict[str, object]:
    """A segment in JSON by the name of its file: the sequence that it begins with, and that name."""
    name = parse_segment_name(file or "")
    return {"segment": name and name.base_sequence, "file": file}


def ledger_fields(line: Mapping[str, Any]) -> dict[str, object]:
    """A ledger's line with the keys and the times of all JSON, and without what chains it to the others."""
    keys = _LEDGER_KEYS | ({"base": "first"} if line.get("event") == "skipped" else {})
    fields: dict[str, object] = {}
    for key, value in line.items():
        if key == "last" and "segment" in fields:
            fields["first"] = fields["segment"]
        if key in _LEDGER_TIMES and isinstance(value, int):
            fields |= time_fields(key, value)
        elif key == "routes" and isinstance(value, list):
            fields[key] = [_ledger_route(route) for route in value]
        elif key not in _LEDGER_CHAIN:
            fields[keys.get(key, key)] = value
    return fields


def _ledger_route(route: Mapping[str, Any] | Sequence[Any]) -> dict[str, object]:
    """A route of a ledger's line; lines of the sealer have the values alone."""
    return ledger_fields(route if isinstance(route, Mapping) else dict(zip(_LEDGER_ROUTE, route, strict=False)))


def local_now() -> datetime:
    """Return the current time in the local zone.

    Raises:
        InvalidInput: the variable TZ has an offset of a day or more, which is out of range.
    """
    try:
        return datetime.now().astimezone()
    except ValueError:
        message = f"TZ={os.environ.get('TZ', '')}: the offset from UTC is a day or more"
        raise InvalidInput(message, hint="TZ=UTC before the command") from None
