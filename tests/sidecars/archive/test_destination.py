"""A file is written once, from its beginning to its end; an existing file is kept, continued or refused."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from archives import archive, output_of, refusal_of, wald_archive
from damage import every_truncation
from faults import FailingDisk, TracingDisk
from logs import Built

from wald.errors import DiskFailure, InvalidInput, Refused
from wald.files.disk import Disk
from wald_archive.bundle import Records
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

    def test_says_when_a_file_is_not_there(self, destination: Destination) -> None:
        with pytest.raises(FileNotFoundError):
            list(destination.read("bag/file"))
        with pytest.raises(FileNotFoundError):
            destination.length("bag/file")
        assert not destination.listing("none").files
        assert not destination.listing("none").folders

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

        with pytest.raises(KeyboardInterrupt), local.writing("bag/large") as add:
            interrupt(add)
        assert 0 < local.length("bag/large") <= WRITE_BYTES

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
    def test_a_path_and_a_file_address_are_a_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert open_destination("some/where", Disk()).address == str(tmp_path / "some/where")
        assert open_destination(f"file://{tmp_path}", Disk()).address == str(tmp_path)
        with pytest.raises(InvalidInput, match="nonsense://place"):
            open_destination("nonsense://place", Disk())

    def test_an_error_of_the_store_names_the_object(self, objects: ObjectStore) -> None:
        """Whatever its class was."""
        write(objects, DATA)

        with pytest.raises(DiskFailure, match=r"memory://.*/bag/file/inside: ."), objects.writing("bag/file/inside"):
            pass


SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("http://%s:%d" % server.get_host_and_port(), flush=True)
sys.stdin.read()
server.stop()
"""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server in a separate process, so that this one imports nothing of it."""
    line = [sys.executable, "-W", "ignore", "-c", SERVER]
    with subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.kill()


@pytest.fixture
def env(endpoint: str) -> dict[str, str]:
    """Environment of a user of an S3 emulator; the key opens nothing."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
    }


@pytest.fixture
def bucket(env: dict[str, str]) -> str:
    """An address with a new bucket."""
    name = f"bucket-{uuid4()}"
    store(name, "files.mkdir(place)", env)
    return f"s3://{name}/cold"


def store(address: str, script: str, env: dict[str, str]) -> str:
    """Change objects without wald; return the output."""
    setting = f"import s3fs; files = s3fs.S3FileSystem(); place = {address!r}; {script}"
    line = [sys.executable, "-c", setting]
    return subprocess.run(line, env=os.environ | env, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.slow
def test_a_bag_goes_there_is_proven_and_comes_back(mixed: Built, bucket: str, env: dict[str, str]) -> None:
    """All three commands; a changed object is found, one that is there already is never replaced."""
    root = mixed.root.path
    output_of("a", "--root", root, "--dest", bucket, "--records-per-bundle", 7, env=env)
    assert output_of("verify", bucket, "--root", root, env=env) == b"OK: 2 bundles proven, 0 info, 0 errors\n"
    restored = output_of("restore", bucket, "a", env=env)
    assert restored == b"".join(bytes(batch.raw()) for batch in mixed.log.batches("a"))

    mixed.log.set_cursor("a", 0, rewind=True)
    (mixed.root.ledger / "archive.jsonl").unlink()
    code, message, _ = refusal_of("a", "--root", root, "--dest", bucket, "--records-per-bundle", 7, env=env)
    assert (code, "already has records 1 to 17" in message) == (9, True)

    changed = store(
        bucket, "path = files.find(place)[0]; files.pipe_file(path, files.cat_file(path) + b'#'); print(path)", env
    )
    done = wald_archive("verify", bucket, env=env)
    assert done.returncode == 4
    assert changed.strip().removeprefix(bucket.removeprefix("s3://")).encode() in done.stdout


@pytest.mark.slow
def test_a_run_that_was_interrupted_keeps_the_objects_it_meets(mixed: Built, bucket: str, env: dict[str, str]) -> None:
    """Killed after the first bundle, in effect: the others and the end of the ledger are taken away."""
    root = mixed.root.path
    output_of("a", "--root", root, "--dest", bucket, "--records-per-bundle", 7, env=env)
    remove = "[files.rm_file(path) for path in files.find(place) if '0001.tar' not in path]; print(files.find(place))"
    store(bucket, remove, env)
    ledger = mixed.root.ledger / "archive.jsonl"
    ledger.write_bytes(ledger.read_bytes().splitlines(keepends=True)[0])
    mixed.root.cursor("a", "processed").unlink()

    done = wald_archive("a", "--root", root, "--dest", bucket, env=env)

    assert (done.returncode, b"continuing the interrupted run" in done.stderr) == (0, True)
    assert output_of("verify", bucket, "--root", root, env=env) == b"OK: 2 bundles proven, 0 info, 0 errors\n"


def test_another_object_of_the_name_is_refused(mixed: Built, bucket: str, env: dict[str, str]) -> None:
    key = f"a/{1:020d}-{17:020d}/data/a-{1:020d}.tar.zst"
    store(f"{bucket}/{key}", "files.pipe_file(place, b'another')", env)

    code, message, _ = refusal_of("a", "--root", mixed.root.path, "--dest", bucket, env=env)

    assert (code, message.startswith(f"{bucket}/{key}: offset 0: ")) == (9, True)
    assert store(f"{bucket}/{key}", "print(files.cat_file(place))", env) == "b'another'\n"


def test_a_bucket_that_is_not_there_is_reported(mixed: Built, env: dict[str, str]) -> None:
    code, message, hint = refusal_of("a", "--root", mixed.root.path, "--dest", "s3://no-such-bucket", env=env)

    assert (code, "bucket does not exist" in message) == (7, True)
    assert message.startswith("s3://no-such-bucket/a/")
    assert "to continue" in hint


def test_without_s3fs_it_says_what_to_install(mixed: Built) -> None:
    script = "import sys; sys.modules['s3fs'] = None; from wald_archive.command import main; main()"
    line = [sys.executable, "-c", script, "a", "--root", str(mixed.root.path), "--dest", "s3://bucket"]

    done = subprocess.run(line, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert done.stderr.endswith("  hint: in a clone of wald: pip install '.[s3]'\n")


def test_any_other_store_will_do(mixed: Built, objects: ObjectStore) -> None:
    """Two runs, as into a directory."""
    archive(mixed, objects.address, size=Records(5))
    mixed.lines("a", [b"more"])
    archive(mixed, objects.address, size=Records(5))

    assert len(objects.listing("a").folders) == 2


def test_an_upload_that_breaks_off_leaves_no_object(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is discarded; in S3 the parts are given up with it."""
    discarded = []
    monkeypatch.setattr(
        "fsspec.implementations.memory.MemoryFile.discard", lambda file: discarded.append(file.path), raising=True
    )

    with pytest.raises(KeyboardInterrupt), objects.writing("a/file") as write:
        interrupt(write)

    assert [Path(path).name for path in discarded] == ["file"]
