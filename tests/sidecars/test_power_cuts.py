"""Unread records survive a power cut at any moment of a program, and delays of its system calls."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from contents import errors, records
from disturbed import invariants
from every_program import PROGRAMS, RECORDS, log_of_two_routes
from logs import Built
from powercut import ACKNOWLEDGED, recorded
from running import Client, Daemon, run, sidecar
from running import command as wald_command
from tracing import strace, traced

import wald
from wald.files.identity import read_identity
from wald.format.names import DEFAULT_GROUP
from wald.retention.cursors import read_cursors

STATES = 24  # maximum per program, evenly spaced
DAEMON_STATES = 200
STEP = 5  # index of the promise that is the clock step
HOUR_NS = 3_600_000_000_000
Positions = dict[tuple[str, str], int]


# The cursors after a program of tests/support/every_program.py has ended; empty if it moves none.
PROCESSED = {("a", DEFAULT_GROUP): RECORDS}
AFTER: dict[str, Positions] = {
    **{name: {} for name in ("reclaim", "reclaim takes back", "reclaim shrinks", "repair")},
    **dict.fromkeys(("archive", "drain", "drain with workers"), PROCESSED),
    "work": {("a", "workers"): RECORDS},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AFTER)
def test_unread_records_outlive_a_power_cut_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, after = PROGRAMS[name], AFTER[name]
    base = tmp_path / "run"
    root = base / "log"
    base.mkdir()
    program.prepare(root)
    before = cursors(root)
    log_of_two_routes(tmp_path / "whole")
    truth = {route: numbered(tmp_path / "whole", route) for route in ("a", "b")}
    monkeypatch.setenv("WALD_SEGMENT_MAX_BYTES", "64KiB")  # small, because each state contains all files
    platter = recorded(program.line(root), base, tmp_path / "trace")
    assert cursors(root) == before | after | {key: at for key, at in cursors(root).items() if key not in before}
    states = platter.states
    for number, state in enumerate(states[:: 1 + len(states) // STATES]):
        shutil.rmtree(base)
        base.mkdir()
        state.put(base)
        for key, at in cursors(root).items():
            begin = before.get(key, 0)
            assert begin <= at <= after.get(key, begin), (number, state.after, key)
        if name != "repair":  # of a damaged log
            assert_unread(root, truth, f"{number} {state.after}")
        again = run(program.line(root))
        assert again.returncode == 0, f"{state.after}: {again.stderr.decode()}"
        assert_unread(root, truth, f"{number} {state.after}, then the command again")
        left = [path.name for path in base.rglob("*") if path.suffix in (".whole", ".deleting")]
        assert not left, state.after


DAEMON = """
import os, sys
from pathlib import Path
import wald
from powercut import ACKNOWLEDGED
from running import Client, Daemon, eventually

def promised():
    with open(root.parent / ACKNOWLEDGED, "a") as file:
        file.write("1\\n")

root = Path(sys.argv[1])
with Daemon(root, env={"WALD_SEGMENT_MAX_BYTES": "64KiB"}) as daemon, Client(daemon.socket_path) as client:
    assert daemon.ask("ROUTE ADD b fifo").startswith("OK")
    fifo = os.open(root / "routes/b/in", os.O_WRONLY)
    for number in range(4):
        client.publish("a", b"%d." % number + b"a" * 900 + b"\\n")
        assert client.reply().startswith("OK")
        promised()
        os.write(fifo, b"%d.b\\n" % number)
        eventually(lambda: len(list(wald.open(root).records("b"))) == number + 1)
        promised()
        if number == 1:
            assert daemon.ask("CLOCK STEP").startswith("OK stepped")
            promised()
        if number == 2:
            assert daemon.ask("CUT").startswith("OK")
    os.close(fifo)
    assert daemon.stop() == 0
"""


@pytest.mark.slow
def test_acknowledged_records_and_a_clock_step_outlive_a_power_cut_of_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    base = tmp_path / "run"
    root = base / "log"
    base.mkdir()
    ahead_ns = time.time_ns() + HOUR_NS
    built = Built(root, now_ns=ahead_ns)
    built.lines("a", [b"before"])
    built.crash()
    (base / ACKNOWLEDGED).touch()
    # The kernel updates the mapped transfers file as bytes leave a pipe; pipes do not survive a power cut.
    line = [sys.executable, "-c", DAEMON, str(root)]
    platter = recorded(line, base, tmp_path / "trace", mapped=["log/transfers"])
    wanted = [b"before", *(value for n in range(4) for value in (b"%d." % n + b"a" * 900, b"%d.b" % n))]
    assert list(numbered(root, None).values()) == wanted
    promised = [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8]  # records by number of promises; one promise is the clock step
    states = platter.states
    for number, state in enumerate(states[:: 1 + len(states) // DAEMON_STATES]):
        shutil.rmtree(base)
        base.mkdir()
        state.put(base)
        again = Built(root, epoch=9, now_ns=ahead_ns - HOUR_NS // 2)
        again.lines("a", [b"after"])
        again.crash()
        found = list(numbered(root, None).values())
        assert found == [*wanted[: len(found) - 1], b"after"], (number, state.after)
        assert len(found) >= 2 + promised[state.acknowledged], (number, state.after)
        assert errors(root) == [], (number, state.after)
        assert again.report.errors == [], (number, state.after)
        if state.acknowledged >= STEP:
            assert again.writer.state.append_time_ns < ahead_ns, (number, state.after)


def cursors(root: Path) -> Positions:
    log = wald.open(root)
    head = log.head()
    assert head is not None
    log_id = read_identity(log.root).log_id
    return {
        (route, each.group): each.effective
        for route in log.routes()
        for each in read_cursors(log.root, route, log_id=log_id, head_sequence=head.sequence)
    }


def numbered(root: Path, route: str | None) -> dict[int, bytes]:
    return {record.sequence: record.value for record in wald.open(root).records(route)}


def assert_unread(root: Path, truth: dict[str, dict[int, bytes]], when: str) -> None:
    """Assert that each unread record is readable, a ledger explains each missing one, and nothing is damaged."""
    assert errors(root) == [], when
    for number in sorted({number for found in truth.values() for number in found}):
        there = wald.open(root).where(number)
        assert there.durable or there.reclaimed, (when, there.message)
    for (route, group), at in cursors(root).items():
        found = {record.sequence: record.value for record in wald.open(root).records(route, at + 1)}
        wanted = {number: value for number, value in truth.get(route, {}).items() if number > at}
        assert {number: found.get(number) for number in wanted} == wanted, (when, group)


CALLS = "rename,unlink,link,fallocate,fsync,fdatasync,ftruncate"
ROUNDS = 3


def slowly(path: Path, line: list[str], milliseconds: int) -> subprocess.CompletedProcess[bytes]:
    """Run a wald command to its end, with delayed system calls."""
    inject = f"inject={CALLS}:delay_enter={1000 * milliseconds}"
    return run([strace(), "-f", "--seccomp-bpf", "-o", str(path), "-e", f"trace={CALLS}", "-e", inject, *line])


@pytest.mark.slow
@pytest.mark.parametrize("held", ["the daemon", "the others", "all"])
def test_what_was_acknowledged_is_in_the_log_or_in_the_archive(tmp_path: Path, held: str) -> None:
    """Cuts, seals, archiving, cursor moves and reclaim without a grace period, repeated several times."""
    root, dest = tmp_path / "log", tmp_path / "archive"
    delays = {"the daemon": (20, 0), "the others": (0, 20), "all": (10, 15)}[held]
    sent: dict[int, bytes] = {}
    programs = {
        "archive": sidecar("archive", "a", "--root", root, "--dest", dest),
        "cursor": [],
        "reclaim": sidecar("reclaim", "--grace", "0s", "--require-archived", "--root", root),
    }
    ended: list[tuple[str, int, bytes]] = []

    def again_and_again(name: str) -> None:
        for number in range(ROUNDS):
            line = programs[name] or wald_command("cursor", "set", "a", len(sent), "--group", "other", "--root", root)
            done = slowly(tmp_path / f"{name}{number}", line, delays[1])
            ended.append((name, done.returncode, done.stderr))

    with Daemon(root, env={"WALD_SEGMENT_MAX_BYTES": "64KiB"}) as daemon:
        pid = daemon.process.pid
        daemon.ask("ROUTE ADD a")
        expressions = (f"trace={CALLS}", f"inject={CALLS}:delay_enter={1000 * delays[0]}")
        threads = [threading.Thread(target=again_and_again, args=(name,)) for name in programs]
        with Client(daemon.socket_path) as client, traced(pid, tmp_path / "daemon", *expressions, threads=True):
            while not sent or any(thread.is_alive() for thread in threads):
                for _ in range(2):
                    value = b"%d" % len(sent)
                    reply = client.ask(b"PUB a %d\n%s\n" % (len(value) + 1, value))
                    sent[int(reply.split()[1])] = value
                assert client.ask(b"CUT\n").startswith("OK cut")
                assert invariants(pid, root) == []
                if len(sent) == 2:
                    for thread in threads:
                        thread.start()
        assert daemon.stop() == 0
    assert [code for _, code, _ in ended] == [0] * len(programs) * ROUNDS, ended
    assert errors(root) == []
    assert run(sidecar("archive", "verify", dest, "--root", root)).returncode == 0
    values = [sent[sequence] for sequence in sorted(sent)]
    archived = run(sidecar("archive", "restore", dest, "a")).stdout.split()
    left = [record.value for record in records(root)]
    assert archived
    assert archived == values[: len(archived)]
    assert left == [value for value in values if value in left]  # in order, each once; gaps are allowed
    assert set(values[len(archived) :]) <= set(left)
