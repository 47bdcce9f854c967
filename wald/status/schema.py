"""Objects of the JSON that commands print with ``--json`` and the gate serves; docs/json.md describes their keys.

The gate makes its OpenAPI document from the same classes. The classes depend only on the facts that wald passes to
them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from wald.errors import InvalidInput
from wald.files.layout import Root
from wald.format.names import parse_segment_name
from wald.format.times import utc

if TYPE_CHECKING:
    from wald.format.head import Head as StoredHead
    from wald.format.work import DeadRecord
    from wald.reading.lookup import Whereabouts
    from wald.retention.backlog import GroupBacklog, Growth
    from wald.retention.cursors import Cursor
    from wald.retention.progress import Progress
    from wald.work import snapshot

_LEDGER_KEYS = {"base": "segment", "count": "records"}
_LEDGER_TIMES = {"at", "earliest", "latest"}
_LEDGER_ROUTE = ("route", "records", "first", "last", "payload_bytes")
_LEDGER_CHAIN = {"prev", "crc", "boot", "boottime"}
CursorWord = Literal["valid", "absent", "unreadable", "foreign", "linked", "beyond"]
RecordWord = Literal[
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


class Shown:
    """A JSON object, made from facts."""

    __slots__ = ()

    @classmethod
    def made_of(cls, *sources: object, **known: object) -> Self:
        """Take each field from ``known`` or the first source that has it; add each time as text."""
        names = [each.name for each in fields(cls) if each.init]  # type: ignore[arg-type]  # subclasses are dataclasses
        return cls(**{name: known[name] if name in known else _found(sources, name) for name in names})


def _found(sources: Iterable[object], name: str) -> object:
    for source in sources:
        if hasattr(source, name):
            value = getattr(source, name)
            return value.value if isinstance(value, Enum) else os.fspath(value) if isinstance(value, Path) else value
        if hasattr(source, f"{name}_ns"):
            return _text_time(getattr(source, f"{name}_ns"))
    raise AttributeError(name)


@dataclass(frozen=True, slots=True)
class Head(Shown):
    """The durable head: the last record, and the position where its bytes end."""

    sequence: int
    segment: int
    position: int
    epoch: int
    at_ns: int
    at: str
    no_daemon: str

    @classmethod
    def of(cls, root: Root, head: StoredHead) -> Head:
        return cls.made_of(head, no_daemon=no_daemon_message(root))


@dataclass(frozen=True, slots=True)
class Where(Shown):
    """Location or fate of a record; null means unknown or not applicable."""

    sequence: int
    state: RecordWord
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

    @classmethod
    def of(cls, found: Whereabouts) -> Where:
        reclaimed = found.reclaimed and ledger_fields(found.reclaimed)
        return cls.made_of(found, **segment_fields(found.segment), reclaimed=reclaimed)


@dataclass(frozen=True, slots=True)
class CursorFile(Shown):
    """A cursor, as ``wald cursor get`` prints it."""

    route: str
    group: str
    state: CursorWord
    sequence: int
    path: str
    message: str


@dataclass(frozen=True, slots=True)
class GroupOfRoute(Shown):
    """Progress of a group on a route; the path is only for admins and for users of the machine."""

    group: str
    state: CursorWord
    sequence: int
    lag_records: int
    message: str
    path: str

    @classmethod
    def of(cls, cursor: Cursor, lag: int) -> GroupOfRoute:
        return cls.made_of(cursor, lag_records=lag)


@dataclass(frozen=True, slots=True)
class Route(Shown):
    """A route; its last record is 0 if it has none, and null if it is unknown."""

    route: str
    last: int | None
    fifo: bool
    retired: bool
    consumers: str
    groups: list[GroupOfRoute]

    @classmethod
    def of(cls, found: Progress) -> Route:
        groups = [GroupOfRoute.of(cursor, lag) for cursor, lag in zip(found.cursors, found.lags, strict=True)]
        return cls.made_of(found, last=found.last_sequence, groups=groups)


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes that the client may read; ``no_daemon`` says how the daemon ended, and is empty while one runs."""

    routes: list[Route]
    no_daemon: str

    @classmethod
    def of(cls, root: Root, found: Iterable[Progress]) -> Routes:
        return cls([Route.of(each) for each in found], no_daemon_message(root))


@dataclass(frozen=True, slots=True)
class FifoProblem:
    """A FIFO from which nothing is read."""

    kind: Literal["fifo"] = field(default="fifo", init=False)
    path: str
    message: str


@dataclass(frozen=True, slots=True)
class OverQuota:
    """A route that accepts no records because it has too many unread bytes."""

    kind: Literal["quota"] = field(default="quota", init=False)
    route: str
    policy: Literal["block", "reject"]
    quota_bytes: int
    group: str
    unread_bytes: int
    message: str

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> OverQuota:
        """Create the object from the daemon's answer, which may be from another version."""
        return cls(*[answer.get(name) for name in cls.__dataclass_fields__ if name != "kind"])  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Pin:
    """A cursor that pins a segment, and the sequence that it must reach."""

    route: str
    group: str
    sequence: int
    needs: int
    message: str


@dataclass(frozen=True, slots=True)
class PinnedSegment:
    """A segment and its pins."""

    kind: Literal["segment"] = field(default="segment", init=False)
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


@dataclass(frozen=True, slots=True)
class PinningGroup(Shown):
    """A group and the bytes that it pins."""

    kind: Literal["group"] = field(default="group", init=False)
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

    @classmethod
    def of(cls, group: GroupBacklog, growth: Growth | None, now_ns: int) -> PinningGroup:
        return cls.made_of(
            group,
            group.cursor,
            group.lag,
            lag_records=group.lag.records,
            lag_seconds=round(group.lag.seconds(now_ns), 3),
            frees_bytes=group.exclusive_bytes,
            bytes_per_second=growth.routes.get(group.cursor.route, 0.0) if growth else None,
        )


@dataclass(frozen=True, slots=True)
class WholeLog:
    """Segments and bytes of a log by state, and the time until the disk is full."""

    kind: Literal["log"] = field(default="log", init=False)
    segments: dict[str, int]
    bytes: dict[str, int]
    free_bytes: int
    bytes_per_second: float | None
    seconds_until_full: float | None
    pinned_alone: dict[str, int]
    no_daemon: str


Explained = FifoProblem | OverQuota | PinnedSegment | PinningGroup | WholeLog


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that owns a group; the pid is null in another PID namespace; only admins get the command."""

    process: int | None
    command: str


@dataclass(frozen=True, slots=True)
class RunningCommand(Shown):
    """A command of ``wald-drain`` that runs for a group."""

    worker: int | None
    process: int
    process_group: int
    command: str
    started_ns: int
    started: str
    left: bool


@dataclass(frozen=True, slots=True)
class WorkOfGroup:
    """Numbers of records of a work group by state."""

    owner: Owner | None
    damage: str
    floor: int
    taken_in: int
    open_records: int
    out_records: int
    waiting_records: int
    giving_up_records: int
    behind_records: int
    oldest_append_time_ns: int | None
    oldest_append_time: str | None
    tries_max: int
    commands: list[RunningCommand]


@dataclass(frozen=True, slots=True)
class Group(GroupOfRoute):
    """A group of a route; it has ``work`` once workers have leased records."""

    work: WorkOfGroup


@dataclass(frozen=True, slots=True)
class GroupsOfRoute:
    """The groups of a route, sorted by name."""

    groups: list[Group]


@dataclass(frozen=True, slots=True)
class Out(Shown):
    """Records that are leased to a worker."""

    kind: Literal["out"] = field(default="out", init=False)
    first: int
    last: int
    worker: str
    until_ns: int | None
    until: str | None
    tries: int


@dataclass(frozen=True, slots=True)
class Waits(Shown):
    """Records that are not due yet, and why they were returned."""

    kind: Literal["waiting"] = field(default="waiting", init=False)
    first: int
    last: int
    due_ns: int
    due: str
    tries: int
    reason: str


@dataclass(frozen=True, slots=True)
class GivingUp(Shown):
    """A record that is becoming a dead letter."""

    kind: Literal["giving-up"] = field(default="giving-up", init=False)
    sequence: int
    since_ns: int
    since: str
    tries: int
    reason: str
    dead_letter_route: str

    @classmethod
    def of(cls, dead: DeadRecord) -> GivingUp:
        return cls.made_of(dead, **time_fields("since", dead.at_ns), dead_letter_route=dead.route)


Pending = Out | Waits | GivingUp


def pending_objects(
    out: Iterable[snapshot.Out], waiting: Iterable[snapshot.Waiting], dead: Iterable[DeadRecord], count: int | None
) -> Iterator[Pending]:
    """Yield an object for each run of records in the same state, at most ``count`` of each kind."""
    yield from islice(map(Out.made_of, out), count)
    yield from islice(map(Waits.made_of, waiting), count)
    yield from islice(map(GivingUp.of, dead), count)


def fields_of(found: object) -> dict[str, Any]:
    """Return the keys and values of one of these objects, in order; a mapping is copied."""
    if isinstance(found, Mapping):
        return dict(found)
    return {name: getattr(found, name) for name in found.__dataclass_fields__}  # type: ignore[attr-defined]


def time_fields(name: str, time_ns: int | None) -> dict[str, object]:
    """Return a time as ``<name>_ns``, nanoseconds since 1970, and ``<name>``, text with all digits."""
    return {f"{name}_ns": time_ns, name: _text_time(time_ns)}


def segment_fields(file: str | None) -> dict[str, Any]:
    """Return a segment's first sequence and its file name."""
    name = parse_segment_name(file or "")
    return {"segment": name and name.base_sequence, "file": file}


def ledger_fields(line: Mapping[str, Any]) -> dict[str, object]:
    """Return a ledger line with the usual JSON keys and times, without the hash chain."""
    keys = _LEDGER_KEYS | ({"base": "first"} if line.get("event") == "skipped" else {})
    fields: dict[str, object] = {}
    for key, value in line.items():
        if key == "last" and "segment" in fields:
            fields["first"] = fields["segment"]
        if key in _LEDGER_TIMES and isinstance(value, int):
            fields |= time_fields(key, value)
        elif key == "routes" and isinstance(value, list):  # the sealer writes routes as lists
            routes = [each if isinstance(each, Mapping) else zip(_LEDGER_ROUTE, each, strict=False) for each in value]
            fields[key] = [ledger_fields(dict(route)) for route in routes]
        elif key not in _LEDGER_CHAIN:
            fields[keys.get(key, key)] = value
    return fields


def local_now() -> datetime:
    try:
        return datetime.now().astimezone()
    except ValueError:
        message = f"TZ={os.environ.get('TZ', '')}: the offset from UTC is a day or more"
        raise InvalidInput(message, hint="TZ=UTC before the command") from None


def no_daemon_message(root: Root) -> str:
    """Return a message that no daemon runs; "" if one does."""
    from wald.files.disk import Disk
    from wald.writing import run_reports

    return run_reports.no_daemon_message(root, Disk())


def _text_time(time_ns: int | None) -> str | None:
    return None if time_ns is None else utc(time_ns, 9)
