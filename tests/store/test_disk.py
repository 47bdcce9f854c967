"""The disk: every write is complete or raises, and replacing a file shows the old or the new, never a mixture."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
from faults import FailingDisk, TracingDisk, until_it_survives
from full_disk import fill, small_file_system
from running import run
from tracing import strace

from wald.files.disk import Disk
from wald.format.batch import Buffer


@pytest.fixture
def disk() -> Disk:
    return Disk()


def test_create_never_touches_an_old_file(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError):
        disk.create(path)
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize(("error", "answer"), [("EOPNOTSUPP", "False 0 0"), ("ENOSPC", "28"), ("EINTR:when=1", "True")])
def test_room_is_reserved_by_the_file_system_or_not_at_all(tmp_path: Path, error: str, answer: str) -> None:
    """The C library would write into every block if the file system cannot."""
    script = f"""
import os, pathlib
from wald.files.disk import Disk
descriptor = Disk().create(pathlib.Path({str(tmp_path / "file")!r}))
try:
    done = Disk().allocate(descriptor, 1 << 20)
    status = os.fstat(descriptor)
    print(done, *[status.st_size, status.st_blocks] if not done else ())
except OSError as error:
    print(error.errno)
"""
    injected = ["-e", "trace=fallocate", "-e", f"inject=fallocate:error={error}"]
    done = run([strace(), "-qq", "-o", os.devnull, *injected, sys.executable, "-c", script])
    assert (done.stdout.decode().strip(), done.stderr) == (answer, b"")


def test_all_buffers_are_written_however_few_bytes_a_call_takes(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, at_once = os.pwritev, 0

    def short(descriptor: int, given: Sequence[Buffer], offset: int) -> int:
        assert len(given) <= 1024
        return real(descriptor, [b"".join(given)[:at_once]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    several: list[Sequence[Buffer]] = [[], [b""], [b"one"], [b"", b"one", b"", b"two", b""], [b""] * 2500 + [b"x"]]
    several += [[memoryview(b"view"), bytearray(b"array"), b"bytes"], [b"%d," % i for i in range(3000)]]
    for number, (at_once, buffers) in enumerate(product([1 << 30, 7, 1], several)):  # noqa: B007
        path = tmp_path / str(number)
        descriptor = disk.create(path)
        assert disk.write(descriptor, buffers, 5) == len(b"".join(buffers))
        disk.close(descriptor)
        assert path.read_bytes() == (bytes(5) + b"".join(buffers) if any(buffers) else b"")


def test_a_write_that_the_disk_takes_half_of_raises(disk: Disk, tmp_path: Path) -> None:
    """Not a short count: the caller must not think the rest is there."""
    descriptor = disk.create(tmp_path / "file")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            disk.write(descriptor, [b"x" * 600, b"y" * 600], 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
        disk.close(descriptor)


def test_copy_puts_a_file_inside_another(disk: Disk, tmp_path: Path) -> None:
    source, target = disk.create(tmp_path / "source"), disk.create(tmp_path / "target")
    content = os.urandom(3 << 20)
    disk.write(source, [content], 0)
    disk.write(target, [b"before", b"." * 10], 0)
    disk.copy(target, source, len(content) - 3, 6)

    assert (tmp_path / "target").read_bytes() == b"before" + content[:-3]
    with pytest.raises(OSError, match="shrank") as caught:
        disk.copy(target, source, len(content) + 1, 6)
    assert caught.value.filename == f"{tmp_path}/source"
    disk.close(source)
    disk.close(target)


def test_a_replace_that_fails_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    descriptors = len(os.listdir("/proc/self/fd"))
    for steps, disk in enumerate(until_it_survives(FailingDisk)):
        with suppress(OSError):
            disk.replace(path, b"new")
            break
        content = b"old" if steps < 4 else b"new"  # after create, write, sync and rename
        assert (path.read_bytes(), os.listdir(tmp_path)) == (content, ["file"])
        assert len(os.listdir("/proc/self/fd")) == descriptors
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("name", ["file/new", "x" * 250], ids=["below-a-file", "too-long-a-name"])
def test_a_replace_that_cannot_even_begin_names_the_file_that_was_to_be_replaced(
    disk: Disk, tmp_path: Path, name: str
) -> None:
    """The cause may also prevent the removal of the temporary file, whose name the user does not know."""
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(OSError, match=r"Not a directory|File name too long") as caught:
        disk.replace(tmp_path / name, b"new")

    assert caught.value.filename == f"{tmp_path}/{name}"


def test_replace_syncs_the_content_before_the_name_and_the_name_before_it_returns(tmp_path: Path) -> None:
    """Rename before sync would leave an empty file after a power cut."""
    disk = TracingDisk()
    disk.replace(tmp_path / "file", b"new")
    assert [name for name, _ in disk.steps][-3:] == ["sync", "rename", "sync_directory"]
    assert disk.steps[-1] == ("sync_directory", tmp_path.name)


@pytest.mark.parametrize("is_old", [False, True], ids=["renameat2", "an old C library"])
def test_a_rename_to_a_free_name_replaces_no_file(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_old: bool
) -> None:
    if is_old:
        monkeypatch.setattr("wald.files.disk._libc", object)
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    with pytest.raises(FileExistsError):
        disk.rename_to_free(old, new)
    assert (old.read_bytes(), new.read_bytes()) == (b"old", b"new")

    disk.rename_to_free(old, tmp_path / "free")
    assert not old.exists()
    assert (tmp_path / "free").read_bytes() == b"old"
    (tmp_path / "directory").mkdir()
    disk.rename_to_free(tmp_path / "directory", tmp_path / "moved")
    assert (tmp_path / "moved").is_dir()
    assert not (tmp_path / "directory").exists()


def test_without_renameat2_an_old_name_that_cannot_be_removed_is_reported_as_such(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlink(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(path))

    monkeypatch.setattr("wald.files.disk._libc", object)
    monkeypatch.setattr(os, "unlink", unlink)
    old = tmp_path / "old"
    old.write_bytes(b"old")

    with pytest.raises(OSError, match=f"Input/output error: '{old}'"):
        disk.rename_to_free(old, tmp_path / "new")


def test_a_full_disk_is_reported_with_the_file_that_found_no_room(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk", 1 << 20) as disk:
        fill(disk / "filler")
        with pytest.raises(OSError, match="No space left") as caught:
            Disk().replace(disk / "file", bytes(1 << 20))
        assert caught.value.filename == f"{disk}/file"
        assert [path.name for path in disk.iterdir()] == ["filler"]


def test_the_error_of_a_call_that_takes_a_descriptor_names_the_file(tmp_path: Path) -> None:
    script = f"""
import pathlib
from wald.files.disk import Disk
disk, path = Disk(), pathlib.Path({os.fspath(tmp_path)!r})
descriptor, source = disk.create(path / "file"), disk.create(path / "source")
disk.write(source, [b"x"], 0)
for step in (
    lambda: disk.write(descriptor, [b"x"], 0),
    lambda: disk.update(descriptor, b"x", 0),
    lambda: disk.copy(descriptor, source, 1, 0),
    lambda: disk.allocate(descriptor, 1),
    lambda: disk.sync(descriptor),
    lambda: disk.truncate(descriptor, 0),
    lambda: disk.close(descriptor),
    lambda: disk.sync_directory(path / "apart"),
):
    try:
        step()
    except OSError as error:
        print(error.errno, error.filename)
"""
    (tmp_path / "apart").mkdir()
    calls = "/pwritev,pwrite64,sendfile,fallocate,fdatasync,ftruncate,close"
    for name, failing, count in (("file", calls, 7), ("apart", "fsync", 1)):
        injected = ["-P", os.fspath(tmp_path / name), "-e", f"trace={failing}", "-e", f"inject={failing}:error=EIO"]
        done = run([strace(), "-qq", "-o", os.devnull, *injected, sys.executable, "-c", script])
        assert (done.stdout.decode().splitlines(), done.stderr) == ([f"5 {tmp_path}/{name}"] * count, b"")
        for each in ("file", "source"):
            (tmp_path / each).unlink()
