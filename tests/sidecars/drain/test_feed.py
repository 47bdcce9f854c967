"""Records passed to a command: which ones, how often, and the cursor afterwards; no daemon runs."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from damage import flip_bit, peak_bytes
from draining import InProcess
from logs import Built
from reclaiming import pinned_hole

from wald.errors import Damaged, NotFound
from wald.format.names import Kind
from wald_drain.run import _PORTION_MAX_BYTES as PORTION_MAX_BYTES


@pytest.fixture
def built(root: Path) -> Built:
    """Records 1 to 10 on route a, with a record of route b in between."""
    log = Built(root)
    log.lines("a", [b"1", b"2", b"3"])
    log.lines("b", [b"other"])
    log.lines("a", [b"5", b"6", b"7", b"8", b"9", b"10"])
    return log


class Keeping:
    """Command that stores its input and environment by run and exits with the configured codes."""

    def __init__(self, folder: Path, exits: str = "exit 0") -> None:
        self.got = folder / "got"
        self.got.mkdir()
        script = 'n=$(ls "$0" | wc -l); cat > "$0/$n"; echo "$WALD_ROUTE $WALD_GROUP $WALD_FIRST-$WALD_LAST '
        script += '$WALD_COUNT $WALD_TRY" >> "$0.reported"; ' + exits
        self.words = ("sh", "-c", script, self.got)

    @property
    def runs(self) -> list[bytes]:
        return [(self.got / name).read_bytes() for name in sorted(os.listdir(self.got), key=int)]

    @property
    def reported(self) -> list[str]:
        return self.got.with_suffix(".reported").read_text().splitlines()


def cursor(built: Built, group: str = "processed") -> int:
    return built.log.cursor("a", group).effective


def test_success_moves_the_cursor_to_the_end(built: Built, tmp_path: Path) -> None:
    """The next drain begins behind it, and starts no command if there is nothing to do."""
    command, inside = Keeping(tmp_path), InProcess(built.root.path)
    inside.run(*command.words)
    assert command.runs == [b"1\n2\n3\n5\n6\n7\n8\n9\n10\n"]
    assert command.reported == ["a processed 1-10 9 1"]
    assert cursor(built) == 10
    assert inside.reported == []

    inside.run(*command.words)
    assert len(command.runs) == 1
    built.log.set_cursor("a", 6, rewind=True)
    inside.run(*command.words)
    assert command.runs[1:] == [b"7\n8\n9\n10\n"]


@pytest.mark.parametrize("event", ["stop", "stop_requested"])
def test_no_command_is_started_after_a_stop_or_a_signal(built: Built, tmp_path: Path, event: str) -> None:
    """Even if nothing else has heard of the signal."""
    command, inside = Keeping(tmp_path), InProcess(built.root.path)
    getattr(inside, event).set()
    inside.run(*command.words, exit_at_end=event == "stop_requested")

    assert command.runs == []
    assert cursor(built) == 0


def test_batches_have_at_most_so_many_records(built: Built, tmp_path: Path) -> None:
    command = Keeping(tmp_path)
    InProcess(built.root.path).run(*command.words, records_max=4, group="g")

    assert command.runs == [b"1\n2\n3\n5\n", b"6\n7\n8\n9\n", b"10\n"]
    assert command.reported == ["a g 1-5 4 1", "a g 6-9 4 1", "a g 10-10 1 1"]
    assert (cursor(built, "g"), cursor(built)) == (10, 0)


def test_failure_gets_the_very_same_batch_again(built: Built, tmp_path: Path) -> None:
    command, inside = Keeping(tmp_path, "test $WALD_TRY = 3 || exit 7"), InProcess(built.root.path)
    inside.run(*command.words, tries=None, records_max=6)

    assert command.runs == [b"1\n2\n3\n5\n6\n7\n"] * 3 + [b"8\n9\n10\n"] * 3
    assert command.reported[:3] == ["a processed 1-7 6 1", "a processed 1-7 6 2", "a processed 1-7 6 3"]
    assert inside.reported[:2] == [
        "a 1 to 7: exit 7, try 1, retrying in 0.1 s",
        "a 1 to 7: exit 7, try 2, retrying in 0.2 s",
    ]
    assert cursor(built) == 10


POISONED = "! grep -qx '[69]' $0/$n"  # fails on records 6 and 9


def test_a_batch_that_fails_is_halved_until_the_record_that_fails_stands_alone(built: Built, tmp_path: Path) -> None:
    """Records before it are processed and records after it wait: the order is kept."""

    class Stopping(InProcess):
        def report(self, line: str) -> None:
            super().report(line)
            if line.startswith("a 6: exit 1, try 4,"):
                self.stop.set()

    command, inside = Keeping(tmp_path, POISONED), Stopping(built.root.path)
    inside.run(*command.words, tries=None)

    assert command.reported == [
        *(f"a processed 1-10 9 {number}" for number in (1, 2, 3)),
        "a processed 1-5 4 1",
        "a processed 6-10 5 1",
        "a processed 6-7 2 1",
        *(f"a processed 6-6 1 {number}" for number in (1, 2, 3, 4)),
    ]
    assert cursor(built) == 5
    assert inside.reported[2:5] == [
        "a 1 to 10: exit 1, try 3, retrying in halves in 0.1 s",
        "a 6 to 10: exit 1, try 1, retrying in halves in 0.1 s",
        "a 6 to 7: exit 1, try 1, retrying in halves in 0.1 s",
    ]


def test_exit_75_is_no_try(built: Built, tmp_path: Path) -> None:
    command, inside = Keeping(tmp_path, "test $(ls $0 | wc -l) -gt 3 || exit 75"), InProcess(built.root.path)
    inside.run(*command.words, tries=1)

    assert command.reported == ["a processed 1-10 9 1"] * 4
    assert inside.reported == [
        f"a 1 to 10: exit 75 (try again later), retrying in {pause} s" for pause in (0.1, 0.2, 0.4)
    ]
    assert cursor(built) == 10


def test_what_arrives_between_two_tries_is_not_added(built: Built, tmp_path: Path) -> None:
    class Arriving(InProcess):
        def report(self, line: str) -> None:
            built.lines("a", [b"late"])

    command = Keeping(tmp_path, "test $WALD_TRY = 2")
    Arriving(built.root.path).run(*command.words, tries=2)

    assert command.runs[0] == command.runs[1]
    assert cursor(built) == 10


def test_json_has_keys_times_headers_and_binary_values(built: Built, tmp_path: Path) -> None:
    built.columns("a", [b"v", b"\xff"], keys=[b"k", None], times_ns=[5, 6], headers=[b'{"h":"1"}', None])
    built.log.set_cursor("a", 10)
    command = Keeping(tmp_path)
    InProcess(built.root.path).run(*command.words, stdin_format="json")

    (run,) = command.runs
    reported = [json.loads(line) for line in run.splitlines()]
    assert reported == [json.loads(record.to_json()) for record in built.log.records("a", 11)]
    assert (reported[0]["key"], reported[0]["event_time_ns"], reported[0]["headers"]) == ("k", 5, {"h": "1"})
    assert reported[1]["value_hex"] == "ff"


def test_stop_in_a_pause_ends_it_at_once(built: Built, tmp_path: Path) -> None:
    class Stopping(InProcess):
        def report(self, line: str) -> None:
            self.stop.set()

    command = Keeping(tmp_path, "exit 1")
    Stopping(built.root.path).run(*command.words, tries=5, exit_at_end=False)

    assert len(command.runs) == 1
    assert cursor(built) == 0


def test_it_ends_at_damage_with_the_cursor_in_front_of_it(root: Path, tmp_path: Path) -> None:
    """A cursor past the damage would let RECLAIM delete data that may be repairable; setting the cursor skips it."""
    built = Built(root)
    built.lines("a", [b"1", b"2"])
    begin = built.writer.position
    built.lines("a", [b"3", b"4"])
    built.lines("a", [b"5"])
    raw = built.path(1, Kind.RAW)
    flip_bit(raw, begin + 72)  # after the header and the route name
    command, inside = Keeping(tmp_path), InProcess(root)
    for _ in range(2):
        with pytest.raises(Damaged, match="records 3 to 4") as reported:
            inside.run(*command.words)
        assert "cursor set a 4 --group processed" in reported.value.hint
        assert command.runs == [b"1\n2\n"]
        assert cursor(built) == 2
    built.log.set_cursor("a", 4)
    inside.run(*command.words)
    assert command.runs == [b"1\n2\n", b"5\n"]
    assert cursor(built) == 5


def test_a_lost_front_is_damage_and_a_reclaimed_one_is_nothing_to_a_new_group(root: Path, tmp_path: Path) -> None:
    built = Built(root)
    for number in range(4):
        built.lines("a", [b"%d" % number])
        built.cut()
    built.seal()
    built.reclaim(1)
    command, inside = Keeping(tmp_path), InProcess(root)
    inside.run(*command.words)
    assert command.runs == [b"1\n2\n3\n"]
    said = "group processed is new on route a and starts at record 2: record 1 was already reclaimed"
    assert inside.reported == [said]
    built.lines("a", [b"4"])
    inside.run(*command.words)
    assert (command.runs[1:], inside.reported) == ([b"4\n"], [said])
    built.path(2, Kind.SEALED).unlink()
    with pytest.raises(Damaged, match="record 2 is missing"):
        inside.run(*command.words, group="new")
    assert len(command.runs) == 2


@pytest.mark.parametrize("order", ["strict", "key"])
def test_a_new_group_passes_over_what_was_reclaimed_behind_a_pinned_segment(
    root: Path, tmp_path: Path, order: str
) -> None:
    built = Built(root)
    pinned_hole(built)
    command, inside = Keeping(tmp_path), InProcess(root)
    inside.run(*command.words, order=order)
    assert b"".join(command.runs) == b"2\n3\n7\n8\n9\n"
    (said,) = [line for line in inside.reported if "RECLAIM" in line]
    assert said.startswith("a: ")
    assert said.endswith("RECLAIM has removed records 4 to 6: 3 records of route a are missing; continuing after them")
    assert cursor(built) == 9


def test_a_cursor_that_cannot_be_trusted_stops_it(built: Built, tmp_path: Path) -> None:
    path = built.root.cursor("a", "processed")
    path.write_text("not a number\n")
    command = Keeping(tmp_path)
    with pytest.raises(Damaged, match="it is unknown which records have been processed"):
        InProcess(built.root.path).run(*command.words)

    assert command.runs == []
    assert path.read_text() == "not a number\n"


def test_records_reclaimed_unread_stop_it(root: Path, tmp_path: Path) -> None:
    """Only expired records can be reclaimed unread; drain does not silently continue after them."""
    built = Built(root)
    built.lines("a", [b"1"])
    built.cut()
    built.lines("a", [b"2"])
    built.seal()
    built.log.set_cursor("a", 0)
    built.reclaim(1)
    command = Keeping(tmp_path)
    with pytest.raises(NotFound, match="RECLAIM has removed record 1"):
        InProcess(root).run(*command.words)

    assert command.runs == []


@pytest.mark.parametrize(
    ("before", "to", "more", "options", "runs"),
    [
        pytest.param(0, 9, "", {"records_max": 2}, [b"1\n2\n", b"10\n"], id="ahead"),
        pytest.param(6, 2, "", {}, [b"7\n8\n9\n10\n", b"3\n5\n6\n7\n8\n9\n10\n"], id="back"),
        pytest.param(
            0, 5, "exit 1;", {"tries": None}, [b"1\n2\n3\n5\n6\n7\n8\n9\n10\n", b"6\n7\n8\n9\n10\n"], id="between tries"
        ),
    ],
)
def test_a_cursor_that_a_shell_moves_while_the_command_runs_is_followed(
    built: Built, tmp_path: Path, before: int, to: int, more: str, options: dict[str, Any], runs: list[bytes]
) -> None:
    built.log.set_cursor("a", before)
    path, inside = built.root.cursor("a", "processed"), InProcess(built.root.path)
    command = Keeping(tmp_path, f"[ $n -gt 0 ] || {{ echo {to} > {path}; {more} }}")
    inside.run(*command.words, **options)

    assert command.runs == runs
    assert inside.reported[-1] == f"a: the cursor was moved to {to}; continuing after it"
    assert cursor(built) == 10


def test_memory_is_that_of_a_batch(root: Path) -> None:
    """Memory stays bounded for any backlog and any requested record count: 48 MiB in batches of 8 MiB."""
    built = Built(root, segment_max_bytes=16 << 20)
    for _ in range(48):
        built.lines("a", [b"x" * 1023] * 1024)

    assert peak_bytes(lambda: InProcess(root).run("true", records_max=1_000_000)) < 5 * PORTION_MAX_BYTES
    assert cursor(built) == built.last


@pytest.mark.parametrize("content", [None, b"garbage"])
def test_without_a_head_what_was_given_to_the_command_is_processed(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    """Sealed records are durable; the command must not receive the same ones forever because the cursor cannot move."""
    built.cut()
    built.seal()
    built.root.head.unlink()
    if content is not None:
        built.root.head.write_bytes(content)
        monkeypatch.setattr("wald.segments.durable_end._SLOW_READS", 2)  # no daemon is writing it
    command = Keeping(tmp_path)
    InProcess(built.root.path).run(*command.words)

    assert command.runs == [b"1\n2\n3\n5\n6\n7\n8\n9\n10\n"]
    assert built.log.cursor("a").sequence == 10
