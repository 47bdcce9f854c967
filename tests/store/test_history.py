"""History of deleted and archived records, the audit of deletions, and excerpts, newest first."""

import itertools
import json
import os
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from damage import flip_bit
from effort import steps
from golden.samples import FOLDER, SEALED_LINES, ledger_of
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import Unsynced, write_entries

from wald.checking.audit_report import DeletionAudit, Event
from wald.errors import Damaged
from wald.files.layout import Root
from wald.files.ledger_read import parts_of
from wald.files.ledger_write import Ledger
from wald.files.uptime import ClockStep, add_step
from wald.format.spans import Spans
from wald.retention.audit import EXPIRING, REPEATED, audit_deletion
from wald.retention.history import History, bundle_member
from wald.status.history import CLOCK, LIVES, Excerpt, crash_events, excerpt, sentence


@pytest.fixture
def root(tmp_path: Path) -> Root:
    (tmp_path / "ledger").mkdir()
    return Root(tmp_path)


def tell(root: Root, name: str, *entries: dict[str, Any]) -> None:
    write_entries(root.ledger / name, *entries)


def reclaimed(base: int, last: int) -> dict[str, Any]:
    return {"event": "reclaimed", "base": base, "last": last}


def archived(route: str, first: int, last: int, **more: Any) -> dict[str, Any]:
    return {"event": "archived", "route": route, "first": first, "last": last} | more


def test_a_deletion_that_was_taken_back_is_none_and_the_others_are_known_without_the_sealers_ledger(root: Root) -> None:
    tell(root, "reclaim.jsonl", reclaimed(1, 2), reclaimed(3, 4), {"event": "kept", "base": 3})
    assert list(History(root).unexplained_spans(1, 4)) == [(3, 4)]
    tell(root, "reclaim.jsonl", reclaimed(3, 4))
    assert list(History(root).unexplained_spans(1, 4)) == []
    (root.ledger / "segments.jsonl").write_bytes(b"damaged\n")
    assert list(History(root).unexplained_spans(1, 4)) == []
    with pytest.raises(Damaged):
        list(History(root).unexplained_spans(1, 5))  # a start may have passed over the last


def test_the_golden_deletions_are_legal_each_with_the_cursors_of_its_own_line_or_of_a_shared_one(root: Root) -> None:
    (root.ledger / "reclaim.jsonl").write_bytes((FOLDER / "reclaim.jsonl").read_bytes())
    (root.ledger / "segments.jsonl").write_bytes(ledger_of(SEALED_LINES))
    history = History(root)
    newer, older = history.deletions()

    for entry in (newer, older):
        assert audit_deletion(entry, history.line_for_digest(entry["base"], entry["sha256"])).errors == ()
        assert [each["route"] for each in entry["routes"]] == ["db", "web"]
    assert newer["routes"][0] == {
        "route": "db",
        "count": 2,
        "first": 256,
        "last": 257,
        "cursors": {"audit": 300, "processed": 280},
    }


def test_a_shared_line_that_makes_no_sense_gives_a_deletion_no_routes(root: Root) -> None:
    bare = reclaimed(1, 2) | {"evidence": 1}
    wrong: tuple[Any, ...] = (5, [5], [{}], [{"route": "a", "first": "1", "last": 2}])
    for routes in wrong:
        tell(root, "reclaim.jsonl", {"event": "evidence", "base": 1, "last": 2, "routes": routes}, bare)

        assert next(History(root).deletions()) == bare
        assert next(History(root).reclaimed_segments(1, 2)).routes is None


def test_a_shrink_without_valid_run_lengths_does_not_say_what_it_dropped(root: Root) -> None:
    line = {
        "event": "shrunk",
        "base": 1,
        "last": 9,
        "routes": [["b", 7, 2, 8, 1]],
        "dropped": [{"route": "a", "count": 2, "first": 1, "last": 9, "cursors": {"processed": 9}}],
    }
    for runs, dropped in [({"a": [0, 1, 7, 1]}, False), ({}, None), ({"a": "x"}, None), ({"a": [0]}, None)]:
        (root.ledger / "reclaim.jsonl").unlink(missing_ok=True)
        tell(root, "reclaim.jsonl", line | {"runs": runs})
        found = [History(root).shrunk_record(sequence) for sequence in (1, 3)]

        assert [each and each.is_dropped for each in found] == [True if dropped is False else None, dropped]


def test_a_ledger_that_has_grown_is_read_on_and_damage_noticed(root: Root) -> None:
    """In what is new, and in what was read before."""
    history, path = History(root), root.ledger / "reclaim.jsonl"
    assert history.deletion_of(1) is None
    tell(root, "reclaim.jsonl", reclaimed(1, 2))
    assert history.deletion_of(1) is not None
    tell(root, "reclaim.jsonl", reclaimed(3, 4))
    assert history.deletion_of(4) is not None
    tell(root, "reclaim.jsonl", {"event": "kept", "base": 1})
    assert history.deletion_of(1) is None
    whole = path.read_bytes()
    path.write_bytes(whole + b"damaged\n")
    for _ in range(2):
        with pytest.raises(Damaged, match="line 4"):
            history.deletion_of(4)
    path.write_bytes(whole)
    assert history.deletion_of(4) is not None
    flip_bit(path, 20)
    tell(root, "reclaim.jsonl", reclaimed(5, 6))
    for _ in range(2):
        with pytest.raises(Damaged, match="line 1"):
            history.deletion_of(4)


def test_lines_that_were_taken_back_are_forgotten(root: Root) -> None:
    """An append whose sync failed could be read until its owner cut it away, and wrote other lines."""
    history, path = History(root), root.ledger / "reclaim.jsonl"
    tell(root, "reclaim.jsonl", reclaimed(1, 2))
    durable = path.stat().st_size
    tell(root, "reclaim.jsonl", reclaimed(3, 4))
    assert history.deletion_of(4) is not None
    os.truncate(path, durable)
    tell(root, "reclaim.jsonl", reclaimed(5, 6), reclaimed(7, 8))

    assert [entry["base"] for entry in history.deletions()] == [7, 5, 1]


def test_a_ledger_in_place_of_another_is_read_from_its_beginning(root: Root) -> None:
    path = root.ledger / "reclaim.jsonl"
    tell(root, "reclaim.jsonl", reclaimed(1, 2), reclaimed(3, 4))
    history = History(root)
    assert history.deletion_of(4) is not None
    for lines in (1, 2, 3):
        path.rename(f"{path}.damaged")
        tell(root, "reclaim.jsonl", *(reclaimed(10 * number, 10 * number + 1) for number in range(1, lines + 1)))

        assert [entry["base"] for entry in history.deletions()] == [10, 20, 30][:lines][::-1]


def test_the_bundle_of_a_record_is_the_one_whose_runs_hold_it(root: Root) -> None:
    """Ranges of routes overlap: only the runs say which record is whose."""
    tell(
        root,
        "archive.jsonl",
        archived("a", 1, 9, after=0, runs=[0, 2, 3, 1, 2, 1], bundle="a"),
        archived("b", 3, 8, after=0, runs=[2, 3, 1, 2], bundle="b"),
    )
    history = History(root)

    found = [entry and entry["bundle"] for entry in map(history.newest_bundle, range(1, 11))]
    assert found == ["a", "a", "b", "b", "b", "a", "b", "b", "a", None]


def test_bundles_that_follow_one_another_leave_no_gap(root: Root) -> None:
    """The second bundle begins at 7, after 4; the sequences in between are other routes'. None has 10 to 17."""
    bundles = [archived("a", 1, 4, after=0), archived("a", 7, 9, after=4), archived("a", 20, 25, after=17)]
    tell(root, "archive.jsonl", *bundles)
    wholly = [History(root).all_archived("a", *span) for span in ((1, 4), (3, 9), (20, 25), (18, 25))]
    partly = [History(root).all_archived("a", *span) for span in ((3, 10), (10, 10), (15, 25))]
    assert (wholly, partly, History(root).all_archived("b", 1, 1)) == ([True] * 4, [False] * 3, False)


def test_the_part_of_a_record_is_the_last_that_begins_before_it_and_what_is_none_is_not_believed(root: Root) -> None:
    parts = [[1, "a-1/records/1.txt"], [6, "a-1/records/6.jsonl"]]
    bundle = {"path": "a/1-9/data/a-1.tar.gz", "parts": parts}
    found = [bundle_member(bundle, sequence) for sequence in (0, 1, 5, 6, 99)]
    assert found == [None, *[parts[0][1]] * 2, *[parts[1][1]] * 2]
    for wrong in [None, 7, [], [1], ["x"], [None], [[1]], [["1", "x"]], [[1, 2]]]:
        assert bundle_member({"path": "a-1.tar.gz", "parts": wrong}, 6) is None
    for runs in ([0, "x"], "much", [None], [0]):  # the range is all there is then
        (root.ledger / "archive.jsonl").unlink(missing_ok=True)
        tell(root, "archive.jsonl", archived("a", 1, 5, after=0, runs=runs))
        assert History(root).newest_bundle(3) is not None


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


SEGMENTS = (1, 11, 21)


def sealing(base: int) -> dict[str, Any]:
    return {"event": "sealed", "base": base, "last": base + 9, "sha256": "x", "routes": [["a", 10, base, base + 9, 1]]}


def deletion(base: int, at: int, wide: int = 9) -> dict[str, Any]:
    held = {"route": "a", "count": wide + 1, "first": base, "last": base + wide, "cursors": {"processed": at}}
    return {"event": "reclaimed", "base": base, "last": base + wide, "rule": "read", "sha256": "x", "routes": [held]}


def write(root: Root, name: str, entries: list[dict[str, Any]], part_bytes: int = 1 << 20) -> None:
    """Append, and cut the ledger whenever it is longer than a part."""
    ledger = Ledger(root.ledger / name, Unsynced(), part_bytes=part_bytes)
    for entry in entries:
        ledger.append(entry)
        ledger.cut()
    ledger.close()


def live(root: Root, epoch: int, **more: object) -> None:
    report = {"epoch": epoch, "at_ns": 10 * epoch, "before": "", "trimmed_bytes": 0, "errors": [], "warnings": []}
    root.recovery.mkdir(exist_ok=True)
    (root.recovery / f"{epoch:010d}.json").write_text(json.dumps(report | more))


def pages(root: Root, count: int, at_most: int = 1000, wanted: str = "") -> list[Excerpt]:
    """All excerpts, each from where the one before ended."""
    before: dict[str, int] = {}
    found, story = [], DeletionAudit(root)
    while True:
        found.append(
            excerpt(story, before, wanted=lambda event: wanted in event.entry["event"], count=count, at_most=at_most)
        )
        following = found[-1].before
        if following is None:
            return found
        before = dict(following)


def key(event: Event) -> tuple[object, ...]:
    ruling = event.ruling
    return event.at_ns, event.ledger, event.number, event.entry, ruling


LINES = st.one_of(
    st.builds(deletion, st.sampled_from(SEGMENTS), st.sampled_from([0, 10, 30]), st.sampled_from([9, 9, 9, 19])),
    st.builds(lambda base: {"event": "kept", "base": base, "why": "withdrawn"}, st.sampled_from(SEGMENTS)),
    st.just({"event": "seen", "through": 1}),
)


@settings(max_examples=40)
@given(lines=st.lists(LINES, max_size=12), known=st.sets(st.sampled_from(SEGMENTS)), data=st.data())
def test_pages_of_excerpts_are_the_whole_story_backwards(
    lines: list[dict[str, Any]], known: set[int], data: st.DataObject
) -> None:
    with TemporaryDirectory() as directory:
        root = Root(Path(directory))
        root.ledger.mkdir()
        write(root, "segments.jsonl", [sealing(base) | {"at": base} for base in sorted(known)])
        times = data.draw(st.sampled_from([lambda place: place, lambda place: place // 3]))  # a pass has one time
        part_bytes = data.draw(st.sampled_from([300, 1 << 20]))
        write(root, "reclaim.jsonl", [line | {"at": times(i)} for i, line in enumerate(lines)], part_bytes)

        found = pages(root, data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5)))

        story = DeletionAudit(root)
        whole = list(story.events())
        told = [event for page in found for event in page.events]
        assert sorted(map(repr, map(key, told))) == sorted(map(repr, map(key, whole)))
        assert all(one.at_ns >= other.at_ns for one, other in itertools.pairwise(told))
        of_deletions = [event.number for event in told if event.ledger == "reclaim.jsonl"]
        assert of_deletions == sorted(of_deletions, reverse=True)


def test_an_excerpt_looks_at_no_more_events_than_it_may(root: Root) -> None:
    write(root, "segments.jsonl", [{"event": "cut", "base": 1, "next": 2, "at": at} for at in range(100)])
    write(root, "reclaim.jsonl", [deletion(1, 10) | {"at": 1}])
    (first, *more) = pages(root, 10, at_most=20, wanted="reclaimed")
    assert (first.looked_at, first.events) == (20, [])
    (found,) = (event for page in more for event in page.events)
    assert found.ruling is not None


def test_the_newest_events_of_a_long_history_take_as_long_as_those_of_a_short_one(root: Root) -> None:
    def newest() -> None:
        assert len(excerpt(DeletionAudit(root), {}, wanted=lambda _: True, count=10, at_most=100).events) == 10

    def grow(count: int, base: int) -> None:
        ledger = Ledger(root.ledger / "segments.jsonl", Unsynced(), part_bytes=20_000)
        for number in range(base, base + count):
            ledger.append(sealing(10 * number + 1) | {"at": number})
            ledger.cut()
        ledger.close()

    grow(300, 0)
    short = steps(newest)
    grow(2000, 300)
    assert len(parts_of(root.ledger / "segments.jsonl")) > 15
    assert steps(newest) < 4 * short


def test_clock_steps_are_events_once_each(root: Root) -> None:
    write(root, "segments.jsonl", [{"event": "cut", "base": at, "next": at + 1, "at": at} for at in (10, 20, 30)])
    for base, at in ((12, 25), (24, 15)):  # the clock was wrong at the first one, too
        add_step(root, Unsynced(), ClockStep(base, 99, at))
    for count in (1, 2, 10):
        events = [event for page in pages(root, count) for event in page.events]
        assert [event.entry["sequence"] for event in events if event.ledger == CLOCK] == [24, 12]
        assert len(events) == 5


def test_starts_and_ends_of_the_daemon_are_told_with_what_was_found(root: Root) -> None:
    live(root, 1, ended="stopped", ended_at_ns=15)
    live(root, 2)
    live(root, 3, before="the last one (epoch 2) was not stopped", trimmed_bytes=7, errors=["records 4 to 5"])
    write(root, "segments.jsonl", [{"event": "cut", "base": 1, "next": 2, "at": 17}])

    told = [event for page in pages(root, 2) for event in page.events]

    assert [(event.entry["event"], event.at_ns) for event in told] == [
        ("started", 30),
        ("started", 20),
        ("cut", 17),
        ("ended", 15),
        ("started", 10),
    ]
    assert {event.ledger for event in told} == {LIVES, "segments.jsonl"}
    assert sentence(told[0]) == (
        "epoch 3: wald started; the last one (epoch 2) was not stopped; "
        "7 bytes of an unfinished write were cut off; records 4 to 5"
    )
    assert sentence(told[3]) == "epoch 1 was stopped"
    assert [event.at_ns for event in crash_events(root)] == [30]


def test_a_damaged_ledger_is_reported_and_the_others_are_told(root: Root) -> None:
    write(root, "segments.jsonl", [sealing(1) | {"at": 1}])
    write(root, "reclaim.jsonl", [deletion(1, 10) | {"at": 2}])
    path = root.ledger / "reclaim.jsonl"
    path.write_bytes(path.read_bytes().replace(b"read", b"dear"))
    (page,) = pages(root, 10)
    assert [event.entry["event"] for event in page.events] == ["sealed"]
    assert len(page.broken) == 1
