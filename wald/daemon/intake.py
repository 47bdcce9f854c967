"""Pipes of all routes, read in rotation.

A start, which may be killed too, finishes the previous run's transfers in their slots before it assigns slots. A pipe
that cannot be opened yet keeps its slot.

A removed or replaced FIFO is created again. The old pipe, which writers still hold open, is read to its end.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Container, Iterator, Sequence

from wald.daemon.committer import CommitRound
from wald.daemon.fifos import Fifos, OpenPipe, reject_stdin_route
from wald.daemon.pipes import (
    PAUSE_MAX_SECONDS,
    Pipe,
    Scratch,
    Transfers,
    UnfinishedTransfer,
    end_of_record,
    held_bytes,
    unfinished_transfers,
)
from wald.errors import InvalidInput
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.format.log_state import FIFO_PEER, STDIN_PEER
from wald.settings import Config
from wald.systemd import Systemd
from wald.writing.writer import Draft, Route

PIPES_MAX = 1024  # slots in the transfers file; the first is stdin's
SOCKETS_BYTES = 1 << 20  # of each round's arena, reserved for sockets
_STDIN_SLOT = 0
_PAUSE_SECONDS = 0.001  # before the next check of an unfinished line; doubled each time
_PATHS_SECONDS = 1.0  # between checks of the FIFOs' paths


class Intake:
    """Current pipe of each route, and earlier ones until their writers leave."""

    def __init__(self, root: Root, disk: Disk, poller: select.epoll, systemd: Systemd, config: Config) -> None:
        self.fifos = Fifos(root, systemd)
        self.over_quota: Container[str] = ()  # routes read only to the end of the current record
        self._root = root
        self._poller = poller
        self._systemd = systemd
        self._config = config
        self._scratch = Scratch()
        self._transfers = Transfers(root.transfers, PIPES_MAX, disk)
        self._pipes: dict[int, Pipe] = {}
        # Rounds and path checks iterate over these: of a thousand pipes, one may be busy.
        self._current: dict[str, Pipe] = {}  # by route, last found at its path
        self._awake: dict[Pipe, None] = {}  # ready, or waiting for the rest of a line; the next comes first
        self._inside: set[Pipe] = set()  # inside a record
        self._replaced: set[Pipe] = set()  # no longer at their path
        self._closing: list[Pipe] = []
        self._ending: list[Pipe] = []  # at a stop: their record ends, and reading continues
        self._stdin_route = ""
        self._pause = _PAUSE_SECONDS
        self._check_lines_at = self._check_paths_at = 0.0
        self._free_slots: list[int] = []
        self._unfinished: dict[int, UnfinishedTransfer] = {}  # by inode of the pipe

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._pipes

    def __iter__(self) -> Iterator[Pipe]:
        return iter(self._pipes.values())

    @property
    def ready(self) -> bool:
        return bool(self._closing) or any(pipe.ready and not self._must_wait(pipe) for pipe in self._awake)

    @property
    def has_input(self) -> bool:
        return any(pipe.has_input for pipe in self._awake)

    @property
    def is_stalled(self) -> bool:
        """True if a pipe holds readable bytes, in a healthy daemon only for moments."""
        return any(pipe.is_overlooked and not self._must_wait(pipe) for pipe in self._pipes.values())

    @property
    def busy(self) -> frozenset[str]:
        """Routes inside a long line."""
        return frozenset(pipe.route.name for pipe in self._inside)

    @property
    def unfinished_lines(self) -> dict[str, int]:
        """Bytes of unfinished lines by route."""
        found = ((pipe.route.name, pipe.unfinished_bytes) for pipe in self._pipes.values())
        return {route: length for route, length in found if length}

    @property
    def stdin_ended(self) -> bool:
        pipe = self._current.get(self._stdin_route)
        return pipe is not None and pipe.ended

    def open(
        self, stdin: OpenPipe | None, open_records: dict[str, int], *, log_id: bytes
    ) -> tuple[list[str], list[Draft]]:
        """Open all pipes; return messages, and drafts to end ``open_records`` (sequences) whose rest is lost."""
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
                    continues = each.held and each.replaced == any(each.route == other.route for other in replaced)
                    self._add(each, open_records.get(each.route, 0) if continues else 0)
                    if each.replaced:
                        self._demote(self._current[each.route])
        continued = self.busy
        lost = [end_of_record(Route.named(name), open_records[name]) for name in open_records if name not in continued]
        return finished, lost

    def add(self, route: str) -> None:
        """Open the FIFO of an added route; a previous one is read to its end."""
        reject_stdin_route(route, self._stdin_route)
        self.fifos.note_displaced(route)
        self._follow(route)

    def drop(self, route: str) -> None:
        self.fifos.unread.pop(route, None)
        for pipe in list(self._pipes.values()):
            if pipe.route.name == route != self._stdin_route:
                self._close_next_round(pipe)
                self._systemd.forget(route)

    def due(self) -> float | None:
        if any(pipe.waits and not pipe.ready for pipe in self._awake):
            return self._check_lines_at
        return self._check_paths_at if self._pipes or self.fifos.unread else None

    def check_paths(self, now: float) -> list[str]:
        """Restore missing FIFOs and follow replaced ones if due; return messages."""
        if now < self._check_paths_at:
            return []
        self._check_paths_at = now + _PATHS_SECONDS
        fifos, messages = self.fifos, []
        for route in self._current.keys() | fifos.unread.keys():
            pipe = self._current.get(route)
            in_order = pipe is not None and route not in fifos.unread and fifos.is_at_path(route, pipe.file)
            if in_order or route == self._stdin_route:
                continue
            if pipe is None and fifos.is_missing(route):
                del fifos.unread[route]
                continue
            with fifos.reporting(route):
                messages += fifos.restore(route, pipe.descriptor if pipe else None)
                messages += self._follow(route)
        return messages + fifos.new_problems()

    def check_lines(self, now: float) -> None:
        """Check the unfinished lines, at growing intervals.

        The kernel reports a write when it ends, so not one that fills a nonempty pipe and waits for the daemon.
        """
        if now >= self._check_lines_at:
            for pipe in self._awake:
                pipe.check(now)
            self._pause = min(2 * self._pause, PAUSE_MAX_SECONDS)
            self._check_lines_at = now + self._pause

    def notice(self, descriptor: int, events: int, now: float) -> None:
        self._pause = _PAUSE_SECONDS
        # A busy pipe must not delay the check of another.
        self._check_lines_at = min(self._check_lines_at, now + self._pause)
        pipe = self._pipes[descriptor]
        pipe.ready = True
        self._awake[pipe] = None
        pipe.hung_up = pipe.hung_up or bool(events & select.EPOLLHUP)

    def collect(self, commit_round: CommitRound) -> None:
        """Collect from ready pipes; one without room comes first in the next round."""
        arena = commit_round.arena
        self._close_pipes(commit_round)
        for pipe in list(self._awake):
            if arena.free < pipe.chunk_bytes + SOCKETS_BYTES:
                return
            if pipe.ready and not pipe.ended and not self._must_wait(pipe, commit_round):
                draft = pipe.collect(arena)
                if draft is not None:
                    commit_round.add(draft)
                    self._awake[pipe] = self._awake.pop(pipe)
            if pipe.ended and pipe in self._replaced:
                self._close_next_round(pipe)
            elif not (pipe.ready or pipe.waits):
                del self._awake[pipe]

    def before_write(self, drafts: Sequence[Draft], segment: int) -> None:
        from_pipes = [(draft.source, draft) for draft in drafts if isinstance(draft.source, Pipe)]
        if from_pipes:
            self._transfers.restore()
        for pipe, draft in from_pipes:
            pipe.before_write(draft, segment)

    def after_sync(self, drafts: Sequence[Draft]) -> list[str]:
        messages = []
        for draft in drafts:
            if isinstance(pipe := draft.source, Pipe):
                messages.append(pipe.after_sync(draft))
                (self._inside.add if pipe.inside_record else self._inside.discard)(pipe)
        return [message for message in messages if message]

    def release_writing_ends(self) -> None:
        for pipe in self._pipes.values():
            self._poller.unregister(pipe.descriptor)
            pipe.release_writing_end()
            self._awake[pipe] = None

    def drain_at_shutdown(self) -> bool:
        """Return True while pipes have bytes to commit.

        An open record ends if its pipe was replaced, or if another pipe of the route waits for that.
        """
        for pipe in self._pipes.values():
            pipe.drain_at_shutdown(displaced=pipe in self._replaced)
            if pipe.ready:
                self._awake[pipe] = None
        if self.ready:
            return True
        waiting = {pipe.route.name for pipe in self._awake if pipe.has_input}
        self._ending = [pipe for pipe in self._inside if pipe in self._replaced or pipe.route.name in waiting]
        return bool(self._ending)

    def lost(self, *, failed: bool) -> list[str]:
        """Return the routes whose pipes hold bytes that no later start finds.

        Unless the disk ``failed``, another process may still read stdin.
        """
        return [
            pipe.route.name
            for pipe in self._pipes.values()
            if (pipe.hung_up or pipe in self._replaced or (failed and pipe.route.name == self._stdin_route))
            and held_bytes(pipe.descriptor)
        ]

    def close(self) -> None:
        for pipe in (*self._pipes.values(), *self._closing):
            pipe.close()
        self._pipes.clear()
        self._closing.clear()
        self._scratch.close()
        self._transfers.close()

    def _follow(self, route: str) -> list[str]:
        old, fifos = self._current.get(route), self.fifos
        if old is not None and fifos.is_at_path(route, old.file):
            fifos.unread.pop(route, None)
            return []
        back = next((pipe for pipe in self._replaced if fifos.is_at_path(route, pipe.file)), None)
        if back is not None and back.route.name == route:
            self._promote(back)
            fifos.unread.pop(route, None)
            return [fifos.following(route)]
        opened = fifos.open(route, {pipe.file: pipe.route.name for pipe in self._pipes.values()})
        messages = [self._finish_transfer(opened)]
        if old is not None:
            self._demote(old)
        self._add(opened, 0)
        was_unread = fifos.unread.pop(route, None) is not None
        if old is not None or was_unread:
            messages.append(fifos.following(route))
        return [message for message in messages if message]

    def _demote(self, pipe: Pipe) -> None:
        """Read a replaced pipe until its writers have left."""
        self._reopen(pipe, pipe.release_writing_end)
        self._systemd.forget(pipe.route.name)
        self._replaced.add(pipe)
        del self._current[pipe.route.name]

    def _promote(self, pipe: Pipe) -> None:
        """Make a pipe current that is at its path again: a second one would read everything twice."""
        self._reopen(pipe, pipe.hold_writing_end)
        route = pipe.route.name
        if route in self._current:
            self._demote(self._current[route])
        self._systemd.keep(route, pipe.descriptor)
        self._replaced.discard(pipe)
        self._current[route] = pipe

    def _reopen(self, pipe: Pipe, reopen: Callable[[], None]) -> None:
        self._poller.unregister(pipe.descriptor)
        try:
            reopen()
        finally:
            self._poller.register(pipe.descriptor, select.EPOLLIN | select.EPOLLET)
        self._awake[pipe] = None

    def _close_next_round(self, pipe: Pipe) -> None:
        """Let the next round end its record and close it: this one may have a batch of it."""
        with contextlib.suppress(FileNotFoundError):  # at a stop it is no longer watched
            self._poller.unregister(pipe.descriptor)
        del self._pipes[pipe.descriptor]
        if self._current.get(pipe.route.name) is pipe:
            del self._current[pipe.route.name]
        self._awake.pop(pipe, None)
        self._replaced.discard(pipe)
        self._closing.append(pipe)

    def _must_wait(self, pipe: Pipe, commit_round: CommitRound | None = None) -> bool:
        """Return True if its route is over quota, or inside a long line of another pipe."""
        if pipe.route.name in self.over_quota and not pipe.inside_record:
            return True
        return bool(self._replaced) and (
            (commit_round is not None and pipe.route.name in commit_round.open_routes)
            or any(other is not pipe and other.route.name == pipe.route.name for other in self._inside)
        )

    def _close_pipes(self, commit_round: CommitRound) -> None:
        for pipe in self._ending:
            closing = pipe.close_record()
            if closing is not None:
                commit_round.add(closing)
        self._ending = []
        for pipe in list(self._closing):
            closing = pipe.close_record()
            if closing is not None:
                commit_round.add(closing)
            else:
                self._closing.remove(pipe)
                pipe.close()
                self._free(pipe.slot)

    def _add(self, opened: OpenPipe, open_sequence: int) -> None:
        if not (opened.is_stdin or self._free_slots):
            os.close(opened.descriptor)
            raise InvalidInput(f"route {opened.route}: more than {PIPES_MAX - 1} FIFOs", case="too-many-fifos")
        if not (opened.is_stdin or opened.handed_over):
            self._systemd.keep(opened.route, opened.descriptor)
        slot = _STDIN_SLOT if opened.is_stdin else self._free_slots.pop()
        pipe = self._new_pipe(opened, slot, open_sequence)
        self._pipes[opened.descriptor] = self._current[opened.route] = pipe
        self._awake[pipe] = None
        if pipe.inside_record:
            self._inside.add(pipe)
        self._poller.register(opened.descriptor, select.EPOLLIN | select.EPOLLET)

    def _clear_slots(self) -> None:
        self._unfinished = {inode: each for inode, each in self._unfinished.items() if each.slot != _STDIN_SLOT}
        kept = {each.slot for each in self._unfinished.values()}
        self._free_slots = [slot for slot in range(PIPES_MAX - 1, _STDIN_SLOT, -1) if slot not in kept]
        for slot in {*range(PIPES_MAX)} - kept:
            self._transfers.clear(slot)

    def _finish_transfer(self, opened: OpenPipe) -> str:
        _, inode = opened.file
        unfinished = self._unfinished.pop(inode, None)
        if unfinished is None:
            return ""
        done = self._new_pipe(opened, unfinished.slot, 0).finish_transfer(unfinished.payload) if opened.held else ""
        self._free(unfinished.slot)
        return f"{opened.route}: {done}" if done else ""

    def _free(self, slot: int) -> None:
        with contextlib.suppress(OSError):  # a file shortened on a full disk records nothing either
            self._transfers.clear(slot)
        self._free_slots.append(slot)

    def _new_pipe(self, opened: OpenPipe, slot: int, open_sequence: int) -> Pipe:
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
