"""All pipes of the daemon: opened at the start, given a slot each, looked at in turn.

At a start the takes that the last life announced are finished first, pipe by pipe, in the slots in which they were
announced; only then does every pipe get a slot of this life. So this start may be killed as well.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from wald.config import Config
from wald.daemon.arena import Arena
from wald.daemon.lifecycle import Systemd
from wald.daemon.pipes import (
    PAUSE_MAX_SECONDS,
    Pipe,
    Relay,
    Scratch,
    end_of_record,
    held_bytes,
    open_fifo,
    open_stdin,
)
from wald.daemon.takes import Takes
from wald.daemon.turn import Turn
from wald.errors import Damaged, InvalidInput
from wald.format.names import Kind
from wald.format.takes import Take
from wald.store.directory import Root
from wald.store.disk import Disk
from wald.store.raw import RawFile, Scanned
from wald.store.regular import open_regular
from wald.store.routes import has_fifo
from wald.store.writer import Draft, Placement, Route

PIPES_MAX = 1024  # slots in the takes file; the first is stdin's
_STDIN_SLOT = 0
_PAUSE_SECONDS = 0.001  # before the next look at an unfinished line; then twice as long, and so on
SOCKETS_BYTES = 1 << 20  # of a turn that pipes leave to the sockets, however much they hold


@dataclass(frozen=True, slots=True)
class _Opened:
    """A pipe before it has a slot; ``held``: somebody else kept it alive while no daemon ran."""

    route: str
    descriptor: int
    held: bool
    is_stdin: bool = False
    relay: Relay | None = None


class Intake:
    """The pipes; a route has at most one, so that a long line stays in one piece."""

    def __init__(
        self,
        root: Root,
        disk: Disk,
        poller: select.epoll,
        systemd: Systemd,
        config: Config,
    ) -> None:
        self._root = root
        self._poller = poller
        self._systemd = systemd
        self._config = config
        self._scratch = Scratch()
        self._takes = Takes(root.takes, PIPES_MAX, disk)
        self._pipes: dict[int, Pipe] = {}
        self._drafted: dict[int, Pipe] = {}
        self._leaving: list[Pipe] = []
        self._stdin_route = ""
        self._pause = _PAUSE_SECONDS
        self._look_at = 0.0
        self._free_slots = list(range(PIPES_MAX - 1, _STDIN_SLOT, -1))

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._pipes

    def __iter__(self) -> Iterator[Pipe]:
        return iter(self._pipes.values())

    @property
    def ready(self) -> bool:
        """Whether a pipe may hold something that was not looked at, or is to be closed."""
        return bool(self._leaving) or any(pipe.ready for pipe in self._pipes.values())

    @property
    def has_input(self) -> bool:
        """Whether a pipe does hold something that was not looked at."""
        return any(pipe.has_input for pipe in self._pipes.values())

    @property
    def busy(self) -> frozenset[str]:
        """The routes that are inside a long line."""
        return frozenset(pipe.route.name for pipe in (*self._pipes.values(), *self._leaving) if pipe.inside_record)

    @property
    def stdin_ended(self) -> bool:
        """Whether stdin was read, to its end."""
        return any(pipe.ended for pipe in self._pipes.values() if pipe.route.name == self._stdin_route)

    @property
    def lost(self) -> list[str]:
        """After a stop: the routes whose pipes hold something and are gone with us."""
        return [
            pipe.route.name
            for pipe in self._pipes.values()
            if (pipe.hung_up or pipe.route.name == self._stdin_route) and held_bytes(pipe.descriptor)
        ]

    def open(self, stdin_route: str | None, open_records: dict[str, int]) -> tuple[list[str], list[Draft]]:
        """Open stdin and every route's FIFO.

        Args:
            open_records: route → sequence of the record that recovery found unfinished.

        Returns:
            what was finished of the last life's takes, in words, and the drafts that end records whose rest is lost.

        Raises:
            InvalidInput: stdin cannot be read, its route has a FIFO already, or there are too many FIFOs.
        """
        opened = [self._open_fifo(name) for name in self._root.route_names() if has_fifo(self._root, name)]
        if stdin_route is not None:
            self._stdin_route = stdin_route
            if has_fifo(self._root, stdin_route):
                raise InvalidInput(
                    f"{self._root.fifo(stdin_route)}: the route has a FIFO, and stdin would come between its lines",
                    hint="--stdin another route, or write to the FIFO: producer > FIFO",
                )
            descriptor, held, relay = open_stdin(sys.stdin.fileno())
            opened.insert(0, _Opened(stdin_route, descriptor, held, True, relay))
        told = [words for each in opened if each.held and (words := self._finish_take(each))]
        self._takes.clear_all()
        for each in opened:
            if self._root.retired(each.route).exists():
                os.close(each.descriptor)
                self._systemd.forget(each.route)
            else:
                self._add(each, open_records.get(each.route, 0) if each.held else 0)
        going_on = self.busy
        lost = [end_of_record(Route.named(name), open_records[name]) for name in open_records if name not in going_on]
        return told, lost

    def add(self, route: str) -> None:
        """Open the FIFO of a route that was made while the daemon runs, unless it is open; a FIFO that stood in its
        place before is closed.

        Raises:
            InvalidInput: there are too many FIFOs, or stdin feeds the route.
        """
        if route == self._stdin_route:
            raise InvalidInput(f"route {route}: stdin feeds it, so its FIFO is not read", hint="use another route")
        status = os.stat(self._root.fifo(route))
        for pipe in self._pipes.values():
            if pipe.route.name == route:
                opened = os.fstat(pipe.descriptor)
                if (opened.st_dev, opened.st_ino) == (status.st_dev, status.st_ino):
                    return
        self.drop(route)
        self._add(self._open_fifo(route), 0)

    def drop(self, route: str) -> None:
        """Stop reading the FIFO of a route: the next turn ends its record and closes it. Stdin is read on."""
        for descriptor, pipe in list(self._pipes.items()):
            if pipe.route.name == route != self._stdin_route:
                self._poller.unregister(descriptor)
                self._leaving.append(self._pipes.pop(descriptor))  # it may have a batch in this turn
                self._systemd.forget(route)

    def look_again_at(self) -> float | None:
        """When :meth:`look_again` is due, on the monotonic clock."""
        return self._look_at if any(pipe.waits and not pipe.ready for pipe in self._pipes.values()) else None

    def look_again(self, now: float) -> None:
        """Look after the unfinished lines, ever more rarely.

        The kernel tells of the end of each write to a pipe, but where the pipe is not empty it says nothing of one that
        fills it up and has to wait for us.
        """
        if now >= self._look_at:
            for pipe in self._pipes.values():
                pipe.look_again(now)
            self._pause = min(2 * self._pause, PAUSE_MAX_SECONDS)
            self._look_at = now + self._pause

    def notice(self, descriptor: int, events: int, now: float) -> None:
        """Something happened to a pipe."""
        self._pause = _PAUSE_SECONDS
        self._look_at = min(self._look_at, now + self._pause)  # a busy pipe must not put off the look at another
        pipe = self._pipes[descriptor]
        pipe.ready = True
        pipe.hung_up = pipe.hung_up or bool(events & select.EPOLLHUP)

    def collect(self, turn: Turn, arena: Arena) -> None:
        """Hand what the ready pipes hold to ``turn``; who came to nothing this time comes first the next."""
        self._drafted.clear()
        self._close_leaving(turn)
        for descriptor, pipe in list(self._pipes.items()):
            if arena.free < pipe.chunk_bytes + SOCKETS_BYTES:
                return
            if pipe.ready and not pipe.ended:
                draft = pipe.collect(arena)
                if draft is not None:
                    turn.add(draft)
                    self._drafted[id(draft)] = pipe
                    self._pipes[descriptor] = self._pipes.pop(descriptor)

    def announce(self, placement: Placement) -> None:
        """As :class:`wald.daemon.committer.Sources`."""
        if self._drafted:
            self._takes.restore()
        for placed in placement.batches:
            if (pipe := self._drafted.get(id(placed.draft))) is not None:
                pipe.announce(placed, placement.segment)

    def settle(self, placement: Placement) -> list[str]:
        """As :class:`wald.daemon.committer.Sources`."""
        settled = [
            pipe.settle(placed)
            for placed in placement.batches
            if (pipe := self._drafted.get(id(placed.draft))) is not None
        ]
        return [words for words in settled if words]

    def release_writing_ends(self) -> None:
        """At a stop: let the FIFOs show whether anybody else can still write to them."""
        for pipe in list(self._pipes.values()):
            self._poller.unregister(pipe.descriptor)
            del self._pipes[pipe.descriptor]
            pipe.release_writing_end()
            self._pipes[pipe.descriptor] = pipe

    def look_last(self) -> bool:
        """At a stop: whether there is still something to take."""
        for pipe in self._pipes.values():
            pipe.look_last()
        return self.ready

    def close(self) -> None:
        for pipe in (*self._pipes.values(), *self._leaving):
            pipe.close()
        self._pipes.clear()
        self._leaving.clear()
        self._scratch.close()
        self._takes.close()

    def _open_fifo(self, route: str) -> _Opened:
        path = self._root.fifo(route)
        given = self._systemd.take(str(path))
        if given is not None:
            return _Opened(route, given, True)
        descriptor, held = open_fifo(path)
        self._systemd.keep(route, descriptor)
        return _Opened(route, descriptor, held)

    def _close_leaving(self, turn: Turn) -> None:
        """End the records of the pipes that are no longer read; close those whose record has ended."""
        for pipe in list(self._leaving):
            closing = pipe.close_record()
            if closing is not None:
                turn.add(closing)
                self._drafted[id(closing)] = pipe
            else:
                self._leaving.remove(pipe)
                pipe.close()
                with contextlib.suppress(OSError):  # shortened, on a full disk: then the slot says nothing either
                    self._takes.clear(pipe.slot)
                self._free_slots.append(pipe.slot)

    def _add(self, opened: _Opened, open_sequence: int) -> None:
        """Watch a pipe."""
        if not (opened.is_stdin or self._free_slots):
            os.close(opened.descriptor)
            raise InvalidInput(f"route {opened.route}: more than {PIPES_MAX - 1} FIFOs", hint="use the socket")
        number = _STDIN_SLOT if opened.is_stdin else self._free_slots.pop()
        self._pipes[opened.descriptor] = self._make(opened, number, open_sequence)
        self._poller.register(opened.descriptor, select.EPOLLIN | select.EPOLLET)

    def _finish_take(self, opened: _Opened) -> str:
        numbers = [_STDIN_SLOT] if opened.is_stdin else range(1, PIPES_MAX)
        for number in numbers:
            told = self._takes.told(number)
            if told is None or told[0].route != opened.route or opened.relay is not None:
                continue
            done = self._make(opened, number, 0).resolve(self._written(told[0]))
            if done:
                return f"{opened.route}: {done}"
        return ""

    def _make(self, opened: _Opened, slot: int, open_sequence: int) -> Pipe:
        return Pipe(
            Route.named(opened.route),
            opened.descriptor,
            self._scratch,
            self._takes,
            slot,
            record_max_bytes=self._config.record_max_bytes,
            open_sequence=open_sequence,
            holds_both_ends=not opened.is_stdin,
            relay=opened.relay,
        )

    def _written(self, take: Take) -> bytes | None:
        """The payload at the place that was announced; None if no such batch was written."""
        path = self._root.segment(take.segment, Kind.RAW)
        try:
            descriptor = open_regular(path)
        except (FileNotFoundError, Damaged):
            return None
        try:
            raw = RawFile(descriptor)
            found = next(raw.scan(start=take.position), None)
            whole = isinstance(found, Scanned) and (found.offset, found.route) == (take.position, take.route)
            return raw.payload(found) if whole and isinstance(found, Scanned) else None
        finally:
            os.close(descriptor)
