"""All programs of a log run at once while system calls that rename, delete or sync files are delayed."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest
from contents import errors, records
from disturbed import invariants
from running import Client, Daemon, run, sidecar
from running import command as wald_command
from tracing import strace, traced

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
