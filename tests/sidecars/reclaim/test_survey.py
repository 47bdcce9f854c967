"""Facts that a survey caches between passes, and ages, which are proven time."""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path

import pytest
from contents import errors
from damage import flip_bit, flipped
from effort import steps
from faults import Died, DyingDisk, FailingDisk, TracingDisk
from logs import SECOND_NS, Built, Unsynced
from reclaiming import EXPIRE, Reclaimer, archived, bases, ledger, reclaim, rulings

from wald.files.layout import TEMPORARY, Root
from wald.files.ledger_read import entries_of, parts_of, stored_index
from wald.files.ledger_write import Ledger
from wald.files.listing import list_segments
from wald.files.uptime import Moment
from wald.format.ledger_lines import Entry
from wald.format.names import WHOLE_SUFFIX, Kind
from wald.segments.view import State
from wald.writing.sealing import seal, segments_to_seal
from wald_reclaim.apply import Deleter
from wald_reclaim.evidence import Ages
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


def test_the_bytes_of_the_files_behind_a_segment_decide_what_goes_and_what_is_shrunk(built: Built) -> None:
    _, second, third = sizes(built)
    assert [decision.is_shrinkable for decision in decide(built, Limits()).values()] == [True] * 3
    kept = decide(built, Limits(keep_bytes=second + third))
    assert [decision.is_shrinkable for decision in kept.values()] == [True, False, False]

    built.log.set_cursor("stuck", built.last)
    exact, one_more = (decide(built, Limits(keep_bytes=second + third + more)) for more in (0, 1))

    assert [decision.verdict for decision in exact.values()] == [Verdict.READ, Verdict.KEPT_BYTES, Verdict.KEPT_BYTES]
    assert one_more[1].verdict is Verdict.KEPT_BYTES


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


def test_a_damaged_segment_and_one_that_the_sealer_has_left_are_not_shrunk(built: Built, tmp_path: Path) -> None:
    path = built.path(11, Kind.SEALED)
    path.write_bytes(flipped(path.read_bytes(), 8 * (path.stat().st_size - 60)))
    found = decide(built, Limits())

    assert found[11].message
    assert found[11].verdict is Verdict.UNREAD
    assert [decision.is_shrinkable for decision in found.values()] == [True, False, True]

    built = Built(tmp_path / "raw")
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
    archived(built, "web", 10)
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
    archived(built, "web", 10)
    archived(built, "stuck", 2)
    reclaim(built, ARCHIVED, grace_ns=LONG_NS)
    assert bases(built.root, Kind.RELEASED) == [1]


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
    archived(built, "web", 31, first=5)
    archived(built, "stuck", 31)
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
    for is_sealed in (False, True):
        if is_sealed:
            built.seal()
        (decision,) = survey.decisions(now_ns=built.now_ns)
        assert decision.stored_bytes == decision.segment.path.stat().st_size
    built.crash()


@pytest.fixture
def cut_log(tmp_path: Path) -> Built:
    """Cut 1 (a: 1–2, b: 3) and 4 (a: 4), active 5 (b: 5)."""
    cut_log = Built(tmp_path / "root")
    cut_log.lines("a", [b"1", b"2"])
    cut_log.lines("b", [b"3"])
    cut_log.cut()
    cut_log.lines("a", [b"4"])
    cut_log.cut()
    cut_log.lines("b", [b"5"])
    return cut_log


def read_all(cut_log: Built) -> None:
    cut_log.log.set_cursor("a", 4)
    cut_log.log.set_cursor("b", 5)


def raw(cut_log: Built) -> list[int]:
    return bases(cut_log.root, Kind.RAW)


def test_a_raw_segment_that_everybody_has_read_goes(cut_log: Built) -> None:
    """The active segment stays; the ledger describes the deleted one, and its sparse index is deleted too."""
    read_all(cut_log)
    reclaim(cut_log)

    assert raw(cut_log) == [5]
    assert sorted(path.name for path in cut_log.root.segments.iterdir() if path.name < f"{5:020d}") == []
    first, second = ledger(cut_log.root.path)
    assert (first["base"], first["last"], first["form"], first["rule"]) == (1, 3, "raw", "read")
    assert [(route["route"], route["count"], route["first"], route["last"]) for route in first["routes"]] == [
        ("a", 2, 1, 2),
        ("b", 1, 3, 3),
    ]
    assert (second["base"], second["last"]) == (4, 4)
    assert cut_log.log.where(2).state is State.RECLAIMED
    assert [record.value for record in cut_log.log.records(start="earliest")] == [b"5"]
    assert errors(cut_log.root.path) == []


def test_a_raw_segment_waits_out_its_grace_and_comes_back_for_who_needs_it(cut_log: Built) -> None:
    """Readable all the time."""
    read_all(cut_log)
    reclaim(cut_log, grace_ns=10**18)
    assert [segment.kind for segment in list_segments(cut_log.root).released] == [Kind.RAW_RELEASED] * 2
    assert cut_log.log.where(2).state is State.RELEASED
    cut_log.log.set_cursor("a", 2, rewind=True)
    assert [record.sequence for record in cut_log.log.records("a", start="cursor")] == [4]
    reclaim(cut_log, grace_ns=10**18)

    assert raw(cut_log) == [4, 5]
    assert [line["event"] for line in ledger(cut_log.root.path)] == ["reclaimed", "reclaimed", "kept"]


class Meanwhile(Unsynced):
    """Does something at the moment at which the first raw segment is to be renamed."""

    def __init__(self, cut_log: Built, deed: Callable[[], object]) -> None:
        super().__init__()
        self._released, self._deed = cut_log.path(1, Kind.RAW_RELEASED), deed

    def rename_to_free(self, source: Path, target: Path) -> None:
        if target == self._released:
            self._deed()
        super().rename_to_free(source, target)


def test_a_raw_segment_that_is_sealed_before_it_is_renamed_is_judged_anew(cut_log: Built) -> None:
    """It went from under RECLAIM, which called the disk broken."""
    read_all(cut_log)
    reclaim(cut_log, disk=Meanwhile(cut_log, cut_log.seal))
    assert bases(cut_log.root, Kind.SEALED) == [1, 4]
    assert [record.value for record in cut_log.log.records("a", start=1)] == [b"1", b"2", b"4"]
    assert [line["event"] for line in ledger(cut_log.root.path)] == ["reclaimed", "reclaimed", "kept", "kept"]
    reclaim(cut_log)

    assert (raw(cut_log), bases(cut_log.root, Kind.SEALED)) == ([5], [])
    assert all("sha256" in line for line in ledger(cut_log.root.path)[4:])
    assert rulings(cut_log.root) == {1: (), 4: ()}
    assert errors(cut_log.root.path) == []


def test_a_raw_deletion_recorded_by_a_dead_process_is_withdrawn_once_the_segment_is_sealed(cut_log: Built) -> None:
    """Its line has neither the digest nor the size of the sealed form."""
    read_all(cut_log)
    disk = DyingDisk(0, names=("rename",))
    with pytest.raises(Died):
        reclaim(cut_log, disk=disk)
    disk.abandon()
    cut_log.seal()
    cut_log.log.set_cursor("b", 2, rewind=True)
    reclaim(cut_log)

    lines = [(line["base"], line["event"], "form" in line) for line in ledger(cut_log.root.path)]
    withdrawn = [(1, "kept", False), (4, "kept", False)]
    assert sorted(lines[:2]) == [(1, "reclaimed", True), (4, "reclaimed", True)]
    assert sorted(lines[2:]) == sorted([*withdrawn, (4, "reclaimed", False)])
    assert rulings(cut_log.root) == {4: ()}
    assert errors(cut_log.root.path) == []


def test_what_is_unread_and_expires_is_counted(cut_log: Built) -> None:
    cut_log.log.set_cursor("a", 1)
    cut_log.log.set_cursor("b", 5)
    reclaim(cut_log, Limits(max_bytes=0, others=EXPIRE))

    assert [line["lost"] for line in ledger(cut_log.root.path)] == [{"a": 1}, {"a": 1}]


def test_a_damaged_raw_segment_is_left_to_the_sealer(cut_log: Built) -> None:
    """The routes in the damaged part are unknown."""
    read_all(cut_log)
    path = cut_log.path(1, Kind.RAW)
    flip_bit(path, path.stat().st_size - 3)
    reclaim(cut_log)

    assert raw(cut_log) == [1, 5]


@pytest.mark.parametrize("begins", ["before", "between its look and its rename"])
def test_a_segment_that_is_being_sealed_is_left_alone(cut_log: Built, begins: str) -> None:
    """If the sealer made its temporary file before the segment was renamed, the segment gets its name back."""
    read_all(cut_log)
    temporary = cut_log.path(1, Kind.SEALED).with_name(f"{cut_log.path(1, Kind.SEALED).name}.1{TEMPORARY}")
    if begins == "before":
        temporary.touch()
    reclaim(cut_log, disk=Meanwhile(cut_log, temporary.touch))

    assert raw(cut_log) == [1, 5]
    events = [(line["base"], line["event"]) for line in ledger(cut_log.root.path)]
    assert events == ([(4, "reclaimed")] if begins == "before" else [(1, "reclaimed"), (4, "reclaimed"), (1, "kept")])


def test_a_sealer_that_comes_too_late_makes_nothing(cut_log: Built) -> None:
    """The segment is gone: no sealed form of it appears again."""
    read_all(cut_log)
    seen = segments_to_seal(cut_log.root, 5)
    reclaim(cut_log)
    for segment in seen:
        with pytest.raises(FileNotFoundError):
            seal(cut_log.root, segment, cut_log.disk, cut_log.ledger, now=lambda: cut_log.now_ns)

    assert bases(cut_log.root, Kind.SEALED) == []
    assert not [path for path in cut_log.root.segments.iterdir() if path.name.endswith(TEMPORARY)]


def test_watching_it_leaves_the_sealer_a_while(cut_log: Built) -> None:
    """Segments of the first pass count as old."""
    now = [0.0]
    reclaimer = Reclaimer(cut_log.root, cut_log.disk, clock=lambda: now[0])
    reclaimer.look(now_ns=cut_log.now_ns)
    read_all(cut_log)
    cut_log.cut()
    cut_log.lines("a", [b"6"])
    reclaimer.look(now_ns=cut_log.now_ns)
    assert raw(cut_log) == [5, 6]
    now[0] = 10.0
    reclaimer.look(now_ns=cut_log.now_ns)
    reclaimer.ledger.close()

    assert raw(cut_log) == [6]


MINUTE_NS = 60 * SECOND_NS
HOUR_NS = 60 * MINUTE_NS
YEARS_NS = 10 * 365 * 24 * HOUR_NS
AN_HOUR = Limits(min_age_ns=HOUR_NS)
OLD = Limits(max_age_ns=HOUR_NS, others=EXPIRE)


@pytest.fixture
def unaged(tmp_path: Path) -> Built:
    """Segment 1, sealed and read, of which nothing tells an age yet; then an active one."""
    return make(tmp_path)


def make(path: Path, *, ahead_ns: int = 0) -> Built:
    unaged = Built(path / "root")
    unaged.now_ns, unaged.ahead_ns = unaged.now_ns + ahead_ns, ahead_ns
    unaged.lines("a", [b"x"])
    unaged.cut()
    unaged.seal()
    unaged.log.set_cursor("a", 1)
    return unaged


@pytest.mark.parametrize("ahead_ns", [YEARS_NS, -YEARS_NS])
def test_a_clock_that_is_set_deletes_nothing(unaged: Built, ahead_ns: int) -> None:
    unaged.now_ns, unaged.ahead_ns = unaged.now_ns + ahead_ns, ahead_ns
    for limits in (AN_HOUR, OLD):
        unaged.log.set_cursor("a", int(limits is AN_HOUR), rewind=True)
        reclaim(unaged, limits)
        assert bases(unaged.root) == [1]


@pytest.mark.parametrize("ahead_ns", [YEARS_NS, -YEARS_NS])
@pytest.mark.parametrize("limits", [AN_HOUR, OLD])
def test_what_was_written_while_the_clock_was_wrong_goes_when_it_is_due(
    tmp_path: Path, ahead_ns: int, limits: Limits
) -> None:
    unaged = make(tmp_path, ahead_ns=ahead_ns)
    if limits.others.expire:
        unaged.log.set_cursor("a", 0, rewind=True)
    unaged.now_ns, unaged.ahead_ns = unaged.now_ns - ahead_ns + HOUR_NS - 1, 0
    reclaim(unaged, limits)
    assert bases(unaged.root) == [1]

    unaged.now_ns += 2
    reclaim(unaged, limits)
    assert bases(unaged.root) == []


def test_after_a_reboot_an_age_goes_on_from_what_was_witnessed(unaged: Built) -> None:
    """Neither the time that the machine was off nor the uptime of this boot counts: the root may have been moved."""
    reclaim(unaged, AN_HOUR)
    unaged.now_ns += 61 * MINUTE_NS
    for boot in ("second boot", "third boot"):
        unaged.boot = boot
        reclaim(unaged, AN_HOUR)
        assert bases(unaged.root) == [1]
        unaged.now_ns += 59 * MINUTE_NS
        reclaim(unaged, Limits(min_age_ns=59 * MINUTE_NS + 1))  # a line is written once an hour
        assert bases(unaged.root) == [1]
    unaged.now_ns += MINUTE_NS
    reclaim(unaged, AN_HOUR)

    assert bases(unaged.root) == []


@pytest.mark.parametrize("spoil", ["lost", "damaged"])
def test_without_the_ledger_of_the_segments_it_counts_from_its_own_first_look(
    unaged: Built, spoil: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = unaged.root.ledger / "segments.jsonl"
    if spoil == "lost":
        path.unlink()
    else:
        path.write_bytes(flipped(path.read_bytes(), 99))
    unaged.now_ns += HOUR_NS
    reclaim(unaged, AN_HOUR)
    assert bases(unaged.root) == [1]
    assert ("segments.jsonl: line 1" in capsys.readouterr().err) == (spoil == "damaged")

    unaged.now_ns += HOUR_NS
    reclaim(unaged, AN_HOUR)
    assert bases(unaged.root) == []


def test_a_service_writes_a_line_an_hour_and_only_if_ages_matter(unaged: Built) -> None:
    unaged.log.set_cursor("a", 0, rewind=True)
    for limits, lines in ((Limits(), 0), (AN_HOUR, 3)):
        reclaimer = Reclaimer(unaged.root, Unsynced(), limits)
        for _ in range(13):
            reclaimer.look(now_ns=unaged.now_ns)
            unaged.now_ns += 10 * MINUTE_NS
        reclaimer.ledger.close()
        assert [entry["event"] for entry in ledger(unaged.root.path)] == ["seen"] * lines


def sealed(base: int, at_ns: int) -> Entry:
    return {"event": "sealed", "base": base, "last": 9} | Moment("boot", at_ns).as_entry()


def put(root: Root, *lines: Entry) -> None:
    """Put a ledger of the segments in the place of the one that is there."""
    (root.ledger / "segments.jsonl").unlink(missing_ok=True)
    written = Ledger(root.ledger / "segments.jsonl", Unsynced())
    written.append(*lines)
    written.close()


def test_a_segment_is_as_old_as_the_first_line_about_it_in_the_ledger_that_is_there(unaged: Built) -> None:
    """After a repair, a segment may begin within the range of another one's line; a replaced ledger may be older."""
    ages = Ages(unaged.root, lambda: Moment("boot", 100))
    for lines, expected in (
        ((sealed(1, 0), sealed(5, 60), sealed(5, 90)), [100, 40]),
        ((sealed(5, 0), sealed(1, 90)), [10, 100]),
    ):
        put(unaged.root, *lines)
        ages.update([1, 5])
        assert [ages.at_least_ns(base) for base in (1, 5)] == expected


def test_each_part_of_the_ledgers_is_decoded_once_however_many_segments_are_asked_about(unaged: Built) -> None:
    path = unaged.root.ledger / "segments.jsonl"
    written = Ledger(path, Unsynced(), part_bytes=2000)
    for number in range(2, 300):
        written.append(sealed(10 * number, number))
        written.cut()
    written.close()
    assert len(parts_of(path)) > 10
    once = steps(lambda: sum(1 for _ in entries_of(path)))
    ages = Ages(unaged.root, lambda: Moment("boot", 1000))
    bases = [10 * number for number in range(2, 300)]

    assert steps(lambda: ages.update(bases)) < 3 * once
    assert steps(lambda: ages.update(bases)) < once / 4
    assert ages.at_least_ns(20) > ages.at_least_ns(2990) > 0


def test_a_damaged_part_hides_only_the_ages_that_are_in_it(unaged: Built) -> None:
    path = unaged.root.ledger / "segments.jsonl"
    put(unaged.root)
    written = Ledger(path, Unsynced(), part_bytes=2000)
    written.append(*(sealed(base, base // 10) | {"last": base + 9} for base in range(10, 1000, 10)))
    written.cut()
    written.close()
    part = parts_of(path)[1]
    low, high = stored_index(part).span
    part.path.write_bytes(b"damaged")
    ages = Ages(unaged.root, lambda: Moment("boot", 1000))

    ages.update([10, 990])
    assert ages.problem == ""
    assert (ages.at_least_ns(10), ages.at_least_ns(990)) == (999, 901)
    ages.update([10, low, 990])
    assert part.path.name in ages.problem
    assert ages.at_least_ns(low) == ages.at_least_ns(high - 9) == 0
