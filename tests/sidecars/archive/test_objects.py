"""An archive in an object store: S3 as moto speaks it on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from archives import archive, output_of, refusal_of, wald_archive
from logs import Built

from wald.files.disk import Disk
from wald_archive.codecs import Codec
from wald_archive.objects import Destination, Write, open_destination
from wald_archive.parts import Records

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
    script = f"import s3fs; s3fs.S3FileSystem().mkdir({name!r})"
    subprocess.run([sys.executable, "-c", script], env=os.environ | env, check=True)
    return f"s3://{name}/cold"


def store(address: str, script: str, env: dict[str, str]) -> str:
    """Change objects without wald; return the output."""
    setting = f"import s3fs; files = s3fs.S3FileSystem(); place = {address!r}; "
    done = subprocess.run(
        [sys.executable, "-c", setting + script], env=os.environ | env, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


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


@pytest.fixture
def objects() -> Destination:
    """A store in memory."""
    return open_destination(f"memory://{uuid4()}", Disk())


@pytest.mark.parametrize("codec", Codec)
def test_any_other_store_will_do(mixed: Built, objects: Destination, codec: Codec) -> None:
    """Two runs, as into a directory."""
    archive(mixed, objects.address, size=Records(5), codec=codec)
    mixed.lines("a", [b"more"])
    archive(mixed, objects.address, size=Records(5), codec=codec)

    assert len(objects.listing("a").folders) == 2


def test_an_upload_that_breaks_off_leaves_no_object(objects: Destination, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is discarded; in S3 the parts are given up with it."""
    discarded = []
    monkeypatch.setattr(
        "fsspec.implementations.memory.MemoryFile.discard", lambda file: discarded.append(file.path), raising=True
    )

    with pytest.raises(KeyboardInterrupt), objects.writing("a/file") as write:
        interrupt(write)

    assert [Path(path).name for path in discarded] == ["file"]


def interrupt(write: Write) -> None:
    """Half a file, and Ctrl-C."""
    write(b"half")
    raise KeyboardInterrupt
