"""``wald repair``: it announces its changes, refuses unsafe ones, and leaves a log that passes verification."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from json_page import require_documented
from repairing import snapshot
from running import Daemon, command, eventually, output_of, refusal_of, run, sidecar, wald
from tracing import strace

from wald.errors import Damaged, Locked, NotFound, Partial, Refused


@pytest.fixture
def log(daemon: Daemon, two_segments: Path) -> Path:
    daemon.stop()
    return two_segments


@pytest.fixture
def damaged(log: Path) -> Path:
    """The same log with the first three records overwritten by zeros."""
    (sealed,) = (log / "segments").glob("*.wal.zst")
    sealed.write_bytes(bytes(sealed.stat().st_size))
    return log


def test_a_repair_says_what_it_would_do_refuses_a_loss_and_leaves_a_log_that_verifies(damaged: Path) -> None:
    # A dry run says what would be done and changes nothing.
    before = snapshot(damaged)
    done = wald("repair", "--dry-run", "--root", damaged)
    assert done.returncode == Refused.exit_code
    assert b"quarantine segments/00000000000000000001.wal.zst" in done.stdout
    assert b"gives up 3 records: 1 to 3; needs --accept-loss" in done.stdout
    done = wald("repair", "--dry-run", "--accept-loss", "--root", damaged)
    assert done.returncode == Damaged.exit_code
    assert snapshot(damaged) == before

    # Without accept loss nothing is given up.
    done = wald("repair", "--root", damaged)
    assert done.returncode == Refused.exit_code
    assert b"repair --accept-loss gives them up" in done.stdout
    assert (damaged / "segments/00000000000000000001.wal.zst").exists()

    # Afterwards the log verifies with the loss on record.
    found = json.loads(output_of("repair", "--accept-loss", "--json", "--root", damaged))
    require_documented("wald repair", found)
    assert (found["schema"], found["lost_records"], found["left"]) == ("wald.repair/1", 3, [])
    assert [(act["action"], act["lost"], act["done"]) for act in found["actions"]] == [
        ("set aside", [{"first": 1, "last": 3}], True)
    ]
    verified = output_of("verify", "--root", damaged).decode()
    assert "records 1 to 3 are lost: given up by a repair at" in verified
    assert output_of("read", "a", "--root", damaged, "--from", 4) == b"four\n\xff\nsix words\n"
    where = wald("where", 2, "--root", damaged)
    assert where.returncode == Damaged.exit_code
    assert b"2: lost: given up by a repair" in where.stdout
    assert b"quarantine/00000000000000000001.wal.zst." in where.stdout


def test_a_second_repair_keeps_the_bytes_that_a_killed_one_has_put_on_record(
    daemon: Daemon, root: Path, tmp_path: Path
) -> None:
    """The first repair was killed after its ledger line and before it renamed the new file into place."""
    for value in (b"one\n", b"two\n", b"three\n"):
        output_of("append", "a", "--root", root, stdin=value)
    daemon.stop()
    (raw,) = (root / "segments").glob("*.wal")
    raw.write_bytes(raw.read_bytes().replace(b"two\n", b"TWO\n"))
    trace = ["-f", "-qq", "-o", str(tmp_path / "trace"), "-etrace=rename", "-einject=rename:signal=KILL:when=1"]
    killed = run([strace(), *trace, *command("repair", "--accept-loss", "--root", root)])
    assert killed.returncode
    (kept,) = (root / "quarantine").glob("*.wal.*")

    assert wald("repair", "--root", root).returncode == 0
    assert kept.exists()
    assert kept.name.encode() in wald("where", 2, "--root", root).stdout
    assert wald("verify", "--root", root).returncode == 0


def test_a_log_without_segments_continues_after_the_lost_records(log: Path) -> None:
    for path in (log / "segments").glob("*.wal*"):
        path.write_bytes(os.urandom(path.stat().st_size))
    done = wald("repair", "--accept-loss", "--root", log)

    assert (done.returncode, done.stderr) == (0, b""), done.stdout
    assert wald("verify", "--root", log).returncode == 0
    with Daemon(log):
        assert output_of("append", "a", "--root", log, stdin=b"seven\n") == b"7 7\n"
    assert wald("verify", "--root", log).returncode == 0


def test_no_other_program_changes_the_log_meanwhile(damaged: Path, tmp_path: Path) -> None:
    """This includes programs whose ledger does not exist yet."""
    trace, sealed = tmp_path / "trace", damaged / "segments/00000000000000000001.wal.zst"
    line = [strace(), "-f", "-qq", "-o", str(trace), "-P", str(sealed), "-einject=unlink:delay_enter=1500000:when=1"]
    with subprocess.Popen([*line, *command("repair", "--accept-loss", "--root", damaged)]) as process:
        eventually(lambda: trace.exists() and "unlink(" in trace.read_text())
        for other in (sidecar("reclaim", "--root", damaged), command("cursor", "skip", "a", 1, "--root", damaged)):
            assert run(other).returncode == Locked.exit_code
        process.wait()


def test_readers_report_what_was_given_up_at_the_end_of_the_log(log: Path) -> None:
    (active,) = (log / "segments").glob("*.wal")
    os.truncate(active, active.stat().st_size - 5)
    output_of("repair", "--accept-loss", "--root", log)
    for reading in (("read",), ("read", "a"), ("read", "a", "--from", 5), ("read", "a", "--grep", "[eo]")):
        done = wald(*reading, "--root", log)
        assert b"are missing; they were given up by a repair" in done.stderr
        assert done.returncode == (NotFound if "--from" in reading else Partial).exit_code
    shown = json.loads(output_of("cursor", "show", "a", "--json", "--root", log))
    assert (shown["lag_records"], shown["lost_records"]) == (3, 3)
    assert b"up to 3 records after the first one, given up by a repair" in output_of(
        "cursor", "show", "a", "--root", log
    )
    (event,) = (line for line in output_of("history", "--root", log).decode().splitlines() if " repaired " in line)
    assert re.search(r"segment 4: .*; no record in it was intact; .*; the old file is quarantine/0{19}4\.wal\.", event)
    done = wald("where", "--since", "1h ago", "--route", "a", "--root", log)
    assert done.returncode == Damaged.exit_code
    assert b"not all here: 3 records, 1 to 3" in done.stdout


def test_a_dry_run_calls_nothing_damage_that_verify_does_not(log: Path) -> None:
    # What verify does not call damage a dry run does not either.
    ledger = log / "ledger/segments.jsonl"
    ledger.write_bytes(b"")
    verified = wald("verify", "--root", log)
    assert (verified.returncode, b"OK: " in verified.stdout) == (0, True)
    assert b"the ledger has no line about its sealing; a repair writes one" in verified.stdout
    proposed = output_of("repair", "--dry-run", "--root", log)
    assert b"repair: add the ledger line of segments/00000000000000000001.wal.zst" in proposed
    assert b"OK: 1 action would be done" in proposed
    assert ledger.read_bytes() == b""
    output_of("repair", "--root", log)
    assert b"no line of the ledger" not in output_of("verify", "--root", log)

    # Neither reports a stray segment after the head as damage.
    for content in (b"junk\n", next((log / "segments").glob("*.wal")).read_bytes()):
        (active,) = (log / "segments").glob("*.wal")
        path = active.with_name("00000000000000005000.wal")
        path.write_bytes(content)
        assert b"not checked, because it is after the head" in output_of("verify", "--root", log)
        proposed = output_of("repair", "--dry-run", "--root", log)
        assert b"repair: quarantine segments/00000000000000005000.wal" in proposed
        assert b"OK: 1 action would be done" in proposed
        output_of("repair", "--root", log)
        assert not path.exists()


@pytest.mark.parametrize("also", [(), ("log.json",)], ids=["alone", "with log.json"])
def test_a_log_that_has_lost_its_ledger_directory_gets_another(log: Path, also: tuple[str, ...]) -> None:
    for name in ("ledger", "quarantine"):
        shutil.rmtree(log / name)
    for name in also:
        (log / name).unlink()
    before = snapshot(log)
    assert b"the ledger has no line about its sealing" in wald("repair", "--dry-run", "--root", log).stdout
    assert snapshot(log) == before
    output_of("repair", "--root", log)
    output_of("verify", "--root", log)
    assert output_of("repair", "--root", log) == b"OK: nothing to repair\n"


def test_a_lost_identity_is_rebuilt_and_a_cursor_that_cannot_be_read_is_left_with_what_to_type(log: Path) -> None:
    # A log that has lost its identity gets it back by what other commands say.
    content = (log / "log.json").read_bytes()
    (log / "log.json").unlink()
    _, _, hint = refusal_of("read", "a", "--root", log)
    assert f"wald --root {log} repair" in hint
    daemon = Daemon(log, ready=False)
    assert daemon.wait() == Damaged.exit_code
    assert f"wald --root {log} repair" in daemon.log
    proposed = wald("repair", "--dry-run", "--root", log)
    assert proposed.returncode == Damaged.exit_code
    assert b"repair: rewrite log.json: it is missing; " in proposed.stdout
    assert b"OK: 1 action done, 0 records lost" in output_of("repair", "--root", log)
    assert json.loads((log / "log.json").read_bytes())["log"] == json.loads(content)["log"]
    assert b"log.json was rebuilt: it is missing" in output_of("history", "--root", log)
    assert output_of("read", "a", "--root", log) == b"one\ntwo\nthree\nfour\n\xff\nsix words\n"

    # A cursor that cannot be read is left with what to type.
    cursor = log / "routes/a/cursors/processed.cursor"
    cursor.write_bytes(b"garbage\n")
    done = wald("repair", "--root", log)
    assert done.returncode == Damaged.exit_code
    assert b"not repaired: routes/a/cursors/processed.cursor" in done.stdout
    hint = f"wald --root {log} cursor set a SEQUENCE --group processed --rewind"
    assert hint.encode() in done.stdout
    assert cursor.read_bytes() == b"garbage\n"


def test_it_refuses_while_a_daemon_runs(daemon: Daemon, root: Path) -> None:
    for options in ((), ("--dry-run",)):
        code, message, hint = refusal_of("repair", *options, "--root", root)
        assert code == Locked.exit_code
        assert "another daemon writes to this root" in message
        stopping, _, killing = hint.partition(", if systemd runs it; otherwise ")
        assert stopping == "stop the daemon: systemctl stop wald.socket wald"
        assert killing == f"kill {daemon.process.pid}"
