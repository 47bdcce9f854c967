"""Main loop of the daemon.

round   wait → collect → write → sync → head → release pipes and reply → cut if due
stop    close the socket → commit what pipes and requests still hold → stop sealing → unlock
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from wald.daemon.backpressure import Backpressure
from wald.daemon.committer import FULL_SECONDS, NAME_PATIENCE_SECONDS, Arena, CommitRound, Full
from wald.daemon.startup import Parts, effective_sizes, open_journal, wanted_routes, writers_of
from wald.errors import DiskFailure, NotPermitted, WaldError, wrong_type
from wald.format.protocol import Code, encode_err
from wald.settings import Config

_SWEEP_SECONDS = 1.0  # between checks for half-sent requests


def run(
    path: Path,
    config: Config,
    *,
    stdin_route: str | None = None,
    reload: Callable[[], Config] | None = None,  # for SIGHUP
) -> int:
    """Run a daemon until a signal or the end of stdin."""
    with contextlib.ExitStack() as closers:
        try:
            loop = MainLoop(Parts(path, config, closers, stdin_route=stdin_route), reload)
        except PermissionError as error:
            raise NotPermitted.from_error(error, error.filename or path) from error
        except OSError as error:
            if (misplaced := wrong_type(error)) is not None:
                raise misplaced from error
            raise DiskFailure(
                f"{error.filename or path}: {error.strerror}: the daemon cannot start",
                case="daemon-cannot-start",
                root=path,
                error=error,
            ) from error
        loop.run()
        loop.stop()
    return 0


class MainLoop:
    """Event loop of one run."""

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
        self._other_arena: Arena | None = None  # for requests that arrive while a round is held
        self._retry_at = 0.0
        self._held_round: CommitRound | None = None
        self._can_accept = False
        self._sealer_woken_for = 0  # active segment's base then
        self._reload_waits = False  # new routes and quotas wait for the disk
        self._swept_at = self._alive_at = time.monotonic()
        self._alive_rounds = 0

    def run(self) -> None:
        while not (self._signals.stop or self._intake.stdin_ended):
            self._run_round(self._timeout())

    def stop(self) -> None:
        """Commit all input that no later start would find; report losses."""
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
        self._intake.over_quota = ()  # input that no other process holds would be lost
        self._intake.release_writing_ends()
        failure: WaldError | None = None
        try:
            while self._intake.drain_at_shutdown():
                commit_round = self._begin_round()
                self._intake.collect(commit_round)
                self._committer.commit(commit_round)
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
        """Report lost bytes in pipes; return the error to raise."""
        lost = self._intake.lost(failed=failure is not None)
        if not lost:
            return None
        cause = failure or WaldError(
            "the FIFO was replaced, and a producer still writes to the old one", case="fifo-replaced"
        )
        message = "unread bytes in replaced or unattended pipes are lost"
        self._journal.error(message, routes=lost, reason=cause.message, hint=cause.hint)
        return type(cause)(f"{cause.message}; {message} ({', '.join(lost)})", hint=cause.hint)

    def _run_round(self, timeout: float) -> None:
        events = self._parts.poller.poll(timeout)
        now = time.monotonic()
        if self._held_round is not None:
            self._serve_without_disk(self._held_round, events, now)
            return
        has_room = self._committer.has_room(wanted_bytes=self._connections.wanted_bytes)
        self._quotas.update(now, self._metrics.head_sequence)
        readable = self._dispatch(events, now)
        commit_round = self._begin_round()
        self._intake.check_lines(now)
        if has_room:
            self._intake.collect(commit_round)
        # After the pipes: a line begun in this round keeps requests off its route.
        self._collect_requests(readable, commit_round, commit_round.open_routes, now, has_room=has_room)
        held = self._metrics.held_requests = self._connections.held_requests
        waits = held > 0 or (not has_room and self._intake.has_input)
        self._metrics.waiting_since = (self._metrics.waiting_since or now) if waits else 0.0
        if waits or self._metrics.held_since:
            self._metrics.hold(now, waits=waits)
        self._finish(commit_round)
        self._accept(now)
        if self._held_round is None:
            self._connections.run_command(now)
        self._tend(now)

    def _accept(self, now: float) -> None:
        if self._can_accept:  # after connections were closed
            self._can_accept = False
            self._connections.accept(now)

    def _begin_round(self) -> CommitRound:
        self._arena.used = 0
        return CommitRound(self._writer.state.producers, self._arena)

    def _collect_requests(
        self, readable: list[int], commit_round: CommitRound, open_routes: frozenset[str], now: float, *, has_room: bool
    ) -> None:
        rejects, busy = self._config.on_full == "reject", self._intake.busy | open_routes
        backpressure = Backpressure(not has_room, rejects, busy, self._committer.left_bytes, self._quotas.over)
        self._connections.collect(readable, commit_round, backpressure, now)

    def _dispatch(self, events: list[tuple[int, int]], now: float) -> list[int]:
        """Handle events of the poller; return the readable connections."""
        readable = []
        connections = self._connections.descriptors
        for descriptor, happened in events:
            if descriptor in connections:
                if happened & select.EPOLLOUT:
                    self._connections.flush(descriptor, now)
                if happened & ~select.EPOLLOUT and descriptor in connections:
                    readable.append(descriptor)
            elif descriptor in self._intake:
                self._intake.notice(descriptor, happened, now)
            elif descriptor == self._signals.descriptor:
                self._signals.drain()
            elif descriptor == self._connections.listener_descriptor:
                self._can_accept = True
        return readable

    def _finish(self, commit_round: CommitRound) -> None:
        """Commit a round and reply; on a full disk, hold or reject the round."""
        try:
            self._committer.commit(commit_round)
        except Full:
            if self._config.on_full == "reject" and not commit_round.committed:
                self._held_round = None
                self._connections.reply(commit_round, encode_err(Code.FULL, "the disk is full"))
            else:
                self._hold(commit_round)
            return
        except WaldError:
            self._connections.reply(commit_round, encode_err(Code.FAILED, "the daemon stops"))
            raise
        self._held_round = None
        self._quotas.count(commit_round.drafts, self._writer.base_sequence)
        self._connections.reply(commit_round)

    def _serve_without_disk(self, held: CommitRound, events: list[tuple[int, int]], now: float) -> None:
        """Answer requests that need no disk, and retry the held round."""
        readable = self._dispatch(events, now)
        self._collect_requests(readable, self._begin_round(), held.open_routes, now, has_room=False)
        self._connections.answer_others()
        self._accept(now)
        self._connections.run_command(now, is_held=True)
        self._metrics.held_requests = self._connections.held_requests
        self._check_reload()
        self._sweep(now)
        if now >= self._retry_at:
            self._committer.has_room(wanted_bytes=None)  # updates the numbers that STAT reports
            self._finish(held)
        self._keep_alive(now)

    def _hold(self, commit_round: CommitRound) -> None:
        """Hold a round that the disk refused; its records stay in their arena."""
        now = time.monotonic()
        self._retry_at = now + FULL_SECONDS
        self._metrics.hold(now, waits=True)
        if self._held_round is None:
            self._held_round = commit_round
            self._arena, self._other_arena = self._other_arena or Arena(), self._arena
            self._connections.set_aside()

    def _keep_name(self) -> None:
        """Wait until the active segment has its name: without it, acknowledged records are lost."""
        until = time.monotonic() + NAME_PATIENCE_SECONDS
        while True:
            try:
                return self._committer.keep_name()
            except Full:
                if time.monotonic() >= until:
                    raise
            time.sleep(FULL_SECONDS)
            self._keep_alive(time.monotonic())

    def _timeout(self) -> float:
        now = time.monotonic()
        times = [self._connections.due()]
        if self._held_round is not None:
            times.append(self._retry_at)
        elif self._metrics.degraded:
            times.append(now + FULL_SECONDS)
        elif self._intake.ready:
            return 0
        else:
            times += self._intake.due(), self._quotas.due, self._committer.due()
            if self._connections.wants_room:
                times.append(now + FULL_SECONDS)
            if self._connections.needs_sweep:
                times.append(now + _SWEEP_SECONDS)
            if self._systemd.watchdog_seconds:
                times.append(self._alive_at + self._systemd.watchdog_seconds)
        return max(0.0, min(at for at in times if at is not None) - now)

    def _tend(self, now: float) -> None:
        """Cut, reload, sweep and check paths when due."""
        self._committer.tend(now)
        if self._signals.cut:
            self._signals.cut = False
            self._committer.cut()
        self._check_reload()
        self._sweep(now)
        self._check_paths(now)
        self._metrics.fifo_problems = len(self._intake.fifos.problems)
        self._metrics.fifos_replaced = self._intake.fifos.replaced
        if self._writer.base_sequence != self._sealer_woken_for:
            self._sealer_woken_for = self._writer.base_sequence
            self._parts.background.wake()
        self._keep_alive(now)

    def _sweep(self, now: float) -> None:
        if now - self._swept_at >= _SWEEP_SECONDS:
            self._swept_at = now
            self._connections.expire(now, self._config.frame_timeout)
            self._metrics.connections = len(self._connections)
            self._check_socket(now)

    def _check_paths(self, now: float) -> None:
        for message in self._intake.check_paths(now):
            self._journal.warning("fifo", what=message)

    def _check_socket(self, now: float) -> None:
        listener = self._parts.listener
        happened = listener.restore() if self._parts.lock.is_ours() else ""
        if isinstance(happened, WaldError):
            self._journal.error("socket", what=happened.message, hint=happened.hint)
        elif happened:
            self._connections.listen_on(listener.socket, now)
            self._journal.warning("socket", what=happened)

    def _keep_alive(self, now: float) -> None:
        interval = self._systemd.watchdog_seconds
        if interval and now - self._alive_at >= interval:
            self._alive_at = now
            if self._makes_progress():
                self._systemd.alive()

    def _makes_progress(self) -> bool:
        """Return False if no round was committed although input waits, and not for disk space."""
        before, self._alive_rounds = self._alive_rounds, self._metrics.commit_rounds
        lacks_room = self._held_round is not None or self._metrics.degraded or bool(self._metrics.waiting_since)
        return before != self._alive_rounds or lacks_room or not self._intake.is_stalled

    def _check_reload(self) -> None:
        """Reload after SIGHUP; while a round is held, new routes and quotas wait."""
        held = self._held_round is not None
        if not self._signals.reload and (held or not self._reload_waits):
            return
        self._signals.reload = self._reload_waits = False
        self._systemd.reloading()
        try:
            fresh = self._reload() if self._reload is not None else self._config
            if held and (fresh.routes != self._config.routes or self._quotas.changes(fresh)):
                self._reload_waits = True
                fresh = replace(fresh, routes=self._config.routes, retention=self._config.retention)
                self._journal.warning(
                    "reload waits", settings=["retention", "routes"], reason="the disk refuses a write"
                )
            self._apply_settings(fresh, held=held)
        except WaldError as error:
            self._journal.error("not reloaded", reason=error.message, hint=error.hint)
        except OSError as error:
            self._journal.error("not reloaded", reason=str(error))
        self._systemd.ready()

    def _apply_settings(self, fresh: Config, *, held: bool) -> None:
        root, parts = self._parts.root, self._parts
        for name, route, fifo in () if held else wanted_routes(root, fresh, self._journal):
            parts.commands.make_route(name, fifo=fifo, mode=route.mode, consumers=route.consumers)
        self._config, applied, waiting = self._config.reload(fresh)
        open_journal(self._config.log_format, self._config.log_level)
        sizes = effective_sizes(self._config, root.segments, self._journal)
        self._committer.apply_settings(self._config, sizes)
        if self._quotas.changes(self._config):
            self._committer.cut()  # only complete segments can be counted
            self._quotas.reload(self._config, self._writer.base_sequence)
        parts.routes.writers = writers_of(self._config)
        parts.routes.forget()
        parts.record_settings(self._config, sizes)
        self._journal.info("reloaded", applied=sorted(applied), needs_restart=sorted(waiting))
