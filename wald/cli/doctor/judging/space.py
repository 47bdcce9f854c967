"""Space for the log: bytes, files, quotas."""

from __future__ import annotations

from dataclasses import dataclass

from wald.cli.doctor.checks import Check, Outcome, Rule, otherwise
from wald.setting_types import format_bytes, format_seconds

_FEW_INODES = 1000
_DAY = 86400
_YEAR = 366 * _DAY


@dataclass(frozen=True, slots=True)
class Space:
    """Free space on the disk, and the needs of the daemon with these settings.

    Attributes:
        needed_bytes: free space below which the daemon accepts no input.
        segment_bytes, segment_max_bytes: size of a segment on this disk, and as configured.
        pinned_bytes: bytes in segments that groups pin; None if unknown.
        full_in_seconds: time until the disk is full at the current rate if nothing is reclaimed; None if unknown.
    """

    free_bytes: int
    needed_bytes: int
    segment_bytes: int
    segment_max_bytes: int
    pinned_bytes: int | None = None
    full_in_seconds: float | None = None

    @property
    def free(self) -> str:
        return format_bytes(self.free_bytes)

    @property
    def needed(self) -> str:
        return format_bytes(self.needed_bytes)

    @property
    def pinned(self) -> str:
        return f"; {format_bytes(self.pinned_bytes)} are pinned by groups" if self.pinned_bytes else ""

    @property
    def outlook(self) -> str:
        if self.full_in_seconds is None or self.full_in_seconds > _YEAR:
            return ""
        return f"; full in {format_seconds(self.full_in_seconds)}"


SPACE: Check[Space] = Check(
    "space",
    "free space compared with the daemon's needs, bytes that groups pin, and how fast the log grows",
    (9,),
    (
        Rule(
            Outcome.FAIL,
            lambda f: f.free_bytes < f.needed_bytes and f.pinned_bytes,
            "{f.free} free, and {f.needed} are needed to take input{f.pinned}",
            "{wald} explain; df -h {at}",
        ),
        Rule(
            Outcome.FAIL,
            lambda f: f.free_bytes < f.needed_bytes,
            "{f.free} free, and {f.needed} are needed to take input{f.pinned}",
            "df -h {at}; or a smaller free_space_min and segment_max_bytes",
        ),
        Rule(
            Outcome.WARN,
            lambda f: f.full_in_seconds is not None and f.full_in_seconds < _DAY,
            "{f.free} free{f.outlook} if nothing is reclaimed{f.pinned}",
            "{wald} explain",
        ),
        Rule(
            Outcome.WARN,
            lambda f: f.segment_bytes < f.segment_max_bytes,
            "{f.free} free; the disk is small, so segments have {f.segment_bytes} bytes and not {f.segment_max_bytes}",
            "a larger disk, or a smaller segment_max_bytes and free_space_min",
        ),
        Rule(Outcome.OK, otherwise, "{f.free} free, of which {f.needed} are kept{f.pinned}{f.outlook}"),
    ),
)


@dataclass(frozen=True, slots=True)
class Inodes:
    """Files that can still be made; ``total`` is 0 where the file system sets no limit."""

    free: int
    total: int


INODES: Check[Inodes] = Check(
    "inodes",
    "how many files can still be made",
    (9,),
    (
        Rule(Outcome.OK, lambda f: not f.total, "the file system does not limit the number of files"),
        Rule(Outcome.FAIL, lambda f: not f.free, "no file can be made: all {f.total} inodes are used", "df -i {at}"),
        Rule(
            Outcome.WARN,
            lambda f: f.free < _FEW_INODES,
            "{f.free} of {f.total} inodes are free",
            "df -i {at}; du --inodes -xd1 around it",
        ),
        Rule(Outcome.OK, otherwise, "{f.free} of {f.total} inodes are free"),
    ),
)


@dataclass(frozen=True, slots=True)
class Quota:
    """Options of the mount that switch quotas on."""

    options: tuple[str, ...]

    @property
    def named(self) -> str:
        return ", ".join(self.options)


QUOTA: Check[Quota] = Check(
    "quota",
    "whether quotas are on",
    (9,),
    (
        Rule(Outcome.OK, lambda f: not f.options, "no quota is on"),
        Rule(
            Outcome.UNKNOWN,
            otherwise,
            "quotas are on ({f.named}), and free space may be less than it seems",
            "quota -v; repquota -a",
        ),
    ),
)
