"""The verdict on a segment, for every combination of facts and limits, beside the rule said in another way."""

from __future__ import annotations

from itertools import product

import pytest

from wald_reclaim.policy import Facts, Limits, Verdict, judge

AGE_NS, BYTES, RECORDS = 1000, 100, 10  # of the segment; 50 bytes and 5 records are newer


def facts(**changes: bool) -> Facts:
    reported = {"read": True, "archived": True, "newest": False, "sealing": False, "readable": True} | changes
    return Facts(age_ns=AGE_NS, stored_bytes=BYTES, records=RECORDS, newer_bytes=50, newer_records=5, **reported)


CASES = [
    dict(zip(("read", "archived", "newest", "sealing", "readable"), values, strict=True))
    for values in product((False, True), repeat=5)
]
LIMITS = [
    Limits(
        min_age_ns=min_age, keep_bytes=keep, require_archived=archived, max_age_ns=age, max_bytes=size, expire=expire
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


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(name for name, holds in case.items() if holds))
def test_every_combination_of_facts_and_limits_has_the_verdict_of_the_rule(case: dict[str, bool]) -> None:
    """Said as conditions under which a segment goes, where the code asks one question after the other."""
    for limits in LIMITS:
        over = limits.max_age_ns == AGE_NS - 1 or limits.max_bytes == 149
        untouchable = case["newest"] or case["sealing"] or not case["readable"]
        needed = not case["read"] and not (limits.expire and over)
        unarchived = limits.require_archived and not case["archived"]
        young = limits.min_age_ns == AGE_NS + 1
        among_newest = limits.keep_bytes == 51
        goes = not untouchable and not needed and not unarchived and (over or not (young or among_newest))

        verdict = judge(facts(**case), limits)

        assert verdict.goes == goes, (case, limits, verdict)
        assert not (verdict.goes and not case["read"]) or limits.expire


@pytest.mark.parametrize(
    ("changes", "limits", "verdict"),
    [
        ({}, Limits(), Verdict.READ),
        ({"newest": True}, Limits(max_age_ns=1, expire=True), Verdict.NEWEST),
        ({"sealing": True}, Limits(max_age_ns=1, expire=True), Verdict.SEALING),
        ({"readable": False}, Limits(max_age_ns=1, expire=True), Verdict.UNREADABLE),
        ({"read": False}, Limits(), Verdict.UNREAD),
        ({"read": False}, Limits(max_age_ns=1, max_bytes=1, max_records=1), Verdict.UNREAD),
        ({"read": False}, Limits(expire=True, max_age_ns=AGE_NS), Verdict.UNREAD),
        ({"read": False}, Limits(expire=True, max_age_ns=AGE_NS - 1), Verdict.MAX_AGE),
        ({"read": False}, Limits(expire=True, max_records=14), Verdict.MAX_RECORDS),
        ({"read": False}, Limits(expire=True, max_records=15), Verdict.UNREAD),
        ({"archived": False}, Limits(require_archived=True, max_age_ns=1, expire=True), Verdict.NOT_ARCHIVED),
        ({}, Limits(min_age_ns=AGE_NS), Verdict.READ),
        ({}, Limits(min_age_ns=AGE_NS + 1), Verdict.YOUNG),
        ({}, Limits(min_age_ns=AGE_NS + 1, max_bytes=149), Verdict.MAX_BYTES),
        ({}, Limits(keep_bytes=50), Verdict.READ),
        ({}, Limits(keep_bytes=51), Verdict.KEPT_BYTES),
    ],
)
def test_the_verdict_names_the_rule(changes: dict[str, bool], limits: Limits, verdict: Verdict) -> None:
    assert judge(facts(**changes), limits) is verdict


def test_what_has_no_known_age_is_kept_and_does_not_expire() -> None:
    before = Facts(0, BYTES, RECORDS, 0, 0, read=False, archived=True, newest=False, sealing=False, readable=True)

    assert judge(before, Limits(max_age_ns=1, expire=True)) is Verdict.UNREAD
