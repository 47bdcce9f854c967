"""FIFOs that are replaced, removed or unreadable lose nothing; losses of a restart depend on who holds them."""

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from asking import stat as state
from contents import values
from manager import manager_at
from running import TIMEOUT_SECONDS, Daemon, Start, command, eventually, launched, output_of, refusal_of, refused, run
from tracing import traced
from users import MEMBER, OWNER, daemon_of, needs_root

import wald
from wald.errors import InvalidInput, NotFound, NotPermitted


def troubles(daemon: Daemon) -> dict[str, str]:
    found = state(daemon)["fifo_problems"]
    assert isinstance(found, dict)
    return found


def test_a_file_in_its_place_is_kept_and_told(start: Start, root: Path) -> None:
    daemon = start(routes=["a fifo mode=0640"])
    fifo, kept = root / "routes/a/in", root / "routes/a/in.found-1"
    fifo.write_bytes(b"before\n")
    fifo.unlink()
    fifo.write_bytes(b"swallowed\n")
    eventually(lambda: fifo.is_fifo() and troubles(daemon))
    fifo.write_bytes(b"after\n")
    eventually(lambda: values(root) == [b"before", b"after"])

    assert stat.S_IMODE(fifo.stat().st_mode) == 0o640
    assert kept.read_bytes() == b"swallowed\n"
    message = f"wald --root {root} append a {kept} && rm {kept}"
    assert message in troubles(daemon)[str(kept)]
    assert message in daemon.log
    assert message in output_of("explain", "--root", root).decode()
    assert message.rsplit(";", maxsplit=1)[-1] in output_of("verify", "--root", root).decode()
    assert message in json.loads(output_of("explain", "--json", "--root", root).splitlines()[0])["message"]
    assert "in.found-1: 10 bytes" in output_of("top", "--once", "--root", root).decode()
    output_of("append", "a", kept, "--root", root)
    kept.unlink()
    eventually(lambda: troubles(daemon) == {})
    assert values(root) == [b"before", b"after", b"swallowed"]


def test_one_that_is_removed_is_made_anew_and_the_old_one_read_to_its_end(start: Start, root: Path) -> None:
    daemon = start(routes=["a fifo mode=0600"])
    fifo = root / "routes/a/in"
    old = os.open(fifo, os.O_WRONLY)
    fifo.unlink()
    eventually(fifo.is_fifo)
    assert stat.S_IMODE(fifo.stat().st_mode) == 0o600
    eventually(lambda: "and recreated" in daemon.log)
    os.write(old, b"old\nunfinished")
    eventually(lambda: values(root) == [b"old"])
    fifo.write_bytes(b"new\n")
    eventually(lambda: values(root) == [b"old", b"new"])
    os.close(old)
    eventually(lambda: values(root) == [b"old", b"new", b"unfinished"])


def test_the_old_one_may_end_with_the_daemon(start: Start, root: Path) -> None:
    daemon = start(routes=["a fifo"])
    fifo = root / "routes/a/in"
    with fifo.open("wb") as writer:
        fifo.unlink()
        eventually(fifo.is_fifo)
        daemon.process.send_signal(signal.SIGSTOP)
        writer.write(b"last\n")
    daemon.process.send_signal(signal.SIGTERM)
    daemon.process.send_signal(signal.SIGCONT)
    assert daemon.wait() == 0, daemon.log
    assert values(root) == [b"last"]


@pytest.mark.parametrize(
    ("begun", "noticed"), [(b"x" * (700 << 10), True), (b"unfinished", False)], ids=["in the log", "in the pipe"]
)
def test_a_stop_takes_an_unfinished_line_and_what_came_to_the_next_fifo(
    start: Start, root: Path, begun: bytes, noticed: bool
) -> None:
    daemon = start(routes=["a fifo"])
    fifo = root / "routes/a/in"
    old = os.open(fifo, os.O_WRONLY)
    os.write(old, begun)
    if len(begun) > 4096:
        eventually(lambda: daemon.ask("HEAD").split()[1].strip("seq=0"))
    if not noticed:
        daemon.process.send_signal(signal.SIGSTOP)
    fifo.unlink()
    os.mkfifo(fifo)
    new = os.open(fifo, os.O_RDWR)
    if noticed:
        eventually(lambda: "the daemon now reads the new one" in daemon.log)
    os.write(new, b"new\nnewer\n")
    daemon.process.send_signal(signal.SIGTERM)
    daemon.process.send_signal(signal.SIGCONT)
    assert daemon.wait() == 0, daemon.log
    os.close(new)
    os.close(old)

    found = [(record.value, record.terminated) for record in wald.open(root).records("a")]
    assert sorted(found) == sorted([(begun, False), (b"new", True), (b"newer", True)])


def test_a_stop_takes_what_waits_behind_a_long_line_of_the_next_fifo(start: Start, root: Path) -> None:
    """The rest of the line waits in a pipe that the next start finds, and becomes another record."""
    daemon = start(routes=["a fifo"])
    fifo = root / "routes/a/in"
    old = os.open(fifo, os.O_WRONLY)
    fifo.unlink()
    eventually(lambda: "and recreated" in daemon.log)
    new = os.open(fifo, os.O_RDWR)
    long = b"x" * (700 << 10)
    os.write(new, long)
    eventually(lambda: daemon.ask("HEAD").split()[1].strip("seq=0"))
    os.write(old, b"old\n")
    assert daemon.stop() == 0, daemon.log
    os.close(old)
    os.write(new, b"rest\n")
    assert b"".join(values(root)).replace(b"old", b"") == long
    assert values(root)[-1] == b"old"

    daemon.start_again()
    eventually(lambda: values(root)[-1] == b"rest")
    os.close(new)


def test_a_stop_reports_what_it_leaves_in_a_replaced_fifo(start: Start, root: Path, tmp_path: Path) -> None:
    """The daemon finds no bytes, as if the producer wrote them after the last read."""
    daemon = start(routes=["a fifo"])
    fifo = root / "routes/a/in"
    with fifo.open("wb", 0) as old:
        fifo.unlink()
        eventually(lambda: "and recreated" in daemon.log)
        with fifo.open("r+b", 0), traced(daemon.process.pid, tmp_path / "trace", "inject=tee:error=EAGAIN"):
            old.write(b"late\n")
            assert daemon.stop() == 1
    assert "are lost (a)" in daemon.log


def test_one_that_comes_back_to_its_path_is_read_once(start: Start, root: Path, tmp_path: Path) -> None:
    """In between it was read to its end as a replaced FIFO; a long line in it stays in one piece."""
    address = str(tmp_path / "notify")
    with manager_at(address) as manager:
        daemon = start(env={"NOTIFY_SOCKET": address}, routes=["a fifo"])
        fifo, aside = root / "routes/a/in", root / "routes/a/aside"
        old = os.open(fifo, os.O_WRONLY)
        os.write(old, b"x" * (700 << 10))
        eventually(lambda: daemon.ask("HEAD").split()[1].strip("seq=0"))
        fifo.rename(aside)
        eventually(fifo.is_fifo)
        new = os.open(fifo, os.O_WRONLY)
        aside.rename(fifo)
        assert [manager.hear("FDSTORE=1") for _ in ("added", "made anew", "taken back")]
        for number in range(200):
            os.write(old, b"old%d\n" % number)
            os.write(new, b"new%d\n" % number)
        eventually(lambda: len(values(root)) >= 400)
        os.close(old)
        os.close(new)
        fifo.write_bytes(b"last\n")
        eventually(lambda: values(root)[-1] == b"last")
        assert daemon.stop() == 0

    old_lines = [b"x" * (700 << 10) + b"old0", *(b"old%d" % number for number in range(1, 200))]
    assert sorted(values(root)) == sorted([*old_lines, *(b"new%d" % number for number in range(200)), b"last"])
    assert "another process reads" not in daemon.log


@needs_root
def test_one_that_cannot_be_opened_keeps_nobody_from_the_others() -> None:
    """And a user who may not read a FIFO cannot hold it."""
    with daemon_of(OWNER) as daemon:
        for route in "ab":
            assert daemon.ask(f"ROUTE ADD {route} fifo") == f"OK added {route}"
        bad, good = (daemon.root / f"routes/{route}/in" for route in "ab")
        held = os.open(bad, os.O_RDWR)
        os.write(held, b"later\n")
        eventually(lambda: values(daemon.root) == [b"later"])
        assert daemon.stop() == 0
        os.write(held, b"waits\n")
        os.chown(bad, 0, 0)
        bad.chmod(0o600)
        daemon.start_again()
        good.write_bytes(b"now\n")
        eventually(lambda: values(daemon.root) == [b"later", b"now"])
        code, message, _ = refused(run([*MEMBER.prefix, *command("hold", "b", "--root", daemon.root)]))
        assert (code, message) == (NotPermitted.exit_code, f"{good}: permission denied")
        assert "Permission denied" in troubles(daemon)[str(bad)]
        assert f"{bad}: Permission denied" in daemon.log
        os.chown(bad, OWNER.user_id, OWNER.group_id)
        eventually(lambda: values(daemon.root) == [b"later", b"now", b"waits"])
        eventually(lambda: troubles(daemon) == {})
        os.close(held)
        assert daemon.stop() == 0


def test_two_routes_do_not_share_one(start: Start, root: Path) -> None:
    """Each line would be in the log twice."""
    daemon = start(routes=["a fifo", "b"])
    os.link(root / "routes/a/in", root / "routes/b/in")
    assert "the same FIFO as" in daemon.ask("ROUTE ADD b fifo")
    daemon.stop()
    daemon.start_again()
    assert "the same FIFO as" in troubles(daemon)[str(root / "routes/b/in")]
    assert "the same FIFO as" in output_of("verify", "--root", root).decode()
    (root / "routes/a/in").write_bytes(b"once\n")
    eventually(lambda: values(root) == [b"once"])
    (root / "routes/b/in").unlink()
    eventually(lambda: troubles(daemon) == {})
    assert daemon.stop() == 0
    assert values(root) == [b"once"]


def test_what_stands_in_its_place_at_a_start_is_kept(start: Start, root: Path) -> None:
    """A link to itself keeps nobody from the others."""
    daemon = start()
    for route in "abc":
        daemon.ask(f"ROUTE ADD {route} fifo")
    daemon.stop()
    fifos = [root / f"routes/{route}/in" for route in "abc"]
    for fifo in fifos[:2]:
        fifo.unlink()
    fifos[0].write_bytes(b"swallowed\n")
    fifos[1].symlink_to("in")
    assert "routes/a/in: not a FIFO" in output_of("verify", "--root", root).decode()
    daemon.start_again()
    assert fifos[0].is_fifo()
    assert str(root / "routes/a/in.found-1") in troubles(daemon)
    fifos[2].write_bytes(b"x\n")
    eventually(lambda: values(root) == [b"x"])


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
    daemon = start(routes=["a fifo"])
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


def test_what_nobody_else_holds_ends_with_the_daemon(start: Start, root: Path) -> None:
    daemon = start(routes=["a fifo"])
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
    daemon = start(routes=["a fifo"])
    with held(root, "a"), subprocess.Popen([sys.executable, "-c", program, str(root / "routes/a/in")]) as writer:
        for restart in range(1, 4):
            eventually(lambda: daemon.ask("HEAD") > f"OK seq={restart * lines // 5:020d}")  # noqa: B023
            assert daemon.stop() == 0
            daemon.start_again()
        assert writer.wait() == 0
        eventually(lambda: f"seq={lines:020d} " in daemon.ask("HEAD"))
        assert daemon.stop() == 0
    assert values(root) == [b"%d a line of some length" % number for number in range(lines)]


def test_it_follows_fifos_that_are_made_or_replaced_and_ends_when_told(start: Start, root: Path) -> None:
    daemon = start(routes=["a fifo"])
    with held(root, "--all") as process:
        daemon.ask("ROUTE ADD b fifo")
        (root / "routes/a/in").unlink()
        fifos = [root / "routes/a/in", root / "routes/b/in"]
        eventually(lambda: all(fifo.exists() for fifo in fifos))
        eventually(lambda: {fifo.stat().st_ino for fifo in fifos} == held_by(process.pid))
        process.send_signal(signal.SIGHUP)  # which does not end it
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_SECONDS) == 0


def held_by(pid: int) -> set[int]:
    """The inodes of the FIFOs in a log that a process has open."""
    names = (os.path.join(f"/proc/{pid}/fd", name) for name in os.listdir(f"/proc/{pid}/fd"))
    return {os.stat(name).st_ino for name in names if os.readlink(name).endswith("/in")}


def test_what_cannot_be_held_is_refused(start: Start, root: Path) -> None:
    start(routes=["a"])
    assert refusal_of("hold", "--root", root)[0] == InvalidInput.exit_code
    assert refusal_of("hold", "a", "--all", "--root", root)[0] == InvalidInput.exit_code
    assert refusal_of("hold", "b", "--root", root)[0] == NotFound.exit_code
    code, message, hint = refusal_of("hold", "a", "--root", root)
    assert (code, message) == (InvalidInput.exit_code, f"{root}/routes/a/in: there is no FIFO")
    assert hint.startswith("wald --root ")
    assert hint.endswith(" route add a --fifo")
    assert output_of("hold", "--help")
