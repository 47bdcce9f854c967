"""Offsets of a stream in its logs, as JSON that Spark keeps in a checkpoint.

    {"version": 1, "logs": {"<32 hex>": 700}, "began": {"<32 hex>": 250}, "routes": ["access"],
     "starts": {"<32 hex>": [3, "<life>"]}}

    logs     id of the log → the last sequence that was delivered; the stream continues with the next one
    began    id of the log → the sequence after which the stream began; equal to ``logs`` if nothing was delivered yet
    routes   the routes that are read; null for all
    starts   id of the log → epoch and life of the daemon's start when that sequence was read; missing in offsets of
             older versions

A stream may begin at any record of a log. It has not read earlier records, so ``began`` is kept. Equal offsets have
equal bytes, because Spark compares them as text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from wald.format.names import SEQUENCE_MAX, is_route

VERSION = 1
_LOG = re.compile(r"[0-9a-f]{32}")


class BadOffsets(ValueError):
    """JSON that is not offsets of wald, or those of a newer version."""


class Position(NamedTuple):
    """Position in one log: records began < s ≤ last were delivered.

    Attributes:
        epoch, life: the daemon's start when ``last`` was read, as in :class:`LastSeen`.
    """

    began: int
    last: int
    epoch: int = 0
    life: str = ""


@dataclass(frozen=True, slots=True)
class Offsets:
    """Positions of a stream.

    Attributes:
        logs: by id, in hexadecimal; empty before the first trigger.
        routes: None for all.
    """

    logs: Mapping[str, Position] = field(default_factory=dict)
    routes: frozenset[str] | None = None


def encode_offsets(offsets: Offsets) -> dict[str, object]:
    """Return ``offsets`` as JSON values, always in the same order."""
    logs = sorted(offsets.logs.items())
    starts = {log: [position.epoch, position.life] for log, position in logs if position.epoch}
    encoded: dict[str, object] = {
        "version": VERSION,
        "logs": {log: position.last for log, position in logs},
        "began": {log: position.began for log, position in logs},
        "routes": None if offsets.routes is None else sorted(offsets.routes),
    }
    return encoded | {"starts": starts} if starts else encoded


def is_offsets(decoded: object) -> bool:
    """Return True if decoded JSON claims to be offsets of wald, of any version."""
    return isinstance(decoded, dict) and {"version", "logs", "began", "routes"} <= decoded.keys()


def decode_offsets(decoded: object) -> Offsets:
    """Return the offsets in decoded JSON."""
    if not isinstance(decoded, dict) or not is_offsets(decoded):
        raise BadOffsets("not the offsets of a stream that reads logs")
    if decoded["version"] != VERSION:
        raise BadOffsets(f"version {decoded['version']!r}, and this program knows {VERSION}")
    positions = _positions(decoded["logs"], decoded["began"], decoded.get("starts", {}))
    return Offsets(positions, _routes(decoded["routes"]))


def _positions(last: object, began: object, starts: object) -> dict[str, Position]:
    if not isinstance(last, dict) or not isinstance(began, dict) or last.keys() != began.keys():
        raise BadOffsets("logs and began do not name the same logs")
    if not isinstance(starts, dict) or not starts.keys() <= last.keys():
        raise BadOffsets("starts names other logs")
    logs = {str(log): Position(_sequence(began[log]), _sequence(last[log]), *_start(starts.get(log))) for log in last}
    for log, position in logs.items():
        if not _LOG.fullmatch(log) or position.began > position.last:
            raise BadOffsets(f"log {log!r} cannot be at {position.last} after {position.began}")
    return logs


def _start(start: object) -> tuple[int, str]:
    if start is None:
        return 0, ""
    if not isinstance(start, list) or len(start) != 2 or not isinstance(start[1], str):
        raise BadOffsets(f"{start!r} is not a start of the daemon")
    return _sequence(start[0]), start[1]


def _routes(routes: object) -> frozenset[str] | None:
    if routes is None:
        return None
    if not isinstance(routes, list) or not all(isinstance(route, str) and is_route(route) for route in routes):
        raise BadOffsets(f"not a list of routes: {routes!r}")
    return frozenset(routes)


def _sequence(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= SEQUENCE_MAX:
        raise BadOffsets(f"{value!r} is not a sequence")
    return value
