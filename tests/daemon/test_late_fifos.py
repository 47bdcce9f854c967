"""A FIFO that is read late still has what its last daemon wrote to the log and did not take: every line once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from contents import assert_sound, values
from running import Client, Daemon, eventually, run, sidecar
from tracing import traced
from users import OWNER, daemon_of, needs_root

import wald
from wald.files.layout import Root
from wald.files.listing import list_segments
from wald.format.names import Kind

LINES = [b"before", b"tick", b"tick"]


@dataclass
class Killed:
    """A daemon that was killed when the last two of LINES were durable and still in their FIFO.

    Attributes:
        held: the FIFO, open for writing.
    """

    daemon: Daemon
    fifo: Path
    held: int

    def write(self, *lines: bytes) -> None:
        os.write(self.held, b"".join(line + b"\n" for line in lines))

    def values(self) -> list[bytes]:
        return values(self.daemon.root)

    def start_again(self) -> None:
        """Return when the segment with the lines is a sealed one."""
        self.daemon.start_again()
        eventually(lambda: list_segments(Root(self.daemon.root)).segments[0].kind is Kind.SEALED)


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Killed]:
    with daemon_of(OWNER) as daemon:
        assert daemon.ask("ROUTE ADD a fifo") == "OK added a"
        fifo = daemon.root / "routes/a/in"
        it = Killed(daemon, fifo, os.open(fifo, os.O_RDWR))
        it.write(b"before")
        eventually(lambda: it.values() == LINES[:1])
        with traced(daemon.process.pid, tmp_path / "trace", "trace=readv", "inject=readv:signal=SIGKILL:when=2"):
            it.write(b"tick", b"tick")
            assert daemon.wait() == -9
        yield it
        os.close(it.held)


@needs_root
def test_one_that_could_not_be_opened_at_two_starts(killed: Killed) -> None:
    os.chown(killed.fifo, 0, 0)
    killed.fifo.chmod(0o600)
    killed.start_again()
    assert killed.daemon.stop() == 0
    killed.start_again()
    os.chown(killed.fifo, OWNER.user_id, OWNER.group_id)
    killed.write(b"after")

    eventually(lambda: killed.values()[3:])
    assert killed.daemon.stop() == 0
    assert killed.values() == [*LINES, b"after"]
    assert_sound(killed.daemon.root)


@needs_root
def test_one_whose_segment_was_reclaimed_meanwhile(killed: Killed) -> None:
    os.chown(killed.fifo, 0, 0)
    killed.fifo.chmod(0o600)
    killed.start_again()
    wald.open(killed.daemon.root).set_cursor("a", len(LINES))

    def reclaimed() -> bool:
        done = run(sidecar("reclaim", "--root", killed.daemon.root, "--grace", "0"))
        assert done.returncode == 0, done.stderr
        return killed.values() == []

    eventually(reclaimed)  # a segment that is just being sealed is left for the next run
    os.chown(killed.fifo, OWNER.user_id, OWNER.group_id)
    killed.write(b"after")

    eventually(killed.values)
    assert killed.daemon.stop() == 0
    assert killed.values() == [b"after"]


@needs_root
@pytest.mark.parametrize("instead", ["nothing", "fifo"])
def test_one_whose_place_another_had_at_the_start(killed: Killed, instead: str) -> None:
    away = killed.fifo.with_name("away")
    killed.fifo.rename(away)
    if instead == "fifo":
        os.mkfifo(killed.fifo)
        os.chown(killed.fifo, OWNER.user_id, OWNER.group_id)
    killed.start_again()
    away.rename(killed.fifo)
    if instead == "nothing":
        assert killed.daemon.ask("ROUTE ADD a fifo").startswith("OK")
    killed.write(b"after")

    eventually(lambda: killed.values()[3:])
    assert killed.daemon.stop() == 0
    assert killed.values() == [*LINES, b"after"]


@needs_root
def test_what_another_producer_wrote_meanwhile_is_not_taken_for_it(killed: Killed) -> None:
    """A recorded batch was never written, and the next run has an equal batch at its position."""
    killed.daemon.start_again()
    os.chown(killed.fifo, 0, 0)
    killed.fifo.chmod(0o600)
    with traced(killed.daemon.process.pid, killed.fifo.parent / "trace", "inject=/pwritev:signal=SIGKILL:when=1"):
        killed.write(b"again")
        assert killed.daemon.wait() == -9
    killed.daemon.start_again()
    with Client(killed.daemon.socket_path) as client:
        assert client.ask(b"PUB a 6\nagain\n").startswith("OK")
    os.chown(killed.fifo, OWNER.user_id, OWNER.group_id)

    eventually(lambda: killed.values() == [*LINES, b"again", b"again"])
    assert killed.daemon.stop() == 0
