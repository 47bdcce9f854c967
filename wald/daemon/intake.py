"""All pipes of the daemon: opened at the start, given a slot each, looked at in turn.

At a start the transfers that the last life announced are finished first, pipe by pipe, in the slots in which they were
announced; only then does every pipe get a slot of this life. So this start may be killed as well. A pipe that is opened
later has its transfer finished then, and the slot is kept until then.

Every second each FIFO's path is looked at. One that was removed, or replaced by a file, is put back; the pipe that was
open is read to its end, for its writers still have it. A FIFO that cannot be read is told, and tried again, and keeps
nobody from the others.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import shlex
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from wald.config import Config
from wald.daemon.lifecycle import Systemd
from wald.daemon.pipes import (
    PAUSE_MAX_SECONDS,
    Pipe,
    Relay,
    Scratch,
    end_of_record,
    file_of,
    held_bytes,
    open_fifo,
    open_stdin,
)
from wald.daemon.transfers import Transfers
from wald.daemon.turn import Arena, Turn
from wald.daemon.unfinished import Unfinished, unfinished_transfers
from wald.errors import InvalidInput, WaldError, command_line
from wald.store.files.directory import Root
from wald.store.files.disk import Disk
from wald.store.files.fifos import found_files, found_words, has_fifo, is_displaced, make_fifo, same_fifo_words
from wald.store.writing.writer import Draft, Placed, Placement, Route

PIPES_MAX = 1024  # slots in the transfers file; the first is stdin's
_STDIN_SLOT = 0
_PAUSE_SECONDS = 0.001  # before the next look at an unfinished line; then twice as long, and so on
_LOOK_AFTER_SECONDS = 1.0  # between looks at the paths of the FIFOs
SOCKETS_BYTES = 1 << 20  # of a turn that pipes leave to the sockets, however much they hold


@dataclass(frozen=True, slots=True)
class Opened:
    """A pipe before it has a slot.

    Attributes:
        held: somebody else kept it alive while no daemon ran.
        handed_over: systemd has it already.
    """

    route: str
    descriptor: int
    held: bool
    handed_over: bool = False
    is_stdin: bool = False
    relay: Relay | None = None


def take_stdin(root: Root, config: Config, route: str) -> Opened:
    """Stdin as the pipe of ``route``; nothing is read or written yet.

    Raises:
        InvalidInput: stdin cannot be read, or the route has a FIFO, or shall have one.
    """
    if has_fifo(root, route) or (route in config.routes and config.routes[route].fifo):
        raise InvalidInput(
            f"{root.fifo(route)}: the route has a FIFO, and stdin would come between its lines",
            hint=f"--stdin with another route, or write to the FIFO: producer > {shlex.quote(str(root.fifo(route)))}",
        )
    descriptor, held, relay = open_stdin(
        sys.stdin, hint=f"producer | {command_line(root.path, f'run --stdin {route}')}"
    )
    return Opened(route, descriptor, held, is_stdin=True, relay=relay)


class Intake:
    """The pipes. A route has one, and beside it those that had its place before, until their writers have left.

    Attributes:
        replaced: how many FIFOs were found to be gone or something else.
    """

    def __init__(
        self,
        root: Root,
        disk: Disk,
        poller: select.epoll,
        systemd: Systemd,
        config: Config,
    ) -> None:
        self._root = root
        self._place = functools.cache(lambda route: os.fspath(root.fifo(route)))
        self._poller = poller
        self._systemd = systemd
        self._config = config
        self._scratch = Scratch()
        self._transfers = Transfers(root.transfers, PIPES_MAX, disk)
        self._pipes: dict[int, Pipe] = {}
        # What a turn or a second asks of all pipes it asks of these: there may be a thousand, of which one is busy.
        self._current: dict[str, Pipe] = {}  # by route, the one that was last found at the path of its FIFO
        self._awake: dict[Pipe, None] = {}  # ready, or waiting for the rest of a line; who is next stands first
        self._inside: set[Pipe] = set()  # a record
        self._outgoing: set[Pipe] = set()  # whose place another has by now
        self._leaving: list[Pipe] = []
        self._unread: dict[str, str] = {}  # route → why its FIFO is not read
        self._found: dict[Path, str] = {}  # what stood in place of a FIFO, and was kept
        self._told: dict[str, str] = {}  # the troubles that were told
        self._looked_after = 0.0
        self.replaced = 0
        self._stdin_route = ""
        self._pause = _PAUSE_SECONDS
        self._look_at = 0.0
        self._free_slots: list[int] = []
        self._unfinished: dict[int, Unfinished] = {}  # by the inode of the pipe

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._pipes

    def __iter__(self) -> Iterator[Pipe]:
        return iter(self._pipes.values())

    @property
    def ready(self) -> bool:
        """Whether a pipe may hold something that was not looked at, or is to be closed."""
        return bool(self._leaving) or any(pipe.ready and not self._has_to_wait(pipe) for pipe in self._awake)

    @property
    def has_input(self) -> bool:
        """Whether a pipe does hold something that was not looked at."""
        return any(pipe.has_input for pipe in self._awake)

    @property
    def busy(self) -> frozenset[str]:
        """The routes that are inside a long line."""
        return frozenset(pipe.route.name for pipe in self._inside)

    @property
    def stdin_ended(self) -> bool:
        """Whether stdin was read, to its end."""
        pipe = self._current.get(self._stdin_route)
        return pipe is not None and pipe.ended

    @property
    def lost(self) -> list[str]:
        """After a stop: the routes whose pipes hold something and are gone with us."""
        return [
            pipe.route.name
            for pipe in self._pipes.values()
            if (pipe.hung_up or pipe.route.name == self._stdin_route) and held_bytes(pipe.descriptor)
        ]

    @property
    def troubles(self) -> dict[str, str]:
        """What keeps lines that were written to a FIFO from the log, in words, by its path."""
        unread = {str(self._root.fifo(route)): words for route, words in self._unread.items()}
        return unread | {str(path): words for path, words in self._found.items()}

    def open(
        self, stdin: Opened | None, open_records: dict[str, int], *, log_id: bytes
    ) -> tuple[list[str], list[Draft]]:
        """Watch stdin, and open every route's FIFO.

        Args:
            stdin: what :func:`take_stdin` gave; None: it is not read.
            open_records: route → sequence of the record that recovery found unfinished.

        Returns:
            what was finished of the last life's transfers, as text, and the drafts that end records whose rest is lost.
        """
        opened: list[Opened] = []
        if stdin is not None:
            self._stdin_route = stdin.route
            opened.append(stdin)
        files = {file_of(os.fstat(each.descriptor)): each.route for each in opened}
        for name in self._root.route_names():
            with self._told_of(name):
                self._find(name)
                if has_fifo(self._root, name) or is_displaced(self._root, name):
                    self._require_other_than_stdins(name)
                    self._put_back(name, None)
                    opened.append(self._open_fifo(name, files))
                    files[file_of(os.fstat(opened[-1].descriptor))] = name
        self._unread = {name: words for name, words in self._unread.items() if not self._root.retired(name).exists()}
        self._unfinished = unfinished_transfers(self._root, self._transfers, PIPES_MAX, log_id=log_id)
        told = [words for each in opened if (words := self._finish_take(each))]
        self._clear_transfers()
        for each in opened:
            if self._root.retired(each.route).exists():
                os.close(each.descriptor)
                self._systemd.forget(each.route)
            else:
                with self._told_of(each.route):
                    self._add(each, open_records.get(each.route, 0) if each.held else 0)
        going_on = self.busy
        lost = [end_of_record(Route.named(name), open_records[name]) for name in open_records if name not in going_on]
        return told, lost

    def add(self, route: str) -> None:
        """Open the FIFO of a route that was made while the daemon runs; one in its place before is read to its end.

        Raises:
            InvalidInput: there are too many FIFOs, it is another route's as well, or stdin feeds the route.
            OSError: it cannot be opened.
        """
        self._require_other_than_stdins(route)
        self._find(route)
        self._follow(route)

    def look_after(self, now: float) -> list[str]:
        """About once a second: see to it that every FIFO is the one that is read; returns what is new, in words."""
        if now < self._looked_after + _LOOK_AFTER_SECONDS:
            return []
        self._looked_after = now
        done: list[str] = []
        for route in self._current.keys() | self._unread.keys():
            pipe = self._current.get(route)
            if route == self._stdin_route or (pipe and route not in self._unread and self._is_in_place(route, pipe)):
                continue
            if pipe is None and not os.path.lexists(self._root.fifo(route)):
                del self._unread[route]  # it has none any more
                continue
            with self._told_of(route):
                done += self._put_back(route, pipe)
                done += self._follow(route)
        for path in [path for path in self._found if not os.path.lexists(path)]:
            del self._found[path]
        known, self._told = self._told, self.troubles
        return done + [words for path, words in self._told.items() if known.get(path) != words]

    def drop(self, route: str) -> None:
        """Stop reading the FIFO of a route: the next turn ends its record and closes it. Stdin is read on."""
        self._unread.pop(route, None)
        for pipe in list(self._pipes.values()):
            if pipe.route.name == route != self._stdin_route:
                self._let_go(pipe)
                self._systemd.forget(route)

    def look_again_at(self) -> float | None:
        """When :meth:`look_again` or :meth:`look_after` is due, on the monotonic clock."""
        if any(pipe.waits and not pipe.ready for pipe in self._awake):
            return self._look_at
        return self._looked_after + _LOOK_AFTER_SECONDS if self._pipes or self._unread else None

    def look_again(self, now: float) -> None:
        """Look after the unfinished lines, ever more rarely.

        The kernel tells of the end of each write to a pipe, but where the pipe is not empty it says nothing of one that
        fills it up and has to wait for us.
        """
        if now >= self._look_at:
            for pipe in self._awake:
                pipe.look_again(now)
            self._pause = min(2 * self._pause, PAUSE_MAX_SECONDS)
            self._look_at = now + self._pause

    def notice(self, descriptor: int, events: int, now: float) -> None:
        """Something happened to a pipe."""
        self._pause = _PAUSE_SECONDS
        self._look_at = min(self._look_at, now + self._pause)  # a busy pipe must not put off the look at another
        pipe = self._pipes[descriptor]
        pipe.ready = True
        self._awake[pipe] = None
        pipe.hung_up = pipe.hung_up or bool(events & select.EPOLLHUP)

    def collect(self, turn: Turn, arena: Arena) -> None:
        """Hand what the ready pipes hold to ``turn``; who came to nothing this time comes first the next."""
        self._close_leaving(turn)
        for pipe in list(self._awake):
            if arena.free < pipe.chunk_bytes + SOCKETS_BYTES:
                return
            if pipe.ready and not pipe.ended and not self._has_to_wait(pipe, turn.open_routes):
                draft = pipe.collect(arena)
                if draft is not None:
                    turn.add(draft)
                    self._awake[pipe] = self._awake.pop(pipe)
            if pipe.ended and pipe in self._outgoing:
                self._let_go(pipe)
            elif not (pipe.ready or pipe.waits):
                del self._awake[pipe]

    def announce(self, placement: Placement) -> None:
        """As :class:`wald.daemon.committer.Sources`."""
        ours = list(_from_pipes(placement))
        if ours:
            self._transfers.restore()
        for pipe, placed in ours:
            pipe.announce(placed, placement.segment)

    def settle(self, placement: Placement) -> list[str]:
        """As :class:`wald.daemon.committer.Sources`."""
        wrong = []
        for pipe, placed in _from_pipes(placement):
            wrong.append(pipe.settle(placed))
            (self._inside.add if pipe.inside_record else self._inside.discard)(pipe)
        return [words for words in wrong if words]

    def release_writing_ends(self) -> None:
        """At a stop: let the FIFOs show whether anybody else can still write to them."""
        for pipe in list(self._pipes.values()):
            self._poller.unregister(pipe.descriptor)
            self._release_writing_end(pipe)

    def look_last(self) -> bool:
        """At a stop: whether there is still something to take."""
        for pipe in self._pipes.values():
            pipe.look_last()
            if pipe.ready:
                self._awake[pipe] = None
        return self.ready

    def close(self) -> None:
        for pipe in (*self._pipes.values(), *self._leaving):
            pipe.close()
        self._pipes.clear()
        self._leaving.clear()
        self._scratch.close()
        self._transfers.close()

    def _is_in_place(self, route: str, pipe: Pipe) -> bool:
        """Whether ``pipe`` is what stands at the path of the route's FIFO."""
        try:
            return file_of(os.stat(self._place(route))) == pipe.file
        except OSError:
            return False

    def _put_back(self, route: str, pipe: Pipe | None) -> list[str]:
        """Make the FIFO of a route anew if it is gone, or keep aside what stands in its place."""
        if has_fifo(self._root, route) or not (pipe or is_displaced(self._root, route)):
            return []
        if self._root.retired(route).exists():
            return []
        found = make_fifo(self._root, route, stat.S_IMODE(os.fstat(pipe.descriptor).st_mode) if pipe else None)
        self.replaced += 1
        self._find(route)
        return [f"{self._root.fifo(route)}: {'replaced' if found else 'removed'}; made anew, with the mode it had"]

    def _follow(self, route: str) -> list[str]:
        """Read the FIFO that is now at the path of a route's; one that was there before is read to its end.

        Raises:
            InvalidInput, OSError: it cannot be read.
        """
        old = self._current.get(route)
        if old is not None and self._is_in_place(route, old):
            self._unread.pop(route, None)
            return []
        opened = self._open_fifo(route, {pipe.file: pipe.route.name for pipe in self._pipes.values()})
        told = [self._finish_take(opened)]
        if old is not None:
            self._systemd.forget(route)
            self._poller.unregister(old.descriptor)
            self._release_writing_end(old)
            self._poller.register(old.descriptor, select.EPOLLIN | select.EPOLLET)
            self._outgoing.add(old)
            del self._current[route]
        self._add(opened, 0)
        waited = self._unread.pop(route, None) is not None
        if old is not None or waited:
            told.append(f"{self._root.fifo(route)}: another FIFO than before; it is read from now on")
        return [words for words in told if words]

    def _let_go(self, pipe: Pipe) -> None:
        """Have the next turn end a pipe's record and close it: it may have a batch in this one."""
        self._poller.unregister(pipe.descriptor)
        del self._pipes[pipe.descriptor]
        if self._current.get(pipe.route.name) is pipe:
            del self._current[pipe.route.name]
        self._awake.pop(pipe, None)
        self._outgoing.discard(pipe)
        self._leaving.append(pipe)

    def _release_writing_end(self, pipe: Pipe) -> None:
        del self._pipes[pipe.descriptor]
        pipe.release_writing_end()
        self._pipes[pipe.descriptor] = pipe
        self._awake[pipe] = None

    def _has_to_wait(self, pipe: Pipe, open_routes: frozenset[str] = frozenset()) -> bool:
        """Whether another pipe of the same route is inside a long line."""
        return bool(self._outgoing) and (
            pipe.route.name in open_routes
            or any(other is not pipe and other.route.name == pipe.route.name for other in self._inside)
        )

    def _require_other_than_stdins(self, route: str) -> None:
        if route == self._stdin_route:
            raise InvalidInput(f"route {route}: stdin feeds it, so its FIFO is not read", hint="use another route")

    def _find(self, route: str) -> None:
        for path in found_files(self._root, route):
            self._found.setdefault(path, found_words(self._root, path, route))

    @contextlib.contextmanager
    def _told_of(self, route: str) -> Iterator[None]:
        """Whatever is wrong with one FIFO is no reason not to read the others."""
        try:
            yield
        except WaldError as error:
            self._unread[route] = error.message
        except OSError as error:
            self._unread[route] = f"{error.filename or self._root.fifo(route)}: {error.strerror or error}"

    def _open_fifo(self, route: str, others: Mapping[tuple[int, int], str]) -> Opened:
        """
        Args:
            others: the route of each file that is open.
        """
        path = self._root.fifo(route)
        file = file_of(os.stat(path))
        other = others.get(file, route)
        if other != route:
            raise InvalidInput(
                same_fifo_words(self._root, path, self._root.fifo(other)),
                hint=command_line(self._root.path, f"route add {route} --fifo"),
            )
        given = self._systemd.take(file)
        if given is not None:
            return Opened(route, given, held=True, handed_over=True)
        return Opened(route, *open_fifo(path))

    def _close_leaving(self, turn: Turn) -> None:
        """End the records of the pipes that are no longer read; close those whose record has ended."""
        for pipe in list(self._leaving):
            closing = pipe.close_record()
            if closing is not None:
                turn.add(closing)
            else:
                self._leaving.remove(pipe)
                pipe.close()
                self._free(pipe.slot)

    def _add(self, opened: Opened, open_sequence: int) -> None:
        """Watch a pipe."""
        if not (opened.is_stdin or self._free_slots):
            os.close(opened.descriptor)
            raise InvalidInput(f"route {opened.route}: more than {PIPES_MAX - 1} FIFOs", hint="use the socket")
        if not (opened.is_stdin or opened.handed_over):
            self._systemd.keep(opened.route, opened.descriptor)
        number = _STDIN_SLOT if opened.is_stdin else self._free_slots.pop()
        pipe = self._make(opened, number, open_sequence)
        self._pipes[opened.descriptor] = self._current[opened.route] = pipe
        self._awake[pipe] = None
        if pipe.inside_record:
            self._inside.add(pipe)
        self._poller.register(opened.descriptor, select.EPOLLIN | select.EPOLLET)

    def _clear_transfers(self) -> None:
        """Empty the slots of the last life; those of pipes that could not be opened are finished later."""
        self._unfinished = {
            inode: transfer for inode, transfer in self._unfinished.items() if transfer.slot != _STDIN_SLOT
        }
        kept = {transfer.slot for transfer in self._unfinished.values()}
        self._free_slots = [slot for slot in range(PIPES_MAX - 1, _STDIN_SLOT, -1) if slot not in kept]
        for slot in {*range(PIPES_MAX)} - kept:
            self._transfers.clear(slot)

    def _finish_take(self, opened: Opened) -> str:
        """Finish the transfer of an earlier life from this very pipe; returns what was done, in words."""
        _, inode = file_of(os.fstat(opened.descriptor))
        transfer = self._unfinished.pop(inode, None)
        if transfer is None:
            return ""
        done = self._make(opened, transfer.slot, 0).resolve(transfer.payload) if opened.held else ""
        self._free(transfer.slot)
        return f"{opened.route}: {done}" if done else ""

    def _free(self, slot: int) -> None:
        with contextlib.suppress(OSError):  # shortened, on a full disk: then the slot says nothing either
            self._transfers.clear(slot)
        self._free_slots.append(slot)

    def _make(self, opened: Opened, slot: int, open_sequence: int) -> Pipe:
        return Pipe(
            Route.named(opened.route),
            opened.descriptor,
            self._scratch,
            self._transfers,
            slot,
            record_max_bytes=self._config.record_max_bytes,
            open_sequence=open_sequence,
            holds_both_ends=not opened.is_stdin,
            relay=opened.relay,
        )


def _from_pipes(placement: Placement) -> Iterator[tuple[Pipe, Placed]]:
    return ((placed.draft.source, placed) for placed in placement.batches if isinstance(placed.draft.source, Pipe))
