"""Facts that a survey caches between passes; if limits or files change, it decides again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path

import pytest
from damage import flipped
from faults import FailingDisk, TracingDisk
from logs import SECOND_NS, Built, Unsynced
from reclaiming import EXPIRE, Reclaimer, bases, ledger, reclaim

from wald.files.ledger_read import parts_of
from wald.files.ledger_write import Ledger
from wald.format.names import WHOLE_SUFFIX, Kind
from wald_reclaim.apply import Deleter
from wald_reclaim.policy import Limits, Verdict
from wald_reclaim.survey import Decision, Survey

BYTES = random.Random(0).randbytes(1 << 20).replace(b"\n", b"-")
LONG_NS = 3600 * SECOND_NS
ARCHIVED = Limits(require_archived=True)
EXPIRED = Limits(max_records=1, others=EXPIRE)


@pytest.fixture
def built(tmp_path: Path) -> Iterator[Built]:
    """Sealed segments 1, 11 and 21 of ten records, of which the second is of the route stuck; then an active one."""
    made = Built(tmp_path / "root")
    for number in range(3):
        for i in range(10):
            begin = 6000 * (10 * number + i)
            made.lines("stuck" if i == 1 else "web", [BYTES[begin : begin + 6000]])
        made.cut()
    made.lines("web", [b"newest"])
    made.seal()
    made.log.set_cursor("web", made.last)
    yield made
    made.crash()


@pytest.fixture
def reclaimer(built: Built) -> Iterator[Reclaimer]:
    made = Reclaimer(built.root, Unsynced())
    yield made
    made.ledger.close()


def decide(built: Built, limits: Limits) -> dict[int, Decision]:
    decisions = Survey(built.root, limits, log_id=built.log_id).decisions(now_ns=built.now_ns)
    return {decision.segment.base_sequence: decision for decision in decisions}


def stored_bytes(built: Built, reclaimer: Reclaimer) -> list[int]:
    """Return the size of each segment according to the survey of a running process."""
    return [decision.stored_bytes for decision in reclaimer.survey.decisions(now_ns=built.now_ns)]


def sizes(built: Built) -> list[int]:
    return [built.path(base, Kind.SEALED).stat().st_size for base in bases(built.root)]


def test_the_bytes_of_the_segments_behind_one_are_those_of_their_files(built: Built) -> None:
    built.log.set_cursor("stuck", built.last)
    _, second, third = sizes(built)
    exact, one_more = (decide(built, Limits(keep_bytes=second + third + more)) for more in (0, 1))

    assert [decision.verdict for decision in exact.values()] == [Verdict.READ, Verdict.KEPT_BYTES, Verdict.KEPT_BYTES]
    assert one_more[1].verdict is Verdict.KEPT_BYTES


def test_only_a_segment_that_would_go_without_its_unread_records_is_shrunk(built: Built) -> None:
    _, second, third = sizes(built)
    assert [decision.is_shrinkable for decision in decide(built, Limits()).values()] == [True] * 3
    kept = decide(built, Limits(keep_bytes=second + third))
    assert [decision.is_shrinkable for decision in kept.values()] == [True, False, False]


@pytest.mark.parametrize(("seconds", "second"), [(9.9, Verdict.READ), (10.0, Verdict.UNREAD)])
def test_cursors_whose_reading_takes_a_second_are_read_again_after_ten(
    built: Built, seconds: float, second: Verdict
) -> None:
    built.log.set_cursor("stuck", built.last)
    reading = [0.0, 0.0, 1.0, 1.0]  # the pass begins, the reading begins and ends, and the first decision is made
    clock = chain(reading, repeat(seconds))
    survey = Survey(built.root, Limits(), log_id=built.log_id, clock=clock.__next__)
    decisions = survey.decisions(now_ns=built.now_ns)
    first = next(decisions)
    built.log.set_cursor("stuck", 0, rewind=True)

    assert [first.verdict, next(decisions).verdict] == [Verdict.READ, second]


def test_a_segment_whose_index_is_damaged_is_not_shrunk(built: Built) -> None:
    path = built.path(11, Kind.SEALED)
    path.write_bytes(flipped(path.read_bytes(), 8 * (path.stat().st_size - 60)))
    found = decide(built, Limits())

    assert found[11].message
    assert found[11].verdict is Verdict.UNREAD
    assert [decision.is_shrinkable for decision in found.values()] == [True, False, True]


def test_a_segment_that_the_sealer_has_left_is_not_shrunk(tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    for route in ("stuck", "web"):
        built.lines(route, [b"x"])
        built.cut()
    found = decide(built, Limits())

    assert found[1].segment.kind is Kind.RAW
    assert (found[1].verdict, found[1].is_shrinkable) == (Verdict.UNREAD, False)
    built.crash()


@pytest.mark.parametrize("again", [False, True])
def test_a_released_segment_is_taken_back_if_it_has_to_be_archived_by_then(
    built: Built, reclaimer: Reclaimer, *, again: bool
) -> None:
    """By the process that has released it, and by another one."""
    built.log.set_cursor("stuck", 2)
    reclaimer.grace_ns = LONG_NS
    reclaimer.look(now_ns=built.now_ns)
    assert bases(built.root, Kind.RELEASED) == [1]
    archive(built, web=10)
    if again:
        reclaimer.ledger.close()
        reclaim(built, ARCHIVED, grace_ns=LONG_NS)
    else:
        reclaimer.survey.set_limits(ARCHIVED, verify=False)
        reclaimer.look(now_ns=built.now_ns)
    assert bases(built.root) == [1, 11, 21]
    assert ledger(built.root.path)[-1]["why"] == Verdict.NOT_ARCHIVED.value


def test_a_released_segment_that_is_archived_stays_released(built: Built) -> None:
    built.log.set_cursor("stuck", 2)
    reclaim(built, grace_ns=LONG_NS)
    archive(built, web=10, stuck=2)
    reclaim(built, ARCHIVED, grace_ns=LONG_NS)
    assert bases(built.root, Kind.RELEASED) == [1]


def archive(built: Built, **lasts: int) -> None:
    """Write the ledger of an archive of these routes up to these records."""
    ledger = Ledger(built.root.ledger / "archive.jsonl", built.disk)
    for route, last in lasts.items():
        ledger.append({"event": "archived", "route": route, "first": 1, "last": last, "after": 0, "bundle": route})
    ledger.close()


def test_only_what_its_line_gives_up_is_lost_with_a_released_segment(built: Built) -> None:
    """A group that is moved back to it did not lose it by the line, so the decision is made and recorded again."""
    built.log.set_cursor("stuck", 2)
    reclaim(built, EXPIRED, grace_ns=LONG_NS)
    assert bases(built.root, Kind.RELEASED) == [1, 11, 21]
    lost = {line["base"]: line.get("lost", {}) for line in ledger(built.root.path)}
    assert lost == {1: {}, 11: {"stuck": 1}, 21: {"stuck": 1}}

    built.log.set_cursor("stuck", 0, rewind=True)
    reclaim(built, EXPIRED, grace_ns=LONG_NS)
    assert bases(built.root, Kind.RELEASED) == [11, 21]
    assert bases(built.root) == [1]
    reclaim(built, EXPIRED)
    assert ledger(built.root.path)[-1]["lost"] == {"stuck": 1}


@pytest.mark.parametrize("rewound", [False, True])
def test_after_a_shrink_that_has_failed_the_file_is_looked_at_again(
    built: Built, reclaimer: Reclaimer, *, rewound: bool
) -> None:
    """At whichever step; the next pass of the same process settles which of the two forms stays."""
    before, settled = sizes(built), 0
    for step in range(30):
        reclaimer.disk, reclaimer.shrink_pinned = FailingDisk(step), True
        with suppress(OSError):
            reclaimer.look(now_ns=built.now_ns)
        settled += any(path.name.endswith(WHOLE_SUFFIX) for path in built.root.segments.iterdir())
        assert stored_bytes(built, reclaimer) == sizes(built), step
        if rewound:
            built.log.set_cursor("web", 0, rewind=True)
        reclaimer.disk, reclaimer.shrink_pinned = Unsynced(), False
        reclaimer.look(now_ns=built.now_ns)
        assert stored_bytes(built, reclaimer) == sizes(built), step
        built.log.set_cursor("web", built.last)
    assert settled
    assert sizes(built) < before


def test_a_sealed_segment_that_somebody_else_has_deleted_is_an_error(built: Built, reclaimer: Reclaimer) -> None:
    """Only a raw one may go between a decision and its release: the sealer has finished with it."""
    doing = reclaimer.deleter()
    built.log.set_cursor("stuck", built.last)
    decisions = list(reclaimer.survey.decisions(now_ns=built.now_ns))
    built.path(11, Kind.SEALED).unlink()
    with pytest.raises(FileNotFoundError, match=built.path(11, Kind.SEALED).name):
        list(doing.release(decisions, now_ns=built.now_ns))


def test_a_ledger_that_is_long_is_cut_behind_its_lines(built: Built, reclaimer: Reclaimer) -> None:
    path = built.root.ledger / "reclaim.jsonl"
    cutting = Ledger(path, reclaimer.disk, part_bytes=1)
    built.log.set_cursor("stuck", built.last)
    doing = Deleter(built.root, reclaimer.disk, cutting, reclaimer.survey)
    list(doing.release(reclaimer.survey.decisions(now_ns=built.now_ns), now_ns=built.now_ns))
    cutting.close()
    assert parts_of(path)
    assert [line["event"] for line in ledger(built.root.path)] == ["continues"]


def test_a_segment_of_which_only_the_end_is_archived_stays(built: Built) -> None:
    built.log.set_cursor("stuck", built.last)
    packed = Ledger(built.root.ledger / "archive.jsonl", built.disk)
    for route, first in (("web", 5), ("stuck", 1)):
        packed.append(
            {"event": "archived", "route": route, "first": first, "last": 31, "after": first - 1, "bundle": "b"}
        )
    packed.close()
    verdicts = {base: decision.verdict for base, decision in decide(built, ARCHIVED).items()}
    assert verdicts == {1: Verdict.NOT_ARCHIVED, 11: Verdict.READ, 21: Verdict.READ}


def test_a_line_that_is_counted_again_is_taken_back_first(built: Built) -> None:
    """So that only one of two lines about a deletion is effective."""
    reclaim(built, EXPIRED, grace_ns=LONG_NS)
    built.log.set_cursor("stuck", 12)
    reclaim(built, EXPIRED)
    lines = [line for line in ledger(built.root.path) if line.get("base") == 11]
    assert [line["event"] for line in lines] == ["reclaimed", "kept", "reclaimed"]
    assert [line.get("lost") for line in lines] == [{"stuck": 1}, None, None]


def test_a_segment_has_its_old_name_durably_before_the_ledger_says_so(built: Built) -> None:
    built.log.set_cursor("stuck", 2)
    reclaim(built, grace_ns=LONG_NS)
    built.log.set_cursor("stuck", 0, rewind=True)
    disk = TracingDisk()
    reclaim(built, disk=disk, grace_ns=LONG_NS)
    at = disk.steps.index(("rename", built.path(1, Kind.SEALED).name))
    assert disk.steps[at + 1 : at + 3] == [("sync_directory", "segments"), ("write", "reclaim.jsonl")]


def test_a_segment_that_can_be_read_again_is_decided_by_what_it_holds(built: Built, reclaimer: Reclaimer) -> None:
    path = built.path(1, Kind.SEALED)
    whole = path.read_bytes()
    path.write_bytes(bytes(len(whole)))
    for verdict in (Verdict.UNREADABLE, Verdict.UNREAD):
        assert next(reclaimer.survey.decisions(now_ns=built.now_ns)).verdict is verdict
        path.write_bytes(whole)


def test_a_segment_that_is_sealed_meanwhile_has_the_bytes_of_its_new_file(tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    built.lines("web", [b"x" * 100_000])
    built.cut()
    survey = Survey(built.root, Limits(), log_id=built.log_id)
    for seal in (False, True):
        if seal:
            built.seal()
        (decision,) = survey.decisions(now_ns=built.now_ns)
        assert decision.stored_bytes == decision.segment.path.stat().st_size
    built.crash()
