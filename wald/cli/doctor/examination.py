"""The examination: every check of one directory, in order and within a time limit."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from wald.cli.doctor import files, host, log, medium
from wald.cli.doctor.findings import Facts, Finding, Outcome, Paths, interrupted
from wald.errors import DISK_FULL
from wald.files.layout import Root


class _OutOfTime(BaseException):
    """End of the time limit; not an Exception, so that no handler swallows it."""


@dataclass
class Subject:
    """The directory to examine, and facts that several checks need."""

    root: Path
    config_path: Path | None
    socket: Path | None
    scratch: Path = Path()
    untried: str = ""  # why nothing can be tested; empty if ``scratch`` exists
    removed: int = 0  # number of leftover scratch directories that were removed

    @cached_property
    def place(self) -> log.Place:
        return log.place(self.root)

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
        """Remove leftover scratch directories, and create a new one, which ``stack`` removes."""
        user = log.user(self.place)
        if self.place.kind is log.Kind.UNFIT:
            self.untried = "not tested, because no log can exist here"
        elif self.place.kind is log.Kind.HIDDEN:
            self.untried = "not tested, because this user is not permitted to see whether a log exists here"
        elif self.mount.type in medium.OF_KERNEL:
            self.untried = "not tested, because the kernel stores no files here"
        elif user.is_read_only:
            self.untried = "not tested, because the file system is read-only"
        elif not user.may_write:
            self.untried = "not tested, because this user may not write here"
        else:
            try:
                self.removed = files.remove_leftovers(self.at)
                self.scratch = stack.enter_context(files.scratch_in(self.at))
            except OSError as error:
                self.untried = f"not tested: {error.strerror}"


Needs = Literal["nothing", "log", "scratch"]
"""Prerequisites of a check."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a directory and its host; ``probe`` returns the facts that decide it."""

    name: str
    facts: type[Facts]
    promises: tuple[int, ...]
    probe: Callable[[Subject], Facts]
    needs: Needs = "nothing"

    def without_facts(self, outcome: Outcome, message: str, advice: str = "") -> Finding:
        return Finding(self.name, outcome, message, self.promises, advice)


CHECKS = (
    Check("root", log.Place, (), lambda given: replace(given.place, removed=given.removed)),
    Check("user", log.User, (), lambda given: log.user(given.place)),
    Check("settings", log.Settings, (), lambda given: given.settings[0]),
    Check("mount", medium.Mount, (1, 2), lambda given: given.mount),
    Check("device", medium.Device, (1, 2), lambda given: given.device),
    Check("sync", medium.Sync, (1, 2), lambda given: medium.sync(given.scratch, given.mount, given.device), "scratch"),
    Check("replace", files.Replacement, (5, 6), lambda given: files.replace(given.scratch), "scratch"),
    Check("links", files.Links, (10,), lambda given: files.links(given.scratch), "scratch"),
    Check("locks", files.Locks, (10,), lambda given: files.locks(given.scratch, given.mount.type), "scratch"),
    Check(
        "allocation", files.Allocation, (9,), lambda given: files.allocation(given.scratch, given.mount.type), "scratch"
    ),
    Check("mapping", files.Mapping, (1,), lambda given: files.mapping(given.scratch), "scratch"),
    Check("fifo", files.Fifos, (17,), lambda given: files.fifos(given.scratch), "scratch"),
    Check("names", files.Names, (3, 5), lambda given: files.names(given.scratch), "scratch"),
    Check("events", files.Events, (), lambda given: files.events(given.scratch), "scratch"),
    Check("pipes", host.Pipes, (17,), lambda given: host.pipes(given.fifos)),
    Check("space", medium.Space, (9,), lambda given: log.space(given.place, given.settings[1], given.running[1])),
    Check("inodes", medium.Inodes, (9,), lambda given: medium.inodes(given.at)),
    Check("quota", medium.Quota, (9,), lambda given: medium.quota(given.mount)),
    Check("rights", log.Rights, (2, 10), lambda given: log.rights(given.place)),
    Check("files", log.Files, (2, 8), lambda given: log.files(given.root), "log"),
    Check("socket", log.SocketPath, (), lambda given: given.socket_path),
    Check("daemon", log.Running, (9, 10), lambda given: given.running[0], "log"),
    Check("service", host.Service, (17,), lambda given: host.service(given.pid, given.fifos), "log"),
    Check("limits", host.Limits, (9, 17), lambda given: host.limits(given.settings[1], given.fifos, given.pid)),
    Check("clock", host.Clock, (), lambda given: host.clock(given.root)),
    Check("uptime", host.Uptime, (12,), lambda _: host.uptime()),
    Check("parts", host.Parts, (), lambda _: host.parts()),
    Check("spark", host.Spark, (), lambda _: host.spark()),
)


def examine(root: Path, *, config_path: Path | None, socket: Path | None, within: float) -> list[Finding]:
    """Return the findings of all checks; those not reached within the time limit are unknown."""
    subject = Subject(root, config_path, socket)
    with ExitStack() as stack:
        subject.prepare(stack)
        return list(_findings(subject, within))


def _findings(subject: Subject, within: float) -> Iterator[Finding]:
    checks = iter(CHECKS)
    try:
        with interrupted(_OutOfTime, after=within):
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
    if check.needs == "scratch" and subject.untried:
        return check.without_facts(Outcome.SKIPPED, subject.untried)
    if check.needs == "log" and not os.path.lexists(Root(subject.root).identity):
        if subject.place.kind is log.Kind.HIDDEN:
            return check.without_facts(Outcome.UNKNOWN, "this user is not permitted to see whether a log exists here")
        return check.without_facts(Outcome.SKIPPED, "there is no log here")
    try:
        facts: Any = check.probe(subject)  # ``Any``: mypy knows no type for any dataclass
    except OSError as error:
        if check.needs == "scratch" and error.errno in DISK_FULL:
            return check.without_facts(Outcome.SKIPPED, f"not tested: {error.strerror}")
        raise
    outcome, message, advice = facts.verdict(Paths(subject.root, subject.at))
    return Finding(check.name, outcome, message, check.promises, advice, dataclasses.asdict(facts))
