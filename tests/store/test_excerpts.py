"""Excerpts of the history, newest first, which together equal a full read of the ledgers."""

import itertools
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from effort import steps
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import Unsynced

from wald.checking.audit_report import DeletionAudit, Event
from wald.files.layout import Root
from wald.files.ledger_read import parts_of
from wald.files.ledger_write import Ledger
from wald.files.uptime import ClockStep, add_step
from wald.status.history import CLOCK, LIVES, Excerpt, crash_events, excerpt, sentence

SEGMENTS = (1, 11, 21)


def sealed(base: int) -> dict[str, Any]:
    return {"event": "sealed", "base": base, "last": base + 9, "sha256": "x", "routes": [["a", 10, base, base + 9, 1]]}


def reclaimed(base: int, at: int, wide: int = 9) -> dict[str, Any]:
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


@pytest.fixture
def root(tmp_path: Path) -> Root:
    (tmp_path / "ledger").mkdir()
    return Root(tmp_path)


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
    st.builds(reclaimed, st.sampled_from(SEGMENTS), st.sampled_from([0, 10, 30]), st.sampled_from([9, 9, 9, 19])),
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
        write(root, "segments.jsonl", [sealed(base) | {"at": base} for base in sorted(known)])
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
    write(root, "reclaim.jsonl", [reclaimed(1, 10) | {"at": 1}])
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
            ledger.append(sealed(10 * number + 1) | {"at": number})
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
    write(root, "segments.jsonl", [sealed(1) | {"at": 1}])
    write(root, "reclaim.jsonl", [reclaimed(1, 10) | {"at": 2}])
    path = root.ledger / "reclaim.jsonl"
    path.write_bytes(path.read_bytes().replace(b"read", b"dear"))
    (page,) = pages(root, 10)
    assert [event.entry["event"] for event in page.events] == ["sealed"]
    assert len(page.broken) == 1
