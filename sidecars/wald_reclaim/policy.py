"""Whether a segment may be deleted: facts in, verdict out, nothing else.

A segment that every group has read may go at once. Three limits keep it longer, others end that:

    min_age            keep what is younger than this
    keep_bytes         keep at least so many bytes, the newest
    require_archived   keep records that are in no bundle yet

    max_age, max_bytes, max_records    what is beyond one of these goes, whatever min_age and keep_bytes say; but
                                       unarchived records stay if require_archived is set, and unread records stay
                                       unless ``expire`` is set, and then the loss is counted

The log has upper limits, which count the files, and each route may have its own, which count its records and their
payload. A segment goes when every route in it agrees. A route agrees if its records there are read, or are beyond a
limit and may expire. Unless all of them are beyond a limit, min_age and keep_bytes hold. A route may also have a quota
of unread bytes; what is beyond it expires.

A segment need not be sealed to go. Its age is the time that has certainly passed since it was complete
(:mod:`wald_reclaim.ages`): if less is known, it stays longer than was asked for; it never goes earlier.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True, slots=True)
class RouteLimits:
    """The upper limits of one route; None is no limit. Bytes are those of the payload.

    Attributes:
        expire: whether unread records go that are beyond a limit, of the route or of the log.
        pinned_max_bytes: the most unread bytes; the oldest beyond it expire.
    """

    max_age_ns: int | None = None
    max_bytes: int | None = None
    max_records: int | None = None
    expire: bool = False
    pinned_max_bytes: int | None = None

    @property
    def counts(self) -> bool:
        """Whether a limit depends on how much of the route is newer."""
        return any(limit is not None for limit in (self.max_bytes, self.max_records, self.pinned_max_bytes))

    def exceeded(self, held_bytes: int, held_records: int) -> tuple[bool, bool, bool]:
        """Which of max_bytes, max_records and pinned_max_bytes so much is beyond, if all of it is unread."""
        return (
            self.max_bytes is not None and held_bytes > self.max_bytes,
            self.max_records is not None and held_records > self.max_records,
            self.pinned_max_bytes is not None and held_bytes > self.pinned_max_bytes,
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that the operator set; None is no limit. Bytes are those of the files, sealed or not.

    Attributes:
        of_routes: of the routes that have limits of their own. others: of all the rest.
    """

    min_age_ns: int | None = None
    keep_bytes: int | None = None
    require_archived: bool = False
    max_age_ns: int | None = None
    max_bytes: int | None = None
    max_records: int | None = None
    of_routes: Mapping[str, RouteLimits] = field(default_factory=dict)
    others: RouteLimits = RouteLimits()

    @property
    def by_age(self) -> bool:
        """Whether a limit depends on ages."""
        return (
            self.min_age_ns is not None
            or self.max_age_ns is not None
            or any(each.max_age_ns is not None for each in (self.others, *self.of_routes.values()))
        )

    @property
    def by_route(self) -> bool:
        """Whether routes differ, or have limits of their own."""
        return bool(self.of_routes) or self.others != RouteLimits(expire=self.others.expire)

    def of(self, route: str) -> RouteLimits:
        """The limits of a route."""
        return self.of_routes.get(route, self.others)

    def loses(self, route: str) -> bool:
        """Whether a limit may let unread records of a route go."""
        limits = self.of(route)
        return limits.expire or limits.pinned_max_bytes is not None


@dataclass(frozen=True, slots=True)
class RouteFacts:
    """The records of one route in one complete segment.

    Attributes:
        age_ns: of the segment, as in :class:`Facts`.
        payload_bytes, records: in the segment; ``newer_bytes``, ``newer_records``: in the complete ones after it.
        read: whether no cursor pins them. unread_bytes: those that a group has not read.
    """

    age_ns: int
    payload_bytes: int
    records: int
    newer_bytes: int
    newer_records: int
    read: bool
    unread_bytes: int


@dataclass(frozen=True, slots=True)
class Facts:
    """One complete segment.

    Attributes:
        age_ns: since it was complete, at least.
        stored_bytes, records: of the segment; ``newer_bytes``, ``newer_records``: of the complete ones after it.
        archived: whether every record of a route that is not retired is in a bundle.
        newest: whether it is the newest segment of the log, from which the next start of the daemon goes on.
        sealing: whether the sealer is working on it.
        readable: whether its index, or its frames, show which routes have records in it.
    """

    age_ns: int
    stored_bytes: int
    records: int
    newer_bytes: int
    newer_records: int
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
    PINNED_MAX_BYTES = "pinned_max_bytes"
    EACH_ROUTE = "each_route"

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
        return self in _EXPIRING


_EXPIRING = (
    Verdict.MAX_AGE,
    Verdict.MAX_BYTES,
    Verdict.MAX_RECORDS,
    Verdict.PINNED_MAX_BYTES,
    Verdict.EACH_ROUTE,  # each by its own rule, which may differ
)


def over(facts: Facts, limits: Limits) -> Verdict | None:
    """The first of the upper limits of the log that the segment exceeds."""
    if limits.max_age_ns is not None and facts.age_ns > limits.max_age_ns:
        return Verdict.MAX_AGE
    if limits.max_bytes is not None and facts.newer_bytes + facts.stored_bytes > limits.max_bytes:
        return Verdict.MAX_BYTES
    if limits.max_records is not None and facts.newer_records + facts.records > limits.max_records:
        return Verdict.MAX_RECORDS
    return None


def judge_route(facts: RouteFacts, limits: RouteLimits, log: Verdict | None) -> Verdict:
    """The verdict of one route: UNREAD, READ, or the limit that its records in the segment are beyond.

    Args:
        log: the limit of the log that the segment exceeds.
    """
    beyond = log or _beyond(facts, limits)
    if beyond is not None and (facts.read or limits.expire):
        return beyond
    if facts.read:
        return Verdict.READ
    _, _, pinned = limits.exceeded(facts.newer_bytes + facts.unread_bytes, 0)
    return Verdict.PINNED_MAX_BYTES if pinned else Verdict.UNREAD


def judge(facts: Facts, limits: Limits, routes: Collection[Verdict]) -> Verdict:
    """The verdict on one segment.

    Args:
        routes: the verdicts of the routes in it.
    """
    if facts.newest:
        return Verdict.NEWEST
    if facts.sealing:
        return Verdict.SEALING
    if not facts.readable:
        return Verdict.UNREADABLE
    rules = set(routes) or {over(facts, limits) or Verdict.READ}
    if Verdict.UNREAD in rules:
        return Verdict.UNREAD
    if limits.require_archived and not facts.archived:
        return Verdict.NOT_ARCHIVED
    if Verdict.READ in rules:
        if limits.min_age_ns is not None and facts.age_ns < limits.min_age_ns:
            return Verdict.YOUNG
        if limits.keep_bytes is not None and facts.newer_bytes < limits.keep_bytes:
            return Verdict.KEPT_BYTES
    return rules.pop() if len(rules) == 1 else Verdict.EACH_ROUTE


def _beyond(facts: RouteFacts, limits: RouteLimits) -> Verdict | None:
    """The first of the upper limits of the route that its records exceed."""
    if limits.max_age_ns is not None and facts.age_ns > limits.max_age_ns:
        return Verdict.MAX_AGE
    by_bytes, by_records, _ = limits.exceeded(
        facts.newer_bytes + facts.payload_bytes, facts.newer_records + facts.records
    )
    if by_bytes:
        return Verdict.MAX_BYTES
    return Verdict.MAX_RECORDS if by_records else None
