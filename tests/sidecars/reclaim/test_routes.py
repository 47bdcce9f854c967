"""Limits of routes, and verdicts for every combination of facts, compared with another formulation of the rule."""

import json
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import pytest
from contents import errors
from faults import Died, DyingDisk
from hypothesis import given
from hypothesis import strategies as st
from logs import SECOND_NS, Built
from reclaiming import EXPIRE, Reclaimer, bases, ledger, reclaim

from wald.errors import InvalidInput
from wald.files.listing import Segment
from wald.files.uptime import Moment
from wald.format.names import Kind
from wald.format.sealed_index import RouteEntry, RouteTable
from wald.retention.blockers import CursorSnapshot
from wald.retention.cursors import Cursor, CursorState
from wald_reclaim.apply import ShrunkSegment
from wald_reclaim.evidence import RecordedDeletion, merge_tables, route_fields, routes_json
from wald_reclaim.passes import Report, load_settings, reclaim_metrics
from wald_reclaim.policy import (
    Facts,
    Limits,
    RouteAmounts,
    RouteFacts,
    RouteLimits,
    Verdict,
    exceeded_limit,
    is_grace_over,
    judge,
    judge_route,
)
from wald_reclaim.survey import Decision

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


AGE_NS, BYTES, RECORDS = 1000, 100, 10  # of the segment; 50 bytes and 5 records are newer


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
COMBINED = [
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
        for limits in COMBINED:
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
    """A segment without records goes by the limits of the log."""
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

    assert judge(facts(), Limits(min_age_ns=AGE_NS + 1), []) is Verdict.YOUNG
    assert judge(facts(), Limits(min_age_ns=AGE_NS + 1, max_age_ns=AGE_NS - 1), []) is Verdict.MAX_AGE
    assert judge(facts(), Limits(), []) is Verdict.READ


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


def test_a_segment_goes_when_every_route_in_it_agrees() -> None:
    """Those that have only read it agree once it is old enough; those that are beyond a limit, at once."""
    for young in [False, True]:
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


UPPER = {"max_age": "max_age_ns", "max_bytes": "max_bytes", "max_records": "max_records"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "wald.toml"


@pytest.mark.parametrize("limit", UPPER)
def test_0_lifts_a_limit_of_the_log_as_option_and_in_the_file(file: Path, limit: str) -> None:
    file.write_text(f'[retention]\nlog_{limit} = 0\nunread = "expire"\n')
    assert load_settings(None, {limit: 0}).limits == Limits()
    assert load_settings(file, {}).limits.max_bytes is None

    file.write_text("[retention]\nlog_max_age = 7\nlog_max_bytes = 7\nlog_max_records = 7\n")
    for options, lifted in (({}, []), ({limit: 0}, [limit])):
        limits = load_settings(file, options).limits
        assert [each for each, name in UPPER.items() if getattr(limits, name) is None] == lifted


def test_the_option_keep_spares_what_is_unread_whatever_the_file_says(file: Path) -> None:
    """``expire`` is only a default: a route with keep loses nothing; without a limit nothing can expire."""
    file.write_text(
        '[retention]\nlog_max_records = 5\nunread = "expire"\n'
        '[routes.a]\nunread = "expire"\nmax_records = 1\n'
        '[routes.b]\npinned_max_bytes = 9\non_pinned = "expire"\n'
        '[routes.c]\nunread = "keep"\n'
    )

    def losing(**options: str) -> list[str]:
        limits = load_settings(file, options).limits
        return [route for route in ("a", "b", "c", "other") if limits.may_lose(route)]

    assert losing() == losing(unread="expire") == ["a", "b", "other"]
    assert losing(unread="keep") == []
    assert load_settings(file, {"unread": "keep"}).limits.of("a").max_records == 1

    with pytest.raises(InvalidInput, match="needs a limit"):
        load_settings(None, {"max_bytes": 0, "unread": "expire"})


def claims(**at: int) -> CursorSnapshot:
    def cursor(route: str, group: str) -> Cursor:
        return Cursor(route, group, Path(group), CursorState.VALID, at[route])

    return CursorSnapshot(
        {route: (cursor(route, "processed"), cursor(route, "100%d")) for route in at}, frozenset({"c"})
    )


def segment(base: int, *routes: str) -> RouteTable:
    return RouteTable.from_entries(
        [RouteEntry(route, 2 + n, base + n, base + 9 + n, 1) for n, route in enumerate(routes)]
    )


def test_the_text_follows_the_routes_the_cursors_and_the_rules() -> None:
    early, late = claims(a=50, b=60, c=0), claims(a=51, b=60, c=0)
    by_a = {"a": Verdict.MAX_AGE, "b": Verdict.READ, "c": Verdict.READ}
    for held, under, rules in (
        (segment(1, "a", "b", "c"), early, {}),
        (segment(11, "a", "b", "c"), early, {}),
        (segment(15, "a", "b", "c"), late, {}),
        (segment(21, "b", "a", "gone"), early, {}),
        (segment(21, "b", "a"), late, {}),
        (segment(31, "a", "b"), late, by_a),
        (segment(41, "a", "b"), late, by_a | {"a": Verdict.MAX_BYTES}),
        (segment(51, "a", "b"), late, {}),
        (segment(51), late, {}),
    ):
        text = routes_json(held, under, rules)
        own = {route: {"rule": verdict.value} for route, verdict in rules.items()}
        expected = [route_fields(entry, under) | own.get(entry.route, {}) for entry in held]

        assert json.loads(text) == expected
        assert text == json.dumps(json.loads(text), separators=(",", ":"))


def test_segments_together_hold_of_each_route_what_each_of_them_holds_whatever_routes_are_in_which() -> None:
    segments = [segment(1, "a", "b"), segment(20, "b", "c"), segment(40, "a", "b"), segment(60, "d"), segment(80, "c")]
    together = merge_tables(segments)

    by_route = {name: [entry for each in segments for entry in each if entry.route == name] for name in "abcd"}
    assert sorted(together) == [
        (
            name,
            sum(entry.count for entry in entries),
            entries[0].first,
            entries[-1].last,
            sum(entry.payload_bytes for entry in entries),
        )
        for name, entries in by_route.items()
    ]


SEGMENT = Segment(1, Kind.SEALED, Path("1.wal.zst"))
DELETED = Decision(SEGMENT, Verdict.MAX_AGE, 10, entry={"base": 1, "lost": {"a": 3, "b": 4}})
KEPT = Decision(SEGMENT, Verdict.UNREAD, 10)


def report_of(printed: list[str], *, watching: bool = True) -> Report:
    return Report(as_json=False, is_dry_run=False, watching=watching, write=printed.append, warn=printed.append)


def test_an_outage_is_reported_once() -> None:
    cases: list[tuple[list[str], list[str]]] = [
        (["disk", "disk", "disk"], ["disk"]),
        (["disk", "", "disk"], ["disk", "disk"]),
        (["disk", "cursor", "disk"], ["disk", "cursor", "disk"]),
    ]
    for passes, warned in cases:
        printed: list[str] = []
        report = report_of(printed)
        for problem in passes:
            report.begin()
            for _ in range(2 if problem else 0):
                report.problem(problem)
        assert printed == warned


def test_kept_segments_are_those_of_the_last_successful_pass() -> None:
    report = report_of([])
    counts = report.counts
    times = next(each for each in reclaim_metrics(counts) if each.name.endswith("last_pass_timestamp_seconds"))
    assert (times.samples, counts.ended_ns) == ({}, 0)
    for _ in range(2):
        report.begin()
        report.decision(KEPT)
        report.decision(DELETED)
        report.end([])
    report.begin()
    report.decision(KEPT)
    report.decision(KEPT)
    report.failed("disk")

    assert counts.kept == {Verdict.UNREAD: 1}
    assert (counts.released, counts.released_bytes) == ({Verdict.MAX_AGE: 2}, {Verdict.MAX_AGE: 20})
    assert (counts.lost_records, counts.failed) == (14, 1)
    assert counts.ended_ns > 0


def test_the_summary_of_a_pass_leaves_out_the_failed_pass_before_it() -> None:
    printed: list[str] = []
    report = report_of(printed)
    for is_last in (False, True):
        report.begin()
        report.decision(KEPT)
        report.decision(DELETED)
        if is_last:
            report.end([])
        else:
            report.failed("disk")
    assert "now marked for deletion: 1 (10 B)" in printed[-1]
    assert "kept: 1 (10 B; 1: a group has not read it)" in printed[-1]


def test_a_released_segment_is_deleted_when_it_is_due_and_a_restored_shrink_has_freed_nothing() -> None:
    report = report_of([])
    counts = report.counts
    report.released(DELETED, is_due=False)
    assert (counts.deleted, counts.deleted_bytes, counts.taken_back) == (0, 0, 0)
    report.released(DELETED, is_due=True)
    report.released(KEPT, is_due=True)
    report.released(replace(KEPT, keeps_name=True), is_due=True)
    assert (counts.deleted, counts.deleted_bytes, counts.taken_back) == (1, 10, 1)

    shrunk = ShrunkSegment(SEGMENT, 30, 100)
    report.shrunk(shrunk)
    report.shrunk(replace(shrunk, bytes=100, is_restored=True))
    assert (counts.shrunk, counts.shrunk_bytes) == (1, 70)


def test_the_grace_period_counts_from_the_line_and_ends_with_the_boot() -> None:
    since = Moment("b", 100)
    assert [is_grace_over(since, Moment("b", at), 50) for at in (149, 150)] == [False, True]
    assert is_grace_over(since, Moment("c", 0), 50)
    assert is_grace_over(None, since, 0)
    assert not is_grace_over(None, since, 50)
