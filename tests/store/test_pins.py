"""Pins: a segment is pinned by exactly the cursors that have not reached its last record of their route."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from logs import Built

from wald.errors import Damaged
from wald.files.layout import Root
from wald.files.listing import Segment
from wald.files.routes import add_route, retire_route
from wald.format.head import CursorLines, encode_cursor
from wald.format.names import Kind
from wald.format.sealed_index import RouteTable
from wald.retention.blockers import CursorSnapshot, Pin, read_cursor_snapshot, sealed_index
from wald.retention.cursors import CursorState


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """One sealed segment: records 1 to 3 of route a, 4 and 5 of route b; record 6 of a is in the active one."""
    built = Built(tmp_path / "root")
    built.lines("a", [b"x"] * 3)
    built.lines("b", [b"y"] * 2)
    built.cut()
    built.seal()
    built.lines("a", [b"z"])
    return built


def claims(built: Built) -> CursorSnapshot:
    return read_cursor_snapshot(built.root, log_id=built.log_id)


def pins(built: Built) -> list[tuple[str, str, int, int]]:
    index = sealed_index(Segment(1, Kind.SEALED, built.path(1, Kind.SEALED)), built.log_id)
    return [(pin.route, pin.group, pin.at, pin.needs) for pin in claims(built).pins(index.routes)]


BOTH = {("a", "processed"): 3, ("b", "processed"): 5}
CASES: dict[str, tuple[dict[tuple[str, str], int], Callable[[Built], object], list[tuple[str, str, int, int]]]] = {
    "no cursor": ({("b", "processed"): 5}, lambda _: None, [("a", "processed", 0, 3)]),
    "each group of each route": (
        {("a", "processed"): 3, ("a", "slow"): 2, ("b", "processed"): 4},
        lambda _: None,
        [("a", "slow", 2, 3), ("b", "processed", 4, 5)],
    ),
    "idle routes that have read everything in it": (BOTH, lambda _: None, []),
    "a route without records in it": (BOTH, lambda built: built.lines("late", [b"x"]), []),
    "a retired route": (
        BOTH | {("a", "processed"): 0},
        lambda built: retire_route(built.root, built.disk, "a", now=""),
        [],
    ),
    "a route without its directory": (
        BOTH,
        lambda built: shutil.rmtree(built.root.route("a")),
        [("a", "processed", 0, 3)],
    ),
    "a late group": (BOTH, lambda built: built.root.cursor("a", "audit").write_text("0\n"), [("a", "audit", 0, 3)]),
}


@pytest.mark.parametrize("case", CASES)
def test_cursors_pin_records_that_they_have_not_passed(built: Built, case: str) -> None:
    cursors, change, expected = CASES[case]
    for (route, group), at in cursors.items():
        built.log.set_cursor(route, at, group)
    change(built)

    assert pins(built) == expected


def directory(path: Path) -> None:
    path.mkdir()


def fifo(path: Path) -> None:
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def content(data: bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(data)

    return make


OTHER = encode_cursor(CursorLines(3, b"another log 0123"))


FOUND: list[tuple[Callable[[Path], object], CursorState, bool]] = [
    (content(b""), CursorState.UNREADABLE, False),
    (content(b"\0" * 4096), CursorState.UNREADABLE, False),
    (content(b"three\n"), CursorState.UNREADABLE, False),
    (content(b"-1\n"), CursorState.UNREADABLE, False),
    (content(b"3\n{}\n"), CursorState.UNREADABLE, False),
    (content(b'3\n{"log": "00'), CursorState.UNREADABLE, False),
    (content(OTHER), CursorState.FOREIGN, False),
    (content(b"7\n"), CursorState.BEYOND, False),
    (content(b"18446744073709551615\n"), CursorState.BEYOND, False),
    (content(b"3" * 5000), CursorState.UNREADABLE, False),
    (directory, CursorState.UNREADABLE, False),
    (fifo, CursorState.UNREADABLE, False),
    (loop, CursorState.UNREADABLE, False),
    (content(b"2\n"), CursorState.VALID, False),
    (content(b"3\n"), CursorState.VALID, True),
    (content(b"3"), CursorState.VALID, True),
    (content(b"  3 \n\n"), CursorState.VALID, True),
]


def test_whatever_is_in_place_of_a_cursor_is_accepted_or_pins_with_a_message(built: Built) -> None:
    """Nothing that is not certainly a cursor at 3 or behind it lets the segment go."""
    built.log.set_cursor("b", 5)
    path = built.root.cursor("a", "processed")
    for make, state, frees in FOUND:
        make(path)
        (cursor,) = claims(built).cursors["a"]

        assert cursor.state is state
        assert bool(cursor.message) == (state is not CursorState.VALID)
        assert pins(built) == ([] if frees else [("a", "processed", cursor.effective, 3)])
        path.rmdir() if make is directory else path.unlink()


def test_a_cursor_file_that_no_group_can_have_holds_back_with_a_message(built: Built) -> None:
    """Somebody means it; so it is not passed over."""
    built.log.set_cursor("a", 3)
    built.log.set_cursor("b", 5)
    (built.root.cursor_directory("a") / "my group.cursor").write_text("3\n")

    assert pins(built) == [("a", "my group", 0, 3)]
    assert "my group.cursor" in claims(built).cursors["a"][-1].message


def test_a_valid_cursor_that_was_half_written_is_the_number_it_shows_or_nothing(built: Built) -> None:
    """However much of its bytes a power cut leaves, it never frees more than the whole of it."""
    built.log.set_cursor("b", 5)
    built.log.set_cursor("a", 3)
    path = built.root.cursor("a", "processed")
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        (cursor,) = claims(built).cursors["a"]
        assert cursor.effective in (0, 3)


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
    built = Built(unlocked / "root")
    built.lines("a", [b"x"] * 3)
    built.cut()
    built.log.set_cursor("a", 3)
    for path in (built.root.path, *built.root.path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (built.root.route("a") / hidden).chmod(0)
    script = (
        "import os, sys; from wald.log import Log; from wald.retention.blockers import read_cursor_snapshot\n"
        "os.getuid() or (os.setgid(65534), os.setuid(65534))\n"
        "log = Log(sys.argv[1]); claims = read_cursor_snapshot(log.root, log_id=log.identity.log_id)\n"
        "(cursor,) = claims.cursors['a']; print(cursor.state.value, cursor.effective, cursor.message)"
    )
    done = subprocess.run([sys.executable, "-c", script, built.root.path], capture_output=True, text=True, check=False)
    built.root.route("a").chmod(0o755)
    built.root.cursor_directory("a").chmod(0o755)

    assert done.stdout.startswith("unreadable 0 "), done.stderr
    assert "permission denied" in done.stdout.lower()


def test_a_cursor_that_moves_beyond_a_head_read_before_it_counts(built: Built) -> None:
    """The head is read first; a cursor that seems beyond it is judged once more with the head of by then."""

    class Growing(Root):
        def route_names(self) -> list[str]:
            built.log.set_cursor("a", built.lines("a", [b"meanwhile"]))
            return super().route_names()

    (cursor,) = read_cursor_snapshot(Growing(built.root.path), log_id=built.log_id).cursors["a"]

    assert (cursor.state, cursor.effective) == (CursorState.VALID, 7)


def test_without_a_head_what_is_sealed_tells_how_far_cursors_may_be(built: Built) -> None:
    built.log.set_cursor("a", 3)
    built.log.set_cursor("b", 5)
    built.root.head.unlink()

    assert pins(built) == []


def test_a_pin_holds_until_its_cursor_has_come_or_its_claim_is_given_up(built: Built) -> None:
    built.log.set_cursor("a", 3)
    retire_route(built.root, built.disk, "b", now="")
    for pin, still in [
        (Pin("a", "processed", 0, 3), False),
        (Pin("a", "processed", 0, 4), True),
        (Pin("a", "removed", 0, 3), False),
        (Pin("a", "removed", 0, 4), False),
        (Pin("b", "processed", 0, 5), False),
        (Pin("gone", "processed", 0, 1), True),
    ]:
        assert claims(built).still_pins(pin) == still


def test_a_retired_route_has_said_no_more_than_its_groups_have_read(built: Built) -> None:
    """Unread records of a retired route are waived, and problems with its cursors do not matter."""
    index = sealed_index(Segment(1, Kind.SEALED, built.path(1, Kind.SEALED)), built.log_id)
    routes = RouteTable.from_entries(index.routes)
    built.log.set_cursor("a", 3)
    built.log.set_cursor("b", 4)
    for route in ("a", "b"):
        retire_route(built.root, built.disk, route, now="")
    assert claims(built).waived_routes(routes) == ("b",)

    built.root.cursor("a", "processed").write_text("three")
    assert claims(built).waived_routes(routes) == ("a", "b")
    assert claims(built).problems() == []
    add_route(built.root, built.disk, "a")
    assert len(claims(built).problems()) == 1


def test_of_a_route_whose_directory_is_gone_nothing_is_read(built: Built) -> None:
    built.log.set_cursor("a", 3)
    before = claims(built)
    shutil.rmtree(built.root.route("a"))

    assert (before.floor("a"), claims(built).floor("a")) == (3, 0)
    assert not claims(built).pins_nothing_new(before)


def test_only_a_cursor_that_is_moved_back_pins_anything_new(built: Built) -> None:
    built.log.set_cursor("a", 2)
    built.log.set_cursor("b", 5)
    before = claims(built)
    for at, lets_go in ((1, False), (2, True), (3, True)):
        built.log.set_cursor("a", at, rewind=True)
        assert claims(built).pins_nothing_new(before) is lets_go


def test_a_segment_that_is_not_what_its_name_says_is_reported(built: Built) -> None:
    path = built.path(2, Kind.SEALED)
    shutil.copy(built.path(1, Kind.SEALED), path)
    with pytest.raises(Damaged, match="contains segment 1"):
        sealed_index(Segment(2, Kind.SEALED, path), built.log_id)
    with pytest.raises(Damaged, match="belongs to log"):
        sealed_index(Segment(1, Kind.SEALED, built.path(1, Kind.SEALED)), b"0123456789abcdef")
