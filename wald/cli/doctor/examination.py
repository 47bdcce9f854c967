"""All checks of one directory, in order and within a time; the later ones are left out when it is over."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from wald.cli.doctor.checks import Check, Finding, Outcome
from wald.cli.doctor.judging import files, host, log, medium, space
from wald.cli.doctor.probing import files as trying
from wald.cli.doctor.probing import host as on_host
from wald.cli.doctor.probing import log as in_log
from wald.cli.doctor.probing import medium as below
from wald.cli.doctor.probing.mounts import device_of, mount_of
from wald.cli.doctor.probing.names import files as look_at_files
from wald.cli.doctor.probing.scratch import remove_left_over, scratch_in
from wald.errors import DISK_FULL
from wald.files.layout import Root

F = TypeVar("F")
_ALLOCATED_BYTES = 1 << 20  # little, because a running daemon may need the rest


class _OutOfTime(BaseException):
    """The time is over; no error of the operating system, so nothing takes it for one."""


@dataclass
class Subject:
    """What the checks look at; what several need is found out once.

    Attributes:
        scratch: None where nothing can be tried out, for the reason ``untried``.
    """

    root: Path
    config_path: Path | None
    socket: Path | None
    scratch: Path | None = None
    untried: str = ""
    removed: int = 0

    @cached_property
    def kind(self) -> log.Place:
        return in_log.place(self.root)

    @property
    def has_log(self) -> bool:
        """Whether there is one, or what is left of one."""
        return os.path.lexists(Root(self.root).identity)

    @cached_property
    def at(self) -> Path:
        return Path(self.kind.at)

    @cached_property
    def mount(self) -> medium.Mount:
        return mount_of(self.at)

    @cached_property
    def device(self) -> medium.Device:
        return device_of(self.at, self.mount)

    @cached_property
    def settings(self) -> tuple[log.Settings, Any]:
        return in_log.settings(self.config_path)

    @cached_property
    def running(self) -> tuple[log.Running, Mapping[str, Any]]:
        return in_log.running(self.root, Path(self.socket_path.path))

    @cached_property
    def pid(self) -> int:
        """Of the running daemon; 0 if none runs, or it is not known."""
        return in_log.daemon_pid(self.root, self.running[1]) if self.running[0].holder else 0

    @cached_property
    def socket_path(self) -> log.SocketPath:
        return in_log.socket_path(self.root, self.socket, self.settings[1])

    @cached_property
    def fifos(self) -> int:
        return in_log.fifos(self.root)


Look = Callable[[Subject], Finding]


def _looks(check: Check[F], look: Callable[[Subject], F]) -> tuple[Check[Any], Look]:
    """A check of what can be seen."""
    return check, lambda subject: check.judge(look(subject), subject.root, subject.at)


def _tries(check: Check[F], attempt: Callable[[Path, Subject], F]) -> tuple[Check[Any], Look]:
    """A check that tries something out."""

    def look(subject: Subject) -> Finding:
        if subject.scratch is None:
            return check.without(Outcome.SKIPPED, subject.untried)
        try:
            facts = attempt(subject.scratch, subject)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            return check.without(Outcome.SKIPPED, f"not tried out: {error.strerror}")
        return check.judge(facts, subject.root, subject.at)

    return check, look


def _of_log(check: Check[F], look: Callable[[Subject], F]) -> tuple[Check[Any], Look]:
    """A check of a log that is there."""

    def ask(subject: Subject) -> Finding:
        if not subject.has_log:
            if subject.kind.kind is log.Kind.HIDDEN:
                return check.without(Outcome.UNKNOWN, "this user may not look whether a log is here")
            return check.without(Outcome.SKIPPED, "no log is here")
        return check.judge(look(subject), subject.root, subject.at)

    return check, ask


CHECKS: tuple[tuple[Check[Any], Look], ...] = (
    _looks(log.PLACE, lambda subject: replace(subject.kind, removed=subject.removed)),
    _looks(log.USER, lambda subject: in_log.user(subject.kind)),
    _looks(log.SETTINGS, lambda subject: subject.settings[0]),
    _looks(medium.MOUNT, lambda subject: subject.mount),
    _looks(medium.DEVICE, lambda subject: subject.device),
    _tries(medium.SYNC, lambda scratch, subject: below.sync(scratch, subject.mount, subject.device)),
    _tries(files.REPLACE, lambda scratch, _: trying.replace(scratch)),
    _tries(files.LINKS, lambda scratch, _: trying.links(scratch)),
    _tries(files.LOCKS, lambda scratch, subject: trying.locks(scratch, subject.mount.type)),
    _tries(files.ALLOCATION, lambda scratch, subject: trying.allocation(scratch, subject.mount.type, _ALLOCATED_BYTES)),
    _tries(files.MAPPING, lambda scratch, _: trying.mapping(scratch)),
    _tries(files.FIFOS, lambda scratch, _: trying.fifos(scratch)),
    _tries(files.NAMES, lambda scratch, _: trying.names(scratch)),
    _tries(files.EVENTS, lambda scratch, _: trying.events(scratch)),
    _looks(host.PIPES, lambda subject: on_host.pipes(subject.fifos)),
    _looks(space.SPACE, lambda subject: in_log.space(subject.kind, subject.settings[1], subject.running[1])),
    _looks(space.INODES, lambda subject: in_log.inodes(subject.at)),
    _looks(space.QUOTA, lambda subject: in_log.quota(subject.mount)),
    _looks(log.RIGHTS, lambda subject: in_log.rights(subject.kind)),
    _of_log(log.FILES, lambda subject: look_at_files(subject.root)),
    _looks(log.SOCKET, lambda subject: subject.socket_path),
    _of_log(log.RUNNING, lambda subject: subject.running[0]),
    _of_log(host.SERVICE, lambda subject: on_host.service(subject.pid, subject.fifos)),
    _looks(host.LIMITS, lambda subject: on_host.limits(subject.settings[1], subject.fifos, subject.pid)),
    _looks(host.CLOCK, lambda subject: on_host.clock(subject.root)),
    _looks(host.UPTIME, lambda _: on_host.uptime()),
    _looks(host.PARTS, lambda _: on_host.parts()),
    _looks(host.SPARK, lambda _: on_host.spark()),
)


def examine(root: Path, *, config_path: Path | None, socket: Path | None, within: float) -> list[Finding]:
    """Every finding, in order.

    Args:
        within: seconds; what is not reached by then is unknown.
    """
    subject = Subject(root, config_path, socket)
    with ExitStack() as opened:
        _try_out(subject, opened)
        return list(_findings(subject, within))


def _try_out(subject: Subject, opened: ExitStack) -> None:
    """Make the scratch directory, which is removed with ``opened``; and remove those that are left over."""
    facts = in_log.user(subject.kind)
    if subject.kind.kind is log.Kind.UNFIT:
        subject.untried = "not tried out, because there is no place for a log"
    elif subject.kind.kind is log.Kind.HIDDEN:
        subject.untried = "not tried out, because this user may not look whether a log is here"
    elif subject.mount.type in medium.OF_KERNEL:
        subject.untried = "not tried out, because the kernel keeps no files here"
    elif facts.is_read_only:
        subject.untried = "not tried out, because the file system is read-only"
    elif not facts.may_write:
        subject.untried = "not tried out, because this user may not write here"
    else:
        try:
            subject.removed = remove_left_over(subject.at)
            subject.scratch = opened.enter_context(scratch_in(subject.at))
        except OSError as error:
            subject.untried = f"not tried out: {error.strerror}"


def _findings(subject: Subject, within: float) -> Iterator[Finding]:
    checks = iter(CHECKS)
    try:
        with _time_limit(within):
            for check, look in checks:
                try:
                    yield look(subject)
                except (OSError, LookupError) as error:
                    yield check.without(Outcome.UNKNOWN, f"cannot be found out: {error}")
                except _OutOfTime:
                    yield check.without(Outcome.UNKNOWN, f"not finished within {within:g} s", "--timeout 60s")
                    break
    except _OutOfTime:  # between two checks
        pass
    for check, _ in checks:
        yield check.without(Outcome.UNKNOWN, f"not reached within {within:g} s", "--timeout 60s")


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise :class:`_OutOfTime` in the block after so long."""

    def over(_number: int, _frame: FrameType | None) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
