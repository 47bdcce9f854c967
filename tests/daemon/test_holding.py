"""Losses of a daemon's restart by the process that holds a FIFO: each row of the table in docs/guarantees.md."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from contents import values
from running import TIMEOUT_SECONDS, Daemon, command, eventually, launched, output_of, refusal_of, refused, run
from users import MEMBER, OWNER, daemon_of, needs_root

from wald.errors import InvalidInput, NotFound, NotPermitted

Start = Callable[..., Daemon]


@contextmanager
def held(root: Path, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """``wald hold``, once it has said that it holds."""
    line = command("hold", *arguments, "--root", root)
    with launched(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout
            assert process.stdout.readline().startswith(b"holding ")
            yield process
        finally:
            process.kill()


@contextmanager
def holding(fifo: Path, how: str) -> Iterator[None]:
    """Somebody else holds the FIFO in one of the ways that the table has."""
    if how == "wald hold":
        with held(fifo.parents[2], "--all"):
            yield
        return
    flags = {"reading": os.O_RDONLY | os.O_NONBLOCK, "writing": os.O_WRONLY, "both": os.O_RDWR}
    descriptor = os.open(fifo, flags[how]) if how in flags else None
    yield
    if descriptor is not None:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("how", "kept", "end"),
    [
        ("wald hold", [b"in the pipe", b"without a daemon"], signal.SIGKILL),
        ("reading", [b"in the pipe", b"without a daemon"], signal.SIGTERM),
        ("both", [b"in the pipe", b"without a daemon"], signal.SIGKILL),
        ("writing", [b"in the pipe"], signal.SIGTERM),
        ("writing", [b"in the pipe"], signal.SIGKILL),
    ],
)
def test_what_outlives_the_daemon(start: Start, root: Path, how: str, kept: list[bytes], end: signal.Signals) -> None:
    daemon = start()
    daemon.ask("ROUTE ADD a fifo")
    fifo = root / "routes/a/in"
    with holding(fifo, how):
        writer = os.open(fifo, os.O_WRONLY)
        daemon.process.send_signal(signal.SIGSTOP)
        os.write(writer, b"in the pipe\n")
        daemon.process.send_signal(end)
        daemon.process.send_signal(signal.SIGCONT)
        daemon.process.wait()
        with suppress(BrokenPipeError):
            os.write(writer, b"without a daemon\n")
        daemon.start_again()
        eventually(lambda: values(root) == kept)
        os.close(writer)
        assert daemon.stop() == 0
    assert values(root) == kept


def test_a_hangup_does_not_end_wald_hold(start: Start, root: Path) -> None:
    """It is held on as long as SIGTERM, which is sent behind it, is not met."""
    start().ask("ROUTE ADD a fifo")
    with held(root, "--all") as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_SECONDS) == 0


@pytest.mark.parametrize(("how", "end"), [("wald hold", signal.SIGTERM), ("both", signal.SIGKILL)])
def test_an_unfinished_line_outlives_the_daemon(start: Start, root: Path, how: str, end: signal.Signals) -> None:
    """Even if the writer of its beginning has closed the pipe since."""
    daemon = start()
    daemon.ask("ROUTE ADD a fifo")
    with holding(root / "routes/a/in", how):
        (root / "routes/a/in").write_bytes(b"begin, ")
        daemon.process.send_signal(end)
        daemon.process.wait()
        (root / "routes/a/in").write_bytes(b"end\n")
        daemon.start_again()
        eventually(lambda: values(root) == [b"begin, end"])


def test_what_nobody_else_holds_ends_with_the_daemon(start: Start, root: Path) -> None:
    daemon = start()
    daemon.ask("ROUTE ADD a fifo")
    daemon.process.send_signal(signal.SIGSTOP)
    with (root / "routes/a/in").open("wb") as writer:
        writer.write(b"in the pipe\n")
    daemon.kill()
    daemon.start_again()
    assert daemon.stop() == 0
    assert values(root) == []


def test_lines_written_over_three_restarts_are_all_there(start: Start, root: Path) -> None:
    """The writer holds a writing end only, as nginx does, and does not try again."""
    lines = 20_000
    program = (
        "import os, sys\n"
        "fifo = os.open(sys.argv[1], os.O_WRONLY)\n"
        f"for number in range({lines}):\n"
        "    os.write(fifo, b'%d a line of some length\\n' % number)\n"
    )
    daemon = start()
    daemon.ask("ROUTE ADD a fifo")
    with (
        held(root, "a"),
        subprocess.Popen([sys.executable, "-c", program, str(root / "routes/a/in")]) as writer,
    ):
        for restart in range(1, 4):
            eventually(lambda: daemon.ask("HEAD") > f"OK seq={restart * lines // 5:020d}")  # noqa: B023
            assert daemon.stop() == 0
            daemon.start_again()
        assert writer.wait() == 0
        eventually(lambda: f"seq={lines:020d} " in daemon.ask("HEAD"))
        assert daemon.stop() == 0
    assert values(root) == [b"%d a line of some length" % number for number in range(lines)]


def test_it_follows_fifos_that_are_made_or_replaced_and_ends_when_told(start: Start, root: Path) -> None:
    daemon = start()
    daemon.ask("ROUTE ADD a fifo")
    with held(root, "--all") as process:
        daemon.ask("ROUTE ADD b fifo")
        (root / "routes/a/in").unlink()
        fifos = [root / "routes/a/in", root / "routes/b/in"]
        eventually(lambda: all(fifo.exists() for fifo in fifos))
        eventually(lambda: {fifo.stat().st_ino for fifo in fifos} == held_by(process.pid))
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    assert daemon.stop() == 0


def held_by(pid: int) -> set[int]:
    """The inodes of the FIFOs in a log that a process has open."""
    names = (os.path.join(f"/proc/{pid}/fd", name) for name in os.listdir(f"/proc/{pid}/fd"))
    return {os.stat(name).st_ino for name in names if os.readlink(name).endswith("/in")}


def test_what_cannot_be_held_is_refused(start: Start, root: Path) -> None:
    daemon = start()
    daemon.ask("ROUTE ADD a")
    assert refusal_of("hold", "--root", root)[0] == InvalidInput.exit_code
    assert refusal_of("hold", "a", "--all", "--root", root)[0] == InvalidInput.exit_code
    assert refusal_of("hold", "b", "--root", root)[0] == NotFound.exit_code
    code, message, hint = refusal_of("hold", "a", "--root", root)
    assert (code, message) == (InvalidInput.exit_code, f"{root}/routes/a/in: there is no FIFO")
    assert hint.startswith("wald --root ")
    assert hint.endswith(" route add a --fifo")
    assert output_of("hold", "--help")


@needs_root
def test_who_may_not_read_a_fifo_does_not_stay() -> None:
    with daemon_of(OWNER) as daemon:
        daemon.ask("ROUTE ADD a fifo")
        code, message, _ = refused(run([*MEMBER.prefix, *command("hold", "a", "--root", daemon.root)]))
        assert (code, message) == (NotPermitted.exit_code, f"{daemon.root}/routes/a/in: permission denied")
