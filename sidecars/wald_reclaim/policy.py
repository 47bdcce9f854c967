"""May a segment go? Facts in, verdict out, nothing else.

What was read may go at once; three limits hold it a while longer, three end that again:

    min_age            keep what is younger than this
    keep_bytes         keep at least this much, the newest
    require_archived   keep what is not in a bundle yet

    max_age, max_bytes, max_records    what is beyond one of these goes, whatever min_age and keep_bytes say; but what
                                       nobody has archived stays where that is required, and what somebody has not read
                                       stays unless ``expire`` is set, and then its loss is counted

A segment need not be sealed to go. Its age is what has certainly passed since it was complete
(:mod:`wald_reclaim.ages`): where little is known, it stays longer than was asked for, and never goes earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Limits:
    """What an operator asked for; None is no limit. Bytes are those of the files, sealed or not."""

    min_age_ns: int | None = None
    keep_bytes: int | None = None
    require_archived: bool = False
    max_age_ns: int | None = None
    max_bytes: int | None = None
    max_records: int | None = None
    expire: bool = False

    @property
    def by_age(self) -> bool:
        """Whether ages matter."""
        return self.min_age_ns is not None or self.max_age_ns is not None


@dataclass(frozen=True, slots=True)
class Facts:
    """One complete segment.

    Attributes:
        age_ns: since it was complete, at least.
        stored_bytes, records: of the segment; ``newer_bytes``, ``newer_records``: of the complete ones behind it.
        read: whether nobody pins it. archived: whether every record of a route that gates is in a bundle.
        newest: whether it is the newest segment of the log, which tells the next start where to go on.
        sealing: whether the sealer is at work on it.
        readable: whether its index, or what it is made of, tells whose records are in it.
    """

    age_ns: int
    stored_bytes: int
    records: int
    newer_bytes: int
    newer_records: int
    read: bool
    archived: bool
    newest: bool
    sealing: bool
    readable: bool


class Verdict(Enum):
    """What is to become of it; the value of one that goes is the rule in the ledger."""

    READ = "read"
    MAX_AGE = "max_age"
    MAX_BYTES = "max_bytes"
    MAX_RECORDS = "max_records"

    NEWEST = "it is the newest segment"
    SEALING = "the sealer is not done with it"
    UNREADABLE = "it cannot be read, so nobody can say who needs it"
    UNREAD = "somebody has not read it"
    NOT_ARCHIVED = "it is not archived yet"
    YOUNG = "it is not known to be as old as --min-age"
    KEPT_BYTES = "it is among the newest --keep-bytes"

    @property
    def goes(self) -> bool:
        return self is Verdict.READ or self.expires

    @property
    def expires(self) -> bool:
        """Whether the rule may take what nobody has read."""
        return self in (Verdict.MAX_AGE, Verdict.MAX_BYTES, Verdict.MAX_RECORDS)


def judge(facts: Facts, limits: Limits) -> Verdict:
    """The verdict on one segment."""
    over = _over(facts, limits)
    if facts.newest:
        return Verdict.NEWEST
    if facts.sealing:
        return Verdict.SEALING
    if not facts.readable:
        return Verdict.UNREADABLE
    if not facts.read and (over is None or not limits.expire):
        return Verdict.UNREAD
    if limits.require_archived and not facts.archived:
        return Verdict.NOT_ARCHIVED
    if over is not None:
        return over
    if limits.min_age_ns is not None and facts.age_ns < limits.min_age_ns:
        return Verdict.YOUNG
    if limits.keep_bytes is not None and facts.newer_bytes < limits.keep_bytes:
        return Verdict.KEPT_BYTES
    return Verdict.READ


def _over(facts: Facts, limits: Limits) -> Verdict | None:
    """The first of the upper limits that the segment is beyond."""
    if limits.max_age_ns is not None and facts.age_ns > limits.max_age_ns:
        return Verdict.MAX_AGE
    if limits.max_bytes is not None and facts.newer_bytes + facts.stored_bytes > limits.max_bytes:
        return Verdict.MAX_BYTES
    if limits.max_records is not None and facts.newer_records + facts.records > limits.max_records:
        return Verdict.MAX_RECORDS
    return None
