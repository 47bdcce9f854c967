"""Pipes of all routes, read in order.

All pipes of the daemon: opened at the start, given a slot each, drained in turn.

At a start the transfers that the last life recorded are finished first, pipe by pipe, in the slots in which they were
recorded; only then does every pipe get a slot of this life. So this start may be killed as well. The transfer of a pipe
that is opened later keeps its slot until then.

Every second the path of each FIFO is checked. One that was removed, or replaced by a file, is restored. The pipe that
was open is read to its end, because its writers still have it.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Container, Iterator, Sequence

from wald.daemon.committer import Arena, CommitRound
from wald.daemon.fifos import Fifos, OpenPipe, reject_stdin_route
from wald.daemon.pipes import PAUSE_MAX_SECONDS, Pipe, Scratch, end_of_record, held_bytes
from wald.daemon.transfers import Transfers, Unfinished, unfinished_transfers
from wald.errors import InvalidInput
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.format.log_state import FIFO_PEER, STDIN_PEER
from wald.settings import Config
from wald.systemd import Systemd
from wald.writing.writer import Draft, Route

PIPES_MAX = 1024  # slots in the transfers file; the first is stdin's
_STDIN_SLOT = 0
_PAUSE_SECONDS = 0.001  # before the next check of an unfinished line; then twice as long, and so on
_PATHS_SECONDS = 1.0  # between checks of the paths of the FIFOs
SOCKETS_BYTES = 1 << 20  # of a turn that pipes leave to the sockets, however much they hold


class Intake:
    """The pipes. A route has one, and beside it those that had its place before, until their writers have left.

    Attributes:
        fifos: the paths of the FIFOs.
        over_quota: the routes that are over their quota; a pipe of one is read only to the end of its record.
    """

    def __init__(
        self,
        root: Root,
        disk: Disk,
        poller: select.epoll,
        systemd: Systemd,
        config: Config,
    ) -> None:
        self.fifos = Fifos(root, systemd)
        self.over_quota: Container[str] = ()
        self._root = root
        self._poller = poller
        self._systemd = systemd
        self._config = config
        self._scratch = Scratch()
        self._transfers = Transfers(root.transfers, PIPES_MAX, disk)
        self._pipes: dict[int, Pipe] = {}
        # What a turn or a second asks of all pipes it asks of these: there may be a thousand, of which one is busy.
        self._current: dict[str, Pipe] = {}  # by route, the one that was last found at the path of its FIFO
        self._awake: dict[Pipe, None] = {}  # ready, or waiting for the rest of a line; the next one stands first
        self._inside: set[Pipe] = set()  # a record
        self._outgoing: set[Pipe] = set()  # whose place another has by now
        self._leaving: list[Pipe] = []
        self._ending: list[Pipe] = []  # at a stop: their records end, and reading continues
        self._stdin_route = ""
        self._pause = _PAUSE_SECONDS
        self._check_lines_at = self._check_paths_at = 0.0
        self._free_slots: list[int] = []
        self._unfinished: dict[int, Unfinished] = {}  # by the inode of the pipe

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._pipes

    def __iter__(self) -> Iterator[Pipe]:
        return iter(self._pipes.values())

    @property
    def ready(self) -> bool:
        """Whether a pipe may hold something that was not read, or is to be closed."""
        return bool(self._leaving) or any(pipe.ready and not self._has_to_wait(pipe) for pipe in self._awake)

    @property
    def has_input(self) -> bool:
        """Whether a pipe does hold something that was not read."""
        return any(pipe.has_input for pipe in self._awake)

    @property
    def is_stalled(self) -> bool:
        """Whether a pipe holds something that could be taken; of a sound daemon that is so for moments only."""
        return any(pipe.is_overlooked and not self._has_to_wait(pipe) for pipe in self._pipes.values())

    @property
    def busy(self) -> frozenset[str]:
        """The routes that are inside a long line."""
        return frozenset(pipe.route.name for pipe in self._inside)

    @property
    def unfinished_lines(self) -> dict[str, int]:
        """The routes whose pipes hold a line without its end, with its bytes, those that are in the log included."""
        found = ((pipe.route.name, pipe.unfinished_bytes) for pipe in self._pipes.values())
        return {route: length for route, length in found if length}

    @property
    def stdin_ended(self) -> bool:
        """Whether stdin was read, to its end."""
        pipe = self._current.get(self._stdin_route)
        return pipe is not None and pipe.ended

    def lost(self, *, failed: bool) -> list[str]:
        """Return, after a stop, the routes whose pipes have bytes that no later start finds.

        Args:
            failed: whether the disk refused records; if not, another process may read stdin later.
        """
        return [
            pipe.route.name
            for pipe in self._pipes.values()
            if (pipe.hung_up or pipe in self._outgoing or (failed and pipe.route.name == self._stdin_route))
            and held_bytes(pipe.descriptor)
        ]

    def open(
        self, stdin: OpenPipe | None, open_records: dict[str, int], *, log_id: bytes
    ) -> tuple[list[str], list[Draft]]:
        """Watch stdin, and open every route's FIFO.

        Args:
            stdin: what :func:`take_stdin` gave; None: it is not read.
            open_records: route → sequence of the record that recovery found unfinished.

        Returns:
            messages about what systemd handed over and about the last life's transfers, and the drafts that end records
            whose rest is lost.
        """
        self._stdin_route = stdin.route if stdin else ""
        opened = self.fifos.open_all(stdin)
        replaced, closed = self.fifos.open_replaced()
        opened = replaced + opened
        self._unfinished = unfinished_transfers(self._root, self._transfers, log_id=log_id)
        finished = closed + [message for each in opened if (message := self._finish_transfer(each))]
        self._clear_slots()
        for each in opened:
            if self.fifos.is_retired(each.route):
                os.close(each.descriptor)
                self._systemd.forget(each.route)
            else:
                with self.fifos.reporting(each.route):
                    goes_on = each.held and each.replaced == any(each.route == other.route for other in replaced)
                    self._add(each, open_records.get(each.route, 0) if goes_on else 0)
                    if each.replaced:
                        self._make_way(self._current[each.route])
        going_on = self.busy
        lost = [end_of_record(Route.named(name), open_records[name]) for name in open_records if name not in going_on]
        return finished, lost

    def add(self, route: str) -> None:
        """Open the FIFO of a route that was made while the daemon runs; one in its place before is read to its end.

        Raises:
            InvalidInput: there are too many FIFOs, it is another route's as well, or stdin feeds the route.
            OSError: it cannot be opened.
        """
        reject_stdin_route(route, self._stdin_route)
        self.fifos.note_displaced(route)
        self._follow(route)

    def check_paths(self, now: float) -> list[str]:
        """About once a second: make sure that every FIFO is the one that is read; returns messages about changes."""
        if now < self._check_paths_at:
            return []
        self._check_paths_at = now + _PATHS_SECONDS
        fifos, done = self.fifos, []
        for route in self._current.keys() | fifos.unread.keys():
            pipe = self._current.get(route)
            in_order = pipe is not None and route not in fifos.unread and fifos.is_at_path(route, pipe.file)
            if in_order or route == self._stdin_route:
                continue
            if pipe is None and fifos.is_missing(route):
                del fifos.unread[route]
                continue
            with fifos.reporting(route):
                done += fifos.restore(route, pipe.descriptor if pipe else None)
                done += self._follow(route)
        return done + fifos.new_troubles()

    def drop(self, route: str) -> None:
        """Stop reading the FIFO of a route: the next turn ends its record and closes it. Stdin is read on."""
        self.fifos.unread.pop(route, None)
        for pipe in list(self._pipes.values()):
            if pipe.route.name == route != self._stdin_route:
                self._let_go(pipe)
                self._systemd.forget(route)

    def due(self) -> float | None:
        """When :meth:`check_lines` or :meth:`check_paths` is due, on the monotonic clock."""
        if any(pipe.waits and not pipe.ready for pipe in self._awake):
            return self._check_lines_at
        return self._check_paths_at if self._pipes or self.fifos.unread else None

    def check_lines(self, now: float) -> None:
        """Check the unfinished lines, ever more rarely.

        The kernel reports the end of each write to a pipe. But if the pipe is not empty, it does not report a write
        that fills the pipe and waits for the daemon to read.
        """
        if now >= self._check_lines_at:
            for pipe in self._awake:
                pipe.check(now)
            self._pause = min(2 * self._pause, PAUSE_MAX_SECONDS)
            self._check_lines_at = now + self._pause

    def notice(self, descriptor: int, events: int, now: float) -> None:
        """The poller reported ``events`` of a pipe."""
        self._pause = _PAUSE_SECONDS
        # A busy pipe must not put off the check of another.
        self._check_lines_at = min(self._check_lines_at, now + self._pause)
        pipe = self._pipes[descriptor]
        pipe.ready = True
        self._awake[pipe] = None
        pipe.hung_up = pipe.hung_up or bool(events & select.EPOLLHUP)

    def collect(self, turn: CommitRound, arena: Arena) -> None:
        """Hand what the ready pipes hold to ``turn``; a pipe for which there was no room comes first in the next."""
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

    def before_write(self, drafts: Sequence[Draft], segment: int) -> None:
        """As :class:`wald.daemon.committer.Sources`."""
        from_pipes = [(draft.source, draft) for draft in drafts if isinstance(draft.source, Pipe)]
        if from_pipes:
            self._transfers.restore()
        for pipe, draft in from_pipes:
            pipe.before_write(draft, segment)

    def after_sync(self, drafts: Sequence[Draft]) -> list[str]:
        """As :class:`wald.daemon.committer.Sources`."""
        wrong = []
        for draft in drafts:
            if isinstance(pipe := draft.source, Pipe):
                wrong.append(pipe.after_sync(draft))
                (self._inside.add if pipe.inside_record else self._inside.discard)(pipe)
        return [message for message in wrong if message]

    def release_writing_ends(self) -> None:
        """At a stop: let the FIFOs show whether another process can still write to them."""
        for pipe in list(self._pipes.values()):
            self._poller.unregister(pipe.descriptor)
            self._release_writing_end(pipe)

    def drain_at_shutdown(self) -> bool:
        """Return True if, at a stop, any pipe still has bytes to read.

        An open record ends if its pipe is no longer at its path, or if another pipe of the route waits for that end.
        """
        for pipe in self._pipes.values():
            pipe.check_last(displaced=pipe in self._outgoing)
            if pipe.ready:
                self._awake[pipe] = None
        if self.ready:
            return True
        waiting = {pipe.route.name for pipe in self._awake if pipe.has_input}
        self._ending = [pipe for pipe in self._inside if pipe in self._outgoing or pipe.route.name in waiting]
        return bool(self._ending)

    def close(self) -> None:
        for pipe in (*self._pipes.values(), *self._leaving):
            pipe.close()
        self._pipes.clear()
        self._leaving.clear()
        self._scratch.close()
        self._transfers.close()

    def _follow(self, route: str) -> list[str]:
        """Read the FIFO that is now at the path of a route's; one that was there before is read to its end.

        Raises:
            InvalidInput, OSError: it cannot be read.
        """
        old, fifos = self._current.get(route), self.fifos
        if old is not None and fifos.is_at_path(route, old.file):
            fifos.unread.pop(route, None)
            return []
        back = next((pipe for pipe in self._outgoing if fifos.is_at_path(route, pipe.file)), None)
        if back is not None and back.route.name == route:
            self._take_back(back)
            fifos.unread.pop(route, None)
            return [fifos.followed(route)]
        opened = fifos.open(route, {pipe.file: pipe.route.name for pipe in self._pipes.values()})
        done = [self._finish_transfer(opened)]
        if old is not None:
            self._make_way(old)
        self._add(opened, 0)
        waited = fifos.unread.pop(route, None) is not None
        if old is not None or waited:
            done.append(fifos.followed(route))
        return [message for message in done if message]

    def _make_way(self, pipe: Pipe) -> None:
        """Read a pipe that is not at its path any more only until its writers have left."""
        self._systemd.forget(pipe.route.name)
        self._poller.unregister(pipe.descriptor)
        self._release_writing_end(pipe)
        self._poller.register(pipe.descriptor, select.EPOLLIN | select.EPOLLET)
        self._outgoing.add(pipe)
        del self._current[pipe.route.name]

    def _take_back(self, pipe: Pipe) -> None:
        """Read a pipe for good that is at its path again; a second one on its FIFO would read everything twice."""
        before = pipe.hold_writing_end()
        self._poller.unregister(before)
        del self._pipes[before]
        os.close(before)
        route = pipe.route.name
        if route in self._current:
            self._make_way(self._current[route])
        self._systemd.keep(route, pipe.descriptor)
        self._outgoing.discard(pipe)
        self._pipes[pipe.descriptor] = self._current[route] = pipe
        self._awake[pipe] = None
        self._poller.register(pipe.descriptor, select.EPOLLIN | select.EPOLLET)

    def _let_go(self, pipe: Pipe) -> None:
        """Have the next turn end a pipe's record and close it: it may have a batch in this one."""
        with contextlib.suppress(FileNotFoundError):  # at a stop it is watched no more
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
        """Whether the route is over its quota, or another pipe of it is inside a long line."""
        if pipe.route.name in self.over_quota and not pipe.inside_record:
            return True
        return bool(self._outgoing) and (
            pipe.route.name in open_routes
            or any(other is not pipe and other.route.name == pipe.route.name for other in self._inside)
        )

    def _close_leaving(self, turn: CommitRound) -> None:
        """End the records of the pipes that are no longer read; close those whose record has ended."""
        for pipe in self._ending:
            closing = pipe.close_record()
            if closing is not None:
                turn.add(closing)
        self._ending = []
        for pipe in list(self._leaving):
            closing = pipe.close_record()
            if closing is not None:
                turn.add(closing)
            else:
                self._leaving.remove(pipe)
                pipe.close()
                self._free(pipe.slot)

    def _add(self, opened: OpenPipe, open_sequence: int) -> None:
        """Watch a pipe."""
        if not (opened.is_stdin or self._free_slots):
            os.close(opened.descriptor)
            raise InvalidInput(f"route {opened.route}: more than {PIPES_MAX - 1} FIFOs", case="too-many-fifos")
        if not (opened.is_stdin or opened.handed_over):
            self._systemd.keep(opened.route, opened.descriptor)
        number = _STDIN_SLOT if opened.is_stdin else self._free_slots.pop()
        pipe = self._make(opened, number, open_sequence)
        self._pipes[opened.descriptor] = self._current[opened.route] = pipe
        self._awake[pipe] = None
        if pipe.inside_record:
            self._inside.add(pipe)
        self._poller.register(opened.descriptor, select.EPOLLIN | select.EPOLLET)

    def _clear_slots(self) -> None:
        """Empty the slots of the last life; those of pipes that could not be opened are finished later."""
        self._unfinished = {inode: each for inode, each in self._unfinished.items() if each.slot != _STDIN_SLOT}
        kept = {each.slot for each in self._unfinished.values()}
        self._free_slots = [slot for slot in range(PIPES_MAX - 1, _STDIN_SLOT, -1) if slot not in kept]
        for slot in {*range(PIPES_MAX)} - kept:
            self._transfers.clear(slot)

    def _finish_transfer(self, opened: OpenPipe) -> str:
        """Finish the transfer of an earlier life from this very pipe; returns a message about what was done."""
        _, inode = opened.file
        unfinished = self._unfinished.pop(inode, None)
        if unfinished is None:
            return ""
        done = self._make(opened, unfinished.slot, 0).finish_transfer(unfinished.payload) if opened.held else ""
        self._free(unfinished.slot)
        return f"{opened.route}: {done}" if done else ""

    def _free(self, slot: int) -> None:
        with contextlib.suppress(OSError):  # shortened, on a full disk: then the slot records nothing either
            self._transfers.clear(slot)
        self._free_slots.append(slot)

    def _make(self, opened: OpenPipe, slot: int, open_sequence: int) -> Pipe:
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
            peer=STDIN_PEER if opened.is_stdin else FIFO_PEER,
        )
