"""Ages are proven time: no clock that can be set deletes a segment early, or keeps it forever."""

from pathlib import Path

import pytest
from damage import flipped
from effort import steps
from logs import SECOND_NS, Built, Unsynced
from reclaiming import EXPIRE, Reclaimer, bases, ledger, reclaim

from wald.files.layout import Root
from wald.files.ledger_read import entries_of, parts_of, stored_index
from wald.files.ledger_write import Ledger
from wald.files.uptime import Moment
from wald.format.ledger_lines import Entry
from wald_reclaim.evidence import Ages
from wald_reclaim.policy import Limits

MINUTE_NS = 60 * SECOND_NS
HOUR_NS = 60 * MINUTE_NS
YEARS_NS = 10 * 365 * 24 * HOUR_NS
AN_HOUR = Limits(min_age_ns=HOUR_NS)
EXPIRED = Limits(max_age_ns=HOUR_NS, others=EXPIRE)


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Segment 1, sealed and read, of which nothing tells an age yet; then an active one."""
    return make(tmp_path)


def make(path: Path, *, ahead_ns: int = 0) -> Built:
    built = Built(path / "root")
    built.now_ns, built.ahead_ns = built.now_ns + ahead_ns, ahead_ns
    built.lines("a", [b"x"])
    built.cut()
    built.seal()
    built.log.set_cursor("a", 1)
    return built


@pytest.mark.parametrize("ahead_ns", [YEARS_NS, -YEARS_NS])
def test_a_clock_that_is_set_deletes_nothing(built: Built, ahead_ns: int) -> None:
    built.now_ns, built.ahead_ns = built.now_ns + ahead_ns, ahead_ns
    for limits in (AN_HOUR, EXPIRED):
        built.log.set_cursor("a", int(limits is AN_HOUR), rewind=True)
        reclaim(built, limits)
        assert bases(built.root) == [1]


@pytest.mark.parametrize("ahead_ns", [YEARS_NS, -YEARS_NS])
@pytest.mark.parametrize("limits", [AN_HOUR, EXPIRED])
def test_what_was_written_while_the_clock_was_wrong_goes_when_it_is_due(
    tmp_path: Path, ahead_ns: int, limits: Limits
) -> None:
    built = make(tmp_path, ahead_ns=ahead_ns)
    if limits.others.expire:
        built.log.set_cursor("a", 0, rewind=True)
    built.now_ns, built.ahead_ns = built.now_ns - ahead_ns + HOUR_NS - 1, 0
    reclaim(built, limits)
    assert bases(built.root) == [1]

    built.now_ns += 2
    reclaim(built, limits)
    assert bases(built.root) == []


def test_after_a_reboot_an_age_goes_on_from_what_was_witnessed(built: Built) -> None:
    """Neither the time that the machine was off nor the uptime of this boot counts: the root may have been moved."""
    reclaim(built, AN_HOUR)
    built.now_ns += 61 * MINUTE_NS
    for boot in ("second boot", "third boot"):
        built.boot = boot
        reclaim(built, AN_HOUR)
        assert bases(built.root) == [1]
        built.now_ns += 59 * MINUTE_NS
        reclaim(built, Limits(min_age_ns=59 * MINUTE_NS + 1))  # a line is written once an hour
        assert bases(built.root) == [1]
    built.now_ns += MINUTE_NS
    reclaim(built, AN_HOUR)

    assert bases(built.root) == []


@pytest.mark.parametrize("spoil", ["lost", "damaged"])
def test_without_the_ledger_of_the_segments_it_counts_from_its_own_first_look(
    built: Built, spoil: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = built.root.ledger / "segments.jsonl"
    if spoil == "lost":
        path.unlink()
    else:
        path.write_bytes(flipped(path.read_bytes(), 99))
    built.now_ns += HOUR_NS
    reclaim(built, AN_HOUR)
    assert bases(built.root) == [1]
    assert ("segments.jsonl: line 1" in capsys.readouterr().err) == (spoil == "damaged")

    built.now_ns += HOUR_NS
    reclaim(built, AN_HOUR)
    assert bases(built.root) == []


def test_a_service_writes_a_line_an_hour_and_only_if_ages_matter(built: Built) -> None:
    built.log.set_cursor("a", 0, rewind=True)
    for limits, lines in ((Limits(), 0), (AN_HOUR, 3)):
        reclaimer = Reclaimer(built.root, Unsynced(), limits)
        for _ in range(13):
            reclaimer.look(now_ns=built.now_ns)
            built.now_ns += 10 * MINUTE_NS
        reclaimer.ledger.close()
        assert [entry["event"] for entry in ledger(built.root.path)] == ["seen"] * lines


def sealed(base: int, at_ns: int) -> Entry:
    return {"event": "sealed", "base": base, "last": 9} | Moment("boot", at_ns).as_entry()


def put(root: Root, *lines: Entry) -> None:
    """Put a ledger of the segments in the place of the one that is there."""
    (root.ledger / "segments.jsonl").unlink(missing_ok=True)
    written = Ledger(root.ledger / "segments.jsonl", Unsynced())
    written.append(*lines)
    written.close()


def test_a_segment_is_as_old_as_the_first_line_about_it_in_the_ledger_that_is_there(built: Built) -> None:
    """After a repair, a segment may begin within the range of another one's line; a replaced ledger may be older."""
    ages = Ages(built.root, lambda: Moment("boot", 100))
    for lines, expected in (
        ((sealed(1, 0), sealed(5, 60), sealed(5, 90)), [100, 40]),
        ((sealed(5, 0), sealed(1, 90)), [10, 100]),
    ):
        put(built.root, *lines)
        ages.update([1, 5])
        assert [ages.at_least_ns(base) for base in (1, 5)] == expected


def test_each_part_of_the_ledgers_is_decoded_once_however_many_segments_are_asked_about(built: Built) -> None:
    path = built.root.ledger / "segments.jsonl"
    written = Ledger(path, Unsynced(), part_bytes=2000)
    for number in range(2, 300):
        written.append(sealed(10 * number, number))
        written.cut()
    written.close()
    assert len(parts_of(path)) > 10
    once = steps(lambda: sum(1 for _ in entries_of(path)))
    ages = Ages(built.root, lambda: Moment("boot", 1000))
    bases = [10 * number for number in range(2, 300)]

    assert steps(lambda: ages.update(bases)) < 3 * once
    assert steps(lambda: ages.update(bases)) < once / 4
    assert ages.at_least_ns(20) > ages.at_least_ns(2990) > 0


def test_a_damaged_part_hides_only_the_ages_that_are_in_it(built: Built) -> None:
    path = built.root.ledger / "segments.jsonl"
    put(built.root)
    written = Ledger(path, Unsynced(), part_bytes=2000)
    written.append(*(sealed(base, base // 10) | {"last": base + 9} for base in range(10, 1000, 10)))
    written.cut()
    written.close()
    part = parts_of(path)[1]
    low, high = stored_index(part).span
    part.path.write_bytes(b"damaged")
    ages = Ages(built.root, lambda: Moment("boot", 1000))

    ages.update([10, 990])
    assert ages.problem == ""
    assert (ages.at_least_ns(10), ages.at_least_ns(990)) == (999, 901)
    ages.update([10, low, 990])
    assert part.path.name in ages.problem
    assert ages.at_least_ns(low) == ages.at_least_ns(high - 9) == 0
