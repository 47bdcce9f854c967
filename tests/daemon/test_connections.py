"""Connections are independent: a connection that waits, leaves, floods or uses many slots blocks no other."""

import os
import resource
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from asking import CHUNK, SPOOLED, entering, is_quiet, stat, written
from contents import assert_sound, text, values
from running import Client, Daemon, Start, eventually, readable
from users import acting_as

from wald.client.producer import Durable, Producer
from wald.errors import Unavailable


def test_a_half_sent_request_times_out(start: Start, root: Path) -> None:
    """In its line, in its payload, in a file, and while it is skipped; a byte now and then keeps no place.

    A connection that has sent nothing may stay.
    """
    daemon = start(frame_timeout=0.3, routes=["r"])
    large = b"PUB r %d\n" % SPOOLED + bytes(SPOOLED // 2)
    halves = [b"PUB r", b"PUB r 9\nhalf", large, b"PUB absent 9\nhalf"]
    with ExitStack() as closing:
        idle, *clients = (closing.enter_context(Client(daemon.socket_path)) for _ in range(1 + len(halves)))
        for client, half in zip(clients, halves, strict=True):
            client.send(half)
        assert clients[3].reply().startswith("ERR no-route ")
        for client in clients:
            assert client.reply() == "ERR timeout the rest of the request did not arrive within 0.3 s"
            assert client.reply() == ""
        assert idle.ask(b"PUB r 2\nx\n") == "OK 1 1"
        for size in (100, 1 << 20):
            trickling = closing.enter_context(Client(daemon.socket_path))
            trickling.send(b"PUB r %d\n" % size)
            for _ in range(99):
                if readable(trickling.socket.fileno(), within=0.1):
                    break
                trickling.send(b"x")
            assert trickling.reply() == "ERR timeout the rest of the request did not arrive within 0.3 s"

    assert values(root) == [b"x"]


def test_who_leaves_in_the_middle_leaves_nothing(shared: Daemon, route: str) -> None:
    """A payload of several records is stored completely or not at all."""
    descriptors = Path(f"/proc/{shared.process.pid}/fd")
    with Client(shared.socket_path) as other:
        assert other.ask(b"PING\n") == "OK pong"
        before, open_before, files = written(shared.root), len(os.listdir(descriptors)), os.listdir(shared.root)
        for size in (100, SPOOLED):
            with Client(shared.socket_path) as client:
                client.send(f"PUB {route} {size}\n".encode() + b"line\n" * (size // 10))
                eventually(lambda: len(os.listdir(descriptors)) > open_before)
        eventually(lambda: len(os.listdir(descriptors)) == open_before)

    assert written(shared.root) == before
    assert os.listdir(shared.root) == files


def test_replies_that_nobody_reads_hold_up_nobody_else(shared: Daemon, client: Client) -> None:
    """More than the socket takes; all of them are there once they are read."""
    client.send(b"STAT\n" * 2000)
    eventually(lambda: not is_quiet(client))
    with Client(shared.socket_path) as other:
        for _ in range(3):
            assert other.ask(b"PUB r 2\nx\n").startswith("OK ")
    client.send(b"PING\n")

    assert all(client.reply().startswith("OK {") for _ in range(2000))
    assert client.reply() == "OK pong"


def test_above_the_limit_of_connections_newcomers_are_reported(start: Start) -> None:
    """And the journal gets one line; open connections stay open, and a place that becomes free can be taken."""
    daemon = start(connections_max=2)
    with Client(daemon.socket_path) as one, Client(daemon.socket_path) as two:
        assert one.ask(b"PING\n") == two.ask(b"PING\n") == "OK pong"
        for _ in range(5):
            with Client(daemon.socket_path) as three:
                assert three.reply() == "ERR busy 2 connections are already open"
                assert three.reply() == ""
        assert one.ask(b"PING\n") == two.ask(b"PING\n") == "OK pong"
        one.close()
        daemon.await_ready()
    assert daemon.log.count("connection refused") == 1


def test_a_producer_waits_for_a_place(start: Start) -> None:
    """The producer retries, even if the daemon closed the connection before the request was sent."""
    daemon = start(connections_max=1)
    with entering(daemon) as one:
        assert one.ask(b"ROUTE ADD r\n") == "OK added r"
        hasty = Producer(daemon.root, retry_for=0.3)
        with pytest.raises(Unavailable, match="1 connections are already open"):
            hasty.command("PING")
        with Producer(daemon.root) as producer:
            producer.publish("r", b"x\n")
            one.close()
            assert producer.flush() == [Durable(1, 1)]


def test_who_has_been_idle_for_longest_gives_up_his_place(start: Start, root: Path) -> None:
    """Only when it is needed, and only if nothing is under way on it: neither half a request nor the end of a line."""
    daemon = start(connections_max=4, idle_timeout=0.3, frame_timeout=60, routes=["in fifo"])
    with ExitStack() as closing:
        fifo = closing.enter_context((root / "routes/in/in").open("wb", buffering=0))
        fifo.write(b"l" * CHUNK)
        eventually(lambda: "in" in stat(daemon)["routes"])
        half, parked, idle, active = (closing.enter_context(Client(daemon.socket_path)) for _ in range(4))
        assert half.ask(b"PING\n") == parked.ask(b"PING\n") == "OK pong"
        parked.send(b"PUB in 2\nx\n")
        half.send(b"PUB in 2\n")
        assert idle.ask(b"PING\n") == "OK pong"
        since = time.monotonic()
        eventually(lambda: time.monotonic() - since > 0.4)
        assert active.ask(b"PING\n") == "OK pong"
        assert is_quiet(idle)
        new = closing.enter_context(Client(daemon.socket_path))
        assert new.ask(b"PING\n") == "OK pong"
        assert idle.reply() == "ERR timeout closed while idle to free a slot"
        assert idle.reply() == ""
        assert active.ask(b"PING\n") == "OK pong"
        fifo.write(b"end\n")
        assert parked.reply().startswith("OK ")
        half.send(b"y\n")
        assert half.reply().startswith("OK ")


def test_connections_that_have_sent_no_whole_request_make_way_at_once(start: Start) -> None:
    """Connections that have sent a request stay, and so does one that the daemon keeps waiting."""
    daemon = start(connections_max=4, idle_timeout=60, frame_timeout=60, routes=["r"])
    with ExitStack() as closing:
        silent, half, one, two = (closing.enter_context(Client(daemon.socket_path)) for _ in range(4))
        half.send(b"PUB r 9\nhalf")
        assert one.ask(b"PING\n") == two.ask(b"PING\n") == "OK pong"
        newcomers = [closing.enter_context(Client(daemon.socket_path)) for _ in range(2)]
        assert [each.ask(b"PUB r 2\nx\n")[:2] for each in newcomers] == ["OK", "OK"]
        assert silent.reply() == half.reply() == "ERR timeout closed while idle to free a slot"
        with Client(daemon.socket_path) as third:
            assert third.reply() == "ERR busy 4 connections are already open"
        assert one.ask(b"PING\n") == two.ask(b"PING\n") == "OK pong"


def test_a_client_that_never_reads_is_dropped(start: Start, root: Path) -> None:
    """The replies that it received name the durable records."""
    daemon = start(frame_timeout=1, routes=["r"])
    with Client(daemon.socket_path) as client:
        client.socket.setblocking(False)

        def dropped() -> bool:
            try:
                client.socket.send(b"PUB r 2\nx\n" * 100)
            except BlockingIOError:
                return False
            except OSError:
                return True
            return False

        eventually(dropped)
        client.socket.setblocking(True)
        replies = bytearray()
        with suppress(ConnectionResetError):
            while received := client.socket.recv(1 << 20):
                replies += received
    whole = bytes(replies).rpartition(b"\n")[0].splitlines()
    assert whole == [b"OK %d %d" % (number, number) for number in range(1, len(whole) + 1)]
    assert len(whole) > 1000
    daemon.process.kill()
    daemon.process.wait()
    assert len(values(root)) >= len(whole)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's place")
def test_a_newcomer_takes_no_place_of_a_user_that_has_fewer(
    start: Start, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replaces a connection of the user with the most connections."""
    daemon = start(socket_mode="0666", connections_max=8, idle_timeout=60)
    monkeypatch.chdir(root)
    root.chmod(0o755)
    many, few, owner = 54331, 54332, os.geteuid()
    with ExitStack() as closing:

        def newcomer(user_id: int) -> Client:
            with acting_as(user_id):
                return closing.enter_context(Client(Path("wald.sock")))

        small = newcomer(few)
        large = [newcomer(many) for _ in range(7)]
        assert newcomer(many).ask(b"PING\n") == "OK pong"
        assert newcomer(owner).ask(b"PING\n") == "OK pong"
        assert newcomer(few).ask(b"PING\n") == "OK pong"
        assert small.ask(b"PING\n") == "OK pong"
        assert sum(readable(each.socket.fileno()) for each in large) == 3
    daemon.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's place")
def test_one_user_cannot_keep_out_the_others(start: Start, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle connections of one have a limit, those of all leave some places to the log's owner and root."""
    start(socket_mode="0666", connections_max=32, connections_per_user=20)
    monkeypatch.chdir(root)
    root.chmod(0o755)
    here = Path("wald.sock")
    with ExitStack() as closing:

        def fill(user_id: int, count: int) -> str:
            with acting_as(user_id):
                for _ in range(count):
                    assert closing.enter_context(Client(here)).ask(b"PING\n") == "OK pong"
                with Client(here) as refused:
                    return refused.reply()

        assert fill(os.geteuid() + 1, 20).startswith("ERR busy user 1 already has 20 connections")
        assert fill(os.geteuid() + 2, 10) == "ERR busy 30 connections are already open"
        for _ in range(2):
            assert closing.enter_context(Client(here)).ask(b"PING\n") == "OK pong"
        with Client(here) as refused:
            assert refused.reply() == "ERR busy 32 connections are already open"


def test_without_a_descriptor_the_daemon_rests(start: Start, root: Path) -> None:
    """Without a connection and with one; it accepts those that wait once there is a descriptor."""
    daemon = start()
    pid = daemon.process.pid
    eventually(lambda: list(root.glob("segments/*spare*")))  # everything that a start opens is open
    eventually(lambda: stat(daemon)["connections"] == 1)
    _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with ExitStack() as closing:
        open_before: list[Client] = []
        for _ in range(2):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, most))
            waiting = closing.enter_context(Client(daemon.socket_path))
            waiting.send(b"PING\n")
            before = processor_seconds(pid)
            assert not readable(waiting.socket.fileno(), within=1)
            assert processor_seconds(pid) - before < 0.35
            assert [each.ask(b"PING\n") for each in open_before] == ["OK pong"] * len(open_before)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
            assert waiting.reply() == "OK pong"
            open_before.append(waiting)


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_gathered_payload_does_not_come_between_the_pieces_of_a_long_line(shared: Daemon, client: Client) -> None:
    """A long line starts in a FIFO while the payload arrives; an earlier complete request waits for its end."""
    payload = b"p" * SPOOLED + b"\n"
    with (shared.root / "routes/in/in").open("wb", buffering=0) as fifo:
        client.send(b"PUB in %d\n" % len(payload) + payload[:-1])
        assert shared.ask("PING") == "OK pong"
        fifo.write(b"l" * CHUNK)
        eventually(lambda: "in" in stat(shared)["routes"])
        client.send(payload[-1:] + b"PING\n")
        with Client(shared.socket_path) as other:
            for _ in range(3):
                assert other.ask(b"PUB r 2\nx\n").startswith("OK ")
        assert is_quiet(client)
        fifo.write(b"end\n")
        assert client.reply().startswith("OK ")
        assert client.reply() == "OK pong"

    assert text(shared.root, "in") == b"l" * CHUNK + b"end\n" + payload
    assert_sound(shared.root)


def test_a_route_that_stays_busy_is_refused_in_time(start: Start, root: Path) -> None:
    """Small and spooled requests and those after them; the connection stays open, and other routes work."""
    daemon = start(frame_timeout=0.3)
    assert daemon.ask("ROUTE ADD in fifo") == daemon.ask("ROUTE ADD in") == "OK added in"
    assert daemon.ask("ROUTE ADD r") == "OK added r"
    with (root / "routes/in/in").open("wb", buffering=0) as fifo, ExitStack() as closing:
        large, small = (closing.enter_context(Client(daemon.socket_path)) for _ in range(2))
        large.send(b"PUB in %d\n" % (SPOOLED + 1) + bytes(SPOOLED))
        fifo.write(b"l" * CHUNK)
        eventually(lambda: "in" in stat(daemon)["routes"])
        large.send(b"\nPING\n")
        small.send(b"PUB in 5\nPING\nPUB in 2\nx\nPING\n")
        assert large.reply() == "ERR busy a pipe is in the middle of a long line for route in"
        assert [small.reply() for _ in range(3)] == [
            "ERR busy a pipe is in the middle of a long line for route in"
        ] * 2 + ["OK pong"]
        assert large.reply() == "OK pong"
        assert small.ask(b"PUB r 2\nx\n").startswith("OK ")
        fifo.write(b"end\n")
        eventually(lambda: not text(root, "in").endswith(b"l"))
        assert small.ask(b"PUB in 2\ny\n").startswith("OK ")

    assert text(root, "in") == b"l" * CHUNK + b"end\ny\n"


@pytest.fixture
def talkative(start: Start) -> Daemon:
    """A daemon whose STAT fills a page or three; one connection at a time, which may stand still for a second."""
    daemon = start(connections_max=1, frame_timeout=1, idle_timeout=1)
    names = [b"%0100d" % number for number in range(100)]
    with entering(daemon) as client:
        for name in names:
            assert client.ask(b"ROUTE ADD %b\nPUB %b 2\nx\n" % (name, name)).startswith("OK ")
            assert client.reply().startswith("OK ")
    return daemon


def test_answers_to_one_connection_do_not_pile_up(talkative: Daemon) -> None:
    """The daemon answers a limited number of requests per round; if the client does not read, the rest waits."""
    status = Path(f"/proc/{talkative.process.pid}/status")
    with entering(talkative) as client:
        before = peak_bytes(status)
        client.send(b"STAT\n" * 3000)
        assert all(client.reply().startswith("OK {") for _ in range(3000))
        assert peak_bytes(status) - before < 16 << 20


def peak_bytes(status: Path) -> int:
    """The most memory that a process has used."""
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def test_last_replies_that_nobody_reads_do_not_keep_the_slot(talkative: Daemon) -> None:
    """More of them than the socket takes, and then something after which the daemon hangs up."""
    with entering(talkative) as client:
        client.send(b"STAT\n" * 30 + b"x" * 1024)
        talkative.await_ready()
