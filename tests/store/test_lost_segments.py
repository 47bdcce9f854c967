"""Segments that are missing, given up or misplaced, compared with the ledger and the intact log."""

import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import permutations, product
from pathlib import Path

import pytest
from contents import errors, records
from damage import flip_bit, flipped
from faults import DyingDisk, until_it_survives
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logs import START_NS, Built
from reading import moment
from repairing import repair
from sample_segments import batch, joined
from shrinking import shrink
from spoiling import DAMAGE, Damage

import wald
from wald.checking.verifier import verify
from wald.errors import Damaged, InvalidInput, NotFound
from wald.files.layout import Root
from wald.files.listing import list_segments
from wald.format.batch import HEADER, padded
from wald.format.names import Kind
from wald.format.records import Record
from wald.retention.missing import Missing
from wald.segments.view import State


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Records 1 to 8 on route a, two in each of three sealed segments and the active one, a second apart."""
    built = Built(tmp_path / "root")
    for base in (1, 3, 5, 7):
        built.lines("a", [b"%d" % base, b"%d" % (base + 1)])
        if base < 7:
            built.cut()
    built.seal()
    return built


def read(built: Built, *arguments: object) -> tuple[list[int], list[str]]:
    reported: list[str] = []
    reading = built.log.records(*arguments, on_damage=lambda error: reported.append(error.message))  # type: ignore[arg-type]
    return [record.sequence for record in reading], reported


def test_one_that_comes_back_while_it_is_passed_is_read(built: Built) -> None:
    """RECLAIM had renamed three, has given one its old name back, and the ledger has taken all of it back by now."""
    for base in (1, 3, 5):
        built.path(base, Kind.SEALED).rename(built.path(base, Kind.RELEASED))
    reading = built.log.records("a", 1)
    found = [next(reading).sequence]
    built.path(3, Kind.RELEASED).rename(built.path(3, Kind.SEALED))
    found += [record.sequence for record in reading]
    assert found == [1, 2, 3, 4, 5, 6, 7, 8]


STARTS = [("earliest",), ("cursor",), (1,), (2,), (moment(0),), (moment(0), 100)]


def test_a_lost_front_is_damage_for_those_who_ask_for_it(built: Built) -> None:
    built.path(1, Kind.SEALED).unlink()
    for start in STARTS:
        found, reported = read(built, "a", *start)
        assert found == [3, 4, 5, 6, 7, 8]
        assert len(reported) == 1
        assert "records 1 to 2" in reported[0] or "record 2" in reported[0]
        assert "no ledger explains why" in reported[0]
        with pytest.raises(Damaged):
            list(built.log.records("a", *start))  # type: ignore[arg-type]
    assert any("records 1 to 2" in error for error in errors(built.root.path))
    built.log.set_cursor("a", 2)
    for later in ("cursor", "end", 3, moment(2.5)):
        assert read(built, "a", later)[1] == []


def test_a_reclaimed_segment_tells_its_times_by_the_ledger(built: Built) -> None:
    built.reclaim(1)
    built.reclaim(3)
    with pytest.raises(NotFound, match="records 3 to 4: 2 records of route a"):
        list(built.log.records("a", moment(1.5)))
    assert read(built, "a", moment(2.5)) == ([5, 6, 7, 8], [])
    with pytest.raises(NotFound, match="records 1 to 4: 4 records of route a"):
        list(built.log.records("a", moment(0)))


class TestOnMissing:
    """Policies of ``on_missing``."""

    def test_policies(self, built: Built) -> None:
        built.reclaim(1)
        for start in (1, moment(0), "earliest", "cursor"):
            assert [r.sequence for r in built.log.records("a", start, on_missing="skip")] == [3, 4, 5, 6, 7, 8]
            with pytest.raises(NotFound, match="2 records of route a are missing"):
                list(built.log.records("a", start, on_missing="error"))
        assert built.log.to_arrow_reader("a", 1, on_missing="skip").read_all().num_rows == 6
        with pytest.raises(InvalidInput):
            built.log.records(on_missing="perhaps")  # type: ignore[arg-type]
        built.reclaim(3)
        reported: list[Missing] = []
        assert len(list(built.log.batches("a", 2, on_missing=reported.append))) == 2
        assert [(m.first, m.last, m.records, m.asked) for m in reported] == [(2, 4, 3, True)]


@pytest.mark.parametrize("missed", [1, 3, 7])
def test_a_segment_that_one_reading_of_the_directory_misses_is_not_missing(
    built: Built, monkeypatch: pytest.MonkeyPatch, missed: int
) -> None:
    """A file that is renamed while its directory is read, by the sealer say, may be in it under neither name."""
    scandir = os.scandir

    def missing_once(path: Path) -> Iterator[os.DirEntry[str]]:
        monkeypatch.setattr(os, "scandir", scandir)
        return iter([entry for entry in scandir(path) if not entry.name.startswith(f"{missed:020d}")])

    looks: list[Callable[[], bool]] = [
        lambda: read(built, "a") == ([*range(1, 9)], []),
        lambda: errors(built.root.path) == [],
        lambda: built.log.where(missed).durable,
    ]
    for look in looks:
        os.utime(built.root.segments)
        monkeypatch.setattr(os, "scandir", missing_once)
        assert look()


LOST = {"event": "lost", "base": 3, "last": 4, "why": "the file is gone", "kept": "quarantine/it", "at": START_NS}


@pytest.fixture
def given_up(tmp_path: Path) -> Built:
    """Three segments of two records; the second is gone, and a line of the ledger gives it up."""
    built = Built(tmp_path / "log")
    for part in range(3):
        built.lines("a", [b"%d" % part] * 2, cut=True)
    built.seal()
    built.path(3, Kind.SEALED).unlink()
    built.ledger.append(LOST | {"routes": [["a", 2, 3, 4, 4]]})
    return built


def test_verify_says_what_is_lost_and_a_reader_passes_over_it_and_is_told_why(given_up: Built) -> None:
    assert errors(given_up.root.path) == []
    messages = [found.message for found in verify(Root(given_up.root.path))]
    (loss,) = [message for message in messages if "are lost" in message]
    assert loss.startswith("records 3 to 4 are lost: given up by a repair at 2023-11-14T22:13:20Z")
    assert "quarantine/it" in loss
    assert [message for message in messages if "reclaimed" in message] == []

    missing: list[Missing] = []
    found = [record.sequence for record in given_up.log.records("a", on_missing=missing.append)]
    assert found == [1, 2, 5, 6]
    (range_,) = missing
    assert (range_.first, range_.last, range_.records, range_.exact) == (3, 4, 2, True)
    assert "records 3 to 4 are lost: 2 records of route a are missing; they were given up" in range_.message()
    with pytest.raises(NotFound, match="the file is gone"):
        list(given_up.log.records("a", start=3))
    place = given_up.log.where(4)
    assert (place.state, place.durable) == (State.LOST, False)
    assert "lost: given up by a repair" in place.message
    assert "quarantine/it" in place.message


def test_the_last_records_of_a_log_are_not_given_out_again(tmp_path: Path) -> None:
    built = Built(tmp_path / "log")
    built.lines("a", [b"1"] * 5, cut=True)
    built.ledger.append(LOST | {"base": 6, "last": 9})
    built.crash()
    built.root.head.unlink()
    assert Built(built.root.path, epoch=2).lines("a", [b"new"]) == 10


@pytest.fixture
def short(tmp_path: Path) -> Built:
    """Two segments of two records and the first two of a third; a repair has given up the last two, 7 and 8."""
    built = Built(tmp_path / "log")
    for _ in range(2):
        built.lines("a", [b"x"] * 2, cut=True)
    built.lines("a", [b"x"] * 2)
    end = built.writer.position
    built.lines("a", [b"x"] * 2)
    built.crash()
    os.truncate(built.path(5, Kind.RAW), end)
    repair(built.root.path)
    return built


def test_lost_records_at_the_end_of_a_log_are_reported_before_there_is_a_later_one(short: Built) -> None:
    """A start does not call damage what a repair has given up."""
    log = short.log
    missing: list[Missing] = []
    assert [record.sequence for record in log.records("a", on_missing=missing.append)] == [1, 2, 3, 4, 5, 6]
    assert list(log.records("a", 8, on_missing=missing.append)) == []
    later = datetime.fromtimestamp(short.now_ns / 1e9 + 1, UTC)
    assert list(log.records("a", later, on_missing=missing.append)) == []
    assert [(range_.first, range_.last, bool(range_.lost)) for range_ in missing] == [
        (7, 8, True),
        (8, 8, True),
        (7, 8, True),
    ]
    with pytest.raises(NotFound, match="records 7 to 8 are lost"):
        list(log.records("a", 5))
    assert [record.sequence for record in log.records("a", 5, 6)] == [5, 6]

    report = Built(short.root.path, epoch=2).report
    assert report.errors == []
    assert [message for message in report.info if "records 7 to 8" in message and "gave them up" in message]


def test_a_reader_that_follows_reports_lost_records_at_the_end_before_it_waits_and_once(short: Built) -> None:
    missing: list[Missing] = []
    before_wait: list[int] = []
    cancel = threading.Event()

    def append() -> None:
        if not before_wait:
            before_wait.append(len(missing))
            Built(short.root.path, epoch=8).lines("a", [b"new"])

    found = short.log.records("a", 5, follow=True, cancel=cancel, on_missing=missing.append, on_wait=append)
    assert [next(found).sequence for _ in range(3)] == [5, 6, 9]
    cancel.set()
    assert list(found) == []
    assert before_wait == [1]
    assert [(range_.first, range_.last) for range_ in missing] == [(7, 8)]


Digests = dict[str, str]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four sealed segments and an active one."""
    path = tmp_path_factory.mktemp("whole") / "log"
    built = Built(path)
    for part in range(5):
        built.lines("a", [b"%d" % part] * (part + 2))
        if part < 4:
            built.cut()
    built.seal()
    built.crash()
    return path


@pytest.fixture
def log(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "log"))


def sealed(root: Path) -> list[Path]:
    return sorted((root / "segments").glob("*.wal.zst"))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digests(root: Path) -> Digests:
    return {path.name: digest(path) for path in sealed(root)}


def anywhere(root: Path) -> set[str]:
    return {digest(path) for path in root.rglob("*") if path.is_file()}


def arrange(root: Path, order: tuple[int | None, ...]) -> None:
    """Give the n-th name the content of segment ``order[n]``; None: none."""
    names = sealed(root)
    contents = [path.read_bytes() for path in names]
    for path, number in zip(names, order, strict=True):
        path.unlink()
        if number is not None:
            path.write_bytes(contents[number])


def orders(*segments: int | None) -> Iterator[tuple[int | None, ...]]:
    return (order for order in permutations(segments) if order != segments)


def check_order(whole: Path, scratch: Path, order: tuple[int | None, ...]) -> None:
    before = {name: each for n, (name, each) in enumerate(digests(whole).items()) if n in order}
    for number, disk in enumerate(until_it_survives(DyingDisk)):
        root = scratch / str(number)
        shutil.copytree(whole, root)
        arrange(root, order)
        with disk.attempt():
            repair(root, accept_loss=False, disk=disk)
        assert set(before.values()) <= anywhere(root), (order, number)
        assert digests(root) == before or not disk.survived, order
        repair(root, accept_loss=False)
        assert digests(root) == before, (order, number)
        assert bool(errors(root)) == (None in order), (order, number)
        shutil.rmtree(root)


SOME = [(1, 2, 3, 0), (1, 0, 3, 2), (1, 0, None, 2)]


@pytest.mark.parametrize("order", SOME, ids=str)
def test_segments_get_their_names_back_whatever_step_kills_the_repair(
    whole: Path, tmp_path: Path, order: tuple[int | None, ...]
) -> None:
    check_order(whole, tmp_path, order)


@pytest.mark.slow
@pytest.mark.parametrize("order", [*orders(0, 1, 2, 3), *list(orders(None, 1, 2, 3))[::3]], ids=str)
def test_all_orders_of_four_names(whole: Path, tmp_path: Path, order: tuple[int | None, ...]) -> None:
    check_order(whole, tmp_path, order)


Fate = Callable[[Path], None]


def intact(path: Path) -> None:
    """Leave the segment intact."""


def gone(path: Path) -> None:
    path.unlink()


def last_batch_cut(path: Path) -> None:
    """Cut the last batch short; of a sealed segment the last frame and the index."""
    with path.open("r+b") as file:
        file.truncate(
            max(file.seek(0, 2) // 2, 70) if path.suffix == ".zst" else len(path.read_bytes().rstrip(b"\0")) - 5
        )


def first_batch_damaged(path: Path) -> None:
    """Damage the control batch; of a sealed segment the first frame."""
    flip_bit(path, 100)


def without_index(path: Path) -> None:
    """Damage the index of a sealed segment; all batches stay whole."""
    data = path.read_bytes()
    path.write_bytes(flipped(data, 8 * (data.rfind(b"WALDSIX1") + 20)))


def build(path: Path, *, sealed: bool, reclaimed: bool = False, shrunk: str = "") -> Built:
    """Return a log of five segments: p's record has pieces in three of them, q's in each, r's in the first three.

    Args:
        reclaimed: whether RECLAIM has deleted the first segment.
        shrunk: a route; in the first and third segment, shrinking has dropped its batches. Empty: no shrinking.
    """
    built = Built(path, segment_max_bytes=1 << 20)
    built.lines("a", [b"first"])
    for route in "qr":
        built.piece(route, route.encode() + b" begins ", begins=True, ends=False)
    built.lines("a", [b"behind them"], cut=True)
    for route in "qr":
        built.piece(route, b"continues ", begins=False, ends=False)
    built.piece("p", b"p begins ", begins=True, ends=False)  # no other record begins in this segment
    built.cut()
    built.lines("a", [b"second"])
    built.piece("r", b"and ends\n", begins=False, ends=True)
    for route in "pq":
        built.piece(route, b"continues ", begins=False, ends=False)
    built.cut()
    built.piece("q", b"continues ", begins=False, ends=False)
    built.lines("a", [b"third"])
    built.piece("p", b"and ends\n", begins=False, ends=True)  # leaves no gap in the sequences if it is lost
    built.cut()
    built.piece("q", b"and ends\n", begins=False, ends=True)
    built.lines("p", [b"last"])
    if sealed or reclaimed:
        built.seal(keep=0 if sealed else 3)
    if reclaimed:
        built.reclaim(1, named=True)
    if shrunk:
        bases = [segment.base_sequence for segment in list_segments(built.root).segments]
        for base in bases[:3:2] if shrunk == "a" else bases[2:3]:
            shrink(built, base, **{shrunk: 100})
    built.crash()
    return built


def readable(root: Path) -> set[tuple[int, bytes]]:
    """Return the records that a reader of all routes or of one route gets."""
    log = wald.open(root)
    found = set[tuple[int, bytes]]()
    for route in (None, *(each.name for each in Root(root).routes.iterdir())):
        records = log.records(route, start=1, on_damage=lambda _: None, on_missing="skip")
        found |= {(record.sequence, record.value) for record in records}
    return found


RAW = [intact, gone, last_batch_cut, first_batch_damaged]
SEALED = [intact, gone, without_index, last_batch_cut]


def some(*parameters: object, damaged_max: int = 2) -> object:
    return pytest.param(*parameters, damaged_max)


def many(*parameters: object, damaged_max: int = 3) -> object:
    return pytest.param(*parameters, damaged_max, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("sealed", "reclaimed", "shrunk", "fates", "damaged_max"),
    [
        some(False, False, "", RAW, damaged_max=1),
        some(False, True, "", RAW[:3]),
        some(True, False, "", SEALED[:3]),
        some(True, False, "a", [intact, first_batch_damaged]),
        some(True, False, "r", [intact, first_batch_damaged]),
        many(False, False, "", RAW),
        many(True, False, "", SEALED),
        many(True, True, "", [*SEALED, first_batch_damaged]),
        many(True, False, "a", [*SEALED, first_batch_damaged], damaged_max=2),
        many(True, False, "r", [*SEALED, first_batch_damaged], damaged_max=2),
    ],
)
def test_a_repair_loses_no_record_that_was_readable_and_leaves_no_error(
    tmp_path: Path, sealed: bool, reclaimed: bool, shrunk: str, fates: list[Fate], damaged_max: int
) -> None:
    log = build(tmp_path / "log", sealed=sealed, reclaimed=reclaimed, shrunk=shrunk)
    written = readable(log.root.path)
    assert len(written) == {"": 4 if reclaimed else 8, "a": 5, "r": 7}[shrunk]
    damaged = 3 if reclaimed else 4  # the last segment is whole
    for number, fated in enumerate(product(fates, repeat=damaged)):
        if damaged - fated.count(intact) > damaged_max:
            continue
        root = tmp_path / str(number)
        shutil.copytree(log.root.path, root)
        segments = list_segments(Root(root)).segments[:damaged]
        for fate, segment in zip(fated, segments, strict=True):
            fate(segment.path)
        before = readable(root)
        repair(root)
        names = [fate.__name__ for fate in fated]
        assert before <= written, names
        assert readable(root) == before, names
        assert errors(root) == [], names
        assert repair(root).actions == (), names
        shutil.rmtree(root)


FORGED = b"forged"


def forge(built: Built, route: str) -> bytes:
    """Return a payload that contains a batch of another route, encoded for its future position."""
    writer = built.writer
    at = writer.position + HEADER.size + padded(len(route))
    forged = batch(FORGED + b"\n", base=writer.state.next_sequence, route=b"other", append_time_ns=built.now_ns)
    return joined([forged], start=at, salt=writer._salt) + b"\n"


def build_three(path: Path) -> None:
    """Three segments, one in each form; records short and long, in pieces and in columns, and forged ones in them."""
    built = Built(path, segment_max_bytes=1 << 20)
    for part in range(3):
        for number in range(12):
            built.lines("a", [b"%d-%d" % (part, number), b"x" * (37 * number)])
            payload = forge(built, "web")
            built.append("web", payload, payload.count(b"\n"))
        built.piece("a", b"begin" * 100, begins=True, ends=False)
        built.columns("b", [b"one", b"\n", b""], keys=[b"k", None, b""])
        built.piece("a", b"end\n", begins=False, ends=True)
        built.lines("b", [b"%d" % number for number in range(40)])
        if part < 2:
            built.cut()
        if part == 0:
            built.seal()
    built.crash()


class Written:
    """The log, and its records by their sequences."""

    def __init__(self, path: Path) -> None:
        self.path = path
        build_three(path)
        self.records = {record.sequence: record for record in records(path)}
        assert len(self.records) > 150


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("written") / "log")


SPOILED = st.lists(st.tuples(st.integers(0, 2), DAMAGE), min_size=1, max_size=3)


def check_reading(root: Path, written: dict[int, Record], start: int = 1) -> set[int]:
    """Check that no record is forged, repeated or silently missing; return the records read."""
    reported: list[Damaged] = []
    found = list(wald.open(root).records(start=start, on_damage=reported.append))
    for record in found:
        assert record == written[record.sequence]
    there = {record.sequence for record in found}
    assert len(there) == len(found)
    assert there == {sequence for sequence in written if sequence >= start} or reported
    return there


def check_damaged(log: Written, spoiled: list[tuple[int, Damage]], start: int) -> None:
    written = log.records
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "log"
        shutil.copytree(log.path, root)
        segments = sorted(file for file in (root / "segments").iterdir() if file.suffix in (".wal", ".zst"))
        assert len(segments) == 3
        for number, damage in spoiled:
            data = segments[number].read_bytes()
            segments[number].write_bytes(damage(data) if data else data)
        there = check_reading(root, written)
        check_reading(root, written, start)
        assert len(there) == len(written) or errors(root)

        built = Built(root, epoch=2)
        assert check_reading(root, written) <= there
        newest = set(range(int(segments[2].name.split(".")[0]), max(written) + 1))
        assert newest <= there or built.report.errors
        added = built.lines("a", [b"new"])
        assert added > max(written)
        assert [record.value for record in wald.open(root).records(start=added)] == [b"new"]
        built.crash()


QUIET = [HealthCheck.too_slow]


@pytest.mark.parametrize("examples", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_what_is_read_was_written_and_what_is_missing_is_reported(written: Written, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=QUIET)
    @given(spoiled=SPOILED, start=st.integers(1, 150))
    def check(spoiled: list[tuple[int, Damage]], start: int) -> None:
        check_damaged(written, spoiled, start)

    check()
