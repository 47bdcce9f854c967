"""RECLAIM and the sealer work on one raw segment: in any order, and if either dies, the ledgers are right.

In one process, the steps of both run in every order. Then each dies before one of its steps, the other one continues,
and both restart.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from faults import Died, DyingDisk
from interleaving import PausingDisk, Schedule, interleavings, pausing
from logs import Built
from reclaiming import Reclaimer, ledger, rulings

from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.ledger_read import read_ledger
from wald.files.ledger_write import Ledger
from wald.writing.sealing import remove_temporaries, seal, segments_to_seal

_ACTIVE = 2


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Segment 1 is cut and read, and 2 is active."""
    built = Built(tmp_path / "built")
    built.lines("a", [b"1"])
    built.cut()
    built.lines("a", [b"2"])
    built.log.set_cursor("a", 1)
    return built


def reclaim(root: Root, disk: Disk, built: Built) -> None:
    reclaimer = Reclaimer(root, disk)
    try:
        reclaimer.look(now_ns=built.now_ns)
    finally:
        reclaimer.ledger.close()


def seal_all(root: Root, disk: Disk, built: Built) -> None:
    """Run a pass of the daemon's sealing thread."""
    segments = Ledger(root.ledger / "segments.jsonl", disk)
    try:
        for segment in segments_to_seal(root, _ACTIVE):
            with suppress(FileNotFoundError):  # it was reclaimed
                seal(root, segment, disk, segments, now=lambda: built.now_ns, reserve=False)
    finally:
        segments.close()


def check(root: Root, built: Built) -> None:
    """Check the ledgers now and after both have finished; the last line describes the deleted file."""
    assert set(rulings(root).values()) <= {()}
    for work in (reclaim, seal_all, reclaim):
        work(root, built.disk, built)
        assert set(rulings(root).values()) <= {()}

    assert sorted(path.name for path in root.segments.iterdir() if path.name < f"{_ACTIVE:020d}") == []
    deletion, sealed = ledger(root.path)[-1], read_ledger(root.ledger / "segments.jsonl").entries
    assert (deletion["event"], deletion["last"]) == ("reclaimed", 1)
    assert deletion.get("sha256") == (sealed[-1]["sha256"] if sealed else None)
    assert [line["event"] for line in sealed] in ([], ["cut", "sealed"])


@pytest.mark.slow
def test_every_order_of_the_steps_of_both_leaves_a_legal_deletion_of_what_there_was(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meet(root: Root, schedule: Schedule) -> None:
        with monkeypatch.context() as patched:
            pausing(patched, schedule, "wald_reclaim.survey.find_being_sealed")
            schedule.run(
                partial(reclaim, root, PausingDisk(schedule, "rename"), built),
                partial(seal_all, root, PausingDisk(schedule, "create", "rename", "unlink"), built),
            )

    raw = 0
    for schedule in interleavings():
        root = Root(shutil.copytree(built.root.path, tmp_path / "root"))
        meet(root, schedule)
        check(root, built)
        raw += "form" in ledger(root.path)[-1]
        shutil.rmtree(root.path)
    assert raw


@pytest.mark.parametrize(("dying", "other"), [(reclaim, seal_all), (seal_all, reclaim)])
def test_one_dies_before_any_of_its_steps_and_the_other_goes_on(
    built: Built, tmp_path: Path, dying: Callable[[Root, Disk, Built], None], other: Callable[[Root, Disk, Built], None]
) -> None:
    for steps in range(100):
        root = Root(shutil.copytree(built.root.path, tmp_path / "root"))
        died, disk = False, DyingDisk(steps)
        try:
            dying(root, disk, built)
        except Died:
            died = True
        disk.abandon()
        if dying is seal_all:
            remove_temporaries(root, built.disk)  # the next start of the daemon
        other(root, built.disk, built)
        check(root, built)
        shutil.rmtree(root.path)
        if not died:
            break
    assert steps > 5
