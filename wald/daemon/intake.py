"""Pipes of all routes, read in rotation, and the paths of the FIFOs.

A start finishes the previous run's transfers before it assigns slots, because it may be killed too. A pipe that cannot
be opened yet keeps its slot. A removed or replaced FIFO is created again. The old pipe is read until its writers leave.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import stat
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path

from wald.daemon.committer import CommitRound
from wald.daemon.pipes import (
    PAUSE_MAX_SECONDS,
    OpenPipe,
    Pipe,
    Scratch,
    Transfers,
    end_of_record,
    file_id,
    held_bytes,
    open_fifo,
    unfinished_transfers,
)
from wald.errors import InvalidInput, WaldError
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.routes import describe_displaced, displaced_files, has_fifo, make_fifo
from wald.systemd import Systemd
from wald.writing.writer import Draft, Route

PIPES_MAX = 1024  # slots in the transfers file; the first is stdin's
SOCKETS_BYTES = 1 << 20  # of each round's arena, reserved for sockets
_STDIN_SLOT = 0
_PAUSE_SECONDS = 0.001  # before the next check of an unfinished line; doubled each time
_PATHS_SECONDS = 1.0


class Intake:
    """Current pipe of each route, and replaced pipes until their writers leave."""

    def __init__(
        self, root: Root, disk: Disk, poller: select.epoll, systemd: Systemd, *, record_max_bytes: int
    ) -> None:
        self.fifos = Fifos(root, systemd)
        self.over_quota: Container[str] = ()  # routes read only to the end of the current record
        self._root = root
        self._poller = poller
        self._systemd = systemd
        self._record_max_bytes = record_max_bytes
        self._scratch = Scratch()
        self._transfers = Transfers(root.transfers, PIPES_MAX, disk)
        self._pipes: dict[int, Pipe] = {}
        # For speed: of a thousand pipes, one may be busy.
        self._current: dict[str, Pipe] = {}  # by route, last found at its path
        self._awake: dict[Pipe, None] = {}  # ready or waiting for a line; the next comes first
        self._inside: set[Pipe] = set()
        self._replaced: set[Pipe] = set()  # no longer at their path
        self._closing: list[Pipe] = []
        self._ending: list[Pipe] = []  # their records end at a stop
        self._stdin_route = ""
        self._pause = _PAUSE_SECONDS
        self._check_lines_at = self._check_paths_at = 0.0
        self._free_slots: list[int] = []
        self._unfinished: dict[int, tuple[int, int, bytes]] = {}

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._pipes

    def __iter__(self) -> Iterator[Pipe]:
        return iter(self._pipes.values())

    @property
    def ready(self) -> bool:
        """True if a round would collect from a pipe now."""
        return bool(self._closing) or any(pipe.ready and not self._must_wait(pipe) for pipe in self._awake)

    @property
    def has_input(self) -> bool:
        """True if a pipe has bytes, even for a route that must wait."""
        return any(pipe.has_input for pipe in self._awake)

    @property
    def is_stalled(self) -> bool:
        """True if a pipe holds readable bytes; a healthy daemon reads them within moments."""
        return any(
            held_bytes(pipe.descriptor) > 0 and not self._must_wait(pipe)
            for pipe in self._pipes.values()
            if not (pipe.waits or pipe.ended)
        )

    @property
    def busy(self) -> frozenset[str]:
        """Routes inside a pipe's long line."""
        return frozenset(pipe.route.name for pipe in self._inside)

    @property
    def unfinished_lines(self) -> dict[str, int]:
        """Bytes by route."""
        found = ((pipe.route.name, pipe.unfinished_bytes) for pipe in self._pipes.values())
        return {route: length for route, length in found if length}

    @property
    def stdin_ended(self) -> bool:
        pipe = self._current.get(self._stdin_route)
        return pipe is not None and pipe.ended

    def open(
        self, stdin: OpenPipe | None, open_records: dict[str, int], *, log_id: bytes
    ) -> tuple[list[str], list[Draft]]:
        """Open all pipes. Return messages, and a draft to end each of ``open_records`` that no pipe continues."""
        self._stdin_route = stdin.route if stdin else ""
        opened, messages = self.fifos.open_all(stdin)
        self._unfinished = unfinished_transfers(self._root, self._transfers, log_id=log_id)
        messages += [message for each in opened if (message := self._finish_transfer(each))]
        self._unfinished = {inode: each for inode, each in self._unfinished.items() if each[0] != _STDIN_SLOT}
        kept = {slot for slot, _, _ in self._unfinished.values()}
        self._free_slots = [slot for slot in range(PIPES_MAX - 1, _STDIN_SLOT, -1) if slot not in kept]
        for slot in {*range(PIPES_MAX)} - kept:
            self._transfers.clear(slot)
        replaced_routes = {each.route for each in opened if each.replaced}
        for each in opened:
            if self._root.retired(each.route).exists():
                os.close(each.descriptor)
                self._systemd.forget(each.route)
            else:
                with self.fifos.reporting(each.route):
                    continues = each.held and (each.replaced or each.route not in replaced_routes)
                    self._add(each, open_records.get(each.route, 0) if continues else 0)
                    if each.replaced:
                        self._demote(self._current[each.route])
        continued = self.busy
        lost = [end_of_record(Route.named(name), open_records[name]) for name in open_records if name not in continued]
        return messages, lost

    def add(self, route: str) -> None:
        """Open the FIFO of an added route. An older pipe is read to its end."""
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
        """Restore missing FIFOs and follow replaced ones; return messages."""
        if now < self._check_paths_at:
            return []
        self._check_paths_at = now + _PATHS_SECONDS
        fifos, messages = self.fifos, []
        for route in self._current.keys() | fifos.unread.keys():
            pipe = self._current.get(route)
            in_order = pipe is not None and route not in fifos.unread and fifos.is_at_path(route, pipe.file)
            if in_order or route == self._stdin_route:
                continue
            if pipe is None and not os.path.lexists(self._root.fifo(route)):
                del fifos.unread[route]
                continue
            with fifos.reporting(route):
                messages += fifos.restore(route, pipe.descriptor if pipe else None)
                messages += self._follow(route)
        return messages + fifos.new_problems()

    def check_lines(self, now: float) -> None:
        """Check unfinished lines, at growing intervals: the kernel does not report a blocked write."""
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
        """Collect from ready pipes. If a pipe finds no room, it comes first in the next round."""
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
        """Prepare a stop's next round; return False if nothing is left to commit.

        Unfinished records end if their pipe was replaced, or if other pipes wait for their route.
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
        """Return the routes whose pipes hold bytes that no later start can read.

        Unless the disk ``failed``, another process may still read open stdin.
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
        """Switch to the FIFO at the route's path; return messages."""
        old, fifos = self._current.get(route), self.fifos
        following = f"{self._root.fifo(route)}: another FIFO than before: reading it now"
        if old is not None and fifos.is_at_path(route, old.file):
            fifos.unread.pop(route, None)
            return []
        back = next((pipe for pipe in self._replaced if fifos.is_at_path(route, pipe.file)), None)
        if back is not None and back.route.name == route:
            self._promote(back)
            fifos.unread.pop(route, None)
            return [following]
        opened = fifos.open(route, {pipe.file: pipe.route.name for pipe in self._pipes.values()})
        messages = [self._finish_transfer(opened)]
        if old is not None:
            try:
                self._demote(old)
            except OSError:
                os.close(opened.descriptor)
                raise
        self._add(opened, 0)
        was_unread = fifos.unread.pop(route, None) is not None
        if old is not None or was_unread:
            messages.append(following)
        return [message for message in messages if message]

    def _demote(self, pipe: Pipe) -> None:
        """Keep reading a replaced pipe until its writers have left."""
        self._reopen(pipe, pipe.release_writing_end)
        self._systemd.forget(pipe.route.name)
        self._replaced.add(pipe)
        del self._current[pipe.route.name]

    def _promote(self, pipe: Pipe) -> None:
        """Make a pipe current that is at its path again. Opening it twice would read everything twice."""
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
        """Let the next round close a pipe; the current round may contain a batch from the pipe."""
        with contextlib.suppress(FileNotFoundError):  # not watched during a stop
            self._poller.unregister(pipe.descriptor)
        del self._pipes[pipe.descriptor]
        if self._current.get(pipe.route.name) is pipe:
            del self._current[pipe.route.name]
        self._awake.pop(pipe, None)
        self._replaced.discard(pipe)
        self._closing.append(pipe)

    def _must_wait(self, pipe: Pipe, commit_round: CommitRound | None = None) -> bool:
        """Return True if the pipe's route is over quota, or inside another source's record."""
        if pipe.route.name in self.over_quota and not pipe.inside_record:
            return True
        return bool(self._replaced) and (
            (commit_round is not None and pipe.route.name in commit_round.open_routes)
            or any(other is not pipe and other.route.name == pipe.route.name for other in self._inside)
        )

    def _close_pipes(self, commit_round: CommitRound) -> None:
        for pipe in (*self._ending, *self._closing):
            closing = pipe.close_record()
            if closing is not None:
                commit_round.add(closing)
            elif pipe in self._closing:
                self._closing.remove(pipe)
                pipe.close()
                self._free(pipe.slot)
        self._ending = []

    def _add(self, opened: OpenPipe, open_sequence: int) -> None:
        if not (opened.is_stdin or self._free_slots):
            os.close(opened.descriptor)
            raise InvalidInput(f"route {opened.route}: more than {PIPES_MAX - 1} FIFOs", case="too-many-fifos")
        if not (opened.is_stdin or opened.handed_over):
            self._systemd.keep(opened.route, opened.descriptor)
        slot = _STDIN_SLOT if opened.is_stdin else self._free_slots.pop()
        pipe = Pipe(opened, self._scratch, self._transfers, slot, self._record_max_bytes, open_sequence)
        self._pipes[opened.descriptor] = self._current[opened.route] = pipe
        self._awake[pipe] = None
        if pipe.inside_record:
            self._inside.add(pipe)
        self._poller.register(opened.descriptor, select.EPOLLIN | select.EPOLLET)

    def _finish_transfer(self, opened: OpenPipe) -> str:
        """Consume what the previous run committed from a pipe; return a message."""
        if (unfinished := self._unfinished.pop(opened.file[1], None)) is None:
            return ""
        slot, count, payload = unfinished
        front = bytearray(count)
        # Only the beginning if the scratch pipe has shrunk.
        length = self._scratch.peek(opened.descriptor, memoryview(front)) or 0 if opened.held else 0
        if len(payload) != count:
            done = f"{count} bytes were to be written, {len(payload)} are in the log: left in the pipe"
        elif length == 0 or front[:length] != payload[:length] or held_bytes(opened.descriptor) < count:
            done = f"{count} bytes are in the log and not in the pipe, which is a new one: nothing to consume"
        else:
            with self._transfers.mark(slot) as mark:
                self._scratch.consume(opened.descriptor, count, mark)
            done = f"consumed {count} bytes that were already in the log"
        self._free(slot)
        return f"{opened.route}: {done}" if opened.held else ""

    def _free(self, slot: int) -> None:
        with contextlib.suppress(OSError):  # a file shortened on a full disk records nothing either
            self._transfers.clear(slot)
        self._free_slots.append(slot)


class Fifos:
    """FIFOs at the routes' paths."""

    def __init__(self, root: Root, systemd: Systemd) -> None:
        self._root = root
        self._systemd = systemd
        self._path_of = functools.cache(lambda route: os.fspath(root.fifo(route)))
        self._displaced: dict[Path, str] = {}
        self._reported: dict[str, str] = {}
        self.unread: dict[str, str] = {}  # reason by route
        self.replaced = 0

    @property
    def problems(self) -> dict[str, str]:
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
        """Record an error instead of raising it, so that the other FIFOs are read."""
        try:
            yield
        except WaldError as error:
            self.unread[route] = "; ".join(filter(None, (error.message, error.hint)))
        except OSError as error:
            self.unread[route] = f"{error.filename or self._root.fifo(route)}: {error.strerror or error}"

    def open_all(self, stdin: OpenPipe | None) -> tuple[list[OpenPipe], list[str]]:
        """Open and return replaced pipes, ``stdin`` and the others; report closed descriptors."""
        opened = [] if stdin is None else [stdin]
        files = {each.file: each.route for each in opened}
        routes = self._root.route_names()
        for route in routes:
            with self.reporting(route):
                self.note_displaced(route)
                stored = self._systemd.descriptor_named(route)  # its FIFO was removed if nothing is at the path
                if stored is not None or os.path.lexists(self._root.fifo(route)):
                    reject_stdin_route(route, stdin.route if stdin is not None else "")
                    self.restore(route, stored)
                    opened.append(self.open(route, files))
                    files[opened[-1].file] = route
        self.unread = {route: reason for route, reason in self.unread.items() if not self._root.retired(route).exists()}
        closed = []
        for name, descriptor in self._systemd.take_remaining():
            if name in routes and stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                opened.insert(0, OpenPipe(name, descriptor, held=True, handed_over=True, replaced=True))
            else:
                path = os.readlink(f"/proc/self/fd/{descriptor}")
                closed.append(f"{path}: closed: systemd handed it over as {name!r}, and it is not the FIFO of a route")
                os.close(descriptor)
                self._systemd.forget(name)
        return opened, closed

    def open(self, route: str, others: Mapping[tuple[int, int], str]) -> OpenPipe:
        """Open a route's FIFO; raise InvalidInput if ``others`` shows that another route has the same file."""
        path = self._root.fifo(route)
        file = file_id(os.stat(path))
        other = others.get(file, route)
        if other != route:
            raise InvalidInput(
                f"{path}: the same FIFO as {self._root.fifo(other)}",
                case="fifo-of-two-routes",
                root=self._root.path,
                route=route,
                path=path,
            )
        inherited = self._systemd.take_fifo(file)
        if inherited is not None:
            return OpenPipe(route, inherited, held=True, handed_over=True)
        return OpenPipe(route, *open_fifo(path))

    def is_at_path(self, route: str, file: tuple[int, int]) -> bool:
        try:
            return file_id(os.stat(self._path_of(route))) == file
        except OSError:
            return False

    def restore(self, route: str, descriptor: int | None) -> list[str]:
        """Recreate a removed or replaced FIFO; move a replacement aside."""
        if has_fifo(self._root, route) or (descriptor is None and not os.path.lexists(self._root.fifo(route))):
            return []
        if self._root.retired(route).exists():
            return []
        mode = None if descriptor is None else stat.S_IMODE(os.fstat(descriptor).st_mode)
        found = make_fifo(self._root, route, mode)
        self.replaced += 1
        self.note_displaced(route)
        return [f"{self._root.fifo(route)}: {'replaced' if found else 'removed'}; created again with its mode"]

    def note_displaced(self, route: str) -> None:
        for path in displaced_files(self._root, route):
            self._displaced.setdefault(path, describe_displaced(self._root, path, route))


def reject_stdin_route(route: str, stdin_route: str) -> None:
    if route == stdin_route:
        raise InvalidInput(f"route {route} is fed by stdin, so its FIFO is not read", case="stdin-feeds-route")
