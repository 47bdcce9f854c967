"""Requests to the owner of a work group: a command writes into ``routes/R/cursors/G.ask``, and waits.

    command: locks the file, empties it, writes what it asks
    owner:   "taken"            command that has waited for too long: "withdrawn"
             whichever is first in the file counts, as each is appended
    owner:   carries it out, "answered"

What is asked counts only while the command that asks holds the lock. So nothing is carried out for a command that was
killed, however late an owner finds it. Each line has a checksum, and the number that the command has drawn; any other
line is passed over. Who may write the file may ask: the user of the owner, and root; in ``routes/R`` the log's owner.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from wald.errors import Locked, Refused, Unavailable, WaldError
from wald.files import locks
from wald.files.cursor_directory import open_group_file
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.format.ledger_lines import decode_line, encode_line
from wald.format.names import ASK_SUFFIX, HANDOVER_SUFFIX
from wald.hints import command_line

_LOOK_SECONDS = 0.2
_POLL_SECONDS = 0.02
_MAX_BYTES = 64 << 10

Do = Callable[[Mapping[str, Any]], int]
"""Carries out what is asked, and returns how many records that was for; ``Any``: it is JSON."""


class OwnerGone(Exception):
    """The owner has ended, so there is none to ask."""


def ask(root: Root, route: str, group: str, what: Mapping[str, Any], seconds: float) -> int:
    """Ask the owner of a group for something, and wait until it is done.

    Args:
        what: as :data:`Do` takes it.
        seconds: how long to wait for the owner to begin, and as long again for it to end.

    Returns:
        for how many records it was done.

    Raises:
        OwnerGone: there is none any more; it may have done it.
        Refused: the owner could not do it.
        Locked: other commands ask it all the time.
        Unavailable: it does not take requests; nothing was changed. Or it does not answer.
        NotPermitted: this user may not.
    """
    disk = Disk()
    until = time.monotonic() + seconds
    with _locked(root, disk, route, group, until) as (path, descriptor):
        number = secrets.token_hex(8)
        disk.truncate(descriptor, 0)
        _append(descriptor, {"ask": number, **what})
        while (answer := _find(descriptor, "answered", number)) is None:
            if not locks.is_locked(path.with_suffix(HANDOVER_SUFFIX), disk):
                raise OwnerGone
            if time.monotonic() > until:
                _withdraw(root, path, descriptor, number, seconds)
                until = time.monotonic() + seconds
            time.sleep(_POLL_SECONDS)
        disk.truncate(descriptor, 0)
    if "error" in answer:
        raise Refused(str(answer["error"]), hint=str(answer.get("hint", "")))
    return int(answer["records"])


class Requests:
    """Looks for what commands ask of the owner of a group, in a thread, and has it carried out.

    Args:
        do: carries out what is asked; on disk when it returns.
    """

    def __init__(self, root: Root, route: str, group: str, do: Do) -> None:
        self._root, self._route, self._group = root, route, group
        self._path = root.cursor_directory(route) / f"{group}{ASK_SUFFIX}"
        self._do = do
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"wald-work-requests-{route}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, after what it is at."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            with suppress(WaldError, OSError):  # whatever another user has put there, the command says so
                if os.lstat(self._path).st_size:
                    self._look()

    def _look(self) -> None:
        disk = Disk()
        _, descriptor = open_group_file(self._root, disk, self._route, self._group, ASK_SUFFIX)
        try:
            _append_only(descriptor)
            asked = _find(descriptor, "ask")
            if asked is None or not isinstance(asked["ask"], str) or not locks.is_locked(self._path, disk):
                return
            number = asked["ask"]
            if _find(descriptor, "taken", number) or not _is_first(descriptor, "taken", number):
                return
            _append(descriptor, {"answered": number} | self._answer(asked))
        finally:
            disk.close(descriptor)

    def _answer(self, asked: Mapping[str, Any]) -> dict[str, object]:
        try:
            return {"records": self._do(asked)}
        except WaldError as error:
            return {"error": error.message, "hint": error.hint}
        except (OSError, ValueError, KeyError, TypeError) as error:
            return {"error": f"it cannot be done: {error!r}"}


@contextmanager
def _locked(root: Root, disk: Disk, route: str, group: str, until: float) -> Iterator[tuple[Path, int]]:
    """The file, open for appending, and locked: one command asks at a time."""
    path, descriptor = open_group_file(root, disk, route, group, ASK_SUFFIX)
    try:
        _append_only(descriptor)
        while not disk.lock(descriptor):
            if time.monotonic() > until:
                raise Locked(f"{path}: another command is waiting for the owner", hint=f"fuser -v {path} names it")
            time.sleep(_POLL_SECONDS)
        yield path, descriptor
    finally:
        disk.close(descriptor)


def _withdraw(root: Root, path: Path, descriptor: int, number: str, seconds: float) -> None:
    """Withdraw what was asked, if the owner has not taken it.

    Raises:
        Unavailable: it is withdrawn; or it was before, so that the owner was given as long again.
    """
    lock = path.with_suffix(HANDOVER_SUFFIX)
    process = next(iter(locks.holders(lock)), None)
    looking = f"ps -o pid,stat,wchan,args -p {process}" if process else f"fuser -v {lock}"
    if _find(descriptor, "withdrawn", number) is None and _is_first(descriptor, "withdrawn", number):
        raise Unavailable(
            f"{path}: the owner of the group accepted no request for {seconds:g} s; nothing was changed", hint=looking
        )
    if _find(descriptor, "withdrawn", number) is not None:
        showing = command_line(root.path, f"group show {path.relative_to(root.routes).parts[0]} {path.stem}")
        raise Unavailable(
            f"{path}: the owner has accepted the request, but has not answered for {seconds:g} s",
            hint=f"{showing} says whether it is done; {looking}",
        )


def _is_first(descriptor: int, word: str, number: str) -> bool:
    """Append a word, and see whether it stands before the one that contradicts it."""
    _append(descriptor, {word: number})
    said = [each for line in _lines(descriptor) for each in ("taken", "withdrawn") if line.get(each) == number]
    return said[:1] == [word]


def _append_only(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)


def _append(descriptor: int, fields: Mapping[str, object]) -> None:
    Disk().write(descriptor, [encode_line(fields)], 0)  # the file is open to append


def _find(descriptor: int, word: str, number: str | None = None) -> dict[str, Any] | None:
    """The first line with a word, of this number if one is given."""
    return next((line for line in _lines(descriptor) if word in line and number in (None, line[word])), None)


def _lines(descriptor: int) -> list[dict[str, Any]]:
    """The lines that are whole."""
    found = map(decode_line, os.pread(descriptor, _MAX_BYTES, 0).splitlines(keepends=True))
    return [line for line in found if line]
