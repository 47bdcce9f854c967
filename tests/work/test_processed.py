"""Progress of a group counts only once it is on disk."""

from __future__ import annotations

import errno

import pytest
from faults import FailingDisk, TracingDisk
from logs import Built

from wald.format.work import Commit, JournalStart
from wald.work.journal import Journal
from wald.work.snapshot import Progress
from wald.work.window import Run

ALL = [Run(1, 5)]


@pytest.fixture
def journal(built: Built) -> Journal:
    """Progress of a group that has read all records and processed none."""
    built.lines("a", [b"x"] * 5)
    built.log.set_cursor("a", 0, "g")
    journal = Journal(built.root, built.disk, JournalStart(built.log_id, "a", "g", 0, 1), lambda _: None)
    journal.append([Commit(read=[(1, 5)])])
    journal.sync()
    return journal


def test_what_the_owner_has_not_synced_is_synced_before_it_counts(built: Built, journal: Journal) -> None:
    disk = TracingDisk()
    progress = Progress(built.log, "a", "g", disk)
    progress.read()
    assert (progress.unprocessed(ALL), disk.steps) == (ALL, [])
    for done in (1, 2):
        journal.append([Commit(done=[(done, done)])])
        progress.read()
        assert progress.unprocessed(ALL) == [Run(done + 1, 5)]
        assert disk.steps.count(("sync", "g.work")) == done
        assert disk.steps.count(("sync_directory", "cursors")) == 1
    journal.rewrite([JournalStart(built.log_id, "a", "g", 3, 4)])
    progress.read()
    assert progress.unprocessed(ALL) == [Run(4, 5)]
    assert disk.steps.count(("sync_directory", "cursors")) == 2
    journal.close()


def test_what_cannot_be_synced_does_not_count(built: Built, journal: Journal) -> None:
    progress = Progress(built.log, "a", "g", FailingDisk(0, more=1, number=errno.EIO))
    journal.append([Commit(done=[(2, 3)])])
    for _ in range(2):
        progress.read()
        with pytest.raises(OSError, match="Input/output error"):
            progress.unprocessed(ALL)
    journal.close()


def test_a_cursor_is_on_disk_before_it_counts(built: Built) -> None:
    """Another process may see the new cursor before its name is on disk."""
    built.lines("a", [b"x"] * 5)
    built.log.set_cursor("a", 4, "g")
    disk = TracingDisk()
    progress = Progress(built.log, "a", "g", disk)
    progress.read()

    assert progress.unprocessed(ALL) == [Run(5, 5)]
    assert disk.steps == [("sync", "g.cursor"), ("sync_directory", "cursors")]
