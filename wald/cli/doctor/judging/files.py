"""Operations that the log needs, tried in a scratch directory: replace, link, lock, allocate, map, watch, name."""

from __future__ import annotations

from dataclasses import dataclass

from wald.cli.doctor.checks import Check, Outcome, Rule, otherwise
from wald.cli.doctor.judging.medium import COPY_ON_WRITE, NETWORK, milliseconds
from wald.setting_types import format_bytes

_LOCAL_DISK = "put the root on a local file system, such as ext4 or xfs"


@dataclass(frozen=True, slots=True)
class Tried:
    """One operation; ``error`` is the operating system's, "" if it worked."""

    error: str = ""
    seconds: float = 0.0

    @property
    def took(self) -> str:
        return milliseconds(self.seconds)


REPLACE: Check[Tried] = Check(
    "replace",
    "a file is replaced in one step and its directory is synced, as a cursor is",
    (5, 6),
    (
        Rule(Outcome.FAIL, lambda f: f.error, "a file cannot be replaced: {f.error}", _LOCAL_DISK),
        Rule(Outcome.OK, otherwise, "a file was replaced, with its directory synced, in {f.took}"),
    ),
)

LINKS: Check[Tried] = Check(
    "links",
    "a hard link, with which a log gets its identity",
    (10,),
    (
        Rule(Outcome.FAIL, lambda f: f.error, "no hard links, so no log can be made here: {f.error}", _LOCAL_DISK),
        Rule(Outcome.OK, otherwise, "a hard link takes no name that is taken"),
    ),
)

FIFOS: Check[Tried] = Check(
    "fifo",
    "a FIFO and a unix socket can be made and used",
    (17,),
    (
        Rule(Outcome.FAIL, lambda f: f.error, "a FIFO or a socket does not work here: {f.error}", _LOCAL_DISK),
        Rule(Outcome.OK, otherwise, "a FIFO and a socket work here"),
    ),
)


@dataclass(frozen=True, slots=True)
class Locks:
    """Whether flock(2) of one process keeps out another; ``type`` is the file system's."""

    type: str
    excludes: bool = False
    error: str = ""


LOCKS: Check[Locks] = Check(
    "locks",
    "flock of this process keeps out another process",
    (10,),
    (
        Rule(Outcome.FAIL, lambda f: f.error, "flock does not work: {f.error}", _LOCAL_DISK),
        Rule(
            Outcome.FAIL,
            lambda f: not f.excludes,
            "two processes got the same lock, so two daemons would start; the later one then stops the earlier",
            _LOCAL_DISK,
        ),
        Rule(
            Outcome.WARN,
            lambda f: f.type in NETWORK or f.type.startswith("fuse"),
            "flock keeps out another process of this host; on {f.type} perhaps not one of another host",
            "start a daemon on one host only",
        ),
        Rule(Outcome.OK, otherwise, "flock keeps out another process"),
    ),
)


@dataclass(frozen=True, slots=True)
class Events:
    """Whether inotify reports a new file."""

    error: str = ""
    arrived: bool = False
    seconds: float = 0.0

    @property
    def took(self) -> str:
        return milliseconds(self.seconds)


EVENTS: Check[Events] = Check(
    "events",
    "inotify reports a new file, for which --watch waits",
    (),
    (
        Rule(
            Outcome.WARN,
            lambda f: f.error,
            "inotify: {f.error}; programs with --watch look at intervals only",
            "sysctl fs.inotify.max_user_instances=512 fs.inotify.max_user_watches=65536",
        ),
        Rule(
            Outcome.WARN,
            lambda f: not f.arrived,
            "inotify did not report a new file; programs with --watch look at intervals only",
            _LOCAL_DISK,
        ),
        Rule(Outcome.OK, otherwise, "inotify reported a new file after {f.took}"),
    ),
)


@dataclass(frozen=True, slots=True)
class Allocation:
    """fallocate(2) of a file: which bytes the file system then holds for it."""

    type: str
    asked_bytes: int = 0
    allocated_bytes: int = 0
    error: str = ""
    is_full: bool = False

    @property
    def asked(self) -> str:
        return format_bytes(self.asked_bytes)

    @property
    def allocated(self) -> str:
        return format_bytes(self.allocated_bytes)


ALLOCATION: Check[Allocation] = Check(
    "allocation",
    "room for a segment is reserved before it is written",
    (9,),
    (
        Rule(
            Outcome.FAIL,
            lambda f: f.is_full,
            "{f.asked} cannot be allocated: {f.error}",
            "df -h {at}; quota -v",
        ),
        Rule(
            Outcome.WARN,
            lambda f: f.error,
            "{f.type} does not allocate ({f.error}): a segment grows as it is written, which makes syncs slower",
            _LOCAL_DISK,
        ),
        Rule(
            Outcome.WARN,
            lambda f: f.type in COPY_ON_WRITE,
            "{f.type} copies what is written, so an allocated byte may still meet a full disk; the daemon then waits",
            "keep free_space_min large; on btrfs chattr +C on an empty {at}",
        ),
        Rule(
            Outcome.WARN,
            lambda f: f.allocated_bytes < f.asked_bytes,
            "{f.asked} were asked for, and {f.type} holds {f.allocated}",
            _LOCAL_DISK,
        ),
        Rule(Outcome.OK, otherwise, "{f.asked} were allocated, and can be written when the disk is full"),
    ),
)


@dataclass(frozen=True, slots=True)
class Mapping:
    """Whether another process reads at once what this one has written to a mapped file."""

    error: str = ""
    is_coherent: bool = False


MAPPING: Check[Mapping] = Check(
    "mapping",
    "another process reads at once what is written through a memory map, as the head is",
    (1,),
    (
        Rule(Outcome.FAIL, lambda f: f.error, "a file cannot be mapped: {f.error}", _LOCAL_DISK),
        Rule(
            Outcome.FAIL,
            lambda f: not f.is_coherent,
            "another process read old bytes of a mapped file, so readers would see an old head",
            _LOCAL_DISK,
        ),
        Rule(Outcome.OK, otherwise, "another process read at once what was written through a map"),
    ),
)


@dataclass(frozen=True, slots=True)
class Names:
    """Names of files: the longest that wald makes, and two that differ in case."""

    longest_bytes: int
    error: str = ""
    is_case_sensitive: bool = True


NAMES: Check[Names] = Check(
    "names",
    "names as long as those of wald, and different in case only",
    (3, 5),
    (
        Rule(
            Outcome.FAIL,
            lambda f: not f.is_case_sensitive,
            "names that differ in case are one file, so two routes would be one",
            "put the root where case counts; on ext4 chattr -F on an empty {at}",
        ),
        Rule(
            Outcome.WARN,
            lambda f: f.error,
            "a name of {f.longest_bytes} bytes cannot be made ({f.error}): groups need shorter names",
            "keep names of routes and groups below 100 characters",
        ),
        Rule(Outcome.OK, otherwise, "names may have {f.longest_bytes} bytes, and case counts"),
    ),
)
