"""How far a stream has read which logs, as JSON: what Spark keeps in a checkpoint.

    {"version": 1, "logs": {"<32 hex>": 700}, "began": {"<32 hex>": 250}, "routes": ["access"]}

    logs     id of the log → the last sequence that was delivered; what comes next is the one behind it
    began    id of the log → the sequence behind which the stream began; both the same: nothing was delivered yet
    routes   those that are read; null: all

``began`` is there because a stream may begin anywhere: what is in front of it has not been read by anybody. Equal
offsets have equal bytes, as Spark compares them.
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
    """Not the offsets of a stream of ours, or those of a newer version."""


class Position(NamedTuple):
    """In one log: records began < s ≤ last were delivered."""

    began: int
    last: int


@dataclass(frozen=True, slots=True)
class Offsets:
    """Where a stream stands.

    Attributes:
        logs: by id, in hexadecimal; empty before the first trigger.
        routes: None: all.
    """

    logs: Mapping[str, Position] = field(default_factory=dict)
    routes: frozenset[str] | None = None


def encode_offsets(offsets: Offsets) -> dict[str, object]:
    """``offsets`` as JSON values, always in the same order."""
    logs = sorted(offsets.logs.items())
    return {
        "version": VERSION,
        "logs": {log: position.last for log, position in logs},
        "began": {log: position.began for log, position in logs},
        "routes": None if offsets.routes is None else sorted(offsets.routes),
    }


def is_offsets(told: object) -> bool:
    """Whether JSON values are meant to be offsets of ours, of whatever version."""
    return isinstance(told, dict) and {"version", "logs", "began", "routes"} <= told.keys()


def decode_offsets(told: object) -> Offsets:
    """What JSON values say.

    Raises:
        BadOffsets: they are not what :func:`encode_offsets` gives.
    """
    if not isinstance(told, dict) or not is_offsets(told):
        raise BadOffsets("not the offsets of a stream that reads logs")
    if told["version"] != VERSION:
        raise BadOffsets(f"version {told['version']!r}, and this program knows {VERSION}")
    last, began, routes = told["logs"], told["began"], told["routes"]
    if not isinstance(last, dict) or not isinstance(began, dict) or last.keys() != began.keys():
        raise BadOffsets("logs and began do not name the same logs")
    logs = {str(log): Position(_sequence(began[log]), _sequence(last[log])) for log in last}
    for log, position in logs.items():
        if not _LOG.fullmatch(log) or position.began > position.last:
            raise BadOffsets(f"log {log!r} cannot be at {position.last} after {position.began}")
    if routes is None:
        return Offsets(logs)
    if not isinstance(routes, list) or not all(isinstance(route, str) and is_route(route) for route in routes):
        raise BadOffsets(f"these are no routes: {routes!r}")
    return Offsets(logs, frozenset(routes))


def _sequence(told: object) -> int:
    if not isinstance(told, int) or isinstance(told, bool) or not 0 <= told <= SEQUENCE_MAX:
        raise BadOffsets(f"{told!r} is not a sequence")
    return told
