"""Liveness of the daemon, and problems of a log. Facts are read once; findings are derived from them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

from wald.checking.checker import Level
from wald.client.session import ask_status
from wald.errors import Damaged
from wald.files.disk import Disk, free_bytes
from wald.files.identity import Identity
from wald.files.layout import Root
from wald.files.locks import holders, is_locked, is_stopped
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
from wald.writing.daemon_lock import is_lock_hidden
from wald.writing.run_reports import CrashReport, crash_reports, describe_last_end, last_daemon_fields, run_reports

_FULL_SOON_SECONDS = 86400.0
_SEAL_STALLED_SECONDS = 900.0  # as in the rules for alerts
_STALLED_SECONDS = 60.0
_FILLED_BY = {  # docs/retention.md, "A full disk"
    "segments": "the log fills it",
    "others": "other files fill it",
    "refused": "the last write was refused",
}
_NAMED = 3  # of the routes whose directories are gone


class Life(Enum):
    """State of the daemon.

    The kernel releases the lock when the process ends, so an old pid in the lock file means nothing. The kernel's list
    of locks names the process, unless it is in another PID namespace. The daemon of this log and epoch must answer
    STAT; a frozen process does not.
    """

    RUNS = "runs"
    STARTS = "starts"  # it has the lock, but nothing listens yet
    FROZEN = "frozen"  # a signal or a debugger has stopped its process
    SILENT = "silent"  # it has the lock, but does not answer
    UNKNOWN = "unknown"  # this user may neither see the lock nor query the daemon
    DEAD = "dead"
    NEVER = "never-ran"


@dataclass(frozen=True, slots=True)
class Liveness:
    """State of the daemon, and the facts that establish it."""

    life: Life
    message: str
    hint: str = ""
    pid: int | None = None  # number of its process in this PID namespace; None if unknown
    wrote: Mapping[str, object] = field(default_factory=dict)  # fields of the lock file
    answer: Mapping[str, Any] = field(default_factory=dict)  # the answer to STAT
    is_asked: bool = True  # False if this user may not connect to the socket

    @property
    def epoch(self) -> int | None:
        found = self.wrote.get("epoch")
        return found if isinstance(found, int) else None


def liveness(root: Root, identity: Identity, socket: Path, *, seconds: float) -> Liveness:
    """Determine the state of a log's daemon, which has ``seconds`` to answer."""
    wrote = last_daemon_fields(root)
    if not is_locked(root.lock, Disk()):
        if is_lock_hidden(root) and not next(run_reports(root), {}).get("ended"):
            # This user may not open the lock and the kernel does not list it: another PID namespace may have it. Only
            # a run without an end is asked: if systemd listens for a stopped daemon, a connection would start it.
            found = _asked(identity, socket, seconds, None, wrote)
            if found.is_asked and found.life is not Life.STARTS:
                return found
            if not found.is_asked:
                why = f"this user may neither open {root.lock} nor query {socket}"
                message = f"it is unknown whether a daemon runs: {why}"
                return Liveness(Life.UNKNOWN, message, f"ls -l {root.lock} {socket}", wrote=wrote)
        starting = command_line(root.path, "run")
        if not wrote:
            return Liveness(Life.NEVER, "no daemon has run on this log", starting)
        ended = describe_last_end(root) or "the last one ended before it had recovered the log"
        return Liveness(Life.DEAD, f"no daemon runs: {ended}", starting, wrote=wrote)
    if (stopped := frozen(root)) is not None:
        return stopped
    pid = next(iter(holders(root.lock)), None)
    return _asked(identity, socket, seconds, pid, wrote)


def frozen(root: Root) -> Liveness | None:
    """Return the daemon that has the lock if its process is stopped."""
    pid, wrote = next(iter(holders(root.lock)), None), last_daemon_fields(root)
    if pid is None or not is_stopped(pid):
        return None
    message = f"{_who(pid, wrote)} is frozen: a signal or a debugger has stopped its process, and it accepts nothing"
    return Liveness(Life.FROZEN, message, f"kill -CONT {pid}", pid, wrote)


def socket_of(root: Root) -> Path:
    """Return the socket of the last run of the daemon, according to its settings."""
    match _report(root, last_daemon_fields(root).get("epoch")).get("settings"):
        case {"socket": {"value": str(value)}} if named := value.strip('"'):
            return Path(named)
    return root.socket


def over_quota(root: Root, *, seconds: float) -> list[Mapping[str, Any]]:
    """Return the routes over quota, whose records the daemon does not accept; none if it does not answer."""
    try:
        found = ask_status(socket_of(root), seconds=seconds).get("over_quota")
    except OSError:
        return []
    return found if isinstance(found, list) else []


def _asked(identity: Identity, socket: Path, seconds: float, pid: int | None, wrote: Mapping[str, object]) -> Liveness:
    """Query a daemon that holds the lock and is not stopped."""
    who, elsewhere = f"{_who(pid, wrote)} has the log", "; --socket PATH"
    looking = "journalctl -u wald" if pid is None else f"cat /proc/{pid}/stat; journalctl -u wald"
    try:
        answer = ask_status(socket, seconds=seconds)
    except PermissionError:
        message = f"{who}, but this user may not query it: {socket}"
        return Liveness(Life.RUNS, message, f"ls -l {socket}", pid, wrote, is_asked=False)
    except (TimeoutError, BlockingIOError):
        message = f"{who} and has not answered for {seconds:g} s"
        return Liveness(Life.SILENT, message, looking, pid, wrote)
    except OSError as error:
        message = f"{who}, but nothing listens at {socket} ({error.strerror}): it is starting, or listens elsewhere"
        return Liveness(Life.STARTS, message, looking + elsewhere, pid, wrote)
    if not answer:
        message = f"{who}, but the program that answers at {socket} refuses the query, or is not a daemon"
        return Liveness(Life.SILENT, message, looking + elsewhere, pid, wrote)
    wrote = {name: answer[name] for name in ("epoch", "pid") if name in answer} | dict(wrote)
    if (answer.get("log"), answer.get("epoch")) != (identity.log_id.hex(), wrote.get("epoch")):
        return Liveness(Life.SILENT, f"{who}, but another daemon answers at {socket}", looking + elsewhere, pid, wrote)
    return Liveness(Life.RUNS, f"{_who(pid, wrote)} runs", "", pid, wrote, answer)


def _who(pid: int | None, wrote: Mapping[str, object]) -> str:
    """Describe the daemon that has the lock, and its process if known."""
    own, process = wrote.get("pid"), f"pid {pid}"
    if pid is None and own is None:
        process = "whose process this user may not see"
    elif pid is None:
        process = f"pid {own} on {wrote.get('host')}, which is in another PID namespace or on another host"
    elif own not in (None, pid):
        process = f"pid {pid}, or {own} in its own PID namespace"
    return f"the daemon ({process}; epoch {wrote.get('epoch', 'not known')}, since {wrote.get('started')})"


class Severity(IntEnum):
    """Severity of a finding."""

    WARNING = 1
    FAILING = 2
    DOWN = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem and its remedy."""

    severity: Severity
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Contents:
    """Facts that require a walk through all segments and directories."""

    groups: tuple[GroupBacklog, ...] = ()
    unreadable: tuple[tuple[str, str], ...] = ()  # message and hint of each problem of a segment or the log
    lost_routes: tuple[str, ...] = ()  # routes with records whose directory is gone
    full_seconds: float | None = None  # until the disk is full; None if unknown, or if the log does not grow
    fifos: tuple[str, ...] = ()  # problems that keep lines in a FIFO out of the log
    journals: tuple[tuple[str, str], ...] = ()  # message and hint of each damaged journal of a work group
    steps: tuple[ClockStep, ...] = ()

    @property
    def waiting(self) -> list[GroupBacklog]:
        """The groups with unprocessed records, except those of retired routes, the longest wait first."""
        found = [group for group in self.groups if group.lag.records and not group.retired]
        return sorted(found, key=lambda group: group.lag.oldest_ns or 0)


@dataclass(frozen=True, slots=True)
class Facts:
    """A log and its daemon at one moment."""

    root: Path
    daemon: Liveness
    crash: CrashReport | None  # the last reported crash
    report: Mapping[str, Any]  # of the last run, written at its start
    head: Head | None
    head_damage: Damaged | None  # the damage of the head; ``head`` is then None
    free_bytes: int
    contents: Contents

    @property
    def settings(self) -> Mapping[str, Mapping[str, str]]:
        """Settings of the last run: the value and origin of each."""
        found = self.report.get("settings")
        return found if isinstance(found, dict) else {}


def read_facts(log: Log, *, socket: Path | None, seconds: float, now_ns: int) -> Facts:
    """Read all facts without changing anything; the daemon has ``seconds`` to answer at its socket."""
    daemon = liveness(log.root, log.identity, socket or socket_of(log.root), seconds=seconds)
    return facts_of(log.root, daemon, with_directories(log, _contents(log, now_ns)))


def with_directories(log: Log, contents: Contents) -> Contents:
    """Complete the results of a walk through the segments."""
    return replace(
        contents,
        fifos=tuple(message for _, message in fifo_problems(log.root)),
        journals=tuple(_journals(log, {each.cursor.path for each in contents.groups if each.retired})),
        steps=read_steps(log.root),
    )


def facts_of(root: Root, daemon: Liveness, contents: Contents) -> Facts:
    """Read the quick facts: the daemon, its starts and ends, the head and the disk."""
    running = daemon.epoch if daemon.life not in (Life.DEAD, Life.NEVER) else None
    head, head_damage = None, None
    try:
        head = durable_head(root)
    except Damaged as error:
        head_damage = error
    crash = next(crash_reports(root, running=running), None)
    free = free_bytes(root.segments if root.segments.is_dir() else root.path)
    return Facts(root.path, daemon, crash, _report(root, daemon.epoch), head, head_damage, free, contents)


def _report(root: Root, epoch: object) -> Mapping[str, Any]:
    """Return the report of a run; {} if there is none."""
    return (read_object(root.report(epoch)) if isinstance(epoch, int) else None) or {}


def _journals(log: Log, retired: Collection[Path]) -> Iterator[tuple[str, str]]:
    """Yield problems of journals of work groups, except those of ``retired`` cursors."""
    for file, finding in check_journals(log.root, log.identity.log_id):
        if finding.level is Level.ERROR and file.path.with_suffix(CURSOR_SUFFIX) not in retired:
            showing = command_line(log.root.path, f"group show {file.route} {file.group}")
            yield f"{finding.path}: offset {finding.offset}: {finding.message}", showing


def _contents(log: Log, now_ns: int) -> Contents:
    """Walk through the segments; if they cannot be listed, return the reason."""
    view = log.view()
    try:
        backlog = Backlog(view)
        unreadable = [(status.problem, status.hint) for status in backlog.segments() if status.problem]
    except Damaged as error:
        return Contents(unreadable=((error.message, error.hint),))
    last = view.bound.sequence
    is_empty = not view.segments and not view.listing.released
    if is_empty and last and any(History(log.root).unexplained_spans(last, last)):  # no repair has given it up
        missing = no_segment(log.root, last)
        unreadable.append((missing.message, missing.hint))
    growth = backlog.growth_meter.growth(now_ns=now_ns)
    full = growth.seconds_until_full(backlog.free_bytes) if growth else None
    return Contents(tuple(backlog.groups.values()), tuple(unreadable), backlog.lost_routes(), full)


def findings(facts: Facts, *, now_ns: int, lag_max: float | None) -> list[Finding]:
    """Return the problems, worst first; a record may wait ``lag_max`` seconds for a group (None: forever)."""
    found = [*_of_daemon(facts), *_of_log(facts, now_ns, lag_max)]
    return sorted(found, key=lambda finding: -finding.severity)


def _of_daemon(facts: Facts) -> Iterator[Finding]:
    daemon, answer, explaining = facts.daemon, facts.daemon.answer, command_line(facts.root, "explain")
    if daemon.life not in (Life.RUNS, Life.STARTS, Life.UNKNOWN):
        yield Finding(Severity.DOWN, daemon.message, daemon.hint)
    elif daemon.life is not Life.RUNS or not daemon.is_asked:
        yield Finding(Severity.WARNING, daemon.message, daemon.hint)
    if answer.get("degraded"):
        yield Finding(Severity.FAILING, _full(answer), explaining)
    elif held := answer.get("held_requests"):
        yield Finding(Severity.WARNING, f"{held} requests wait for room", explaining)
    for over in answer.get("over_quota") or ():
        yield Finding(Severity.WARNING, str(over.get("message")), explaining)
    if (stalled := _number(answer, "stalled_seconds")) > _STALLED_SECONDS:
        message = f"input has waited for {format_seconds(stalled)} while the head did not move"
        yield Finding(Severity.FAILING, message, "docs/alerts.md#waldstalled")
    if (stalled := _number(answer, "seal_stalled_seconds")) > _SEAL_STALLED_SECONDS:
        message = f"no segment was sealed for {format_seconds(stalled)}"
        yield Finding(Severity.WARNING, message, "journalctl -u wald")
    for message in facts.report.get("errors") or ():
        yield Finding(Severity.FAILING, f"the last start found damage: {message}", command_line(facts.root, "verify"))


def _full(answer: Mapping[str, Any]) -> str:
    by, free, needed = (answer.get(name) for name in ("degraded_by", "free_bytes", "needed_bytes"))
    said = ["the disk is full, so input waits"]
    if by in _FILLED_BY:
        said.append(_FILLED_BY[by])
    if isinstance(free, int) and isinstance(needed, int):
        said.append(f"{format_bytes(free)} are free, {format_bytes(needed)} are needed")
    return "; ".join(said)


def _of_log(facts: Facts, now_ns: int, lag_max: float | None) -> Iterator[Finding]:
    contents, root, head, damage = facts.contents, facts.root, facts.head, facts.head_damage
    unreadable = {} if damage is None else {(damage.message, damage.hint): None}
    for problem in unreadable | dict.fromkeys(contents.unreadable):
        yield Finding(Severity.FAILING, *problem)
    if head is not None and (ahead := seconds_ahead(head.at_ns, now_ns)):
        until = f"until it has caught up, all new records get the time {utc(head.at_ns)}"
        message = f"append times are {format_seconds(ahead)} ahead of the clock: {until}"
        yield Finding(Severity.WARNING, message, hint_for("append-times-ahead"))
    if contents.lost_routes:
        message = f"{named(contents.lost_routes)}: {DIRECTORY_GONE}; no record counts as processed"
        yield Finding(Severity.WARNING, message, command_line(root, f"route add {contents.lost_routes[0]}"))
    for message in contents.fifos:
        yield Finding(Severity.WARNING, message)
    for cursor in (group.cursor for group in contents.groups if not group.retired):
        if cursor.state not in (CursorState.VALID, CursorState.ABSENT):
            setting = command_line(root, f"cursor set {cursor.route} SEQUENCE --group {cursor.group} --rewind")
            yield Finding(Severity.WARNING, f"{cursor.message}; no record counts as processed", setting)
    for journal in contents.journals:
        yield Finding(Severity.WARNING, *journal)
    for group in contents.waiting:
        waited, at = group.lag.seconds(now_ns), group.cursor
        if lag_max is not None and waited > lag_max:
            looking = f"group show {at.route} {at.group}" if at.of_work_group else "explain"
            message = f"{at.route}/{at.group} has not processed a record for {format_seconds(waited)}"
            yield Finding(Severity.WARNING, message, command_line(root, looking))
    if contents.full_seconds is not None and contents.full_seconds < _FULL_SOON_SECONDS:
        message = f"{format_bytes(facts.free_bytes)} are free: full in {format_seconds(contents.full_seconds)}"
        yield Finding(Severity.WARNING, message, command_line(root, "explain"))


def named(routes: Sequence[str]) -> str:
    """List the first few routes and the number of others."""
    more = f" and {len(routes) - _NAMED} more" if len(routes) > _NAMED else ""
    return ", ".join(routes[:_NAMED]) + more


def _number(answer: Mapping[str, Any], name: str) -> float:
    found = answer.get(name, 0.0)
    return found if isinstance(found, int | float) else 0.0
