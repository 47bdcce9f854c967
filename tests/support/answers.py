"""A log with known answers: a daemon that was killed once; records that are active, archived and reclaimed."""

from __future__ import annotations

from pathlib import Path

from running import TIMEOUT_SECONDS, Daemon, eventually, output_of, run, sidecar

from wald.format.names import Kind, segment_name
from wald.work.group import WorkGroup


def answering(root: Path) -> Daemon:
    """Start a daemon on the log of docs/questions.md.

    web: 1 to 3 archived and reclaimed, 5 and 6 not processed; orders: 4 processed and reclaimed, 7 leased by a worker.
    """
    daemon = Daemon(root, env={"WALD_STALL_TIMEOUT": "30s"})
    for route in ("web", "orders"):
        output_of("route", "add", route, "--root", root)
    _send(root, "web", b"one\ntwo\nthree\n")
    _send(root, "orders", b"first\n")
    _cut(root, 1)
    _run("archive", "web", "--root", root)
    output_of("cursor", "set", "orders", 4, "--root", root)
    _send(root, "web", b"five\nsix\n")
    _cut(root, 5)
    _send(root, "orders", b"stuck\n")
    _run("reclaim", "--root", root, "--grace", 0)
    assert not (root / "segments" / segment_name(1, Kind.SEALED)).exists()
    daemon.kill()
    daemon.start_again()
    with WorkGroup(root, "orders") as work:
        assert work.lease("worker-1", lease_for=86_400, wait=TIMEOUT_SECONDS)
    return daemon


def _send(root: Path, route: str, lines: bytes) -> None:
    output_of("append", route, "--root", root, stdin=lines)


def _cut(root: Path, base: int) -> None:
    """Complete the segment that begins with ``base``, and wait until it is sealed."""
    output_of("cut", "--root", root)
    directory = root / "segments"
    raw, sealed = (directory / segment_name(base, kind) for kind in (Kind.RAW, Kind.SEALED))
    eventually(lambda: sealed.exists() and not raw.exists())


def _run(name: str, *arguments: object) -> None:
    run(sidecar(name, *arguments)).check_returncode()
