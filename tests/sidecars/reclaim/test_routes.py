"""Limits of routes: a segment is deleted when every route in it agrees, and losses are recorded."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from contents import errors
from faults import Died, DyingDisk
from hypothesis import given
from hypothesis import strategies as st
from logs import SECOND_NS, Built
from reclaiming import EXPIRE, Reclaimer, bases, ledger, reclaim

from wald.format.names import Kind
from wald.format.sealed_index import RouteEntry, RouteTable
from wald_reclaim.evidence import RecordedDeletion
from wald_reclaim.policy import Limits, RouteAmounts, RouteFacts, RouteLimits, Verdict, judge_route

SIX_RECORDS = Limits(of_routes={"a": RouteLimits(max_records=6, expire=True)})


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Sealed segments 1, 4, 7 and 10, each of two records of a and one of b, of ten bytes; then an active one."""
    built = Built(tmp_path / "root")
    for _ in range(4):
        built.lines("a", [b"x" * 9, b"x" * 9])
        built.lines("b", [b"y" * 9])
        built.cut()
        built.seal()
    built.log.set_cursor("a", 0, rewind=True)
    built.log.set_cursor("b", 12)
    return built


def losses(built: Built) -> list[tuple[int, str, object]]:
    return [(entry["base"], entry["rule"], entry.get("lost")) for entry in ledger(built.root.path)]


@pytest.mark.parametrize(
    ("own", "left"),
    [
        (RouteLimits(max_bytes=60, expire=True), [4, 7, 10]),
        (RouteLimits(max_bytes=59, expire=True), [7, 10]),
        (RouteLimits(max_records=4, expire=True), [7, 10]),
        (RouteLimits(max_records=3, expire=True), [10]),
        (RouteLimits(max_age_ns=6 * SECOND_NS, expire=True), [1, 4, 7, 10]),
        (RouteLimits(max_age_ns=6 * SECOND_NS - 1, expire=True), [4, 7, 10]),
        (RouteLimits(pinned_max_bytes=40), [7, 10]),
        (RouteLimits(pinned_max_bytes=39), [10]),
        (RouteLimits(max_bytes=10), [1, 4, 7, 10]),
    ],
)
def test_unread_records_beyond_the_limits_of_their_route_go(built: Built, own: RouteLimits, left: list[int]) -> None:
    reclaim(built, Limits(of_routes={"a": own}))
    lines = [line for line in ledger(built.root.path) if line["event"] == "reclaimed"]

    assert bases(built.root) == left
    assert [(line["lost"], line["lost_bytes"]) for line in lines] == [({"a": 2}, {"a": 20})] * (4 - len(left))
    assert errors(built.root.path) == []


def test_the_line_has_the_rule_of_each_route(built: Built) -> None:
    reclaim(built, SIX_RECORDS)
    (line,) = ledger(built.root.path)

    assert line["rule"] == "each_route"
    assert [(route["route"], route["rule"], route["cursors"]) for route in line["routes"]] == [
        ("a", "max_records", {"processed": 0}),
        ("b", "read", {"processed": 12}),
    ]


def test_a_route_that_says_keep_loses_nothing_to_the_limits_of_the_log(built: Built) -> None:
    limits = Limits(max_records=0, others=EXPIRE, of_routes={"a": RouteLimits()})
    reclaim(built, limits)
    assert bases(built.root) == [1, 4, 7, 10]

    built.log.set_cursor("a", 2)
    built.log.set_cursor("b", 0, rewind=True)
    reclaim(built, limits)
    assert bases(built.root) == [4, 7, 10]
    assert losses(built) == [(1, "max_records", {"b": 1})]


def test_what_is_read_and_beyond_the_limits_of_every_route_goes_however_young(built: Built) -> None:
    built.log.set_cursor("a", 12)
    young = Limits(min_age_ns=3600 * SECOND_NS)
    limits = RouteLimits(max_records=2)
    reclaim(built, replace(young, of_routes={"a": limits}))
    assert bases(built.root) == [1, 4, 7, 10]

    reclaim(built, replace(young, of_routes={"a": limits, "b": limits}))
    assert bases(built.root) == [7, 10]


def test_what_one_route_alone_holds_back_is_known_as_cursors_move(built: Built) -> None:
    reclaimer = Reclaimer(built.root, built.disk)

    def alone() -> list[tuple[int, str, bool]]:
        found = reclaimer.survey.decisions(now_ns=built.now_ns)
        return [
            (each.segment.base_sequence, each.pin.route, each.is_pinned_alone) for each in found if each.pin is not None
        ]

    assert alone() == [(base, "a", True) for base in (1, 4, 7, 10)]
    built.log.set_cursor("b", 6, "audit")
    reclaimer.ledger.close()

    reclaimer = Reclaimer(built.root, built.disk)  # a new group is met when a segment is opened again
    assert alone() == [(1, "a", True), (4, "a", True), (7, "a", False), (10, "a", False)]
    built.log.set_cursor("a", 8)
    assert alone() == [(7, "b", True), (10, "a", False)]
    built.log.set_cursor("b", 12, "audit")
    assert alone() == [(10, "a", True)]
    reclaimer.ledger.close()


def test_a_quota_counts_what_is_unread_only(built: Built) -> None:
    """A partly read segment counts by its share of unread records."""
    limits = Limits(of_routes={"a": RouteLimits(pinned_max_bytes=70)})
    built.log.set_cursor("a", 1)
    reclaim(built, limits)
    assert bases(built.root) == [1, 4, 7, 10]

    built.log.set_cursor("a", 0, rewind=True)
    reclaim(built, limits)
    assert losses(built) == [(1, "each_route", {"a": 2})]


@pytest.mark.parametrize(("cursor", "lost"), [(1, {"a": 1}), (2, {})])
def test_what_is_lost_is_counted_again_before_it_is_deleted(built: Built, cursor: int, lost: dict[str, int]) -> None:
    """One process; a cursor moves within the lost records, or behind them, while the segment is released."""
    reclaimer = Reclaimer(built.root, built.disk, SIX_RECORDS, 60 * SECOND_NS)
    reclaimer.look(now_ns=built.now_ns)
    built.log.set_cursor("a", cursor)
    reclaimer.look(now_ns=built.now_ns + SECOND_NS)
    assert losses(built) == [(1, "each_route", {"a": 2})]

    reclaimer.look(now_ns=built.now_ns + 61 * SECOND_NS)
    reclaimer.ledger.close()
    first, kept, again = ledger(built.root.path)
    assert (first["lost"], kept["event"], again.get("lost", {})) == ({"a": 2}, "kept", lost)
    assert bases(built.root, Kind.RELEASED) == []


def test_a_loss_is_counted_again_after_a_kill_between_its_line_and_the_release(built: Built) -> None:
    limits = SIX_RECORDS
    for last in range(20):  # until the line is durable; the rename is the next step
        disk = DyingDisk(last)
        with suppress(Died):
            reclaim(built, limits, disk=disk)
        disk.abandon()
        if losses(built):
            break
    assert (losses(built), bases(built.root)) == ([(1, "each_route", {"a": 2})], [1, 4, 7, 10])
    built.log.set_cursor("a", 2)
    reclaim(built, limits)
    assert ledger(built.root.path)[-1].get("lost", {}) == {}
    assert bases(built.root) == [4, 7, 10]


@pytest.mark.parametrize("limits_remain", [True, False])
def test_a_released_segment_comes_back_for_a_route_that_had_read_it_and_without_the_limits(
    built: Built, limits_remain: bool
) -> None:
    reclaim(built, SIX_RECORDS, grace_ns=60 * SECOND_NS)
    assert bases(built.root) == [4, 7, 10]
    if limits_remain:
        built.log.set_cursor("b", 0, rewind=True)
    reclaim(built, SIX_RECORDS if limits_remain else Limits(), grace_ns=60 * SECOND_NS)
    assert bases(built.root) == [1, 4, 7, 10]
    assert ledger(built.root.path)[-1]["event"] == "kept"


LIMITS = st.builds(
    RouteLimits,
    max_age_ns=st.none() | st.integers(1, 20),
    max_bytes=st.none() | st.integers(1, 60),
    max_records=st.none() | st.integers(1, 30),
    expire=st.booleans(),
    pinned_max_bytes=st.none() | st.integers(1, 60),
)
HELD = st.dictionaries(st.sampled_from("abc"), st.tuples(st.integers(1, 5), st.integers(0, 20)))


@given(
    st.lists(HELD, min_size=1, max_size=12),
    st.dictionaries(st.sampled_from("ab"), LIMITS),
    LIMITS,
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 5)),
    st.booleans(),
)
def test_marks_say_the_same_as_counting_everything_that_is_newer(
    segments: list[dict[str, tuple[int, int]]],
    of_routes: dict[str, RouteLimits],
    others: RouteLimits,
    unread: dict[str, int],
    forgetful: bool,
) -> None:
    """The counts of all newer segments would need memory for each segment; the marks do not."""
    limits = Limits(of_routes=of_routes, others=others)
    entries = {
        base: RouteTable.from_entries([RouteEntry(route, count, 1, 2, size) for route, (count, size) in held.items()])
        for base, held in enumerate(segments, start=1)
    }
    amounts = RouteAmounts(limits, remembered_max=0 if forgetful else 1000)
    bases = range(len(segments), 0, -1)
    amounts.count(dict.fromkeys(bases[:-1], 100), entries.__getitem__)  # without the first, as an earlier pass
    amounts.count(dict.fromkeys(bases, 100), entries.__getitem__)
    for base, held in entries.items():
        age_ns = 20 - base
        newer = [entry for other in entries if other > base for entry in entries[other]]
        expected = {}
        for entry in held:
            facts = RouteFacts(
                age_ns,
                entry.payload_bytes,
                entry.count,
                sum(each.payload_bytes for each in newer if each.route == entry.route),
                sum(each.count for each in newer if each.route == entry.route),
                is_read=entry.route not in unread,
                unread_bytes=entry.payload_bytes * min(entry.count, unread.get(entry.route, 0)) // entry.count,
            )
            expected[entry.route] = judge_route(facts, limits.of(entry.route), None)
        pinned = {each.route: min(each.count, unread[each.route]) for each in held if each.route in unread}
        found = amounts.verdicts(base, age_ns, None, held, pinned)

        # Beyond two limits, either may be named.
        assert {route: verdict in (READ_OR_UNREAD) and verdict for route, verdict in found.items()} == {
            route: verdict in READ_OR_UNREAD and verdict for route, verdict in expected.items()
        }
        if not amounts.may_exceed(base, age_ns, None):
            assert set(expected.values()) <= set(READ_OR_UNREAD)
        assert all(
            amounts.may_lose(route, base, age_ns, None) for route in pinned if expected[route] not in READ_OR_UNREAD
        )


@pytest.mark.parametrize(
    ("limits", "reads"),
    [
        (Limits(of_routes={"a": RouteLimits(max_records=1)}), [3, 2, 1]),
        (Limits(of_routes={"none": RouteLimits(max_records=1)}), [3, 2, 1]),
        (Limits(of_routes={"a": RouteLimits(max_age_ns=1)}), []),
        (Limits(), []),
    ],
)
def test_a_segment_is_read_once_and_only_if_something_is_counted(limits: Limits, reads: list[int]) -> None:
    amounts, read = RouteAmounts(limits), list[int]()

    def routes_of(base: int) -> RouteTable:
        read.append(base)
        return RouteTable.from_entries([RouteEntry("a", 1, 1, 1, 10)])

    amounts.count(dict.fromkeys((3, 2, 1), 100), routes_of)
    amounts.count(dict.fromkeys((3, 2), 100), routes_of)
    assert read == reads


READ_OR_UNREAD = (Verdict.READ, Verdict.UNREAD)


def test_a_rule_of_a_route_that_is_not_known_counts_as_read() -> None:
    """A newer version may have written the line."""
    routes = [{"route": "a", "rule": "of_tomorrow"}, {"route": "b", "rule": "max_bytes"}, {"route": "c"}]
    entry = {"event": "reclaimed", "base": 1, "rule": "each_route", "routes": routes, "lost": {"a": 1, "b": 1, "c": 1}}
    assert RecordedDeletion.parse(entry).rules == {"a": Verdict.READ, "b": Verdict.MAX_BYTES, "c": Verdict.READ}
