"""Workers of wald and of other queues: a hundred records at a time by one worker, or one record at a time by 64.

No library is between a worker and its server. One write acknowledges a batch and asks for the next one, and a reply is
split with ``bytes.split``, faster than any complete parser: this is possible only because the values have no line ends.
So the servers do better here than with their usual clients. A value has arrived when it is a ``bytes`` object, an
acknowledgement when the server has answered it.

For Redis the 64 are either threads with a connection each, or connections of one loop. The loop is the better one for
Redis: 64 threads spend most of their time on the interpreter lock. Run as a program:

    queues ADDRESS KIND hundred NAME LEFT SECONDS    prints records per second; LEFT: number of records
    queues ADDRESS KIND threads NAME LEFT SECONDS    64 threads
    queues ADDRESS KIND loop NAME LEFT SECONDS       64 tasks; of Redis 64 connections
    queues ADDRESS KIND fill FILE RECORDS            appends the first lines of FILE

KIND is wald, gate, redis, nats or beanstalkd; NAME that of a new group. ADDRESS is a root, a socket, or HOST:PORT.
"""

from __future__ import annotations

import asyncio
import json
import re
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

import wald
from benchmarks.brokers import Address, address_of, connected
from benchmarks.stage import ROUTE
from wald import aio

BATCH = 100
_ROUTE = ROUTE.encode()
_FILLED_AT_ONCE = 1000
_REPLY_BYTES = 1 << 18
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n(?:[^\r]+\r\n)*\r\n")
_PULL = b'{"batch":%d}' % BATCH

Step = Callable[[], int]
"""Take a batch and have it acknowledged; returns how many records that were."""


def records_per_second(step: Step, seconds: float) -> float:
    """Measure a worker that does nothing else, until ``seconds`` are over or no records are left."""
    done = 0
    began = time.perf_counter()
    while (now := time.perf_counter()) < began + seconds:
        if not (some := step()):
            break
        done += some
    return done / (now - began)


class Redis:
    """A stream; each worker has a separate group, so the next one gets all records again."""

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
    """A stream of JetStream in files; each worker has a separate durable pull consumer."""

    def __init__(self, address: Address) -> None:
        self._connection = connected(address)
        self._connection.recv(_REPLY_BYTES)
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
        """Receive this number of lines, without the PING that the server sends a second after the beginning."""
        found = _replies(self._connection, lines)
        if b"PING" in found:
            found.remove(b"PING")
            self._connection.sendall(b"PONG\r\n")
            if len(found) < lines:
                found += _replies(self._connection, lines - len(found))
        return found


class Beanstalkd:
    """The default tube, which has each job once."""

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
    """A route behind a gate; each worker has a separate work group. JSON is read by msgspec, as fast clients do.

    One request acknowledges a batch and asks for the next one, as one write does for the others.
    """

    def __init__(self, address: Address) -> None:
        self._connection = connected(address)

    def worker(self, group: str, left: int) -> Step:
        path = f"/v1/routes/{ROUTE}/groups/{group}"
        self._ask(f"/v1/routes/{ROUTE}/cursors/{group}", {"sequence": "earliest"}, "PUT")
        assert self._ask(f"{path}/release", {"worker": "worker-1"}) == {"released": 0}  # the group is opened
        done: list[int] = []

        def step() -> int:
            nonlocal done, left
            if left < BATCH:
                return 0
            asking = {"worker": "worker-1", "max_records": BATCH, "wait": 5, "done": done}
            records = self._ask(f"{path}/lease", asking)["records"]
            values = [record["value"].encode() for record in records]
            assert len(values) == BATCH, records
            done = [record["sequence"] for record in records]
            left -= BATCH
            if left < BATCH:
                assert self._ask(f"{path}/ack", {"worker": "worker-1", "sequences": done}) == {"refused": []}
            return BATCH

        return step

    def _ask(self, path: str, asked: object, method: str = "POST") -> Any:
        body = msgspec.json.encode(asked)
        head = "%s %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self._connection.sendall((head % (method, path, len(body))).encode() + body)
        data = b""
        while not (found := _LENGTH.search(data)) or len(data) < found.end() + int(found[1]):
            more = self._connection.recv(_REPLY_BYTES)
            assert more, data[-200:]
            data += more
        assert data.startswith(b"HTTP/1.1 200 "), data[:400]
        return msgspec.json.decode(data[found.end() :])


def new_group(connection: socket.socket, group: str) -> None:
    """Create a group of a Redis stream, at its beginning."""
    connection.sendall(command(b"XGROUP", b"CREATE", _ROUTE, group.encode(), b"0"))
    assert _replies(connection, 1) == [b"+OK"]


def command(*words: bytes) -> bytes:
    """Encode a command for Redis."""
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
    """Return the steps of a worker: one write acknowledges a batch and asks for the next one.

    Args:
        left: number of records; less than a batch is not asked for. asking: the request for a batch. take: receives a
            batch, after this number of answers to the previous acknowledgement; returns its acknowledgement.
        answers_of_batch: number of answers to that.
        confirm: receives them if no batch follows.
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
    """Receive at least this number of lines."""
    data = connection.recv(_REPLY_BYTES)
    missing = lines - data.count(b"\n")
    while missing > 0:
        more = connection.recv(_REPLY_BYTES)
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


WORKERS = 64
QUEUES = {"redis": Redis, "nats": Nats, "beanstalkd": Beanstalkd}
SERVERS = {**QUEUES, "gate": Gate}
_PATIENCE_SECONDS = 5.0
_ACK_AND_RECORD = 1 + 5 + 8  # lines of Redis


def wald_hundred(root: str, group: str, left: int, seconds: float) -> float:
    with wald.WorkGroup(root, ROUTE, group) as work:
        return _in_threads([_wald_step(work, "worker-1", BATCH, left)], seconds)  # as workers are: not the main thread


def wald_threads(root: str, group: str, left: int, seconds: float) -> float:
    with wald.WorkGroup(root, ROUTE, group) as work:
        steps = [_wald_step(work, f"worker-{number}", 1, left) for number in range(WORKERS)]
        return _in_threads(steps, seconds)


def wald_loop(root: str, group: str, left: int, seconds: float) -> float:
    return asyncio.run(_wald_loop(root, group, left, seconds))


async def _wald_loop(root: str, group: str, left: int, seconds: float) -> float:
    answered = 0

    async def run(work: aio.WorkGroup, worker: str, end: float) -> None:
        nonlocal answered
        done: list[int] = []
        while time.perf_counter() < end and work.floor < left:
            got = await work.lease(worker, 1, wait=_PATIENCE_SECONDS, done=done)
            done = [delivery.record.sequence for delivery in got]
            answered += len(got)

    async with aio.WorkGroup(root, ROUTE, group) as work:
        began = time.perf_counter()
        await asyncio.gather(*(run(work, f"worker-{number}", began + seconds) for number in range(WORKERS)))
        return answered / (time.perf_counter() - began)


def _wald_step(work: wald.WorkGroup, worker: str, records: int, left: int) -> Step:
    done: list[int] = []

    def step() -> int:
        nonlocal done
        if work.floor >= left:
            return 0
        got = work.lease(worker, records, wait=_PATIENCE_SECONDS, done=done)  # as Redis gets both in one write
        done = [delivery.record.sequence for delivery in got]
        return len(got)

    return step


def redis_threads(address: Address, group: str, left: int, seconds: float) -> float:
    with connected(address) as connection:
        new_group(connection, group)
    return _in_threads([_redis_step(connected(address), group, left // WORKERS) for _ in range(WORKERS)], seconds)


def redis_loop(address: Address, group: str, left: int, seconds: float) -> float:
    connections: dict[int, socket.socket] = {}
    poller = select.epoll()
    read, acknowledge = read_command(group.encode(), 1), _acknowledging(group)
    for _ in range(WORKERS):
        connection = connected(address)
        connections[connection.fileno()] = connection
        poller.register(connection, select.EPOLLIN)
    new_group(connection, group)
    for connection in connections.values():
        connection.sendall(command(b"PING") + read)  # a PING is answered by one line, as an acknowledgement is
    answered = -WORKERS
    began = time.perf_counter()
    while (now := time.perf_counter()) < began + seconds and answered + 2 * WORKERS < left:
        for descriptor, _ in poller.poll():
            lines = _reply(connections[descriptor])
            connections[descriptor].sendall(acknowledge(lines) + read)
            answered += 1
    return answered / (now - began)


def _redis_step(connection: socket.socket, group: str, left: int) -> Step:
    read, acknowledge = read_command(group.encode(), 1), _acknowledging(group)
    connection.sendall(command(b"PING") + read)

    def step() -> int:
        nonlocal left
        left -= 1
        if left <= 0:
            return 0
        connection.sendall(acknowledge(_reply(connection)) + read)
        return 1

    return step


def _reply(connection: socket.socket) -> list[bytes]:
    """Receive the answer to an acknowledgement and a record, which Redis sends with one write."""
    data = connection.recv(1 << 16)
    while data.count(b"\n") < _ACK_AND_RECORD:
        more = connection.recv(1 << 16)
        assert more, data
        data += more
    lines = data.split(b"\r\n")
    assert lines[0] in (b":1", b"+PONG"), data
    assert len(lines) == _ACK_AND_RECORD + 1, data
    return lines


def _acknowledging(group: str) -> Callable[[list[bytes]], bytes]:
    name, route = group.encode(), ROUTE.encode()
    begin = b"*4\r\n$4\r\nXACK\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n" % (len(route), route, len(name), name)
    return lambda lines: begin + b"%s\r\n%s\r\n" % (lines[7], lines[8])


def _in_threads(steps: list[Step], seconds: float) -> float:
    """Return the records per second of all threads together."""
    done = [0] * len(steps)
    begin = threading.Barrier(len(steps) + 1)
    end = 0.0

    def run(number: int, step: Step) -> None:
        begin.wait()
        while time.perf_counter() < end and (some := step()):
            done[number] += some

    threads = [threading.Thread(target=run, args=each) for each in enumerate(steps)]
    for thread in threads:
        thread.start()
    began = time.perf_counter()
    end = began + seconds
    begin.wait()
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - began)


def _hundred(kind: str, address: Address, name: str, left: int, seconds: float) -> float:
    return records_per_second(SERVERS[kind](address).worker(name, left), seconds)


def main(address: str, kind: str, what: str, *words: str) -> None:
    if what == "fill":
        path, records = words
        with Path(path).open("rb") as file:
            QUEUES[kind](address_of(address)).fill([line[:-1] for line in islice(file, int(records))])
        return
    name, left, seconds = words[0], int(words[1]), float(words[2])
    if kind == "wald":
        ours = {"hundred": wald_hundred, "threads": wald_threads, "loop": wald_loop}
        print(ours[what](address, name, left, seconds))
    elif what == "hundred":
        print(_hundred(kind, address_of(address), name, left, seconds))
    else:
        print((redis_threads if what == "threads" else redis_loop)(address_of(address), name, left, seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
