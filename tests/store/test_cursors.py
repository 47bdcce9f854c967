"""A cursor moves forward only, is replaced in one step, and pins segments that it has not passed."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from effort import steps
from faults import FailingDisk, until_it_survives
from logs import Built
from running import TIMEOUT_SECONDS

from wald.errors import InvalidInput, NotFound, Refused
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.listing import Segment
from wald.files.routes import retire_route
from wald.format.head import CursorLines, encode_cursor
from wald.format.names import Kind
from wald.retention import cursors
from wald.retention.blockers import CursorSnapshot, Pin, read_cursor_snapshot, sealed_index
from wald.retention.cursor_moves import cursor_lock, move_cursor
from wald.retention.cursors import Cursor, CursorState, SlowestCursor, read_cursor

NOW = "2026-11-21T10:00:00Z"


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Ten records on route a."""
    built = Built(tmp_path / "root")
    built.lines("a", [b"x"] * 10)
    return built


def move(
    built: Built, sequence: int, group: str = "processed", *, disk: Disk | None = None, rewind: bool = False
) -> Cursor:
    log_id = built.log_id
    return move_cursor(built.root, "a", group, sequence, log_id=log_id, disk=disk or Disk(), now=NOW, rewind=rewind)


def look(built: Built, content: bytes | None) -> Cursor:
    """The cursor whose file holds ``content``."""
    if content is not None:
        built.root.cursor("a", "processed").write_bytes(content)
    return read_cursor(built.root, "a", log_id=built.log_id, head_sequence=10)


def test_backwards_is_refused_unless_asked_for_and_what_is_wrong_always(built: Built) -> None:
    for rewind in (False, True):
        with pytest.raises(Refused, match="beyond the last durable record, 10"):
            move(built, 11, rewind=rewind)
    assert look(built, None).state is CursorState.ABSENT
    with pytest.raises(NotFound):
        built.log.set_cursor("nothing", 1)
    for sequence, group in ((1, "../x"), (-1, "processed")):
        with pytest.raises(InvalidInput):
            move(built, sequence, group)
    move(built, 7)
    with pytest.raises(Refused, match="backwards from 7") as refusal:
        move(built, 6)
    assert "--rewind" in refusal.value.hint
    assert built.log.cursor("a").sequence == 7
    assert move(built, 6, rewind=True).sequence == 6


def test_one_that_cannot_be_trusted_is_replaced_only_when_asked_and_wholly_or_not(built: Built) -> None:
    for content in (b"rubbish", b"11\n", encode_cursor(CursorLines(5, b"another log 0123"))):
        look(built, content)
        with pytest.raises(Refused):
            move(built, 9)
        assert built.root.cursor("a", "processed").read_bytes() == content
        assert move(built, 9, rewind=True).effective == 9
    for number, disk in enumerate(until_it_survives(FailingDisk)):
        with disk.attempt():
            move(built, 10, disk=disk)
        assert built.log.cursor("a").sequence == (9 if number < 4 else 10)  # create, write, sync, rename
    assert number > 4


def test_of_two_that_move_a_cursor_at_once_the_lower_one_is_refused(built: Built) -> None:
    waits = threading.Event()

    class Awaited(Disk):
        def lock(self, descriptor: int, *, shared: bool = False) -> bool:
            is_free = super().lock(descriptor, shared=shared)
            if not is_free:
                waits.set()
            return is_free

    with ThreadPoolExecutor() as threads:
        with cursor_lock(built.root.cursor_directory("a"), Disk()):
            moving = threads.submit(move, built, 3, disk=Awaited())
            assert waits.wait(TIMEOUT_SECONDS)
            look(built, b"7\n")
        with pytest.raises(Refused, match="backwards"):
            moving.result()
    assert built.log.cursor("a").sequence == 7


def test_a_second_look_for_the_slowest_reads_only_what_has_changed(built: Built) -> None:
    for group in ("x", "y", "z"):
        move(built, 5, group)
    slowest = SlowestCursor()

    def look() -> tuple[str, int]:
        found = slowest.find(built.root, "a", log_id=built.log_id, head_sequence=10)
        return found.group, found.effective

    assert look()[1] == 5
    expected = {"x": 5, "y": 5, "z": 5}
    for group, sequence in (("x", 3), ("x", 7), ("y", 8), ("z", 9), ("y", 1)):
        move(built, sequence, group, rewind=True)
        expected[group] = sequence
        assert look()[1] == min(expected.values())
    for content, lowest in ((b"7\n", 7), (b"none", 0), (b"2\n", 2)):
        built.root.cursor("a", "y").write_bytes(content)
        assert look() == ("y", lowest) or lowest == 7
    (built.root.cursor_directory("a") / "no group.cursor").write_bytes(b"9\n")
    assert look()[1] == 0
    (built.root.cursor_directory("a") / "no group.cursor").unlink()
    for group in "xyz":
        built.root.cursor("a", group).unlink()
    assert look() == ("processed", 0)


@pytest.mark.parametrize("content", [b"5\n", b"garbage\n"])
def test_a_look_for_the_slowest_is_cheap_once_the_cursors_rest(
    built: Built, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """Any owner of a cursor can leave thousands, and the daemon looks at all of them in its loop."""
    for number in range(50):
        built.root.cursor("a", f"g{number}").write_bytes(content)
    slowest = SlowestCursor()

    def look() -> None:
        slowest.find(built.root, "a", log_id=built.log_id, head_sequence=10)

    first = steps(look)
    monkeypatch.setattr(cursors, "_SETTLED_NS", 0)  # as if they had rested for long
    look()
    assert steps(look) < first / 3


def test_a_cursor_beyond_the_head_counts_once_the_head_has_reached_it(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    built.root.cursor("a", "g").write_bytes(b"11\n")
    monkeypatch.setattr(cursors, "_SETTLED_NS", 0)
    slowest = SlowestCursor()

    found = [slowest.find(built.root, "a", log_id=built.log_id, head_sequence=head) for head in (9, 10, 11)]
    assert [cursor.effective for cursor in found] == [0, 0, 11]


@pytest.fixture
def two_routes(tmp_path: Path) -> Built:
    """One sealed segment: records 1 to 3 of route a, 4 and 5 of route b; record 6 of a is in the active one."""
    two_routes = Built(tmp_path / "root")
    two_routes.lines("a", [b"x"] * 3)
    two_routes.lines("b", [b"y"] * 2)
    two_routes.cut(seal=True)
    two_routes.lines("a", [b"z"])
    return two_routes


def claims(two_routes: Built) -> CursorSnapshot:
    return read_cursor_snapshot(two_routes.root, log_id=two_routes.log_id)


def pins(two_routes: Built) -> list[tuple[str, str, int, int]]:
    index = sealed_index(Segment(1, Kind.SEALED, two_routes.path(1, Kind.SEALED)), two_routes.log_id)
    return [(pin.route, pin.group, pin.at, pin.needs) for pin in claims(two_routes).pins(index.routes)]


BOTH = {("a", "processed"): 3, ("b", "processed"): 5}
CASES: dict[str, tuple[dict[tuple[str, str], int], Callable[[Built], object], list[tuple[str, str, int, int]]]] = {
    "no cursor": ({("b", "processed"): 5}, lambda _: None, [("a", "processed", 0, 3)]),
    "each group of each route": (
        {("a", "processed"): 3, ("a", "slow"): 2, ("b", "processed"): 4},
        lambda _: None,
        [("a", "slow", 2, 3), ("b", "processed", 4, 5)],
    ),
    "idle routes that have read everything in it": (BOTH, lambda _: None, []),
    "a route without records in it": (BOTH, lambda two_routes: two_routes.lines("late", [b"x"]), []),
    "a retired route": (
        BOTH | {("a", "processed"): 0},
        lambda two_routes: retire_route(two_routes.root, two_routes.disk, "a", now=""),
        [],
    ),
    "a route without its directory": (
        BOTH,
        lambda two_routes: shutil.rmtree(two_routes.root.route("a")),
        [("a", "processed", 0, 3)],
    ),
    "a late group": (
        BOTH,
        lambda two_routes: two_routes.root.cursor("a", "audit").write_text("0\n"),
        [("a", "audit", 0, 3)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_cursors_pin_records_that_they_have_not_passed(two_routes: Built, case: str) -> None:
    cursors, change, expected = CASES[case]
    for (route, group), at in cursors.items():
        two_routes.log.set_cursor(route, at, group)
    change(two_routes)

    assert pins(two_routes) == expected


UNREADABLE: tuple[bytes | Callable[[Path], object], ...] = (
    *(b"", bytes(4096), b"three\n", b"-1\n", b"3\n{}\n", b'3\n{"log": "00', b"3" * 5000),
    *(Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path.name)),
)
FOUND: list[tuple[bytes | Callable[[Path], object], CursorState, bool]] = [
    *((made, CursorState.UNREADABLE, False) for made in UNREADABLE),
    (encode_cursor(CursorLines(3, b"another log 0123")), CursorState.FOREIGN, False),
    *((data, CursorState.BEYOND, False) for data in (b"7\n", b"18446744073709551615\n")),
    (b"2\n", CursorState.VALID, False),
    *((data, CursorState.VALID, True) for data in (b"3\n", b"3", b"  3 \n\n")),
]


def test_whatever_is_in_place_of_a_cursor_is_accepted_or_pins_with_a_message(two_routes: Built) -> None:
    """Nothing that is not certainly a cursor at 3 or behind it lets the segment go."""
    two_routes.log.set_cursor("b", 5)
    path = two_routes.root.cursor("a", "processed")
    for made, state, frees in FOUND:
        path.write_bytes(made) if isinstance(made, bytes) else made(path)
        (cursor,) = claims(two_routes).cursors["a"]

        assert cursor.state is state
        assert bool(cursor.message) == (state is not CursorState.VALID)
        assert pins(two_routes) == ([] if frees else [("a", "processed", cursor.effective, 3)])
        path.rmdir() if made is Path.mkdir else path.unlink()


def test_a_cursor_file_that_no_group_can_have_holds_back_with_a_message(two_routes: Built) -> None:
    """Somebody means it; so it is not passed over. Without a head, what is sealed tells how far cursors may be."""
    two_routes.log.set_cursor("a", 3)
    two_routes.log.set_cursor("b", 5)
    two_routes.root.head.unlink()
    assert pins(two_routes) == []
    (two_routes.root.cursor_directory("a") / "my group.cursor").write_text("3\n")

    assert pins(two_routes) == [("a", "my group", 0, 3)]
    assert "my group.cursor" in claims(two_routes).cursors["a"][-1].message


@pytest.fixture
def unlocked() -> Iterator[Path]:
    """A directory that another user may look into, which those of pytest are not."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("hidden", ["cursors/processed.cursor", "."])
def test_a_cursor_that_may_not_be_read_holds_back(unlocked: Path, hidden: str) -> None:
    """Mode 000 of the file, its directory or the route's, for a user other than root."""
    two_routes = Built(unlocked / "root")
    two_routes.lines("a", [b"x"] * 3, cut=True)
    two_routes.log.set_cursor("a", 3)
    for path in (two_routes.root.path, *two_routes.root.path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (two_routes.root.route("a") / hidden).chmod(0)
    script = (
        "import os, sys; from wald.log import Log; from wald.retention.blockers import read_cursor_snapshot\n"
        "os.getuid() or (os.setgid(65534), os.setuid(65534))\n"
        "log = Log(sys.argv[1]); claims = read_cursor_snapshot(log.root, log_id=log.identity.log_id)\n"
        "(cursor,) = claims.cursors['a']; print(cursor.state.value, cursor.effective, cursor.message)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, two_routes.root.path], capture_output=True, text=True, check=False
    )
    two_routes.root.route("a").chmod(0o755)
    two_routes.root.cursor_directory("a").chmod(0o755)

    assert done.stdout.startswith("unreadable 0 "), done.stderr
    assert "permission denied" in done.stdout.lower()


def test_a_cursor_that_moves_beyond_a_head_read_before_it_counts(two_routes: Built) -> None:
    """The head is read first; a cursor that seems beyond it is judged once more with the head of by then."""

    class Growing(Root):
        def route_names(self) -> list[str]:
            two_routes.log.set_cursor("a", two_routes.lines("a", [b"meanwhile"]))
            return super().route_names()

    (cursor,) = read_cursor_snapshot(Growing(two_routes.root.path), log_id=two_routes.log_id).cursors["a"]

    assert (cursor.state, cursor.effective) == (CursorState.VALID, 7)


def test_a_pin_holds_until_its_cursor_has_come_or_its_claim_is_given_up(two_routes: Built) -> None:
    two_routes.log.set_cursor("a", 3)
    retire_route(two_routes.root, two_routes.disk, "b", now="")
    for pin, still in [
        (Pin("a", "processed", 0, 3), False),
        (Pin("a", "processed", 0, 4), True),
        (Pin("a", "removed", 0, 3), False),
        (Pin("a", "removed", 0, 4), False),
        (Pin("b", "processed", 0, 5), False),
        (Pin("gone", "processed", 0, 1), True),
    ]:
        assert claims(two_routes).still_pins(pin) == still


def test_only_a_cursor_that_is_moved_back_or_whose_route_is_gone_pins_anything_new(two_routes: Built) -> None:
    two_routes.log.set_cursor("a", 2)
    two_routes.log.set_cursor("b", 5)
    before = claims(two_routes)
    for at, lets_go in ((1, False), (2, True), (3, True)):
        two_routes.log.set_cursor("a", at, rewind=True)
        assert claims(two_routes).pins_nothing_new(before) is lets_go
    shutil.rmtree(two_routes.root.route("a"))
    assert (before.floor("a"), claims(two_routes).floor("a")) == (2, 0)
    assert not claims(two_routes).pins_nothing_new(before)
