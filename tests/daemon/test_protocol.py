"""The socket from outside: what is refused and how, in which order replies come, and who is kept apart from whom."""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from contents import assert_sound, records, text, values
from full_disk import fill, small_file_system
from running import Client, Daemon, eventually, readable

from wald.errors import Unavailable
from wald.format.columns import PREFIX, encode
from wald.producer import Durable, Producer

Start = Callable[..., Daemon]

REQUEST_MAX = 1 << 20
SPOOLED = 300 << 10  # above what a connection keeps in memory
CHUNK = 512 << 10  # what is looked at together in a pipe


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for tests that leave nothing behind or use a route of their own; "gone" is retired."""
    env = {"WALD_REQUEST_MAX_BYTES": str(REQUEST_MAX), "WALD_SEGMENT_MAX_BYTES": "256KiB"}
    with Daemon(tmp_path_factory.mktemp("shared") / "log", env=env) as daemon:
        for words in ("ROUTE ADD r", "ROUTE ADD gone", "ROUTE RETIRE gone", "ROUTE ADD in fifo"):
            assert daemon.ask(words).startswith("OK ")
        yield daemon


@pytest.fixture
def route(shared: Daemon, request: pytest.FixtureRequest) -> str:
    """A route of the test's own."""
    name = request.node.name.translate(str.maketrans("[]", "--"))[:100]
    assert shared.ask(f"ROUTE ADD {name}") == f"OK added {name}"
    return str(name)


@pytest.fixture
def client(shared: Daemon) -> Iterator[Client]:
    with Client(shared.socket_path) as connected:
        yield connected


def written(root: Path) -> object:
    """Every byte of the raw segments and the head, and the names of the routes."""
    files = [*sorted(root.glob("segments/*.wal")), root / "head"]
    return [(path.name, path.read_bytes()) for path in files], sorted(os.listdir(root / "routes"))


def stat(daemon: Daemon) -> dict[str, Any]:
    """What STAT tells; its values are numbers, words and a table."""
    told: dict[str, Any] = json.loads(daemon.ask("STAT").removeprefix("OK "))
    return told


def sequence(reply: str) -> int:
    """The first sequence that a positive reply to PUB names."""
    verdict, first, _ = reply.split()
    assert verdict == "OK"
    return int(first)


def is_quiet(client: Client) -> bool:
    """Whether nothing has been answered so far."""
    return not readable(client.socket.fileno())


def offsets(*ends: int, data: bytes = b"") -> bytes:
    """A payload of columns whose only column, values, has these offsets."""
    packed = struct.pack(f"<{len(ends)}i", *ends)
    body = b"".join(part + bytes(-len(part) % 8) for part in (packed, data))
    return PREFIX.pack(len(ends) - 1, 0) + body


def columns(payload: bytes) -> bytes:
    return b"PUB r %d enc=columns\n%b" % (len(payload), payload)


# What is refused.


@pytest.mark.parametrize(
    ("request_bytes", "code"),
    [
        (b"\n", "unknown-verb"),
        (b"GET / HTTP/1.1\n", "unknown-verb"),
        (b"ping\r\n", "unknown-verb"),
        (b"\xff\xfe\n", "unknown-verb"),
        (b"PING twice\n", "bad-request"),
        (b"HEAD r\n", "bad-request"),
        (b"CUT now\n", "bad-request"),
        (b"ROUTE\n", "bad-request"),
        (b"ROUTE ADD\n", "bad-request"),
        (b"ROUTE DROP r\n", "bad-request"),
        (b"ROUTE RETIRE r now\n", "bad-request"),
        (b"ROUTE ADD x exec\n", "bad-request"),
        (b"ROUTE ADD x mode=\n", "bad-request"),
        (b"ROUTE ADD x fifo mode=9\n", "bad-request"),
        (b"ROUTE ADD ../x\n", "bad-route"),
        (b"ROUTE ADD \xff\n", "bad-route"),
        (b"ROUTE RETIRE ../r\n", "bad-route"),
        (b"ROUTE RETIRE absent\n", "no-route"),
        (b"PUB ../x 2\nx\n", "bad-route"),
        (b"PUB .. 2\nx\n", "bad-route"),
        (b"PUB %b 2\nx\n" % (b"a" * 200), "bad-route"),
        (b"PUB a\0b 2\nx\n", "bad-route"),
        (b"PUB \xff 2\nx\n", "bad-route"),
        (b"PUB absent 2\nx\n", "no-route"),
        (b"PUB gone 2\nx\n", "no-route"),
        (b"PUB absent %d\n%b" % (SPOOLED, bytes(SPOOLED)), "no-route"),
        (b"PUB r 0\n", "bad-lines"),
        (b"PUB r 3\na\nb", "bad-lines"),
        (b"PUB r %d\n%b" % (SPOOLED, bytes(SPOOLED)), "bad-lines"),
        (b"PUB r %d\n%b" % (REQUEST_MAX + 1, b"\n" * (REQUEST_MAX + 1)), "too-large"),
        (b"PUB r 2 enc=rows\nx\n", "bad-request"),
        (b"PUB r 2 acks=all\nx\n", "bad-request"),
        (b"PUB r 2 pid=1\nx\n", "bad-request"),
        (b"PUB r 2 pseq=1\nx\n", "bad-request"),
        (b"PUB r 2 pid=0 pseq=1\nx\n", "bad-request"),
        (b"PUB r 2 pid=one pseq=1\nx\n", "bad-request"),
        (b"PUB r 2 pid=1 pseq=-1\nx\n", "bad-request"),
        (b"PUB r 2 pid=1 pseq=%d\nx\n" % (1 << 64), "bad-request"),
        (b"PUB r 2 pid=%x pseq=1\nx\n" % (1 << 64), "bad-request"),
        (b"PUB r 2 pid=1 pid=1 pseq=1\nx\n", "bad-request"),
    ],
    ids=lambda value: value[:24] if isinstance(value, bytes) else value,
)
def test_a_bad_request_is_refused_alone(shared: Daemon, client: Client, request_bytes: bytes, code: str) -> None:
    """It gets its code, nothing is written, and what is sent behind it is answered."""
    before = written(shared.root)

    assert client.ask(request_bytes + b"PING\n").split(" ")[:2] == ["ERR", code]
    assert client.reply() == "OK pong"
    assert written(shared.root) == before


@pytest.mark.parametrize(
    ("request_bytes", "code"),
    [
        (b"PUB\n", "bad-length"),
        (b"PUB r\n", "bad-length"),
        (b"PUB r -2\nx\n", "bad-length"),
        (b"PUB r 2.0\nx\n", "bad-length"),
        (b"PUB r 1234567890123\nx\n", "bad-length"),
        (b"PUB r" + b" " * 1024, "bad-request"),
    ],
    ids=lambda value: value[:24] if isinstance(value, bytes) else value,
)
def test_a_request_without_a_known_end_is_the_last(
    shared: Daemon, client: Client, request_bytes: bytes, code: str
) -> None:
    """What follows cannot be told from payload: it is not carried out, and the daemon hangs up."""
    before = written(shared.root)

    assert client.ask(request_bytes + b"ROUTE ADD behind\n").split(" ")[:2] == ["ERR", code]
    assert client.reply() == ""
    assert written(shared.root) == before


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"", "too short for the count"),
        (b"\1\0\0\0\0\0\0", "too short for the count"),
        (encode([]), "no record"),
        (encode([b"a", b"b"])[:-8], "a column runs past the end"),
        (encode([b"a", b"b"]) + bytes(8), "8 bytes follow the last column"),
        (encode([b"a" * 9])[:-1], "a column runs past the end"),
        (encode([b"a"], keys=[b"k"])[:16], "a column runs past the end"),
        (encode([b"a"], times_ns=[1])[:12], "a column runs past the end"),
        (PREFIX.pack(1 << 31, 0), "8 bytes cannot hold 2147483648 records"),
        (PREFIX.pack(1, 8) + bytes(16), "unknown columns 0x8"),
        (offsets(0, 2, 1, data=b"ab"), "offsets do not start at 0 or go backwards"),
        (offsets(1, 2, data=b"ab"), "offsets do not start at 0 or go backwards"),
        (offsets(0, -1), "offsets do not start at 0 or go backwards"),
        (offsets(0, 9, data=b"12345678"), "a column runs past the end"),
        (offsets(0, SPOOLED, 1, data=bytes(SPOOLED)), "offsets do not start at 0 or go backwards"),
        (offsets(0, SPOOLED - 9, data=bytes(SPOOLED)), "8 bytes follow the last column"),
    ],
    ids=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else value,
)
def test_malformed_columns_are_refused(shared: Daemon, client: Client, payload: bytes, words: str) -> None:
    """In memory and gathered in a file alike, with what is wrong."""
    before = written(shared.root)

    assert client.ask(columns(payload) + b"PING\n") == f"ERR bad-columns {words}"
    assert client.reply() == "OK pong"
    assert written(shared.root) == before


def test_a_retired_route_is_refused_until_it_is_added_again(client: Client, route: str) -> None:
    """Also in one write: each request sees what the ones before it did."""
    publish = f"PUB {route} 2\nx\n".encode()
    client.send(publish + b"ROUTE RETIRE %b\n" % route.encode())
    client.send(publish + b"ROUTE ADD %b\n" % route.encode() + publish)

    words = [client.reply().split(" ") for _ in range(5)]
    assert [each[:2] for each in words[1::2]] == [["OK", "retired"], ["OK", "added"]]
    assert [each[0] for each in words[0::2]] == ["OK", "ERR", "OK"]
    assert words[2][1] == "no-route"


# What is taken, and in which order it is answered.


def test_replies_come_in_the_order_of_the_requests(shared: Daemon, client: Client, route: str) -> None:
    """Many requests in one write, of which some are refused."""
    block = f"PUB {route} 4\na\nb\nPING\nPUB absent 2\nx\nPUB {route} 2\nc\nNONE\n".encode()
    client.send(block * 200)
    replies = [client.reply() for _ in range(5 * 200)]

    first = sequence(replies[0])
    expected = [
        each
        for number in range(first, first + 600, 3)
        for each in (f"OK {number} {number + 1}", "OK pong", "ERR no-r", f"OK {number + 2} {number + 2}", "ERR unkn")
    ]
    assert [reply[: len(wanted)] for reply, wanted in zip(replies, expected, strict=True)] == expected
    assert text(shared.root, route) == b"a\nb\nc\n" * 200


def test_what_asks_about_the_log_sees_what_was_published_before_it(client: Client, route: str) -> None:
    """HEAD, STAT and CUT behind a PUB in one write are answered after its commit."""
    publish = f"PUB {route} 2\nx\n".encode()
    client.send(publish + b"HEAD\nSTAT\nCUT\nHEAD\nCUT\n")
    number = sequence(client.reply())

    assert client.reply().startswith(f"OK seq={number:020d} ")
    assert json.loads(client.reply().removeprefix("OK "))["head"] == number
    assert client.reply() == f"OK cut {number + 1}"
    assert f"seq={number:020d} segment={number + 1:020d} " in client.reply()
    assert client.reply() == f"OK nothing-to-cut {number + 1}"


def test_a_route_can_be_used_behind_its_making(shared: Daemon, client: Client) -> None:
    """ROUTE ADD and PUB in one write."""
    client.send(b"ROUTE ADD fresh\nPUB fresh 2\nx\nROUTE ADD fresh fifo mode=0600\n")

    assert client.reply() == "OK added fresh"
    assert client.reply().startswith("OK ")
    assert client.reply() == "OK added fresh"
    assert (shared.root / "routes/fresh/in").stat().st_mode & 0o7777 == 0o600


def test_a_request_may_come_byte_by_byte(shared: Daemon, client: Client, route: str) -> None:
    """Each byte in a turn of its own; a carriage return before the newline is passed over."""
    with Client(shared.socket_path) as other:
        for byte in f"PUB {route} 8\r\none\ntwo\nPING\r\n".encode():
            client.send(bytes([byte]))
            assert other.ask(b"PING\n") == "OK pong"

    assert client.reply().startswith("OK ")
    assert client.reply() == "OK pong"
    assert text(shared.root, route) == b"one\ntwo\n"


@pytest.mark.parametrize("size", [SPOOLED - 1, SPOOLED, REQUEST_MAX])
def test_large_payloads_are_taken_whole(shared: Daemon, client: Client, route: str, size: int) -> None:
    """Lines that do not fit into a connection's memory, up to the limit, each followed by another request."""
    payload = os.urandom(size - 1).replace(b"\n", b"\n\n")[: size - 1] + b"\n"
    client.publish(route, payload)
    client.send(f"PUB {route} 2\nx\n".encode())
    first, last = map(int, client.reply().split()[1:])

    assert last - first + 1 == payload.count(b"\n")
    assert client.reply() == f"OK {last + 1} {last + 1}"
    assert text(shared.root, route) == payload + b"x\n"


@pytest.mark.parametrize("count", [3, 3000])
def test_columns_come_back_with_their_keys_and_times(shared: Daemon, client: Client, route: str, count: int) -> None:
    """In memory and gathered in a file alike; newlines in them are content."""
    contents = [b"%d\n" % number * 50 for number in range(count)]
    keys = [None if number % 3 else b"key %d" % number for number in range(count)]
    payload = encode(contents, keys=keys, times_ns=range(count))
    assert (len(payload) > SPOOLED) == (count > 3)
    client.publish(route, payload, "enc=columns")

    first = sequence(client.reply())
    found = records(shared.root, route)
    assert [record.sequence for record in found] == list(range(first, first + count))
    assert [record.value for record in found] == contents
    assert [record.key for record in found] == keys
    assert [record.event_time_ns for record in found] == list(range(count))


# Producers that send again.


def numbered(route: str, producer: int, number: int, payload: bytes = b"") -> bytes:
    payload = payload or b"%d\n" % number
    return b"PUB %b %d pid=%x pseq=%d\n%b" % (route.encode(), len(payload), producer, number, payload)


def test_a_number_left_out_is_a_gap(shared: Daemon, client: Client, route: str) -> None:
    """A producer may begin anywhere and then counts; what was refused can be sent once the gap is filled."""
    assert client.ask(numbered(route, 0xA1, 5)).startswith("OK ")
    assert client.ask(numbered(route, 0xA1, 7)) == "ERR gap batch 6 of this producer is missing before 7"
    assert client.ask(numbered(route, 0xA1, 7, bytes(SPOOLED) + b"\n")).startswith("ERR gap ")
    assert client.ask(numbered(route, 0xA1, 6, b"no newline")).startswith("ERR bad-lines ")
    assert client.ask(numbered(route, 0xA1, 7)).startswith("ERR gap ")
    assert client.ask(numbered(route, 0xA1, 6)).startswith("OK ")
    assert client.ask(numbered(route, 0xA1, 7)).startswith("OK ")

    assert text(shared.root, route) == b"5\n6\n7\n"


def test_a_repetition_in_the_same_turn_is_acknowledged_alike(shared: Daemon, client: Client, route: str) -> None:
    """In one write, twice each; and a gap is one however it is sent."""
    one, two, four = (numbered(route, 0xA2, number) for number in (1, 2, 4))
    client.send(one + one + two + one + four + two)
    replies = [client.reply() for _ in range(6)]

    first = sequence(replies[0])
    assert [sequence(reply) for reply in replies if reply != replies[4]] == [first, first, first + 1, first, first + 1]
    assert replies[4].startswith("ERR gap ")
    assert text(shared.root, route) == b"1\n2\n"


def test_two_connections_may_share_a_producer(shared: Daemon, client: Client, route: str) -> None:
    """As after a reconnect whose old connection is not gone yet: order and repetitions count over both."""
    with Client(shared.socket_path) as other:
        first = sequence(client.ask(numbered(route, 0xA3, 1)))
        assert sequence(other.ask(numbered(route, 0xA3, 1))) == first
        assert sequence(other.ask(numbered(route, 0xA3, 2))) == first + 1
        assert client.ask(numbered(route, 0xA3, 4)).startswith("ERR gap ")
        assert sequence(client.ask(numbered(route, 0xA3, 3))) == first + 2
        client.send(numbered(route, 0xA3, 4))
        other.send(numbered(route, 0xA3, 4))
        assert client.reply() == other.reply() == f"OK {first + 3} {first + 3}"

    assert text(shared.root, route) == b"1\n2\n3\n4\n"


def test_sixteen_batches_are_remembered(client: Client, route: str) -> None:
    """An older one can be told neither from a repetition nor from something new."""
    first = sequence(client.ask(numbered(route, 0xA4, 1)))
    client.send(b"".join(numbered(route, 0xA4, number) for number in range(2, 19)))
    assert [sequence(client.reply()) for _ in range(17)] == list(range(first + 1, first + 18))

    assert sequence(client.ask(numbered(route, 0xA4, 3))) == first + 2
    assert client.ask(numbered(route, 0xA4, 2)) == "ERR forgotten batch 2 of this producer is too old to be remembered"
    assert client.ask(numbered(route, 0xA4, 1)).startswith("ERR forgotten ")


def test_repetitions_are_recognised_after_kills_and_cuts(start: Start, root: Path) -> None:
    """From the segment that was being written, and from the state that a cut hands to the next."""
    daemon = start()
    daemon.ask("ROUTE ADD r")
    with Client(daemon.socket_path) as client:
        assert client.ask(numbered("r", 7, 1) + numbered("r", 7, 2)) == "OK 1 1"
        assert client.reply() == "OK 2 2"
    for first, disturb in enumerate([daemon.kill, lambda: daemon.ask("CUT"), daemon.kill, daemon.stop], start=2):
        disturb()
        if daemon.process.poll() is not None:
            daemon.start_again()
        with Client(daemon.socket_path) as client:
            assert client.ask(numbered("r", 7, 1)) == "OK 1 1"
            assert client.ask(numbered("r", 7, first)) == f"OK {first} {first}"
            assert client.ask(numbered("r", 7, first + 2)).startswith("ERR gap ")
            assert client.ask(numbered("r", 7, first + 1)) == f"OK {first + 1} {first + 1}"

    assert text(root, "r") == b"1\n2\n3\n4\n5\n6\n"
    assert_sound(root)


def test_other_content_under_a_number_that_is_taken_is_refused(shared: Daemon, client: Client, route: str) -> None:
    """Never acknowledged and dropped: in one write, in a later one, from another connection. The route is content."""
    other_route = route[:96] + ".two"
    assert shared.ask(f"ROUTE ADD {other_route}").startswith("OK ")
    first = sequence(client.ask(numbered(route, 0xC1, 1, b"one\n")))
    client.send(numbered(route, 0xC1, 2, b"two\n") + numbered(route, 0xC1, 2, b"tow\n") + b"PING\n")
    assert sequence(client.reply()) == first + 1
    assert client.reply().startswith("ERR conflict batch 2 of this producer is already ")
    assert client.reply() == "OK pong"
    with Client(shared.socket_path) as other:
        for payload in (b"eno\n", b"o\ne\n", b"one\n\n", b"x" * SPOOLED + b"\n"):
            assert other.ask(numbered(route, 0xC1, 1, payload)).startswith("ERR conflict ")
        assert other.ask(numbered(other_route, 0xC1, 1, b"one\n")).startswith("ERR conflict ")
        assert sequence(other.ask(numbered(route, 0xC1, 1, b"one\n"))) == first

    assert text(shared.root, route) == b"one\ntwo\n"
    assert text(shared.root, other_route) == b""


def test_the_end_of_a_route_and_the_beginning_of_a_payload_are_told_apart(shared: Daemon, client: Client) -> None:
    """A batch's body is the route and then the payload: the same bytes, parted elsewhere, are other content."""
    for name in ("ROUTE ADD shifted1", "ROUTE ADD shifted1payload1"):
        assert shared.ask(name).startswith("OK ")
    assert client.ask(numbered("shifted1", 0xC2, 1, b"payload1text\n" + b"x" * 10 + b"\n")).startswith("OK ")

    assert client.ask(numbered("shifted1payload1", 0xC2, 1, b"text\n" + b"x" * 10 + b"\n")).startswith("ERR conflict ")


def test_a_conflict_is_seen_after_kills_and_cuts(start: Start, root: Path) -> None:
    """From the batches that recovery scans, and from the state that a cut hands on."""
    daemon = start()
    daemon.ask("ROUTE ADD r")
    large = b"l" * SPOOLED + b"\n"
    with Client(daemon.socket_path) as client:
        assert client.ask(numbered("r", 7, 1, b"one\n") + numbered("r", 7, 2, large)) == "OK 1 1"
        assert client.reply() == "OK 2 2"
    for disturb in (daemon.kill, lambda: daemon.ask("CUT"), daemon.kill):
        disturb()
        if daemon.process.poll() is not None:
            daemon.start_again()
        with Client(daemon.socket_path) as client:
            assert client.ask(numbered("r", 7, 1, b"eno\n")).startswith("ERR conflict ")
            assert client.ask(numbered("r", 7, 2, large[1:] + b"\n")).startswith("ERR conflict ")
            assert client.ask(numbered("r", 7, 1, b"one\n")) == "OK 1 1"
            assert client.ask(numbered("r", 7, 2, large)) == "OK 2 2"

    assert text(root, "r") == b"one\n" + large


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's place")
def test_a_producer_id_is_its_users_own(start: Start, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has read it elsewhere, in a segment or over a shoulder, can neither be taken for it nor be in its way."""
    daemon = start(socket_mode="0666")
    daemon.ask("ROUTE ADD r")
    monkeypatch.chdir(root)  # the way to a test's directory is closed to others
    root.chmod(0o755)
    with Client(daemon.socket_path) as mine:
        assert mine.ask(numbered("r", 7, 1, b"mine\n")) == "OK 1 1"
        with acting_as(os.geteuid() + 1), Client(Path("wald.sock")) as theirs:
            for number in (1, 2):
                assert theirs.ask(numbered("r", 7, number, b"theirs\n")) == f"OK {1 + number} {1 + number}"
        assert mine.ask(numbered("r", 7, 2, b"mine\n")) == "OK 4 4"
        assert mine.ask(numbered("r", 7, 1, b"mine\n")) == "OK 1 1"

    assert values(root) == [b"mine", b"theirs", b"theirs", b"mine"]


# Who may write.


@contextmanager
def acting_as(user_id: int) -> Iterator[None]:
    before = os.geteuid()
    os.seteuid(user_id)
    try:
        yield
    finally:
        os.seteuid(before)


def test_only_the_named_writers_may_write(
    start: Start, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says who is connected; other routes stay open to everyone, and being root is no exception."""
    config, me = tmp_path / "wald.toml", os.geteuid()
    config.write_text(f"[routes.mine]\nwriters = [{me}]\n[routes.theirs]\nwriters = [{me + 1}]\n[routes.all]\n")
    daemon = start("--config", config, socket_mode="0666")
    requests = b"PUB mine 5\nmine\nPUB theirs 7\ntheirs\nPUB all 4\nall\n"
    with Client(daemon.socket_path) as client:
        assert client.ask(requests) == "OK 1 1"
        assert client.reply() == f"ERR denied user {me} may not write to theirs"
        assert client.reply() == "OK 2 2"
    expected = [b"mine", b"all"]

    if me == 0:
        monkeypatch.chdir(root)  # the way to a test's directory is closed to others
        root.chmod(0o755)
        with acting_as(me + 1), Client(Path("wald.sock")) as client:
            assert client.ask(requests) == f"ERR denied user {me + 1} may not write to mine"
            assert client.reply() == "OK 3 3"
            assert client.reply() == "OK 4 4"
        expected += [b"theirs", b"all"]

    assert values(root) == expected


# Connections side by side.


def test_many_clients_publish_at_once(shared: Daemon, route: str) -> None:
    """64 connections with one record each: every one gets a sequence of its own."""
    with ExitStack() as closing:
        clients = [closing.enter_context(Client(shared.socket_path)) for _ in range(64)]
        for number, client in enumerate(clients):
            client.publish(route, b"%d\n" % number)
        sequences = {number: sequence(client.reply()) for number, client in enumerate(clients)}

    found = {int(record.value): record.sequence for record in records(shared.root, route)}
    assert found == sequences
    assert len(set(sequences.values())) == 64


def test_a_half_sent_request_times_out(start: Start, root: Path) -> None:
    """In its line, in its payload, in a file, and while it is passed over; who has sent nothing may stay."""
    daemon = start(frame_timeout=0.3)
    daemon.ask("ROUTE ADD r")
    large = b"PUB r %d\n" % SPOOLED + bytes(SPOOLED // 2)
    halves = [b"PUB r", b"PUB r 9\nhalf", large, b"PUB absent 9\nhalf"]
    with ExitStack() as closing:
        idle, *clients = (closing.enter_context(Client(daemon.socket_path)) for _ in range(1 + len(halves)))
        for client, half in zip(clients, halves, strict=True):
            client.send(half)
        assert clients[3].reply().startswith("ERR no-route ")
        for client in clients:
            assert client.reply() == "ERR timeout nothing more of the request came in 0.3 s"
            assert client.reply() == ""
        assert idle.ask(b"PUB r 2\nx\n") == "OK 1 1"

    assert values(root) == [b"x"]


def test_who_leaves_in_the_middle_leaves_nothing(shared: Daemon, route: str) -> None:
    """No record, no descriptor, no file; and a payload of several records is not taken in part."""
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
    client.send(b"STAT\n" * 5000)
    eventually(lambda: not is_quiet(client))
    with Client(shared.socket_path) as other:
        for _ in range(3):
            assert other.ask(b"PUB r 2\nx\n").startswith("OK ")
    client.send(b"PING\n")

    assert all(client.reply().startswith("OK {") for _ in range(5000))
    assert client.reply() == "OK pong"


def test_above_the_limit_of_connections_newcomers_are_told(start: Start) -> None:
    """And so is the journal, once; who is in stays in, and a place that becomes free is anybody's."""
    daemon = start(connections_max=2)
    with Client(daemon.socket_path) as one, Client(daemon.socket_path) as two:
        assert one.ask(b"PING\n") == two.ask(b"PING\n") == "OK pong"
        for _ in range(5):
            with Client(daemon.socket_path) as three:
                assert three.reply() == "ERR busy 2 connections are open already"
                assert three.reply() == ""
        assert one.ask(b"PING\n") == two.ask(b"PING\n") == "OK pong"
        one.close()
        daemon.await_ready()
    assert daemon.log.count("connection refused") == 1


@contextmanager
def entering(daemon: Daemon) -> Iterator[Client]:
    """A connection that has a place, once there is one."""
    while True:
        with Client(daemon.socket_path) as client:
            answer = ""
            with suppress(OSError):
                answer = client.ask(b"PING\n")
            if answer == "OK pong":
                yield client
                return


def test_a_producer_waits_for_a_place(start: Start) -> None:
    """What it is told is worth another try, also if the daemon has hung up before the request was sent."""
    daemon = start(connections_max=1)
    with entering(daemon) as one:
        assert one.ask(b"ROUTE ADD r\n") == "OK added r"
        hasty = Producer(daemon.root, retry_for=0.3)
        with pytest.raises(Unavailable, match="1 connections are open already"):
            hasty.command("PING")
        with Producer(daemon.root) as producer:
            producer.publish("r", b"x\n")
            one.close()
            assert producer.flush() == [Durable(1, 1)]


def test_who_has_been_idle_for_longest_gives_up_his_place(start: Start, root: Path) -> None:
    """Only when it is needed, and only if nothing of his is under way: neither half a request nor a long line's end."""
    daemon = start(connections_max=4, idle_timeout=0.3, frame_timeout=60)
    assert daemon.ask("ROUTE ADD in fifo") == "OK added in"
    with ExitStack() as closing:
        fifo = closing.enter_context((root / "routes/in/in").open("wb", buffering=0))
        fifo.write(b"l" * CHUNK)
        eventually(lambda: "in" in stat(daemon)["routes"])
        half, parked, idle, active = (closing.enter_context(Client(daemon.socket_path)) for _ in range(4))
        parked.send(b"PUB in 2\nx\n")
        half.send(b"PUB in 2\n")
        assert idle.ask(b"PING\n") == "OK pong"
        since = time.monotonic()
        eventually(lambda: time.monotonic() - since > 0.4)
        assert active.ask(b"PING\n") == "OK pong"
        assert is_quiet(idle)
        new = closing.enter_context(Client(daemon.socket_path))
        assert new.ask(b"PING\n") == "OK pong"
        assert idle.reply() == "ERR timeout idle for long, and the place was needed"
        assert idle.reply() == ""
        assert active.ask(b"PING\n") == "OK pong"
        fifo.write(b"end\n")
        assert parked.reply().startswith("OK ")
        half.send(b"y\n")
        assert half.reply().startswith("OK ")


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

        assert fill(os.geteuid() + 1, 20).startswith("ERR busy user 1 has 20 connections already")
        assert fill(os.geteuid() + 2, 10) == "ERR busy 32 connections are open already"
        for _ in range(2):
            assert closing.enter_context(Client(here)).ask(b"PING\n") == "OK pong"
        with Client(here) as refused:
            assert refused.reply() == "ERR busy 32 connections are open already"


def test_without_a_descriptor_the_daemon_rests(start: Start, root: Path) -> None:
    """And lets in who waits once there is one."""
    daemon = start()
    pid = daemon.process.pid
    eventually(lambda: list(root.glob("segments/*spare*")))  # what is opened at a start is open
    with Client(daemon.socket_path) as one:
        assert one.ask(b"PING\n") == "OK pong"
        taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
        _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        lowest_free = min(set(range(max(taken) + 2)) - taken)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, most))
        with Client(daemon.socket_path) as waiting:
            waiting.send(b"PING\n")
            before = processor_seconds(pid)
            assert not readable(waiting.socket.fileno(), within=1.5)
            assert processor_seconds(pid) - before < 0.5
            assert one.ask(b"PING\n") == "OK pong"
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
            assert waiting.reply() == "OK pong"


def processor_seconds(pid: int) -> float:
    """What a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_gathered_payload_does_not_come_between_the_pieces_of_a_long_line(shared: Daemon, client: Client) -> None:
    """The long line begins in a FIFO while the payload is under way; what was whole before it waits for its end."""
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
    """Small and gathered alike, with what was sent behind them; the connection lives on, other routes are open."""
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
        assert large.reply() == "ERR busy a pipe is inside a long line of in"
        assert [small.reply() for _ in range(3)] == ["ERR busy a pipe is inside a long line of in"] * 2 + ["OK pong"]
        assert large.reply() == "OK pong"
        assert small.ask(b"PUB r 2\nx\n").startswith("OK ")
        fifo.write(b"end\n")
        eventually(lambda: not text(root, "in").endswith(b"l"))
        assert small.ask(b"PUB in 2\ny\n").startswith("OK ")

    assert text(root, "in") == b"l" * CHUNK + b"end\ny\n"


def test_who_leaves_while_he_waits_makes_room(start: Start, small: Path) -> None:
    """A parked connection is not read, and still its end is seen; half an end is none."""
    daemon = on(small, start, connections_max=2)
    fill(small / "filler")
    with Client(daemon.socket_path) as half_closed:
        half_closed.send(b"PUB r 2\nx\n")
        half_closed.socket.shutdown(socket.SHUT_WR)
        for _ in range(4):
            daemon.await_ready()  # there is a place again
            with entering(daemon) as leaving:
                leaving.send(b"PUB r 2\ny\n")
        daemon.await_ready()
        (small / "filler").unlink()
        assert half_closed.reply() == "OK 1 1"


def test_a_half_request_that_was_parked_has_its_time_from_then_on(start: Start, small: Path) -> None:
    """Its rest could not come before."""
    daemon = on(small, start, frame_timeout=3)
    fill(small / "filler")
    with Client(daemon.socket_path) as client, Client(daemon.socket_path) as half:
        client.send(b"PUB r 2\nx\nPUB r 7\nabc")
        half.send(b"half")
        assert half.reply().startswith("ERR timeout ")
        (small / "filler").unlink()
        assert client.reply() == "OK 1 1"
        assert not readable(client.socket.fileno(), within=1.1)  # a sweep later
        assert client.ask(b"def\n") == "OK 2 2"


def test_without_a_descriptor_and_without_a_connection_the_daemon_rests(start: Start, root: Path) -> None:
    """And lets in who waits once there is one."""
    daemon = start()
    pid = daemon.process.pid
    eventually(lambda: list(root.glob("segments/*spare*")))
    eventually(lambda: stat(daemon)["connections"] == 1)
    _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, most))
    with Client(daemon.socket_path) as waiting:
        waiting.send(b"PING\n")
        before = processor_seconds(pid)
        assert not readable(waiting.socket.fileno(), within=1.5)
        assert processor_seconds(pid) - before < 0.5
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
        assert waiting.reply() == "OK pong"


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
    """Some requests a turn; who does not read the answers has the rest of his requests waiting, and loses none."""
    status = Path(f"/proc/{talkative.process.pid}/status")
    with entering(talkative) as client:
        before = peak_bytes(status)
        client.send(b"STAT\n" * 10_000)
        assert all(client.reply().startswith("OK {") for _ in range(10_000))
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


# A disk without room.


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk that is soon full."""
    with small_file_system(tmp_path / "disk", 16 << 20) as disk:
        yield disk


def on(small: Path, start: Start, **options: Any) -> Daemon:
    """A daemon on that disk, with a route. ``Any``: they are handed on."""
    daemon = start(at=small / "log", segment_max_bytes="64KiB", free_space_min="1MiB", **options)
    daemon.ask("ROUTE ADD r")
    return daemon


def test_without_room_a_producer_is_told_if_it_shall_be(small: Path, start: Start) -> None:
    """on_full = "reject": ERR full at once, for small and for large; what writes no record is answered as ever."""
    daemon = on(small, start, on_full="reject")
    before = written(daemon.root)
    fill(small / "filler")
    with Client(daemon.socket_path) as client:
        client.send(b"PUB r 2\nx\nPUB r %d\n%b" % (SPOOLED, bytes(SPOOLED)))
        client.send(b"PUB absent 2\nx\nHEAD\n")
        assert client.reply() == "ERR full the disk is full; STAT says what fills it"
        assert client.reply().startswith("ERR full ")
        assert client.reply().startswith("ERR no-route ")
        assert client.reply().startswith("OK seq=00000000000000000000 ")
        assert stat(daemon)["degraded_by"] == "others"

    assert written(daemon.root) == before


def test_without_room_a_producer_waits_until_there_is(small: Path, start: Start) -> None:
    """on_full = "block": nothing is lost and nothing refused; others are answered meanwhile."""
    daemon = on(small, start)
    fill(small / "filler")
    with Client(daemon.socket_path) as client, Client(daemon.socket_path) as other:
        client.send(b"PUB r 2\nx\nPING\n")
        assert other.ask(b"PING\n") == "OK pong"
        told = stat(daemon)
        assert told["degraded"] is True
        assert told["free_bytes"] < told["needed_bytes"]
        assert is_quiet(client)
        (small / "filler").unlink()
        assert client.reply() == "OK 1 1"
        assert client.reply() == "OK pong"
    told = stat(daemon)
    assert (told["degraded"], told["degraded_by"]) == (False, "")
    assert told["free_bytes"] >= told["needed_bytes"]

    assert values(daemon.root) == [b"x"]


def spooled_bytes(daemon: Daemon) -> int:
    """What lies in the unnamed files of payloads."""
    descriptors = Path(f"/proc/{daemon.process.pid}/fd").iterdir()
    total = 0
    for each in descriptors:
        with suppress(FileNotFoundError):  # a connection that was closed meanwhile
            if os.readlink(each).endswith("(deleted)"):
                total += each.stat().st_size
    return total


def test_without_room_a_payload_under_way_is_not_gathered_on(small: Path, start: Start) -> None:
    """It waits where it is, and goes on once there is room."""
    daemon = on(small, start)
    with Client(daemon.socket_path) as client:
        client.send(b"PUB r %d\n" % (2 * SPOOLED) + bytes(SPOOLED))
        eventually(lambda: spooled_bytes(daemon) == SPOOLED)
        fill(small / "filler")
        eventually(lambda: stat(daemon)["degraded"])
        client.send(bytes(100 << 10))
        for _ in range(3):
            assert daemon.ask("PING") == "OK pong"
        assert spooled_bytes(daemon) == SPOOLED
        (small / "filler").unlink()
        client.send(bytes(SPOOLED - (100 << 10) - 1) + b"\n")
        assert client.reply() == "OK 1 1"

    assert text(daemon.root, "r") == bytes(2 * SPOOLED - 1) + b"\n"


def test_a_payload_for_which_there_will_never_be_room_is_refused(small: Path, start: Start) -> None:
    """Else it would wait for ever; the connection lives on."""
    daemon = on(small, start)
    with Client(daemon.socket_path) as client:
        assert client.ask(b"PUB r %d\n" % (8 << 20) + bytes(8 << 20)).startswith("ERR too-large ")
        assert client.ask(b"PUB r 2\nx\n") == "OK 1 1"


def test_a_payload_that_would_take_the_last_room_is_not_begun(start: Start, tmp_path: Path) -> None:
    """It counts twice, gathered and copied, and with it what is still to come of others; small ones are taken."""
    status = os.statvfs(tmp_path)
    path, payload_bytes = tmp_path / "wald.toml", 500 << 20
    minimum = status.f_bavail * status.f_frsize - 3 * payload_bytes  # others use this disk, too
    path.write_text(f"free_space_min = {minimum}\n[routes.r]\n")
    daemon = start("--config", path, on_full="reject", request_max_bytes="512MiB", segment_max_bytes="64KiB")
    with Client(daemon.socket_path) as first, Client(daemon.socket_path) as second:
        first.send(b"PUB r %d\n" % payload_bytes)
        assert daemon.ask("PING") == "OK pong"
        assert is_quiet(first)
        assert second.ask(b"PUB r 2\nx\n") == "OK 1 1"
        assert second.ask(b"PUB r %d\n" % payload_bytes).startswith("ERR full ")
