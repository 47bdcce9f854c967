"""The shapes of what is said of the log, for the OpenAPI document: docs/json.md says what is in each.

The answers themselves are made by :mod:`wald.answers`. Times are in nanoseconds since 1970, and in UTC for people.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

CursorWord = Literal["valid", "absent", "unreadable", "foreign", "linked", "beyond"]


class RouteMade(Struct):
    """A route that is there now."""

    route: str


class Cut(Struct):
    """Whether a segment was cut (not, if it has no record yet), and the active one now."""

    cut: bool
    segment: int


class GroupOfRoute(Struct):
    """How far a group has processed a route; the path is for admins, and for users of the machine."""

    group: str
    state: CursorWord
    sequence: int
    lag_records: int
    message: str
    path: str | UnsetType = UNSET


class Route(Struct):
    """A route; the last record is 0 if there is none, and null if it is not known."""

    route: str
    last: int | None
    fifo: bool
    retired: bool
    consumers: str
    groups: list[GroupOfRoute]


class Routes(Struct):
    """The routes that the client may read; ``no_daemon`` says how the daemon has ended, and is empty while one runs."""

    routes: list[Route]
    no_daemon: str


class Head(Struct):
    """How far the log is durable: the last record, and where its bytes end."""

    sequence: int
    segment: int
    position: int
    epoch: int
    at_ns: int
    at: str
    no_daemon: str


class Where(Struct):
    """What became of a record; null is what is not known, or does not apply."""

    sequence: int
    state: Literal[
        "active",
        "cut",
        "sealed",
        "released",
        "quarantined",
        "reclaimed",
        "archived",
        "skipped",
        "lost",
        "not-restored",
        "never-issued",
        "unknown",
    ]
    message: str
    durable: bool
    route: str | None
    append_time_ns: int | None
    append_time: str | None
    segment: int | None
    file: str | None
    position: int | None
    processed: dict[str, bool]
    bundle: str | None
    member: str | None
    reclaimed: dict[str, Any] | None


class FifoInTrouble(Struct, tag_field="kind", tag="fifo"):
    """A FIFO that takes nothing in."""

    path: str
    message: str


class OverQuota(Struct, tag_field="kind", tag="quota"):
    """A route of which nothing is taken, as too much of it is unread."""

    route: str
    policy: Literal["block", "reject"]
    quota_bytes: int
    group: str
    unread_bytes: int
    message: str


class Pin(Struct):
    """What pins a segment: a cursor, and the sequence that it must reach."""

    route: str
    group: str
    sequence: int
    needs: int
    message: str


class HeldSegment(Struct, tag_field="kind", tag="segment"):
    """A segment, and what holds it back."""

    segment: int
    file: str
    state: str
    first: int
    last: int | None
    bytes: int
    free: bool
    message: str
    pins: list[Pin]
    pins_left_out: int


class HoldingGroup(Struct, tag_field="kind", tag="group"):
    """A group, and what it pins."""

    route: str
    group: str
    retired: bool
    state: CursorWord
    message: str
    path: str
    sequence: int
    lag_records: int
    lag_seconds: float
    oldest_ns: int | None
    oldest: str | None
    pinned_segments: int
    pinned_bytes: int
    frees_bytes: int
    bytes_per_second: float | None


class WholeLog(Struct, tag_field="kind", tag="log"):
    """The log: segments and bytes by state, and how long the disk lasts."""

    segments: dict[str, int]
    bytes: dict[str, int]
    free_bytes: int
    bytes_per_second: float | None
    seconds_until_full: float | None
    pinned_alone: dict[str, int]
    no_daemon: str


Explained = FifoInTrouble | OverQuota | HeldSegment | HoldingGroup | WholeLog
