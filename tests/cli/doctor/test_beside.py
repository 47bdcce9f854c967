"""Doctor runs alongside a daemon, interrupted or killed: they touch no file of the log and leave nothing behind."""

import hashlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from examining import examine, scratch_directories
from running import TIMEOUT_SECONDS, Daemon, command, eventually, output_of, run
from tracing import strace

WRITING = re.compile(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC|O_APPEND")
CALLS = "open,openat,openat2,creat,rename,renameat,renameat2,unlink,unlinkat,link,linkat,mkdir,mkdirat,truncate,chmod"
SLOW = ["-f", "-etrace=fdatasync", "-einject=fdatasync:delay_exit=100000", "-o/dev/null"]  # microseconds


def contents(root: Path) -> dict[str, str]:
    """Map each file to a digest and each FIFO or socket to its inode, ignoring preallocated segments."""
    found = {}
    for path in sorted(root.rglob("*")):
        if path.name.startswith("spare-"):
            continue
        if path.is_file():
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[str(path)] = str(path.lstat().st_ino)
    return found


@contextmanager
def slow_doctor(root: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a doctor with slow syncs; yield the strace process and the doctor's PID."""
    line = [strace(), *SLOW, *command("doctor", "--root", root)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as tracer:
        eventually(lambda: scratch_directories(root))
        children = Path(f"/proc/{tracer.pid}/task/{tracer.pid}/children")
        yield tracer, int(children.read_text().split()[0])
        tracer.communicate(timeout=TIMEOUT_SECONDS)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    output_of("init", "--root", tmp_path / "log")
    return tmp_path / "log"


def test_no_file_of_a_running_log_is_opened_for_writing(root: Path, tmp_path: Path) -> None:
    with Daemon(root) as daemon:
        output_of("route", "add", "a", "--fifo", "--root", root)
        output_of("append", "a", "--root", root, stdin=b"one\ntwo\n")
        before = contents(root)
        line = [strace(), "-f", f"-etrace={CALLS}", "-o", str(tmp_path / "trace"), *command("doctor", "--root", root)]
        assert run(line).returncode in (0, 14)
        assert contents(root) == before
        assert daemon.ask("PING").startswith("OK")
    calls = (tmp_path / "trace").read_text().splitlines()
    writing = [call for call in calls if not re.search(r" open(at2?)?\(", call) or WRITING.search(call)]

    assert len([call for call in writing if "/proc/self/fd/" in call]) > 10  # the scratch directory
    assert [call for call in writing if str(root) in call and "O_DIRECTORY" not in call] == []


def test_nothing_is_made_that_another_user_may_change(root: Path, tmp_path: Path) -> None:
    """The scratch directory and its contents are private even under a umask of 0."""
    made = "mkdir,mkdirat,mknod,mknodat,bind,openat,chmod,fchmod,fchmodat,umask"
    line = [strace(), "-f", f"-etrace={made}", "-o", str(tmp_path / "trace"), *command("doctor", "--root", root)]
    assert run(["sh", "-c", 'umask 000; exec "$@"', "sh", *line]).returncode in (0, 14)
    calls = (tmp_path / "trace").read_text().splitlines()
    masks = [call for call in calls if " umask(" in call]
    first_made = next(number for number, call in enumerate(calls) if " mkdirat(" in call and "wald-doctor-" in call)

    assert [re.findall(r"umask\((\d+)\)", call) for call in masks] == [["077"], ["000"]]
    assert calls.index(masks[0]) < first_made < calls.index(masks[1])
    assert ", 0700" in calls[first_made]


def test_an_interrupted_doctor_leaves_nothing_and_the_next_removes_what_a_killed_one_has_left(
    root: Path, tmp_path: Path
) -> None:
    # An interrupted doctor leaves nothing.
    for number in (signal.SIGTERM, signal.SIGHUP):
        with slow_doctor(root) as (tracer, pid):
            os.kill(pid, number)
        assert tracer.returncode == 130
        assert scratch_directories(root) == []

    # What a killed doctor has left is removed by the next.
    with slow_doctor(root) as (_, pid):
        os.kill(pid, signal.SIGKILL)
    assert len(scratch_directories(root)) == 1
    assert examine(root).measured("root")["removed"] == 1
    assert scratch_directories(root) == []

    # A doctor at work keeps its scratch directory.
    with slow_doctor(root) as (tracer, doctor):
        os.kill(doctor, signal.SIGSTOP)  # otherwise it might finish first on a slow machine
        mine = scratch_directories(root)
        assert examine(root).measured("root")["removed"] == 0
        assert scratch_directories(root) == mine
        os.kill(doctor, signal.SIGCONT)
    assert tracer.returncode in (0, 14)
    assert scratch_directories(root) == []

    # A scratch directory that is a link is not followed.
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    (root / "wald-doctor-0123456789abcdef.tmp").symlink_to(tmp_path / "mine")
    assert examine(root).measured("root")["removed"] == 0
    assert (tmp_path / "mine" / "file").exists()


def test_a_disk_that_is_slow_takes_no_longer_than_the_timeout(root: Path) -> None:
    """Each sync takes longer than the timeout: the doctor waits for the first, and then the timeout has expired."""
    slow = [strace(), "-f", "-etrace=fdatasync", "-einject=fdatasync:delay_exit=1300000", "-o/dev/null"]
    found = examine(root, "--timeout", "1s", prefix=slow)

    assert found.outcome("sync") == "unknown"
    assert "1 s" in found.message("sync")
    assert scratch_directories(root) == []
