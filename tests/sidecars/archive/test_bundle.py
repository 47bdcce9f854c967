"""A bundle is a pure function of its records, and its manifest is parsed unchanged."""

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from archives import copied, files, manifest
from damage import every_flip, every_truncation, flipped, peak_bytes
from golden.archive import FOLDER, MOMENT, log_id_of, sample_log
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import START_NS, Built
from running import TIMEOUT_SECONDS
from some_logs import STEPS, Step, build

from wald.errors import Damaged, Refused
from wald.format.batch import Buffer
from wald.format.names import ROUTE_MAX_LENGTH
from wald.format.records import Record
from wald.reading.assembler import Batch
from wald_archive.bundle import (
    BadIndex,
    Bundle,
    Bytes,
    Contents,
    Form,
    IndexEntry,
    Origin,
    Part,
    PartFacts,
    Records,
    bundle,
    bundle_batches,
    parse_index_entry,
    parts,
)
from wald_archive.codecs import BadStream, Codec, ahead, in_order
from wald_archive.ledger import Past, Run, last_recorded, past
from wald_archive.lookup import BadBundle, BundleReader
from wald_archive.manifest import BadManifest, BundleEntry, Manifest, Previous, decode_manifest, tag_files
from wald_archive.objects import BagName, parse_bag_name
from wald_archive.pack import check_lineage

MIB = 1 << 20


def made(built: Built, route: str = "a", codec: Codec = Codec.NONE) -> tuple[Bundle, bytes]:
    origin = Origin(log_id_of(built), route, "processed", "wald test", MOMENT)
    chunks: list[Buffer] = []
    facts = bundle(built.log.batches(route), origin=origin, codec=codec, after=0, sink=chunks.append)
    return facts, b"".join(chunks)


@pytest.mark.parametrize("codec", Codec)
def test_the_tar_is_the_same_whatever_the_codec(mixed: Built, codec: Codec) -> None:
    facts, stored = made(mixed, codec=codec)
    plain, tar = made(mixed)

    assert b"".join(codec.decompress([stored])) == tar
    assert (facts.tar_sha256, facts.contents, facts.bytes) == (plain.sha256, plain.contents, len(stored))
    assert sum(length for length, _ in facts.frames) == len(stored)
    assert len(tar) % 10240 == 0


def test_the_longest_route_has_a_bundle(tmp_path: Path) -> None:
    """Its names are too long for the old tar header, so they need a pax one."""
    built = Built(tmp_path / "root")
    route = "r" * ROUTE_MAX_LENGTH
    built.lines(route, [b"x"])
    facts, tar = made(built, route)
    path = tmp_path / "bundle.tar"
    path.write_bytes(tar)

    listed = subprocess.run(["tar", "-tf", path], capture_output=True, text=True, check=True)

    assert listed.stdout.splitlines()[-1] == f"{route}-{1:020d}/bundle.json"
    assert [part.count for part in BundleReader(f"{route}-{1:020d}", facts.contents, iter([tar])).parts()] == [1]
    assert len(facts.name) <= 255


def test_a_second_making_elsewhere_has_the_same_bytes(tmp_path: Path) -> None:
    """Another time zone, locale, umask, working directory, hash seed, and order of files in the log."""
    built = sample_log(tmp_path / "root")
    here = made(built)[1]
    root = tmp_path / "copy"
    root.mkdir()
    for path in sorted(built.root.path.iterdir(), reverse=True):
        copied(path, root / path.name) if path.is_dir() else (root / path.name).write_bytes(path.read_bytes())
    script = (
        "import os; os.umask(0o077); from pathlib import Path; from golden.archive import write; "
        f"write(Path({str(root)!r}), Path({str(tmp_path / 'there.tar')!r}))"
    )
    environment = os.environ | {
        "TZ": "Asia/Kolkata",
        "LC_ALL": "tr_TR.UTF-8",
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, env=environment)

    assert (tmp_path / "there.tar").read_bytes() == here
    assert files(tmp_path / "root" / "segments") == files(root / "segments")


@pytest.mark.parametrize("codec", [Codec.ZST, Codec.GZ])
def test_memory_does_not_grow_with_the_bundle(tmp_path: Path, codec: Codec) -> None:
    """Four times the records, no more memory."""
    line = os.urandom(500).replace(b"\n", b" ") + b"\n"
    peaks = []
    for times in (24, 96):
        built = Built(tmp_path / f"root-{times}", segment_max_bytes=1 << 30)
        for _ in range(times):
            built.append("a", line * 1000, 1000)
        origin = Origin(log_id_of(built), "a", "processed", "wald test", MOMENT)
        batches = built.log.batches("a")
        peaks.append(peak_bytes(partial(bundle, batches, origin=origin, codec=codec, after=0, sink=len)))

    assert peaks[1] < peaks[0] + 8 * MIB


RUN = IndexEntry("00000000000000000001.txt", 0, 8, 1, 2, START_NS, terminated=False)


def lines_of(part: Part, run: IndexEntry) -> list[bytes]:
    """The records of a run, found as its index says."""
    data = b"".join(part.data)[run.offset : run.offset + run.bytes]
    assert data.endswith(b"\n")
    return data[:-1].split(b"\n")


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, limit=st.integers(1, 200))
def test_the_indexes_lead_to_every_record(steps: list[Step], limit: int) -> None:
    """Whatever the parts, each record is where a run says, in the form that its batch has."""
    found: list[tuple[int, int, bool, bytes | str]] = []
    with tempfile.TemporaryDirectory() as folder:
        log = build(Path(folder) / "root", steps).log
        for part in parts(log.batches("a"), limit_bytes=limit):
            assert part.data_bytes <= limit or part.count == 1
            assert part.name == f"{part.first:020d}{part.form.value}"
            for run in part.runs:
                for number, line in enumerate(lines_of(part, run), start=run.first):
                    ended = run.terminated or number < run.last
                    value = line if part.form is Form.LINES else line.decode()
                    found.append((number, run.append_time_ns, ended, value))
        expected: list[tuple[int, int, bool, bytes | str]] = []
        for batch in log.batches("a"):
            for record in batch.records():
                value = record.to_json() if batch.is_columns else record.value
                expected.append((record.sequence, record.append_time_ns, record.terminated, value))

    assert found == expected


def test_another_line_is_refused() -> None:
    line = RUN.to_line()
    assert parse_index_entry(line.rstrip("\n").encode()) == RUN
    for other in [b"", b"[]", b"{}", b"\xff", b'{"part": 1}', line.replace(" ", "").encode(), line.encode()]:
        with pytest.raises(BadIndex):
            parse_index_entry(other)


def counted(record: Record) -> int:
    """Return the size of a record by its definition."""
    return len(record.value) + len(record.key or b"") + len(record.headers or b"") + 1


def naive(records: list[Record], limit: int) -> list[list[int]]:
    """Portions of at most ``limit`` bytes, one record after the other."""
    portions: list[list[int]] = []
    room = 0
    for record in records:
        if not portions or counted(record) > room:
            portions.append([])
            room = limit
        portions[-1].append(record.sequence)
        room -= counted(record)
    return portions


def sequences(portions: Iterator[Iterator[Batch]]) -> list[list[int]]:
    return [[record.sequence for batch in portion for record in batch.records()] for portion in portions]


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, limit=st.integers(1, 60))
def test_portions_are_those_of_one_record_after_the_other(steps: list[Step], limit: int) -> None:
    """By records and by bytes."""
    with tempfile.TemporaryDirectory() as folder:
        log = build(Path(folder) / "root", steps).log
        records = list(log.records("a"))

        by_bytes = sequences(bundle_batches(log.batches("a"), Bytes(limit)))
        by_records = sequences(bundle_batches(log.batches("a"), Records(limit)))

    numbers = [record.sequence for record in records]
    assert by_bytes == naive(records, limit)
    assert by_records == [numbers[start : start + limit] for start in range(0, len(numbers), limit)]


FRAMES = [b"", b"one frame\n" * 50, b"another\n", bytes(range(256)) * 30]
COMPRESSED = [Codec.ZST, Codec.GZ]


def pieces(data: bytes, length: int) -> Iterator[bytes]:
    return (data[start : start + length] for start in range(0, len(data), length))


def test_frames_come_back_however_the_file_is_read() -> None:
    for codec in Codec:
        row = b"".join(map(codec.compress, FRAMES))
        for length in [1, 7, 100_000]:
            assert b"".join(codec.decompress(pieces(row, length))) == b"".join(FRAMES)
        for content in FRAMES:
            assert codec.expand(bytes(codec.compress(content)), len(content)) == content
        if codec in COMPRESSED:
            with pytest.raises(BadStream):
                codec.expand(bytes(codec.compress(FRAMES[1])[:-1]), len(FRAMES[1]))


def test_a_row_that_ends_within_a_frame_is_refused_and_a_changed_bit_changes_no_content() -> None:
    """The zstandard package alone would silently stop early; some bits of a header say nothing about the content."""
    for codec in COMPRESSED:
        compressed = list(map(codec.compress, FRAMES[:3]))
        boundaries = {0, *accumulate(map(len, compressed))}
        for cut in every_truncation(b"".join(compressed)):
            if len(cut) not in boundaries:
                with pytest.raises(BadStream):
                    list(codec.decompress(pieces(cut, 64)))
        frame = bytes(codec.compress(FRAMES[1]))
        for bit in range(8 * len(frame)):
            try:
                content = b"".join(codec.decompress([flipped(frame, bit)]))
            except BadStream:
                continue
            assert content == FRAMES[1]


@pytest.mark.parametrize(("codec", "program"), [(Codec.ZST, ["zstd", "-dc"]), (Codec.GZ, ["gunzip", "-c"])])
def test_stock_tools_read_a_row_as_one_file(tmp_path: Path, codec: Codec, program: list[str]) -> None:
    path = tmp_path / f"row{codec.suffix}"
    path.write_bytes(b"".join(map(codec.compress, FRAMES)))

    assert subprocess.run([*program, path], capture_output=True, check=True).stdout == b"".join(FRAMES)


def test_results_come_in_order_and_few_items_are_taken_before_they_are_wanted() -> None:
    """The first item waits for the second; unwritten frames are held in memory."""
    second = threading.Event()

    def work(number: int) -> int:
        if number == 0:
            assert second.wait(TIMEOUT_SECONDS)
        elif number == 1:
            second.set()
        return number

    assert list(in_order(work, range(20))) == list(range(20))

    items = iter(range(1000))
    results = in_order(lambda number: number, items)

    assert next(results) == 0

    assert next(items) < 10
    results.close()


def test_what_is_made_ahead_comes_in_order_and_fails_as_it_would() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise BadStream("here")

    each = ahead(items())
    assert [next(each), next(each)] == [1, 2]
    with pytest.raises(BadStream, match="here"):
        next(each)


STEM = f"a-{1:020d}"
BUNDLE = next(FOLDER.rglob(f"{STEM}.tar"))
INDEX, RECORDS, ABOUT = f"batches/{1:020d}.jsonl", f"records/{1:020d}.txt", "bundle.json"

MANIFEST = decode_manifest((BUNDLE.parent.parent / "manifest.json").read_bytes())
CONTENTS = MANIFEST.entries[0].bundle.contents

Files = dict[str, bytes]


def unpacked() -> Files:
    """The files of the golden bundle, by name."""
    with tarfile.open(BUNDLE) as tar:
        return {
            member.name.removeprefix(f"{STEM}/"): file.read()
            for member in tar.getmembers()
            if (file := tar.extractfile(member))
        }


def packed(files: Files) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name if name.startswith("/") else f"{STEM}/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def read(tar: bytes, contents: Contents = CONTENTS) -> list[tuple[int, int]]:
    """First and last record of each part."""
    return [(part.first, part.last) for part in BundleReader(STEM, contents, iter([tar])).parts()]


def test_a_bundle_is_read_whoever_has_packed_it_and_no_part_of_a_tar_is_one() -> None:
    assert read(BUNDLE.read_bytes()) == read(packed(unpacked())) == [(1, 4)]

    data = BUNDLE.read_bytes()
    content = len(data.rstrip(b"\0"))
    for cut in every_truncation(data[:content]):
        if len(cut) % 64 == 0:
            with pytest.raises(BadBundle):
                read(cut)


def test_anything_else_is_refused() -> None:
    """Missing, doubled, exchanged, or from elsewhere."""
    cases: list[Callable[[Files], Files]] = [
        lambda files: files | {RECORDS: files[RECORDS] + b"\n"},
        lambda files: files | {RECORDS: files[RECORDS][:-1]},
        lambda files: files | {RECORDS: files[RECORDS].replace(b"\n", b" ", 1)},
        lambda files: files | {RECORDS: b""},
        lambda files: files | {INDEX: files[INDEX].replace(b'"count": 4', b'"count": 3')},
        lambda files: files | {INDEX: files[INDEX].replace(b'"offset": 0', b'"offset": 1')},
        lambda files: files | {INDEX: files[INDEX] * 2},
        lambda files: files | {INDEX: b"garbage\n"},
        lambda files: files | {INDEX: b""},
        lambda files: {name: data for name, data in files.items() if name != INDEX},
        lambda files: {name: data for name, data in files.items() if name != RECORDS},
        lambda files: {name: data for name, data in files.items() if name != ABOUT},
        lambda files: {ABOUT: files[ABOUT]},
        lambda files: dict(reversed(files.items())),
        lambda files: files | {"more": b""},
        lambda files: {"more": b""} | files,
        lambda files: {"/outside": b""} | files,
        lambda files: {},
    ]
    for change in cases:
        files = unpacked()
        changed = change(files)
        assert list(changed.items()) != list(files.items())

        with pytest.raises(BadBundle):
            read(packed(changed))


def test_parts_come_in_order_of_their_records() -> None:
    """Even where the manifest says otherwise."""
    files = unpacked()
    part = packed({INDEX: files[INDEX], RECORDS: files[RECORDS]}).rstrip(b"\0")
    twice = replace(CONTENTS, parts=CONTENTS.parts * 2)

    with pytest.raises(BadBundle, match="comes after record 4"):
        read(part + bytes(-len(part) % 512) + packed(files), twice)


ORIGIN = Origin("ab" * 16, "web", "processed", "wald 1", "2026-11-21T10:00:00Z")


def bundle_of(first: int, last: int, after: int, digest: str) -> Bundle:
    parts = (PartFacts(f"{first:020d}.txt", first, last, last - first + 1, 100),)
    contents = Contents(
        first, last, after, last - first + 1, 100, 1_700_000_000_000_000_000, 1_700_000_001_000_000_001, parts
    )
    return Bundle(f"web-{first:020d}.tar.gz", contents, 60, digest * 64, "c" * 64, array("Q", [0, 1]))


FIRST = BundleEntry(bundle_of(1, 250, 0, "a"), None)
SECOND = BundleEntry(bundle_of(252, 300, 250, "b"), FIRST.as_previous())
SAID = Manifest(ORIGIN, Codec.GZ, (FIRST, SECOND))


def test_a_manifest_and_the_name_of_a_bag_come_back() -> None:
    assert decode_manifest(SAID.encode()) == SAID
    name = BagName("a", 1, 250)
    assert parse_bag_name("a", str(name).removeprefix("a/")) == name
    for folder in ["1-2", "x", "", f"{1:020d}-{2:021d}", f"{1:020d}-{2:020d}x"]:
        assert parse_bag_name("a", folder) is None


def test_no_part_of_a_manifest_and_no_changed_bit_reads_as_the_same_one() -> None:
    """It is refused, or says something else."""
    for changed in every_flip(SAID.encode()):
        try:
            assert decode_manifest(changed) != SAID
        except BadManifest:
            continue

    for cut in every_truncation(SAID.encode()):
        with pytest.raises(BadManifest):
            decode_manifest(cut)


def test_a_manifest_that_wald_cannot_have_written_is_refused() -> None:
    """So nothing in it leads out of the bag."""
    cases: list[tuple[str, object]] = [
        *[("format", 2), ("route", "../etc"), ("route", 5), ("log", None), ("codec", "rar"), ("first", "1")],
        *[("bundles", []), ("bundles", None), ("count", 298)],
    ]
    of_a_bundle: list[tuple[str, object]] = [
        *[("bundle", "../../evil.tar.gz"), ("first", 1.0), ("first", -1), ("latest_ns", 1 << 80)],
        *[("sha256", "A" * 64), ("sha256", 5), ("parts", [{}]), ("previous", {"bundle": "x"})],
    ]
    for number, (key, value) in enumerate([*cases, *of_a_bundle]):
        reported = json.loads(SAID.encode())
        (reported if number < len(cases) else reported["bundles"][0])[key] = value

        with pytest.raises(BadManifest):
            decode_manifest(json.dumps(reported, indent=2).encode() + b"\n")


def test_the_page_to_read_names_the_bundles_as_they_are() -> None:
    for codec in Codec:
        page = tag_files(Manifest(ORIGIN, codec, SAID.entries))["README.txt"].decode()

        assert f"*{codec.suffix};" in page
        assert max(map(len, page.splitlines())) <= 120


LOG = "ab" * 16
BEGUN_BY = Origin(LOG, "a", "processed", "wald 1", "2026-11-21T10:00:00Z")
BEGUN = Run(BEGUN_BY, "/dest", 0, 1, 250, Records(100), Codec.GZ, Previous("before", "d" * 64))
LATER = Run(BEGUN_BY, "/dest", 250, 251, 300, Bytes(1000), Codec.ZST, None)


def archived(run: Run, last: int, **changed: object) -> dict[str, Any]:
    line = {"event": "archived", "route": "a", "group": "processed", "dest": run.dest, "bag": str(run.bag)}
    return line | {"bundle": f"a-{last}", "last": last, "sha256": "e" * 64} | changed


def judged(*entries: dict[str, Any]) -> Past:
    return past(reversed(entries), log=LOG, route="a", group="processed", dest="/dest")


def test_a_begun_run_is_done_again_as_it_was_begun_until_it_has_finished() -> None:
    """Whatever is asked for now; it is complete when its last bundle is reported, and others hold up nobody."""
    begun, ended = BEGUN.begun(at_ns=1), BEGUN.ended("finished", at_ns=2)
    assert [judged(begun), judged(LATER.begun(at_ns=1))] == [Past(BEGUN), Past(LATER)]
    assert judged(begun, archived(BEGUN, 250), ended) == Past()
    assert judged(begun, ended, LATER.begun(at_ns=3)).unfinished == LATER
    for lasts in ((), (100,), (100, 200), (100, 250)):
        found = judged(begun, *(archived(BEGUN, last) for last in lasts))
        assert found.recorded == {f"a-{last}" for last in lasts}
        assert found.complete == (250 in lasts)
    for other in ({"route": "b"}, {"group": "other"}, {"dest": "/elsewhere"}):
        assert judged(begun | other) == Past()


def test_a_line_that_cannot_be_used_is_reported() -> None:
    """Never guessed: another range would make other bundles."""
    cases: list[dict[str, Any]] = [
        {"codec": "rar"},
        {"first": None},
        {"previous": {}},
        {"records_per_bundle": None},
        {"after": "x"},
    ]
    for changed in cases:
        with pytest.raises(Damaged, match=r"archive\.jsonl: the line about bag a/0+1-0+250"):
            judged(BEGUN.begun(at_ns=1) | changed)


def test_a_run_follows_the_latest_bundle_behind_which_it_begins() -> None:
    entries = [
        archived(BEGUN, 100),
        archived(BEGUN, 250, sha256="1" * 64),
        archived(BEGUN, 250, sha256="2" * 64, dest="/elsewhere"),
        archived(BEGUN, 300),
        archived(BEGUN, 240, group="other"),
        archived(BEGUN, 245, route="b"),
    ]

    assert last_recorded(entries[::-1], route="a", group="processed", after=260) == Previous("a-250", "2" * 64)
    assert last_recorded(entries[::-1], route="a", group="processed", after=99) is None
    assert last_recorded(entries[::-1], route="a", group="other", after=250) == Previous("a-240", "e" * 64)


def test_the_line_about_a_run_says_all_that_decides_its_bytes() -> None:
    """The contract with readers of the ledger."""
    assert BEGUN.begun(at_ns=5) == {
        "event": "begun",
        "route": "a",
        "group": "processed",
        "dest": "/dest",
        "bag": "a/00000000000000000001-00000000000000000250",
        "after": 0,
        "first": 1,
        "last": 250,
        "records_per_bundle": 100,
        "bytes_per_bundle": None,
        "codec": "gz",
        "software": "wald 1",
        "archived_at": "2026-11-21T10:00:00Z",
        "previous": {"bundle": "before", "sha256": "d" * 64},
        "at": 5,
    }


class TestLineage:
    @pytest.fixture
    def bag(self) -> tuple[str, Manifest]:
        return "/dest/a/bag", manifest(log=LOG, group="processed", first=101, last=200)

    @pytest.mark.parametrize(("first", "last"), [(1, 100), (201, 300), (201, 201)])
    def test_beside_the_others_there_is_room(self, bag: tuple[str, Manifest], first: int, last: int) -> None:
        check_lineage([bag], log=LOG, root=Path("/log"), group="processed", first=first, last=last)

    @pytest.mark.parametrize(("first", "last"), [(1, 101), (150, 160), (200, 300), (1, 300)])
    def test_records_are_not_archived_twice_to_one_place(
        self, bag: tuple[str, Manifest], first: int, last: int
    ) -> None:
        with pytest.raises(Refused, match=r"/dest/a/bag: .*already has records 101 to 200"):
            check_lineage([bag], log=LOG, root=Path("/log"), group="processed", first=first, last=last)
