"""Main loop of the daemon.

round   wait → collect → write → sync → publish head → release pipes and reply → cut if due
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
from wald.daemon.startup import Components, active_routes, effective_sizes, open_journal, writers_of
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
            loop = MainLoop(Components(path, config, closers, stdin_route=stdin_route), reload)
        except PermissionError as error:
            raise NotPermitted.from_error(error, error.filename or path) from error
        except OSError as error:
            if (wrong_type_error := wrong_type(error)) is not None:
                raise wrong_type_error from error
            raise DiskFailure(
                f"{error.filename or path}: the daemon cannot start ({error.strerror})",
                case="daemon-cannot-start",
                root=path,
                error=error,
            ) from error
        loop.run()
        loop.stop()
    return 0


class MainLoop:
    """Event loop of one run."""

    def __init__(self, components: Components, reload: Callable[[], Config] | None) -> None:
        self._components = components
        self._config = components.config
        self._reload = reload
        self._journal = components.journal
        self._metrics = components.metrics
        self._signals = components.signals
        self._systemd = components.systemd
        self._writer = components.writer
        self._intake = components.intake
        self._committer = components.committer
        self._connections = components.connections
        self._quotas = components.quotas
        self._arena = Arena()
        self._spare_arena: Arena | None = None  # for requests that arrive while a round is held
        self._retry_at = 0.0
        self._held_round: CommitRound | None = None
        self._can_accept = False
        self._background_woken_for = 0  # base of the then active segment
        self._is_reload_deferred = False  # new routes and quotas wait for the disk
        self._swept_at = self._watchdog_at = time.monotonic()
        self._watchdog_rounds = 0

    def run(self) -> None:
        while not (self._signals.stop or self._intake.has_stdin_ended):
            self._run_round(self._timeout())

    def stop(self) -> None:
        """Commit all input that no later start would find; report losses."""
        self._systemd.stopping()
        self._journal.info("stopping", head=self._metrics.head_sequence)
        is_ours = self._components.lock.is_ours()
        if is_ours:
            self._components.listener.remove()
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
        loss = self._report_loss(failure)
        if failure is not None and not isinstance(failure, Full):
            raise loss or failure
        self._restore_name()
        if loss is not None:
            raise loss
        self._journal.info("stopped", head=self._metrics.head_sequence)

    def _report_loss(self, failure: WaldError | None) -> WaldError | None:
        """Report lost bytes in pipes; return the error to raise."""
        lost_routes = self._intake.lost_routes(disk_failed=failure is not None)
        if not lost_routes:
            return None
        cause = failure or WaldError(
            "a FIFO was replaced, and a producer still writes to the old one", case="fifo-replaced"
        )
        message = "unread bytes in replaced or unattended pipes are lost"
        self._journal.error(message, routes=lost_routes, reason=cause.message, hint=cause.hint)
        return type(cause)(f"{cause.message}; {message} ({', '.join(lost_routes)})", hint=cause.hint)

    def _run_round(self, timeout: float) -> None:
        events = self._components.poller.poll(timeout)
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
        # After the pipes: a line begun in this round blocks requests to its route.
        self._collect_requests(readable, commit_round, commit_round.open_routes, now, has_room=has_room)
        held = self._metrics.held_requests = self._connections.held_requests
        is_waiting = held > 0 or (not has_room and self._intake.has_input)
        self._metrics.waiting_since = (self._metrics.waiting_since or now) if is_waiting else 0.0
        if is_waiting or self._metrics.held_since:
            self._metrics.track_disk_wait(now, is_waiting=is_waiting)
        self._commit_round(commit_round)
        self._accept(now)
        if self._held_round is None:
            self._connections.run_command(now)
        self._run_due_tasks(now)

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
        rejects, busy = self._config.on_full == "reject", self._intake.busy_routes | open_routes
        backpressure = Backpressure(not has_room, rejects, busy, self._committer.room_bytes, self._quotas.over_quota)
        self._connections.collect(readable, commit_round, backpressure, now)

    def _dispatch(self, events: list[tuple[int, int]], now: float) -> list[int]:
        """Handle the poller's events; return the readable connections."""
        readable = []
        connections = self._connections.descriptors
        for descriptor, mask in events:
            if descriptor in connections:
                if mask & select.EPOLLOUT:
                    self._connections.flush(descriptor, now)
                if mask & ~select.EPOLLOUT and descriptor in connections:
                    readable.append(descriptor)
            elif descriptor in self._intake:
                self._intake.mark_ready(descriptor, mask, now)
            elif descriptor == self._signals.descriptor:
                self._signals.drain()
            elif descriptor == self._connections.listener_descriptor:
                self._can_accept = True
        return readable

    def _commit_round(self, commit_round: CommitRound) -> None:
        """Commit a round and reply; on a full disk, hold or reject the round."""
        try:
            self._committer.commit(commit_round)
        except Full:
            if self._config.on_full == "reject" and not commit_round.committed:
                self._held_round = None
                self._connections.reply(commit_round, encode_err(Code.FULL, "the disk is full"))
            else:
                self._hold_round(commit_round)
            return
        except WaldError:
            self._connections.reply(commit_round, encode_err(Code.FAILED, "the daemon is stopping after a failure"))
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
            self._committer.has_room(wanted_bytes=None)  # update the numbers that STAT reports
            self._commit_round(held)
        self._notify_watchdog(now)

    def _hold_round(self, commit_round: CommitRound) -> None:
        """Hold a round that the disk refused; its records stay in their arena."""
        now = time.monotonic()
        self._retry_at = now + FULL_SECONDS
        self._metrics.track_disk_wait(now, is_waiting=True)
        if self._held_round is None:
            self._held_round = commit_round
            self._arena, self._spare_arena = self._spare_arena or Arena(), self._arena
            self._connections.hold_clients()

    def _restore_name(self) -> None:
        """Wait until the active segment has its name: without it, acknowledged records are lost."""
        until = time.monotonic() + NAME_PATIENCE_SECONDS
        while True:
            try:
                return self._committer.restore_name()
            except Full:
                if time.monotonic() >= until:
                    raise
            time.sleep(FULL_SECONDS)
            self._notify_watchdog(time.monotonic())

    def _timeout(self) -> float:
        now = time.monotonic()
        due_times = [self._connections.due_at()]
        if self._held_round is not None:
            due_times.append(self._retry_at)
        elif self._metrics.degraded:
            due_times.append(now + FULL_SECONDS)
        elif self._intake.can_collect:
            return 0
        else:
            due_times += self._intake.due_at(), self._quotas.due_at, self._committer.due_at()
            if self._connections.wants_room:
                due_times.append(now + FULL_SECONDS)
            if self._connections.needs_sweep:
                due_times.append(now + _SWEEP_SECONDS)
            if self._systemd.watchdog_seconds:
                due_times.append(self._watchdog_at + self._systemd.watchdog_seconds)
        return max(0.0, min(at for at in due_times if at is not None) - now)

    def _run_due_tasks(self, now: float) -> None:
        """Cut, reload, sweep and check paths when due."""
        self._committer.run_due_tasks(now)
        if self._signals.cut:
            self._signals.cut = False
            self._committer.cut()
        self._check_reload()
        self._sweep(now)
        self._check_paths(now)
        self._metrics.fifo_problems = len(self._intake.fifos.problems)
        self._metrics.fifos_replaced = self._intake.fifos.replaced_count
        if self._writer.base_sequence != self._background_woken_for:
            self._background_woken_for = self._writer.base_sequence
            self._components.background.wake()
        self._notify_watchdog(now)

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
        listener = self._components.listener
        change = listener.restore() if self._components.lock.is_ours() else ""
        if isinstance(change, WaldError):
            self._journal.error("socket", what=change.message, hint=change.hint)
        elif change:
            self._connections.replace_listener(listener.socket, now)
            self._journal.warning("socket", what=change)

    def _notify_watchdog(self, now: float) -> None:
        interval = self._systemd.watchdog_seconds
        if interval and now - self._watchdog_at >= interval:
            self._watchdog_at = now
            if self._makes_progress():
                self._systemd.alive()

    def _makes_progress(self) -> bool:
        """Return False if input waits for something other than disk space, and no round was committed."""
        previous_rounds, self._watchdog_rounds = self._watchdog_rounds, self._metrics.commit_rounds
        lacks_room = self._held_round is not None or self._metrics.degraded or bool(self._metrics.waiting_since)
        return previous_rounds != self._watchdog_rounds or lacks_room or not self._intake.is_stalled

    def _check_reload(self) -> None:
        """Reload after SIGHUP; defer new routes and quotas while a round is held."""
        is_held = self._held_round is not None
        if not self._signals.reload and (is_held or not self._is_reload_deferred):
            return
        self._signals.reload = self._is_reload_deferred = False
        self._systemd.reloading()
        try:
            new_config = self._reload() if self._reload is not None else self._config
            if is_held and (new_config.routes != self._config.routes or self._quotas.differ_from(new_config)):
                self._is_reload_deferred = True
                new_config = replace(new_config, routes=self._config.routes, retention=self._config.retention)
                self._journal.warning(
                    "reload deferred", settings=["retention", "routes"], reason="the disk refuses a write"
                )
            self._apply_settings(new_config, is_held=is_held)
        except WaldError as error:
            self._journal.error("reload failed", reason=error.message, hint=error.hint)
        except OSError as error:
            self._journal.error("reload failed", reason=str(error))
        self._systemd.ready()

    def _apply_settings(self, new_config: Config, *, is_held: bool) -> None:
        root, components = self._components.root, self._components
        for name, route, fifo in () if is_held else active_routes(root, new_config, self._journal):
            components.commands.make_route(name, fifo=fifo, mode=route.mode, consumers=route.consumers)
        self._config, applied, deferred = self._config.reload(new_config)
        open_journal(self._config.log_format, self._config.log_level)
        sizes = effective_sizes(self._config, root.segments, self._journal)
        self._committer.apply_settings(self._config, sizes)
        if self._quotas.differ_from(self._config):
            self._committer.cut()  # only complete segments can be counted
            self._quotas.reload(self._config, self._writer.base_sequence)
        components.routes.writers = writers_of(self._config)
        components.routes.forget()
        components.record_settings(self._config, sizes)
        self._journal.info("reloaded", applied=sorted(applied), needs_restart=sorted(deferred))
