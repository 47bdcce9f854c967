"""What is in the directories of a log, without following a link: whether it may be there, and who may change it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from wald.cli.doctor.judging.log import Files
from wald.files.layout import TEMPORARY, Root, known_names
from wald.files.routes import fifo_problems
from wald.format.names import CURSOR_SUFFIX, CURSORS, is_group_file

_MOST = 20_000
_REWRITTEN = frozenset({"head", "lock", "transfers"})  # in place, so another name of the same file shows it
_IS_TYPE = {"wald.sock": stat.S_ISSOCK, "in": stat.S_ISFIFO}


class _Examination:
    """Collects what is found in one log."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._owner = root.path.stat().st_uid
        self._examined = 0
        self._is_complete = True
        self._unsafe: list[str] = []
        self._unsafe_cursors: list[str] = []
        self._strange: list[str] = []

    def files(self) -> Files:
        for directory, is_known in known_names(self._root):
            self._in(directory, is_known)
        return Files(
            self._examined,
            tuple(self._unsafe),
            tuple(self._unsafe_cursors),
            tuple(self._strange),
            self._troubles(),
            self._is_complete,
        )

    def _in(self, directory: Path, is_known: Callable[[str], bool]) -> None:
        for entry in self._entries(directory):
            if self._examined >= _MOST:
                self._is_complete = False
                return
            self._examined += 1
            if reason := self._reason(entry):
                (self._unsafe_cursors if self._holds_cursors(entry) else self._unsafe).append(f"{entry.path}: {reason}")
            elif not is_known(entry.name):
                self._strange.append(entry.path)

    def _holds_cursors(self, entry: os.DirEntry[str]) -> bool:
        """Whether a group may lose its place with it: a cursor, or a directory in which there may be some."""
        is_directory = entry.name == CURSORS or Path(entry.path) == self._root.routes
        is_route = Path(entry.path).parent == self._root.routes and entry.is_dir(follow_symlinks=False)
        return entry.name.endswith(CURSOR_SUFFIX) or is_directory or is_route

    def _entries(self, directory: Path) -> Iterator[os.DirEntry[str]]:
        """Those of a directory; a link is not followed."""
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            os.close(descriptor)
            yield from sorted(os.scandir(directory), key=lambda entry: entry.name)
        except FileNotFoundError:
            return
        except OSError:  # may not be listed, or is no directory, which its own entry reports
            self._is_complete = False

    def _reason(self, entry: os.DirEntry[str]) -> str:
        """Why a file is not safe; "" if it is."""
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:  # gone in the meantime
            return ""
        mode = status.st_mode
        expected = _IS_TYPE.get(entry.name)
        if stat.S_ISLNK(mode):
            is_systemds = entry.name == "in" and status.st_uid in (0, self._owner) and _leads_to_fifo(entry)
            return "" if is_systemds else "a symbolic link"
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or (expected and expected(mode))):
            return "a FIFO, a socket or a device that wald did not make"
        if status.st_uid not in (0, self._owner) and not _is_of_group(entry.name):
            return f"belongs to user {status.st_uid}, not to the log's owner, {self._owner}"
        if mode & stat.S_IWOTH and (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            return f"mode {stat.S_IMODE(mode):04o}: every user may change it"
        if entry.name in _REWRITTEN and status.st_nlink > 1:
            return "has a second name, under which it may be changed"
        return ""

    def _troubles(self) -> tuple[str, ...]:
        try:
            return tuple(message for _, message in fifo_problems(self._root))
        except OSError:
            self._is_complete = False
            return ()


def files(root: Path) -> Files:
    """Look at every name in the directories of the log."""
    return _Examination(Root(root)).files()


def _is_of_group(name: str) -> bool:
    """True if a file may belong to a cursor owner, who may be another user."""
    return is_group_file(name) or name.endswith(TEMPORARY)


def _leads_to_fifo(entry: os.DirEntry[str]) -> bool:
    """Whether a link leads to a FIFO, as that of a route does whose FIFO systemd makes."""
    try:
        return stat.S_ISFIFO(entry.stat().st_mode)
    except OSError:
        return False
