"""Whether the daemon of a log is alive: what the lock, the kernel and the socket say, put together.

The kernel releases the lock when the process ends, so an old pid in its file decides nothing. The process is found
by the kernel's list of locks, in which those of other PID namespaces are missing. STAT must be answered, by the daemon
of this log and of this epoch: a frozen process answers nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from wald.client.connection import ask_status
from wald.files.disk import Disk
from wald.files.identity import Identity
from wald.files.layout import Root
from wald.files.locks import holders, is_locked, is_stopped
from wald.files.safe_open import read_object
from wald.hints import command_line
from wald.writing.daemon_lock import is_lock_hidden
from wald.writing.run_reports import describe_last_end, last_daemon_fields, run_reports


class Life(Enum):
    """What the daemon is doing."""

    RUNS = "runs"
    STARTS = "starts"
    """It has the lock, and nothing listens yet."""
    FROZEN = "frozen"
    """A signal or a debugger has stopped its process."""
    SILENT = "silent"
    """It has the lock, and does not answer."""
    UNKNOWN = "unknown"
    """This user may see neither the lock nor the answer."""
    DEAD = "dead"
    NEVER = "never-ran"


@dataclass(frozen=True, slots=True)
class Liveness:
    """The answer.

    Attributes:
        pid: of its process, as it is numbered here; None: not known, as it is in another PID namespace.
        wrote: what it has written into the lock file, as far as this user may know it.
        message: the answer as a sentence; ``hint``: what can be done.
        answer: to STAT; ``Any``: it is JSON.
        is_asked: whether this user may ask it.
    """

    life: Life
    message: str
    hint: str = ""
    pid: int | None = None
    wrote: Mapping[str, object] = field(default_factory=dict)
    answer: Mapping[str, Any] = field(default_factory=dict)
    is_asked: bool = True

    @property
    def epoch(self) -> int | None:
        found = self.wrote.get("epoch")
        return found if isinstance(found, int) else None


def liveness(root: Root, identity: Identity, socket: Path, *, seconds: float) -> Liveness:
    """Find out whether a daemon of the log is alive.

    Args:
        seconds: how long it may take to answer.
    """
    wrote = last_daemon_fields(root)
    if not is_locked(root.lock, Disk()):
        if is_lock_hidden(root) and not next(run_reports(root), {}).get("ended"):
            return _unlisted(root, identity, socket, seconds, wrote)
        return _without_lock(root, wrote)
    if (stopped := frozen(root)) is not None:
        return stopped
    pid = next(iter(holders(root.lock)), None)
    return _asked(identity, socket, seconds, pid, wrote)


def frozen(root: Root) -> Liveness | None:
    """The daemon that has the lock, if its process is stopped."""
    pid, wrote = next(iter(holders(root.lock)), None), last_daemon_fields(root)
    if pid is None or not is_stopped(pid):
        return None
    message = f"{_who(pid, wrote)} is frozen: a signal or a debugger has stopped its process, and it accepts nothing"
    return Liveness(Life.FROZEN, message, f"kill -CONT {pid}", pid, wrote)


def socket_of(root: Root) -> Path:
    """Where the last life of the daemon listened, by its settings."""
    epoch = last_daemon_fields(root).get("epoch")
    report = (read_object(root.report(epoch)) if isinstance(epoch, int) else None) or {}
    match report.get("settings"):
        case {"socket": {"value": str(value)}} if named := value.strip('"'):
            return Path(named)
    return root.socket


def over_quota(root: Root, *, seconds: float) -> list[Mapping[str, Any]]:
    """The routes of which the daemon takes nothing because they are over their quota; none if it does not answer."""
    try:
        found = ask_status(socket_of(root), seconds=seconds).get("over_quota")
    except OSError:
        return []
    return found if isinstance(found, list) else []


def _without_lock(root: Root, wrote: Mapping[str, object]) -> Liveness:
    starting = command_line(root.path, "run")
    if not wrote:
        return Liveness(Life.NEVER, "no daemon has run on this log", starting)
    ended = describe_last_end(root) or "the last one ended before it had recovered the log"
    return Liveness(Life.DEAD, f"no daemon runs: {ended}", starting, wrote=wrote)


def _unlisted(root: Root, identity: Identity, socket: Path, seconds: float, wrote: Mapping[str, object]) -> Liveness:
    """Of a lock that this user may not open and the kernel does not list here: another PID namespace may have it.

    Only a life without an end is asked: where systemd listens for a daemon that was stopped, asking would start it.
    """
    found = _asked(identity, socket, seconds, None, wrote)
    if found.life is Life.STARTS:  # nothing listens
        return _without_lock(root, wrote)
    if not found.is_asked:
        message = f"whether a daemon runs is not known: this user may neither open {root.lock} nor ask {socket}"
        return Liveness(Life.UNKNOWN, message, f"ls -l {root.lock} {socket}", wrote=wrote)
    return found


def _asked(
    identity: Identity,
    socket: Path,
    seconds: float,
    pid: int | None,
    wrote: Mapping[str, object],
) -> Liveness:
    """What it answers, of a daemon that holds the lock and is not stopped."""
    who = _who(pid, wrote)
    looking = "journalctl -u wald" if pid is None else f"cat /proc/{pid}/stat; journalctl -u wald"
    try:
        answer = ask_status(socket, seconds=seconds)
    except PermissionError:
        message = f"{who} has the log, and this user may not ask it: {socket}"
        return Liveness(Life.RUNS, message, f"ls -l {socket}", pid, wrote, is_asked=False)
    except (TimeoutError, BlockingIOError):
        message = f"{who} has the log and has not answered for {seconds:g} s"
        return Liveness(Life.SILENT, message, looking, pid, wrote)
    except OSError as error:
        message = (
            f"{who} has the log, and nothing listens at {socket} ({error.strerror}): it starts, or listens elsewhere"
        )
        return Liveness(Life.STARTS, message, f"{looking}; --socket PATH", pid, wrote)
    if not answer:
        message = f"{who} has the log, and what answers at {socket} refuses the question, or is no daemon"
        return Liveness(Life.SILENT, message, f"{looking}; --socket PATH", pid, wrote)
    wrote = {name: answer[name] for name in ("epoch", "pid") if name in answer} | dict(wrote)
    if (answer.get("log"), answer.get("epoch")) != (identity.log_id.hex(), wrote.get("epoch")):
        message = f"{who} has the log, and another daemon answers at {socket}"
        return Liveness(Life.SILENT, message, f"{looking}; --socket PATH", pid, wrote)
    return Liveness(Life.RUNS, f"{_who(pid, wrote)} runs", "", pid, wrote, answer)


def _who(pid: int | None, wrote: Mapping[str, object]) -> str:
    """The daemon that has the lock, with what is known of its process here."""
    own = wrote.get("pid")
    if own is None:
        process = "of which this user may not know the process" if pid is None else f"pid {pid}"
    elif pid is None:
        process = f"pid {own} on {wrote.get('host')}, which is in another PID namespace or on another host"
    elif pid != own:
        process = f"pid {pid}, which is {own} to itself"
    else:
        process = f"pid {pid}"
    return f"the daemon ({process}; epoch {wrote.get('epoch', 'not known')}, since {wrote.get('started')})"
