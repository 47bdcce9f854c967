"""Logs for the measurements on Spark, each written by a daemon and then sealed to its last segment."""

from __future__ import annotations

import random
import subprocess
from itertools import cycle
from pathlib import Path

import wald
from benchmarks.stage import ROUTE, Daemon, in_python
from wald.format.records import encode_columns
from wald.log import Log

SEGMENT_BYTES = 64 << 20
ROUTES = 100
QUIET = "quiet"
_BLOCK_BYTES = 32 << 20  # generated once and repeated; tasks and frames are smaller, so repetition does not help
_KEYS = 200_000
_REQUEST_BYTES = 96 << 10
_QUIET_TIMES = 10
_PART_LINES = "64m"


def json_lines(length: int = _BLOCK_BYTES) -> bytes:
    """About so many bytes of JSON objects, 160 bytes each."""
    chance = random.Random(4)
    hosts = [f"host{number:03d}.example.org" for number in range(200)]
    lines: list[str] = []
    written = 0
    while written < length:
        at = f"10:{chance.randrange(60):02d}:{chance.randrange(60):02d}"
        status, amount = chance.choice((200, 200, 200, 304, 404, 500)), chance.uniform(0, 1000)
        line = (
            f'{{"time":"2026-11-21T{at}Z","host":"{chance.choice(hosts)}","status":{status},"amount":{amount:.3f},'
            f'"user":{chance.randrange(10**6)},"path":"/api/v1/{chance.getrandbits(32):x}"}}\n'
        )
        lines.append(line)
        written += len(line)
    return "".join(lines).encode()


def write_lines(path: Path, length: int) -> int:
    """A file of about ``length`` bytes of JSON lines; returns how many lines."""
    block, written, lines = json_lines(min(length, _BLOCK_BYTES)), 0, 0
    with path.open("wb") as file:
        while written < length:
            written += file.write(block)
            lines += block.count(b"\n")
    return lines


def log_of_lines(root: Path, data: Path, lines: int) -> Log:
    """Every line of ``data`` on one route, through its FIFO."""
    with Daemon(root, segment_max_bytes=SEGMENT_BYTES) as daemon:
        daemon.feed(data, lines)
    return sealed(root)


def text_of_lines(place: Path, data: Path) -> Path:
    """The same lines as Spark reads them by itself: ``.zst`` files of 64 MiB each."""
    place.mkdir()
    command = ["split", "-C", _PART_LINES, "--filter", 'zstd -3 -q > "$FILE.zst"', data, place / "part-"]
    subprocess.run(command, check=True)
    return place


def log_of_keys(root: Path, length: int) -> Log:
    """About so many bytes of keyed records: 200,000 keys in turn."""
    values = json_lines().splitlines()
    chance = random.Random(5)
    requests: list[bytes] = []
    for start in range(0, len(values) - 1000, 1000):
        part = values[start : start + 1000]
        keys = [b"user-%06d" % chance.randrange(_KEYS) for _ in part]
        requests.append(encode_columns(part, keys=keys))
    with Daemon(root, segment_max_bytes=SEGMENT_BYTES) as daemon, daemon.connect() as producer:
        sent = 0
        for payload in cycle(requests):
            producer.publish(ROUTE, payload, columns=True)
            sent += len(payload)
            if sent >= length:
                break
        producer.flush()
    return sealed(root)


def log_of_routes(root: Path, length: int) -> Log:
    """About so many bytes over 100 routes that take turns; one of them has ten short bursts, whatever the length."""
    block = json_lines()
    starts = range(0, len(block) - _REQUEST_BYTES, _REQUEST_BYTES)
    requests = [
        block[block.find(b"\n", start) + 1 : block.rfind(b"\n", 0, start + _REQUEST_BYTES) + 1] for start in starts
    ]
    with Daemon(root, segment_max_bytes=SEGMENT_BYTES) as daemon, daemon.connect() as producer:
        names = [f"busy-{number:02d}" for number in range(ROUTES - 1)]
        for name in (*names, QUIET):
            producer.command("ROUTE", "ADD", name)
        sent = bursts = 0
        for request, name in zip(cycle(requests), cycle([name for name in names for _ in range(10)]), strict=False):
            producer.publish(name, request)
            sent += len(request)
            if sent * _QUIET_TIMES >= length * bursts:
                producer.publish(QUIET, requests[bursts])
                bursts += 1
            if sent >= length:
                break
        producer.flush()
    return sealed(root)


def sealed(root: Path) -> Log:
    """The log, every segment of it sealed."""
    in_python("scan", root, "seal")
    return wald.open(root)
