"""``wald history``: events in order, and a verdict on each deletion."""

import json
import re
import shutil
from pathlib import Path

import pytest
from archives import archive
from damage import flip_bit
from logs import Built, Unsynced
from running import command, output_of, refusal_of, run, sidecar

from wald.files.ledger_read import parts_of
from wald.files.ledger_write import Ledger
from wald.format.times import utc


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """A log with three segments of two routes; the first was read, archived and reclaimed."""
    built = Built(tmp_path / "log")
    for _ in range(3):
        built.lines("a", [b"one", b"two"])
        built.lines("b", [b"three"])
        built.cut()
    built.seal()
    archive(built, tmp_path / "bags")
    output_of("cursor", "set", "b", 3, "--root", built.root.path)
    assert run(sidecar("reclaim", "--root", built.root.path, "--grace", 0)).returncode == 0
    return built


def history(built: Built, *options: str) -> tuple[int, list[str]]:
    done = run(command("history", "--root", built.root.path, *options))
    return done.returncode, done.stdout.decode().splitlines()


def test_events_are_shown_in_order_with_the_verdict_on_each_deletion(built: Built) -> None:
    # Each event has a line and each deletion the reason why it was legal.
    code, lines = history(built)
    assert code == 0
    events = [line.split()[1] for line in lines[:-1]]
    assert events.count("cut") == events.count("sealed") == 3
    assert {"begun", "archived", "finished"} < set(events)
    (deletion,) = (line for line in lines if " reclaimed " in line)
    assert re.search(
        r"segment 1: records 1 to 3 \(a 2, b 1\); allowed by the rule read \(a/\w+ at \d+, b/processed at 3\)$",
        deletion,
    )
    assert lines[-1].endswith("lines read: the chain is intact; every deletion on record was allowed")

    # A span of time and a route leave out the rest.
    _, lines = history(built, "--since", "1h", "--route", "b")
    assert {line.split()[1] for line in lines[:-1]} == {"reclaimed"}  # the sealer used an older clock
    _, lines = history(built, "--until", "yesterday")
    assert {line.split()[1] for line in lines[:-1]} == {"sealed", "begun", "archived", "finished"}
    _, lines = history(built, "--since", "2100-01-01T00:00:00Z")
    assert lines == ["0 lines read: the chain is intact; every deletion on record was allowed"]

    # A route that neither the log nor a line knows is not found.
    code, message, _ = refusal_of("history", "--root", built.root.path, "--route", "nosuch")
    assert code == 3
    assert "there is no route 'nosuch'" in message
    code, lines = history(built, "--route", "a", "--since", "2100-01-01T00:00:00Z")
    assert (code, len(lines)) == (0, 1)  # no line from that time

    # History is the same when the ledgers are in parts.
    _, before = history(built)
    for name in ("segments.jsonl", "reclaim.jsonl", "archive.jsonl"):
        ledger = Ledger(built.root.ledger / name, Unsynced(), part_bytes=100)
        ledger.cut()
        ledger.close()
        assert parts_of(built.root.ledger / name)
    _, after = history(built)
    assert after == before

    # A crash is shown where the next start found it.
    reports: list[dict[str, object]] = [{"epoch": 1}, {"epoch": 2, "ended": "stopped", "at_ns": 7 * 10**18}]
    for report in reports:
        (built.root.recovery / f"{report['epoch']:010d}.json").write_text(json.dumps(report))
    _, lines = history(built)
    (crash,) = (line for line in lines if " crash " in line)
    assert crash == (
        f"{utc(7 * 10**18)}  crash      epoch 1 was killed or crashed, or its machine went down; "
        "found by the next start: nothing acknowledged was lost"
    )

    # A route that only the ledgers know has its history.
    shutil.rmtree(built.root.route("a"))
    code, lines = history(built, "--route", "a")
    assert code == 0
    assert any(" reclaimed " in line for line in lines)
    later = ("--route", "a", "--since", "2100-01-01T00:00:00Z")
    code, message, _ = refusal_of("history", "--root", built.root.path, *later)
    assert code == 3  # lines of other times are not searched
    assert "there is no route 'a'" in message


def test_a_deletion_that_no_cursor_made_legal_is_an_error(built: Built) -> None:
    ledger = Ledger(built.root.ledger / "reclaim.jsonl", Unsynced())
    held = {"route": "a", "count": 2, "first": 4, "last": 5, "cursors": {"processed": 4}}
    ledger.append({"event": "reclaimed", "base": 4, "last": 6, "rule": "read", "routes": [held], "at": 1})
    ledger.close()
    code, lines = history(built)
    text = "\n".join(lines)

    assert code == 4
    assert (
        "NOT ALLOWED: record 5 of route a was deleted before it was read by processed at 4; its sha256 is None" in text
    )
    assert lines[-1].endswith("the chain is intact; 1 deletions not allowed")
    ledger = Ledger(built.root.ledger / "reclaim.jsonl", Unsynced())
    ledger.append({"event": "kept", "base": 4, "why": "unread", "at": 2})
    ledger.close()
    code, lines = history(built, "--json")
    events = [json.loads(line) for line in lines]
    assert {event["allowed"] for event in events if event.get("event") == "reclaimed"} == {True, None}
    assert (code, events[-1]["not_allowed"]) == (0, 0)


def test_what_expired_is_counted(built: Built) -> None:
    expired = run(sidecar("reclaim", "--root", built.root.path, "--max-bytes", 1, "--unread", "expire", "--grace", 0))
    assert expired.returncode == 0, expired.stderr
    code, lines = history(built)

    assert code == 0
    assert any("allowed by the rule max_bytes, 1 records expired unread" in line for line in lines)


def test_a_broken_chain_is_an_error_and_what_is_before_it_is_shown(built: Built) -> None:
    path = built.root.ledger / "archive.jsonl"
    flip_bit(path, 30)
    code, lines = history(built)

    assert code == 4
    assert any(f"{path}: line 1: checksum mismatch" in line for line in lines)
    assert any("allowed by the rule read" in line for line in lines)
    assert "the chain is broken" in lines[-1]
