"""``wald status``: the daemon's state in every case, with exit codes for monitoring systems, and its latency."""

import fcntl
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from logs import Built
from running import Client, Daemon, command, eventually, output_of, refusal_of, run, wald

from wald.cli.options import START_SECONDS
from wald.errors import InvalidInput
from wald.format.names import Kind
from wald.status.rates import conclusion

GOOD, DOWN, FAILING, WARNING = 0, 6, 13, 14


def status(root: Path, *arguments: object) -> tuple[int, dict[str, Any]]:
    """Return exit code and answer."""
    done = wald("status", "--root", root, "--json", *arguments)
    assert done.stderr == b"", done.stderr.decode()
    return done.returncode, json.loads(done.stdout)


def life(root: Path, *arguments: object) -> tuple[int, str]:
    code, found = status(root, *arguments)
    return code, found["daemon"]["life"]


def test_a_daemon_runs_is_frozen_dies_and_starts_again(root: Path, daemon: Daemon) -> None:
    code, found = status(root)
    assert (code, found["verdict"], found["findings"]) == (GOOD, "good", [])
    assert output_of("status", "--root", root).endswith(b"\nOK\n")
    about = found["daemon"]
    assert (about["life"], about["pid"], about["epoch"]) == ("runs", daemon.process.pid, 1)
    assert about["software"].startswith("wald ")
    assert found["last_crash"] is None

    os.kill(daemon.process.pid, signal.SIGSTOP)
    try:
        eventually(lambda: life(root) == (DOWN, "frozen"))
        began = time.monotonic()
        for words in (["cut"], ["route", "add", "b"]):  # which do not wait for the time that a start may take
            code, message, hint = refusal_of(*words, "--root", root)
            assert (code, hint) == (DOWN, f"kill -CONT {daemon.process.pid}")
            assert "is frozen" in message
        assert time.monotonic() - began < START_SECONDS
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)
    assert life(root) == (GOOD, "runs")

    output_of("append", "a", "--root", root, stdin=b"one\n")
    daemon.kill()
    wrote = json.loads((root / "lock").read_text())
    (root / "lock").write_text(json.dumps(wrote | {"pid": os.getpid()}))  # its pid is now that of another process
    code, found = status(root)
    assert (code, found["daemon"]["life"]) == (DOWN, "dead")
    assert (found["last_crash"]["epoch"], found["last_crash"]["found"]) == (1, None)

    daemon.start_again()
    code, found = status(root)
    assert (code, found["daemon"]["epoch"]) == (GOOD, 2)
    assert (found["last_crash"]["epoch"], found["last_crash"]["lost"]) == (1, [])
    assert found["last_crash"]["found"].startswith("20")


def test_a_daemon_that_was_stopped_is_dead_and_one_that_does_not_answer_is_silent(root: Path, daemon: Daemon) -> None:
    assert daemon.stop() == 0
    code, found = status(root)
    assert (code, found["daemon"]["life"], found["last_crash"]) == (DOWN, "dead", None)
    code, message, _ = refusal_of("status", "--timeout", 0, "--root", root)
    assert (code, message.startswith("--timeout must be ")) == (InvalidInput.exit_code, True)

    with held(root), socket.socket(socket.AF_UNIX) as listener:
        assert life(root) == (WARNING, "starts")
        (root / "wald.sock").unlink(missing_ok=True)
        listener.bind(os.fspath(root / "wald.sock"))
        listener.listen(1)
        assert life(root, "--timeout", "0.1") == (DOWN, "silent")
        listener.accept()[0].close()  # the question that was not answered

        def refuse() -> None:
            """Answer like a daemon with too many connections."""
            with listener.accept()[0] as connection:
                connection.recv(len(b"STAT\n"))
                connection.sendall(b"ERR busy too many connections\n")

        refusing = threading.Thread(target=refuse)
        refusing.start()
        code, found = status(root)
        refusing.join()
    assert (code, found["daemon"]["life"]) == (DOWN, "silent")
    assert "refuses the query" in found["daemon"]["message"]  # and is not called another daemon


def test_durable_bytes_that_are_gone_are_lost_and_reported(root: Path, daemon: Daemon) -> None:
    output_of("append", "a", "--root", root, stdin=b"one\n" * 1000)
    daemon.kill()
    os.truncate(root / "segments/00000000000000000001.wal", 300)
    daemon.start_again()
    code, found = status(root)

    assert code == FAILING
    assert any("durable bytes are missing" in message for message in found["last_crash"]["lost"])
    acknowledged = next(each for each in found["findings"] if "acknowledged records" in each["message"])
    assert acknowledged["severity"] == "failing"


def test_a_log_on_which_no_daemon_ran(root: Path) -> None:
    output_of("init", "--root", root)
    assert life(root) == (DOWN, "never-ran")


def test_a_daemon_of_another_pid_namespace_is_alive(root: Path, daemon: Daemon) -> None:
    """Its lock is not in /proc/locks and its PID is meaningless in this namespace, but the daemon answers."""
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    done = run([*apart, *command("status", "--root", root, "--json")])
    if b"unshare failed" in done.stderr or b"Operation not permitted" in done.stderr:
        pytest.skip("this machine lets nobody make PID namespaces")
    found = json.loads(done.stdout)

    assert (done.returncode, found["daemon"]["life"], found["daemon"]["pid"]) == (GOOD, "runs", None)
    assert "another PID namespace" in found["daemon"]["message"]


@contextmanager
def held(root: Path) -> Iterator[None]:
    """Hold the daemon's lock in this process, which is not a daemon."""
    with (root / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_lags_unfinished_lines_and_what_is_in_the_place_of_a_fifo_are_reported(
    root: Path, daemon: Daemon, tmp_path: Path
) -> None:
    # The daemon of another log does not answer for this one.
    with Daemon(tmp_path / "other") as other:
        assert life(root, "--socket", other.socket_path) == (DOWN, "silent")

    # The group that is furthest behind in time comes first.
    output_of("route", "add", "b", "--root", root)
    output_of("append", "b", "--root", root, stdin=b"first\n")
    output_of("append", "a", "--root", root, stdin=b"1\n2\n")
    waiting = status(root)[1]["waiting"]
    assert [(each["route"], each["lag_records"]) for each in waiting] == [("b", 1), ("a", 2)]
    assert status(root, "--lag-max", "1h")[0] == GOOD
    eventually(lambda: status(root, "--lag-max", "0.01s")[0] == WARNING)

    # A line without its end is shown with its bytes.
    output_of("route", "add", "f", "--fifo", "--root", root)
    with (root / "routes/f/in").open("wb", buffering=0) as fifo:
        fifo.write(b"whole\nhal")
        eventually(lambda: status(root)[1]["unfinished_lines"] == {"f": 3})
        fifo.write(b"f\n")
        eventually(lambda: status(root)[1]["unfinished_lines"] == {})

    # A file in the place of a fifo is a warning.
    (root / "routes/a/in").write_text("lost?\n")
    code, found = status(root)
    assert code == WARNING
    assert "not a FIFO" in found["findings"][0]["message"]


def settings(root: Path) -> dict[str, dict[str, str]]:
    """Return every setting with its value and origin."""
    found = json.loads(output_of("status", "--root", root, "--settings", "--json"))["settings"]
    assert isinstance(found, dict)
    return found


def test_settings_in_force_name_their_file_and_line_or_variable(root: Path, tmp_path: Path) -> None:
    config = tmp_path / "wald.toml"
    config.write_text('stall_timeout = "30s"\n[routes."a.b"]\nfifo = true\nmode = "0600"\n')
    with Daemon(root, "--config", config, env={"WALD_SYNC": "interval"}) as daemon:
        found = settings(root)
        assert found["stall_timeout"] == {"value": '"30s"', "origin": f"{config}:1"}
        assert found["sync"] == {"value": '"interval"', "origin": "WALD_SYNC"}
        assert found["routes.a.b.fifo"] == {"value": "true", "origin": f"{config}:3"}
        assert found["routes.a.b.mode"] == {"value": "0o600", "origin": f"{config}:4"}
        assert found["on_full"]["origin"] == "default"

        config.write_text('log_level = "error"\nstall_timeout = "40s"\n')
        daemon.process.send_signal(signal.SIGHUP)
        eventually(lambda: settings(root)["log_level"] == {"value": '"error"', "origin": f"{config}:1"})
        found = settings(root)
        assert found["stall_timeout"] == {"value": '"30s"', "origin": f"{config}:1"}, "it waits for a restart"
        assert "routes.a.b.fifo" not in found


def test_a_socket_of_the_settings_is_found(root: Path, tmp_path: Path) -> None:
    with Daemon(root, env={"WALD_SOCKET": str(tmp_path / "elsewhere")}, ready=False):
        eventually(lambda: (root / "lock").exists() and life(root) == (GOOD, "runs"))


def test_a_segment_that_cannot_be_read_fails(tmp_path: Path) -> None:
    built = Built(tmp_path / "root", now_ns=time.time_ns())
    built.lines("a", [b"x"])
    built.cut()
    built.seal()
    built.path(1, Kind.SEALED).write_bytes(b"")
    found = status(built.root.path)[1]

    assert [each["severity"] for each in found["findings"]] == ["down", "failing"]


@pytest.mark.parametrize("left", [b"garbage\n", None], ids=["damaged", "missing"])
def test_a_head_that_cannot_be_read_fails(root: Path, daemon: Daemon, left: bytes | None) -> None:
    output_of("append", "a", "--root", root, stdin=b"one\n")
    daemon.stop()
    (root / "head").unlink()
    if left is not None:
        (root / "head").write_bytes(left)
    code, found = status(root)

    assert (code, found["head"]) == (DOWN, None)
    wrong = next(each for each in found["findings"] if each["severity"] == "failing")
    assert wrong["message"].startswith(f"{root}/head: ")
    assert b"no record is durable yet" not in wald("status", "--root", root).stdout


def test_routes_that_are_gone_with_their_cursors_are_a_warning(root: Path, daemon: Daemon) -> None:
    for route in ("a", "b"):
        output_of("route", "add", route, "--root", root)
        output_of("append", route, "--root", root, stdin=b"one\n")
    shutil.rmtree(root / "routes")
    code, found = status(root)

    assert code == WARNING
    assert [each["hint"] for each in found["findings"]] == [f"wald --root {root} route add a"]
    assert found["findings"][0]["message"].startswith("a, b: the directory of the route is gone, and its cursors")
    assert b"has processed everything" not in wald("status", "--root", root).stdout


FAST = {"count": 10, "mean": 0.001, "p50": 0.001, "p90": 0.001, "p99": 0.001}
NONE = {"count": 0, "mean": 0.0, "p50": None, "p90": None, "p99": None}


def test_it_shows_what_the_daemon_has_measured(tmp_path: Path) -> None:
    with Daemon(tmp_path / "log") as daemon, Client(daemon.socket_path) as client:
        daemon.ask("ROUTE ADD a")
        for _ in range(3):
            assert client.ask(b"PUB a 2\nx\n").startswith("OK")
        found = json.loads(output_of("status", "--latency", "--json", "--root", daemon.root))
        assert (found["schema"], found["commit_seconds"]["count"]) == ("wald.status.latency/1", 3)
        assert found["sync_seconds"]["mean"] <= found["commit_seconds"]["mean"]
        assert found["round_records"]["p99"] == 1
        assert found["received_bytes_of_users"][str(os.getuid())] >= 3 * len(b"PUB a 2\nx\n")
        assert (os.getpid(), 30) in {(each["pid"], each["bytes"]) for each in found["connections"]}
        quiet = json.loads(output_of("status", "--latency", "--during", "0.1s", "--json", "--root", daemon.root))
        assert (quiet["commit_seconds"]["count"], quiet["conclusion"][:7]) == (0, "Nothing")
        assert b"process %d" % os.getpid() in output_of("status", "--latency", "--root", daemon.root)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"degraded": True, "degraded_by": "disk"}, "Input waits for room on the disk (disk)"),
        ({"stalled_seconds": 5.0}, "Input has waited for 5 s"),
        ({"commit_seconds": NONE}, "Nothing was committed"),
        ({}, "Commits are fast (1 ms on average)"),
        ({"commit_seconds": FAST | {"mean": 0.1}, "sync_seconds": FAST | {"mean": 0.09}}, "The disk is slow"),
        ({"commit_seconds": FAST | {"mean": 0.1}}, "The daemon is slow"),
    ],
)
def test_the_conclusion_names_the_cause(state: dict[str, Any], expected: str) -> None:
    found = {"degraded": False, "stalled_seconds": 0, "commit_seconds": FAST, "sync_seconds": FAST}
    assert conclusion(found | state, Path("log")).startswith(expected)
