"""The disk: every write is complete or raises, and replacing a file shows the old or the new, never a mixture."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from full_disk import fill, small_file_system
from running import run
from tracing import strace

from wald.files.disk import Disk, free_bytes
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


@pytest.mark.parametrize(
    "buffers",
    [
        [],
        [b""],
        [b"one"],
        [b"", b"one", b"", b"two", b""],
        [memoryview(b"view"), bytearray(b"array"), b"bytes"],
        [b"%d," % i for i in range(3000)],
        [b""] * 2500 + [b"x"],
    ],
    ids=["none", "empty", "one", "with-empty", "kinds", "more-than-one-call", "more-empty-than-one-call"],
)
@pytest.mark.parametrize("at_once", [1 << 30, 7, 1], ids=["all-at-once", "seven-bytes", "byte-by-byte"])
def test_all_buffers_are_written_however_few_bytes_a_call_takes(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffers: list[Buffer], at_once: int
) -> None:
    real = os.pwritev

    def short(descriptor: int, given: Sequence[Buffer], offset: int) -> int:
        assert len(given) <= 1024
        return real(descriptor, [b"".join(given)[:at_once]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    descriptor = disk.create(tmp_path / "file")

    assert disk.write(descriptor, buffers, 5) == len(b"".join(buffers))
    disk.close(descriptor)
    if any(buffers):
        assert (tmp_path / "file").read_bytes() == bytes(5) + b"".join(buffers)


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


def test_allocating_more_than_there_is_raises(disk: Disk, tmp_path: Path) -> None:
    descriptor = disk.create(tmp_path / "file")
    with pytest.raises(OSError, match=r"No space|too large"):
        disk.allocate(descriptor, 1 << 62)
    disk.close(descriptor)


def test_copy_puts_a_file_inside_another(disk: Disk, tmp_path: Path) -> None:
    source, target = disk.create(tmp_path / "source"), disk.create(tmp_path / "target")
    content = os.urandom(3 << 20)
    disk.write(source, [content], 0)
    disk.write(target, [b"before", b"." * 10], 0)
    disk.copy(target, source, len(content) - 3, 6)

    assert (tmp_path / "target").read_bytes() == b"before" + content[:-3]
    with pytest.raises(OSError, match="shrank"):
        disk.copy(target, source, len(content) + 1, 6)
    disk.close(source)
    disk.close(target)


STEPS = ["create", "write", "sync", "rename"]


@pytest.mark.parametrize("failing", STEPS)
def test_a_replace_that_fails_leaves_the_old_content_and_nothing_else(tmp_path: Path, failing: str) -> None:
    class Failing(Disk):
        def create(self, path: Path) -> int:
            self._step("create")
            return super().create(path)

        def write(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
            self._step("write")
            return super().write(descriptor, buffers, offset)

        def sync(self, descriptor: int) -> None:
            self._step("sync")
            super().sync(descriptor)

        def rename(self, source: Path, target: Path) -> None:
            self._step("rename")
            super().rename(source, target)

        def _step(self, name: str) -> None:
            if name == failing:
                raise OSError(28, "No space left on device")

    (tmp_path / "file").write_bytes(b"old")
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space"):
        Failing().replace(tmp_path / "file", b"new")

    assert (tmp_path / "file").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
    assert len(os.listdir("/proc/self/fd")) == descriptors


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
    steps: list[str] = []

    class Watching(Disk):
        def sync(self, descriptor: int) -> None:
            steps.append("sync")

        def rename(self, source: Path, target: Path) -> None:
            steps.append("rename")
            super().rename(source, target)

        def sync_directory(self, path: Path) -> None:
            steps.append(f"sync {path.name}")

    Watching().replace(tmp_path / "file", b"new")
    assert steps == ["sync", "rename", f"sync {tmp_path.name}"]


def test_without_renameat2_a_rename_replaces_no_file(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wald.files.disk._libc", object)  # an old C library
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


def test_a_lock_is_for_one_and_ends_with_its_descriptor(disk: Disk, tmp_path: Path) -> None:
    first, second = disk.open_append(tmp_path / "lock"), disk.open_append(tmp_path / "lock")

    assert disk.lock(first)
    assert not disk.lock(second)
    disk.close(first)
    assert disk.lock(second)
    disk.close(second)


def test_free_bytes_is_what_df_calls_available(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    assert abs(free_bytes(tmp_path) - status.f_bavail * status.f_frsize) < 1 << 28
    assert free_bytes(tmp_path) > 0


def test_a_full_disk_is_reported_with_the_file_that_found_no_room(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk", 1 << 20) as disk:
        fill(disk / "filler")
        with pytest.raises(OSError, match="No space left") as caught:
            Disk().replace(disk / "file", bytes(1 << 20))
        assert caught.value.filename == f"{disk}/file"
        assert [path.name for path in disk.iterdir()] == ["filler"]


@pytest.mark.parametrize(
    ("call", "step"),
    [
        ("/pwritev", "disk.write(descriptor, [b'x'], 0)"),
        ("pwrite64", "disk.update(descriptor, b'x', 0)"),
        ("sendfile", "disk.copy(descriptor, source, 1, 0)"),
        ("fallocate", "disk.allocate(descriptor, 1)"),
        ("fdatasync", "disk.sync(descriptor)"),
        ("ftruncate", "disk.truncate(descriptor, 0)"),
        ("close", "disk.close(descriptor)"),
        ("fsync", "disk.sync_directory(path)"),
    ],
)
def test_the_error_of_a_call_that_takes_a_descriptor_names_the_file(tmp_path: Path, call: str, step: str) -> None:
    script = f"""
import pathlib
from wald.files.disk import Disk
disk, path = Disk(), pathlib.Path({os.fspath(tmp_path)!r})
descriptor, source = disk.create(path / "file"), disk.create(path / "source")
try:
    {step}
except OSError as error:
    print(error.errno, error.filename)
"""
    named = tmp_path if call == "fsync" else tmp_path / "file"
    injected = ["-P", os.fspath(named), "-e", f"trace={call}", "-e", f"inject={call}:error=EIO"]
    done = run([strace(), "-qq", "-o", os.devnull, *injected, sys.executable, "-c", script])

    assert (done.stdout.decode().strip(), done.stderr) == (f"5 {named}", b"")


def test_a_source_that_is_too_short_is_named(disk: Disk, tmp_path: Path) -> None:
    target, source = disk.create(tmp_path / "target"), disk.create(tmp_path / "source")
    with pytest.raises(OSError, match="shrank") as caught:
        disk.copy(target, source, 1, 0)
    assert caught.value.filename == f"{tmp_path}/source"
    disk.close(target)
    disk.close(source)
