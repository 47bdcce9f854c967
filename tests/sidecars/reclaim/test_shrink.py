"""Shrinking by wald-reclaim: a stuck route costs its own bytes; at every step one form holds all that is needed."""

import itertools
import json
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import full_disk
import pytest
from archives import archive
from damage import flip_bit
from faults import after_each_death
from logs import Built
from reclaiming import ledger, reclaim
from repairing import repair
from running import run, sidecar
from shrinking import shrink
from tracing import strace

from wald.checking.audit_report import DeletionAudit
from wald.checking.checker import Level
from wald.checking.verifier import verify
from wald.errors import DiskFailure
from wald.files.disk import Disk
from wald.files.layout import SHRUNK_SUFFIX
from wald.files.ledger_read import read_ledger
from wald.format.batch import Buffer
from wald.format.names import WHOLE_SUFFIX, Kind
from wald.retention.audit import audit_deletion, audit_shrink
from wald.retention.history import History
from wald.segments.view import State
from wald_reclaim.policy import Limits

BYTES = random.Random(0).randbytes(1 << 20).replace(b"\n", b"-")


@pytest.fixture
def built(tmp_path: Path) -> Iterator[Built]:
    """Two sealed segments of ten batches each and an active one; the second batch of each is of the route stuck."""
    made = Built(tmp_path / "log")
    fill(made, 2)
    made.log.set_cursor("web", made.last)
    yield made
    made.crash()


def fill(built: Built, segments: int) -> None:
    for number in range(segments):
        for i in range(10):
            begin = 6000 * (10 * number + i)
            built.lines("stuck" if i == 1 else "web", [BYTES[begin : begin + 6000]])
        built.cut()
    built.lines("web", [b"newest"])
    built.seal()


def unread(built: Built) -> list[bytes]:
    return [record.value for batch in built.log.batches("stuck", "cursor") for record in batch.records()]


def errors(built: Built) -> list[str]:
    return [str(found) for found in verify(built.root) if found.level is Level.ERROR]


def shrunk_lines(built: Built) -> list[dict[str, Any]]:
    return [line for line in ledger(built.root.path) if line["event"] == "shrunk"]


def illegal(built: Built) -> list[str]:
    """Return the deletions and shrinks that the ledger does not prove allowed."""
    history = History(built.root)
    rulings = [
        audit_shrink(line, history.line_for_digest(line["base"], line["was_sha256"])) for line in history.all_shrinks()
    ]
    rulings += [
        audit_deletion(line, history.line_for_digest(line["base"], line.get("sha256"))) for line in history.deletions()
    ]
    return [each for ruling in rulings for each in ruling.errors]


def assert_one_form(built: Built, records: list[bytes]) -> None:
    """Check that the shrunk form is alone, whole and allowed."""
    assert (unread(built), errors(built), illegal(built)) == (records, [], [])
    assert not [each.name for each in built.root.segments.iterdir() if each.name.endswith((WHOLE_SUFFIX, ".tmp"))]
    assert sizes(built)[0] < 8000


def sizes(built: Built) -> list[int]:
    return [path.stat().st_size for path in sorted(built.root.segments.glob("*.wal.zst"))]


def test_a_stuck_route_costs_its_own_bytes(built: Built) -> None:
    before, records = sizes(built), unread(built)
    reclaim(built, shrink_pinned=True)

    assert all(after < old // 8 for old, after in zip(before, sizes(built), strict=True))
    assert unread(built) == records
    assert errors(built) == illegal(built) == []
    (line, _) = shrunk_lines(built)
    assert (line["base"], line["last"], line["was_bytes"], line["bytes"]) == (1, 10, before[0], sizes(built)[0])
    assert line["dropped"] == [{"route": "web", "count": 9, "first": 1, "last": 10, "cursors": {"processed": 21}}]
    assert line["routes"] == [["stuck", 1, 2, 2, 6001]]
    assert line["runs"] == {"web": [0, 1, 1, 8]}


def test_a_shrunk_segment_is_deleted_once_the_rest_is_read(built: Built) -> None:
    reclaim(built, shrink_pinned=True)
    built.log.set_cursor("stuck", 12)
    reclaim(built, shrink_pinned=True)

    assert sizes(built) == []
    assert errors(built) == illegal(built) == []
    missing: list[Any] = []
    list(built.log.batches(None, 1, on_missing=missing.append))
    assert (missing[0].first, missing[0].last, missing[0].records) == (1, 20, 20)
    assert missing[0].routes == {"web", "stuck"}
    assert built.log.where(1).state is State.RECLAIMED


def test_a_cursor_that_is_set_back_learns_what_was_dropped(built: Built) -> None:
    reclaim(built, shrink_pinned=True)
    cursor = built.log.set_cursor("web", 3, rewind=True)

    assert "records 4 to 20 of web are deleted" in cursor.message
    assert built.log.set_cursor("stuck", 0, rewind=True).message == ""
    where = built.log.where(4)
    assert where.state is State.RECLAIMED
    assert "web/processed at 21" in where.message


@pytest.mark.parametrize(
    ("limits", "web", "shrink_pinned"),
    [
        pytest.param(Limits(), 21, False, id="not asked for"),
        pytest.param(Limits(keep_bytes=1 << 30), 21, True, id="newest bytes"),
        pytest.param(Limits(min_age_ns=10**18), 21, True, id="young"),
        pytest.param(Limits(require_archived=True), 21, True, id="not archived"),
        pytest.param(Limits(), 4, True, id="needed for the greater part"),
    ],
)
def test_a_segment_stays_whole(built: Built, limits: Limits, web: int, shrink_pinned: bool) -> None:
    before = sizes(built)
    built.log.set_cursor("web", web, rewind=True)
    reclaim(built, limits, shrink_pinned=shrink_pinned)
    assert sizes(built) == before


def test_a_damaged_segment_is_not_touched(built: Built) -> None:
    path = built.path(1, Kind.SEALED)
    flip_bit(path, 4000)
    data = path.read_bytes()
    reclaim(built, shrink_pinned=True)

    assert path.read_bytes() == data
    assert [line["base"] for line in shrunk_lines(built)] == [11]


def test_a_disk_that_does_not_hold_what_it_was_given_keeps_the_old_form(built: Built) -> None:
    """The frames of the shrunk file are read back before it replaces the old one."""

    class LyingDisk(Disk):
        def write(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
            data = bytearray(b"".join(buffers))
            if offset == 0 and os.readlink(f"/proc/self/fd/{descriptor}").endswith(SHRUNK_SUFFIX):
                data[len(data) // 2] ^= 1
            return super().write(descriptor, [data], offset)

    before = [path.read_bytes() for path in sorted(built.root.segments.glob("*.wal.zst*"))]
    reclaim(built, disk=LyingDisk(), shrink_pinned=True)

    assert [path.read_bytes() for path in sorted(built.root.segments.glob("*.wal.zst*"))] == before
    assert (shrunk_lines(built), errors(built)) == ([], [])


def test_a_reader_that_follows_loses_nothing(built: Built) -> None:
    batches = built.log.batches("web", 1, follow=True)
    first = [next(batches).first_sequence for _ in range(3)]
    reclaim(built, shrink_pinned=True)

    rest = [next(batches).first_sequence for _ in range(6)]
    assert first + rest == [1, 3, 4, 5, 6, 7, 8, 9, 10]


@pytest.mark.slow
@pytest.mark.parametrize("call", ["link", "rename", "unlink", "fsync", "fdatasync", "write", "pwritev2", "fallocate"])
def test_a_process_that_is_killed_in_any_system_call_leaves_one_whole_form(tmp_path: Path, call: str) -> None:
    """SIGKILL in the first, the second, … such call, until there are no more; then an undisturbed pass."""
    origin = Built(tmp_path / "origin")
    fill(origin, 1)
    origin.log.set_cursor("web", origin.last)
    records = unread(origin)
    origin.crash()

    for number in itertools.count(1):
        path = shutil.copytree(origin.root.path, tmp_path / f"log{number}")
        options = ["-f", "-qq", "-o", str(tmp_path / "trace"), f"-etrace={call}"]
        line = sidecar("reclaim", "--root", path, "--shrink-pinned")
        killed = run([strace(), *options, f"-einject={call}:signal=KILL:when={number}", *line]).returncode
        built = Built(path)
        assert (unread(built), errors(built)) == (records, [])
        reclaim(built, shrink_pinned=True)
        assert_one_form(built, records)
        built.crash()
        if not killed:
            break
    assert number > 1


@pytest.mark.parametrize("again", [False, True])
def test_after_death_at_any_step_a_later_pass_converges(tmp_path: Path, *, again: bool) -> None:
    origin = Built(tmp_path / "origin")
    fill(origin, 1)
    origin.log.set_cursor("web", origin.last)
    if again:
        origin.lines("third", [b"x"])
        origin.lines("web", [b"x"])
        origin.log.set_cursor("web", 5, rewind=True)
        reclaim(origin, shrink_pinned=True)
        origin.log.set_cursor("web", origin.last)
    records = unread(origin)
    origin.crash()
    logs, ends = [], set()

    def die(number: int, disk: Disk) -> None:
        logs.append(Built(shutil.copytree(tmp_path / "origin", tmp_path / f"log{number}")))
        reclaim(logs[-1], disk=disk, shrink_pinned=True)

    for _ in after_each_death(die, least=10):
        built = logs[-1]
        assert (unread(built), errors(built)) == (records, [])
        reclaim(built, shrink_pinned=True)
        assert_one_form(built, records)
        ends.add(sizes(built)[0])
        built.crash()
    assert len(ends) == 1


@pytest.mark.slow
def test_hundreds_of_segments_come_down_to_the_bytes_of_a_stuck_route(tmp_path: Path) -> None:
    """Each is pinned by one record."""
    built = Built(tmp_path / "log")
    for number in range(300):
        begin = 1000 * (number % 1000)
        built.lines("web", [BYTES[begin : begin + 40_000]])
        built.lines("stuck", [b"%d" % number])
        built.cut()
        built.seal()
    built.lines("web", [b"newest"])
    built.log.set_cursor("web", built.last)
    before = sum(sizes(built))

    reclaim(built, shrink_pinned=True)

    assert before > 9_000_000
    assert sum(sizes(built)) < 300 * 1500
    assert unread(built) == [b"%d" % number for number in range(300)]
    assert errors(built) == illegal(built) == []
    assert {built.log.where(number).state for number in (1, 299, 599)} == {State.RECLAIMED}
    assert {built.log.where(number).state for number in (2, 300, 600)} == {State.SEALED}
    built.crash()


def test_the_command_shrinks_and_reports(built: Built) -> None:
    def run_reclaim(*options: str) -> list[str]:
        return run(sidecar("reclaim", "--root", built.root.path, *options)).stdout.decode().splitlines()

    before = sizes(built)
    assert "would shrink 00000000000000000001.wal.zst: about 54" in run_reclaim("--shrink-pinned", "--dry-run")[0]
    assert sizes(built) == before
    (shrunk, _, end) = map(json.loads, run_reclaim("--shrink-pinned", "--json"))
    assert (shrunk["event"], shrunk["segment"], shrunk["was_bytes"]) == ("shrunk", 1, before[0])
    assert shrunk["bytes"] == sizes(built)[0]
    assert (end["shrunk_segments"], end["pinned_alone"]) == (2, {"stuck": sum(sizes(built))})
    assert "shrunk" not in "".join(run_reclaim("--shrink-pinned"))
    (again,) = map(json.loads, run_reclaim("--json"))
    assert (end["kept_bytes"], end["pinned_alone"]) == (again["kept_bytes"], again["pinned_alone"])


def test_a_shrink_that_drops_what_a_group_has_not_read_is_not_legal(built: Built) -> None:
    reclaim(built, shrink_pinned=True)
    line = shrunk_lines(built)[0]
    sealed = History(built.root).line_for_digest(1, line["was_sha256"])

    behind = line | {"dropped": [line["dropped"][0] | {"cursors": {"processed": 9}}]}
    assert audit_shrink(line, sealed).errors == ()
    assert "before it was read by processed at 9" in audit_shrink(behind, sealed).errors[0]
    assert "of route web, the line lists nothing" in audit_shrink(line | {"dropped": []}, sealed).errors[0]


def test_an_archive_goes_on_behind_shrinking_and_reports_what_it_cannot_have(built: Built, tmp_path: Path) -> None:
    """As behind a deletion: its cursor keeps unpacked records, and a new group starts at the oldest existing record."""
    built.log.set_cursor("stuck", 0, group="archive")
    built.log.set_cursor("web", 5, group="archive", rewind=True)
    reclaim(built, shrink_pinned=True)

    archive(built, tmp_path / "archive", route="web", group="archive")
    assert next(line["first"] for line in read_ledger(built.root.ledger / "archive.jsonl").entries) == 6


def test_a_shrink_after_a_repair_is_legal_and_hides_nothing_of_the_one_before(built: Built) -> None:
    """A repair rebuilds the index from the frames, which do not show the routes of dropped records."""
    built.log.set_cursor("web", 6, rewind=True)
    reclaim(built, shrink_pinned=True)
    path = built.path(1, Kind.SEALED)
    path.write_bytes(path.read_bytes()[:-40])
    repair(built.root.path, accept_loss=False)
    assert errors(built) == illegal(built) == []
    story = DeletionAudit(built.root)
    assert [event.ruling.errors for event in story.events() if event.ruling] == [()]

    built.log.set_cursor("stuck", 12)
    shrink(built, 1, web=8, stuck=2)
    assert "records 1 to 8 of web are deleted" in built.log.set_cursor("web", 0, rewind=True).message
    missing: list[Any] = []
    list(built.log.batches("web", 1, on_missing=missing.append))
    assert missing
    assert missing[0].first == 1


def test_a_shrink_without_space_for_the_new_file_exits_with_7_and_succeeds_later(tmp_path: Path) -> None:
    with full_disk.small_file_system(tmp_path / "disk", 4 << 20) as disk:
        built = Built(disk / "log")
        fill(built, 2)
        built.log.set_cursor("web", built.last)
        before = sizes(built)[0]
        full_disk.fill(disk / "filler")
        line = sidecar("reclaim", "--root", built.root.path, "--shrink-pinned")
        refused = run(line)

        assert refused.returncode == DiskFailure.exit_code
        assert b"No space left on device; nothing is lost, and the next pass continues" in refused.stderr
        assert b"hint: df -h" in refused.stderr

        (disk / "filler").unlink()
        assert run(line).returncode == 0
        assert sizes(built)[0] < before / 2
