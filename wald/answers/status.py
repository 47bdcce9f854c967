"""What is looked at to say how a log is, and what is found wrong: facts, read once, and findings about them, pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from wald.answers.liveness import Life, Liveness, liveness, socket_of
from wald.checking.checker import Level
from wald.errors import Damaged
from wald.files.disk import free_bytes
from wald.files.layout import Root
from wald.files.routes import fifo_problems
from wald.files.safe_open import read_object
from wald.files.uptime import ClockStep, read_steps
from wald.format.head import Head
from wald.format.names import CURSOR_SUFFIX
from wald.format.times import utc
from wald.hints import command_line, hint_for
from wald.log import Log
from wald.retention.backlog import Backlog, GroupBacklog
from wald.retention.blockers import DIRECTORY_GONE
from wald.retention.cursors import CursorState
from wald.retention.history import History
from wald.segments.durable_end import seconds_ahead
from wald.segments.view import durable_head, no_segment
from wald.setting_types import format_bytes, format_seconds
from wald.work.snapshot import check_journals
from wald.writing.run_reports import CrashReport, crash_reports

_FULL_SOON_SECONDS = 86400.0
_SEAL_STALLED_SECONDS = 900.0  # as in the rules for alerts
_STALLED_SECONDS = 60.0
_FILLED_BY = {  # docs/retention.md, "A full disk"
    "segments": "the log fills it",
    "others": "other files fill it",
    "refused": "the last write was refused",
}
_NAMED = 3  # of the routes whose directories are gone


class Severity(IntEnum):
    """How bad a finding is."""

    WARNING = 1
    FAILING = 2
    DOWN = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, and what can be done."""

    severity: Severity
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a walk through all segments shows; the attributes are those of :class:`Facts`."""

    groups: tuple[GroupBacklog, ...] = ()
    unreadable: tuple[tuple[str, str], ...] = ()
    lost_routes: tuple[str, ...] = ()
    full_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """A log and its daemon at one moment.

    Attributes:
        crash: the last one; None if no report knows of any.
        report: of the last life, as its start wrote it; ``Any``: it is JSON.
        head_damage: what is wrong with the head; ``head`` is None then.
        groups: of every route, with what each has not processed.
        unreadable: what is wrong with segments, or with the log as a whole.
        lost_routes: those with records whose directory is gone.
        full_seconds: until the disk is full, if nothing is reclaimed; None: not known, or the log does not grow.
        fifos: what keeps lines that were written to a FIFO from the log.
        journals: what is wrong with those of work groups, and what says what can be done.
        steps: the clock steps.
    """

    root: Path
    daemon: Liveness
    crash: CrashReport | None
    report: Mapping[str, Any]
    head: Head | None
    head_damage: Damaged | None
    groups: tuple[GroupBacklog, ...]
    unreadable: tuple[tuple[str, str], ...]
    lost_routes: tuple[str, ...]
    free_bytes: int
    full_seconds: float | None
    fifos: tuple[str, ...]
    journals: tuple[tuple[str, str], ...]
    steps: tuple[ClockStep, ...] = ()

    @property
    def waiting(self) -> list[GroupBacklog]:
        """The groups that count and have records to process; the one that has waited longest comes first."""
        found = [group for group in self.groups if group.lag.records and not group.retired]
        return sorted(found, key=lambda group: group.lag.oldest_ns or 0)

    @property
    def settings(self) -> Mapping[str, Mapping[str, str]]:
        """Those of the last life, each with its value and where that comes from."""
        found = self.report.get("settings")
        return found if isinstance(found, dict) else {}


def read_facts(log: Log, *, socket: Path | None, seconds: float, now_ns: int) -> Facts:
    """Look at everything; nothing is changed.

    Args:
        socket: where the daemon listens; None: where its settings say.
        seconds: how long the daemon may take to answer.
    """
    root = log.root
    daemon = liveness(root, log.identity, socket or socket_of(root), seconds=seconds)
    return facts_of(log, daemon, _contents(log, now_ns))


def facts_of(log: Log, daemon: Liveness, contents: Contents) -> Facts:
    """The facts, where the daemon has been asked already and the segments have been walked through."""
    root = log.root
    return replace(
        facts_of_daemon(root, daemon),
        groups=contents.groups,
        unreadable=contents.unreadable,
        lost_routes=contents.lost_routes,
        full_seconds=contents.full_seconds,
        fifos=tuple(message for _, message in fifo_problems(root)),
        journals=tuple(_journals(log, {each.cursor.path for each in contents.groups if each.retired})),
        steps=read_steps(root),
    )


def facts_of_daemon(root: Root, daemon: Liveness, before: Facts | None = None) -> Facts:
    """What is quick to read: the daemon, its starts and ends, the head and the disk.

    Args:
        before: where the rest is from; None: as if there were no routes and no segments.
    """
    running = daemon.epoch if daemon.life not in (Life.DEAD, Life.NEVER) else None
    head, head_damage = _head(root)
    crash = next(crash_reports(root, running=running), None)
    report = (read_object(root.report(daemon.epoch)) if daemon.epoch is not None else None) or {}
    free = free_bytes(root.segments if root.segments.is_dir() else root.path)
    if before is None:
        return Facts(root.path, daemon, crash, report, head, head_damage, (), (), (), free, None, (), ())
    return replace(
        before, daemon=daemon, crash=crash, report=report, head=head, head_damage=head_damage, free_bytes=free
    )


def _journals(log: Log, retired: Collection[Path]) -> Iterator[tuple[str, str]]:
    """What is wrong with the journals of work groups whose cursors are not ``retired``."""
    for file, finding in check_journals(log.root, log.identity.log_id):
        if finding.level is Level.ERROR and file.path.with_suffix(CURSOR_SUFFIX) not in retired:
            showing = command_line(log.root.path, f"group show {file.route} {file.group}")
            yield f"{finding.path}: offset {finding.offset}: {finding.message}", showing


def _head(root: Root) -> tuple[Head | None, Damaged | None]:
    """The head, or what is wrong with it."""
    try:
        return durable_head(root), None
    except Damaged as error:
        return None, error


def _contents(log: Log, now_ns: int) -> Contents:
    """What the segments show; of a log without any that can be listed, why that is."""
    try:
        backlog = Backlog(log.view())
        unreadable = tuple((status.problem, status.hint) for status in backlog.segments() if status.problem)
    except Damaged as error:
        return Contents(unreadable=((error.message, error.hint),))
    unreadable += tuple(_unmounted(log))
    growth = backlog.growth_meter.growth(now_ns=now_ns)
    full = growth.seconds_until_full(backlog.free_bytes) if growth else None
    return Contents(tuple(backlog.groups.values()), unreadable, backlog.lost_routes(), full)


def _unmounted(log: Log) -> Iterator[tuple[str, str]]:
    """Report a log without any segment whose newest record no repair has given up."""
    view = log.view()
    last = view.bound.sequence
    if (
        not view.segments
        and not view.listing.released
        and last
        and list(History(log.root).unexplained_spans(last, last))
    ):
        error = no_segment(log.root, last)
        yield error.message, error.hint


def findings(facts: Facts, *, now_ns: int, lag_max: float | None) -> list[Finding]:
    """What is wrong, the worst first.

    Args:
        lag_max: how many seconds a record may wait for a group; None: for ever.
    """
    found = [*_of_daemon(facts), *_of_log(facts, now_ns, lag_max)]
    return sorted(found, key=lambda finding: -finding.severity)


def _of_daemon(facts: Facts) -> Iterator[Finding]:
    daemon, answer = facts.daemon, facts.daemon.answer
    if daemon.life in (Life.STARTS, Life.UNKNOWN):
        yield Finding(Severity.WARNING, daemon.message, daemon.hint)
    elif daemon.life is not Life.RUNS:
        yield Finding(Severity.DOWN, daemon.message, daemon.hint)
    elif not daemon.is_asked:
        yield Finding(Severity.WARNING, daemon.message, daemon.hint)
    if answer.get("degraded"):
        yield Finding(Severity.FAILING, _full(answer), command_line(facts.root, "explain"))
    elif held := answer.get("held_requests"):
        yield Finding(Severity.WARNING, f"{held} requests wait for room", command_line(facts.root, "explain"))
    for over in answer.get("over_quota") or ():
        yield Finding(Severity.WARNING, str(over.get("message")), command_line(facts.root, "explain"))
    if _number(answer, "stalled_seconds") > _STALLED_SECONDS:
        message = (
            f"input has waited for {format_seconds(_number(answer, 'stalled_seconds'))} while the head stands still"
        )
        yield Finding(Severity.FAILING, message, "docs/alerts.md#waldstalled")
    if _number(answer, "seal_stalled_seconds") > _SEAL_STALLED_SECONDS:
        message = f"no segment was sealed for {format_seconds(_number(answer, 'seal_stalled_seconds'))}"
        yield Finding(Severity.WARNING, message, "journalctl -u wald")
    for message in facts.report.get("errors") or ():
        yield Finding(Severity.FAILING, f"the last start found damage: {message}", command_line(facts.root, "verify"))


def _full(answer: Mapping[str, Any]) -> str:
    """What a daemon says of a disk that is full; ``Any``: it is JSON."""
    by, free, needed = (answer.get(name) for name in ("degraded_by", "free_bytes", "needed_bytes"))
    said = ["the disk is full, so input waits"]
    if by in _FILLED_BY:
        said.append(_FILLED_BY[by])
    if isinstance(free, int) and isinstance(needed, int):
        said.append(f"{format_bytes(free)} are free, {format_bytes(needed)} are needed")
    return "; ".join(said)


def _of_log(facts: Facts, now_ns: int, lag_max: float | None) -> Iterator[Finding]:
    if (damage := facts.head_damage) is not None and (damage.message, damage.hint) not in facts.unreadable:
        yield Finding(Severity.FAILING, damage.message, damage.hint)
    yield from (Finding(Severity.FAILING, message, hint) for message, hint in facts.unreadable)
    if facts.head is not None and (ahead := seconds_ahead(facts.head.at_ns, now_ns)):
        message = (
            f"append times are {format_seconds(ahead)} ahead of the clock: until it has caught up, all new records get "
            f"the time {utc(facts.head.at_ns)}"
        )
        yield Finding(Severity.WARNING, message, hint_for("append-times-ahead"))
    if facts.lost_routes:
        adding = command_line(facts.root, f"route add {facts.lost_routes[0]}")
        message = f"{named(facts.lost_routes)}: {DIRECTORY_GONE}; no record counts as processed"
        yield Finding(Severity.WARNING, message, adding)
    yield from (Finding(Severity.WARNING, message) for message in facts.fifos)
    for group in facts.groups:
        cursor = group.cursor
        if not group.retired and cursor.state not in (CursorState.VALID, CursorState.ABSENT):
            setting = command_line(facts.root, f"cursor set {cursor.route} SEQUENCE --group {cursor.group} --rewind")
            yield Finding(Severity.WARNING, f"{cursor.message}; no record counts as processed", setting)
    yield from (Finding(Severity.WARNING, message, showing) for message, showing in facts.journals)
    for group in facts.waiting if lag_max is not None else ():
        waited = group.lag.seconds(now_ns)
        if lag_max is not None and waited > lag_max:
            message = (
                f"{group.cursor.route}/{group.cursor.group} has not processed a record for {format_seconds(waited)}"
            )
            at = group.cursor
            looking = f"group show {at.route} {at.group}" if at.of_work_group else "explain"
            yield Finding(Severity.WARNING, message, command_line(facts.root, looking))
    if facts.full_seconds is not None and facts.full_seconds < _FULL_SOON_SECONDS:
        message = f"{format_bytes(facts.free_bytes)} are free: full in {format_seconds(facts.full_seconds)}"
        yield Finding(Severity.WARNING, message, command_line(facts.root, "explain"))


def named(routes: Sequence[str]) -> str:
    """The first of ``routes``, and how many more there are."""
    more = f" and {len(routes) - _NAMED} more" if len(routes) > _NAMED else ""
    return ", ".join(routes[:_NAMED]) + more


def _number(answer: Mapping[str, Any], name: str) -> float:
    found = answer.get(name, 0.0)
    return found if isinstance(found, int | float) else 0.0
