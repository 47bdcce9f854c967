"""FIFO paths that the daemon opens, restores and reports.

A FIFO that cannot be read is reported and retried; the others are read.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from wald.daemon.pipes import Relay, file_id, open_fifo, open_stdin
from wald.errors import InvalidInput, WaldError
from wald.files.layout import Root
from wald.files.routes import describe_displaced, describe_shared, displaced_files, has_fifo, is_displaced, make_fifo
from wald.settings import Config
from wald.systemd import Systemd


@dataclass(frozen=True, slots=True)
class OpenPipe:
    """Open pipe without a slot."""

    route: str
    descriptor: int
    held: bool  # another process kept it open while no daemon ran
    handed_over: bool = False  # systemd already stores it
    replaced: bool = False  # another FIFO is at the route's path
    is_stdin: bool = False
    relay: Relay | None = None

    @property
    def file(self) -> tuple[int, int]:
        return file_id(os.fstat(self.descriptor))


def adopt_stdin(root: Root, config: Config, route: str) -> OpenPipe:
    """Return stdin as a pipe, without reading or writing."""
    if has_fifo(root, route) or (route in config.routes and config.routes[route].fifo):
        raise InvalidInput(
            f"{root.fifo(route)}: the route has a FIFO; lines from stdin would be interleaved with it",
            case="stdin-beside-fifo",
            fifo=root.fifo(route),
        )
    descriptor, held, relay = open_stdin(sys.stdin, root.path, route)
    return OpenPipe(route, descriptor, held, is_stdin=True, relay=relay)


def reject_stdin_route(route: str, stdin_route: str) -> None:
    if route == stdin_route:
        raise InvalidInput(f"route {route} is fed by stdin, so its FIFO is not read", case="stdin-feeds-route")


class Fifos:
    """Paths of the routes' FIFOs."""

    def __init__(self, root: Root, systemd: Systemd) -> None:
        self._root = root
        self._systemd = systemd
        self._path_of = functools.cache(lambda route: os.fspath(root.fifo(route)))
        self._displaced: dict[Path, str] = {}  # files moved aside for a FIFO
        self._reported: dict[str, str] = {}
        self.unread: dict[str, str] = {}  # reason by route
        self.replaced = 0  # FIFOs found missing or replaced

    @property
    def problems(self) -> dict[str, str]:
        """Messages by path."""
        unread = {str(self._root.fifo(route)): message for route, message in self.unread.items()}
        return unread | {str(path): message for path, message in self._displaced.items()}

    def new_problems(self) -> list[str]:
        """Return problems since the last call."""
        for path in [path for path in self._displaced if not os.path.lexists(path)]:
            del self._displaced[path]
        reported, self._reported = self._reported, self.problems
        return [message for path, message in self._reported.items() if reported.get(path) != message]

    @contextlib.contextmanager
    def reporting(self, route: str) -> Iterator[None]:
        """Record an error instead of raising it."""
        try:
            yield
        except WaldError as error:
            self.unread[route] = error.message
        except OSError as error:
            self.unread[route] = f"{error.filename or self._root.fifo(route)}: {error.strerror or error}"

    def open_all(self, stdin: OpenPipe | None) -> list[OpenPipe]:
        """Open all FIFOs; return them after ``stdin``."""
        opened = [] if stdin is None else [stdin]
        files = {each.file: each.route for each in opened}
        for route in self._root.route_names():
            with self.reporting(route):
                self.note_displaced(route)
                stored = self._systemd.kept(route)  # its FIFO was removed if nothing is at the path
                if stored is not None or has_fifo(self._root, route) or is_displaced(self._root, route):
                    if stdin is not None:
                        reject_stdin_route(route, stdin.route)
                    self.restore(route, stored)
                    opened.append(self.open(route, files))
                    files[opened[-1].file] = route
        self.unread = {route: reason for route, reason in self.unread.items() if not self.is_retired(route)}
        return opened

    def open(self, route: str, others: Mapping[tuple[int, int], str]) -> OpenPipe:
        """Open a route's FIFO; raise InvalidInput if ``others`` (open files) has it for another route."""
        path = self._root.fifo(route)
        file = file_id(os.stat(path))
        other = others.get(file, route)
        if other != route:
            raise InvalidInput(
                describe_shared(self._root, path, self._root.fifo(other)),
                case="fifo-of-two-routes",
                root=self._root.path,
                route=route,
            )
        inherited = self._systemd.take(file)
        if inherited is not None:
            return OpenPipe(route, inherited, held=True, handed_over=True)
        return OpenPipe(route, *open_fifo(path))

    def open_replaced(self) -> tuple[list[OpenPipe], list[str]]:
        """Return inherited FIFOs that were replaced while no daemon ran; close the rest, with messages."""
        routes = self._root.route_names()
        replaced, closed = [], []
        for inherited in self._systemd.take_rest():
            name, descriptor = inherited.name, inherited.descriptor
            if name in routes and stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                replaced.append(OpenPipe(name, descriptor, held=True, handed_over=True, replaced=True))
            else:
                path = os.readlink(f"/proc/self/fd/{descriptor}")
                closed.append(f"{path}: closed: systemd handed it over as {name!r}, and it is not the FIFO of a route")
                os.close(descriptor)
                self._systemd.forget(name)
        return replaced, closed

    def is_at_path(self, route: str, file: tuple[int, int]) -> bool:
        try:
            return file_id(os.stat(self._path_of(route))) == file
        except OSError:
            return False

    def is_missing(self, route: str) -> bool:
        return not os.path.lexists(self._path_of(route))

    def is_retired(self, route: str) -> bool:
        return self._root.retired(route).exists()

    def restore(self, route: str, descriptor: int | None) -> list[str]:
        """Recreate a removed or replaced FIFO, whose ``descriptor`` may be open; move a replacement aside."""
        if has_fifo(self._root, route) or (descriptor is None and not is_displaced(self._root, route)):
            return []
        if self.is_retired(route):
            return []
        mode = None if descriptor is None else stat.S_IMODE(os.fstat(descriptor).st_mode)
        found = make_fifo(self._root, route, mode)
        self.replaced += 1
        self.note_displaced(route)
        return [f"{self._root.fifo(route)}: {'replaced' if found else 'removed'}; created again with its mode"]

    def note_displaced(self, route: str) -> None:
        for path in displaced_files(self._root, route):
            self._displaced.setdefault(path, describe_displaced(self._root, path, route))

    def following(self, route: str) -> str:
        return f"{self._root.fifo(route)}: another FIFO than before: reading it now"
