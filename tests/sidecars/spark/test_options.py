"""Options are validated before any data is read, and paths by their contents."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import fsspec
import programs
import pytest
from archives import archive
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import Built
from running import refused

from wald.errors import Damaged, InvalidInput, NotFound
from wald.format.names import SEQUENCE_MAX, Kind, parse_segment_name
from wald.setting_types import MIB
from wald_archive.bundle import Records
from wald_spark.audit.audits import expanded
from wald_spark.checkpoint import BadOffsets, Offsets, Position, decode_offsets, encode_offsets, is_offsets
from wald_spark.locations import ArchiveLocation, Location, LogLocation, Shipped, find_locations
from wald_spark.options import (
    PARTITION_BYTES,
    STREAM_OPTIONS,
    Limits,
    Options,
    StreamOptions,
    parse_options,
    parse_stream_options,
)
from wald_spark.plan import Range, pieces_of
from wald_spark.query import plan_query
from wald_spark.stream import StreamLogs


def parsed(**given: str) -> Options:
    return parse_options({"path": "/log", **given})


def test_without_options_everything_is_read_and_nothing_may_be_missing() -> None:
    options = parsed()
    assert (options.paths, options.routes, options.first, options.from_ns) == (("/log",), None, None, None)
    assert options.active
    assert not options.tolerance.damage
    assert not options.tolerance.loss
    assert options.partition_bytes == PARTITION_BYTES


def test_routes_are_named_one_by_one_or_in_a_list() -> None:
    cases: list[tuple[dict[str, str], set[str]]] = [
        ({"route": "a"}, {"a"}),
        ({"routes": "a, b"}, {"a", "b"}),
        ({"route": "a", "routes": "b,c"}, {"a", "b", "c"}),
    ]
    for value, routes in cases:
        assert parsed(**value).routes == frozenset(routes)


def test_a_time_without_a_zone_is_in_the_one_that_was_named() -> None:
    """ISO 8601 or milliseconds."""
    for value, zone, nanoseconds in [
        ("1970-01-01T00:00:01", "UTC", 1_000_000_000),
        ("1970-01-02", "UTC", 86_400_000_000_000),
        ("19700102", "UTC", 86_400_000_000_000),
        ("1970-01-01T00:00:01", "America/New_York", 18_001_000_000_000),
        ("1970-01-01T00:00:01Z", "America/New_York", 1_000_000_000),
        ("1700000000123", "America/New_York", 1_700_000_000_123_000_000),
        ("1970-01-01T02:00:01", "+02:00", 1_000_000_000),
        ("1969-12-31T18:30:01", "UTC-5:30", 1_000_000_000),
        ("1970-01-01T02:00:01", "GMT+2", 1_000_000_000),
    ]:
        assert parsed(startingTimestamp=value, timeZone=zone).from_ns == nanoseconds

    for value, nanoseconds in [
        ("1970-01-01T00:00:01Z", 1_000_000_000),
        ("1970-01-01T01:00:01.5+01:00", 1_500_000_000),
        ("1700000000123", 1_700_000_000_123_000_000),
    ]:
        assert parsed(startingTimestamp=value).from_ns == nanoseconds
        assert parsed(endingTimestamp=value).until_ns == nanoseconds


def test_a_table_is_refused_with_the_view_that_works() -> None:
    """Spark passes a table's options when the table is created, but not when it is read."""
    with pytest.raises(InvalidInput, match="a table cannot be of format wald") as refused:
        parsed(owner="me", provider="wald", location="file:/log")
    assert "CREATE TEMPORARY VIEW" in refused.value.hint


def test_modes_sizes_and_paths() -> None:
    """Names are case-insensitive, and Spark adds options of its own."""
    options = parsed(mode="permissive", FAILONDATALOSS="FALSE", maxBytesPerPartition="8MiB", includeActive="false")
    assert options.tolerance.damage
    assert options.tolerance.loss
    assert options.partition_bytes == 8 << 20
    assert not options.active
    assert not options.tolerance.partial
    assert parsed(partial="TRUE").tolerance.partial
    assert (parsed(STARTINGSEQUENCE="7").first, parsed(startingSequence="7", endingsequence="9").last) == (7, 9)
    assert parsed(damagePath="file:///tmp/damage").tolerance.report == "/tmp/damage"
    assert parse_options({"paths": '["/a", "/b,c"]'}).paths == ("/a", "/b,c")
    assert parse_options({"path": "/log", "spark.some.thing": "1"}).paths == ("/log",)


def test_what_cannot_be_right_is_refused_with_its_name() -> None:
    for value, words in [
        ({"startingSequnce": "1"}, "unknown option 'startingsequnce'"),
        ({"startingSequence": "0"}, "startingSequence must be"),
        ({"startingSequence": "-1"}, "startingSequence must be"),
        ({"endingSequence": "1.5"}, "endingSequence must be"),
        ({"startingTimestamp": "1700000000"}, "startingTimestamp must be a time, or milliseconds"),
        ({"startingSequence": "9", "endingSequence": "8"}, "9 to 8 is empty"),
        ({"startingTimestamp": "2026-11-21Z", "endingTimestamp": "2026-11-21Z"}, "startingTimestamp must be a time"),
        ({"startingTimestamp": "2026-11-21T00Z", "endingTimestamp": "2026-11-21T00Z"}, "is not after"),
        ({"startingTimestamp": "2026-11-21", "timeZone": "Mars/Olympus"}, "timeZone must be the name"),
        ({"startingTimestamp": "2026-11-21", "timeZone": "../etc"}, "timeZone must be the name"),
        ({"startingTimestamp": "2026-11-21", "timeZone": "+24:00"}, "timeZone must be the name"),
        ({"damagePath": "s3://lake/damage"}, "s3://lake/damage: a URL, but a directory is needed"),
        ({"startingTimestamp": "tomorrow"}, "startingTimestamp must be a time"),
        # The source does not know the session's time zone; assuming UTC returned twice the rows in New York.
        ({"startingTimestamp": "1970-01-01T00:00:01"}, "names no time zone"),
        ({"startingTimestamp": "1970-01-02"}, "names no time zone"),
        ({"partial": "some"}, "partial must be"),
        ({"endingTimestamp": "-5"}, "endingTimestamp must be a time"),
        ({"route": "../x"}, "x"),
        ({"routes": "a,,b"}, ""),
        ({"routes": ""}, ""),
        ({"mode": "DROPMALFORMED"}, "mode must be"),
        ({"includeActive": "yes"}, "includeActive must be"),
        ({"failOnDataLoss": "1"}, "failOnDataLoss must be"),
        ({"maxBytesPerPartition": "many"}, "maxBytesPerPartition must be"),
        ({"maxBytesPerPartition": "1"}, "maxBytesPerPartition must be"),
        ({"maxValueBytes": "3GiB"}, "maxValueBytes must be"),
        ({"paths": "/a"}, "paths must be"),
        ({"paths": "[1]"}, "paths must be"),
    ]:
        with pytest.raises(InvalidInput) as refused:
            parsed(**value)
        assert words in refused.value.message
        assert refused.value.hint


def test_options_of_streams_and_of_kafka_lead_to_those_of_queries() -> None:
    for name, hint in [
        ("startingSequnce", "did you mean startingSequence?"),
        ("endingOffsets", "endingSequence"),
        ("endingOffsets", "availableNow=True"),
        ("startingOffsets", "startingSequence"),
        ("maxRecordsPerTrigger", "readStream"),
    ]:
        with pytest.raises(InvalidInput, match=f"unknown option '{name.lower()}'") as refused:
            parsed(**{name: "latest"})
        assert hint in refused.value.hint


LOG = "0123456789abcdef" * 2
AS_UUID = "01234567-89ab-cdef-0123-456789abcdef"


def parse(**given: str) -> StreamOptions:
    return parse_stream_options({name.lower(): value for name, value in given.items()})


def test_a_stream_begins_where_its_options_say() -> None:
    assert parse() == parse(startingOffsets="earliest") == StreamOptions("earliest", {}, Limits())
    assert parse(startingOffsets="Latest").starting == "latest"
    assert parse(startingOffsets=f'{{"{LOG}": 251}}').first == {LOG: 251}
    assert parse(startingOffsets=f'{{"{AS_UUID}": 1}}').first == {LOG: 1}  # spelled as in log.json
    assert parse(maxRecordsPerTrigger="500", maxBytesPerTrigger="64MiB").limits == Limits(500, 64 * MIB)


def test_what_a_stream_cannot_have_is_refused() -> None:
    for name, value in [
        ("startingOffsets", "newest"),
        ("startingOffsets", "251"),
        ("startingOffsets", "[1]"),
        ("startingOffsets", '{"me": 251}'),
        ("startingOffsets", f'{{"{LOG}": 0}}'),
        ("startingOffsets", f'{{"{LOG}": "latest"}}'),
        ("startingOffsets", f'{{"{LOG}": 1.5}}'),
        ("maxRecordsPerTrigger", "0"),
        ("maxRecordsPerTrigger", "many"),
        ("maxBytesPerTrigger", "0"),
        ("maxBytesPerTrigger", "1 parsec"),
    ]:
        with pytest.raises(InvalidInput, match=name) as caught:
            parse(**{name: value})
        assert name in caught.value.hint
        assert name in STREAM_OPTIONS

    for name in ["startingSequence", "endingTimestamp", "includeActive"]:
        with pytest.raises(InvalidInput, match=f"a stream has no {name}"):
            parse(**{name: "1"})


WHOLE = encode_offsets(Offsets({LOG: Position(3, 7)}, frozenset(["a"])))
STARTS = st.just((0, "")) | st.tuples(st.integers(1, 1 << 32), st.text(max_size=3))
POSITIONS = st.builds(
    lambda one, other, start: Position(min(one, other), max(one, other), *start),
    st.integers(0, SEQUENCE_MAX),
    st.integers(0, SEQUENCE_MAX),
    STARTS,
)
LOGS = st.dictionaries(st.binary(min_size=16, max_size=16).map(bytes.hex), POSITIONS, max_size=4)
ROUTES = st.none() | st.frozensets(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True), max_size=3)


@settings(max_examples=50, deadline=None)
@given(offsets=st.builds(Offsets, LOGS, ROUTES))
def test_offsets_come_back_from_text(offsets: Offsets) -> None:
    assert decode_offsets(json.loads(json.dumps(encode_offsets(offsets)))) == offsets


def test_equal_offsets_are_equal_as_text() -> None:
    """Spark compares the text: a stream that has not moved must not look as if it had."""
    one = Offsets({"00" * 16: Position(0, 1), LOG: Position(3, 7)}, frozenset("abc"))
    other = Offsets({LOG: Position(3, 7), "00" * 16: Position(0, 1)}, frozenset("cba"))
    assert json.dumps(encode_offsets(one)) == json.dumps(encode_offsets(other))


def test_impossible_offsets_are_refused() -> None:
    cases: list[tuple[dict[str, object], str]] = [
        ({"version": 2}, "version 2"),
        ({"version": True, "logs": []}, "same logs"),
        ({"logs": {}}, "same logs"),
        ({"logs": {LOG: 2}}, "cannot be at 2 after 3"),
        ({"logs": {LOG: -1}, "began": {LOG: -1}}, "not a sequence"),
        ({"logs": {LOG: "7"}}, "not a sequence"),
        ({"logs": {LOG: True}}, "not a sequence"),
        ({"logs": {LOG: SEQUENCE_MAX + 1}}, "not a sequence"),
        ({"logs": {"me": 7}, "began": {"me": 3}}, "log 'me'"),
        ({"starts": {"me": [1, "x"]}}, "other logs"),
        ({"starts": {LOG: [1]}}, "not a start"),
        ({"starts": {LOG: [-1, "x"]}}, "not a sequence"),
        ({"routes": "a"}, "not a list of routes"),
        ({"routes": ["../a"]}, "not a list of routes"),
        ({"routes": [1]}, "not a list of routes"),
    ]
    for change, words in cases:
        with pytest.raises(BadOffsets, match=words):
            decode_offsets(WHOLE | change)


def test_offsets_of_other_sources_are_refused() -> None:
    cases: list[object] = [None, 7, [], "{}", {}, {"logOffset": 0}, {"version": 1, "logs": {}, "routes": None}]
    for content in cases:
        assert not is_offsets(content)
        with pytest.raises(BadOffsets):
            decode_offsets(content)
    assert is_offsets(WHOLE | {"version": 2, "more": 1})


COMMANDS = {
    "export": ("--root", "--out"),
    "compact": ("--root", "--out"),
    "audit": ("--root",),
}


def command(name: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that never reaches Spark."""
    line = [sys.executable, "-m", f"wald_spark.{name}", *words]
    env = {name: value for name, value in os.environ.items() if name != "WALD_ROOT"}
    return subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name, options in COMMANDS.items() for option in options]
)
def test_a_url_of_something_else_is_refused_and_makes_nothing(tmp_path: Path, name: str, option: str) -> None:
    here = tmp_path / "here"
    here.mkdir()
    given = {option: str(tmp_path / option.strip("-")) for option in COMMANDS[name]} | {option: "s3://lake/tables"}
    Built(tmp_path / "root")
    done = command(name, *(word for pair in given.items() for word in pair), cwd=here)

    assert done.returncode == InvalidInput.exit_code
    assert "s3://lake/tables: a URL, but a directory is needed" in done.stderr
    assert list(here.iterdir()) == []
    assert not (tmp_path / "out" / "_wald").exists()


@pytest.mark.parametrize("name", ["export", "compact"])
def test_a_file_url_is_a_path(tmp_path: Path, name: str) -> None:
    """An empty log gives the job nothing to do, so no Spark is needed."""
    root = Built(tmp_path / "root").root.path
    done = command(name, "--root", f"file://{root}", "--out", f"file://{tmp_path}/out", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "nothing to" in done.stdout
    assert (tmp_path / "out" / "_wald").is_dir()
    assert not (tmp_path / "file:").exists()


def test_an_archive_that_is_to_be_audited_has_to_be_there(tmp_path: Path) -> None:
    root = Built(tmp_path / "root").root.path
    done = command("audit", "--root", str(root), "--archive", str(tmp_path / "nothing"), cwd=tmp_path)

    assert done.returncode == NotFound.exit_code
    assert "no bags" in done.stderr


PROGRAMS = ["export", "compact", "audit"]
PACKAGES = ["pyspark", "pyarrow", "numpy", "pandas"]


def without(package: str, program: str, *arguments: object) -> subprocess.CompletedProcess[bytes]:
    """Run a program in a Python that cannot import ``package``."""
    script = f"import sys; sys.modules[{package!r}] = None; from wald_spark.{program}.command import main; main()"
    line = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(line, capture_output=True, check=False, timeout=300)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_missing_package_is_named_with_the_extra_that_has_it(tmp_path: Path, program: str, package: str) -> None:
    if program == "audit":
        programs.program("java")
    built = Built(tmp_path / "log")
    built.lines("a", [b"one"])
    out = ("--out", tmp_path / "out") if program != "audit" else ()
    code, message, hint = refused(without(package, program, "--root", built.root.path, *out))

    assert (code, hint) == (3, "in a clone of wald: pip install '.[spark]'")
    assert f"there is no {package}" in message
    assert not (tmp_path / "out").exists()


def test_help_needs_no_package() -> None:
    for program in PROGRAMS:
        assert without("pyspark", program, "--help").returncode == 0


SCRIPT = Path(__file__).parents[3] / "scripts" / "java"


def found_with(says: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run the script with a Java that prints this, and a PATH without other programs, so that it installs nothing."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    program.chmod(0o755)
    env = {"JAVA_HOME": os.fspath(home), "PATH": os.fspath(home)}
    return subprocess.run([sys.executable, SCRIPT], env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("says", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "21" 2023-09-19 LTS', 21),
        ('openjdk version "26-ea" 2026-03-17', 26),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "25.0.1" 2025-10-21', 25),
    ],
)
def test_the_java_of_java_home_comes_first(tmp_path: Path, says: str, version: int) -> None:
    """JAVA_HOME wins over any other installation."""
    done = found_with(says, tmp_path / "jdk")
    assert (done.returncode, done.stdout) == (0, f"Java {version} in {tmp_path / 'jdk'}\n")


@pytest.mark.parametrize("says", ['java version "1.8.0_392"', 'openjdk version "11.0.2" 2019-01-15', "no Java at all"])
def test_one_that_is_too_old_is_passed_over(tmp_path: Path, says: str) -> None:
    """The script chooses another Java or names the package to install; it succeeds either way."""
    done = found_with(says, tmp_path / "jdk")
    assert done.returncode == 0
    assert str(tmp_path / "jdk") not in done.stdout
    assert done.stdout.startswith("Java ") or "apt install default-jre-headless" in done.stderr


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
