"""Workers of the servers that wald is measured beside: a hundred records at a time, each acknowledged by itself.

No library is between the worker and its server. A request that acknowledges a batch and asks for the next one is
one write, and a reply is cut with ``bytes.split``, which no complete parser does as fast: it is possible only because
the values have no line ends. So the servers do better here than behind their usual clients. A value has arrived when
it is there as ``bytes``, an acknowledgement when the server has answered it.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from benchmarks.brokers import Address, connected
from benchmarks.stage import ROUTE

BATCH = 100
_ROUTE = ROUTE.encode()
_FILLED_AT_ONCE = 1000
_CHUNK = 1 << 18
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n(?:[^\r]+\r\n)*\r\n")
_PULL = b'{"batch":%d}' % BATCH

Step = Callable[[], int]
"""Take a batch and have it acknowledged; returns how many records that were."""


def records_per_second(step: Step, seconds: float) -> float:
    """Of a worker that does nothing else, until ``seconds`` are over or nothing is left."""
    done = 0
    began = time.perf_counter()
    while (now := time.perf_counter()) < began + seconds:
        if not (some := step()):
            break
        done += some
    return done / (now - began)


class Redis:
    """A stream; each worker has a group of its own, so the records are there again for the next one."""

    def __init__(self, address: Address) -> None:
        self._connection = connected(address)

    def fill(self, values: list[bytes]) -> None:
        for some in _portions(values):
            self._connection.sendall(b"".join(command(b"XADD", _ROUTE, b"*", b"v", value) for value in some))
            _replies(self._connection, 2 * len(some))

    def worker(self, group: str, left: int) -> Step:
        new_group(self._connection, group)
        name = group.encode()
        read = read_command(name, BATCH)
        acknowledge = b"*%d\r\n$4\r\nXACK\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n" % (
            3 + BATCH,
            len(_ROUTE),
            _ROUTE,
            len(name),
            name,
        )

        def take(answers: int) -> bytes:
            lines = _replies(self._connection, answers + 5 + 8 * BATCH)
            start = answers + 5
            numbers, values = lines[start + 2 :: 8], lines[start + 7 :: 8]
            assert len(numbers) == len(values) == BATCH, lines[:10]
            assert not answers or lines[0] == b":%d" % BATCH, lines[0]
            words = [b""] * (2 * BATCH)
            words[0::2], words[1::2] = lines[start + 1 :: 8], numbers
            return acknowledge + b"\r\n".join(words) + b"\r\n"

        def confirm() -> None:
            assert _replies(self._connection, 1)[0] == b":%d" % BATCH

        return _steps(self._connection, left, read, take, 1, confirm)


class Nats:
    """A stream of JetStream in files; each worker has a durable pull consumer of its own."""

    def __init__(self, address: Address) -> None:
        self._connection = connected(address)
        self._connection.recv(_CHUNK)
        options = {"verbose": False, "pedantic": False, "headers": False, "lang": "none", "version": "1"}
        self._connection.sendall(b"CONNECT %s\r\nSUB a 1\r\nSUB m 2\r\n" % json.dumps(options).encode())

    def fill(self, values: list[bytes]) -> None:
        self._ask("STREAM.CREATE", ROUTE, {"name": ROUTE, "subjects": [ROUTE], "storage": "file"})
        for some in _portions(values):
            self._connection.sendall(b"".join(_published(_ROUTE, value) for value in some))
            assert all(b'"seq"' in reply for reply in self._replies(2 * len(some))[1::2])

    def worker(self, name: str, left: int) -> Step:
        config = {"durable_name": name, "ack_policy": "explicit", "max_ack_pending": -1}
        subject = f"{ROUTE}.{name}"
        self._ask("CONSUMER.DURABLE.CREATE", subject, {"stream_name": ROUTE, "config": config})
        pull = b"PUB $JS.API.CONSUMER.MSG.NEXT.%s m %d\r\n%s\r\n" % (subject.encode(), len(_PULL), _PULL)

        def take(answers: int) -> bytes:
            lines = self._replies(2 * (answers + BATCH))
            heads = [head.split(b" ", 4) for head in lines[0::2] if not head.startswith(b"MSG a ")]
            values = [value for value in lines[1::2] if value]
            assert len(heads) == len(values) == BATCH, lines[:10]
            return b"".join([b"PUB %s a 0\r\n\r\n" % head[3] for head in heads])

        def confirm() -> None:
            self._replies(2 * BATCH)

        return _steps(self._connection, left, pull, take, BATCH, confirm)

    def _ask(self, verb: str, subject: str, body: object) -> None:
        self._connection.sendall(_published(f"$JS.API.{verb}.{subject}".encode(), json.dumps(body).encode()))
        answer = json.loads(self._replies(2)[1])
        assert "error" not in answer, answer

    def _replies(self, lines: int) -> list[bytes]:
        """So many lines, without the PING that the server sends a second after the beginning."""
        found = _replies(self._connection, lines)
        if b"PING" in found:
            found.remove(b"PING")
            self._connection.sendall(b"PONG\r\n")
            if len(found) < lines:
                found += _replies(self._connection, lines - len(found))
        return found


class Beanstalkd:
    """The default tube, of which every job is there once."""

    def __init__(self, address: Address) -> None:
        self._connection = connected(address)

    def fill(self, values: list[bytes]) -> None:
        for some in _portions(values):
            self._connection.sendall(b"".join(b"put 0 0 3600 %d\r\n%s\r\n" % (len(value), value) for value in some))
            assert all(reply.startswith(b"INSERTED") for reply in _replies(self._connection, len(some)))

    def worker(self, _name: str, left: int) -> Step:
        reserve = b"reserve\r\n" * BATCH

        def take(answers: int) -> bytes:
            lines = _replies(self._connection, answers + 2 * BATCH)
            heads, values = lines[answers::2], lines[answers + 1 :: 2]
            assert len(heads) == len(values) == BATCH, lines[:10]
            assert lines[:answers] == [b"DELETED"] * answers, lines[:1]
            return b"".join([b"delete %s\r\n" % head.split(b" ", 2)[1] for head in heads])

        def confirm() -> None:
            assert _replies(self._connection, BATCH) == [b"DELETED"] * BATCH

        return _steps(self._connection, left, reserve, take, BATCH, confirm)


class Gate:
    """A route behind a gate; each worker has a work group of its own. JSON is read by msgspec, as clients do that care.

    One request acknowledges a batch and asks for the next one, as one write does to the others.
    """

    def __init__(self, address: Address) -> None:
        self._connection = connected(address)

    def worker(self, group: str, left: int) -> Step:
        path = f"/v1/routes/{ROUTE}/groups/{group}"
        self._ask(f"/v1/routes/{ROUTE}/cursors/{group}", {"sequence": "earliest"}, "PUT")
        assert self._ask(f"{path}/release", {"consumer": "worker-1"}) == {"released": 0}  # the group is opened
        done: list[int] = []

        def step() -> int:
            nonlocal done, left
            if left < BATCH:
                return 0
            asking = {"consumer": "worker-1", "max_records": BATCH, "wait": 5, "done": done}
            records = self._ask(f"{path}/lease", asking)["records"]
            values = [record["value"].encode() for record in records]
            assert len(values) == BATCH, records
            done = [record["sequence"] for record in records]
            left -= BATCH
            if left < BATCH:
                assert self._ask(f"{path}/ack", {"consumer": "worker-1", "sequences": done}) == {"refused": []}
            return BATCH

        return step

    def _ask(self, path: str, asked: object, method: str = "POST") -> Any:
        body = msgspec.json.encode(asked)
        head = "%s %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self._connection.sendall((head % (method, path, len(body))).encode() + body)
        data = b""
        while not (found := _LENGTH.search(data)) or len(data) < found.end() + int(found[1]):
            more = self._connection.recv(_CHUNK)
            assert more, data[-200:]
            data += more
        assert data.startswith(b"HTTP/1.1 200 "), data[:400]
        return msgspec.json.decode(data[found.end() :])


def new_group(connection: socket.socket, group: str) -> None:
    """A group of a Redis stream, at its beginning."""
    connection.sendall(command(b"XGROUP", b"CREATE", _ROUTE, group.encode(), b"0"))
    assert _replies(connection, 1) == [b"+OK"]


def command(*words: bytes) -> bytes:
    """A command for Redis."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def read_command(group: bytes, records: int) -> bytes:
    words = (b"XREADGROUP", b"GROUP", group, b"worker-1", b"COUNT", b"%d" % records, b"STREAMS", _ROUTE, b">")
    return command(*words)


def _steps(
    connection: socket.socket,
    left: int,
    asking: bytes,
    take: Callable[[int], bytes],
    answers_of_batch: int,
    confirm: Callable[[], None],
) -> Step:
    """The steps of a worker: one write acknowledges a batch and asks for the next one.

    Args:
        left: how many records there are; less than a batch is not asked for.
        asking: the request for a batch.
        take: receives a batch, after so many answers to the acknowledgement before; returns what acknowledges it.
        answers_of_batch: how many answers there are to that.
        confirm: receives them where no batch follows.
    """
    connection.sendall(asking)
    answers = 0  # under way

    def step() -> int:
        nonlocal left, answers
        if left < BATCH:
            return 0
        acknowledging = take(answers)
        left -= BATCH
        answers = answers_of_batch
        if left >= BATCH:
            connection.sendall(acknowledging + asking)
        else:
            connection.sendall(acknowledging)
            confirm()
        return BATCH

    return step


def _replies(connection: socket.socket, lines: int) -> list[bytes]:
    """So many lines that a server sends, and whatever has come with them."""
    data = connection.recv(_CHUNK)
    missing = lines - data.count(b"\n")
    while missing > 0:
        more = connection.recv(_CHUNK)
        assert more, data[-200:]
        missing -= more.count(b"\n")
        data += more
    found = data.split(b"\r\n")
    assert found.pop() == b"", found[-1:]
    return found


def _published(subject: bytes, payload: bytes) -> bytes:
    return b"PUB %s a %d\r\n%s\r\n" % (subject, len(payload), payload)


def _portions(values: list[bytes]) -> Iterator[list[bytes]]:
    for start in range(0, len(values), _FILLED_AT_ONCE):
        yield values[start : start + _FILLED_AT_ONCE]
