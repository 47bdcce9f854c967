"""Ownership of a work group: one process at a time, by the lock of ``routes/R/cursors/G.drain``.

A command of ``wald-drain`` also holds a file lock, and the next drain waits for a command that outlived its drain:

    drain ──fork──▶ keeper ──▶ command          <group>.command, or <group>.command-3 of worker 3

Commands of other processes reach the owner over its control socket, ``routes/R/cursors/G.ask``:

    command: connects, sends a request
    owner:   sends "accepted", applies the request, sends the answer

A command that gives up shuts its connection down, after which the owner cannot send "accepted". So a late owner
applies nothing for a command that has given up or was killed. The mode of the socket is 0600: only the owner's user
and root may connect.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from wald.errors import Locked, Refused, Unavailable, WaldError
from wald.files import locks
from wald.files.cursor_directory import GroupFile, is_own_file, not_permitted
from wald.files.disk import Disk
from wald.files.layout import TEMPORARY, Root
from wald.files.locks import holders, is_locked, process_command, process_name, process_status, sharers
from wald.format.names import ASK_SUFFIX, COMMAND_SUFFIX, HANDOVER_SUFFIX, cursor_name, is_group_file
from wald.format.times import utc
from wald.hints import command_line
from wald.log import Log
from wald.retention.cursors import CursorState
from wald.retention.handovers import PinWriter
from wald.work.journal import discard, recover_progress
from wald.work.snapshot import GroupStatus, WorkFile, owner_of

KEEPER = "wald-keeper"
"""Name of the process that waits for a run of a command."""
RUNNER = "wald-runner"
"""Name of the process that starts the commands of a worker."""
_RETRY_SECONDS = 0.1  # another process may hold the lock for an instant to test it


class Ownership(GroupFile):
    """The exclusive right to work on ``route`` for ``group``, until closed. The owner may use the file's contents."""

    def __init__(self, root: Root, route: str, group: str, disk: Disk) -> None:
        super().__init__(root, route, group, HANDOVER_SUFFIX, disk)
        try:
            until = time.monotonic() + _RETRY_SECONDS
            while not self.lock():
                if time.monotonic() >= until:
                    raise self._refusal(route, group)
                time.sleep(_RETRY_SECONDS / 10)
            if not os.fstat(self.descriptor).st_nlink:
                raise Locked(f"{self.path}: the group has just been removed", hint="run the same command again")
            disk.sync_directory(self.path.parent)
        except (Locked, OSError):
            self.close()
            raise

    def _refusal(self, route: str, group: str) -> Locked:
        found = holders(self.path)
        if os.getpid() in found:
            return Locked(
                f"{self.path}: this process already works on route {route} for group {group}",
                hint="use the open WorkGroup, which threads may share, or close it first",
            )
        if found:
            command = process_command(found[0]) or process_name(found[0])
            return Locked(
                f"{self.path}: another process works on route {route} for group {group}: process {found[0]}, {command}",
                hint="wait until it has ended, or add workers to it; "
                "a wald-gate releases the group 30 s after the last request if no worker has a record",
            )
        return Locked(
            f"{self.path}: another process works on route {route} for group {group}",
            hint=f"wait until it has ended, or find it: fuser {self.path}",
        )


class RunningCommand(NamedTuple):
    """A process that a worker of ``wald-drain`` runs."""

    worker: int | None  # None: the drain has no workers
    process: int
    process_group: int  # including its child processes
    words: str  # its command line; "" if this user may not see it
    started_ns: int  # in ns since 1970
    left: bool  # an earlier drain started it, and the current owner waits for it


def worker_name(worker: int) -> str:
    """Return the name of a worker of ``wald-drain``.

    >>> worker_name(3)
    'worker-3'
    """
    return f"worker-{worker}"


def workers_of(directory: Path, group: str) -> list[int]:
    named = re.compile(rf"{re.escape(group + COMMAND_SUFFIX)}-([0-9]+)")
    found = (named.fullmatch(path.name) for path in directory.iterdir())
    return sorted(int(match[1]) for match in found if match)


def command_files(directory: Path, group: str) -> list[Path]:
    """Return the files locked by a group's commands: that of a drain without workers, and one for each worker."""
    workers = (f"{COMMAND_SUFFIX}-{each}" for each in workers_of(directory, group))
    return [directory / f"{group}{suffix}" for suffix in (COMMAND_SUFFIX, *workers)]


def commands_of(groups: Sequence[GroupStatus]) -> dict[Path, list[RunningCommand]]:
    files: dict[Path, Path] = {}
    for each in groups:
        journal = each.file.path
        with suppress(OSError):  # the route was removed in the meantime
            files |= dict.fromkeys(command_files(journal.parent, each.file.group), journal)
    owners = [each.owner.pid for each in groups if each.owner is not None and each.owner.pid is not None]
    found: dict[Path, list[RunningCommand]] = {}
    for file, commands in running(files, owners).items():
        found.setdefault(files[file], []).extend(commands)
    return {journal: sorted(commands, key=lambda each: each.worker or 0) for journal, commands in found.items()}


def running(files: Iterable[Path], owners: Sequence[int] = ()) -> dict[Path, list[RunningCommand]]:
    """Return the commands that hold each of these files, as far as this user may see; ``owners`` own groups now."""
    found: dict[Path, list[RunningCommand]] = {}
    for path, sharing in sharers(files).items():
        left = not set(owners).intersection(sharing)
        commands = [each for each in sharing if each not in owners and process_name(each) not in (KEEPER, RUNNER)]
        number = path.name.rpartition(f"{COMMAND_SUFFIX}-")[2]
        worker = int(number) if number.isdecimal() else None
        found[path] = [
            RunningCommand(worker, each, status.group, process_command(each), status.started_ns, left)
            for each in commands
            if (status := process_status(each)) is not None and status.parent not in commands  # started by a keeper
        ]
    return found


def describe_commands(path: Path) -> str:
    """Describe the commands that hold a file, and how to end them; "" if one is just starting or has just ended."""
    found = running([path]).get(path)
    if found is None:
        return f"a process that this user may not see; as root: fuser -v {path}"
    return "; ".join(
        f"process {each.process}, since {utc(each.started_ns)}, kill -- -{each.process_group} ends it: {each.words}"
        for each in found
    )


def require_no_command(root: Root, route: str, group: str) -> None:
    """Raise Locked if a command that a killed ``wald-drain`` left running has records of a group."""
    for path in command_files(root.cursor_directory(route), group):
        if is_locked(path, Disk()):
            raise Locked(
                f"{path}: a command that a killed wald-drain left running still has records of route {route} "
                f"for group {group}",
                hint=f"wait until it has ended: {describe_commands(path) or f'fuser -v {path}'}",
            )


def remove_group(file: WorkFile) -> list[Path]:
    root, route, group = file.root, file.route, file.group
    if is_own_file(file.path):
        with Ownership(root, route, group, Disk()):
            require_no_command(root, route, group)  # without its file, the next start would not wait for it
            return _remove(file)
    if owner_of(file) is not None:
        raise Locked(f"{file.lock}: another process works on route {route} for group {group}")
    return _remove(file)


def succeed_workers(log: Log, route: str, group: str) -> None:
    """Move a work group's cursor to its ack floor, so that a reader without workers can take over.

    Does nothing, and takes no lock, for a group without workers.
    """
    if not log.cursor(route, group).of_work_group:
        return
    disk = Disk()
    with Ownership(log.root, route, group, disk):
        require_no_command(log.root, route, group)
        cursor = log.cursor(route, group)
        if cursor.state is CursorState.ABSENT:
            discard(log.root, disk, route, group)  # of a removed group with this name
        elif cursor.state is CursorState.VALID:
            progress = recover_progress(log, route, group)
            if progress.done or progress.dead:
                raise done_above(log, route, group, progress.floor)
            if progress.floor > cursor.sequence:
                log.set_cursor(route, progress.floor, group)
            # The pin remains if the workers were killed after the last dead letter was recorded.
            PinWriter(log.root, disk, route, group, log.identity.log_id, "work").unpin()


def done_above(log: Log, route: str, group: str, floor: int, command: str = "COMMAND") -> Refused:
    """Return the error for a reader without workers; ``command`` would process the remaining records."""
    words = f"feed {route} --group {group} --workers 1 --exit-at-end -- {command}"
    return Refused(
        f"route {route}: workers of group {group} have processed records above the cursor, "
        f"{floor}, which would be processed again",
        hint=f"{command_line(log.root.path, words, program='wald-drain')} processes the rest",
    )


def _remove(file: WorkFile) -> list[Path]:
    disk = Disk()
    directory = file.path.parent
    left = locks.abandoned_files(directory, disk, prefix=f"{file.group}.")
    removed = []
    cursor = cursor_name(file.group)
    names = [name for name in os.listdir(directory) if is_group_file(name, file.group)]
    for name in sorted(
        names, key=lambda name: (name != cursor, name)
    ):  # without the cursor, a new owner would start over
        path = directory / name
        try:
            disk.unlink(path)
        except FileNotFoundError:
            continue
        except PermissionError as error:
            raise not_permitted(file.root, file.route, path, error) from error
        removed.append(path)
    disk.sync_directory(directory)
    locks.remove_leftovers(left, disk)
    return removed


_MODE = 0o600
_BACKLOG = 16
_POLL_SECONDS = 0.02
_RECEIVE_SECONDS = 1.0  # a client sends its request at once
_MESSAGE_MAX_BYTES = 64 << 10
_ACCEPTED = b"accepted"

Apply = Callable[[Mapping[str, Any]], int]
"""Applies a JSON request and returns the number of records; the change is on disk when it returns."""


class OwnerGone(Exception):
    """No process owns the group."""


def ask_owner(root: Root, route: str, group: str, request: Mapping[str, Any], seconds: float) -> int:
    """Send a request to the owner of a group; return the number of affected records.

    The owner has that number of seconds to accept the request, and as long again to answer it.
    """
    path = root.cursor_directory(route) / f"{group}{ASK_SUFFIX}"
    until = time.monotonic() + seconds
    while True:
        with suppress(ConnectionError, FileNotFoundError, BlockingIOError):  # it starts, ends, or its backlog is full
            _require_trusted(root, route, path)
            try:
                with _connection(path) as connection:
                    return _exchange(connection, root, path, request, until, seconds)
            except PermissionError as error:
                raise not_permitted(root, route, path, error) from error
        if not locks.is_locked(path.with_suffix(HANDOVER_SUFFIX), Disk()):
            raise OwnerGone
        if time.monotonic() > until:
            raise _not_accepted(path, seconds)
        time.sleep(_POLL_SECONDS)


class ControlServer:
    """Thread that applies the requests of commands, one after the other."""

    def __init__(self, root: Root, route: str, group: str, apply: Apply, report: Callable[[str], None]) -> None:
        self._apply = apply
        self._path = root.cursor_directory(route) / f"{group}{ASK_SUFFIX}"
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"wald-work-control-{route}", daemon=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._identity: tuple[int, int] | None = None
        try:
            self._listen()
            self._thread.start()
        except OSError as error:  # for example, another user has planted a file
            report(f"{self._path}: cannot listen: {error}; `wald group` cannot change the group while this owner runs")

    def close(self) -> None:
        """Stop the thread after its current request, and remove the socket."""
        self._is_closed = True
        if self._identity is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            with suppress(OSError):
                if self._identity == _identity(self._path):
                    self._path.unlink()
            self._identity = None
        self._listener.close()

    def leave_in_child(self) -> None:
        self._listener.close()

    def _listen(self) -> None:
        os.fchmod(self._listener.fileno(), _MODE)
        # A socket address has at most 107 bytes, too few for a long group name.
        temporary = self._path.with_name(f"{secrets.token_hex(8)}{TEMPORARY}")
        with _opened(self._path.parent, os.O_DIRECTORY) as directory:
            self._listener.bind(f"{directory}/{temporary.name}")
        try:
            self._listener.listen(_BACKLOG)
            identity = _identity(temporary)
            temporary.rename(self._path)  # replaces that of an owner that was killed
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._identity = identity

    def _run(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or too many open files
                time.sleep(_POLL_SECONDS)
                continue
            with connection, suppress(OSError, ValueError, RecursionError):
                connection.settimeout(_RECEIVE_SECONDS)
                request = json.loads(connection.recv(_MESSAGE_MAX_BYTES))
                connection.send(_ACCEPTED, socket.MSG_NOSIGNAL)  # fails if the command has given up
                connection.send(json.dumps(self._answer(request)).encode(), socket.MSG_NOSIGNAL)

    def _answer(self, request: Mapping[str, Any]) -> dict[str, object]:
        try:
            return {"records": self._apply(request)}
        except WaldError as error:
            return {"error": error.message, "hint": error.hint}
        except Exception as error:  # noqa: BLE001 - the command reports it
            return {"error": f"it cannot be done: {error!r}"}


def _exchange(
    connection: socket.socket, root: Root, path: Path, request: Mapping[str, Any], until: float, seconds: float
) -> int:
    connection.send(json.dumps(request).encode(), socket.MSG_NOSIGNAL)
    connection.settimeout(max(_POLL_SECONDS, until - time.monotonic()))
    try:
        accepted = connection.recv(_MESSAGE_MAX_BYTES)
    except TimeoutError:
        connection.shutdown(socket.SHUT_RDWR)
        if not connection.recv(_MESSAGE_MAX_BYTES):
            raise _not_accepted(path, seconds) from None
        raise _not_answered(root, path, seconds) from None
    connection.settimeout(seconds)
    try:
        data = accepted and connection.recv(_MESSAGE_MAX_BYTES)
    except TimeoutError:
        raise _not_answered(root, path, seconds) from None
    if not data:
        raise ConnectionResetError
    answer = json.loads(data)
    if "error" in answer:
        raise Refused(str(answer["error"]), hint=str(answer.get("hint", "")))
    return int(answer["records"])


def _require_trusted(root: Root, route: str, path: Path) -> None:
    """Raise NotPermitted if another user has planted the file, which any cursor owner can do."""
    if path.lstat().st_uid not in (0, os.geteuid(), path.parent.stat().st_uid):
        raise not_permitted(root, route, path, PermissionError(errno.EPERM, "the file belongs to another user"))


@contextmanager
def _connection(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, _opened(path, os.O_NOFOLLOW) as address:
        connection.settimeout(_RECEIVE_SECONDS)
        connection.connect(address)
        yield connection


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[str]:
    """Yield a short path of a file, for a socket address."""
    descriptor = os.open(path, os.O_PATH | flags)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _not_accepted(path: Path, seconds: float) -> Unavailable:
    return Unavailable(
        f"{path}: the owner of the group accepted no request for {seconds:g} s; nothing was changed",
        hint=_owner_hint(path),
    )


def _not_answered(root: Root, path: Path, seconds: float) -> Unavailable:
    showing = command_line(root.path, f"group show {path.relative_to(root.routes).parts[0]} {path.stem}")
    return Unavailable(
        f"{path}: the owner has accepted the request, but has not answered for {seconds:g} s",
        hint=f"{showing} shows whether it was applied; {_owner_hint(path)}",
    )


def _owner_hint(path: Path) -> str:
    lock = path.with_suffix(HANDOVER_SUFFIX)
    process = next(iter(locks.holders(lock)), None)
    return f"ps -o pid,stat,wchan,args -p {process}" if process else f"fuser -v {lock}"
