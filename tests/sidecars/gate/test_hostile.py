"""Malformed and hostile requests are answered as RFC 9110 and 9112 require, or the connection is closed.

After each of them the next connection works, no unwanted record is stored, and stderr has no traceback.
"""

import gzip
import re
import zlib
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from select import select

import pytest
import zstandard
from gating import NDJSON, ORDERS, TEXT, Gate, received, serving
from running import eventually

import wald

PATH = ORDERS.encode()


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gate shared by all tests; each test finds its own records by the head of the log."""
    limits = '[limits]\nhead_timeout = "0.5s"\nbody_timeout = "0.5s"\nidle_timeout = "0.5s"\n'
    with serving(tmp_path_factory.mktemp("hostile") / "log", config=limits) as gate:
        gate.daemon.ask("PUB orders 6\nfirst")
        yield gate


def statuses(gate: Gate, sent: bytes) -> list[int]:
    """Return the status codes of all responses until the gate closes the connection or stays silent."""
    with gate.connect() as connection:
        with suppress(ConnectionError):  # the gate may close before it has read everything
            connection.sendall(sent)
        answers = received(connection)
    return [int(status) for status in re.findall(rb"(?:\A|\n|\})HTTP/1\.1 (\d{3}) ", answers)]


def statuses_of(gate: Gate, requests: Collection[bytes]) -> list[list[int]]:
    """Send requests over concurrent connections, some open until a timeout; return the statuses of each."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(partial(statuses, gate), requests))


def request(*lines: bytes, method: bytes = b"POST", path: bytes = PATH, body: bytes = b"") -> bytes:
    head = (method + b" " + path + b" HTTP/1.1", b"Host: localhost", b"Content-Type: text/plain", *lines)
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def stored(gate: Gate) -> list[bytes]:
    return [record.value for record in wald.open(gate.root).records("orders")]


def nested(times: int, data: bytes) -> bytes:
    for _ in range(times):
        data = gzip.compress(data, mtime=0)
    return data


LENGTH = b"Content-Length: 5"
CHUNKED = b"Transfer-Encoding: chunked"
SMUGGLED = b"GET /v1/head HTTP/1.1\r\nHost: localhost\r\n\r\n"
UPGRADE = b"Connection: Upgrade"
evil = partial(request, b"Content-Length: 5", body=b"evil\n")
chunked = partial(request, body=b"5\r\nevil\n\r\n0\r\n\r\n")
ROUTES = (
    "%2e%2e .. %2e%2e%2forders orders%00 orders%2f.. %c0%ae%c0%ae orders%0a %ff % %zz orders;x %u002e orders%20 "
    "ORDERS/../orders"
)
REFUSED = {
    "chunk size that is no number": request(CHUNKED, body=b"zz\r\nevil\n\r\n0\r\n\r\n"),
    "chunk size beyond 64 bits": request(CHUNKED, body=b"fffffffffffffffff1\r\nevil\n"),
    "negative chunk size": request(CHUNKED, body=b"-5\r\nevil\n\r\n0\r\n\r\n"),
    "chunk without its line end": request(CHUNKED, body=b"4\r\nevil\n0\r\n\r\n"),
    "length and chunks": chunked(b"Content-Length: 5", CHUNKED),
    "chunks and length": chunked(CHUNKED, b"Content-Length: 5"),
    "two lengths": request(b"Content-Length: 5", b"Content-Length: 6", body=b"evil\n\n"),
    "two lengths in one": request(b"Content-Length: 5, 6", body=b"evil\n\n"),
    "length that is no number": request(b"Content-Length: five", body=b"evil\n"),
    "negative length": request(b"Content-Length: -5", body=b"evil\n"),
    "length with a sign": request(b"Content-Length: +5", body=b"evil\n"),
    "length beyond 64 bits": request(b"Content-Length: 99999999999999999999999", body=b"evil\n"),
    "unknown transfer coding": chunked(b"Transfer-Encoding: xchunked"),
    "chunked that is not last": chunked(b"Transfer-Encoding: chunked, gzip"),
    "another coding in chunks": chunked(b"Transfer-Encoding: gzip, chunked"),
    "another coding in a header of its own": chunked(b"Transfer-Encoding: gzip", CHUNKED),
    "folded header": evil(b"X-A: b\r\n  folded"),
    "NUL in a value": evil(b"X-A: b\0c"),
    "NUL in a name": evil(b"X\0A: b"),
    "space before the colon": request(b"Content-Length : 5", body=b"evil\n"),
    "header without a colon": evil(b"nothing"),
    "bare CR in a value": evil(b"X-A: b\rContent-Length: 0"),
    "two hosts": request(b"Host: evil.example", b"Content-Length: 5", body=b"evil\n"),
    "no host": evil().replace(b"Host: localhost\r\n", b""),
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /healthz\r\n\r\n",
    "HTTP/0.9 with its version": b"GET /healthz HTTP/0.9\r\n\r\n",
    "HTTP/2.0": b"GET /healthz HTTP/2.0\r\n\r\n",
    "unknown version": evil().replace(b"HTTP/1.1", b"HTTP/7.3"),
    "no method": b"\0\1\2\3\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "CONNECT": b"CONNECT localhost:22 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "CONNECT to a path": request(method=b"CONNECT"),
    "length and chunks, and another protocol": chunked(UPGRADE, b"Upgrade: h2c", b"Content-Length: 5", CHUNKED),
    "another protocol and no host": evil(UPGRADE, b"Upgrade: h2c").replace(b"Host: localhost\r\n", b""),
    "TRACE": request(method=b"TRACE"),
    "a method of nobody": b"EVIL " + PATH + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "OPTIONS of all": b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a very long path": request(method=b"GET", path=b"/" + b"a" * 100_000),
    "a very long route": evil(path=b"/v1/routes/" + b"a" * 10_000 + b"/records"),
    "10,000 headers": request(*(b"X-%d: y" % number for number in range(10_000)), b"Content-Length: 5", body=b"evil\n"),
    "one huge header": request(b"X: " + b"y" * 100_000, b"Content-Length: 5", body=b"evil\n"),
    **{f"route {name}": evil(path=f"/v1/routes/{name}/records".encode()) for name in ROUTES.split()},
}


def test_it_is_refused_and_nothing_of_it_is_stored(attacked: Gate) -> None:
    before = stored(attacked)
    for name, found in zip(REFUSED, statuses_of(attacked, REFUSED.values()), strict=True):
        assert len(found) <= 1, (name, found)
        assert all(400 <= status < 500 or status == 501 for status in found), (name, found)
    assert stored(attacked) == before
    assert attacked.get("/v1/head").status == 200


def test_what_is_left_of_the_body_of_a_refused_request_is_no_request(attacked: Gate) -> None:
    """The gate answers the following request or none, but never a request embedded in the body."""
    following = b"GET /v1/nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    for refused in (
        request(b"Content-Length: 60", path=b"/v1/routes/%2e%2e/records", body=SMUGGLED[:60].ljust(60)),
        request(CHUNKED, b"Content-Encoding: nonsense", body=b"%x\r\n%s\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED)),
        request(b"Content-Length: 500", b"Content-Encoding: gzip", body=SMUGGLED.ljust(500)),
    ):
        found = statuses(attacked, refused + following)
        assert found in ([found[0]], [found[0], 404])
        assert 400 <= found[0] < 500


def test_a_request_behind_a_refused_one_does_not_keep_the_connection_open(attacked: Gate) -> None:
    with attacked.connect(request(b"Host: other") + SMUGGLED) as connection:
        while connection.recv(1 << 16):  # until the gate sends nothing more; it still reads
            pass

        eventually(lambda: attacked.metric('wald_gate_connections{state="busy"}') == 1)


def test_a_request_with_an_invalid_body_is_answered_once_even_if_its_body_does_not_matter(attacked: Gate) -> None:
    with attacked.connect(request(CHUNKED, method=b"GET", path=b"/v1/head", body=b"zz\r\n")) as connection:
        answer = received(connection)
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert answer.count(b"HTTP/1.1") == 1
        assert attacked.get("/v1/head").status == 200


def test_a_body_of_blank_lines_does_not_keep_others_waiting(attacked: Gate) -> None:
    """The other request is sent later, and answered earlier."""
    blank = gzip.compress(b"\n" * (32 << 20))
    lines = b"Content-Encoding: gzip", b"Content-Length: %d" % len(blank)
    sent = request(*lines, body=blank).replace(b"text/plain", NDJSON.encode())
    with attacked.connect() as long, attacked.connect() as other:
        long.sendall(sent)
        other.sendall(SMUGGLED)
        assert other.recv(1 << 16).startswith(b"HTTP/1.1 200 OK\r\n")
        assert select([long], [], [], 0)[0] == []
        assert long.recv(1 << 16).startswith(b"HTTP/1.1 400 Bad Request\r\n")


def test_what_is_unusual_but_right_is_answered(attacked: Gate) -> None:
    cases = [
        (SMUGGLED * 3, [200] * 3),
        (b"GET http://localhost/v1/head HTTP/1.1\r\nHost: localhost\r\n\r\n", [200]),
        (b"GET http://localhost HTTP/1.1\r\nHost: localhost\r\n\r\n", [200]),
        (b"GET /v1/head HTTP/1.0\r\nHost: localhost\r\n\r\n", [200]),
        (request(UPGRADE, b"Upgrade: websocket", method=b"GET", path=b"/v1/head"), [200]),
        (request(UPGRADE, b"Upgrade: x", method=b"GET", path=b"/v1/head") + SMUGGLED, [200, 200]),
        (request(UPGRADE, b"Upgrade: h2c", b"Content-Length: 3", body=b"ok\n") + SMUGGLED, [200, 200]),
        (request(UPGRADE, b"Upgrade: h2c", b"Content-Length: 3", body=b"ok\n") * 3, [200] * 3),
        (request(UPGRADE, b"Upgrade: h2c", CHUNKED, body=b"3\r\nok\n\r\n0\r\n\r\n") + SMUGGLED, [200, 200]),
        (request(b"Connection: close, Upgrade", b"Upgrade: h2c", b"Content-Length: 3", body=b"ok\n") + SMUGGLED, [200]),
        (b"\r\n\r\n" + SMUGGLED, [200]),
        (request(b"Expect: 100-continue", b"Content-Length: 3", body=b"ok\n"), [100, 200]),
        (request(b"Expect: 100-continue", b"Content-Length: 3", body=b"ok\n").replace(b"/1.1", b"/1.0"), [200]),
        (request(b"Content-Length: 3", b"Content-Length: 3", body=b"ok\n"), [400]),
        (SMUGGLED + b"GET /he", [200, 408]),
        (request(b"Transfer-Encoding: Chunked", body=b"3;x=y\r\nok\n\r\n0\r\nX-Trailer: a\r\n\r\n"), [200]),
    ]
    found = statuses_of(attacked, [sent for sent, _ in cases])

    assert list(zip(cases, found, strict=True)) == [((sent, expected), expected) for sent, expected in cases]
    assert "WebSocket" not in attacked.log


def test_a_trailer_may_end_the_connection(attacked: Gate) -> None:
    with attacked.connect() as connection:
        connection.sendall(request(CHUNKED, body=b"3\r\nok\n\r\n0\r\nConnection: close\r\n\r\n") + SMUGGLED)
        answer = received(connection)

    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nconnection: close\r\n" in answer


@pytest.mark.parametrize("length", [b"Content-Length: %d" % len(SMUGGLED), CHUNKED])
def test_the_body_of_who_asks_for_another_protocol_is_no_request(attacked: Gate, length: bytes) -> None:
    """The body arrives after its head in a separate packet and is stored unchanged."""
    body = SMUGGLED if length is not CHUNKED else b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED)
    before = len(stored(attacked))
    with attacked.connect(request(UPGRADE, b"Upgrade: h2c", b"Expect: 100-continue", length)) as connection:
        assert connection.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"  # the head is accepted
        connection.sendall(body)
        answer = received(connection)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answer.count(b"HTTP/1.1") == 1

    assert stored(attacked)[before:] == SMUGGLED.removesuffix(b"\n").split(b"\n")


WIDE = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
UNPACKABLE = [
    ("gzip", nested(1, b"evil\n")[:-4]),
    ("gzip", nested(1, b"evil\n")[:-8] + bytes(8)),
    ("gzip", b"evil"),
    ("gzip", nested(1, b"") + b"garbage"),
    ("deflate", zlib.compress(b"evil\n")),
    ("br", b"evil\n"),
    ("gzip, gzip", nested(2, b"evil\n")),
    ("zstd", zstandard.compress(b"evil\n")[:-2]),
    ("zstd", b"evil"),
    ("zstd", zstandard.ZstdCompressor(compression_params=WIDE).compressobj().compress(b"evil\n") + b"\0"),
]
LINES = [
    b"[" * 100_000,
    b'{"value": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"value": "evil", "not_before": ' + b"9" * 5000 + b"}",
    b'{"value": "evil", "not_before": NaN}',
    b'{"value": "evil", "not_before": 1e999}',
    b'{"value": "ev\xffil"}',
    b'{"value": "\\ud800"}',
    b'{"value_base64": "!!!!"}',
    b'{"value": "evil", "headers": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    b'"evil"',
    b"null",
    b'{"value": "evil"} {"value": "evil"}',
]
JSONS = [b"{", b"[" * 100_000, b'{"sequence": 1, "sequence": 2}', b'{"sequence": 1e400}', b'{"sequence": NaN}']
JSONS += [b'{"sequence": ' + b"9" * 5000 + b"}", b'{"sequence": true}', b"\xff", b'{"sequence": 1.5}', b""]


def test_a_body_that_cannot_be_decompressed_or_parsed_is_refused(attacked: Gate) -> None:
    before = stored(attacked)
    for encoding, body in UNPACKABLE:
        answer = attacked.ask("POST", ORDERS, body, {"Content-Type": TEXT, "Content-Encoding": encoding})
        assert answer.status in (400, 413, 415), answer.body
    for line in LINES:
        answer = attacked.post(ORDERS, line + b"\n", NDJSON)
        assert answer.status == 400, answer.body
    for body in JSONS:
        assert attacked.ask("PUT", "/v1/routes/orders/cursors/evil", body).status in (200, 400, 409)
    assert stored(attacked) == before


def test_methods_that_a_path_has_not_are_refused_and_those_that_it_has_named(attacked: Gate) -> None:
    for method in ("HEAD", "OPTIONS", "DELETE", "PATCH"):
        answer = attacked.ask(method, "/v1/cut")
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert attacked.ask("DELETE", "/v1/routes/orders/cursors/billing").headers["allow"] == "GET, HEAD, PUT"
    answer = attacked.ask("HEAD", "/v1/head")
    assert (answer.status, answer.body) == (200, b"")
    with attacked.connect() as connection:  # HEAD of a stream ends with its headers
        connection.sendall(request(method=b"HEAD", path=PATH + b"?follow=1"))
        connection.sendall(request(b"Connection: close", method=b"GET", path=b"/healthz"))
        assert received(connection).count(b"HTTP/1.1 200 OK") == 2
