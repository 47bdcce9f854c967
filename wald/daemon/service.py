"""The daemon: builds the parts, runs the loop, says what happened. The only place that knows everyone.

start   what may be refused → lock → recovery → writer → head → pipes → background → socket → ready
turn    wait → collect → write → sync → head → take and reply → cut if due
stop    socket closed → what pipes and requests still held → background → unlock
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

from wald.config import Config, RouteConfig
from wald.daemon.admission import Admission
from wald.daemon.background import Background, Failure
from wald.daemon.commands import Commands
from wald.daemon.committer import Committer, Full
from wald.daemon.connections import Connections
from wald.daemon.endpoint import Endpoint
from wald.daemon.fifos import take_stdin
from wald.daemon.gate import Gate
from wald.daemon.intake import Intake
from wald.daemon.journal import open_journal
from wald.daemon.lifecycle import Signals, Systemd, allow_descriptors
from wald.daemon.listening import check_socket, listen
from wald.daemon.requests import Requests
from wald.daemon.routes import Routes
from wald.daemon.sizing import sizes_in_force
from wald.daemon.turn import Arena, Turn
from wald.errors import DiskFailure, NotPermitted, WaldError, command_line
from wald.format.protocol import Code
from wald.format.times import utc
from wald.metrics import Metrics
from wald.store.files.directory import Root, create_root, read_identity, require_root
from wald.store.files.disk import Disk
from wald.store.files.fifos import has_fifo
from wald.store.files.ledger import Ledger
from wald.store.files.routes import add_route
from wald.store.writing.drafts import Draft
from wald.store.writing.lives import STOPPED, end_life
from wald.store.writing.lock import Lock, require_free
from wald.store.writing.recovery import recover
from wald.store.writing.room import Room
from wald.store.writing.sealer import Sealed, remove_temporaries
from wald.store.writing.writer import Writer

_FULL_LOOK_SECONDS = 0.25  # how often a full disk is looked at again
_LAST_LOOKS_SECONDS = 2.0  # how long a stop tries to give the active segment its name back
_SWEEP_SECONDS = 1.0  # how often half-sent requests are looked for


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
            service = Service(path, config, closers, stdin_route=stdin_route, reload=reload)
        except PermissionError as error:
            raise NotPermitted.of(error, error.filename or path) from error
        except OSError as error:
            raise DiskFailure(
                f"{error.filename or path}: {error.strerror}: the daemon cannot start",
                hint=f"df -h {path}; ls -ld {path}; {command_line(path, program='wald-reclaim')} makes room without it",
            ) from error
        service.loop()
        service.stop()
    return 0


class Service:
    """One life of the daemon; what has to be closed is on ``closers``, in the order in which it was opened."""

    def __init__(
        self,
        path: Path,
        config: Config,
        closers: contextlib.ExitStack,
        *,
        stdin_route: str | None,
        reload: Callable[[], Config] | None,
    ) -> None:
        now = _now()
        self._config = config
        self._reload = reload
        self._journal = open_journal(config.log_format, config.log_level)
        self._disk = disk = Disk()
        self._metrics = Metrics()
        self._arena = Arena()
        self._held: Turn | None = None
        self._sealed_before = 0  # the active segment when the sealer was last woken, by its base
        self._rotation = 0
        self._swept_at = self._alive_at = time.monotonic()
        if config.on_missing_root == "refuse":
            require_root(path)
        # All that may be refused comes before anything is written: such a start is no life, and has no end to tell of.
        self._root = root = Root(path)
        self._socket_path = Path(config.socket) if config.socket else root.socket
        require_free(root, disk)
        check_socket(self._socket_path, root.path)
        stdin = None if stdin_route is None else take_stdin(root, config, stdin_route)
        endpoint = (
            Endpoint(config.metrics, self._metrics, stall_timeout=config.stall_timeout) if config.metrics else None
        )
        create_root(path, disk, now=now)
        identity = read_identity(root)
        self._lock = Lock(root, disk, now=now)
        closers.callback(self._lock.release)
        if stdin_route is not None:
            add_route(root, disk, stdin_route)
        for name, route in self._wanted_routes(config):
            add_route(root, disk, name, fifo=_wants_fifo(root, name, route), mode=route.mode)
        self._poller = select.epoll()
        self._signals = Signals()
        self._poller.register(self._signals.descriptor, select.EPOLLIN)
        self._systemd = Systemd(os.environ)
        allow_descriptors()
        remove_temporaries(root, disk)
        ledger = Ledger(root.ledger / "segments.jsonl", disk)
        closers.callback(ledger.close)
        self._room = Room(root.segments, sizes_in_force(config, root.segments, self._journal))
        self._writer = self._recover(identity.log_id, ledger)
        closers.push(self._end)
        closers.callback(self._writer.close)
        longest = min(config.record_max_bytes, self._room.sizes.payload_bytes)
        self._intake = Intake(root, disk, self._poller, self._systemd, replace(config, record_max_bytes=longest))
        closers.callback(self._intake.close)
        # Before the committer moves the head: what pipes have left in the last segment is read there, and RECLAIM keeps
        # that one as long as the head is in it. And before anything is written where a take is announced.
        open_records = self._writer.state.open_records
        told, closing = self._intake.open(stdin, open_records, log_id=identity.log_id)
        self._committer = Committer(
            root, disk, self._writer, self._lock, self._room, self._intake, config, self._metrics, self._journal
        )
        closers.callback(self._committer.close)
        self._tell_pipes(told, closing)
        self._background = Background(
            root, disk, ledger, self._writer, self._room, self._metrics, self._heard, level=config.compression_level
        )
        closers.callback(self._background.stop)
        self._background.wake()
        self._routes = Routes(root, _writers(config))
        self._commands = Commands(root, disk, self._writer, self._committer, self._intake, self._routes, self._told)
        self._connections = self._listen()
        closers.callback(self._connections.close)
        if endpoint is not None:
            endpoint.start()
            closers.callback(endpoint.close)
        self._systemd.ready()
        self._journal.info(
            "ready",
            root=str(root.path),
            epoch=self._lock.epoch,
            head=self._metrics.head_sequence,
            socket=str(self._socket_path),
            pipes=sorted(pipe.route.name for pipe in self._intake),
        )

    def loop(self) -> None:
        """Turn after turn until something asks for the end."""
        while not (self._signals.stop or self._intake.stdin_ended):
            self._turn(self._timeout())

    def stop(self) -> None:
        """The last turns: nothing new is let in, and what nobody else holds is not left behind."""
        self._systemd.stopping()
        self._journal.info("stopping", head=self._metrics.head_sequence)
        self._connections.close()
        if self._lock.is_ours():
            self._socket_path.unlink(missing_ok=True)
        else:
            self._writer.abandon()
        self._intake.release_writing_ends()
        try:
            while self._intake.check_last():
                self._collect_pipes()
        except Full as full:
            if lost := self._intake.lost:
                words = "what is in pipes that nobody else holds is lost"
                self._journal.error(f"disk full: {words}", routes=lost, reason=full.message)
                raise DiskFailure(f"{full.message}; {words} ({', '.join(lost)})", hint=full.hint) from full
        self._keep_name()
        self._journal.info("stopped", head=self._metrics.head_sequence)

    def _end(self, _: object, error: BaseException | None, __: object) -> None:
        """Leave word of how this life ended, be it in the middle of its start."""
        how = STOPPED if error is None else str(error) or type(error).__name__
        with contextlib.suppress(OSError):  # a full disk: it counts as killed then
            end_life(self._root, self._disk, self._lock.epoch, how, now_ns=time.time_ns())

    # One turn.

    def _turn(self, timeout: float) -> None:
        if self._held is not None:
            self._wait_for_room()
            return
        events = self._poller.poll(timeout)
        now = time.monotonic()
        room = self._committer.has_room(wanted_bytes=self._connections.wanted_bytes)
        self._arena.reset()
        turn = Turn(self._writer.state.producers)
        readable = self._dispatch(events, now)
        self._intake.check_lines(now)
        if room:
            self._intake.collect(turn, self._arena)
        # After the pipes: what they have begun in this very turn keeps others off its route too.
        busy = self._intake.busy | turn.open_routes
        gate = Gate(not room, self._config.on_full == "reject", busy, self._committer.left_bytes)
        self._connections.resume(turn, self._arena, gate, now)
        self._rotation += 1
        begin = self._rotation % len(readable) if readable else 0  # else the first would take all the room
        for descriptor in readable[begin:] + readable[:begin]:
            self._connections.receive(descriptor, turn, self._arena, gate, now)
        held = self._metrics.held_requests = self._connections.held_requests
        waits = held > 0 or (not room and self._intake.has_input)
        self._metrics.waiting_since = (self._metrics.waiting_since or now) if waits else 0.0
        self._finish(turn)
        if self._held is None:
            self._connections.carry_out(now)
        self._tend(now)

    def _dispatch(self, events: list[tuple[int, int]], now: float) -> list[int]:
        """Note what happened; returns the connections that have something to read."""
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
                self._connections.accept(now)
        return readable

    def _finish(self, turn: Turn) -> None:
        """Commit a turn and answer for it; without room, hold it."""
        try:
            self._committer.commit(turn)
        except Full:
            if self._config.on_full == "reject" and not turn.placed:
                self._held = None
                self._connections.refuse(Code.FULL, "the disk is full")
            else:
                self._held = turn
            return
        except WaldError:
            self._connections.refuse(Code.FAILED, "the daemon stops")
            raise
        self._held = None
        self._connections.reply(turn)

    def _wait_for_room(self) -> None:
        """The turn in hand could not be written: nothing else is taken until it can."""
        assert self._held is not None
        select.select([self._signals.descriptor], [], [], _FULL_LOOK_SECONDS)
        self._signals.drain()
        self._finish(self._held)
        self._keep_alive(time.monotonic())

    def _keep_name(self) -> None:
        """The last look at it: what was acknowledged is worth a short wait."""
        until = time.monotonic() + _LAST_LOOKS_SECONDS
        while True:
            try:
                return self._committer.keep_name()
            except Full:
                if time.monotonic() >= until:
                    raise
            time.sleep(_FULL_LOOK_SECONDS)
            self._keep_alive(time.monotonic())

    def _collect_pipes(self) -> None:
        self._arena.reset()
        turn = Turn(self._writer.state.producers)
        self._intake.collect(turn, self._arena)
        self._committer.commit(turn)

    def _timeout(self) -> float:
        """How long the loop may wait for something to happen, in seconds."""
        now = time.monotonic()
        asked = self._connections.due()
        if self._committer.degraded:
            return min(_FULL_LOOK_SECONDS, _FULL_LOOK_SECONDS if asked is None else max(0.0, asked - now))
        if self._intake.ready:
            return 0
        times = [at for at in (asked, self._intake.due()) if at is not None]
        times.append(self._committer.due())
        if self._connections.held_requests:
            times.append(now + _FULL_LOOK_SECONDS)
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
        if self._signals.reload:
            self._signals.reload = False
            self._load_again()
        if now - self._swept_at >= _SWEEP_SECONDS:
            self._swept_at = now
            self._connections.expire(now, self._config.frame_timeout)
            self._metrics.connections = len(self._connections)
        for words in self._intake.check_paths(now):
            self._journal.warning("fifo", what=words)
        self._metrics.fifo_troubles = len(self._intake.fifos.troubles)
        self._metrics.fifos_replaced = self._intake.fifos.replaced
        if self._writer.base_sequence != self._sealed_before:
            self._sealed_before = self._writer.base_sequence
            self._background.wake()
        self._keep_alive(now)

    def _keep_alive(self, now: float) -> None:
        """Tell the watchdog that the loop turns; a full disk is no reason to be killed, a hanging one is."""
        interval = self._systemd.watchdog_seconds
        if interval and now - self._alive_at >= interval:
            self._alive_at = now
            self._systemd.alive()

    # The routes of the settings.

    def _wanted_routes(self, config: Config) -> Iterator[tuple[str, RouteConfig]]:
        """The routes of the settings; retiring one is an operator's act that settings do not undo."""
        for name, route in config.routes.items():
            if self._root.retired(name).exists():
                self._journal.warning(
                    "route is retired",
                    route=name,
                    hint=f"{command_line(self._root.path, f'route add {name}')} takes it back",
                )
            else:
                yield name, route

    def _told(self) -> dict[str, object]:
        head = self._committer.head
        return {
            "head": head.sequence,
            "segment": head.segment,
            "position": head.position,
            "epoch": head.epoch,
            "pid": os.getpid(),
            "degraded": self._metrics.degraded,
            "degraded_by": self._metrics.degraded_by,
            "held_requests": self._metrics.held_requests,
            "records": self._metrics.records,
            "turns": self._metrics.turns,
            "cuts": self._metrics.cuts,
            "sealed": self._metrics.sealed,
            "seal_failures": self._metrics.seal_failures,
            "seal_stalled_seconds": round(self._metrics.seal_stalled_seconds(time.monotonic()), 1),
            "connections": len(self._connections),
            "waits_to_seal": self._background.waiting,
            "free_bytes": self._metrics.free_bytes,
            "needed_bytes": self._metrics.needed_bytes,
            "free_space_min": self._room.sizes.reserve_bytes,
            "segment_max_bytes": self._room.sizes.segment_bytes,
            "fifo_troubles": self._intake.fifos.troubles,
            "routes": self._writer.state.routes,
        }

    # Parts.

    def _recover(self, log_id: bytes, ledger: Ledger) -> Writer:
        config, epoch = self._config, self._lock.epoch
        recovered = recover(self._root, self._disk, log_id=log_id, epoch=epoch, now_ns=time.time_ns())
        report = recovered.report
        if report.before:
            self._journal.info("last life", what=report.before)
        for words in report.info:
            self._journal.info("recovered", what=words)
        for words in report.warnings:
            self._journal.warning("recovered", what=words)
        for words in report.errors:
            self._journal.error("damage", what=words)
        if report.skipped is not None:
            first, last, why = report.skipped
            ledger.append({"event": "skipped", "base": first, "last": last, "why": why, "at": time.time_ns()})
        self._metrics.recovery_errors = len(report.errors)
        self._metrics.trimmed_bytes = report.trimmed_bytes
        self._metrics.epoch = epoch
        return Writer(
            self._root,
            self._disk,
            recovered.state,
            log_id=log_id,
            epoch=epoch,
            segment_max_bytes=self._room.sizes.segment_bytes,
            now_ns=time.time_ns(),
            carry=recovered.carry,
            sync_commits=config.sync == "commit",
            room=self._room,
        )

    def _tell_pipes(self, told: list[str], closing: list[Draft]) -> None:
        """Say what was found in them, and end the records that their last lives have left open."""
        for words in told:
            self._journal.info("pipe", what=words)
        if closing:
            turn = Turn(self._writer.state.producers)
            for draft in closing:
                turn.add(draft)
            self._committer.commit(turn)

    def _listen(self) -> Connections:
        config = self._config
        admission = Admission(
            self._metrics,
            self._journal,
            connections_max=config.connections_max,
            per_user_max=config.connections_per_user,
        )
        return Connections(
            listen(self._socket_path, config.socket_mode),
            self._poller,
            Requests(self._routes, self._root.path, admission.leaves_enough),
            self._commands.answer,
            admission=admission,
            request_max_bytes=min(config.request_max_bytes, self._room.sizes.payload_bytes),
            idle_timeout=config.idle_timeout,
        )

    def _heard(self, event: Sealed | Failure) -> None:
        """From the background thread."""
        if isinstance(event, Failure):
            self._journal.error("not sealed", segment=event.name, reason=event.reason, next="it is tried again")
        else:
            self._journal.debug("sealed", segment=event.base_sequence, raw=event.raw_bytes, bytes=event.sealed_bytes)

    def _load_again(self) -> None:
        """SIGHUP: take over what can change in a running daemon, and name what cannot."""
        self._systemd.reloading()
        try:
            self._take_over(self._reload() if self._reload is not None else self._config)
        except WaldError as error:
            self._journal.error("not reloaded", reason=error.message, hint=error.hint)
        except OSError as error:
            self._journal.error("not reloaded", reason=str(error))
        self._systemd.ready()

    def _take_over(self, fresh: Config) -> None:
        for name, route in self._wanted_routes(fresh):
            self._commands.make_route(name, fifo=_wants_fifo(self._root, name, route), mode=route.mode)
        changed = {each.name for each in fields(fresh) if getattr(fresh, each.name) != getattr(self._config, each.name)}
        taken = changed & Config.reloadable
        self._config = replace(self._config, **{name: getattr(fresh, name) for name in taken})
        self._journal = open_journal(self._config.log_format, self._config.log_level)
        sizes = sizes_in_force(self._config, self._root.segments, self._journal)
        self._committer.take_over(self._config, sizes, self._journal)
        self._routes.forget(writers=_writers(self._config))
        self._journal.info("reloaded", taken=sorted(taken), needs_restart=sorted(changed - taken))


def _writers(config: Config) -> dict[str, frozenset[int]]:
    return {name: route.writers for name, route in config.routes.items() if route.writers}


def _wants_fifo(root: Root, name: str, route: RouteConfig) -> bool:
    """Whether the settings have a say about a route's FIFO: one that is there already must not pass by its writers."""
    return route.fifo or (bool(route.writers) and has_fifo(root, name))


def _now() -> str:
    return utc(time.time_ns(), 3)
