"""wald-drain killed with SIGKILL while its command runs: the batch is complete, and no second command runs."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from contents import records
from draining import Gate, Start, drain
from logs import Built
from running import TIMEOUT_SECONDS, eventually

import wald

MORE_THAN_A_PIPE_HOLDS = [b"x" * 999] * 1000


class Orphan:
    """Running command whose drain was killed; it exits when the test releases it."""

    def __init__(self, built: Built, folder: Path, start: Start, *, exit_code: int = 0) -> None:
        self.root = built.root.path
        self.journal = folder / "journal"
        self.journal.touch()
        begun, self.go = Gate(folder / "begun"), Gate(folder / "go")
        script = f"echo > {begun.path}; read go < {self.go.path}; {self.journaling}; exit {exit_code}"
        self.drain = start("a", "--batch-records", 1000, "--exit-at-end", "--root", self.root, "--", "sh", "-c", script)
        begun.await_writer()
        self.drain.kill()
        self.drain.wait(TIMEOUT_SECONDS)

    @property
    def journaling(self) -> str:
        """Return a script that records the batch of a command and its record count."""
        return f'echo "$WALD_FIRST-$WALD_LAST $WALD_COUNT $(wc -l)" >> {self.journal}'

    @property
    def reported(self) -> list[str]:
        return self.journal.read_text().splitlines()

    def successor(self, start: Start) -> subprocess.Popen[bytes]:
        """Start another drain and return it once it reports that it waits."""
        process = start("a", "--exit-at-end", "--root", self.root, "--", "sh", "-c", self.journaling)
        assert process.stderr is not None
        line = process.stderr.readline()
        assert b"waits for the command that an earlier wald-drain has left running" in line
        return process

    @property
    def cursor(self) -> int:
        return wald.open(self.root).cursor("a").effective


@pytest.fixture
def built(root: Path) -> Built:
    """Records 1 to 1000 and 1001 on route a."""
    log = Built(root)
    log.lines("a", MORE_THAN_A_PIPE_HOLDS)
    log.lines("a", [b"last"])
    return log


def test_an_orphan_has_the_whole_batch(built: Built, tmp_path: Path, start: Start) -> None:
    """The command had not read any of the batch when drain was killed."""
    orphan = Orphan(built, tmp_path, start)
    orphan.go.let_reader_go()
    eventually(lambda: orphan.reported)

    assert orphan.reported == ["1-1000 1000 1000"]


def test_what_an_orphan_has_processed_is_not_processed_again(built: Built, tmp_path: Path, start: Start) -> None:
    orphan = Orphan(built, tmp_path, start)
    successor = orphan.successor(start)
    assert orphan.reported == []
    orphan.go.let_reader_go()

    assert successor.wait(TIMEOUT_SECONDS) == 0
    assert orphan.reported == ["1-1000 1000 1000", "1001-1001 1 1"]
    assert orphan.cursor == 1001


def test_what_an_orphan_has_failed_at_is_processed_after_it(built: Built, tmp_path: Path, start: Start) -> None:
    orphan = Orphan(built, tmp_path, start, exit_code=1)
    successor = orphan.successor(start)
    assert orphan.reported == []
    orphan.go.let_reader_go()

    assert successor.wait(TIMEOUT_SECONDS) == 0
    assert orphan.reported == ["1-1000 1000 1000", "1-1000 1000 1000", "1001-1001 1 1"]
    assert orphan.cursor == 1001


def test_a_killed_keeper_is_no_try(built: Built, tmp_path: Path, start: Start) -> None:
    """The exit code of its command is unknown: the whole batch is retried, and no record is given up."""
    keepers = tmp_path / "keepers"
    script = f"echo $WALD_TRY >> {keepers}; [ $(wc -l < {keepers}) = 1 ] && kill -KILL $PPID; exit 0"
    words = ("--tries", 1, "--exit-at-end", "--root", built.root.path, "--", "sh", "-c", script)
    done = drain("a", "--batch-records", 500, *words)

    assert done.returncode == 0, done.stderr
    assert b"a 1 to 500: its keeper was killed, so how it ended is not known, again in 0.1 s\n" in done.stderr
    assert keepers.read_text().splitlines() == ["1"] * 4
    assert built.log.cursor("a").effective == 1001


def test_waiting_for_an_orphan_ends_with_a_signal(built: Built, tmp_path: Path, start: Start) -> None:
    orphan = Orphan(built, tmp_path, start)
    successor = orphan.successor(start)
    successor.send_signal(signal.SIGTERM)

    assert successor.wait(TIMEOUT_SECONDS) == 0
    assert orphan.reported == []
    orphan.go.let_reader_go()
    assert drain("a", "--exit-at-end", "--root", orphan.root, "--", "true").returncode == 0
    assert len(orphan.reported) == 1


@pytest.mark.parametrize(
    ("sequence", "batches"), [(0, ["1-1000 1000 1000", "1001-1001 1 1"]), (10, ["11-1001 991 991"])]
)
def test_a_cursor_set_since_counts_for_more_than_an_orphan(
    built: Built, tmp_path: Path, start: Start, sequence: int, batches: list[str]
) -> None:
    """This applies even if the cursor did not change: the operator wants the records after it."""
    orphan = Orphan(built, tmp_path, start)
    built.log.set_cursor("a", sequence)
    successor = orphan.successor(start)
    orphan.go.let_reader_go()

    assert successor.wait(TIMEOUT_SECONDS) == 0
    assert orphan.reported[1:] == batches
    assert orphan.cursor == 1001


def test_a_new_group_has_a_cursor_before_its_command_runs(built: Built, tmp_path: Path, start: Start) -> None:
    """Otherwise its records could be reclaimed once another group has read them."""
    assert not built.root.cursor("a", "processed").exists()
    orphan = Orphan(built, tmp_path, start)

    assert built.root.cursor("a", "processed").exists()
    assert orphan.cursor == 0
    orphan.go.let_reader_go()
    eventually(lambda: orphan.reported)


def test_a_command_that_leaves_something_running_does_not_hold_up_its_own_drain(built: Built, tmp_path: Path) -> None:
    """Only a successor cannot distinguish the background process from the command."""
    go = tmp_path / "go"
    os.mkfifo(go)
    held = os.open(go, os.O_RDWR)  # keeps a writer open, so that the reader waits for a line
    script = f"(read go < {go}) > /dev/null 2>&1 & exit 0"
    done = drain("a", "--batch-records", 500, "--exit-at-end", "--root", built.root.path, "--", "sh", "-c", script)

    assert (done.returncode, done.stderr) == (0, b"")
    assert built.log.cursor("a").effective == records(built.root.path, "a")[-1].sequence
    os.write(held, b"go\n" * 3)
    os.close(held)
