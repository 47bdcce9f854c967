"""Whether a segment may be deleted: facts in, verdict out, nothing else.

A segment that every group has read may go at once. Three limits keep it longer, three others end that:

    min_age            keep what is younger than this
    keep_bytes         keep at least so many bytes, the newest
    require_archived   keep records that are in no bundle yet

    max_age, max_bytes, max_records    what is beyond one of these goes, whatever min_age and keep_bytes say; but
                                       unarchived records stay if require_archived is set, and unread records stay
                                       unless ``expire`` is set, and then the loss is counted

A segment need not be sealed to go. Its age is the time that has certainly passed since it was complete
(:mod:`wald_reclaim.ages`): if less is known, it stays longer than was asked for; it never goes earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that the operator set; None is no limit. Bytes are those of the files, sealed or not."""

    min_age_ns: int | None = None
    keep_bytes: int | None = None
    require_archived: bool = False
    max_age_ns: int | None = None
    max_bytes: int | None = None
    max_records: int | None = None
    expire: bool = False

    @property
    def by_age(self) -> bool:
        """Whether a limit depends on ages."""
        return self.min_age_ns is not None or self.max_age_ns is not None


@dataclass(frozen=True, slots=True)
class Facts:
    """One complete segment.

    Attributes:
        age_ns: since it was complete, at least.
        stored_bytes, records: of the segment; ``newer_bytes``, ``newer_records``: of the complete ones after it.
        read: whether no cursor pins it. archived: whether every record of a route that is not retired is in a bundle.
        newest: whether it is the newest segment of the log, from which the next start of the daemon goes on.
        sealing: whether the sealer is working on it.
        readable: whether its index, or its frames, show which routes have records in it.
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
    """What happens to a segment; the value of a verdict that deletes it is the rule in the ledger."""

    READ = "read"
    MAX_AGE = "max_age"
    MAX_BYTES = "max_bytes"
    MAX_RECORDS = "max_records"

    NEWEST = "it is the newest segment"
    SEALING = "the sealer is not done with it"
    UNREADABLE = "it cannot be read, so it is not known which groups need it"
    UNREAD = "a group has not read it"
    NOT_ARCHIVED = "it is not archived yet"
    YOUNG = "it is not known to be as old as --min-age"
    KEPT_BYTES = "it is among the newest --keep-bytes"

    @property
    def goes(self) -> bool:
        return self is Verdict.READ or self.expires

    @property
    def expires(self) -> bool:
        """Whether the rule may delete unread records."""
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
    """The first of the upper limits that the segment exceeds."""
    if limits.max_age_ns is not None and facts.age_ns > limits.max_age_ns:
        return Verdict.MAX_AGE
    if limits.max_bytes is not None and facts.newer_bytes + facts.stored_bytes > limits.max_bytes:
        return Verdict.MAX_BYTES
    if limits.max_records is not None and facts.newer_records + facts.records > limits.max_records:
        return Verdict.MAX_RECORDS
    return None
