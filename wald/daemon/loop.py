"""Main loop of the daemon.

The daemon: runs the loop, one turn after the other, until something asks for the end.

turn    wait → collect → write → sync → head → release pipes and reply → cut if due
stop    socket closed → what pipes and requests still held → background → unlock
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from wald.daemon.backpressure import Backpressure
from wald.daemon.committer import Arena, CommitRound, Full
from wald.daemon.startup import Parts, open_journal, sizes_in_force, wanted_routes, wants_fifo, writers_of
from wald.errors import DiskFailure, NotPermitted, WaldError, wrong_type
from wald.format.protocol import Code
from wald.settings import Config

_FULL_SECONDS = 0.25  # between checks of a full disk
_NAME_SECONDS = 2.0  # how long a stop tries to give the active segment its name back
_SWEEP_SECONDS = 1.0  # between looks for half-sent requests


def run(
    path: Path,
    config: Config,
    *,
    stdin_route: str | None = None,
    reload: Callable[[], Config] | None = None,
) -> int:
    """Run the daemon on the root at ``path`` until a signal or the end of stdin; returns the exit code.

    Args:
        stdin_route: the route that lines on stdin go to; None: stdin is not read.
        reload: makes the configuration anew for SIGHUP.

    Raises:
        WaldError: it cannot start, or the disk took the log away from under it.
    """
    with contextlib.ExitStack() as closers:
        try:
            service = Service(Parts(path, config, closers, stdin_route=stdin_route), reload)
        except PermissionError as error:
            raise NotPermitted.of(error, error.filename or path) from error
        except OSError as error:
            if (misplaced := wrong_type(error)) is not None:
                raise misplaced from error
            raise DiskFailure(
                f"{error.filename or path}: {error.strerror}: the daemon cannot start",
                case="daemon-cannot-start",
                root=path,
                error=error,
            ) from error
        service.loop()
        service.stop()
    return 0


class Service:
    """The loop of one life of the daemon.

    Args:
        parts: what a start has made.
        reload: as of :func:`run`.
    """

    def __init__(self, parts: Parts, reload: Callable[[], Config] | None) -> None:
        self._parts = parts
        self._config = parts.config
        self._reload = reload
        self._journal = parts.journal
        self._metrics = parts.metrics
        self._signals = parts.signals
        self._systemd = parts.systemd
        self._writer = parts.writer
        self._intake = parts.intake
        self._committer = parts.committer
        self._connections = parts.connections
        self._quotas = parts.quotas
        self._arena = Arena()
        self._other_arena: Arena | None = None  # for requests that arrive while a turn is held
        self._try_again_at = 0.0  # when the held turn is committed again
        self._held_turn: CommitRound | None = None
        self._newcomers = False  # whether connections can be accepted
        self._sealer_woken_for = 0  # the base of the segment that was active then
        self._reload_waits = False  # some settings need the disk, which refuses a turn
        self._swept_at = self._alive_at = time.monotonic()
        self._alive_turns = 0  # that had committed something then

    def loop(self) -> None:
        """Turn after turn until something asks for the end."""
        while not (self._signals.stop or self._intake.stdin_ended):
            self._turn(self._timeout())

    def stop(self) -> None:
        """The last turns: no connection is accepted, and what no other process holds is not left behind."""
        self._systemd.stopping()
        self._journal.info("stopping", head=self._metrics.head_sequence)
        is_ours = self._parts.lock.is_ours()
        if is_ours:
            self._parts.listener.remove()
        self._connections.close()
        if not is_ours:
            self._writer.abandon()
        else:
            self._check_paths(float("inf"))  # a FIFO may have been replaced since the last check
        self._intake.over = ()  # what no other process holds would be lost
        self._intake.release_writing_ends()
        failure: WaldError | None = None
        try:
            while self._intake.check_last():
                self._commit_pipes()
        except WaldError as error:
            failure = error
        loss = self._loss(failure)
        if failure is not None and not isinstance(failure, Full):
            raise loss or failure
        self._keep_name()
        if loss is not None:
            raise loss
        self._journal.info("stopped", head=self._metrics.head_sequence)

    def _loss(self, failure: WaldError | None) -> WaldError | None:
        """Report the bytes in pipes that are lost with the daemon; return the error to raise, None without a loss."""
        lost = self._intake.lost(failed=failure is not None)
        if not lost:
            return None
        cause = failure or WaldError(
            "the FIFO was replaced, and a producer still writes to the old one", case="fifo-replaced"
        )
        message = "unread bytes in replaced or unattended pipes are lost"
        self._journal.error(message, routes=lost, reason=cause.message, hint=cause.hint)
        return type(cause)(f"{cause.message}; {message} ({', '.join(lost)})", hint=cause.hint)

    # One turn.

    def _turn(self, timeout: float) -> None:
        events = self._parts.poller.poll(timeout)
        now = time.monotonic()
        if self._held_turn is not None:
            self._serve_without_disk(self._held_turn, events, now)
            return
        has_room = self._committer.has_room(wanted_bytes=self._connections.wanted_bytes)
        self._quotas.update(now, self._metrics.head_sequence)
        self._arena.reset()
        readable = self._dispatch(events, now)
        turn = self._collect(readable, now, has_room=has_room)
        held = self._metrics.held_requests = self._connections.held_requests
        waits = held > 0 or (not has_room and self._intake.has_input)
        self._metrics.waiting_since = (self._metrics.waiting_since or now) if waits else 0.0
        if waits or self._metrics.held_since:
            self._metrics.hold(now, waits=waits)
        self._finish(turn)
        self._accept(now)
        if self._held_turn is None:
            self._connections.carry_out(now)
        self._tend(now)

    def _accept(self, now: float) -> None:
        """Accept new connections, after others have closed."""
        if self._newcomers:
            self._newcomers = False
            self._connections.accept(now)

    def _collect(self, readable: list[int], now: float, *, has_room: bool) -> CommitRound:
        """What pipes hold and what connections have sent, as far as it may be taken now."""
        turn = CommitRound(self._writer.state.producers)
        self._intake.check_lines(now)
        if has_room:
            self._intake.collect(turn, self._arena)
        # After the pipes: what they have begun in this very turn keeps requests off its route too.
        busy = self._intake.busy | turn.open_routes
        gate = Backpressure(
            not has_room, self._config.on_full == "reject", busy, self._committer.left_bytes, self._quotas.over
        )
        self._connections.collect(readable, turn, self._arena, gate, now)
        return turn

    def _dispatch(self, events: list[tuple[int, int]], now: float) -> list[int]:
        """Handle the events of the poller; returns the connections that have something to read."""
        readable = []
        for descriptor, happened in events:
            if descriptor in self._intake:
                self._intake.notice(descriptor, happened, now)
            elif descriptor in self._connections:
                if happened & select.EPOLLOUT:
                    self._connections.flush(descriptor, now)
                if happened & ~select.EPOLLOUT and descriptor in self._connections:
                    readable.append(descriptor)
            elif descriptor == self._signals.descriptor:
                self._signals.drain()
            elif descriptor == self._connections.listener_descriptor:
                self._newcomers = True
        return readable

    def _finish(self, turn: CommitRound) -> None:
        """Commit a turn and answer its requests; without room, hold it."""
        try:
            self._committer.commit(turn)
        except Full:
            if self._config.on_full == "reject" and not turn.committed:
                self._held_turn = None
                self._connections.refuse(Code.FULL, "the disk is full")
            else:
                self._hold(turn)
            return
        except WaldError:
            self._connections.refuse(Code.FAILED, "the daemon stops")
            raise
        self._held_turn = None
        self._quotas.count(turn.drafts, self._writer.base_sequence)
        self._connections.reply(turn)

    def _serve_without_disk(self, held: CommitRound, events: list[tuple[int, int]], now: float) -> None:
        """Answer requests that need no disk, and retry the held turn; accept no other records."""
        readable = self._dispatch(events, now)
        self._arena.reset()
        rejects, busy = self._config.on_full == "reject", self._intake.busy | held.open_routes
        gate = Backpressure(True, rejects, busy, 0, self._quotas.over)
        self._connections.collect(readable, CommitRound(self._writer.state.producers), self._arena, gate, now)
        self._connections.answer_others()
        self._accept(now)
        self._connections.carry_out(now, held=True)
        self._metrics.held_requests = self._connections.held_requests
        self._check_reload(held=True)
        self._sweep(now)
        if now >= self._try_again_at:
            self._committer.has_room(wanted_bytes=None)  # the numbers that STAT reports
            self._finish(held)
        self._keep_alive(now)

    def _hold(self, turn: CommitRound) -> None:
        """Hold a turn that the disk refuses; its records stay in their arena."""
        now = time.monotonic()
        self._try_again_at = now + _FULL_SECONDS
        self._metrics.hold(now, waits=True)
        if self._held_turn is None:
            self._held_turn = turn
            self._arena, self._other_arena = self._other_arena or Arena(), self._arena
            self._connections.set_aside()

    def _keep_name(self) -> None:
        """At a stop, make sure that the active segment has its name: what was acknowledged is worth a short wait."""
        until = time.monotonic() + _NAME_SECONDS
        while True:
            try:
                return self._committer.keep_name()
            except Full:
                if time.monotonic() >= until:
                    raise
            time.sleep(_FULL_SECONDS)
            self._keep_alive(time.monotonic())

    def _commit_pipes(self) -> None:
        self._arena.reset()
        turn = CommitRound(self._writer.state.producers)
        self._intake.collect(turn, self._arena)
        self._committer.commit(turn)

    def _timeout(self) -> float:
        """How long the loop may wait for something to happen, in seconds."""
        now = time.monotonic()
        asked = self._connections.due()
        if self._held_turn is not None:
            return max(0.0, (self._try_again_at if asked is None else min(asked, self._try_again_at)) - now)
        if self._committer.degraded:
            return min(_FULL_SECONDS, _FULL_SECONDS if asked is None else max(0.0, asked - now))
        if self._intake.ready:
            return 0
        times = [at for at in (asked, self._intake.due(), self._quotas.due) if at is not None]
        times.append(self._committer.due())
        if self._connections.wants_room:
            times.append(now + _FULL_SECONDS)
        if self._connections.needs_sweep:
            times.append(now + _SWEEP_SECONDS)
        if self._systemd.watchdog_seconds:
            times.append(self._alive_at + self._systemd.watchdog_seconds)
        return max(0.0, min(times) - now)

    def _tend(self, now: float) -> None:
        """What is due between turns."""
        self._committer.tend(now)
        if self._signals.cut:
            self._signals.cut = False
            self._committer.cut()
        self._check_reload()
        self._sweep(now)
        self._check_paths(now)
        self._metrics.fifo_troubles = len(self._intake.fifos.troubles)
        self._metrics.fifos_replaced = self._intake.fifos.replaced
        if self._writer.base_sequence != self._sealer_woken_for:
            self._sealer_woken_for = self._writer.base_sequence
            self._parts.background.wake()
        self._keep_alive(now)

    def _sweep(self, now: float) -> None:
        """Close stalled connections and check the path of the socket, about once a second."""
        if now - self._swept_at >= _SWEEP_SECONDS:
            self._swept_at = now
            self._connections.expire(now, self._config.frame_timeout)
            self._metrics.connections = len(self._connections)
            self._check_socket(now)

    def _check_paths(self, now: float) -> None:
        for message in self._intake.check_paths(now):
            self._journal.warning("fifo", what=message)

    def _check_socket(self, now: float) -> None:
        """Recreate the socket if it is gone, unless another daemon has replaced this one."""
        listener = self._parts.listener
        happened = listener.restore() if self._parts.lock.is_ours() else ""
        if isinstance(happened, WaldError):
            self._journal.error("socket", what=happened.message, hint=happened.hint)
        elif happened:
            self._connections.listen_on(listener.socket, now)
            self._journal.warning("socket", what=happened)

    def _keep_alive(self, now: float) -> None:
        """Report to the watchdog that there is progress."""
        interval = self._systemd.watchdog_seconds
        if interval and now - self._alive_at >= interval:
            self._alive_at = now
            if self._makes_progress():
                self._systemd.alive()

    def _makes_progress(self) -> bool:
        """Whether the head has moved since the last call, or nothing waits but for room: a full disk is no reason."""
        before, self._alive_turns = self._alive_turns, self._metrics.turns
        lacks_room = self._held_turn is not None or self._committer.degraded or bool(self._metrics.waiting_since)
        return before != self._alive_turns or lacks_room or not self._intake.stands_still

    # SIGHUP.

    def _check_reload(self, *, held: bool = False) -> None:
        """Reload the settings if SIGHUP has come.

        Args:
            held: the disk refuses a turn, so other routes and quotas wait until it has taken that turn.
        """
        if self._signals.reload:
            self._signals.reload = False
            self._reload_settings(held=held)
        elif self._reload_waits and not held:
            self._reload_settings()

    def _reload_settings(self, *, held: bool = False) -> None:
        """Take over what can change in a running daemon, and report what cannot."""
        self._systemd.reloading()
        self._reload_waits = False
        try:
            fresh = self._reload() if self._reload is not None else self._config
            if held and (fresh.routes != self._config.routes or self._quotas.changes(fresh)):
                self._reload_waits = True
                fresh = replace(fresh, routes=self._config.routes, retention=self._config.retention)
                self._journal.warning(
                    "reload waits", settings=["retention", "routes"], reason="the disk refuses a write"
                )
            self._take_over(fresh, held=held)
        except WaldError as error:
            self._journal.error("not reloaded", reason=error.message, hint=error.hint)
        except OSError as error:
            self._journal.error("not reloaded", reason=str(error))
        self._systemd.ready()

    def _take_over(self, fresh: Config, *, held: bool) -> None:
        root, parts = self._parts.root, self._parts
        for name, route in () if held else wanted_routes(root, fresh, self._journal):
            fifo = wants_fifo(root, name, route)
            parts.commands.make_route(name, fifo=fifo, mode=route.mode, consumers=route.consumers)
        self._config, taken, waiting = self._config.reload(fresh)
        open_journal(self._config.log_format, self._config.log_level)
        sizes = sizes_in_force(self._config, root.segments, self._journal)
        self._committer.take_over(self._config, sizes)
        if self._quotas.changes(self._config):
            self._committer.cut()  # what is in complete segments can be counted
            self._quotas.reload(self._config, self._writer.base_sequence)
        parts.routes.forget(writers=writers_of(self._config))
        parts.describe(self._config, sizes)
        self._journal.info("reloaded", taken=sorted(taken), needs_restart=sorted(waiting))
