"""The programs that change or read a log, each with a small log that gives it work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from contents import errors
from every_call import Program
from logs import Built
from running import Client, Daemon, command, eventually, run, sidecar

import wald
from wald.format.names import DEFAULT_GROUP
from wald.work.group import WorkGroup

RECORDS = 17
LINES = b"".join(b"new %d\n" % number for number in range(200))
REQUEST = b"%b %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n%b\r\n%b"
ASKED = (
    (b"POST", b"/v1/routes/a/records", b"Content-Type: text/plain\r\nIdempotency-Key: one\r\n", LINES),
    (b"GET", b"/v1/routes/b/records", b"", b""),
    (b"PUT", b"/v1/routes/a/cursors/other", b"Content-Type: application/json\r\n", b'{"sequence": 15}'),
    (b"POST", b"/v1/routes/b/records", b"Content-Type: text/plain\r\nIdempotency-Key: two\r\n", b"of b\n"),
)


def log_of_two_routes(root: Path) -> None:
    """Build four sealed segments and an active one; group processed has read the first two, slow nothing of b."""
    built = Built(root)
    for number in range(4):
        built.lines("a", [b"a%d.%d " % (number, line) + b"." * 600 for line in range(3)])
        built.lines("b", [b"b%d" % number])
        built.cut()
    built.lines("a", [b"last"])
    built.seal()
    for group in (DEFAULT_GROUP, "other"):
        built.log.set_cursor("a", 7, group=group)
        built.log.set_cursor("b", 8, group=group)
    built.crash()


def log_with_a_slow_group(root: Path) -> None:
    log_of_two_routes(root)
    wald.open(root).set_cursor("b", 0, group="slow", rewind=True)


def log_with_released_segments(root: Path) -> None:
    """Release the first two segments, then move the group back before the second."""
    log_of_two_routes(root)
    assert run(reclaim(root, "--grace", "300d")).returncode == 0
    assert list(root.glob("segments/*.released"))
    wald.open(root).set_cursor("a", 4, rewind=True)


def log_with_a_bad_index(root: Path) -> None:
    log_of_two_routes(root)
    path = sorted(root.glob("segments/*.wal.zst"))[2]
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    assert errors(root)


def log_with_a_bad_frame(root: Path) -> None:
    """Damage the index and a frame of a sealed segment, the head and a ledger."""
    log_with_a_bad_index(root)
    path = sorted(root.glob("segments/*.wal.zst"))[1]
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    (root / "head").write_bytes(b"?" * 20)


def log_with_a_work_group(root: Path) -> None:
    log_of_two_routes(root)
    with WorkGroup(root, "a", "workers") as group:
        leased = [delivery.record.sequence for delivery in group.lease("w", 6)]
        group.ack("w", leased[:2] + leased[4:5])
        group.nack("w", leased[2:3])


def log_with_a_fifo(root: Path) -> None:
    log_of_two_routes(root)
    assert run(command("route", "add", "a", "--fifo", "--root", root)).returncode == 0


def log_with_dead_letters(root: Path) -> None:
    log_of_two_routes(root)
    with Daemon(root) as daemon:
        failing = sidecar(
            *("drain", "feed", "a", "--root", root, "--batch-records", 1, "--tries", 1, "--exit-at-end", "--", "false")
        )
        assert run(failing).returncode == 10
        assert daemon.stop() == 0


def log_with_an_archive(root: Path) -> None:
    log_of_two_routes(root)
    assert run(archive(root, "a")).returncode == 0


@contextmanager
def daemon_of(root: Path) -> Iterator[None]:
    with Daemon(root) as daemon:
        yield
        assert daemon.stop() == 0


@contextmanager
def written_to_fifo(root: Path) -> Iterator[None]:
    """Write to the FIFO of route a, and keep it open."""
    descriptor = os.open(root / "routes" / "a" / "in", os.O_RDWR)
    try:
        os.write(descriptor, LINES)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def leased_from(root: Path) -> Iterator[None]:
    """Own the group of workers, and lease records to worker w."""
    with WorkGroup(root, "a", "workers") as group:
        assert group.lease("w", 3)
        yield


def stop_once_held(root: Path, process: subprocess.Popen[bytes]) -> None:
    """Stop ``wald hold`` once it has the FIFO of route a open."""

    def held() -> bool:
        with suppress(OSError):  # no reader
            os.close(os.open(root / "routes" / "a" / "in", os.O_WRONLY | os.O_NONBLOCK))
            return True
        return False

    eventually(lambda: process.poll() is not None or held())
    terminate(process)


def stop_once_durable(root: Path, process: subprocess.Popen[bytes]) -> None:
    """Stop a daemon once all lines of the FIFO are durable."""

    def durable() -> bool:
        head = wald.open(root).head()
        return head is not None and head.sequence >= RECORDS + LINES.count(b"\n")

    eventually(lambda: process.poll() is not None or (durable() and answer(root / "wald.sock", b"PING\n")))
    terminate(process)


def stop_once_asked(root: Path, process: subprocess.Popen[bytes]) -> None:
    """Send the requests of ``ASKED`` to a gate, up to the first failure, and stop it."""
    path = root / "gate.sock"
    eventually(lambda: process.poll() is not None or answer(path, REQUEST % (b"GET", b"/healthz", b"", b"")))
    for method, target, header, body in ASKED:
        said = answer(path, REQUEST % (method, target, b"Content-Length: %d\r\n%b" % (len(body), header), body))
        if not said.startswith(b"HTTP/1.1 20"):
            break
    terminate(process)


def answer(path: Path, request: bytes) -> bytes:
    """Return the first line that a socket answers; nothing if it disconnects, or no process listens."""
    with suppress(OSError), Client(path) as client:
        return client.ask(request).encode()
    return b""


def terminate(process: subprocess.Popen[bytes]) -> None:
    """Stop a program that strace may have started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)


def reclaim(root: Path, *options: str) -> list[str]:
    return sidecar("reclaim", "--root", root, *options)


def archive(root: Path, *routes: str) -> list[str]:
    return sidecar("archive", *routes, "--root", root, "--dest", root.parent / "archive")


def drain(root: Path, *options: object) -> list[str]:
    return sidecar("drain", "feed", "a", "--root", root, "--exit-at-end", *options, "--", "cat")


def in_python(script: str, root: Path) -> list[str]:
    return [sys.executable, "-c", script, str(root)]


WORK = """
import sys, wald
from wald.errors import WaldError
try:
    with wald.WorkGroup(sys.argv[1], "a", "workers") as group:
        while leased := [delivery.record.sequence for delivery in group.lease("w", 3)]:
            group.nack("w", leased[1:2])
            group.ack("w", leased[:1] + leased[2:])
except (OSError, WaldError) as error:
    sys.exit(str(error))
"""

PRODUCE = """
import sys, wald
from wald.errors import WaldError
try:
    with wald.Producer(sys.argv[1]) as producer:
        producer.send("a", [f"new {number}" for number in range(200)])
        (span,) = producer.flush()
    assert wald.open(sys.argv[1]).head().sequence >= span[1]
except (OSError, WaldError) as error:
    sys.exit(str(error))
"""

PROGRAMS = {
    "reclaim": Program(log_of_two_routes, lambda root: reclaim(root, "--grace", "0")),
    "reclaim releases": Program(log_of_two_routes, lambda root: reclaim(root, "--grace", "300d")),
    "reclaim takes back": Program(log_with_released_segments, lambda root: reclaim(root, "--grace", "0")),
    "reclaim shrinks": Program(log_with_a_slow_group, lambda root: reclaim(root, "--grace", "0", "--shrink-pinned")),
    "repair": Program(log_with_a_bad_index, lambda root: command("repair", "--root", root)),
    "repair with loss": Program(log_with_a_bad_frame, lambda root: command("repair", "--accept-loss", "--root", root)),
    "archive": Program(log_of_two_routes, lambda root: archive(root, "a")),
    "archive of two routes": Program(log_with_an_archive, lambda root: archive(root, "a", "b")),
    "archive verify": Program(
        log_with_an_archive,
        lambda root: sidecar("archive", "verify", root.parent / "archive", "--root", root),
        prints="all",
    ),
    "drain": Program(log_of_two_routes, lambda root: drain(root, "--batch-records", 3), prints="rest", retries=True),
    "drain with workers": Program(
        log_of_two_routes, lambda root: drain(root, "--workers", 2), prints="rest", retries=True
    ),
    "cursor set": Program(log_of_two_routes, lambda root: command("cursor", "set", "a", 11, "--root", root)),
    "cursor skip": Program(
        log_of_two_routes, lambda root: command("cursor", "skip", "a", 9, "--root", root), again=(3,)
    ),
    "cursor remove": Program(
        log_of_two_routes, lambda root: command("cursor", "remove", "a", "--group", "other", "--root", root), again=(3,)
    ),
    "read": Program(log_of_two_routes, lambda root: command("read", "a", "--root", root), prints="all"),
    "read --commit": Program(
        log_of_two_routes, lambda root: command("read", "a", "--commit", "--root", root), prints="rest"
    ),
    "verify": Program(log_of_two_routes, lambda root: command("verify", "--root", root), prints="all"),
    "explain": Program(log_with_a_slow_group, lambda root: command("explain", "--root", root)),
    "group skip": Program(
        log_with_a_work_group,
        lambda root: command("group", "skip", "a", "workers", "6..7", "--root", root),
        again=(2, 3),
    ),
    "group remove": Program(
        log_with_a_work_group, lambda root: command("group", "remove", "a", "workers", "--root", root), again=(3,)
    ),
    "group release": Program(
        log_with_a_work_group,
        lambda root: command("group", "release", "a", "workers", "w", "--root", root),
        beside=leased_from,
        again=(3,),
    ),
    "group list": Program(log_with_a_work_group, lambda root: command("group", "list", "--root", root)),
    "work": Program(log_with_a_work_group, lambda root: in_python(WORK, root)),
    "run --stdin": Program(
        log_of_two_routes, lambda root: command("run", "--root", root, "--stdin", "a"), stdin=LINES, layout=False
    ),
    "run with a FIFO": Program(
        log_with_a_fifo,
        lambda root: command("run", "--root", root),
        beside=written_to_fifo,
        assist=stop_once_durable,
        layout=False,
    ),
    "gate": Program(
        log_of_two_routes,
        lambda root: sidecar("gate", "--root", root, "--listen", "", "--uds", root / "gate.sock"),
        beside=daemon_of,
        assist=stop_once_asked,
        layout=False,
    ),
    "drain redrive": Program(
        log_with_dead_letters,
        lambda root: sidecar("drain", "redrive", "--root", root),
        beside=daemon_of,
        layout=False,
    ),
    "producer": Program(log_of_two_routes, lambda root: in_python(PRODUCE, root), beside=daemon_of, layout=False),
    "hold": Program(log_with_a_fifo, lambda root: command("hold", "--root", root), assist=stop_once_held),
    "append": Program(
        log_of_two_routes,
        lambda root: command("append", "a", "--root", root),
        stdin=LINES,
        beside=daemon_of,
        layout=False,
    ),
    "cut": Program(log_of_two_routes, lambda root: command("cut", "--root", root), beside=daemon_of, layout=False),
    "clock step": Program(
        log_of_two_routes, lambda root: command("clock", "step", "--root", root), beside=daemon_of, layout=False
    ),
    "route add": Program(
        log_of_two_routes, lambda root: command("route", "add", "c", "--root", root), beside=daemon_of, layout=False
    ),
    "route retire": Program(
        log_of_two_routes, lambda root: command("route", "retire", "b", "--root", root), beside=daemon_of, layout=False
    ),
}
