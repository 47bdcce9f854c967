"""``wald group list``, ``show`` and ``pending`` with owners that run, hang or have died, and tables that they print."""

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from logs import Built
from owning import Owning
from running import eventually, output_of, refusal_of, wald

from wald.cli.output import aligned


@pytest.fixture
def log(tmp_path: Path) -> Built:
    """A log with ten records of route a, and 11 to 13 of route b."""
    built = Built(tmp_path / "log")
    built.lines("a", [b"%d" % number for number in range(1, 11)])
    built.lines("b", [b"x"] * 3)
    return built


def listed(log: Built, *arguments: object) -> list[dict[str, Any]]:
    lines = output_of("group", "list", "--root", log.root.path, "--json", *arguments).splitlines()
    return [json.loads(line) for line in lines]


def shown(log: Built, group: str = "g") -> str:
    return output_of("group", "show", "a", group, "--root", log.root.path).decode()


def pending(log: Built, *arguments: object) -> str:
    return output_of("group", "pending", "a", "g", "--root", log.root.path, *arguments).decode()


def test_every_work_group_is_listed_with_its_owner_and_what_is_open(log: Built) -> None:
    log.log.set_cursor("a", 0, "stream")
    with Owning(log.root.path, "a", "g") as owner, Owning(log.root.path, "b", "h"):
        owner.lease("worker-1", 4)
        owner.ask("ack", "worker-1", [1, 3])
        owner.ask("nack", "worker-1", [4], 3600)
        first, second = listed(log)
        assert [each["group"] for each in listed(log, "b")] == ["h"]
    assert (first["route"], first["group"], second["route"], second["group"]) == ("a", "g", "b", "h")
    assert first["owner"]["process"] == owner.pid
    assert first["owner"]["command"].split()[0] == sys.executable
    counts = ("floor", "taken_in", "open_records", "out_records", "waiting_records", "behind_records", "tries_max")
    assert [first[name] for name in counts] == [1, 10, 8, 1, 1, 0, 1]
    assert (second["taken_in"], second["behind_records"]) == (0, 3)


def test_a_group_without_an_owner_says_so_and_what_happens_next(log: Built) -> None:
    owner = Owning(log.root.path, "a", "g")
    owner.lease("worker-1", 2)
    owner.kill()
    said = shown(log)
    assert "owner    none runs; the next owner redelivers leased records at once\n" in said
    assert "next     start its workers\n" in said
    assert "worker-1" in pending(log)
    assert "No owner runs: the next owner redelivers leased records at once; delays still apply." in pending(log)


def test_show_names_who_has_the_oldest_record(log: Built) -> None:
    with Owning(log.root.path, "a", "g") as owner:
        owner.lease("worker-1", 2, lease_for=598)
        assert "record 1, appended 2023-11-14T" in shown(log)
        assert "; worker-1 has it, try 1, 9 min 5" in shown(log)
        assert "tries    1, the maximum of all open records\n" in shown(log)
        owner.ask("nack", "worker-1", [1], 3600)
        assert "; waits until 20" in shown(log)
        owner.ask("release", "worker-1")
        owner.ask("ack", "worker-1", [1])
        assert "record 2, " in shown(log)
        assert "; no worker has it, delivered 1 time\n" in shown(log)
        owner.ask("ack", "worker-1", owner.lease("worker-1", 9))
        assert "next     nothing: every record is done\n" in shown(log)
        assert pending(log) == "no record is leased, delayed, or being given up\n"


def test_pending_has_a_line_for_records_that_are_alike(log: Built) -> None:
    with Owning(log.root.path, "a", "g") as owner:
        owner.lease("worker-1", 3)
        owner.lease("worker-2", 3)
        owner.ask("nack", "worker-2", [5, 6], 3600)
        said = pending(log).splitlines()
        out = [line.split()[:3] for line in said if "worker" in line]
        assert out == [["1", "3", "worker-1"], ["4", "4", "worker-2"]]
        assert [line.split()[:2] for line in said if " min " in line and "worker" not in line] == [["5", "6"]]
        assert "worker-1" not in pending(log, "--worker", "worker-2")
        assert pending(log, "--worker", "worker-3") == "worker-3 has no records\n"
        assert "and 1 more; -n 2 shows all" in pending(log, "-n", 1)
        assert len(pending(log, "--json", "-n", 1).splitlines()) == 2


def test_pending_says_why_a_record_waits(log: Built) -> None:
    with Owning(log.root.path, "a", "g") as owner:
        owner.lease("worker-1", 2)
        owner.ask("nack", "worker-1", [1], 3600, "exit 75\nno route")
        owner.ask("nack", "worker-1", [2], 3600)
        first, second = [line for line in pending(log).splitlines() if " min " in line]
        fields = [json.loads(line) for line in pending(log, "--json").splitlines()]
    assert first.endswith("  1  exit 75 no route")
    assert second.endswith("  1")
    assert [each["reason"] for each in fields] == ["exit 75\nno route", ""]


def test_a_lease_without_an_end_is_shown_as_one(log: Built) -> None:
    with Owning(log.root.path, "a", "g") as owner:
        owner.lease("worker-1", 1, lease_for=float("inf"))
        (line,) = [line for line in pending(log).splitlines() if "worker-1" in line]
        (fields,) = [json.loads(line) for line in pending(log, "--json").splitlines()]
        assert "; worker-1 has it, try 1\n" in shown(log)
    assert line.split()[-5:] == ["-", "until", "it", "ends", "1"]
    assert (fields["until"], fields["until_ns"]) == (None, None)


def test_an_owner_that_is_stopped_is_named_with_what_lets_it_go_on(log: Built) -> None:
    with Owning(log.root.path, "a", "g") as owner:
        os.kill(owner.pid, signal.SIGSTOP)
        said = shown(log)
        os.kill(owner.pid, signal.SIGCONT)
        assert f"next     kill -CONT {owner.pid}: the owner was stopped by a signal or a debugger\n" in said
        eventually(lambda: "kill -CONT" not in shown(log))


def test_a_damaged_journal_is_explained_and_others_are_listed(log: Built) -> None:
    with Owning(log.root.path, "a", "g") as owner, Owning(log.root.path, "b", "h"):
        owner.ask("ack", "worker-1", owner.lease("worker-1", 1))
        owner.ask("ack", "worker-1", owner.lease("worker-1", 1))
    path = log.root.cursor_directory("a") / "g.work"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"damaged\n", *lines[2:]]))
    done = wald("group", "list", "--root", log.root.path)
    assert done.returncode == 4
    assert f"damaged: wald --root {log.root.path} group show a g" in done.stdout.decode()
    assert "\nb      h " in done.stdout.decode()
    done = wald("group", "show", "a", "g", "--root", log.root.path)
    said = done.stdout.decode()
    assert (done.returncode, done.stderr) == (4, b"")
    assert f"{path}: offset {len(lines[0])}: " in said
    behind = lines.index(b"\n") - 2  # preallocated space follows
    assert f"1 valid lines before it, and {behind} after it" in said
    assert f"mv {path} {path}.damaged, then start its workers" in said
    done = wald("inspect", path)
    assert (done.returncode, f"no: offset {len(lines[0])}: " in done.stdout.decode()) == (4, True)
    code, message, hint = refusal_of("group", "pending", "a", "g", "--root", log.root.path)
    assert (code, f"offset {len(lines[0])}" in message, hint.endswith("group show a g")) == (4, True, True)
    done = wald("verify", "--root", log.root.path)
    assert (done.returncode, f"error  routes/a/cursors/g.work: offset {len(lines[0])}: " in done.stdout.decode()) == (
        4,
        True,
    )
    assert done.stdout.decode().splitlines()[-1].endswith(" 1 error")
    done = wald("status", "--json", "--root", log.root.path)
    (warning,) = [each for each in json.loads(done.stdout)["findings"] if each["severity"] == "warning"]
    assert warning["message"].startswith(f"{path}: offset {len(lines[0])}: ")
    assert warning["hint"] == f"wald --root {log.root.path} group show a g"
    done = wald("repair", "--dry-run", "--root", log.root.path)
    left = f"  hint: wald --root {log.root.path} group show a g\ndamaged: "
    assert (done.returncode, left in done.stdout.decode()) == (4, True)
    path.rename(f"{path}.damaged")
    with Owning(log.root.path, "a", "g") as owner:
        assert owner.lease("worker-1", 8) == list(range(3, 11))
    assert "whole       yes" in output_of("inspect", path).decode()


def test_a_group_without_workers_is_reported_as_such(log: Built) -> None:
    for name in ("show", "pending"):
        log.log.set_cursor("a", 0, "stream")
        at = ("--root", log.root.path)
        code, message, hint = refusal_of("group", name, "a", "stream", *at)
        assert (code, "is not a work group" in message, "cursor show a --group stream" in hint) == (3, True, True)
        code, _, hint = refusal_of("group", name, "a", "none", *at)
        assert (code, hint.endswith("group list a")) == (3, True)
        code, _, hint = refusal_of("group", name, "none", "g", *at)
        assert (code, "to list all routes: " in hint) == (3, True)


def test_a_pinning_work_group_is_named_as_a_work_group(log: Built) -> None:
    at = ("--root", log.root.path)
    with Owning(log.root.path, "a", "g") as owner:
        owner.lease("worker-1", 1)
        log.cut()
        log.seal()
        log.lines("b", [b"y"])
        assert f"wald --root {log.root.path} group show a g" in wald("explain", *at).stdout.decode()
        assert "work group" in wald("route", "list", *at).stdout.decode()
        findings = wald("status", "--lag-max", "1s", "--json", *at).stdout.decode()
        assert f"wald --root {log.root.path} group show a g" in findings


def test_a_journal_without_a_cursor_is_of_no_use_and_can_be_removed(log: Built) -> None:
    with Owning(log.root.path, "a", "g"):
        pass
    log.root.cursor("a", "g").unlink()
    assert f"wald --root {log.root.path} group remove a g removes it\n" in shown(log)
    output_of("group", "remove", "a", "g", "--root", log.root.path)
    assert listed(log) == []


@pytest.mark.parametrize("command", ["set", "skip"])
def test_a_journal_without_a_cursor_gets_no_new_one_by_hand(log: Built, command: str) -> None:
    """If it had a cursor, a new owner would not deliver the records that the journal marks as done."""
    with Owning(log.root.path, "a", "g") as owner:
        owner.lease("worker-1", 10)
        owner.ask("ack", "worker-1", [3, 4])
    log.root.cursor("a", "g").unlink()
    why = ("--why", "bad") if command == "skip" else ()
    moving = ("cursor", command, "a", "1", "--group", "g", *why, "--root", log.root.path)
    code, message, hint = refusal_of(*moving)
    assert (code, "left over from a work group whose cursor was removed" in message) == (9, True)
    assert hint == f"to remove the group: wald --root {log.root.path} group remove a g"
    output_of("group", "remove", "a", "g", "--root", log.root.path)
    assert wald(*moving).returncode == 0
    with Owning(log.root.path, "a", "g") as owner:
        assert owner.lease("worker-1", 9) == list(range(2, 11))


def test_a_group_in_which_all_waits_says_when_the_next_record_is_due(log: Built) -> None:
    """The advice is not to start or inspect workers now."""
    with Owning(log.root.path, "b", "g") as owner:
        owner.lease("worker-1", 3)
        owner.ask("nack", "worker-1", [12, 13], 7200)
        owner.ask("nack", "worker-1", [11], 3600)
        said = output_of("group", "show", "b", "g", "--root", log.root.path).decode()
    due = re.search(r"next due +(\S+), in ", said)
    assert due, said
    expected = f"next      nothing before {due[1]}, when the next record is due"
    assert said.endswith(f"{expected}\n")
    assert output_of("group", "show", "b", "g", "--root", log.root.path).endswith(
        f"{expected}; start its workers before then\n".encode()
    )
    log.lines("b", [b"more"])
    assert output_of("group", "show", "b", "g", "--root", log.root.path).endswith(b"next      start its workers\n")


def test_what_cannot_be_printed_ends_no_line_of_a_table_and_moves_no_cursor() -> None:
    rows = [("WORKER", "TRIES"), ("a\nb", "1"), ("\x1b[2J", "22"), ("Zoë 工", "3")]
    assert list(aligned(rows, (1,))) == ["WORKER   TRIES", "a\\nb         1", "\\x1b[2J     22", "Zoë 工        3"]
