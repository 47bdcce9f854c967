"""Unprocessed records of a group, and skips of a failing record: always recorded, and never of another record."""

import json
import os
import re
import shutil
import signal
import subprocess
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from logs import Built
from running import Daemon, command, eventually, launched, output_of, reclaim, refusal_of, run, sidecar, wald
from shrinking import shrink
from tracing import strace

from wald.files.ledger_read import entries_of


def shown(root: Path, *arguments: object) -> dict[str, Any]:
    return dict(json.loads(output_of("cursor", "show", "a", "--root", root, "--json", *arguments)))


def skips(root: Path) -> list[dict[str, Any]]:
    return list(entries_of(root / "ledger/skips.jsonl"))


@pytest.fixture
def filled(root: Path, daemon: Daemon) -> Path:
    """A log with records 1 to 3 and 5 of route a, and 4 of b; the group has processed 1."""
    output_of("route", "add", "b", "--root", root)
    for route, lines in (("a", b"1\n2\n3\n"), ("b", b"4\n"), ("a", b"5\n")):
        output_of("append", route, "--root", root, stdin=lines)
    output_of("cursor", "set", "a", 1, "--root", root)
    return root


def test_what_a_group_has_not_processed_is_counted_with_its_ends_and_times(filled: Path) -> None:
    found = shown(filled)

    assert (found["sequence"], found["lag_records"], found["first"], found["last"]) == (1, 3, 2, 5)
    assert found["first_append_time_ns"] < found["last_append_time_ns"]
    assert found["missing_records"] == 0
    assert "3 records, 2 to 5" in output_of("cursor", "show", "a", "--root", filled).decode()
    output_of("cursor", "set", "a", 5, "--root", filled)
    found = shown(filled)
    assert (found["lag_records"], found["first"], found["last"]) == (0, None, None)


@pytest.fixture
def robbed(filled: Path) -> Path:
    """The log after records 1 to 5 were reclaimed and the group moved back to 0; record 6 exists."""
    output_of("cursor", "set", "a", 5, "--root", filled)
    output_of("cursor", "set", "b", 4, "--root", filled)
    output_of("cut", "--root", filled)
    output_of("append", "a", "--root", filled, stdin=b"6\n")
    reclaim(filled, "--grace", 0)
    wald("cursor", "set", "a", 0, "--rewind", "--root", filled)
    return filled


def test_records_that_were_removed_unread_are_counted_and_passed_over_only_if_that_is_meant(robbed: Path) -> None:
    # The command to read works where records in front were removed.
    text = output_of("cursor", "show", "a", "--root", robbed).decode()
    (line,) = [line for line in text.splitlines() if line.startswith("to read")]
    words = line.removeprefix("to read").split()
    assert words[0] == "wald"
    done = wald(*words[1:])
    assert (done.returncode, done.stdout) == (0, b"6\n"), done.stderr
    assert "up to 4 records before these, removed before the group processed them; --on-missing skip skips them" in text

    # Removed records in front are passed over only if that is meant and on record.
    code, message, hint = refusal_of("cursor", "skip", "a", 6, "--root", robbed)
    assert code == 9
    assert "record 6 is not the next record of route a for group processed: " in message
    assert "RECLAIM has removed records 1 to 5: 4 records of route a are missing" in message
    assert "--through skips 1 record up to 6 and passes over up to 4 records that no longer exist" in hint
    assert (skips(robbed), shown(robbed)["missing_records"]) == ([], 4)
    skipped = json.loads(output_of("cursor", "skip", "a", 6, "--through", "--json", "--root", robbed))
    assert (skipped["records"], skipped["missing_records"]) == (1, 4)
    assert [(entry["records"], entry["missing"]) for entry in skips(robbed)] == [(1, 4)] * 2

    # Records that were removed unread are counted apart.
    wald("cursor", "set", "a", 1, "--rewind", "--root", robbed)
    found = shown(robbed)
    assert (found["lag_records"], found["first"], found["missing_records"]) == (1, 6, 4)


def test_what_shrinking_has_dropped_is_missing_though_nothing_is_left(tmp_path: Path) -> None:
    built = Built(tmp_path / "log")
    built.lines("slow", [b"unread"])
    for _ in range(10):
        built.lines("quick", [b"read" * 2000])
    built.cut()
    built.seal()
    built.lines("slow", [b"newest"])
    built.log.set_cursor("quick", 11)
    shrink(built, 1, quick=11)
    built.log.set_cursor("quick", 0, rewind=True)
    found = json.loads(output_of("cursor", "show", "quick", "--root", built.root.path, "--json"))
    text = output_of("cursor", "show", "quick", "--root", built.root.path).decode()
    built.crash()

    assert (found["lag_records"], found["first"], found["missing_records"]) == (0, None, 10)
    assert "no record that the log still has" in text
    assert "up to 10 records before these, removed before the group processed them" in text


def test_the_next_record_is_skipped_and_that_is_on_record(filled: Path) -> None:
    output_of("cursor", "skip", "a", 2, "--why", "not UTF-8", "--root", filled)

    assert shown(filled)["first"] == 3
    assert [entry["event"] for entry in skips(filled)] == ["skipping-record", "skipped-record"]
    for entry in skips(filled):
        assert (entry["route"], entry["group"], entry["sequence"]) == ("a", "processed", 2)
        assert (entry["after"], entry["records"], entry["why"]) == (1, 1, "not UTF-8")
    assert wald("verify", "--root", filled).returncode == 0


def skip_killed_at(filled: Path, expression: str) -> int:
    """Skip record 2 under strace; return the exit code."""
    line = command("cursor", "skip", "a", 2, "--root", filled)
    tracing = [strace(), "-f", "-qq", "-o", os.devnull, "-e", expression]
    return run([*tracing, *line], env={"PYTHONDONTWRITEBYTECODE": "1"}).returncode  # writing .pyc files also renames


def events(root: Path) -> list[str]:
    path = root / "ledger/skips.jsonl"
    return [entry["event"] for entry in entries_of(path)] if path.exists() else []


def test_a_skip_that_was_killed_or_failed_is_not_on_record_as_done(filled: Path) -> None:
    # A skip that was killed before the cursor moved is not on record as done.
    assert skip_killed_at(filled, "inject=rename:signal=SIGKILL") == -signal.SIGKILL
    assert (events(filled), shown(filled)["sequence"]) == (["skipping-record"], 1)
    assert "a/processed is about to move from 1 to 2 by " in output_of("history", "--root", filled).decode()

    # A skip that the disk refuses is on record as failed.
    assert skip_killed_at(filled, "inject=rename:error=EIO") == 7
    assert (events(filled), shown(filled)["sequence"]) == ([*["skipping-record"] * 2, "skip-failed"], 1)
    failed = output_of("history", "--root", filled).decode()
    assert re.search(r"a/processed failed to move from 1 to 2 by .*processed\.cursor", failed)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["/pwritev", "fdatasync", "fsync", "rename"])
def test_a_skip_that_was_killed_anywhere_is_on_record_if_it_was_made_and_as_done_only_then(
    filled: Path, tmp_path: Path, call: str
) -> None:
    for number in count(1):
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(filled, copy, ignore=shutil.ignore_patterns("*.sock"))
        code = skip_killed_at(copy, f"inject={call}:signal=SIGKILL:when={number}")
        moved = shown(copy)["sequence"] == 2
        assert moved or "skipped-record" not in events(copy)
        assert not moved or "skipping-record" in events(copy)
        again = run(command("cursor", "skip", "a", 2, "--root", copy))
        assert (again.returncode, shown(copy)["sequence"]) == (3 if moved else 0, 2), again.stderr
        assert wald("verify", "--root", copy).returncode == 0
        if code == 0:
            break
    assert number > 1


def test_no_other_record_is_skipped_unless_all_up_to_it_are_meant(filled: Path) -> None:
    code, message, hint = refusal_of("cursor", "skip", "a", 5, "--root", filled)
    assert (code, message) == (9, "record 5 is not the next record of route a for group processed: 2 is")
    assert "--through skips 3 records" in hint
    assert refusal_of("cursor", "skip", "a", 4, "--root", filled)[0] == 3, "a record of another route"
    assert refusal_of("cursor", "skip", "a", 1, "--root", filled)[0] == 3, "it is processed"
    assert (skips(filled), shown(filled)["sequence"]) == ([], 1)

    output_of("cursor", "skip", "a", 5, "--through", "--root", filled)
    assert [(entry["sequence"], entry["records"]) for entry in skips(filled)] == [(5, 3)] * 2


def test_a_drain_that_fails_at_a_skipped_record_continues_after_it(filled: Path, tmp_path: Path) -> None:
    """The command always rejects record 2. After the skip the drain passes it 3 and 5 without a restart."""
    seen = tmp_path / "seen"
    script = f'read line; if [ "$line" = 2 ]; then exit 1; fi; echo "$line" >> {seen}'
    line = sidecar("drain", "a", "--root", filled, "--batch-records", 1, "--exit-at-end", "--", "sh", "-c", script)
    with launched(line, stderr=subprocess.PIPE) as drain:
        assert drain.stderr is not None
        assert b"a 2: exit 1" in drain.stderr.readline()
        output_of("cursor", "skip", "a", 2, "--root", filled)
        assert drain.wait(60) == 0
        assert b"the cursor was moved past record 2" in drain.stderr.read()
    eventually(seen.exists)

    assert seen.read_text() == "3\n5\n"
    assert shown(filled)["lag_records"] == 0


def test_the_hint_on_a_damaged_record_continues_after_all_damage(root: Path) -> None:
    built = Built(root)
    for line in (b"1", b"2", b"3", b"4"):
        built.lines("a", [line * 40])
    built.cut()
    built.log.set_cursor("a", 1)
    (segment,) = [each for each in (root / "segments").iterdir() if b"2" * 40 in each.read_bytes()]
    segment.write_bytes(segment.read_bytes().replace(b"2" * 40, b"x" * 40).replace(b"3" * 40, b"x" * 40))
    built.crash()

    code, message, hint = refusal_of("cursor", "skip", "a", 2, "--root", root)
    assert (code, message.partition(":")[0]) == (4, "record 2 is damaged, and cannot be skipped by its number")
    assert str(segment) in message
    setting, _, _ = hint.partition(" continues after the damage")
    assert setting == f"wald --root {root} cursor set a 3 --group processed"

    assert wald(*setting.split()[1:]).returncode == 0
    assert shown(root)["first"] == 4
    assert skips(root) == []
