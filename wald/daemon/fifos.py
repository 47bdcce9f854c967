"""FIFO paths that the daemon opens, replaces and restores.

The paths of the routes' FIFOs: opening what stands there, restoring what was removed, reporting what is wrong.

A FIFO that cannot be read is reported and tried again, and does not keep the daemon from reading the others.
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

from wald.daemon.pipes import Relay, file_of, open_fifo, open_stdin
from wald.errors import InvalidInput, WaldError
from wald.files.fifos import found_files, found_words, has_fifo, is_displaced, make_fifo, same_fifo_words
from wald.files.layout import Root
from wald.settings import Config
from wald.systemd import Systemd


@dataclass(frozen=True, slots=True)
class OpenPipe:
    """A pipe that is open and has no slot yet.

    Attributes:
        held: another process kept it open while no daemon ran.
        handed_over: systemd has it already.
        replaced: another FIFO stands at the path of the route's by now.
    """

    route: str
    descriptor: int
    held: bool
    handed_over: bool = False
    replaced: bool = False
    is_stdin: bool = False
    relay: Relay | None = None

    @property
    def file(self) -> tuple[int, int]:
        """Its device and inode."""
        return file_of(os.fstat(self.descriptor))


def adopt_stdin(root: Root, config: Config, route: str) -> OpenPipe:
    """Stdin as the pipe of ``route``; nothing is read or written yet.

    Raises:
        InvalidInput: stdin cannot be read, or the route has a FIFO, or the settings want one.
    """
    if has_fifo(root, route) or (route in config.routes and config.routes[route].fifo):
        raise InvalidInput(
            f"{root.fifo(route)}: the route has a FIFO, and lines from stdin would be mixed with its lines",
            case="stdin-beside-fifo",
            fifo=root.fifo(route),
        )
    descriptor, held, relay = open_stdin(sys.stdin, root.path, route)
    return OpenPipe(route, descriptor, held, is_stdin=True, relay=relay)


class Fifos:
    """What stands at the paths of the routes' FIFOs.

    Attributes:
        unread: route → why its FIFO is not read.
        replaced: how many FIFOs were found to be gone or something else.
    """

    def __init__(self, root: Root, systemd: Systemd) -> None:
        self._root = root
        self._systemd = systemd
        self._place = functools.cache(lambda route: os.fspath(root.fifo(route)))
        self._displaced: dict[Path, str] = {}  # what stood in place of a FIFO, and was kept
        self._reported: dict[str, str] = {}  # the troubles that were reported
        self.unread: dict[str, str] = {}
        self.replaced = 0

    @property
    def troubles(self) -> dict[str, str]:
        """Messages about FIFOs that are not read and files that were written in place of one, by path."""
        unread = {str(self._root.fifo(route)): message for route, message in self.unread.items()}
        return unread | {str(path): message for path, message in self._displaced.items()}

    def new_troubles(self) -> list[str]:
        """The troubles that have come since the last call."""
        for path in [path for path in self._displaced if not os.path.lexists(path)]:
            del self._displaced[path]
        known, self._reported = self._reported, self.troubles
        return [message for path, message in self._reported.items() if known.get(path) != message]

    @contextlib.contextmanager
    def reporting(self, route: str) -> Iterator[None]:
        """If something is wrong with the FIFO of a route, report it and go on with the others."""
        try:
            yield
        except WaldError as error:
            self.unread[route] = error.message
        except OSError as error:
            self.unread[route] = f"{error.filename or self._root.fifo(route)}: {error.strerror or error}"

    def open_all(self, stdin: OpenPipe | None) -> list[OpenPipe]:
        """At a start: stdin, and the FIFO of every route."""
        opened = [] if stdin is None else [stdin]
        files = {each.file: each.route for each in opened}
        for route in self._root.route_names():
            with self.reporting(route):
                self.note_displaced(route)
                kept = self._systemd.kept(route)  # if nothing is at the path any more, others have removed it
                if kept is not None or has_fifo(self._root, route) or is_displaced(self._root, route):
                    if stdin is not None:
                        reject_stdin_route(route, stdin.route)
                    self.restore(route, kept)
                    opened.append(self.open(route, files))
                    files[opened[-1].file] = route
        self.unread = {route: why for route, why in self.unread.items() if not self.is_retired(route)}
        return opened

    def open(self, route: str, others: Mapping[tuple[int, int], str]) -> OpenPipe:
        """Open the FIFO of a route.

        Args:
            others: the route of each file that is open.

        Raises:
            InvalidInput: it is another route's as well.
            OSError: it cannot be opened.
        """
        path = self._root.fifo(route)
        file = file_of(os.stat(path))
        other = others.get(file, route)
        if other != route:
            raise InvalidInput(
                same_fifo_words(self._root, path, self._root.fifo(other)),
                case="fifo-of-two-routes",
                root=self._root.path,
                route=route,
            )
        given = self._systemd.take(file)
        if given is not None:
            return OpenPipe(route, given, held=True, handed_over=True)
        return OpenPipe(route, *open_fifo(path))

    def open_replaced(self) -> tuple[list[OpenPipe], list[str]]:
        """At a start: what systemd handed over besides the FIFOs at their paths.

        Returns:
            the FIFOs of routes that others have replaced while no daemon ran, and messages about what was closed.
        """
        routes = self._root.route_names()
        replaced, closed = [], []
        for given in self._systemd.take_rest():
            if given.name in routes and stat.S_ISFIFO(os.fstat(given.descriptor).st_mode):
                replaced.append(OpenPipe(given.name, given.descriptor, held=True, handed_over=True, replaced=True))
            else:
                path = os.readlink(f"/proc/self/fd/{given.descriptor}")
                closed.append(f"{path}: handed over by systemd as {given.name!r}, and no route's FIFO: closed")
                os.close(given.descriptor)
                self._systemd.forget(given.name)
        return replaced, closed

    def is_at_path(self, route: str, file: tuple[int, int]) -> bool:
        """Whether ``file`` is what stands at the path of the route's FIFO."""
        try:
            return file_of(os.stat(self._place(route))) == file
        except OSError:
            return False

    def is_missing(self, route: str) -> bool:
        """Whether nothing stands at the path of the route's FIFO."""
        return not os.path.lexists(self._place(route))

    def is_retired(self, route: str) -> bool:
        return self._root.retired(route).exists()

    def restore(self, route: str, descriptor: int | None) -> list[str]:
        """Make the FIFO of a route anew if it is gone, or keep aside what stands in its place; reports what was done.

        Args:
            descriptor: of the FIFO that was there; None: none is open.
        """
        if has_fifo(self._root, route) or (descriptor is None and not is_displaced(self._root, route)):
            return []
        if self.is_retired(route):
            return []
        mode = None if descriptor is None else stat.S_IMODE(os.fstat(descriptor).st_mode)
        found = make_fifo(self._root, route, mode)
        self.replaced += 1
        self.note_displaced(route)
        return [f"{self._root.fifo(route)}: {'replaced' if found else 'removed'}; made anew, with the mode it had"]

    def note_displaced(self, route: str) -> None:
        """Note the files that stood in place of the route's FIFO and were kept, to report them."""
        for path in found_files(self._root, route):
            self._displaced.setdefault(path, found_words(self._root, path, route))

    def followed(self, route: str) -> str:
        """The message that another FIFO of the route is read."""
        return f"{self._root.fifo(route)}: another FIFO than before; it is read from now on"


def reject_stdin_route(route: str, stdin_route: str) -> None:
    """
    Raises:
        InvalidInput: stdin feeds the route.
    """
    if route == stdin_route:
        raise InvalidInput(f"route {route}: stdin feeds it, so its FIFO is not read", case="stdin-feeds-route")
