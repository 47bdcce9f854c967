"""Standard streams that are closed, full or broken: commands finish their work, and no log file gets descriptor 0–2."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from contents import assert_sound, errors, values
from every_program import answer
from running import TIMEOUT_SECONDS, Daemon, command, eventually, output_of, refused, sidecar, wald

ALL_CLOSED = "<&- >&- 2>&-"
BROKEN = "broken"
UNUSABLE = {"closed": ">&-", "full": "> /dev/full", BROKEN: BROKEN}


def ended(line: list[str], streams: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end with streams redirected by a shell, or with a pipe without a reader as stdout."""
    if streams == BROKEN:
        reading, writing = os.pipe()
        os.close(reading)
        with open(writing, "wb") as stdout:
            return subprocess.run(
                line, input=stdin, stdout=stdout, stderr=subprocess.PIPE, timeout=TIMEOUT_SECONDS, check=False
            )
    words = ["bash", "-c", f'exec "$@" {streams}', "bash", *line]
    return subprocess.run(words, input=stdin, capture_output=True, timeout=TIMEOUT_SECONDS, check=False)


def started(line: list[str], streams: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["bash", "-c", f'exec "$@" {streams}', "bash", *line])


@pytest.fixture
def filled(daemon: Daemon, root: Path) -> Path:
    """A log with two records of route a in two segments; a group has read the first."""
    output_of("append", "a", "--root", root, stdin=b"one\n")
    output_of("cut", "--root", root)
    output_of("append", "a", "--root", root, stdin=b"two\n")
    assert wald("cursor", "set", "a", 1, "--root", root).returncode == 0
    eventually(lambda: not (root / "segments/00000000000000000001.wal").exists())  # sealed
    return root


def at(root: Path, group: str = "processed") -> bytes:
    return output_of("cursor", "get", "a", "--group", group, "--root", root)


RESULTS = [["read", "a"], ["head"], ["show", "1"], ["status", "--json"]]


def test_work_is_done_without_stdout(filled: Path) -> None:
    for streams in UNUSABLE.values():
        done = ended(command("append", "a", "--root", filled), streams, b"three\n")
        assert (done.returncode, done.stderr) == (0, b""), streams
    assert values(filled) == [b"one", b"two", *[b"three"] * 3]
    reclaiming = sidecar("reclaim", "--grace", 0, "--root", filled)
    for line, streams in (
        (command("cursor", "set", "a", 2, "--json", "--root", filled), ">&-"),
        (command("route", "add", "b", "--json", "--root", filled), ">&-"),
        (sidecar("archive", "--root", filled, "a", "--group", "kept"), ALL_CLOSED),
        *((reclaiming, streams) for streams in (BROKEN, ALL_CLOSED)),
        (sidecar("drain", "--root", filled, "a", "--exit-at-end", "--", "wc", "-l"), ALL_CLOSED),
    ):
        done = ended(line, streams)
        assert (done.returncode, done.stderr) == (0, b""), line
    assert (filled / "routes/b").is_dir()
    assert (at(filled), at(filled, "kept")) == (b"5\n", b"5\n")
    assert values(filled) == [b"two", *[b"three"] * 3]
    assert errors(filled) == []


def test_a_repair_is_done_without_stdout(filled: Path, daemon: Daemon) -> None:
    assert daemon.stop() == 0
    for streams in UNUSABLE.values():
        (filled / "head").unlink()
        done = ended(command("repair", "--root", filled), streams)

        assert (done.returncode, done.stderr) == (0, b""), streams
        assert errors(filled) == []


def test_a_result_that_cannot_be_written_is_a_failure(filled: Path) -> None:
    for words, streams in (*((words, "> /dev/full") for words in RESULTS), (["read", "a", "--commit"], ">&-")):
        line = command(*words, "--root", filled)
        code, message, hint = refused(ended(line, streams))
        assert (code, message.split(": ")[0], "df" in hint) == (1, "stdout", False), words
    done = ended(line, BROKEN)
    assert (done.returncode, done.stderr) == (141, b"")
    assert ended(line, ">&- 2>&-").returncode == 1
    assert at(filled) == b"1\n"


def test_what_cannot_be_read_or_reported_is_an_error_at_once_and_changes_nothing(filled: Path) -> None:
    # A stdin that cannot be read is an error at once.
    for streams in ("<&-", "0> /dev/null"):
        assert refused(ended(command("append", "a", "--root", filled), streams))[:2] == (2, "stdin is closed")
    assert refused(ended(command("append", "a", "/dev/stdin", "--root", filled), "<&-"))[0] == 2
    running = command("run", "--stdin", "a", "--root", filled.with_name("other"))
    assert refused(ended(running, "<&-"))[0] == 2
    assert values(filled) == [b"one", b"two"]

    # An error without a stderr has its exit code and changes nothing.
    before = {path: path.read_bytes() for path in (filled / "segments").iterdir()}
    assert ended(command("read", "none", "--root", filled), ">&- 2>&-").returncode == 3
    assert ended(command("append", "none", "--root", filled), ">&- 2>&-", b"x\n").returncode == 3
    assert {path: path.read_bytes() for path in (filled / "segments").iterdir()} == before


@pytest.mark.parametrize(
    "streams", [ALL_CLOSED, *(pytest.param(each, marks=pytest.mark.slow) for each in ("2>&-", "2> /dev/full"))]
)
def test_a_daemon_and_a_gate_run_without_streams(root: Path, streams: str) -> None:
    daemon = started(command("run", "--root", root), streams)
    gate_socket = root.with_name("gate.sock")
    try:
        eventually(lambda: daemon.poll() is not None or wald("head", "--root", root).returncode == 0)
        names = [os.readlink(f"/proc/{daemon.pid}/fd/{number}") for number in range(3)]
        assert not any(name.startswith(str(root)) for name in names), names
        output_of("route", "add", "a", "--root", root)
        output_of("append", "a", "--root", root, stdin=b"one\n")
        daemon.send_signal(signal.SIGHUP)  # makes the daemon write to the journal
        output_of("append", "a", "--root", root, stdin=b"two\n")
        gate = started(sidecar("gate", "--root", root, "--listen", "", "--uds", gate_socket), streams)
        try:
            request = b"GET /healthz HTTP/1.0\r\n\r\n"
            eventually(lambda: gate.poll() is not None or answer(gate_socket, request))
            assert answer(gate_socket, request).startswith(b"HTTP/1.1 200 ")
        finally:
            gate.terminate()
            assert gate.wait(TIMEOUT_SECONDS) == 0
    finally:
        daemon.terminate()
        assert daemon.wait(TIMEOUT_SECONDS) == 0
    assert values(root) == [b"one", b"two"]
    assert_sound(root)


def test_a_watching_reclaim_continues_when_its_reader_has_left(filled: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    line = sidecar("reclaim", "--watch", "--grace", 0, "--root", filled)
    with open(writing, "wb") as stdout, subprocess.Popen(line, stdout=stdout) as watching:
        eventually(lambda: values(filled) == [b"two"])
        watching.terminate()
        assert watching.wait(TIMEOUT_SECONDS) == 0
