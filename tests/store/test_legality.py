"""Audit of deletions: every state of a route, under every rule, with every claim."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from wald.format.spans import Spans
from wald.retention.audit import EXPIRING, REPEATED, audit_deletion

Line = dict[str, Any]
SHA256 = "ab" * 32
HELD = {"route": "a", "count": 10, "first": 1, "last": 10}
LISTS_ALL = "of route a, the line lists records 1 to 10 (10 in total)"
RULES = ("read", *EXPIRING, "found released, reason unknown")

# Claims that a line may make about route a, with ten records in the segment; True if every group had read them.
CLAIMS: dict[str, tuple[Line, bool]] = {
    "retired": ({"retired": True}, True),
    "no cursor": ({"cursors": {}}, False),
    "at the last": ({"cursors": {"processed": 10}}, True),
    "beyond the last": ({"cursors": {"processed": 99}}, True),
    "one before the last": ({"cursors": {"processed": 9}}, False),
    "never begun": ({"cursors": {"processed": 0}}, False),
    "all of several": ({"cursors": {"processed": 10, "archive": 12}}, True),
    "not all of several": ({"cursors": {"processed": 10, "archive": 4}}, False),
}
SLOWEST = {"no cursor": 0, "one before the last": 9, "never begun": 0, "not all of several": 4}


def line(*routes: Line, rule: str = "read", **more: object) -> Line:
    content: Line = {"event": "reclaimed", "base": 1, "last": 20, "at": 1, "rule": rule, "bytes": 5, "sha256": SHA256}
    return content | {"routes": list(routes)} | more


def sealed(*routes: tuple[str, int, int, int], **more: object) -> Line:
    content: Line = {"event": "sealed", "base": 1, "last": 20, "sha256": SHA256}
    return content | {"routes": [[*route, 99] for route in routes]} | more


def test_every_claim_by_every_rule() -> None:
    """Only read records, and expired ones with their full loss, may be deleted; losses are counted."""
    for name, rule, lost in product(CLAIMS, RULES, (None, -1, 0, 1, 6, 10, 11)):
        claim, read = CLAIMS[name]
        content = line(HELD | claim, rule=rule, **({} if lost is None else {"lost": {"a": lost}}))
        ruling = audit_deletion(content, sealed(("a", 10, 1, 10)))
        expired = rule in EXPIRING and lost is not None
        unread = 0 if read else 10 - SLOWEST[name]
        assert (not ruling.errors) == (lost == unread if expired else read)
        assert ruling.unread_records == (lost if expired else 0)


def test_where_each_route_goes_by_its_own_rule_that_one_counts() -> None:
    for rule in RULES:
        unread = HELD | {"cursors": {"processed": 4}}
        read = {"route": "b", "count": 10, "first": 11, "last": 20, "cursors": {"processed": 20}, "rule": "read"}
        content = line(unread | {"rule": rule}, read, rule="each_route", lost={"a": 6})
        ruling = audit_deletion(content, sealed(("a", 10, 1, 10), ("b", 10, 11, 20)))

        assert (not ruling.errors) == (rule in EXPIRING)
        assert ruling.unread_records == 6 * (rule in EXPIRING)
        assert audit_deletion(line(unread, read, rule="each_route", lost={"a": 6}), None).errors
        assert audit_deletion(line(unread | {"rule": rule}, read, lost={"a": 6}), None).errors


def test_words_name_record_route_and_group_and_bare_lines_prove_nothing() -> None:
    """wald-reclaim writes a line without cursors of a released segment that is in no ledger."""
    unread = audit_deletion(line(HELD | {"cursors": {"processed": 10, "archive": 4}}), None)
    assert unread.errors == ("record 10 of route a was deleted before it was read by archive at 4",)
    without = audit_deletion(line(HELD | {"cursors": {}}), None)
    assert without.errors == ("record 10 of route a was deleted, but no cursor of the route is recorded",)
    bare = {"event": "reclaimed", "base": 1, "last": 20, "at": 1, "rule": "found released, reason unknown"}
    assert audit_deletion(bare, sealed()).errors == (
        "no cursors are recorded (found released, reason unknown), so nothing proves that the deletion was allowed",
    )
    assert audit_deletion(line(), sealed()).errors == ()  # a segment without records
    ruling = audit_deletion(line(HELD | {"cursors": {"processed": 10}}), None)
    assert (ruling.errors, ruling.notes) == ((), ("no ledger line lists its contents when it was sealed",))
    # A crash between the line and the deletion leaves the segment.
    ruling = audit_deletion(line(HELD | {"retired": True}), sealed(("a", 10, 1, 10)), exists=True)
    assert (ruling.errors, any("still exists" in note for note in ruling.notes)) == ((), True)


def test_what_was_sealed_has_to_be_what_was_deleted() -> None:
    for was, words in [
        (sealed(("a", 10, 1, 10)), []),
        (
            sealed(("a", 10, 1, 10), ("b", 1, 11, 11)),
            ["the line omits route b, of which the segment held record 11 (1 in total)"],
        ),
        (sealed(), ["the line names route a, of which the segment held nothing"]),
        (sealed(("a", 9, 1, 10)), [f"{LISTS_ALL}, but the segment held records 1 to 10 (9 in total)"]),
        (sealed(("a", 10, 2, 10)), [f"{LISTS_ALL}, but the segment held records 2 to 10 (10 in total)"]),
        (sealed(("a", 10, 1, 11)), [f"{LISTS_ALL}, but the segment held records 1 to 11 (10 in total)"]),
        (sealed(("a", 10, 1, 10), last=21), ["its last is 20, but was 21 when it was sealed"]),
        (sealed(("a", 10, 1, 10), base=2), ["its base is 1, but was 2 when it was sealed"]),
        (sealed(("a", 10, 1, 10), sha256="cd"), [f"its sha256 is {SHA256}, but was cd when it was sealed"]),
        (
            {"event": "sealed", "base": 1, "last": 20, "sha256": SHA256},
            ["the sealed line does not list the segment's contents"],
        ),
        (sealed() | {"routes": [["a"]]}, ["the sealed line does not list the segment's contents"]),
    ]:
        assert list(audit_deletion(line(HELD | {"cursors": {"processed": 10}}), was).errors) == words


def test_a_line_of_another_form_proves_nothing() -> None:
    cursors = (5, {"processed": "10"}, {"processed": True})
    lists: tuple[Any, ...] = ([5], [{}], [HELD], [HELD | {"retired": True}] * 2, 5, None)
    held: list[Line] = [*({"cursors": each} for each in cursors), {"retired": False}, {"last": None, "retired": True}]
    others: list[Line] = [
        *({"routes": routes} for routes in lists),
        *({"routes": [HELD | each]} for each in held),
        *({"lost": lost} for lost in (5, {"a": "many"}, {"b": 1})),
    ]
    for wrong in others:
        assert audit_deletion(line(HELD | {"cursors": {"processed": 10}}) | wrong, None).errors


def test_deletions_that_overlap_are_found() -> None:
    def deletion(base: int, last: int) -> Line:
        return line() | {"base": base, "last": last}

    def overlapping(*spans: tuple[int, int]) -> list[int]:
        deleted = Spans()
        rulings = [audit_deletion(deletion(*span), None, deleted=deleted) for span in spans]
        return [ruling.base for ruling in rulings if REPEATED in ruling.errors]

    assert overlapping((1, 20), (21, 30), (40, 50)) == []
    assert overlapping((1, 20), (20, 22), (22, 30)) == [20, 22]
    assert overlapping((20, 22), (30, 40), (1, 90)) == [1]


@pytest.mark.parametrize(
    ("claim", "errors"),
    [
        ({"cursors": {"processed": 10}}, ()),
        ({"retired": True}, ()),
        (
            {"cursors": {"processed": 9}},
            ("the segment was damaged, and nothing proves that record 10 of route a was read",),
        ),
    ],
)
def test_of_a_segment_without_index_the_line_says_what_was_left_and_its_cursors_have_to_be_past_the_rest(
    claim: Line, errors: tuple[str, ...]
) -> None:
    left = {"route": "a", "count": 8, "first": 1, "last": 8}
    content = line(left | claim, damaged=True, damaged_bytes=99)
    del content["sha256"]

    assert audit_deletion(content, sealed(("a", 10, 1, 10))).errors == errors
    lost = "the segment was damaged, and nothing proves that record 20 of route b was read"
    assert audit_deletion(content, sealed(("a", 8, 1, 8), ("b", 2, 11, 20))).errors == (lost,)
