"""Logs with misplaced, lost and damaged segments, compared with the intact log as an oracle."""

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import permutations, product
from pathlib import Path

import pytest
from contents import errors, records
from damage import flip_bit, flipped
from faults import DyingDisk, until_it_survives
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logs import Built
from repairing import repair
from sample_segments import batch, joined
from shrinking import shrink
from spoiling import DAMAGE, Damage

import wald
from wald.errors import Damaged
from wald.files.layout import Root
from wald.files.listing import list_segments
from wald.format.batch import HEADER, padded
from wald.format.records import Record

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


QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@settings(max_examples=20, deadline=None, suppress_health_check=QUIET)
@given(spoiled=SPOILED, start=st.integers(1, 150))
def test_what_is_read_was_written_and_what_is_missing_is_reported(
    written: Written, spoiled: list[tuple[int, Damage]], start: int
) -> None:
    check_damaged(written, spoiled, start)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=QUIET)
@given(spoiled=SPOILED, start=st.integers(1, 150))
def test_what_is_read_was_written_and_what_is_missing_is_told_at_length(
    written: Written, spoiled: list[tuple[int, Damage]], start: int
) -> None:
    check_damaged(written, spoiled, start)
