"""``segments/`` on a separate file system, as docs/files.md recommends: replaced, unmounted, smaller or larger."""

import errno
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from asking import stat
from contents import values
from crashed import newest
from logs import Built
from mounting import MIB, mounted
from running import Client, Daemon, Start, eventually, wald

from wald import open as open_log
from wald.errors import Damaged, DiskFailure, NotFound, Refused, Unavailable
from wald.files.layout import Root
from wald.files.listing import list_segments
from wald.format.names import Kind

ROUTE = "a"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """A file system outside of the root."""
    with mounted(tmp_path / "store", "-t", "tmpfs", "-o", "size=96m", "tmpfs") as path:
        yield path


@pytest.fixture
def segments(root: Path, store: Path) -> Iterator[Path]:
    """The directory of the segments, on which ``store`` is mounted."""
    assert wald("init", "--root", root).returncode == 0
    assert wald("route", "add", ROUTE, "--root", root).returncode == 0
    mount(store, root / "segments")
    try:
        yield root / "segments"
    finally:
        subprocess.run(["umount", "--lazy", root / "segments"], check=False, capture_output=True)


def mount(store: Path, at: Path) -> None:
    subprocess.run(["mount", "--bind", store, at], check=True)


def unmount(at: Path) -> None:
    subprocess.run(["umount", "--lazy", at], check=True)


def publish(daemon: Daemon, *lines: bytes) -> list[str]:
    with Client(daemon.socket_path) as client:
        return [client.ask(b"PUB %b %d\n%b\n" % (ROUTE.encode(), len(line) + 1, line)) for line in lines]


def a_file(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"a stranger")


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("replaced_by", [a_file, a_directory])
def test_a_replaced_active_segment_is_put_back_and_the_other_file_is_kept(
    segments: Path, root: Path, start: Start, replaced_by: Callable[[Path], None]
) -> None:
    daemon = start()
    assert publish(daemon, b"x") == ["OK 1 1"]
    path = newest(root)
    replaced_by(path)
    assert publish(daemon, b"y") == ["OK 2 2"]
    daemon.kill()
    daemon.start_again()

    assert values(root) == [b"x", b"y"]
    (kept,) = [each for each in segments.iterdir() if each.name.startswith(f"{path.name}-")]
    assert f'"quarantined": "{kept}"' in daemon.log
    assert (kept.read_bytes() == b"a stranger") if replaced_by is a_file else (kept.is_dir())


def test_a_start_moves_an_unreadable_segment_aside(segments: Path, root: Path, start: Start) -> None:
    daemon = start()
    assert publish(daemon, b"x") == ["OK 1 1"]
    assert daemon.ask("CUT").startswith("OK")
    eventually(lambda: list_segments(Root(root)).segments[0].kind is Kind.SEALED)
    daemon.kill()
    noise = random.Random(1).randbytes(5000)
    path = newest(root)
    path.write_bytes(noise)
    daemon.start_again()

    assert publish(daemon, b"y")[0].startswith("OK")
    assert values(root) == [b"x", b"y"]
    assert noise in [each.read_bytes() for each in segments.iterdir() if each.name.startswith(f"{path.name}.")]


def test_nothing_is_acknowledged_while_it_is_unmounted(segments: Path, root: Path, store: Path, start: Start) -> None:
    daemon = start()
    assert publish(daemon, b"x") == ["OK 1 1"]
    assert daemon.ask("CUT").startswith("OK")
    assert publish(daemon, b"y") == ["OK 2 2"]
    unmount(segments)
    assert not publish(daemon, b"z")[0].startswith("OK")
    assert daemon.wait() == DiskFailure.exit_code
    assert f"findmnt -T {segments}" in daemon.log
    assert list(segments.iterdir()) == []

    mount(store, segments)
    daemon.start_again()
    assert values(root) == [b"x", b"y"]
    assert publish(daemon, b"z") == ["OK 3 3"]


def test_the_daemon_continues_if_it_is_mounted_again_soon(
    segments: Path, root: Path, store: Path, start: Start
) -> None:
    daemon = start()
    assert publish(daemon, b"x") == ["OK 1 1"]
    os.kill(daemon.process.pid, signal.SIGSTOP)
    unmount(segments)
    mount(store, segments)
    os.kill(daemon.process.pid, signal.SIGCONT)

    assert publish(daemon, b"y") == ["OK 2 2"]
    assert daemon.ask("CUT").startswith("OK")
    assert publish(daemon, b"z") == ["OK 3 3"]
    assert daemon.stop() == 0
    assert values(root) == [b"x", b"y", b"z"]


def test_another_directory_in_its_place_takes_nothing(root: Path, start: Start) -> None:
    daemon = start()
    daemon.ask(f"ROUTE ADD {ROUTE}")
    assert publish(daemon, b"x") == ["OK 1 1"]
    os.kill(daemon.process.pid, signal.SIGSTOP)
    (root / "segments").rename(root / "away")
    (root / "segments").mkdir()
    os.kill(daemon.process.pid, signal.SIGCONT)
    assert not publish(daemon, b"y")[0].startswith("OK")
    assert daemon.wait() == DiskFailure.exit_code
    assert list((root / "segments").iterdir()) == []
    (root / "segments").rmdir()
    (root / "away").rename(root / "segments")
    daemon.start_again()
    assert values(root) == [b"x"]


def test_no_start_begins_a_log_on_a_bare_mount_point(segments: Path, root: Path, store: Path, start: Start) -> None:
    daemon = start()
    assert publish(daemon, b"x") == ["OK 1 1"]
    assert daemon.stop() == 0
    unmount(segments)
    refused = wald("run", "--root", root)
    assert refused.returncode == Damaged.exit_code
    assert f"findmnt -T {segments}".encode() in refused.stderr
    assert list(segments.iterdir()) == []

    mount(store, segments)
    daemon.start_again()
    assert publish(daemon, b"y") == ["OK 2 2"]


def test_commands_name_the_mount_and_no_way_to_skip_records_while_it_is_unmounted(root: Path) -> None:
    built = Built(root)
    built.lines("a", [b"1", b"2"])
    built.crash()
    (root / "segments").rename(root / "away")
    (root / "segments").mkdir()
    for words, code in [
        ("read a --group g --commit", Damaged.exit_code),
        ("read a", Damaged.exit_code),
        ("where 2", NotFound.exit_code),
        ("status", Unavailable.exit_code),
        ("verify", Damaged.exit_code),
        ("repair", Refused.exit_code),
    ]:
        done = wald(*words.split(), "--root", root)
        said = done.stdout + done.stderr
        assert done.returncode == code, said
        assert f"findmnt -T {root / 'segments'}".encode() in said
        assert b"cursor set" not in said
    (root / "segments").rmdir()
    (root / "away").rename(root / "segments")
    assert [record.value for record in open_log(root).records("a", group="g")] == [b"1", b"2"]


@pytest.mark.usefixtures("unsound")
def test_a_log_without_segments_starts_after_a_repair_has_given_them_up(root: Path, start: Start) -> None:
    daemon = start()
    daemon.ask(f"ROUTE ADD {ROUTE}")
    assert publish(daemon, b"x") == ["OK 1 1"]
    assert daemon.stop() == 0
    for path in (root / "segments").iterdir():
        path.unlink()
    assert wald("run", "--root", root).returncode == Damaged.exit_code
    assert wald("repair", "--accept-loss", "--root", root).returncode == 0
    daemon.start_again()
    assert publish(daemon, b"y") == ["OK 2 2"]


def test_the_room_is_that_of_the_segments_where_the_root_is_small(tmp_path: Path, start: Start) -> None:
    with ExitStack() as mounts:
        root = mounts.enter_context(mounted(tmp_path / "log", "-t", "tmpfs", "-o", "size=2m", "tmpfs"))
        assert wald("init", "--root", root).returncode == 0
        mounts.enter_context(mounted(root / "segments", "-t", "tmpfs", "-o", "size=64m", "tmpfs"))
        daemon = start(segment_max_bytes="1MiB", free_space_min="8MiB")
        daemon.ask(f"ROUTE ADD {ROUTE}")
        assert publish(daemon, b"x") == ["OK 1 1"]
        with Client(daemon.socket_path) as client:  # more than the root could hold
            assert client.ask(b"PUB a %d\n%b\n" % ((6 * MIB) + 1, bytes(6 * MIB))).startswith("OK")
        assert stat(daemon)["free_bytes"] > 32 * MIB
        status = wald("status", "--root", root)
        assert b"2.0 MiB" not in status.stdout
        assert daemon.stop() == 0


@pytest.mark.usefixtures("unsound")
def test_the_reserve_is_that_of_the_segments_where_the_root_is_large(tmp_path: Path, root: Path, start: Start) -> None:
    assert wald("init", "--root", root).returncode == 0
    with mounted(root / "segments", "-t", "tmpfs", "-o", "size=24m", "tmpfs") as segments:
        daemon = start(segment_max_bytes="1MiB", free_space_min="4MiB", on_full="reject")
        daemon.ask(f"ROUTE ADD {ROUTE}")
        noise = random.Random(2).randbytes(100 << 10).replace(b"\n", b"-")
        answers = [""]
        with Client(daemon.socket_path) as client:
            while not (answers[-1].startswith("ERR") and "full" in answers[-1]):
                answers.append(client.ask(b"PUB a %d\n%b\n" % (len(noise) + 1, noise)))
        free = os.statvfs(segments)
        assert free.f_bavail * free.f_frsize >= 4 * MIB
        assert daemon.ask("PING").startswith("OK")
        eventually(lambda: stat(daemon)["waits_to_seal"] == 0)
        assert f"df -h {segments}" in daemon.log or "wald-reclaim" in daemon.log
        assert daemon.stop() == 0


STATVFS_FAILS = """
import os
real = os.statvfs
def statvfs(path):
    if os.path.exists({flag!r}):
        raise OSError({number}, os.strerror({number}), os.fspath(path))
    return real(path)
os.statvfs = statvfs
"""


def test_a_file_system_that_does_not_give_its_free_space_ends_the_daemon_with_words(
    root: Path, start: Start, tmp_path: Path
) -> None:
    number = errno.ESTALE
    flag = tmp_path / "flag"
    (tmp_path / "sitecustomize.py").write_text(STATVFS_FAILS.format(flag=str(flag), number=number))
    daemon = start(env={"PYTHONPATH": str(tmp_path)}, anew=True)
    flag.touch()
    assert daemon.wait() == DiskFailure.exit_code
    assert "Traceback" not in daemon.log
    assert f"{root}/segments: the free space cannot be read ({os.strerror(number)})" in daemon.log
    assert "hint" in daemon.log
