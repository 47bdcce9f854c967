"""Workers of wald or of another queue, in a process of their own.

A hundred records at a time by one worker, or one record at a time by 64. For Redis the 64 are either threads with a
connection each, or connections of one loop. The loop is the better one for Redis: 64 threads spend most of their time
on the interpreter lock. Run as a program:

    workers ADDRESS KIND hundred NAME LEFT SECONDS    prints records per second; LEFT: how many records there are
    workers ADDRESS KIND threads NAME LEFT SECONDS    64 threads
    workers ADDRESS KIND loop NAME LEFT SECONDS       64 tasks; of Redis 64 connections
    workers ADDRESS KIND fill FILE RECORDS            puts the first lines of FILE there

KIND is wald, gate, redis, nats or beanstalkd; NAME that of a new group. ADDRESS is a root, a socket, or HOST:PORT.
"""

from __future__ import annotations

import asyncio
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import wald
from benchmarks.brokers import Address, address_of, connected
from benchmarks.queues import (
    BATCH,
    Beanstalkd,
    Gate,
    Nats,
    Redis,
    Step,
    command,
    new_group,
    read_command,
    records_per_second,
)
from benchmarks.stage import ROUTE
from wald import aio

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
    """The answer to an acknowledgement and a record, which Redis sends with one write."""
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
    """Records per second of all together."""
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
