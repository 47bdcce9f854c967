"""The contents of a path decide if it names a log, shipped segments or an archive."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest
from archives import archive
from logs import Built

from wald.errors import Damaged, InvalidInput, NotFound
from wald.format.names import Kind, parse_segment_name
from wald_archive.bundle import Records
from wald_spark.audit.audits import expanded
from wald_spark.locations import ArchiveLocation, Location, LogLocation, Shipped, find_locations
from wald_spark.options import parse_options
from wald_spark.plan import Range, pieces_of
from wald_spark.query import plan_query
from wald_spark.stream import StreamLogs


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Two sealed segments and an active one."""
    built = Built(tmp_path / "root")
    for line in (b"one", b"two", b"three"):
        built.lines("a", [line])
        if line != b"three":
            built.cut()
    built.seal()
    return built


def part(built: Built, to: Path, *bases: int) -> Path:
    """Copy some segments of a log, raw or sealed, to a separate directory."""
    to.mkdir()
    for path in built.root.segments.iterdir():
        if (name := parse_segment_name(path.name)) and name.base_sequence in bases and name.kind is not Kind.INDEX:
            shutil.copy(path, to)
    return to


def values(place: Location) -> list[bytes]:
    """Return the values of all records, read as a task does."""
    assert isinstance(place, LogLocation)
    view = place.view()
    everything = Range(None, view.segments[0].base_sequence, 10**9)
    pieces = pieces_of(view, everything, limit_bytes=1)
    return [record.value for piece in pieces for batch in piece.batches() for record in batch.records()]


@pytest.fixture
def store() -> str:
    """Address of an empty place in an object store."""
    return f"memory://{uuid4().hex}/logs"


def shipped(built: Built, to: Path) -> Path:
    to.mkdir(parents=True)
    for base in (1, 2):
        shutil.copy(built.path(base, Kind.SEALED), to)
    return to


def test_a_log_is_known_by_its_identity_and_a_file_url_is_a_path(built: Built) -> None:
    path = built.root.path
    for address in (str(path), f"file://{path}", f"file:{path}", f"file://localhost{path}"):
        assert find_locations([address]) == [LogLocation(built.root, built.log_id)]


@pytest.mark.parametrize(("below", "kind"), [("", Kind.SEALED), ("segments", Kind.SEALED), ("", Kind.RAW)])
def test_shipped_segments_say_themselves_which_log_they_are(
    built: Built, tmp_path: Path, below: str, kind: Kind
) -> None:
    directory = tmp_path / "shipped" / below
    directory.mkdir(parents=True)
    shutil.copy(built.path(1 if kind is Kind.SEALED else 3, kind), directory)
    assert find_locations([str(tmp_path / "shipped")]) == [LogLocation(Shipped(directory), built.log_id)]


def test_a_damaged_segment_leaves_it_to_the_next(built: Built, tmp_path: Path) -> None:
    directory = shipped(built, tmp_path / "shipped")
    (directory / built.path(1, Kind.SEALED).name).write_bytes(b"nothing")
    assert find_locations([str(directory)]) == [LogLocation(Shipped(directory), built.log_id)]
    (directory / built.path(2, Kind.SEALED).name).write_bytes(b"nothing")
    with pytest.raises(Damaged, match="no segment here names its log"):
        find_locations([str(directory)])


def test_bags_are_an_archive_and_so_is_a_url_of_some(built: Built, tmp_path: Path, store: str) -> None:
    archive(built, tmp_path / "archive")
    place = str(tmp_path / "archive")
    fsspec.filesystem("memory").put(f"{place}/", f"{store}/", recursive=True)
    assert find_locations([place, store]) == [ArchiveLocation(place), ArchiveLocation(store)]


@pytest.mark.parametrize(("segments", "words"), [(False, "no bags"), (True, "read from a directory")])
def test_a_url_without_bags_is_not_found(built: Built, store: str, segments: bool, words: str) -> None:
    """A store cannot tell an empty directory from a missing one, or segments from an archive."""
    if segments:
        fsspec.filesystem("memory").put(str(built.path(1, Kind.SEALED)), f"{store}/{built.path(1, Kind.SEALED).name}")
    with pytest.raises(NotFound, match=words):
        find_locations([store])


def test_a_pattern_names_all_that_match_and_nothing_twice(tmp_path: Path) -> None:
    ids = [Built(tmp_path / name).log_id for name in ("log-b", "log-a")]
    found = find_locations([str(tmp_path / "log-*"), str(tmp_path / "log-a")])
    assert [place.log_id for place in found if isinstance(place, LogLocation)] == ids[::-1]


def test_parts_of_one_log_are_read_as_one(built: Built, tmp_path: Path) -> None:
    """The log lacks segments that were shipped; records in both parts are read once."""
    directory = shipped(built, tmp_path / "shipped")
    before = [record.value for record in built.log.records()]
    for base in (1, None):
        if base is not None:
            built.path(base, Kind.SEALED).rename(tmp_path / "away")
        for names in ([built.root.path, directory], [directory, built.root.path]):
            (place,) = find_locations([str(name) for name in names])
            assert values(place) == before
    (tmp_path / "away").rename(built.path(1, Kind.SEALED))
    first, second, third = (str(part(built, tmp_path / f"{base}", base)) for base in (1, 2, 3))
    (place,) = find_locations([second, third])
    assert values(place) == before[1:]
    (place,) = find_locations([first, third])
    with pytest.raises(Damaged, match="record 2 is missing"):
        values(place)


def test_a_record_may_begin_in_one_part_and_end_in_another(tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    built.piece("a", b"begins here, ", begins=True, ends=False)
    built.cut()
    built.piece("a", b"ends there\n", begins=False, ends=True)
    (place,) = find_locations([str(part(built, tmp_path / "one", 1)), str(part(built, tmp_path / "two", 2))])
    assert values(place) == [b"begins here, ends there"]


def test_a_log_and_a_copy_that_went_on_by_itself_are_refused(built: Built, tmp_path: Path) -> None:
    """Both have a record 3, with different contents."""
    shutil.copytree(built.root.path, tmp_path / "copy", ignore=shutil.ignore_patterns("*.sock"))
    with pytest.raises(InvalidInput, match="read twice"):
        find_locations([str(built.root.path), str(tmp_path / "copy")])
    copy = Built(tmp_path / "copy", epoch=2)
    copy.lines("a", [b"another three", b"four"])
    copy.cut()
    copy.lines("a", [b"five"])
    built.lines("a", [b"three again"])
    built.cut()
    built.lines("a", [b"x"])
    ours, theirs = part(built, tmp_path / "ours", 3), part(copy, tmp_path / "theirs", 4)
    with pytest.raises(InvalidInput, match="from 4 on"):
        find_locations([str(ours), str(theirs)])


@pytest.mark.parametrize("path", ["nowhere", "empty", "no-*"])
def test_what_is_nothing_of_ours_is_not_found(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound):
        find_locations([str(tmp_path / path)])
    with pytest.raises(NotFound):
        find_locations([])


@pytest.mark.parametrize("name", ["app[1]", "app?", "app*"])
def test_an_existing_directory_is_never_a_pattern(tmp_path: Path, name: str) -> None:
    """As a pattern, each name would match ``app1``, which is another log."""
    other, built = Built(tmp_path / "app1"), Built(tmp_path / name)
    for each in (other, built):
        each.lines("a", [b"x"])
    path = str(built.root.path)
    assert find_locations([path]) == [LogLocation(built.root, built.log_id)]
    assert list(expanded([path])) == [built.root.path]
    logs = StreamLogs([path], None, search_seconds=0)
    for _ in range(2):  # the second poll searches for new logs
        assert list(logs.poll(may_vanish=False)) == [built.log_id.hex()]
    built.crash()
    shutil.rmtree(built.root.path)
    assert list(logs.poll(may_vanish=True)) == []


@pytest.mark.parametrize(
    ("archived", "reclaimed", "hint"),
    [
        (3, 0, "leave out {archive}: {log} has records with all of these numbers"),
        (2, 0, "leave out {archive}: {log} has records with all of these numbers"),
        (
            2,
            1,
            (
                'two queries: .option("endingSequence", "1") with {archive}, '
                '.option("startingSequence", "2") with {log}; then union'
            ),
        ),
    ],
)
def test_a_log_and_its_archive_come_with_advice_that_works(
    built: Built, tmp_path: Path, archived: int, reclaimed: int, hint: str
) -> None:
    dest = tmp_path / "archive"
    archive(built, dest, size=Records(1), to=archived)
    for base in range(1, reclaimed + 1):
        built.reclaim(base)
    paths = [str(built.root.path), str(dest)]
    with pytest.raises(InvalidInput, match=f"both have records of log {built.log_id.hex()}") as refused:
        plan_query(parse_options({"paths": json.dumps(paths)}))
    assert refused.value.hint == hint.format(archive=dest, log=built.root.path)


def test_a_store_that_nothing_reaches_is_refused_in_a_line() -> None:
    for address, words, hint in [
        ("gs://lake/logs", "gcsfs", "install the package"),
        ("hdfs://lake/logs", "libhdfs|libjvm", "a directory, where the store may be mounted"),
        ("nosuch://lake/logs", "Protocol not known", "a directory, where the store may be mounted"),
    ]:
        with pytest.raises(InvalidInput, match=words) as refused:
            find_locations([address])
        assert hint in refused.value.hint
        assert "\n" not in refused.value.message
        assert len(refused.value.message) < 300
