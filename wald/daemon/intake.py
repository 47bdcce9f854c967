"""Pipes of all routes, read in rotation, and the paths of the FIFOs.

A start finishes the previous run's transfers before it assigns slots, because it may be killed too. A pipe that cannot
be opened yet keeps its slot. A removed or replaced FIFO is recreated, and the old pipe is read until its writers leave.
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
    open_fifo,
    readable_bytes,
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
_LINE_CHECK_SECONDS = 0.001  # before the next check of an unfinished line; doubled each time
_PATHS_SECONDS = 1.0


class Intake:
    """Current pipe of each route, and replaced pipes whose writers have not left."""

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
        # For speed: of a thousand pipes, few may be busy.
        self._current: dict[str, Pipe] = {}  # by route, last found at its path
        self._active: dict[Pipe, None] = {}  # ready or inside a line, in the order of service
        self._inside_record: set[Pipe] = set()
        self._replaced: set[Pipe] = set()  # no longer at their path
        self._to_close: list[Pipe] = []
        self._to_end: list[Pipe] = []  # whose unfinished records end at a stop
        self._stdin_route = ""
        self._line_pause = _LINE_CHECK_SECONDS
        self._check_lines_at = self._check_paths_at = 0.0
        self._free_slots: list[int] = []
        self._unconsumed: dict[int, tuple[int, int, bytes]] = {}

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._pipes

    def __iter__(self) -> Iterator[Pipe]:
        return iter(self._pipes.values())

    @property
    def can_collect(self) -> bool:
        """True if a round would collect from a pipe now."""
        return bool(self._to_close) or any(pipe.is_ready and not self._must_wait(pipe) for pipe in self._active)

    @property
    def has_input(self) -> bool:
        """True if a pipe has input, even for a route that must wait."""
        return any(pipe.has_input for pipe in self._active)

    @property
    def is_stalled(self) -> bool:
        """True if a pipe holds readable bytes; a healthy daemon reads them within moments."""
        return any(
            readable_bytes(pipe.descriptor) > 0 and not self._must_wait(pipe)
            for pipe in self._pipes.values()
            if not (pipe.waits_for_line or pipe.has_ended)
        )

    @property
    def busy_routes(self) -> frozenset[str]:
        """Routes inside a pipe's long line."""
        return frozenset(pipe.route.name for pipe in self._inside_record)

    @property
    def unfinished_lines(self) -> dict[str, int]:
        """Bytes by route."""
        lengths = ((pipe.route.name, pipe.unfinished_bytes) for pipe in self._pipes.values())
        return {route: length for route, length in lengths if length}

    @property
    def has_stdin_ended(self) -> bool:
        pipe = self._current.get(self._stdin_route)
        return pipe is not None and pipe.has_ended

    def open(
        self, stdin: OpenPipe | None, open_records: dict[str, int], *, log_id: bytes
    ) -> tuple[list[str], list[Draft]]:
        """Open all pipes. Return messages, and a draft to end each of ``open_records`` that no pipe continues."""
        self._stdin_route = stdin.route if stdin else ""
        open_pipes, messages = self.fifos.open_all(stdin)
        self._unconsumed = unfinished_transfers(self._root, self._transfers, log_id=log_id)
        messages += [message for each in open_pipes if (message := self._finish_transfer(each))]
        self._unconsumed = {inode: each for inode, each in self._unconsumed.items() if each[0] != _STDIN_SLOT}
        reserved_slots = {slot for slot, _, _ in self._unconsumed.values()}
        self._free_slots = [slot for slot in range(PIPES_MAX - 1, _STDIN_SLOT, -1) if slot not in reserved_slots]
        for slot in {*range(PIPES_MAX)} - reserved_slots:
            self._transfers.clear(slot)
        replaced_routes = {each.route for each in open_pipes if each.is_replaced}
        for each in open_pipes:
            if self._root.retired(each.route).exists():
                os.close(each.descriptor)
                self._systemd.forget(each.route)
            else:
                with self.fifos.recording_errors(each.route):
                    continues = each.was_held_open and (each.is_replaced or each.route not in replaced_routes)
                    self._add(each, open_records.get(each.route, 0) if continues else 0)
                    if each.is_replaced:
                        self._mark_replaced(self._current[each.route])
        abandoned_routes = [name for name in open_records if name not in self.busy_routes]
        return messages, [end_of_record(Route.named(name), open_records[name]) for name in abandoned_routes]

    def add(self, route: str) -> None:
        """Open the FIFO of an added route. An older pipe is read to its end."""
        reject_stdin_route(route, self._stdin_route)
        self.fifos.record_displaced(route)
        self._switch_fifo(route)

    def close_route(self, route: str) -> None:
        self.fifos.unreadable.pop(route, None)
        for pipe in list(self._pipes.values()):
            if pipe.route.name == route != self._stdin_route:
                self._close_next_round(pipe)
                self._systemd.forget(route)

    def due_at(self) -> float | None:
        if any(pipe.waits_for_line and not pipe.is_ready for pipe in self._active):
            return self._check_lines_at
        return self._check_paths_at if self._pipes or self.fifos.unreadable else None

    def check_paths(self, now: float) -> list[str]:
        """Restore missing FIFOs and follow replaced ones; return messages."""
        if now < self._check_paths_at:
            return []
        self._check_paths_at = now + _PATHS_SECONDS
        fifos, messages = self.fifos, []
        for route in self._current.keys() | fifos.unreadable.keys():
            pipe = self._current.get(route)
            is_unchanged = pipe is not None and route not in fifos.unreadable and fifos.is_at_path(route, pipe.file)
            if is_unchanged or route == self._stdin_route:
                continue
            if pipe is None and not os.path.lexists(self._root.fifo(route)):
                del fifos.unreadable[route]
                continue
            with fifos.recording_errors(route):
                messages += fifos.restore(route, pipe.descriptor if pipe else None)
                messages += self._switch_fifo(route)
        return messages + fifos.new_problems()

    def check_lines(self, now: float) -> None:
        """Check unfinished lines, at growing intervals: the kernel does not report a blocked write."""
        if now >= self._check_lines_at:
            for pipe in self._active:
                pipe.check_line(now)
            self._line_pause = min(2 * self._line_pause, PAUSE_MAX_SECONDS)
            self._check_lines_at = now + self._line_pause

    def mark_ready(self, descriptor: int, events: int, now: float) -> None:
        self._line_pause = _LINE_CHECK_SECONDS
        # A busy pipe must not delay the check of another.
        self._check_lines_at = min(self._check_lines_at, now + self._line_pause)
        pipe = self._pipes[descriptor]
        pipe.is_ready = True
        self._active[pipe] = None
        pipe.has_hung_up = pipe.has_hung_up or bool(events & select.EPOLLHUP)

    def collect(self, commit_round: CommitRound) -> None:
        """Collect from ready pipes; one without room in the arena comes first in the next round."""
        arena = commit_round.arena
        self._close_pipes(commit_round)
        for pipe in list(self._active):
            if arena.free < pipe.chunk_bytes + SOCKETS_BYTES:
                return
            if pipe.is_ready and not pipe.has_ended and not self._must_wait(pipe, commit_round):
                draft = pipe.collect(arena)
                if draft is not None:
                    commit_round.add(draft)
                    self._active[pipe] = self._active.pop(pipe)
            if pipe.has_ended and pipe in self._replaced:
                self._close_next_round(pipe)
            elif not (pipe.is_ready or pipe.waits_for_line):
                del self._active[pipe]

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
                (self._inside_record.add if pipe.is_inside_record else self._inside_record.discard)(pipe)
        return [message for message in messages if message]

    def release_writing_ends(self) -> None:
        for pipe in self._pipes.values():
            self._poller.unregister(pipe.descriptor)
            pipe.release_writing_end()
            self._active[pipe] = None

    def drain_at_shutdown(self) -> bool:
        """Prepare a stop's next round; return False if nothing is left to commit.

        Unfinished records end if their pipe was replaced, or if other pipes wait for their route.
        """
        for pipe in self._pipes.values():
            pipe.prepare_final_drain(is_replaced=pipe in self._replaced)
            if pipe.is_ready:
                self._active[pipe] = None
        if self.can_collect:
            return True
        waiting = {pipe.route.name for pipe in self._active if pipe.has_input}
        self._to_end = [pipe for pipe in self._inside_record if pipe in self._replaced or pipe.route.name in waiting]
        return bool(self._to_end)

    def lost_routes(self, *, disk_failed: bool) -> list[str]:
        """Return the routes whose pipes hold bytes that no later start can read.

        Unless ``disk_failed``, another process may still read open stdin.
        """
        return [
            pipe.route.name
            for pipe in self._pipes.values()
            if (pipe.has_hung_up or pipe in self._replaced or (disk_failed and pipe.route.name == self._stdin_route))
            and readable_bytes(pipe.descriptor)
        ]

    def close(self) -> None:
        for pipe in (*self._pipes.values(), *self._to_close):
            pipe.close()
        self._pipes.clear()
        self._to_close.clear()
        self._scratch.close()
        self._transfers.close()

    def _switch_fifo(self, route: str) -> list[str]:
        """Switch to the FIFO at the route's path; return messages."""
        current, fifos = self._current.get(route), self.fifos
        switch_message = f"{self._root.fifo(route)}: the FIFO was replaced, and the daemon now reads the new one"
        if current is not None and fifos.is_at_path(route, current.file):
            fifos.unreadable.pop(route, None)
            return []
        returned_pipe = next((pipe for pipe in self._replaced if fifos.is_at_path(route, pipe.file)), None)
        if returned_pipe is not None and returned_pipe.route.name == route:
            self._make_current(returned_pipe)
            fifos.unreadable.pop(route, None)
            return [switch_message]
        open_pipe = fifos.open(route, {pipe.file: pipe.route.name for pipe in self._pipes.values()})
        messages = [self._finish_transfer(open_pipe)]
        if current is not None:
            try:
                self._mark_replaced(current)
            except OSError:
                os.close(open_pipe.descriptor)
                raise
        self._add(open_pipe, 0)
        was_unreadable = fifos.unreadable.pop(route, None) is not None
        if current is not None or was_unreadable:
            messages.append(switch_message)
        return [message for message in messages if message]

    def _mark_replaced(self, pipe: Pipe) -> None:
        """Keep reading a replaced pipe until its writers have left."""
        self._reopen(pipe, pipe.release_writing_end)
        self._systemd.forget(pipe.route.name)
        self._replaced.add(pipe)
        del self._current[pipe.route.name]

    def _make_current(self, pipe: Pipe) -> None:
        """Make a pipe current that is at its path again; opening it twice would duplicate its bytes."""
        self._reopen(pipe, pipe.hold_writing_end)
        route = pipe.route.name
        if route in self._current:
            self._mark_replaced(self._current[route])
        self._systemd.keep(route, pipe.descriptor)
        self._replaced.discard(pipe)
        self._current[route] = pipe

    def _reopen(self, pipe: Pipe, reopen: Callable[[], None]) -> None:
        self._poller.unregister(pipe.descriptor)
        try:
            reopen()
        finally:
            self._poller.register(pipe.descriptor, select.EPOLLIN | select.EPOLLET)
        self._active[pipe] = None

    def _close_next_round(self, pipe: Pipe) -> None:
        """Let the next round close a pipe; the current round may contain a batch from it."""
        with contextlib.suppress(FileNotFoundError):  # not watched during a stop
            self._poller.unregister(pipe.descriptor)
        del self._pipes[pipe.descriptor]
        if self._current.get(pipe.route.name) is pipe:
            del self._current[pipe.route.name]
        self._active.pop(pipe, None)
        self._replaced.discard(pipe)
        self._to_close.append(pipe)

    def _must_wait(self, pipe: Pipe, commit_round: CommitRound | None = None) -> bool:
        """Return True if the pipe's route is over quota, or inside another source's record."""
        if pipe.route.name in self.over_quota and not pipe.is_inside_record:
            return True
        return bool(self._replaced) and (
            (commit_round is not None and pipe.route.name in commit_round.open_routes)
            or any(other is not pipe and other.route.name == pipe.route.name for other in self._inside_record)
        )

    def _close_pipes(self, commit_round: CommitRound) -> None:
        for pipe in (*self._to_end, *self._to_close):
            end_draft = pipe.close_record()
            if end_draft is not None:
                commit_round.add(end_draft)
            elif pipe in self._to_close:
                self._to_close.remove(pipe)
                pipe.close()
                self._free_slot(pipe.slot)
        self._to_end = []

    def _add(self, open_pipe: OpenPipe, open_sequence: int) -> None:
        if not (open_pipe.is_stdin or self._free_slots):
            os.close(open_pipe.descriptor)
            raise InvalidInput(f"{open_pipe.route}: at most {PIPES_MAX - 1} FIFOs can be read", case="too-many-fifos")
        if not (open_pipe.is_stdin or open_pipe.is_stored):
            self._systemd.keep(open_pipe.route, open_pipe.descriptor)
        slot = _STDIN_SLOT if open_pipe.is_stdin else self._free_slots.pop()
        pipe = Pipe(open_pipe, self._scratch, self._transfers, slot, self._record_max_bytes, open_sequence)
        self._pipes[open_pipe.descriptor] = self._current[open_pipe.route] = pipe
        self._active[pipe] = None
        if pipe.is_inside_record:
            self._inside_record.add(pipe)
        self._poller.register(open_pipe.descriptor, select.EPOLLIN | select.EPOLLET)

    def _finish_transfer(self, open_pipe: OpenPipe) -> str:
        """Consume the bytes of a pipe that the previous run committed; return a message."""
        if (recorded := self._unconsumed.pop(open_pipe.file[1], None)) is None:
            return ""
        slot, count, payload = recorded
        front = bytearray(count)
        # A smaller scratch pipe yields only the beginning.
        length = self._scratch.peek(open_pipe.descriptor, memoryview(front)) or 0 if open_pipe.was_held_open else 0
        if len(payload) != count:
            result = f"only {len(payload)} of {count} bytes are in the log; all of them stay in the pipe"
        elif length == 0 or front[:length] != payload[:length] or readable_bytes(open_pipe.descriptor) < count:
            result = f"{count} bytes are in the log but not in the pipe, which is new; nothing was consumed"
        else:
            with self._transfers.mark(slot) as mark:
                self._scratch.consume(open_pipe.descriptor, count, mark)
            result = f"consumed {count} bytes that were already in the log"
        self._free_slot(slot)
        return f"{open_pipe.route}: {result}" if open_pipe.was_held_open else ""

    def _free_slot(self, slot: int) -> None:
        with contextlib.suppress(OSError):  # a file shortened on a full disk has no such slot
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
        self.unreadable: dict[str, str] = {}  # reason by route
        self.replaced_count = 0

    @property
    def problems(self) -> dict[str, str]:
        unreadable = {str(self._root.fifo(route)): message for route, message in self.unreadable.items()}
        return unreadable | {str(path): message for path, message in self._displaced.items()}

    def new_problems(self) -> list[str]:
        """Return problems since the last call."""
        for path in [path for path in self._displaced if not os.path.lexists(path)]:
            del self._displaced[path]
        reported, self._reported = self._reported, self.problems
        return [message for path, message in self._reported.items() if reported.get(path) != message]

    @contextlib.contextmanager
    def recording_errors(self, route: str) -> Iterator[None]:
        """Record an error instead of raising it, so that the other FIFOs are read."""
        try:
            yield
        except WaldError as error:
            self.unreadable[route] = "; ".join(filter(None, (error.message, error.hint)))
        except OSError as error:
            self.unreadable[route] = f"{error.filename or self._root.fifo(route)}: {error.strerror or error}"

    def open_all(self, stdin: OpenPipe | None) -> tuple[list[OpenPipe], list[str]]:
        """Return the open pipes, ``stdin`` among them, and messages about closed descriptors."""
        open_pipes = [] if stdin is None else [stdin]
        routes_by_file = {each.file: each.route for each in open_pipes}
        routes = self._root.route_names()
        for route in routes:
            with self.recording_errors(route):
                self.record_displaced(route)
                # Without a file at its path, a stored FIFO was removed.
                stored_descriptor = self._systemd.descriptor_named(route)
                if stored_descriptor is not None or os.path.lexists(self._root.fifo(route)):
                    reject_stdin_route(route, stdin.route if stdin is not None else "")
                    self.restore(route, stored_descriptor)
                    open_pipes.append(self.open(route, routes_by_file))
                    routes_by_file[open_pipes[-1].file] = route
        self.unreadable = {name: why for name, why in self.unreadable.items() if not self._root.retired(name).exists()}
        messages = []
        for name, descriptor in self._systemd.take_remaining():
            if name in routes and stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                open_pipes.insert(0, OpenPipe(name, descriptor, was_held_open=True, is_stored=True, is_replaced=True))
            else:
                path = os.readlink(f"/proc/self/fd/{descriptor}")
                messages.append(f"{path}: closed: systemd passed it as {name!r}, but it is not the FIFO of a route")
                os.close(descriptor)
                self._systemd.forget(name)
        return open_pipes, messages

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
            return OpenPipe(route, inherited, was_held_open=True, is_stored=True)
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
        was_replaced = make_fifo(self._root, route, mode)
        self.replaced_count += 1
        self.record_displaced(route)
        return [f"{self._root.fifo(route)}: the FIFO was {'replaced' if was_replaced else 'removed'} and recreated"]

    def record_displaced(self, route: str) -> None:
        for path in displaced_files(self._root, route):
            self._displaced.setdefault(path, describe_displaced(self._root, path, route))


def reject_stdin_route(route: str, stdin_route: str) -> None:
    if route == stdin_route:
        raise InvalidInput(f"route {route} is fed by stdin, so its FIFO is not read", case="stdin-feeds-route")
