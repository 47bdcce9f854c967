"""Quotas with block and reject: a route over its quota accepts nothing, and other routes work."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from asking import is_quiet, stat
from contents import assert_sound, text, values
from running import Client, Daemon, eventually, output_of, refusal_of, run, sidecar, wald

from wald.errors import Unavailable

Start = Callable[..., Daemon]

QUOTA = 1000
LINES = b"".join(b"%099d\n" % number for number in range(11))  # more than the quota


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """The route r has a quota, and others have none."""
    path = tmp_path / "wald.toml"
    write(path)
    return path


def write(settings: Path, *, policy: str = "block", quota: int = QUOTA) -> None:
    of_route = f'[routes.r]\nfifo = true\npinned_max_bytes = {quota}\non_pinned = "{policy}"\n'
    settings.write_text(of_route + "[routes.other]\nfifo = true\n")


def over(daemon: Daemon) -> dict[str, int]:
    """The routes over their quota, and how much of each is unread; nothing is being counted."""
    found = stat(daemon)["over_quota"]
    assert isinstance(found, list)
    return {each["route"]: each["unread_bytes"] for each in found}


def fill(daemon: Daemon) -> None:
    """Bring the route over its quota."""
    eventually(lambda: over(daemon) == {})
    with Client(daemon.socket_path) as client:
        client.publish("r", LINES)
        assert client.reply().startswith("OK ")
    eventually(lambda: over(daemon) == {"r": len(LINES)})


def set_cursor(daemon: Daemon, sequence: int, *, group: str = "processed", rewind: bool = False) -> None:
    options = ["--rewind"] if rewind else []
    done = wald("--root", daemon.root, "cursor", "set", "r", sequence, "--group", group, *options)
    assert done.returncode == 0, done.stderr


def held(daemon: Daemon, client: Client) -> None:
    """A request for the route is not answered, while one for another is."""
    client.publish("r", b"held\n")
    with Client(daemon.socket_path) as other:
        other.publish("other", b"x\n")
        assert other.reply().startswith("OK ")
    assert is_quiet(client)


def test_a_request_over_the_quota_waits_until_a_group_has_read(start: Start, settings: Path) -> None:
    """Requests behind it on its connection wait too, so that replies stay in order; other connections do not."""
    daemon = start("--config", settings)
    fill(daemon)
    with Client(daemon.socket_path) as client:
        held(daemon, client)
        client.send(b"PING\n")
        assert is_quiet(client)
        assert_reported(daemon)
        set_cursor(daemon, len(LINES) // 100)
        assert client.reply().startswith("OK ")
        assert client.reply() == "OK pong"
    assert over(daemon) == {}
    assert text(daemon.root, "r") == LINES + b"held\n"


def assert_reported(daemon: Daemon) -> None:
    """Check that commands name the route over its quota; no hint is about the disk, which is not full."""
    message = "route r is over its quota: group processed has not read 1100 bytes; pinned_max_bytes is 1000"
    done = wald("--root", daemon.root, "status")
    assert (done.returncode, message in done.stdout.decode()) == (14, True)
    assert message in output_of("--root", daemon.root, "explain").decode()
    code, message, hint = refusal_of("append", "r", "--root", daemon.root, "--retry-for", "0.3s", stdin=b"x\n")
    assert (code, "the daemon does not accept records now: route r is over its quota" in message) == (6, True)
    assert hint.startswith(f"wald --root {daemon.root} explain; then ")


def test_the_slowest_group_counts(start: Start, settings: Path) -> None:
    daemon = start("--config", settings)
    fill(daemon)
    set_cursor(daemon, 1, group="slow")
    set_cursor(daemon, 11, group="fast")
    eventually(lambda: over(daemon) == {})  # 1000 bytes are no more than the quota
    with Client(daemon.socket_path) as client:
        client.publish("r", b"x\n")
        assert client.reply() == "OK 12 12"
        eventually(lambda: over(daemon) == {"r": 1002})
        assert stat(daemon)["over_quota"][0]["group"] == "slow"
        set_cursor(daemon, 2, group="slow")
        eventually(lambda: over(daemon) == {})


def test_a_fifo_over_the_quota_is_not_read(start: Start, settings: Path) -> None:
    """Its lines stay in the pipe; the FIFO of another route is read."""
    daemon = start("--config", settings)
    fill(daemon)
    with open(daemon.root / "routes/r/in", "wb") as fifo, open(daemon.root / "routes/other/in", "wb") as other:
        fifo.write(b"waits\n")
        fifo.flush()
        other.write(b"goes on\n")
        other.flush()
        eventually(lambda: values(daemon.root, "other") == [b"goes on"])
        assert text(daemon.root, "r") == LINES
        assert stat(daemon)["stalled_seconds"] == 0
        set_cursor(daemon, 11)
        eventually(lambda: text(daemon.root, "r") == LINES + b"waits\n")


def test_a_line_that_has_begun_is_read_to_its_end(start: Start, settings: Path) -> None:
    """No group can read a record that has not ended, so a line longer than the quota would wait for ever."""
    daemon = start("--config", settings)
    eventually(lambda: over(daemon) == {})
    line = b"x" * (3 << 20)
    with open(daemon.root / "routes/r/in", "wb") as fifo:
        fifo.write(line + b"\n")
        fifo.flush()
    eventually(lambda: values(daemon.root, "r") == [line])
    eventually(lambda: over(daemon) == {"r": len(line) + 1})


def test_a_request_over_the_quota_is_refused_if_it_shall_be(start: Start, settings: Path) -> None:
    write(settings, policy="reject")
    daemon = start("--config", settings)
    fill(daemon)
    with Client(daemon.socket_path) as client:
        client.publish("r", b"x\n")
        reply = client.reply()
        assert reply.startswith("ERR full route r is over its quota: group processed has not read 1100 bytes")
        line = ("append", "r", "--root", daemon.root, "--retry-for", "0.3s")
        code, message, hint = refusal_of(*line, stdin=b"x\n")
        assert (code, "full: route r is over its quota" in message) == (Unavailable.exit_code, True)
        assert hint.startswith(f"wald --root {daemon.root} explain; ")
        assert "df" not in hint.split(), "the disk is not full"
        client.publish("other", b"x\n")
        assert client.reply().startswith("OK ")
        set_cursor(daemon, 11)
        eventually(lambda: over(daemon) == {})
        client.publish("r", b"x\n")
        assert client.reply().startswith("OK ")


def test_sighup_changes_a_quota(start: Start, settings: Path) -> None:
    """A higher quota releases waiting requests, reject refuses them, and a new quota counts existing records."""
    settings.write_text("[routes.r]\nfifo = true\n[routes.other]\n")
    daemon = start("--config", settings)
    with Client(daemon.socket_path) as client:
        client.publish("r", LINES)
        assert client.reply().startswith("OK ")
        write(settings)
        daemon.process.send_signal(signal.SIGHUP)
        eventually(lambda: over(daemon) == {"r": len(LINES)})
        held(daemon, client)
        write(settings, policy="reject")
        daemon.process.send_signal(signal.SIGHUP)
        assert client.reply().startswith("ERR full ")
        write(settings)
        daemon.process.send_signal(signal.SIGHUP)
        eventually(lambda: over(daemon) == {"r": len(LINES)})
        held(daemon, client)
        write(settings, quota=2 * QUOTA)
        daemon.process.send_signal(signal.SIGHUP)
        assert client.reply().startswith("OK ")
    assert over(daemon) == {}


def test_a_route_that_is_retired_waits_no_more(start: Start, settings: Path) -> None:
    daemon = start("--config", settings)
    fill(daemon)
    with Client(daemon.socket_path) as client:
        held(daemon, client)
        assert daemon.ask("ROUTE RETIRE r").startswith("OK ")
        assert client.reply().startswith("ERR no-route ")
        assert daemon.ask("ROUTE ADD r").startswith("OK ")
        client.publish("r", b"x\n")
        assert client.reply().startswith("OK ")
        eventually(lambda: over(daemon) == {"r": len(LINES) + 2})


def test_segments_that_are_gone_count_no_more(start: Start, settings: Path) -> None:
    """A limit of the route may delete what no group has read."""
    with settings.open("a") as file:
        file.write('[retention]\nunread = "expire"\nmax_records = 1\ngrace = 0\n')
    daemon = start("--config", settings)
    fill(daemon)
    assert daemon.ask("CUT").startswith("OK ")
    with Client(daemon.socket_path) as client:
        held(daemon, client)
        raw = daemon.root / "segments" / f"{1:020}.wal"
        eventually(lambda: list(daemon.root.glob("segments/*.wal.zst")) and not raw.exists())  # reclaim may judge it
        done = run(sidecar("reclaim", "--root", daemon.root, "--config", settings))
        assert done.returncode == 0, done.stderr
        assert not list(daemon.root.glob("segments/*.wal.zst")), done.stdout
        assert client.reply().startswith("OK ")


def test_killed_while_a_route_is_over_its_quota_it_loses_nothing(start: Start, settings: Path) -> None:
    """The FIFO keeps its bytes, and the next run counts the segments before it accepts anything."""
    daemon = start("--config", settings)
    fill(daemon)
    with open(daemon.root / "routes/r/in", "wb") as fifo, Client(daemon.socket_path) as client:
        fifo.write(b"in the pipe\n")
        fifo.flush()
        held(daemon, client)
        daemon.kill()
        daemon.start_again()
        eventually(lambda: over(daemon) == {"r": len(LINES)})
        assert text(daemon.root, "r") == LINES
        set_cursor(daemon, 11)
        eventually(lambda: text(daemon.root, "r") == LINES + b"in the pipe\n")
    assert daemon.stop() == 0
    assert_sound(daemon.root)


def test_stopped_while_a_route_is_over_its_quota_it_takes_what_its_fifo_holds(start: Start, settings: Path) -> None:
    """If no other process holds the pipe, its bytes would be lost."""
    daemon = start("--config", settings)
    fill(daemon)
    with Client(daemon.socket_path) as client:
        held(daemon, client)
        fifo = os.open(daemon.root / "routes/r/in", os.O_WRONLY)
        os.write(fifo, b"in the pipe\n")
        os.close(fifo)
        assert daemon.stop() == 0
    assert text(daemon.root, "r") == LINES + b"in the pipe\n"


def test_a_default_quota_is_that_of_every_route(start: Start, settings: Path) -> None:
    """Including later routes; each route is counted separately."""
    settings.write_text(f"[retention]\npinned_max_bytes = {QUOTA}\n[routes.free]\npinned_max_bytes = 0\n")
    daemon = start("--config", settings)
    daemon.ask("ROUTE ADD r")
    daemon.ask("ROUTE ADD other")
    with Client(daemon.socket_path) as client:
        client.publish("free", LINES)
        assert client.reply().startswith("OK ")
    fill(daemon)
    with Client(daemon.socket_path) as client:
        held(daemon, client)


def test_a_cursor_that_is_moved_back_counts_again(start: Start, settings: Path) -> None:
    """The daemon checks cursors while it has work, even of routes without waiting requests."""
    daemon = start("--config", settings)
    fill(daemon)
    set_cursor(daemon, 11)
    eventually(lambda: over(daemon) == {})
    set_cursor(daemon, 0, rewind=True)
    eventually(lambda: over(daemon) == {"r": len(LINES)})
