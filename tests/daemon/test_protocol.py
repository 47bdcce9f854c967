"""The socket protocol from outside: refusals, accepted requests, and the order of replies."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from asking import REQUEST_MAX, SPOOLED, sequence, written
from contents import records, text, values
from running import Client, Daemon, eventually
from users import acting_as

from wald.format.records import PREFIX, encode_columns

Start = Callable[..., Daemon]


def offsets(*ends: int, data: bytes = b"") -> bytes:
    """A payload of columns whose only column, values, has these offsets."""
    packed = struct.pack(f"<{len(ends)}i", *ends)
    body = b"".join(part + bytes(-len(part) % 8) for part in (packed, data))
    return PREFIX.pack(len(ends) - 1, 0) + body


def columns(payload: bytes) -> bytes:
    return b"PUB r %d enc=columns\n%b" % (len(payload), payload)


# Refused requests.

WRONG_COMMANDS = (
    *(b"PING twice", b"HEAD r", b"CUT now", b"ROUTE", b"ROUTE ADD", b"ROUTE DROP r", b"ROUTE RETIRE r now"),
    *(b"ROUTE ADD x exec", b"ROUTE ADD x mode=", b"ROUTE ADD x fifo mode=9"),
)


REFUSED = [
    (b"GET / HTTP/1.1\n", "unknown-verb"),
    (b"\xff\xfe\n", "unknown-verb"),
    *((b"%b\n" % line, "bad-request") for line in WRONG_COMMANDS),
    (b"ROUTE ADD ../x\n", "bad-route"),
    (b"ROUTE ADD \xff\n", "bad-route"),
    (b"ROUTE RETIRE ../r\n", "bad-route"),
    (b"ROUTE RETIRE absent\n", "no-route"),
    (b"PUB .. 2\nx\n", "bad-route"),
    (b"PUB a\0b 2\nx\n", "bad-route"),
    (b"PUB gone 2\nx\n", "no-route"),
    (b"PUB absent %d\n%b" % (SPOOLED, bytes(SPOOLED)), "no-route"),
    (b"PUB r 0\n", "bad-lines"),
    (b"PUB r 3\na\nb", "bad-lines"),
    (b"PUB r %d\n%b" % (SPOOLED, bytes(SPOOLED)), "bad-lines"),
    (b"PUB r %d\n%b" % (REQUEST_MAX + 1, b"\n" * (REQUEST_MAX + 1)), "too-large"),
    (b"PUB r 2 enc=rows\nx\n", "bad-request"),
    (b"PUB r 2 pid=0 pseq=1\nx\n", "bad-request"),
]


def test_a_bad_request_is_refused_alone(shared: Daemon, client: Client) -> None:
    """It gets its code, nothing is written, and later requests are answered."""
    before = written(shared.root)
    for request_bytes, code in REFUSED:
        assert client.ask(request_bytes + b"PING\n").split(" ")[:2] == ["ERR", code], request_bytes[:40]
        assert client.reply() == "OK pong"
    assert written(shared.root) == before


def test_a_request_without_a_known_end_is_the_last(shared: Daemon) -> None:
    """The next bytes could be payload, so the daemon closes the connection."""
    before = written(shared.root)
    for request_bytes, code in ((b"PUB r -2\nx\n", "bad-length"), (b"PUB r" + b" " * 1024, "bad-request")):
        with Client(shared.socket_path) as client:
            assert client.ask(request_bytes + b"ROUTE ADD behind\n").split(" ")[:2] == ["ERR", code]
            assert client.reply() == ""
    assert written(shared.root) == before


def test_malformed_columns_are_refused(shared: Daemon, client: Client) -> None:
    """In memory and spooled, with the reason."""
    before = written(shared.root)
    for payload, message in [
        (b"", "the payload is too short for the count of records"),
        (encode_columns([]), "the payload contains no records"),
        (PREFIX.pack(1 << 31, 0), "8 bytes cannot hold 2147483648 records"),
        (offsets(0, 2, 1, data=b"ab"), "the offsets do not start at 0 or are not sorted"),
        (offsets(0, SPOOLED, 1, data=bytes(SPOOLED)), "the offsets do not start at 0 or are not sorted"),
        (offsets(0, SPOOLED - 9, data=bytes(SPOOLED)), "8 bytes follow the last column"),
    ]:
        assert client.ask(columns(payload) + b"PING\n") == f"ERR bad-columns {message}"
        assert client.reply() == "OK pong"
    assert written(shared.root) == before


def test_a_retired_route_is_refused_until_it_is_added_again(client: Client, route: str) -> None:
    """Within one write, each request sees the effects of earlier ones."""
    publish = f"PUB {route} 2\nx\n".encode()
    client.send(publish + b"ROUTE RETIRE %b\n" % route.encode())
    client.send(publish + b"ROUTE ADD %b\n" % route.encode() + publish)

    replies = [client.reply().split(" ") for _ in range(5)]
    assert [each[:2] for each in replies[1::2]] == [["OK", "retired"], ["OK", "added"]]
    assert [each[0] for each in replies[0::2]] == ["OK", "ERR", "OK"]
    assert replies[2][1] == "no-route"


# Accepted requests, and the order of their answers.


def test_a_route_is_retired_while_a_large_payload_arrives(shared: Daemon, client: Client, route: str) -> None:
    payload = b"y" * SPOOLED + b"\n"
    client.send(b"PUB %b %d\n" % (route.encode(), len(payload)) + payload[:-1])
    eventually(lambda: has_file_without_a_name(shared))
    assert shared.ask(f"ROUTE RETIRE {route}") == f"OK retired {route}"
    assert client.ask(payload[-1:]).startswith("ERR no-route ")
    assert values(shared.root, route) == []


def has_file_without_a_name(daemon: Daemon) -> bool:
    """Return True if the daemon has begun to gather a large payload."""
    for each in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            if "/#" in os.readlink(each):
                return True
    return False


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
    """Each byte in a separate round; a carriage return before the newline is ignored."""
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
    """In memory and spooled; newlines in values are content."""
    contents = [b"%d\n" % number * 50 for number in range(count)]
    keys = [None if number % 3 else b"key %d" % number for number in range(count)]
    payload = encode_columns(contents, keys=keys, times_ns=range(count))
    assert (len(payload) > SPOOLED) == (count > 3)
    client.publish(route, payload, "enc=columns")

    first = sequence(client.reply())
    found = records(shared.root, route)
    assert [record.sequence for record in found] == list(range(first, first + count))
    assert [record.value for record in found] == contents
    assert [record.key for record in found] == keys
    assert [record.event_time_ns for record in found] == list(range(count))


# Who may write.


def test_only_the_named_writers_may_write(
    start: Start, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel identifies the user; other routes stay open to all users, and root needs to be named too."""
    config, me = tmp_path / "wald.toml", os.geteuid()
    config.write_text(f"[routes.mine]\nwriters = [{me}]\n[routes.theirs]\nwriters = [{me + 1}]\n[routes.all]\n")
    daemon = start("--config", config, socket_mode="0666")
    requests = b"PUB mine 5\nmine\nPUB theirs 7\ntheirs\nPUB all 4\nall\n"
    with Client(daemon.socket_path) as client:
        assert client.ask(requests) == "OK 1 1"
        assert client.reply() == f"ERR denied user {me} may not write to route theirs"
        assert client.reply() == "OK 2 2"
    expected = [b"mine", b"all"]

    if me == 0:
        monkeypatch.chdir(root)  # the way to a test's directory is closed to others
        root.chmod(0o755)
        with acting_as(me + 1), Client(Path("wald.sock")) as client:
            assert client.ask(requests) == f"ERR denied user {me + 1} may not write to route mine"
            assert client.reply() == "OK 3 3"
            assert client.reply() == "OK 4 4"
        expected += [b"theirs", b"all"]

    assert values(root) == expected
