"""``wald group release``, ``skip`` and ``remove``: with an owner, without one, and with one that hangs or dies."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from logs import Built
from owning import Owning
from running import TIMEOUT_SECONDS, command, eventually, launched, output_of, refusal_of, run
from tracing import traced

from wald.errors import Refused
from wald.files.ledger_read import entries_of
from wald.work.group import WorkGroup
from wald.work.ownership import ask_owner


@pytest.fixture
def log(tmp_path: Path) -> Built:
    """A log with records 1 to 10 of route a, 11 of route b and 12 of route a."""
    built = Built(tmp_path / "log")
    built.lines("a", [b"%d" % number for number in range(1, 11)])
    built.lines("b", [b"x"])
    built.lines("a", [b"12"])
    return built


def changed(log: Built, name: str, *words: object) -> dict[str, Any]:
    line = ("group", name, "a", "g", *words, "--root", log.root.path, "--json")
    return dict(json.loads(output_of(*line)))


def refused(log: Built, name: str, *words: object) -> tuple[int, str, str]:
    return refusal_of("group", name, "a", "g", *words, "--root", log.root.path)


def skips(log: Built) -> list[dict[str, Any]]:
    return list(entries_of(log.root.ledger / "skips.jsonl"))


def out(log: Built) -> list[int]:
    lines = output_of("group", "pending", "a", "g", "--root", log.root.path, "--json").splitlines()
    found = [json.loads(line) for line in lines]
    return [at for each in found for at in range(each["first"], each["last"] + 1) if each["kind"] == "out"]


def test_an_owner_accepts_requests_whatever_the_length_of_its_name_or_reports_that_it_cannot(log: Built) -> None:
    # An owner accepts requests whatever the length of its name.
    for length in (1, 87, 127):
        name = "g" * length
        directory = log.root.cursor_directory("a")
        with WorkGroup(log.root.path, "a", name) as work:
            assert len(work.lease("worker-1", 3, wait=5)) == 3
            assert ask_owner(log.root, "a", name, {"do": "release", "worker": "worker-1"}, TIMEOUT_SECONDS) == 3
            assert (directory / f"{name}.ask").stat().st_mode & 0o777 == 0o600
        assert not [each for each in directory.iterdir() if each.suffix in (".ask", ".tmp")]

    # An owner reports that it accepts no requests.
    (directory / "g.ask").mkdir()
    lines: list[str] = []
    with WorkGroup(log.root.path, "a", "g", report=lines.append) as work:
        assert len(work.lease("worker-1", 3, wait=5)) == 3
    assert ["g.ask: cannot listen: " in line for line in lines] == [True]
    assert not [*directory.glob("*.tmp")]


def test_release_of_a_worker_that_has_nothing_is_refused(log: Built) -> None:
    owner = Owning(log.root.path, "a", "g")
    owner.lease("worker-1", 1)
    code, _, hint = refused(log, "release", "worker-2")
    assert (code, hint.endswith("group pending a g")) == (3, True)
    owner.kill()
    code, message, _ = refused(log, "release", "worker-1")
    assert (code, "no process works" in message) == (9, True)


@pytest.mark.parametrize("runs", [True, False])
def test_what_is_skipped_is_done_for_good_and_on_record(log: Built, runs: bool) -> None:
    owner = Owning(log.root.path, "a", "g")
    owner.lease("worker-1", 4)
    if not runs:
        owner.kill()
    assert changed(log, "skip", "2..3", "--why", "no such customer")["records"] == 2
    if runs:
        assert owner.ask("ack", "worker-1", [2]) == []
        owner.kill()
    with Owning(log.root.path, "a", "g") as again:
        assert again.lease("worker-1", 9) == [1, 4, 5, 6, 7, 8, 9, 10, 12]
    named = ("route", "group", "first", "sequence", "records", "why")
    assert [entry["event"] for entry in skips(log)] == ["skipping-record", "skipped-record"]
    assert [[entry[name] for name in named] for entry in skips(log)] == [["a", "g", 2, 3, 2, "no such customer"]] * 2
    assert "a/g skipped 2 to 3 by " in output_of("history", "--root", log.root.path).decode()


def test_records_that_the_group_has_not_read_can_be_skipped(log: Built) -> None:
    """Records of other routes in the range are ignored and not counted."""
    with Owning(log.root.path, "a", "g") as owner:
        assert changed(log, "skip", "10..12")["records"] == 2
        assert owner.lease("worker-1", 9) == list(range(1, 10))
        assert owner.ask("lease", "worker-1") == []


NOT_SKIPPED = [
    ("13", 9, "beyond the last durable record, 12"),
    ("5..13", 9, "beyond the last durable record, 12"),
    ("1..4", 9, "has already processed every record up to 2"),
    ("2", 3, "of route a are not pending for group g"),
    ("11", 3, "of route a are not pending for group g"),
    ("4", 3, "of route a are not pending for group g"),
    ("4..3", 2, "ends before it begins"),
    ("1..2..3", 2, "neither a sequence nor a range"),
    ("first", 2, "neither a sequence nor a range"),
    ("-1", 2, "-1"),
]


def test_only_what_is_left_to_do_is_skipped(log: Built) -> None:
    with Owning(log.root.path, "a", "g") as owner:
        owner.lease("worker-1", 4)
        owner.ask("ack", "worker-1", [1, 2, 4])
        for records, code, said in NOT_SKIPPED:
            done = run(command("group", "skip", "a", "g", "--root", log.root.path, "--", records))
            assert (done.returncode, said in done.stderr.decode()) == (code, True), done.stderr
    assert not (log.root.ledger / "skips.jsonl").exists()


def test_an_owner_that_hangs_changes_nothing_later(log: Built) -> None:
    """A request whose command timed out is not applied when the owner resumes, and the ledger records the failure."""
    with Owning(log.root.path, "a", "g") as owner:
        owner.lease("worker-1", 2)
        os.kill(owner.pid, signal.SIGSTOP)
        code, message, hint = refused(log, "skip", 1, "--timeout", "0.3s")
        os.kill(owner.pid, signal.SIGCONT)
        assert (code, "nothing was changed" in message, str(owner.pid) in hint) == (6, True, True)
        assert changed(log, "release", "worker-1")["records"] == 2
        assert owner.lease("worker-1", 1) == [1]
    assert [entry["event"] for entry in skips(log)] == ["skipping-record", "skip-failed"]


def connected(log: Built) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(TIMEOUT_SECONDS)
    connection.connect(str(log.root.cursor_directory("a") / "g.ask"))
    return connection


RELEASE = json.dumps({"do": "release", "worker": "worker-1"}).encode()


@pytest.mark.parametrize("end", [socket.socket.close, lambda each: each.shutdown(socket.SHUT_RDWR)])
def test_the_request_of_a_command_that_has_ended_is_not_applied(
    log: Built, end: Callable[[socket.socket], None]
) -> None:
    with Owning(log.root.path, "a", "g") as owner:
        owner.lease("worker-1", 2)
        os.kill(owner.pid, signal.SIGSTOP)
        with connected(log) as asking:
            asking.send(RELEASE)
            end(asking)
            os.kill(owner.pid, signal.SIGCONT)
            with pytest.raises(Refused):  # the owner answers this one after the first
                ask_owner(log.root, "a", "g", {"do": "skip", "first": 11, "last": 11}, TIMEOUT_SECONDS)
        assert out(log) == [1, 2]


def is_connecting(pid: int) -> bool:
    for each in descriptors(pid):
        with suppress(FileNotFoundError):  # closed since the directory was read
            if os.readlink(each).startswith("socket:"):
                return True
    return False


def test_an_owner_that_dies_leaves_the_command_to_do_it(log: Built) -> None:
    owner = Owning(log.root.path, "a", "g")
    owner.lease("worker-1", 2)
    os.kill(owner.pid, signal.SIGSTOP)
    line = command("group", "skip", "a", "g", 1, "--root", log.root.path)
    with launched(line, stdout=subprocess.PIPE) as asking:
        eventually(lambda: is_connecting(asking.pid))
        owner.kill()
        said, _ = asking.communicate()
    assert (asking.returncode, said) == (0, b"a/g: skipped: 1 record of 1\n")
    with Owning(log.root.path, "a", "g") as again:
        assert again.lease("worker-1", 1) == [2]


def descriptors(process: int) -> list[Path]:
    return [each for each in Path(f"/proc/{process}/fd").iterdir() if each.is_symlink()]


def test_nothing_is_answered_before_it_is_on_disk(log: Built, tmp_path: Path) -> None:
    with Owning(log.root.path, "a", "g") as owner:
        owner.lease("worker-1", 2)
        hang = "inject=fdatasync:delay_enter=60000000"
        with traced(owner.pid, tmp_path / "trace", hang, threads=True) as trace, connected(log) as asking:
            asking.send(json.dumps({"do": "skip", "first": 1, "last": 1}).encode())
            assert asking.recv(100) == b"accepted"
            eventually(lambda: "fdatasync" in "".join(trace.calls))
            asking.setblocking(False)
            with pytest.raises(BlockingIOError):
                asking.recv(100)
            asking.settimeout(TIMEOUT_SECONDS)
            trace.release()
            assert json.loads(asking.recv(100)) == {"records": 1}


def test_commands_that_ask_at_once_are_all_answered(log: Built) -> None:
    with Owning(log.root.path, "a", "g") as owner:
        owner.lease("worker-1", 10)
        ranges = ["1", "2..3", "4..6"]
        lines = [command("group", "skip", "a", "g", each, "--root", log.root.path) for each in ranges]
        asking = [launched(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for line in lines]
        said = [each.communicate() for each in asking]
        owner.ask("release", "worker-1")
        left = owner.lease("worker-1", 5)
    done = [each for each, (text, _) in zip(ranges, said, strict=True) if text]
    assert done, said
    skipped = {at for each in done for at in range(int(each.split("..")[0]), int(each.split("..")[-1]) + 1)}
    assert skipped.isdisjoint(left)
    assert {entry["first"] for entry in skips(log)} == {int(each.split("..")[0]) for each in done}


INVALID_REQUESTS = [
    (b"garbage", b""),
    (b"{" * 50_000, b""),
    (b"[]", b"does not support this request"),
    (b'{"do": "remove everything"}', b"does not support this request"),
    (b'{"do": "skip", "first": "1", "last": null}', b"does not support this request"),
    (b'{"do": "release", "worker": ""}', b"must be text"),
]


def test_an_invalid_request_is_refused_and_harms_no_other(log: Built) -> None:
    with Owning(log.root.path, "a", "g") as owner:
        owner.lease("worker-1", 2)
        for request, answer in INVALID_REQUESTS:
            with connected(log) as asking:
                asking.send(request)
                assert asking.recv(100) == (b"accepted" if answer else b"")
                assert answer in asking.recv(1000)
        assert changed(log, "release", "worker-1")["records"] == 2


def test_a_record_that_is_being_given_up_can_be_skipped(log: Built) -> None:
    """No daemon runs to accept dead letters: records 1 and 2 are skipped while 3 is still being given up."""
    with Owning(log.root.path, "a", "g", max_tries=1) as owner:
        owner.lease("worker-1", 3)
        owner.ask("nack", "worker-1", [1, 2, 3], 0, "no such customer")
        assert owner.lease("worker-2", 1) == [4]
        assert changed(log, "skip", "1..2")["records"] == 2
        owner.ask("ack", "worker-2", [4])
        eventually(lambda: "3  " in given_up(log))
        assert "no such customer" in given_up(log)


def given_up(log: Built) -> str:
    said = output_of("group", "pending", "a", "g", "--root", log.root.path).decode()
    return said.partition("GIVING UP")[2]


@pytest.mark.parametrize("runs", [True, False])
def test_remove_leaves_nothing_of_a_group_unless_a_process_owns_it(log: Built, runs: bool) -> None:
    owner = Owning(log.root.path, "a", "g")
    owner.lease("worker-1", 2)
    changed(log, "release", "worker-1")
    if runs:
        code, _, hint = refused(log, "remove")
        assert (code, f"kill {owner.pid}, " in hint) == (5, True)
    owner.kill()
    removed = changed(log, "remove")["paths"]
    assert sorted(Path(each).suffix for each in removed) == [".ask", ".cursor", ".drain", ".work"]
    assert list(log.root.cursor_directory("a").glob("g.*")) == []


def test_the_cursor_of_a_work_group_is_neither_removed_nor_skipped_over_others(log: Built) -> None:
    with Owning(log.root.path, "a", "g"):
        pass
    at = ("--group", "g", "--root", log.root.path)
    code, message, hint = refusal_of("cursor", "remove", "a", *at)
    assert (code, "the cursor of a work group" in message) == (9, True)
    assert hint == f"wald --root {log.root.path} group remove a g"
    code, _, hint = refusal_of("cursor", "skip", "a", 3, *at)
    assert (code, hint) == (9, f"wald --root {log.root.path} group skip a g 3 skips it alone")
