"""The programs that change or read a log, each with a small log that gives it work."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

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


def ours(*words: object, on: Callable[[Path], None] = log_of_two_routes, name: str = "", **more: Any) -> Program:
    """Return ``wald WORDS``, or ``wald-NAME WORDS``, on a log."""
    end = words.index("--") if "--" in words else len(words)

    def line(root: Path) -> list[str]:
        whole = (*words[:end], "--root", root, *words[end:])
        return sidecar(name, *whole) if name else command(*whole)

    return Program(on, line, **more)


def reclaiming(*options: str, on: Callable[[Path], None] = log_of_two_routes) -> Program:
    return ours(*options, on=on, name="reclaim")


def drain(*options: object) -> Program:
    words = ("feed", "a", "--exit-at-end", *options, "--", "cat")
    return ours(*words, name="drain", prints="rest", retries=True)


def group(*words: object, **more: Any) -> Program:
    return ours("group", *words, on=log_with_a_work_group, **more)


def beside_a_daemon(*words: object, **more: Any) -> Program:
    return ours(*words, beside=daemon_of, layout=False, **more)


PROGRAMS = {
    "reclaim": reclaiming("--grace", "0"),
    "reclaim releases": reclaiming("--grace", "300d"),
    "reclaim takes back": reclaiming("--grace", "0", on=log_with_released_segments),
    "reclaim shrinks": reclaiming("--grace", "0", "--shrink-pinned", on=log_with_a_slow_group),
    "repair": ours("repair", on=log_with_a_bad_index),
    "repair with loss": ours("repair", "--accept-loss", on=log_with_a_bad_frame),
    "archive": Program(log_of_two_routes, lambda root: archive(root, "a")),
    "archive of two routes": Program(log_with_an_archive, lambda root: archive(root, "a", "b")),
    "archive verify": Program(
        log_with_an_archive,
        lambda root: sidecar("archive", "verify", root.parent / "archive", "--root", root),
        prints="all",
    ),
    "drain": drain("--batch-records", 3),
    "drain with workers": drain("--workers", 2),
    "cursor set": ours("cursor", "set", "a", 11),
    "cursor skip": ours("cursor", "skip", "a", 9, again=(3,)),
    "cursor remove": ours("cursor", "remove", "a", "--group", "other", again=(3,)),
    "read": ours("read", "a", prints="all"),
    "read --commit": ours("read", "a", "--commit", prints="rest"),
    "verify": ours("verify", prints="all"),
    "explain": ours("explain", on=log_with_a_slow_group),
    "group skip": group("skip", "a", "workers", "6..7", again=(2, 3)),
    "group remove": group("remove", "a", "workers", again=(3,)),
    "group release": group("release", "a", "workers", "w", beside=leased_from, again=(3,)),
    "group list": group("list"),
    "work": Program(log_with_a_work_group, lambda root: in_python(WORK, root)),
    "run --stdin": ours("run", "--stdin", "a", stdin=LINES, layout=False),
    "run with a FIFO": ours("run", on=log_with_a_fifo, beside=written_to_fifo, assist=stop_once_durable, layout=False),
    "gate": Program(
        log_of_two_routes,
        lambda root: sidecar("gate", "--root", root, "--listen", "", "--uds", root / "gate.sock"),
        beside=daemon_of,
        assist=stop_once_asked,
        layout=False,
    ),
    "drain redrive": beside_a_daemon("redrive", on=log_with_dead_letters, name="drain"),
    "producer": Program(log_of_two_routes, lambda root: in_python(PRODUCE, root), beside=daemon_of, layout=False),
    "hold": ours("hold", on=log_with_a_fifo, assist=stop_once_held),
    "append": beside_a_daemon("append", "a", stdin=LINES),
    "cut": beside_a_daemon("cut"),
    "clock step": beside_a_daemon("clock", "step"),
    "route add": beside_a_daemon("route", "add", "c"),
    "route retire": beside_a_daemon("route", "retire", "b"),
}
