"""A file is written once, from its beginning to its end; an existing file is kept, continued or refused."""

from __future__ import annotations

import errno
from pathlib import Path
from uuid import uuid4

import pytest
from damage import every_truncation
from faults import FailingDisk, TracingDisk

from wald.errors import DiskFailure, InvalidInput, Refused
from wald.files.disk import Disk
from wald_archive.objects import WRITE_BYTES, Destination, Directory, ObjectStore, Write, open_destination

DATA = b"what belongs there"


def interrupt(write: Write) -> None:
    """A beginning, and Ctrl-C."""
    write(bytes(WRITE_BYTES))
    raise KeyboardInterrupt


def write(destination: Destination, data: bytes, *, piece: int = 5) -> None:
    with destination.writing("bag/file") as add:
        for start in range(0, len(data), piece):
            add(data[start : start + piece])


@pytest.fixture
def local(tmp_path: Path) -> Directory:
    return Directory(tmp_path / "dest", Disk())


@pytest.fixture
def objects() -> ObjectStore:
    return ObjectStore(f"memory://{uuid4()}")


@pytest.fixture(params=["local", "objects"])
def destination(request: pytest.FixtureRequest) -> Destination:
    found: Destination = request.getfixturevalue(request.param)
    return found


class TestEvery:
    """Whatever kind it is."""

    def test_gives_back_what_was_written(self, destination: Destination) -> None:
        write(destination, DATA)
        destination.sync_folder("bag")

        assert b"".join(destination.read("bag/file")) == DATA
        assert destination.length("bag/file") == len(DATA)
        assert destination.listing("").folders == ["bag"]
        assert (destination.listing("bag").folders, destination.listing("bag").files) == ([], ["file"])

    def test_has_nothing_in_a_folder_that_is_not_there(self, destination: Destination) -> None:
        assert not destination.listing("none").files
        assert not destination.listing("none").folders

    def test_says_when_a_file_is_not_there(self, destination: Destination) -> None:
        with pytest.raises(FileNotFoundError):
            list(destination.read("bag/file"))
        with pytest.raises(FileNotFoundError):
            destination.length("bag/file")

    def test_keeps_the_same_file(self, destination: Destination) -> None:
        write(destination, DATA)
        write(destination, DATA, piece=1)

        assert b"".join(destination.read("bag/file")) == DATA

    def test_refuses_another_byte_and_names_it(self, destination: Destination) -> None:
        write(destination, DATA)
        for offset in range(len(DATA)):
            other = DATA[:offset] + b"#" + DATA[offset + 1 :]

            with pytest.raises(Refused, match=rf"bag/file: offset {offset}: .*not overwritten"):
                write(destination, other)
            assert b"".join(destination.read("bag/file")) == DATA

    def test_refuses_a_shorter_file(self, destination: Destination) -> None:
        write(destination, DATA)
        for length in range(len(DATA)):
            with pytest.raises(Refused, match=rf"offset {length}:"):
                write(destination, DATA[:length])
            assert b"".join(destination.read("bag/file")) == DATA


class TestDirectory:
    def test_continues_a_torn_file(self, local: Directory) -> None:
        for torn in every_truncation(DATA):
            path = Path(local.full_name("bag/file"))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(torn)

            write(local, DATA)

            assert path.read_bytes() == DATA

    def test_writes_large_pieces_once_and_in_order_and_syncs(self, tmp_path: Path) -> None:
        """Suitable for a tape: no rename, no truncation, no second write."""
        disk = TracingDisk()
        destination = Directory(tmp_path / "new" / "dest", disk)

        write(destination, bytes(4 * WRITE_BYTES), piece=1000)
        destination.sync_folder("bag")

        steps = [name for name, _ in disk.steps]
        assert steps[:6] == ["create", "write", "write", "write", "write", "sync"]
        settled = [("sync_directory", name) for name in ("bag", "dest", "new", tmp_path.name)]
        assert disk.steps[6:10] == settled
        assert set(steps[10:]) <= {"sync_directory"}
        assert disk.descriptors == set()

    def test_a_file_that_was_not_finished_may_be_continued(self, local: Directory) -> None:
        """Any interruption leaves the beginning of the file."""
        with pytest.raises(KeyboardInterrupt), local.writing("bag/file") as add:
            interrupt(add)

        write(local, bytes(WRITE_BYTES) + DATA)

        assert local.length("bag/file") == WRITE_BYTES + len(DATA)

    def test_a_full_disk_is_reported(self, tmp_path: Path) -> None:
        disk = FailingDisk(1, part=0.5)
        destination = Directory(tmp_path / "dest", disk)

        with pytest.raises(OSError, match="No space") as failed:
            write(destination, DATA)

        assert failed.value.errno == errno.ENOSPC
        assert disk.descriptors == set()

    def test_a_link_is_no_folder(self, local: Directory, tmp_path: Path) -> None:
        """Nothing outside the archive is looked at."""
        write(local, DATA)
        Path(local.full_name("link")).symlink_to(tmp_path)

        assert local.listing("").folders == ["bag"]
        assert local.listing("").files == ["link"]


class TestAddresses:
    def test_a_path_is_absolute(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

        assert open_destination("some/where", Disk()).address == str(tmp_path / "some/where")

    def test_a_file_address_is_a_directory(self, tmp_path: Path) -> None:
        assert open_destination(f"file://{tmp_path}", Disk()).address == str(tmp_path)

    def test_an_address_that_nothing_knows_is_refused(self) -> None:
        with pytest.raises(InvalidInput, match="nonsense://place"):
            open_destination("nonsense://place", Disk())

    def test_an_error_of_the_store_names_the_object(self, objects: ObjectStore) -> None:
        """Whatever its class was."""
        write(objects, DATA)

        with pytest.raises(DiskFailure, match=r"memory://.*/bag/file/inside: ."), objects.writing("bag/file/inside"):
            pass
