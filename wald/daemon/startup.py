"""Start of the daemon, in the order that recovery needs:

checks → lock → routes → recovery → writer → pipes → head → background → socket → ready

Every check that can prevent the start precedes the first write. A prevented start leaves no run report.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType

import structlog
from structlog.typing import FilteringBoundLogger

import wald
from wald.daemon.background import Background
from wald.daemon.commands import Commands, Routes
from wald.daemon.committer import Arena, CommitRound, Committer
from wald.daemon.connection import UnfinishedRequests
from wald.daemon.connections import Connections
from wald.daemon.intake import Intake
from wald.daemon.listening import ConnectionLimits, Listener, check_socket, inherited_listener
from wald.daemon.metrics import Metrics, MetricsProcess, Recovery, elapsed, pages
from wald.daemon.pipes import OpenPipe, adopt_stdin
from wald.daemon.quotas import Quotas
from wald.exposition import Endpoint
from wald.files.disk import Disk, total_bytes
from wald.files.identity import create_root, read_identity, require_root
from wald.files.layout import Root
from wald.files.ledger_write import Ledger
from wald.files.routes import add_route, has_fifo
from wald.format.segment import pack_version
from wald.format.times import utc
from wald.hints import hint_for
from wald.segments.durable_end import seconds_ahead
from wald.settings import Config, RouteConfig, effective_settings
from wald.systemd import Systemd
from wald.writing.daemon_lock import Lock, require_free
from wald.writing.disk_budget import DiskBudget, Sizes, sizes_for
from wald.writing.recovery import Report, recover
from wald.writing.run_reports import STOPPED, add_to_run
from wald.writing.sealing import remove_temporaries
from wald.writing.writer import Writer

_STATUS_METRICS = (
    "degraded degraded_by held_requests records commit_rounds cuts sealed seal_failures free_bytes needed_bytes"
)


class Signals:
    """Flags of received signals; ``descriptor`` wakes the loop."""

    def __init__(self) -> None:
        self.stop = self.reload = self.cut = False
        self.descriptor, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._handle)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, 512)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self.reload = True
        elif number == signal.SIGUSR1:
            self.cut = True
        else:
            self.stop = True


class Components:
    """Components of one run, created in the order of the start."""

    def __init__(self, path: Path, config: Config, closers: contextlib.ExitStack, *, stdin_route: str | None) -> None:
        self.config = config
        self.journal = open_journal(config.log_format, config.log_level)
        self.metrics = Metrics()
        self.root = Root(path)
        self.systemd = Systemd(os.environ)
        self.inherited = inherited_listener(self.systemd.take_sockets())
        self.socket_path = Path(config.socket) if config.socket else self.root.socket
        self._disk = Disk()
        self._closers = closers
        stdin, endpoint = self._check(stdin_route)
        self._lock_root(stdin)
        self.poller = select.epoll()
        self.signals = Signals()
        self.poller.register(self.signals.descriptor, select.EPOLLIN)
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))  # the usual 1024 is for select(2)
        self._recover()
        self._open_pipes(stdin)
        self.background = Background(
            self.root,
            self._disk,
            self._ledger,
            self.writer,
            self.budget,
            self.metrics,
            self.journal,
            config.compression_level,
        )
        closers.callback(self.background.stop)
        self._open_socket()
        if endpoint is not None:
            endpoint.start()
            closers.callback(endpoint.close)  # first: the next daemon needs the address before the lock
        self.systemd.ready()
        self.journal.info(
            "ready",
            root=str(self.root.path),
            epoch=self.lock.epoch,
            head=self.metrics.head_sequence,
            socket=self.connections.listener_name,
            pipes=sorted(pipe.route.name for pipe in self.intake),
        )

    def _check(self, stdin_route: str | None) -> tuple[OpenPipe | None, Endpoint | None]:
        """Check everything that can prevent the start; return stdin and the metrics endpoint."""
        config = self.config
        if config.on_missing_root == "refuse":
            require_root(self.root)
        require_free(self.root, self._disk)
        if self.inherited is None:
            check_socket(self.socket_path, self.root.path)
        else:
            _warn_unused_settings(config, self.inherited.getsockname(), self.journal)
        stdin = None if stdin_route is None else adopt_stdin(self.root, config, stdin_route)
        if not config.metrics:
            return stdin, None
        process = MetricsProcess(self.root.path, lambda: self.metrics.needed_bytes)
        self._closers.callback(process.close)
        metrics_pages = pages(self.metrics, process, stall_timeout=config.stall_timeout)
        endpoint = Endpoint(config.metrics, metrics_pages, setting="metrics =")
        self._closers.callback(endpoint.close)  # after a failed start
        return stdin, endpoint

    def _lock_root(self, stdin: OpenPipe | None) -> None:
        root, disk, now = self.root, self._disk, utc(time.time_ns(), 3)
        create_root(root.path, disk, now=now)
        self.lock = Lock(root, disk, now=now)
        self._closers.callback(self.lock.release)
        if stdin is not None:
            add_route(root, disk, stdin.route)
        for name, route, fifo in active_routes(root, self.config, self.journal):
            add_route(root, disk, name, fifo=fifo, mode=route.mode, consumers=route.consumers)

    def _recover(self) -> None:
        root, disk, config, epoch = self.root, self._disk, self.config, self.lock.epoch
        remove_temporaries(root, disk)
        self._ledger = Ledger(root.ledger / "segments.jsonl", disk)
        self._closers.callback(self._ledger.close)
        self.budget = DiskBudget(root.segments, effective_sizes(config, root.segments, self.journal))
        self._log_id = read_identity(root).log_id
        self.metrics.log_id = self._log_id.hex()
        run_report = {name: self.lock.signature[name] for name in ("pid", "host", "started")}
        run_report |= {"software": f"wald {wald.__version__}", "settings": describe_settings(config, self.budget.sizes)}
        recovery = recover(root, disk, log_id=self._log_id, epoch=epoch, now_ns=time.time_ns(), about=run_report)
        self._log_recovery(recovery.report)
        if ahead := seconds_ahead(recovery.state.append_time_ns, now_ns := time.time_ns()):
            self.journal.warning(
                "append times are ahead of the clock",
                seconds=round(ahead, 1),
                append_time=utc(recovery.state.append_time_ns),
                clock=utc(now_ns),
                next="new records get that append time until the clock has caught up",
                hint=hint_for("append-times-ahead"),
            )
        self.writer = Writer(
            root,
            disk,
            recovery.state,
            log_id=self._log_id,
            epoch=epoch,
            segment_max_bytes=self.budget.sizes.segment_bytes,
            now_ns=time.time_ns(),
            carry=recovery.carry,
            sync_commits=config.sync == "commit",
            disk_budget=self.budget,
            version=pack_version(wald.__version__),
        )
        self._closers.push(self._record_end)
        self._closers.callback(self.writer.close)

    def _log_recovery(self, report: Report) -> None:
        if report.before:
            self.journal.info("last run", what=report.before)
        for message in report.info:
            self.journal.info("recovered", what=message)
        for message in report.warnings:
            self.journal.warning("recovered", what=message)
        for message in report.errors:
            self.journal.error("damage", what=message)
        if report.skipped is not None:
            first, last, why = report.skipped
            self._ledger.append({"event": "skipped", "base": first, "last": last, "why": why, "at": time.time_ns()})
        outcome = Recovery.TRIMMED if report.trimmed_bytes else Recovery.CLEAN
        self.metrics.recovery = Recovery.DAMAGED if report.errors else outcome
        self.metrics.recovery_errors = len(report.errors)
        self.metrics.trimmed_bytes = report.trimmed_bytes
        self.metrics.epoch = self.lock.epoch

    def record_settings(self, config: Config, sizes: Sizes) -> None:
        with contextlib.suppress(OSError):  # on a full disk the report keeps the old ones
            add_to_run(self.root, self._disk, self.lock.epoch, {"settings": describe_settings(config, sizes)})

    def _record_end(self, _: object, error: BaseException | None, __: object) -> None:
        """Record the run's end, even during its start."""
        outcome = STOPPED if error is None else str(error) or type(error).__name__
        with contextlib.suppress(OSError):  # on a full disk the run counts as killed
            add_to_run(self.root, self._disk, self.lock.epoch, {"ended": outcome, "ended_at_ns": time.time_ns()})

    def _open_pipes(self, stdin: OpenPipe | None) -> None:
        """Open the pipes and end lost records.

        While pipes are opened, the head is in the segment of unfinished transfers, so RECLAIM keeps that segment.
        """
        root, disk, config = self.root, self._disk, self.config
        record_max_bytes = min(config.record_max_bytes, self.budget.sizes.payload_bytes)
        self.intake = Intake(root, disk, self.poller, self.systemd, record_max_bytes=record_max_bytes)
        self._closers.callback(self.intake.close)
        messages, end_drafts = self.intake.open(stdin, self.writer.state.open_records, log_id=self._log_id)
        self.committer = Committer(
            root, disk, self.writer, self.lock, self.budget, self.intake, config, self.metrics, self.journal
        )
        self._closers.callback(self.committer.close)
        for message in messages:
            self.journal.info("pipe", what=message)
        closing_round = CommitRound(self.writer.state.producers, Arena(0))
        for draft in end_drafts:
            closing_round.add(draft)
        self.committer.commit(closing_round)
        base = self.writer.base_sequence
        self.quotas = Quotas(root, config, self.metrics, self.journal, log_id=self._log_id, base=base)
        self._closers.callback(self.quotas.close)
        self.intake.over_quota = self.quotas.over_quota

    def _open_socket(self) -> None:
        config = self.config
        self.routes = Routes(self.root, writers_of(config))
        self.commands = Commands(
            self.root, self._disk, self.writer, self.committer, self.intake, self.routes, self._status
        )
        limits = ConnectionLimits(self.metrics, self.journal, config.connections_max, config.connections_per_user)
        self.listener = Listener(self.socket_path, config.socket_mode, self.inherited)
        self.connections = Connections(
            self.listener.socket,
            self.poller,
            self.routes,
            UnfinishedRequests(min(config.request_max_bytes, self.budget.sizes.payload_bytes)),
            self.commands.execute,
            limits=limits,
            idle_timeout=config.idle_timeout,
            spool_directory=self.root.segments,
        )
        self._closers.callback(self.connections.close)

    def _status(self) -> dict[str, object]:
        head, metrics, sizes, now = self.committer.head, self.metrics, self.budget.sizes, time.monotonic()
        return {
            "head": head.sequence,
            "segment": head.segment,
            "position": head.position,
            "epoch": head.epoch,
            "pid": os.getpid(),
            "log": metrics.log_id,
            "software": f"wald {wald.__version__}",
            **{name: getattr(metrics, name) for name in _STATUS_METRICS.split()},
            "seal_stalled_seconds": round(elapsed(metrics.seal_waits_since, now), 1),
            "stalled_seconds": round(elapsed(metrics.waiting_since, now), 1),
            "connections": len(self.connections),
            "senders": self.connections.largest_senders(),
            "received": self.connections.received,
            "histograms": metrics.histograms(),
            "waits_to_seal": self.background.waiting_segments,
            "free_space_min": sizes.reserve_bytes,
            "segment_max_bytes": sizes.segment_bytes,
            "fifo_problems": self.intake.fifos.problems,
            "unfinished_lines": self.intake.unfinished_lines,
            "busy": sorted(self.intake.busy_routes),
            "over_quota": [asdict(each) | {"message": each.message} for each in self.quotas.over_quota.values()],
            "routes": self.writer.state.routes,
        }


def open_journal(log_format: str, log_level: str) -> FilteringBoundLogger:
    """Return the logger, which writes to stderr; a later call reconfigures it."""
    on_console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    renderer = structlog.dev.ConsoleRenderer() if on_console else structlog.processors.JSONRenderer()
    stamper = structlog.processors.TimeStamper(fmt="iso", utc=True)
    structlog.configure(
        processors=[structlog.processors.add_log_level, stamper, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, log_level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    logger: FilteringBoundLogger = structlog.get_logger()
    return logger


def effective_sizes(config: Config, segments: Path, journal: FilteringBoundLogger) -> Sizes:
    """Return the sizes that the disk allows; warn if they are smaller than configured."""
    disk_bytes = total_bytes(segments)
    configured = {"segment_max_bytes": config.segment_max_bytes, "free_space_min": config.free_space_min}
    sizes = sizes_for(disk_bytes, segment_max_bytes=config.segment_max_bytes, free_space_min=config.free_space_min)
    effective = {"segment_max_bytes": sizes.segment_bytes, "free_space_min": sizes.reserve_bytes}
    if effective != configured:
        journal.warning(
            "the disk is too small for the configured sizes; smaller sizes apply",
            disk=disk_bytes,
            wanted=configured,
            effective=effective,
            hint=hint_for("disk-too-small", segment=sizes.segment_bytes, reserve=sizes.reserve_bytes),
        )
    return sizes


def describe_settings(config: Config, sizes: Sizes) -> dict[str, dict[str, str]]:
    """Return each setting's value and origin, with the effective ``sizes``."""
    settings = {name: {"value": value, "origin": origin} for name, value, origin in effective_settings(config)}
    smaller = replace(config, segment_max_bytes=sizes.segment_bytes, free_space_min=sizes.reserve_bytes)
    for name, value, _ in effective_settings(smaller):
        setting = settings[name]
        if value != setting["value"]:
            origin = f"the disk is too small for {setting['value']} ({setting['origin']})"
            settings[name] = {"value": value, "origin": origin}
    return settings


def active_routes(root: Root, config: Config, journal: FilteringBoundLogger) -> Iterator[tuple[str, RouteConfig, bool]]:
    """Yield the configured routes that are not retired, with True if a FIFO is wanted or must admit only writers."""
    for name, route in config.routes.items():
        if root.retired(name).exists():
            journal.warning("route is retired", route=name, hint=hint_for("route-retired", root=root.path, route=name))
        else:
            yield name, route, route.fifo or (bool(route.writers) and has_fifo(root, name))


def writers_of(config: Config) -> dict[str, frozenset[int]]:
    return {name: route.writers for name, route in config.routes.items() if route.writers}


def _warn_unused_settings(config: Config, socket: str, journal: FilteringBoundLogger) -> None:
    unused_settings = {}
    if config.socket not in ("", socket):
        unused_settings["socket"] = config.socket
    if config.socket_mode != Config().socket_mode:
        unused_settings["socket_mode"] = f"{config.socket_mode:04o}"
    if unused_settings:
        journal.warning(
            "systemd created the socket; some settings have no effect",
            socket=socket,
            unused=unused_settings,
            hint=hint_for("settings-of-a-socket-of-systemd"),
        )
