"""A client that follows a route over HTTP, and how long records take to it. Run as a program:

    followers GATE ADDRESS SECONDS    appends at ADDRESS, the gate or the daemon's socket; prints p50 and p99 in µs

One record is under way at a time. It is appended some time after the one before has come, up to 20 ms, so that a
follower cannot know when to look. The time ends when its event is there.
"""

from __future__ import annotations

import random
import socket
import sys
import time

from benchmarks.brokers import Address, address_of, connected

FOLLOWED = "followed"
"""The route."""
_PAUSE_SECONDS = 0.02
_PATIENCE_SECONDS = 10.0


def latencies(gate: Address, address: Address, seconds: float) -> list[float]:
    """Seconds of each record."""
    chance = random.Random(1)
    appending = connected(address)
    over_http = not isinstance(address, str)
    with _following(gate) as events:
        found: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            time.sleep(chance.uniform(0, _PAUSE_SECONDS))
            value = b"record %d" % len(found)
            began = time.perf_counter()
            appending.sendall(_request(value, over_http=over_http))
            _wait_for(events, b'"' + value + b'"')
            found.append(time.perf_counter() - began)
            _wait_for(appending, b"}" if over_http else b"\n")
    return found


def _following(gate: Address) -> socket.socket:
    events = connected(gate)
    events.settimeout(_PATIENCE_SECONDS)
    events.sendall(
        b"GET /v1/routes/%s/records?from=end&format=events HTTP/1.1\r\nHost: [::]\r\n\r\n" % FOLLOWED.encode()
    )
    _wait_for(events, b"nothing new")  # what it says as soon as it follows
    return events


def _request(value: bytes, *, over_http: bool) -> bytes:
    if not over_http:
        return b"PUB %s %d\n%s\n" % (FOLLOWED.encode(), len(value) + 1, value)
    head = "POST /v1/routes/%s/records HTTP/1.1\r\nHost: [::]\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n"
    return (head % (FOLLOWED, len(value))).encode() + value


def _wait_for(connection: socket.socket, text: bytes) -> None:
    data = b""
    while text not in data:
        more = connection.recv(1 << 16)
        assert more, data
        data += more


if __name__ == "__main__":
    gate, address, seconds = sys.argv[1:]
    times = sorted(latencies(address_of(gate), address_of(address), float(seconds)))
    print(1e6 * times[len(times) // 2], 1e6 * times[len(times) * 99 // 100])
