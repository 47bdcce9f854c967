"""The examination: every check of one directory, in order and within a time limit."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from wald.cli.doctor import files, host, log, medium
from wald.cli.doctor.findings import Facts, Finding, Outcome, Paths
from wald.errors import DISK_FULL
from wald.files.layout import Root


class _OutOfTime(BaseException):
    """End of the time limit; not an Exception, so that no handler swallows it."""


@dataclass
class Subject:
    """The directory to examine, and facts that several checks need.

    Attributes:
        untried: the reason why nothing can be tried out; empty if ``scratch`` exists.
        removed: number of leftover scratch directories that were removed.
    """

    root: Path
    config_path: Path | None
    socket: Path | None
    scratch: Path = Path()
    untried: str = ""
    removed: int = 0

    @cached_property
    def place(self) -> log.Place:
        return log.place(self.root)

    @property
    def has_log(self) -> bool:
        """True if a log exists, or the remains of one."""
        return os.path.lexists(Root(self.root).identity)

    @cached_property
    def at(self) -> Path:
        return Path(self.place.at)

    @cached_property
    def mount(self) -> medium.Mount:
        return medium.mount_of(self.at)

    @cached_property
    def device(self) -> medium.Device:
        return medium.device_of(self.at, self.mount)

    @cached_property
    def settings(self) -> tuple[log.Settings, Any]:
        return log.settings(self.config_path)

    @cached_property
    def running(self) -> tuple[log.Running, Mapping[str, Any]]:
        return log.running(self.root, Path(self.socket_path.path))

    @cached_property
    def pid(self) -> int:
        """Process id of the running daemon; 0 if none runs or it is unknown."""
        return log.daemon_pid(self.root, self.running[1]) if self.running[0].holder else 0

    @cached_property
    def socket_path(self) -> log.SocketPath:
        return log.socket_path(self.root, self.socket, self.settings[1])

    @cached_property
    def fifos(self) -> int:
        return log.count_fifos(self.root)

    def prepare(self, stack: ExitStack) -> None:
        """Remove leftover scratch directories, and create one that ``stack`` removes."""
        user = log.user(self.place)
        if self.place.kind is log.Kind.UNFIT:
            self.untried = "not tried out, because no log can be here"
        elif self.place.kind is log.Kind.HIDDEN:
            self.untried = "not tried out, because this user may not see whether a log is here"
        elif self.mount.type in medium.OF_KERNEL:
            self.untried = "not tried out, because the kernel stores no files here"
        elif user.is_read_only:
            self.untried = "not tried out, because the file system is read-only"
        elif not user.may_write:
            self.untried = "not tried out, because this user may not write here"
        else:
            try:
                self.removed = files.remove_leftovers(self.at)
                self.scratch = stack.enter_context(files.scratch_in(self.at))
            except OSError as error:
                self.untried = f"not tried out: {error.strerror}"


class Needs(StrEnum):
    """Prerequisite of a check."""

    NOTHING = ""
    LOG = "log"
    SCRATCH = "scratch"


@dataclass(frozen=True, slots=True)
class Check:
    """One question about a directory and its host.

    Attributes:
        about: the question, for the documentation.
        probe: returns the facts.
    """

    name: str
    about: str
    promises: tuple[int, ...]
    probe: Callable[[Subject], Facts]
    needs: Needs = Needs.NOTHING

    def judge(self, facts: Any, paths: Paths) -> Finding:  # ``Any``: mypy knows no type for any dataclass
        outcome, message, advice = facts.verdict(paths)
        return Finding(self.name, outcome, message, self.promises, dataclasses.asdict(facts), advice)

    def without_facts(self, outcome: Outcome, message: str, advice: str = "") -> Finding:
        return Finding(self.name, outcome, message, self.promises, {}, advice)


CHECKS = (
    Check(
        "root",
        "what exists at the path of the root",
        (),
        lambda subject: replace(subject.place, removed=subject.removed),
    ),
    Check("user", "this user, and the owner that the daemon runs as", (), lambda subject: log.user(subject.place)),
    Check("settings", "the file of --config and the variables WALD_…", (), lambda subject: subject.settings[0]),
    Check("mount", "file system and mount options", (1, 2), lambda subject: subject.mount),
    Check("device", "block device and its write cache", (1, 2), lambda subject: subject.device),
    Check(
        "sync",
        "latency of fdatasync over a few hundred appends, and whether they reach the device",
        (1, 2),
        lambda subject: medium.sync(subject.scratch, subject.mount, subject.device),
        Needs.SCRATCH,
    ),
    Check(
        "replace",
        "replacing a file in one step and syncing its directory, as for a cursor",
        (5, 6),
        lambda subject: files.replace(subject.scratch),
        Needs.SCRATCH,
    ),
    Check(
        "links",
        "a hard link, with which a log gets its identity",
        (10,),
        lambda subject: files.links(subject.scratch),
        Needs.SCRATCH,
    ),
    Check(
        "locks",
        "flock of this process excludes another process",
        (10,),
        lambda subject: files.locks(subject.scratch, subject.mount.type),
        Needs.SCRATCH,
    ),
    Check(
        "allocation",
        "reserving space for a segment before it is written",
        (9,),
        lambda subject: files.allocation(subject.scratch, subject.mount.type),
        Needs.SCRATCH,
    ),
    Check(
        "mapping",
        "another process immediately reads bytes written through a memory map, as for the head",
        (1,),
        lambda subject: files.mapping(subject.scratch),
        Needs.SCRATCH,
    ),
    Check(
        "fifo",
        "a FIFO and a unix socket can be created and used",
        (17,),
        lambda subject: files.fifos(subject.scratch),
        Needs.SCRATCH,
    ),
    Check(
        "names",
        "names as long as those of wald, and names that differ only in case",
        (3, 5),
        lambda subject: files.names(subject.scratch),
        Needs.SCRATCH,
    ),
    Check(
        "events",
        "inotify reports a new file, as --watch needs",
        (),
        lambda subject: files.events(subject.scratch),
        Needs.SCRATCH,
    ),
    Check("pipes", "the largest pipe, for every FIFO", (17,), lambda subject: host.pipes(subject.fifos)),
    Check(
        "space",
        "free space compared with the daemon's needs, bytes that groups pin, and how fast the log grows",
        (9,),
        lambda subject: log.space(subject.place, subject.settings[1], subject.running[1]),
    ),
    Check("inodes", "how many files can still be created", (9,), lambda subject: medium.inodes(subject.at)),
    Check("quota", "whether quotas are on", (9,), lambda subject: medium.quota(subject.mount)),
    Check(
        "rights",
        "who may change or replace the directory: its mode, and those of its parents",
        (2, 10),
        lambda subject: log.rights(subject.place),
    ),
    Check(
        "files",
        "links, devices, foreign owners and modes in the log's directories; names that are not wald's",
        (2, 8),
        lambda subject: log.files(subject.root),
        Needs.LOG,
    ),
    Check("socket", "length of the socket's path", (), lambda subject: subject.socket_path),
    Check(
        "daemon",
        "which daemon holds the root, and whether it answers",
        (9, 10),
        lambda subject: subject.running[0],
        Needs.LOG,
    ),
    Check(
        "service",
        "the systemd unit of the running daemon: notification, descriptor store, watchdog",
        (17,),
        lambda subject: host.service(subject.pid, subject.fifos),
        Needs.LOG,
    ),
    Check(
        "limits",
        "limits of open files and of file sizes: the daemon's, or those that it would inherit",
        (9, 17),
        lambda subject: host.limits(subject.settings[1], subject.fifos, subject.pid),
    ),
    Check("clock", "synchronisation of the wall clock, for append times", (), lambda subject: host.clock(subject.root)),
    Check("uptime", "measuring ages without the wall clock", (12,), lambda _: host.uptime()),
    Check("parts", "versions, and checksums computed by the processor", (), lambda _: host.parts()),
    Check("spark", "PySpark and Java, for wald-export, wald-compact and wald-audit", (), lambda _: host.spark()),
)


def examine(root: Path, *, config_path: Path | None, socket: Path | None, within: float) -> list[Finding]:
    """Return the findings of all checks; those not reached ``within`` seconds are unknown."""
    subject = Subject(root, config_path, socket)
    with ExitStack() as stack:
        subject.prepare(stack)
        return list(_findings(subject, within))


def _findings(subject: Subject, within: float) -> Iterator[Finding]:
    checks = iter(CHECKS)
    try:
        with _time_limit(within):
            for check in checks:
                try:
                    yield _find(check, subject)
                except (OSError, LookupError) as error:
                    yield check.without_facts(Outcome.UNKNOWN, f"cannot be determined: {error}")
                except _OutOfTime:
                    yield check.without_facts(Outcome.UNKNOWN, f"not finished within {within:g} s", "--timeout 60s")
                    break
    except _OutOfTime:  # between two checks
        pass
    for check in checks:
        yield check.without_facts(Outcome.UNKNOWN, f"not reached within {within:g} s", "--timeout 60s")


def _find(check: Check, subject: Subject) -> Finding:
    if check.needs is Needs.SCRATCH and subject.untried:
        return check.without_facts(Outcome.SKIPPED, subject.untried)
    if check.needs is Needs.LOG and not subject.has_log:
        if subject.place.kind is log.Kind.HIDDEN:
            return check.without_facts(Outcome.UNKNOWN, "this user may not see whether a log is here")
        return check.without_facts(Outcome.SKIPPED, "there is no log here")
    try:
        facts = check.probe(subject)
    except OSError as error:
        if check.needs is Needs.SCRATCH and error.errno in DISK_FULL:
            return check.without_facts(Outcome.SKIPPED, f"not tried out: {error.strerror}")
        raise
    return check.judge(facts, Paths(subject.root, subject.at))


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise :class:`_OutOfTime` in the block when the time is over."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
