"""Durable, then visible, then acknowledged: even if the disk is slow, fails, is full, or refuses a turn."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from asking import events, stat
from contents import assert_sound, records, values
from full_disk import fill, small_file_system
from running import Client, Daemon, Start, eventually, readable
from tracing import Trace, descriptor_of, hangs_in, strace, traced

import wald

FDATASYNC = 75  # number on x86-64; with another number, the test times out
DISK_BYTES = 24 << 20


def test_nothing_is_visible_before_it_is_durable(start: Start, root: Path, tmp_path: Path) -> None:
    """While a sync hangs, neither the head nor a reader has the record, and its producer no OK."""
    daemon = start(routes=["a fifo"])
    with Client(daemon.socket_path) as client, (root / "routes/a/in").open("wb", buffering=0) as fifo:
        fifo.write(b"first\n")
        eventually(lambda: values(root) == [b"first"])
        before = wald.open(root).head()
        with traced(daemon.process.pid, tmp_path / "trace", "inject=fdatasync:delay_enter=60000000") as trace:
            client.publish("a", b"second\n")
            eventually(lambda: hangs_in(daemon.process.pid, FDATASYNC))
            assert b"second" in (root / "segments/00000000000000000001.wal").read_bytes()
            assert wald.open(root).head() == before
            assert values(root) == [b"first"]
            assert not readable(client.socket.fileno())
            trace.release()
            assert client.reply() == "OK 2 2"
        assert values(root) == [b"first", b"second"]


def test_a_start_makes_its_names_and_a_head_durable_before_it_takes_anything(
    start: Start, root: Path, tmp_path: Path
) -> None:
    """A power cut then finds a log with a head, whatever came in since."""
    settings = tmp_path / "wald.toml"
    settings.write_text("[routes.a]\nfifo = true\n")
    daemon = start("--config", settings)
    daemon.kill()
    shutil.rmtree(root)
    calls = "trace=fsync,fdatasync,bind,tee"
    daemon.spawn(strace(), "-D", "-y", "-s", "500", "-o", str(tmp_path / "trace"), "-e", calls)
    daemon.await_ready()
    seen = (tmp_path / "trace").read_text().splitlines()

    def first(call: str, path: Path) -> int:
        return next(n for n, line in enumerate(seen) if line.startswith(f"{call}(") and str(path) in line)

    def last(call: str, path: Path) -> int:
        return max(n for n, line in enumerate(seen) if line.startswith(f"{call}(") and f"<{path}>" in line)

    input_begins = min(first("bind", root / "wald.sock"), first("tee", root / "routes/a/in"))
    made = [
        first("fsync", root.parent),
        first("fsync", root / "segments"),
        last("fdatasync", root / "head"),
        last("fsync", root),
    ]
    assert made == sorted(made)
    assert made[-1] < input_begins


FAILURES = [  # settings, failing call, is there an earlier record, event of the journal
    ({}, "fdatasync:error=EIO:when=1", False, "write failed"),
    ({}, "/pwritev:error=EIO:when=1", True, "write failed"),
    ({}, "/pwritev:error=ENOSPC:when=1", False, "write failed"),
    ({"sync": "interval", "sync_interval": "50ms"}, "fdatasync:error=EIO:when=1", False, "sync failed"),
]


@pytest.mark.parametrize(("settings", "failure", "advanced", "event"), FAILURES)
def test_a_failed_write_or_sync_costs_the_descriptor_not_the_batch(
    start: Start, root: Path, tmp_path: Path, settings: dict[str, str], failure: str, advanced: bool, event: str
) -> None:
    """The same batch is durable in the next segment and acknowledged once; the old descriptor is not used again."""
    daemon = start(routes=["a fifo"], **settings)
    with Client(daemon.socket_path) as client, (root / "routes/a/in").open("wb", buffering=0) as fifo:
        if advanced:
            assert client.ask(b"PUB a 6 pid=1 pseq=1\nfirst\n") == "OK 1 1"
        calls = failure.partition(":")[0]
        expressions = ("trace=/pwritev,fdatasync,fsync,ftruncate,close", f"inject={failure}")
        with traced(daemon.process.pid, tmp_path / "trace", *expressions) as trace:
            fifo.write(b"from the pipe\n")
            eventually(lambda: b"from the pipe" in values(root) and event in daemon.log)
            assert client.ask(b"PUB a 7 pid=1 pseq=2\nsecond\n") == f"OK {2 + advanced} {2 + advanced}"
            seen = trace.calls
    failed = next(number for number, call in enumerate(seen) if "(INJECTED)" in call)
    assert calls.strip("/") in seen[failed]
    since = [call for call in seen[failed + 1 :] if descriptor_of(call) == descriptor_of(seen[failed])]
    assert [call.split("(")[0] for call in since] == ["close"]
    assert values(root, "a") == [b"first"] * advanced + [b"from the pipe", b"second"]


def test_when_the_next_segment_fails_too_the_daemon_ends_and_leaves_a_sound_log(
    start: Start, root: Path, tmp_path: Path
) -> None:
    """Exit 7; the producer gets an error, the pipe keeps its line, and the next start has both once."""
    daemon = start(routes=["a fifo"])
    holder = os.open(root / "routes/a/in", os.O_RDWR)
    with Client(daemon.socket_path) as client:
        assert client.ask(b"PUB a 6 pid=1 pseq=1\nfirst\n") == "OK 1 1"
        with traced(daemon.process.pid, tmp_path / "trace", "inject=fdatasync:error=EIO"):
            client.send(b"PUB a 7 pid=1 pseq=2\nsecond\n")
            assert client.reply().startswith("ERR failed ")
            assert daemon.wait() == 7
    os.write(holder, b"from the pipe\n")
    daemon.start_again()
    with Client(daemon.socket_path) as client:
        eventually(lambda: b"from the pipe" in values(root))
        assert client.ask(b"PUB a 7 pid=1 pseq=2\nsecond\n").startswith("OK ")

    assert sorted(values(root)) == [b"first", b"from the pipe", b"second"]
    os.close(holder)


def test_a_cut_that_fails_is_tried_again(start: Start, root: Path, tmp_path: Path) -> None:
    """The segment continues, and records written before the retry are durable."""
    daemon = start(routes=["a"])
    with Client(daemon.socket_path) as client:
        client.ask(b"PUB a 6\nfirst\n")
        with traced(daemon.process.pid, tmp_path / "trace", "inject=rename:error=ENOSPC"):
            assert client.ask(b"CUT\n").startswith("ERR full ")
            assert client.ask(b"PUB a 7\nsecond\n") == "OK 2 2"
        eventually(lambda: client.ask(b"CUT\n") == "OK cut 3")
        assert client.ask(b"PUB a 6\nthird\n") == "OK 3 3"
    assert values(root) == [b"first", b"second", b"third"]


def called(trace: Trace) -> list[str]:
    """The names of the system calls."""
    return [call.partition("(")[0] for call in trace.calls]


@pytest.mark.parametrize("sync", ["interval", "never"])
def test_other_policies_acknowledge_without_a_sync(start: Start, root: Path, tmp_path: Path, sync: str) -> None:
    """A kill still loses nothing, because the kernel has the bytes. A cut syncs."""
    daemon = start(sync=sync, sync_interval="50ms", routes=["a"])
    with (
        Client(daemon.socket_path) as client,
        traced(daemon.process.pid, tmp_path / "trace", "trace=/pwritev,fdatasync,sendto") as trace,
    ):
        assert client.ask(b"PUB a 6\nfirst\n") == "OK 1 1"
        if sync == "interval":
            eventually(lambda: "fdatasync" in called(trace))
        else:
            assert client.ask(b"CUT\n") == "OK cut 2"
        assert called(trace).index("sendto") < called(trace).index("fdatasync")
        assert client.ask(b"PUB a 7\nsecond\n") == "OK 2 2"
    daemon.kill()
    daemon.start_again()

    assert values(root) == [b"first", b"second"]


@pytest.mark.parametrize("minimum", ["8MiB", 0], ids=["guarded", "to-the-last-byte"])
def test_a_full_disk_makes_producers_wait_and_loses_nothing(start: Start, disk: Path, minimum: object) -> None:
    """The daemon notices free space; every line and every request is stored once."""
    root = disk / "log"
    daemon = start(at=root, segment_max_bytes="1MiB", free_space_min=minimum, routes=["pipe fifo", "a"])
    sent = 0
    fill(disk / "filler")
    fifo = os.open(root / "routes/pipe/in", os.O_WRONLY | os.O_NONBLOCK)
    with Client(daemon.socket_path) as client:
        while "disk full" not in daemon.log:  # the room that is allocated already is used up first
            with suppress(BlockingIOError):
                sent += os.write(fifo, b"%07d\n" % (sent // 8))
        client.publish("a", b"waits\n")
        assert not readable(client.socket.fileno())
        (disk / "filler").unlink()
        assert client.reply().startswith("OK ")
    eventually(lambda: len(values(root, "pipe")) == sent // 8)
    os.close(fifo)
    assert values(root, "pipe") == [b"%07d" % number for number in range(sent // 8)]
    assert values(root, "a") == [b"waits"]
    eventually(lambda: "disk has room again" in daemon.log)


def test_a_stop_on_a_full_disk_leaves_pipes_as_they_are(start: Start, disk: Path) -> None:
    """Exit 0, and what could not be written waits in the pipe for the next life."""
    root = disk / "log"
    daemon = start(at=root, segment_max_bytes="1MiB", free_space_min=0, routes=["a fifo"])
    fill(disk / "filler")
    fifo = os.open(root / "routes/a/in", os.O_RDWR | os.O_NONBLOCK)
    sent = 0
    while "disk full" not in daemon.log:
        with suppress(BlockingIOError):
            sent += os.write(fifo, b"%07d\n" % (sent // 8))
    assert daemon.stop() == 0
    (disk / "filler").unlink()
    daemon.start_again()
    eventually(lambda: len(records(root)) == sent // 8)
    assert values(root) == [b"%07d" % number for number in range(sent // 8)]
    os.close(fifo)


def harmed(path: Path, harm: str) -> None:
    """Harm a file of the daemon as the owner of the root may."""
    if harm == "remove":
        path.unlink()
    elif harm == "shorten":
        os.truncate(path, 0)
    elif harm == "overwrite":
        path.write_bytes(b"junk\n")
    else:
        other = path.with_name("other")
        other.write_bytes(b"x" * 160)
        other.rename(path)


HARMS = ["remove", "shorten", "overwrite", "replace"]


def test_a_head_file_that_was_harmed_is_recreated_at_the_next_commit(start: Start, root: Path) -> None:
    daemon = start(routes=["r"])
    with Client(daemon.socket_path) as client:
        for number, harm in enumerate(HARMS, start=1):
            assert client.ask(b"PUB r 2\na\n") == f"OK {number} {number}"
            assert f"seq={number:020} ".encode() in (root / "head").read_bytes()
            harmed(root / "head", harm)
        assert client.ask(b"PUB r 2\na\n") == "OK 5 5"


@pytest.mark.parametrize("harm", HARMS[1::2])
def test_a_takes_file_that_was_harmed_is_made_anew_at_the_next_take(
    start: Start, root: Path, tmp_path: Path, harm: str
) -> None:
    """The next start relies on the file if a kill comes before the daemon takes the bytes."""
    daemon = start(routes=["a fifo"])
    holder = os.open(root / "routes/a/in", os.O_RDWR)
    os.write(holder, b"first\n")
    eventually(lambda: values(root) == [b"first"])
    harmed(root / "transfers", harm)
    os.write(holder, b"tick\n")
    eventually(lambda: values(root) == [b"first", b"tick"])
    harmed(root / "transfers", harm)
    with traced(daemon.process.pid, tmp_path / "trace", "trace=readv", "inject=readv:signal=SIGKILL:when=2"):
        os.write(holder, b"tick\n")
        assert daemon.wait() == -9
    daemon.start_again()
    os.write(holder, b"last\n")
    eventually(lambda: values(root)[-1:] == [b"last"])
    assert values(root) == [b"first", b"tick", b"tick", b"last"]
    os.close(holder)


def test_a_takes_file_that_is_shortened_before_a_take_costs_nothing(start: Start, root: Path, tmp_path: Path) -> None:
    """Between the write and the take there is a sync, and all the time in the world."""
    daemon = start(routes=["a fifo"])
    with (root / "routes/a/in").open("wb", buffering=0) as fifo:
        with traced(daemon.process.pid, tmp_path / "trace", "inject=fdatasync:delay_enter=60000000") as trace:
            fifo.write(b"first\n")
            eventually(lambda: hangs_in(daemon.process.pid, FDATASYNC))
            os.truncate(root / "transfers", 0)
            trace.release()
        eventually(lambda: values(root) == [b"first"])
        fifo.write(b"second\n")
        eventually(lambda: values(root) == [b"first", b"second"])


def test_a_start_without_a_byte_of_room_says_what_to_do(start: Start, disk: Path) -> None:
    """Not even a lock can be written."""
    (disk / "log.log").symlink_to(disk.with_name("stderr"))  # where the log has room
    fill(disk / "filler")
    daemon = start(at=disk / "log", ready=False)
    assert daemon.wait() == 7
    assert "the daemon cannot start" in daemon.log
    assert "wald-reclaim" in daemon.log


REFUSED = "ERR full the disk refused a write; STAT reports the cause"


def refuses(daemon: Daemon) -> bool:
    return bool(stat(daemon)["degraded_by"] == "refused")


def test_every_verb_is_answered_while_the_disk_refuses_a_turn(start: Start, root: Path, tmp_path: Path) -> None:
    """A connection gets its answers in order, those behind the refused records after them."""
    daemon = start(routes=["a", "r fifo"])
    with Client(daemon.socket_path) as first, Client(daemon.socket_path) as second:
        assert first.ask(b"PUB a 2\nx\n") == "OK 1 1"
        with traced(daemon.process.pid, tmp_path / "trace", "inject=/pwritev:error=ENOSPC"):
            first.send(b"PUB a 4\ny\nz\nPING\nSTAT\nPUB a 2\nv\n")
            eventually(lambda: refuses(daemon))
            assert daemon.ask("PING") == "OK pong"
            assert daemon.ask("HEAD").startswith("OK seq=00000000000000000001 ")
            for refused in ("CUT", "ROUTE ADD b", "ROUTE RETIRE r"):
                assert daemon.ask(refused) == REFUSED
            second.publish("a", b"w\n")
            assert stat(daemon)["held_requests"] >= 1
            (root / "routes/r/in").write_bytes(b"fifo\n")
            daemon.ask("PING")
            assert not readable(first.socket.fileno())
            assert not readable(second.socket.fileno())
        assert first.reply() == "OK 2 3"
        assert first.reply() == "OK pong"
        assert first.reply().startswith('OK {"head"')
        assert first.reply().startswith("OK ")
        assert second.reply().startswith("OK ")
        assert second.ask(b"ROUTE ADD b\n") == "OK added b"
        eventually(lambda: values(root, "r") == [b"fifo"])
    assert sorted(values(root, "a")) == [b"v", b"w", b"x", b"y", b"z"]


@contextmanager
def refusing(daemon: Daemon, client: Client, trace: Path) -> Iterator[None]:
    """Let the disk refuse the turn with a record of route a, until the block ends."""
    with traced(daemon.process.pid, trace, "inject=/pwritev:error=ENOSPC"):
        client.publish("a", b"x\n")
        eventually(lambda: refuses(daemon))
        yield


def test_sighup_takes_settings_while_the_disk_refuses_a_turn(start: Start, root: Path, tmp_path: Path) -> None:
    """Routes need the disk, so they wait until it has taken the turn; ``on_full`` may end that wait."""
    config = tmp_path / "wald.toml"
    config.write_text("[routes.a]\n")
    daemon = start("--config", config)
    with Client(daemon.socket_path) as client:
        with refusing(daemon, client, tmp_path / "trace"):
            config.write_text('segment_max_bytes = "128KiB"\n[routes.a]\n[routes.b]\n')
            daemon.process.send_signal(signal.SIGHUP)
            eventually(lambda: events(daemon, "reloaded"))
            assert [event["applied"] for event in events(daemon, "reloaded")] == [["segment_max_bytes"]]
            assert len(events(daemon, "reload deferred")) == 1
            assert daemon.ask("PING") == "OK pong"
            assert refuses(daemon)
            assert not (root / "routes/b").exists()
        assert client.reply() == "OK 1 1"
    eventually(lambda: len(events(daemon, "reloaded")) == 2)
    assert events(daemon, "reloaded")[1]["applied"] == ["routes"]
    with Client(daemon.socket_path) as client:
        assert client.ask(b"PUB b 2\ny\n") == "OK 2 2"
        with refusing(daemon, client, tmp_path / "another trace"):
            config.write_text('on_full = "reject"\n[routes.a]\n')
            daemon.process.send_signal(signal.SIGHUP)
            assert client.reply() == "ERR full the disk is full"
        eventually(lambda: client.ask(b"PUB a 2\nz\n") == "OK 3 3")
    assert values(root) == [b"x", b"y", b"z"]


@pytest.mark.slow
def test_a_connection_that_leaves_just_when_there_is_room_has_its_records_stored(start: Start, tmp_path: Path) -> None:
    """Its request joins a turn, which the disk refuses, after the poller has reported its end."""
    with small_file_system(tmp_path / "disk", 16 << 20) as disk:
        daemon = start(at=disk / "log", segment_max_bytes="64KiB", free_space_min="1MiB", routes=["a"])
        fill(disk / "filler")
        with Client(daemon.socket_path) as client:
            client.publish("a", b"x\n")
            eventually(lambda: stat(daemon)["held_requests"] == 1)
            with traced(daemon.process.pid, tmp_path / "trace", "inject=/pwritev:error=ENOSPC") as trace:
                daemon.process.send_signal(signal.SIGSTOP)
                eventually(lambda: any("stopped by SIGSTOP" in call for call in trace.calls))
                (disk / "filler").unlink()
                client.close()
                daemon.process.send_signal(signal.SIGCONT)
                eventually(lambda: refuses(daemon))
                assert daemon.ask("PING") == "OK pong"
        eventually(lambda: values(daemon.root) == [b"x"])
        assert daemon.stop() == 0, daemon.log
        assert_sound(daemon.root)


def test_a_connection_that_leaves_has_its_records_stored_and_a_stop_does_not_wait_for_the_disk(
    start: Start, root: Path, tmp_path: Path
) -> None:
    daemon = start(routes=["a"])
    with Client(daemon.socket_path) as client, refusing(daemon, client, tmp_path / "trace"):
        client.close()
        daemon.ask("PING")
    eventually(lambda: values(root) == [b"x"])
    with Client(daemon.socket_path) as client:
        assert client.ask(b"PUB a 2\ny\n") == "OK 2 2"
        with refusing(daemon, client, tmp_path / "another trace"):
            assert daemon.stop() == 0
        assert client.reply() == ""
    assert values(root) == [b"x", b"y"]


def test_a_refusal_before_the_write_leaves_the_segment(start: Start, root: Path, tmp_path: Path) -> None:
    """The file of transfers cannot be made again: nothing has been written, so the segment is as good as before."""
    daemon = start(routes=["r fifo"])
    segments = sorted(path.name for path in (root / "segments").glob("*.wal"))
    (root / "transfers").unlink()
    with traced(daemon.process.pid, tmp_path / "trace", "inject=fallocate:error=ENOSPC") as trace:
        (root / "routes/r/in").write_bytes(b"line\n")
        eventually(lambda: sum("fallocate" in call for call in trace.calls) >= 3)
        assert refuses(daemon)
        assert sorted(path.name for path in (root / "segments").glob("*.wal")) == segments
    eventually(lambda: values(root) == [b"line"])
    assert "write failed" not in daemon.log
