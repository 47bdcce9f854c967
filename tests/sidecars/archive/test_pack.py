"""A run makes a bag that strangers can check, tells the ledger, and moves the cursor last."""

import json
import os
import subprocess
import sys
from pathlib import Path

import programs
import pytest
from archives import SOFTWARE, archive, bags, errors, files, findings, ledger_lines, restored
from contents import text
from damage import flip_bit
from faults import TracingDisk
from golden.archive import FOLDER, make, sample_log
from logs import Built

from wald.checking.checker import Level
from wald.errors import Damaged, NotFound, Refused
from wald.format.names import Kind
from wald.retention.cursors import CursorState
from wald_archive import pack
from wald_archive.bundle import Bytes, Records
from wald_archive.codecs import Codec
from wald_archive.ledger import Request
from wald_archive.pack import due_bytes, spark_pays

BAGIT = Path(sys.executable).with_name("bagit.py")


def unpacked(bag: Path, pattern: str) -> bytes:
    """Return the records that stock tar extracts from the bundles of a bag."""
    out = b""
    for bundle in sorted(path for path in (bag / "data").iterdir() if path.suffix != ".sha256"):
        out += subprocess.run(["tar", "-xOf", bundle, "--wildcards", pattern], capture_output=True, check=True).stdout
    return out


@pytest.mark.parametrize("codec", Codec)
def test_stock_tools_accept_a_bag_and_give_the_records_back(built: Built, dest: Path, codec: Codec) -> None:
    """sha256sum, tar with a decompressor, and the BagIt validator of the Library of Congress."""
    if codec is Codec.ZST:
        programs.program("zstd")
    for start in range(0, 1000, 100):
        built.lines("a", [b"line %d" % number for number in range(start, start + 100)])
    archive(built, dest, size=Records(250), codec=codec)
    (bag,) = bags(dest)

    subprocess.run(["sha256sum", "-c", "manifest-sha256.txt", "tagmanifest-sha256.txt"], cwd=bag, check=True)
    for beside in (bag / "data").glob("*.sha256"):
        subprocess.run(["sha256sum", "-c", beside.name], cwd=bag / "data", check=True)
    subprocess.run([sys.executable, BAGIT, "--validate", "--quiet", bag], check=True)
    assert unpacked(bag, "*/records/*.txt") == text(built.root.path, "a")
    assert errors(dest) == []


def test_the_page_in_the_bag_says_how_and_is_right(mixed: Built, dest: Path) -> None:
    """Its commands, as a shell runs them."""
    programs.program("zstd")
    archive(mixed, dest, codec=Codec.ZST)
    (bag,) = bags(dest)
    commands = [line.strip() for line in (bag / "README.txt").read_text().splitlines() if line.startswith("    ")][:4]

    done = subprocess.run(["bash", "-euc", "\n".join(commands)], cwd=bag, capture_output=True, check=True)

    values = [line for line in done.stdout.split(b"\n") if b": OK" not in line]
    assert b"line 3" in values
    assert b'"value"' in values


def test_the_ledger_tells_of_everything_the_cursor_moves_and_where_finds_a_record(mixed: Built, dest: Path) -> None:
    archive(mixed, dest, size=Records(7))

    lines = ledger_lines(mixed.root)
    assert [line["event"] for line in lines] == ["begun", "archived", "archived", "finished"]
    assert [(line["first"], line["last"], line["after"], line["count"]) for line in lines[1:3]] == [
        (1, 7, 0, 7),
        (8, 17, 7, 7),
    ]
    assert [line["runs"] for line in lines[1:3]] == [[0, 7], [0, 3, 1, 2, 2, 2]]
    assert [line["parts"] for line in lines[1:3]] == [
        [[1, f"a-{1:020d}/records/{1:020d}.txt"]],
        [[at, f"a-{8:020d}/records/{at:020d}.{form}"] for at, form in ((8, "txt"), (12, "jsonl"), (16, "txt"))],
    ]
    bag = f"a/{1:020d}-{17:020d}"
    assert [line["path"] for line in lines[1:3]] == [f"{bag}/data/a-{first:020d}.tar" for first in (1, 8)]
    assert {line["dest"] for line in lines} == {str(dest)}
    assert mixed.log.cursor("a").sequence == 17

    found = mixed.log.where(13)

    assert found.bundle is not None
    assert Path(found.bundle).is_file()
    listed = subprocess.run(["tar", "-tf", found.bundle], capture_output=True, text=True, check=True).stdout
    assert found.member in listed.splitlines()
    assert mixed.log.where(11).bundle is None  # of another route


@pytest.mark.parametrize("ledger", ["kept", "lost"])
def test_the_second_run_follows_the_first(mixed: Built, dest: Path, ledger: str) -> None:
    """The bags at the destination tell the same as the ledger."""
    archive(mixed, dest)
    mixed.lines("a", [b"more"])
    if ledger == "lost":
        (mixed.root.ledger / "archive.jsonl").unlink()
    archive(mixed, dest)

    _, second = bags(dest)
    reported = json.loads((second / "manifest.json").read_bytes())
    assert reported["after"] == 17
    assert reported["bundles"][0]["previous"]["bundle"] == f"a-{1:020d}.tar"
    assert errors(dest, root=mixed.root if ledger == "kept" else None) == []
    assert restored(dest) == text(mixed.root.path, "a").replace(b"no newlinemore", b"no newline\nmore")


def test_an_open_record_waits_for_its_end_and_an_empty_route_makes_no_bag(built: Built, dest: Path) -> None:
    """The record goes into the next bag, whole."""
    (built.root.routes / "a").mkdir()

    assert archive(built, dest) == []
    assert not dest.exists()

    built.lines("a", [b"first"])
    built.piece("a", b"a long ", begins=True, ends=False)
    (packed,) = archive(built, dest)
    assert packed.run.last == 1

    built.piece("a", b"record\n", begins=False, ends=True)
    archive(built, dest)

    assert restored(dest) == b"first\na long record\n"
    assert built.log.cursor("a").sequence == 2


def test_what_was_reclaimed_behind_the_cursor_is_no_error(built: Built, dest: Path) -> None:
    built.lines("a", [b"gone"])
    built.cut()
    built.lines("a", [b"here"])
    built.cut()
    built.seal()
    built.log.set_cursor("a", 1)
    built.lines("a", [b"and here"])
    built.reclaim(1)

    archive(built, dest)

    assert restored(dest, first=2) == b"here\nand here\n"


def test_a_hole_at_the_end_is_named_as_a_whole(built: Built, dest: Path) -> None:
    """The last record alone is read first; the message is about all that is missing."""
    built.lines("a", [b"read"])
    built.log.set_cursor("a", 1)
    built.lines("a", [b"gone"] * 99)
    built.cut()
    built.lines("b", [b"other"])
    built.seal()
    built.reclaim(1)

    with pytest.raises(NotFound, match=r"removed records \d+ to 100: up to 99 records of route a") as refused:
        archive(built, dest)
    assert refused.value.hint.startswith(f"wald --root {built.root.path} cursor set a 101 --group processed ")


def test_the_command_that_skips_a_hole_keeps_a_long_line_that_has_not_ended(built: Built, dest: Path) -> None:
    for value in (b"1", b"2"):
        built.lines("a", [value])
        built.cut()
    built.piece("a", b"begins ", begins=True, ends=False)
    built.cut()
    built.seal()
    built.path(2, Kind.SEALED).unlink()
    built.log.set_cursor("a", 1, "archive")
    with pytest.raises(Damaged) as raised:
        archive(built, dest, "a", group="archive")
    assert "cursor set a 2 --group archive skips it" in raised.value.hint


def test_a_lost_front_is_told_to_a_new_group_too(built: Built, dest: Path) -> None:
    """No ledger proves that it was reclaimed, so records may be lost."""
    built.lines("a", [b"lost"])
    built.cut()
    built.lines("a", [b"here"])
    built.cut()
    built.seal()
    built.path(1, Kind.SEALED).unlink()

    with pytest.raises(Damaged, match="record 1 is missing") as refused:
        archive(built, dest)

    assert "cursor set a 1 --group processed" in refused.value.hint
    assert not list(dest.rglob("*.tar"))
    built.log.set_cursor("a", 1)
    (packed,) = archive(built, dest)
    assert (packed.run.after, packed.run.first) == (1, 2)


def test_damage_is_an_error_before_anything_is_acknowledged_and_can_be_skipped(built: Built, dest: Path) -> None:
    for line in (b"one", b"two", b"three"):
        built.lines("a", [line * 40])
    flip_bit(built.path(1, Kind.RAW), b"two")

    for _ in range(2):
        with pytest.raises(Damaged, match="nothing was acknowledged"):
            archive(built, dest)

    assert built.log.cursor("a").state is CursorState.ABSENT
    assert [line["event"] for line in ledger_lines(built.root)] == ["begun", "abandoned"] * 2
    (front,) = archive(built, dest, to=1)
    built.log.set_cursor("a", 2)
    (behind,) = archive(built, dest)

    assert [(run.run.first, run.run.last) for run in (front, behind)] == [(1, 1), (3, 3)]
    assert errors(dest, root=built.root) == []


def test_a_record_that_is_missing_in_the_middle_is_an_error_whoever_has_processed_it(built: Built, dest: Path) -> None:
    """Without a cursor the group pins nothing; records that were reclaimed must be reported."""
    for route in ("a", "a", "a"):
        built.lines(route, [b"x"] * 3)
        built.cut()
    built.seal()
    built.log.set_cursor("a", 9, "reader")
    built.reclaim(4)

    with pytest.raises(NotFound, match=r"RECLAIM has removed records 4 to 6: .*; nothing was acknowledged"):
        archive(built, dest, group="cold")
    assert [line["event"] for line in ledger_lines(built.root)] == ["begun", "abandoned"]
    assert archive(built, dest, group="cold", to=3)[0].run.last == 3


def test_records_behind_a_limit_are_left_for_later(mixed: Built, dest: Path) -> None:
    (first,) = archive(mixed, dest, to=9)
    (second,) = archive(mixed, dest)

    assert (first.run.last, second.run.after, second.run.last) == (9, 9, 17)
    assert archive(mixed, dest, to=9) == []
    assert errors(dest, root=mixed.root) == []


@pytest.mark.parametrize("content", [b"garbage\n", b"99999\n"])
def test_a_cursor_that_cannot_be_trusted_is_an_error(mixed: Built, dest: Path, content: bytes) -> None:
    """Never a beginning at 0; once there is a bag, the hint names the number of its last record."""
    mixed.root.cursor("a", "processed").write_bytes(content)
    with pytest.raises(Damaged, match="it is unknown which records have been processed"):
        archive(mixed, dest)
    assert not dest.exists()

    mixed.root.cursor("a", "processed").unlink()
    archive(mixed, dest)
    mixed.root.cursor("a", "processed").write_bytes(content)
    with pytest.raises(Damaged) as refused:
        archive(mixed, dest)
    assert refused.value.hint.endswith("cursor set a 17 --rewind --group processed")


def test_a_place_refuses_another_log_another_group_and_records_that_it_has(
    mixed: Built, dest: Path, tmp_path: Path
) -> None:
    """Reported before the run begins, so that it does not block the next one."""
    archive(mixed, dest)
    other = Built(tmp_path / "other")
    other.lines("a", [b"x"])
    before = files(dest)

    with pytest.raises(Refused, match=f"belongs to log {mixed.log_id.hex()}"):
        archive(other, dest)

    assert files(dest) == before
    assert ledger_lines(other.root) == []

    with pytest.raises(Refused, match="group processed already has a bag of these records here"):
        archive(mixed, dest, group="second")
    assert [line["event"] for line in ledger_lines(mixed.root)] == ["begun", "archived", "finished"]
    archive(mixed, dest.with_name("elsewhere"), group="second")

    mixed.log.set_cursor("a", 5, rewind=True)

    with pytest.raises(Refused, match="already has records 1 to 17"):
        archive(mixed, dest)

    assert files(dest) == before


def test_another_file_of_the_same_name_is_refused_and_left(mixed: Built, dest: Path) -> None:
    bag = dest / "a" / f"{1:020d}-{17:020d}"
    (bag / "data").mkdir(parents=True)
    path = bag / "data" / f"a-{1:020d}.tar"
    path.write_bytes(b"something else")

    with pytest.raises(Refused, match=rf"{path.name}: offset 0: .*not overwritten"):
        archive(mixed, dest)

    assert path.read_bytes() == b"something else"
    assert mixed.log.cursor("a").state is CursorState.ABSENT


def test_a_destination_that_does_not_give_back_what_it_got_acknowledges_nothing(mixed: Built, dest: Path) -> None:
    """Found by reading back."""

    class Harmful(TracingDisk):
        def sync(self, descriptor: int) -> None:
            super().sync(descriptor)
            if self.steps[-1][1].endswith(".tar"):
                os.pwrite(descriptor, b"#", 600)

    with pytest.raises(Damaged, match=r"a-0+1\.tar: read back, it differs from what was written"):
        archive(mixed, dest, disk=Harmful())

    assert mixed.log.cursor("a").state is CursorState.ABSENT
    assert [line["event"] for line in ledger_lines(mixed.root)] == ["begun"]


def test_each_step_is_durable_before_the_next(mixed: Built, dest: Path) -> None:
    """Ledger, bundles, tag files, directories, ledger, cursor, ledger."""
    disk = TracingDisk()

    archive(mixed, dest, disk=disk, size=Bytes(50))

    written = [name for step, name in disk.steps if step == "write"]
    assert written[0] == written[-1] == "archive.jsonl"
    assert written[1:5] == [f"a-{1:020d}.tar", f"a-{1:020d}.tar.sha256", f"a-{8:020d}.tar", f"a-{8:020d}.tar.sha256"]
    assert written[-9:-3] == [
        "manifest.json",
        "README.txt",
        "bagit.txt",
        "bag-info.txt",
        "manifest-sha256.txt",
        "tagmanifest-sha256.txt",
    ]
    assert written[-3] == "archive.jsonl"
    assert written[-2].startswith("processed.cursor")
    for number, (step, name) in enumerate(disk.steps):
        if step == "write":
            assert ("sync", name) in disk.steps[number + 1 :]
    settled = [number for number, (step, _) in enumerate(disk.steps) if step == "sync_directory"]
    reported = max(
        number for number, (step, name) in enumerate(disk.steps) if (step, name) == ("rename", "processed.cursor")
    )
    assert len([number for number in settled if number < reported]) >= 4


def test_the_golden_bag_is_made_again_is_good_and_gives_its_records_back(tmp_path: Path) -> None:
    make(tmp_path / "dest", tmp_path / "root")

    assert files(tmp_path / "dest") == files(FOLDER)

    assert errors(FOLDER) == []
    assert [found.level for found in findings(FOLDER)] == [Level.OK] * 3

    built = sample_log(tmp_path / "sample")

    assert restored(FOLDER) == text(built.root.path, "a") + b"\n"
    lines = "".join(record.to_json() + "\n" for record in built.log.records("a"))
    assert restored(FOLDER, as_json=True) == lines.encode()


def request(route: str = "a", to: int | None = None) -> Request:
    return Request(route, "processed", Records(10), Codec.ZST, SOFTWARE, to)


@pytest.fixture
def three(built: Built) -> Built:
    """Two sealed segments with 1000 bytes of a in each, records 1 to 10 and 21 to 30, and 100 bytes in the active."""
    for _ in range(2):
        built.lines("a", [b"x" * 99] * 10)
        built.lines("b", [b"y" * 9] * 10)
        built.cut()
    built.seal()
    built.lines("a", [b"x" * 99])
    return built


def test_sealed_segments_tell_the_bytes_of_a_route(three: Built) -> None:
    """The estimate has all records after the cursor, and the whole segment of the cursor; damage counts nothing."""
    active = three.writer.position
    assert due_bytes(three.log, request()) == 2000 + active
    assert due_bytes(three.log, request(to=20)) == 1000
    assert due_bytes(three.log, request("b")) == 200 + active
    assert due_bytes(three.log, request("none")) == 0
    for cursor, sealed in ((5, 2000), (10, 1000)):
        three.log.set_cursor("a", cursor)
        assert due_bytes(three.log, request()) == sealed + active
    three.log.set_cursor("a", 41)
    assert due_bytes(three.log, request()) <= active
    three.log.set_cursor("a", 0, rewind=True)
    three.path(1, Kind.SEALED).write_bytes(b"")
    assert due_bytes(three.log, request()) == 1000 + active


def test_a_cut_segment_counts_with_its_file(built: Built) -> None:
    built.lines("a", [b"x" * 99] * 10)
    built.cut()
    assert due_bytes(built.log, request()) == built.path(1, Kind.RAW).stat().st_size + built.writer.position


def test_spark_pays_with_idle_cores_and_enough_to_do(
    three: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = due_bytes(three.log, request()) + due_bytes(three.log, request("b"))
    for cores in (2, 5):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        for enough in (there - 1, there):
            monkeypatch.setattr(pack, "SPARK_PAYS_BYTES", enough)
            assert spark_pays(three.log, [request(), request("b")]) == (cores > 4 and enough < there)
