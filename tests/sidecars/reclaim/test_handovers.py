"""RECLAIM keeps the records of an unfinished handover even if all groups have read them: a retry looks for them."""

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest
from contents import records
from draining import InProcess
from forgetting import forget
from logs import Built
from running import Daemon, eventually, output_of, reclaim, run

from wald.checking.checker import Level
from wald.checking.verifier import verify
from wald.files.listing import Segment
from wald.files.routes import add_route, retire_route
from wald.format.head import CursorLines, encode_cursor
from wald.format.ledger_lines import encode_line
from wald.format.names import ROUTE_MAX_LENGTH, SEQUENCE_MAX, Kind
from wald.retention.blockers import read_cursor_snapshot, sealed_index
from wald.retention.cursors import remove_cursor
from wald.retention.handovers import PIN_MAX_BYTES, ROUTES_MAX, Part, PinWriter, decode_pin, encode_pin, handover_pins
from wald.work.group import WorkGroup
from wald.work.ownership import succeed_workers

DYING = """
import os, signal, sys, time, wald, wald.work.dead_letters as maintenance
send = maintenance.send
def killed(*arguments, **options):
    send(*arguments, **options)
    os.kill(os.getpid(), signal.SIGKILL)
maintenance.send = killed
"""
WORKS = """
work = wald.WorkGroup(sys.argv[1], "a", "g")
work.lease("w", 1, wait=60)
work.give_up("w", [1], "bad")
time.sleep(600)
"""
DRAINS = """
from wald_drain.command import main
sys.argv = ["wald-drain", "--root", sys.argv[1], "a", "--tries", "1", "--exit-at-end", "--", "false"]
main()
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """Create a log with record 1 of route a in a separate segment."""
    with Daemon(tmp_path / "log") as running:
        output_of("route", "add", "a", "--root", running.root)
        output_of("append", "a", "--root", running.root, stdin=b"poison\n")
        running.ask("CUT")
        yield running


def dies(root: Path, script: str) -> None:
    """Run a process that is killed after it has written the dead letter."""
    assert run([sys.executable, "-c", DYING + script, str(root)]).returncode == -signal.SIGKILL


def drained(root: Path, *, is_killed: bool) -> None:
    if is_killed:
        dies(root, DRAINS)
    else:
        InProcess(root).run("false")


def worked(root: Path, *, is_killed: bool) -> None:
    if is_killed:
        dies(root, WORKS)
        return
    with WorkGroup(root, "a", "g") as work:
        eventually(lambda: work.floor == 1)


@pytest.mark.parametrize("give_up", [drained, worked])
def test_a_dead_letter_that_was_read_stays_until_its_handover_is_finished(
    daemon: Daemon, give_up: Callable[..., None]
) -> None:
    """It is read and its segment is complete when the handover is interrupted, and the daemon forgets who sent it."""
    give_up(daemon.root, is_killed=True)
    (letter,) = records(daemon.root, "dead_letter")
    daemon.ask("CUT")
    output_of("cursor", "set", "dead_letter", letter.sequence, "--group", "processed", "--root", daemon.root)
    forget(daemon)
    reclaim(daemon.root, "--grace", 0)
    assert "has not finished a handover" in output_of("explain", "--root", daemon.root).decode()
    give_up(daemon.root, is_killed=False)

    assert [each.sequence for each in records(daemon.root, "dead_letter")] == [letter.sequence]
    assert not list(daemon.root.glob("routes/a/cursors/*.pin"))
    reclaim(daemon.root, "--grace", 0)
    assert [each.sequence for each in records(daemon.root, "dead_letter")] == []


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Records 1 and 2 of route a, which all have read, in a complete segment."""
    built = Built(tmp_path / "log")
    built.lines("a", [b"x"] * 2)
    built.cut()
    built.seal()
    built.lines("b", [b"y"])
    built.log.set_cursor("a", 2)
    return built


def pins(built: Built) -> list[tuple[str, int]]:
    claims = read_cursor_snapshot(built.root, log_id=built.log_id)
    index = sealed_index(Segment(1, Kind.SEALED, built.path(1, Kind.SEALED)), built.log_id)
    return [(pin.group, pin.at) for pin in claims.pins(index.routes)]


def test_a_pin_counts_like_a_cursor(built: Built) -> None:
    drain, work = (PinWriter(built.root, built.disk, "b", "g", built.log_id, part) for part in get_args(Part))
    drain.pin({"a": 1})
    assert pins(built) == [("b/g", 1)]
    work.pin({"a": 0, "gone": 5})
    assert pins(built) == [("b/g", 0)]
    work.unpin()
    assert pins(built) == [("b/g", 1)]
    drain.pin({"a": 2})
    assert pins(built) == []
    drain.unpin()
    drain.unpin()
    assert handover_pins(built.root, built.log_id) == []


@pytest.mark.parametrize("removed", ["group", "route"])
def test_the_pin_of_a_removed_group_and_that_of_a_retired_route_do_not_count(built: Built, removed: str) -> None:
    built.log.set_cursor("b", 0, "g")
    PinWriter(built.root, built.disk, "b", "g", built.log_id, "drain").pin({"a": 1})
    assert pins(built) == [("b/g", 1)]
    if removed == "group":
        remove_cursor(built.root, "b", "g", disk=built.disk)
    else:
        retire_route(built.root, built.disk, "b", now="now")

    assert pins(built) == []


needs_to_give_files = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def others(path: Path, user: int = 54321) -> None:
    os.chown(path, user, user)


def given(path: Path) -> None:
    others(path, 54322)


def consumers_pin(built: Built, *, cursor: bytes | None = b"0\n") -> Path:
    """Pin on route a by a user who may only create files in route b."""
    add_route(built.root, built.disk, "b", consumers="group")
    path = built.root.cursor_directory("b") / "g.pin"
    path.write_bytes(encode_pin(built.log_id, {"drain": {"a": 0}}))
    if cursor is not None:
        path.with_suffix(".cursor").write_bytes(cursor)
        others(path.with_suffix(".cursor"))
    others(path)
    return path


@needs_to_give_files
def test_the_pin_of_a_cursor_owner_counts_with_the_cursor_of_the_same_user(built: Built) -> None:
    consumers_pin(built)

    assert pins(built) == [("b/g", 0)]


def linked(path: Path) -> None:
    os.link(path, path.parents[1] / "another name")


def planted(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parents[1] / "processed.cursor")


SPOILT: dict[str, tuple[bytes | None, str, Callable[[Path], None] | None]] = {
    "no cursor": (None, "", None),
    "no number": (b"none\n", "", None),
    "of another log": (encode_cursor(CursorLines(0, bytes(16), 1, "g", "2026-11-21T10:00:00Z")), "", None),
    "a symbolic link": (b"0\n", ".cursor", planted),
    "a linked cursor": (b"0\n", ".cursor", linked),
    "a linked pin": (b"0\n", ".pin", linked),
    "another's cursor": (b"0\n", ".cursor", given),
    "another's pin": (b"0\n", ".pin", given),
}


@needs_to_give_files
@pytest.mark.parametrize(("cursor", "suffix", "spoil"), SPOILT.values(), ids=SPOILT)
def test_the_pin_of_a_cursor_owner_without_a_cursor_of_the_same_user_pins_nothing(
    built: Built, cursor: bytes | None, suffix: str, spoil: Callable[[Path], None] | None
) -> None:
    path = consumers_pin(built, cursor=cursor)
    if spoil is not None:
        spoil(path.with_suffix(suffix))

    assert pins(built) == []
    assert f"{path}: " in "".join(read_cursor_snapshot(built.root, log_id=built.log_id).problems())


@needs_to_give_files
def test_more_files_of_groups_than_are_looked_at_pin_all(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pin of an unfinished handover may be among those that are not looked at."""
    path = consumers_pin(built)
    monkeypatch.setattr("wald.files.layout.GROUP_FILES_MAX", 1)

    assert pins(built) == [("b/cursors", 0)]
    assert f"{path.parent}: more than" in "".join(read_cursor_snapshot(built.root, log_id=built.log_id).problems())


def line(log_id: bytes, **fields: object) -> bytes:
    return encode_line({"pin": 1, "log": log_id.hex(), "drain": {}, "work": {}} | fields)


BAD: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "numbers": lambda _: b"5\n",
    "nested": lambda _: b"[" * 4000,
    "torn": lambda log_id: line(log_id, drain={"a": 1})[:-5],
    "of another log": lambda _: line(bytes(16), drain={"a": 1}),
    "negative": lambda log_id: line(log_id, drain={"a": -1}),
    "beyond": lambda log_id: line(log_id, drain={"a": 1 << 64}),
    "text": lambda log_id: line(log_id, drain={"a": "1"}),
    "truth": lambda log_id: line(log_id, drain={"a": True}),
    "fraction": lambda log_id: line(log_id, work={"a": 1.5}),
    "route": lambda log_id: line(log_id, work={"../a": 1}),
    "list": lambda log_id: line(log_id, work=["a"]),
    "version": lambda log_id: line(log_id, pin=2),
    "large": lambda log_id: line(log_id, drain={"a": 1}, more="x" * PIN_MAX_BYTES),
}


def test_what_is_no_pin_pins_nothing_and_is_reported(built: Built) -> None:
    """Whoever may leave a cursor may leave it."""
    for content in BAD.values():
        path = built.root.cursor_directory("b") / "g.pin"
        path.write_bytes(content(built.log_id))

        assert pins(built) == []
        assert str(path) in "".join(read_cursor_snapshot(built.root, log_id=built.log_id).problems())
        assert [finding.path for finding in verify(built.root) if finding.level is Level.ERROR] == [path]


def test_a_pin_of_many_routes_with_long_names_is_small_enough() -> None:
    routes = [f"{number:02}{'x' * (ROUTE_MAX_LENGTH - 2)}" for number in range(ROUTES_MAX)]
    data = encode_pin(bytes(16), {part: dict.fromkeys(routes, SEQUENCE_MAX) for part in get_args(Part)})

    assert len(data) <= PIN_MAX_BYTES
    assert set(decode_pin(data, bytes(16))["work"]) == set(routes)


def test_a_pin_that_the_disk_fails_to_read_counts_as_a_pin_of_everything(built: Built) -> None:
    PinWriter(built.root, built.disk, "b", "g", built.log_id, "drain").pin({"a": 1})
    real = os.open

    def failing(path: str | Path, flags: int, *more: int, **options: int) -> int:
        if os.fspath(path).endswith("g.pin"):
            raise OSError(errno.EIO, "Input/output error", path)
        return real(path, flags, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", failing)
        (pin,) = handover_pins(built.root, built.log_id)
    assert (pin.positions, pin.problem) == ({"b": 0, "a": 0}, "Input/output error")


def test_the_pin_of_workers_that_were_killed_ends_with_the_reader_that_takes_their_place(built: Built) -> None:
    with WorkGroup(built.root.path, "b", "g") as group:
        group.ack("w", [delivery.record.sequence for delivery in group.lease("w", 1)])
    PinWriter(built.root, built.disk, "b", "g", built.log_id, "work").pin({"a": 1})

    succeed_workers(built.log, "b", "g")

    assert handover_pins(built.root, built.log_id) == []
