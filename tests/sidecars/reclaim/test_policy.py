"""Verdicts for every combination of facts and limits, compared with another formulation of the rule."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from wald_reclaim.policy import Facts, Limits, RouteFacts, RouteLimits, Verdict, exceeded_limit, judge, judge_route

AGE_NS, BYTES, RECORDS = 1000, 100, 10  # of the segment; 50 bytes and 5 records are newer
EXPIRE = RouteLimits(expire=True)


def facts(**changes: bool) -> Facts:
    reported = {"is_archived": True, "is_newest": False, "is_being_sealed": False, "is_readable": True} | changes
    return Facts(age_ns=AGE_NS, stored_bytes=BYTES, records=RECORDS, newer_bytes=50, newer_records=5, **reported)


def of_route(*, read: bool, unread_bytes: int = 0) -> RouteFacts:
    """The facts of the only route in the segment."""
    return RouteFacts(AGE_NS, BYTES, RECORDS, newer_bytes=50, newer_records=5, is_read=read, unread_bytes=unread_bytes)


def verdict_of(limits: Limits, *, read: bool = True, **changes: bool) -> Verdict:
    """Judge a segment with one route without limits."""
    segment = facts(**changes)
    return judge(segment, limits, [judge_route(of_route(read=read), limits.of("a"), exceeded_limit(segment, limits))])


CASES = [
    dict(zip(("read", "is_archived", "is_newest", "is_being_sealed", "is_readable"), values, strict=True))
    for values in product((False, True), repeat=5)
]
LIMITS = [
    Limits(
        min_age_ns=min_age,
        keep_bytes=keep,
        require_archived=archived,
        max_age_ns=age,
        max_bytes=size,
        others=RouteLimits(expire=expire),
    )
    for min_age, keep, archived, age, size, expire in product(
        (None, AGE_NS, AGE_NS + 1),
        (None, 50, 51),
        (False, True),
        (None, AGE_NS, AGE_NS - 1),
        (None, 150, 149),
        (False, True),
    )
]


def test_every_combination_of_facts_and_limits_has_the_verdict_of_the_rule() -> None:
    """Said as conditions under which a segment goes, where the code asks one question after the other."""
    for case in CASES:
        for limits in LIMITS:
            beyond = limits.max_age_ns == AGE_NS - 1 or limits.max_bytes == 149
            untouchable = case["is_newest"] or case["is_being_sealed"] or not case["is_readable"]
            needed = not case["read"] and not (limits.others.expire and beyond)
            unarchived = limits.require_archived and not case["is_archived"]
            young = limits.min_age_ns == AGE_NS + 1
            among_newest = limits.keep_bytes == 51
            goes = not untouchable and not needed and not unarchived and (beyond or not (young or among_newest))

            verdict = verdict_of(limits, **case)

            assert verdict.is_deletion == goes, (case, limits, verdict)
            assert not (verdict.is_deletion and not case["read"]) or limits.others.expire


def test_the_verdict_names_the_rule() -> None:
    for changes, limits, verdict in [
        ({}, Limits(), Verdict.READ),
        ({"is_newest": True}, Limits(max_age_ns=1, others=EXPIRE), Verdict.NEWEST),
        ({"is_being_sealed": True}, Limits(max_age_ns=1, others=EXPIRE), Verdict.SEALING),
        ({"is_readable": False}, Limits(max_age_ns=1, others=EXPIRE), Verdict.UNREADABLE),
        ({"read": False}, Limits(), Verdict.UNREAD),
        ({"read": False}, Limits(max_age_ns=1, max_bytes=1, max_records=1), Verdict.UNREAD),
        ({"read": False}, Limits(others=EXPIRE, max_age_ns=AGE_NS), Verdict.UNREAD),
        ({"read": False}, Limits(others=EXPIRE, max_age_ns=AGE_NS - 1), Verdict.MAX_AGE),
        ({"read": False}, Limits(others=EXPIRE, max_records=14), Verdict.MAX_RECORDS),
        ({"read": False}, Limits(others=EXPIRE, max_records=15), Verdict.UNREAD),
        ({"is_archived": False}, Limits(require_archived=True, max_age_ns=1, others=EXPIRE), Verdict.NOT_ARCHIVED),
        ({}, Limits(min_age_ns=AGE_NS), Verdict.READ),
        ({}, Limits(min_age_ns=AGE_NS + 1), Verdict.YOUNG),
        ({}, Limits(min_age_ns=AGE_NS + 1, max_bytes=149), Verdict.MAX_BYTES),
        ({}, Limits(keep_bytes=50), Verdict.READ),
        ({}, Limits(keep_bytes=51), Verdict.KEPT_BYTES),
    ]:
        assert verdict_of(limits, **changes) is verdict


def test_what_has_no_known_age_is_kept_and_does_not_expire() -> None:
    before = RouteFacts(0, BYTES, RECORDS, 0, 0, is_read=False, unread_bytes=BYTES)

    assert judge_route(before, RouteLimits(max_age_ns=1, expire=True), None) is Verdict.UNREAD


def test_every_combination_of_facts_and_limits_of_a_route_has_the_verdict_of_the_rule() -> None:
    """Each limit is absent, the exact value, or one less."""
    for expire in [False, True]:
        for unread_bytes in [0, 1, 60, 100]:
            read = not unread_bytes
            unread = 50 + unread_bytes
            for age, size, records, pinned, log in product(
                (None, AGE_NS, AGE_NS - 1),
                (None, 150, 149),
                (None, 15, 14),
                (None, unread, unread - 1),
                (None, Verdict.MAX_AGE),
            ):
                limits = RouteLimits(age, size, records, expire, pinned)
                beyond = [Verdict.MAX_AGE] * (log is not None or age == AGE_NS - 1)
                beyond += [Verdict.MAX_BYTES] * (size == 149) + [Verdict.MAX_RECORDS] * (records == 14)
                allowed = beyond if read or expire else []
                allowed = allowed or ([Verdict.READ] if read else [Verdict.PINNED_MAX_BYTES] * (pinned == unread - 1))

                found = judge_route(of_route(read=read, unread_bytes=unread_bytes), limits, log)

                assert found is (allowed or [Verdict.UNREAD])[0], limits


RULES = [verdict for verdict in Verdict if verdict.is_deletion and verdict is not Verdict.EACH_ROUTE]


@pytest.mark.parametrize("young", [False, True])
def test_a_segment_goes_when_every_route_in_it_agrees(*, young: bool) -> None:
    """Those that have only read it agree once it is old enough; those that are beyond a limit, at once."""
    limits = Limits(min_age_ns=AGE_NS + young)
    for size in range(1, len(RULES) + 2):
        for routes in combinations([*RULES, Verdict.UNREAD], size):
            found = judge(facts(), limits, routes)

            if Verdict.UNREAD in routes:
                assert found is Verdict.UNREAD
            elif Verdict.READ in routes and young:
                assert found is Verdict.YOUNG
            else:
                assert found is (routes[0] if size == 1 else Verdict.EACH_ROUTE)


def test_a_segment_without_records_goes_by_the_limits_of_the_log() -> None:
    assert judge(facts(), Limits(min_age_ns=AGE_NS + 1), []) is Verdict.YOUNG
    assert judge(facts(), Limits(min_age_ns=AGE_NS + 1, max_age_ns=AGE_NS - 1), []) is Verdict.MAX_AGE
    assert judge(facts(), Limits(), []) is Verdict.READ


def test_a_route_with_a_table_of_its_own_does_not_take_over_what_the_others_lose() -> None:
    limits = Limits(of_routes={"own": RouteLimits(max_bytes=1)}, others=EXPIRE)

    assert (limits.of("own").expire, limits.of("any").expire) == (False, True)
    assert (limits.may_lose("own"), limits.may_lose("any")) == (False, True)
    assert limits.by_route
    assert not Limits(others=EXPIRE).by_route
