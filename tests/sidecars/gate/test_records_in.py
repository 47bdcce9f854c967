"""Posted records are in the log once answered, in each format and compression; errors name the cause."""

from __future__ import annotations

import gzip
import json
import signal
import threading
from pathlib import Path

import pytest
import zstandard
from gating import Gate
from running import Daemon

import wald

ORDERS = "/v1/routes/orders/records"
NDJSON = "application/x-ndjson"


def values(root: Path) -> list[bytes]:
    return [record.value for record in wald.open(root).records("orders")]


@pytest.mark.parametrize("body", [b"one\ntwo\n", b"one\ntwo"])
def test_each_line_of_text_is_a_record(gate: Gate, root: Path, body: bytes) -> None:
    answer = gate.post(ORDERS, body)

    assert (answer.status, answer.json()) == (200, {"first": 1, "last": 2, "count": 2})
    assert values(root) == [b"one", b"two"]


def test_a_body_of_bytes_is_one_record(gate: Gate, root: Path) -> None:
    value = bytes(range(256)) * 1000

    assert gate.post(ORDERS, value, "application/octet-stream").json() == {"first": 1, "last": 1, "count": 1}
    assert values(root) == [value]


def test_objects_have_keys_headers_and_times(gate: Gate, root: Path) -> None:
    sent = [
        {"value": "a", "key": "k", "headers": {"from": "web"}, "time": "2026-11-21T10:00:00Z"},
        {"value_base64": "/wo=", "not_before": 1795471200000000000},
    ]

    gate.post(ORDERS, b"".join(json.dumps(each).encode() + b"\n" for each in sent), NDJSON)

    first, second = wald.open(root).records("orders")
    assert (first.value, first.key, first.headers) == (b"a", b"k", b'{"from":"web"}')
    assert first.event_time_ns == 1795255200 * 10**9
    assert second.value == b"\xff\n"
    assert b"1795471200000000000" in (second.headers or b"")


@pytest.mark.parametrize("media_type", ["application/ndjson", "application/jsonl", "application/x-ndjson"])
def test_lines_of_json_have_several_names(gate: Gate, root: Path, media_type: str) -> None:
    assert gate.post(ORDERS, b'{"value": "a"}\n{"value": "b"}\n', media_type).json()["count"] == 2
    assert values(root) == [b"a", b"b"]


@pytest.mark.parametrize(
    ("body", "stored"),
    [
        (b' {\n "value": "a",\r\n "key": "k"\n}\n', [b"a"]),
        (b'[\n  {"value": "a"},\n  {"value": {"n":\n1.10}}\n]', [b"a", b'{"n": 1.10}']),
    ],
)
def test_a_json_document_is_one_object_or_an_array_of_them(
    gate: Gate, root: Path, body: bytes, stored: list[bytes]
) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "x-gzip"}

    assert gate.ask("POST", ORDERS, gzip.compress(body), headers).json()["count"] == len(stored)
    assert values(root) == stored


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[]", 400),
        (b"", 400),
        (b'{"value": 1} {"value": 2}', 400),
        (b'[{"value": 1}', 400),
        (b'[{"value": NaN}]', 400),
        (b"[" * 100_000, 400),
        (b'{"value": "' + b"x" * (4 << 20) + b'"}', 413),
    ],
    ids=["empty array", "nothing", "two", "cut off", "NaN", "deep", "large"],
)
def test_of_a_json_document_that_is_wrong_nothing_is_stored(gate: Gate, root: Path, body: bytes, status: int) -> None:
    assert gate.post(ORDERS, body, "application/json").status == status
    assert values(root) == []


def test_json_is_stored_as_it_was_sent_and_lines_of_white_space_are_passed_over(gate: Gate, root: Path) -> None:
    sent = [b'{"price": 1.10, "id":12345678901234567890123}', b"null", b"1E5", b'"text"']

    answer = gate.post(ORDERS, b"\n".join(b'{"value": %s}\n \r' % each for each in sent) + b"\n\n", NDJSON)

    assert answer.json() == {"first": 1, "last": 4, "count": 4}
    assert values(root) == [*sent[:3], b"text"]
    nothing = gate.post(ORDERS, b"\n\n", NDJSON)
    assert (nothing.status, nothing.json()["detail"]) == (400, "the body has no record")


VALUES = [b'{"price": 1.10, "id":12345678901234567890123}', b"[1, 2]", b"null", b"1E5", b'{"value": "a"}']


@pytest.mark.parametrize(
    ("media_type", "body"),
    [
        (NDJSON, b"\n".join([*VALUES, b' "text"\r', b" ", b""])),
        ("application/json", b"[" + b",\n".join([*VALUES, b'"text"']) + b"]"),
    ],
)
def test_with_as_value_each_json_value_is_that_of_a_record(
    gate: Gate, root: Path, media_type: str, body: bytes
) -> None:
    assert gate.post(f"{ORDERS}?as=value", body, media_type).json()["count"] == 6

    assert values(root) == [*VALUES, b"text"]
    records = gate.get(ORDERS).lines()
    assert not any({"key", "headers", "event_time_ns"} & record.keys() for record in records)


@pytest.mark.parametrize(
    ("line", "detail"),
    [
        (b'1, "key": "x"', "the body:2: not JSON (Extra data: column 2)"),
        (b'{"a": 1}} ', "the body:2: not JSON (Extra data: column 9)"),
        (b"NaN", "the body:2: not JSON (NaN is not a JSON value)"),
        (b"text", "the body:2: not JSON (Expecting value: column 1)"),
        (b'"\\ud800"', "the body:2: value contains half of a surrogate pair"),
    ],
)
def test_with_as_value_a_line_of_anything_else_is_refused(gate: Gate, root: Path, line: bytes, detail: str) -> None:
    answer = gate.post(f"{ORDERS}?as=value", b"1\n%b\n3\n" % line, NDJSON)

    assert (answer.status, answer.json()["detail"]) == (400, detail)
    assert values(root) == [b"1"]


@pytest.mark.parametrize("media_type", ["text/plain", "application/octet-stream"])
def test_as_value_is_for_json(gate: Gate, root: Path, media_type: str) -> None:
    answer = gate.post(f"{ORDERS}?as=value", b"1\n", media_type)

    assert (answer.status, answer.json()["detail"]) == (400, f"as=value is not for {media_type}")
    assert values(root) == []


def test_what_is_no_json_is_said_with_its_line(gate: Gate, root: Path) -> None:
    answer = gate.post(ORDERS, b'{"value": "a"}\n{"value": [Infinity]}\n', NDJSON)

    assert (answer.status, answer.json()["detail"]) == (400, "the body:2: not JSON (Infinity is not a JSON value)")
    assert values(root) == [b"a"]


@pytest.mark.parametrize("packed", [("gzip", gzip.compress), ("zstd", zstandard.compress)])
def test_a_compressed_body_is_what_it_was_before(gate: Gate, root: Path, packed: tuple[str, type]) -> None:
    encoding, compress = packed
    lines = [b"line %d" % number for number in range(100_000)]
    body = compress(b"\n".join(lines))

    answer = gate.ask("POST", ORDERS, body, {"Content-Type": "text/plain", "Content-Encoding": encoding})

    assert answer.json()["count"] == len(lines)
    assert values(root) == lines


def test_a_wrong_line_says_what_is_stored_before_it(gate: Gate, root: Path) -> None:
    answer = gate.post(ORDERS, b'{"value": "a"}\n{"valeu": "b"}\n', NDJSON)

    assert answer.status == 400
    assert answer.json()["stored"] == {"first": 1, "last": 1, "count": 1}
    assert "the body:2: unknown field 'valeu'" in answer.json()["detail"]
    assert values(root) == [b"a"]


@pytest.mark.parametrize(
    ("route", "media_type", "body", "status", "code"),
    [
        ("nowhere", "text/plain", b"x\n", 404, "not-found"),
        ("%2e%2e", "text/plain", b"x\n", 400, "invalid"),
        ("orders", "text/html", b"x\n", 415, "media-type"),
        ("orders", "text/plain", b"", 400, "invalid"),
    ],
)
def test_what_is_not_taken(gate: Gate, route: str, media_type: str, body: bytes, status: int, code: str) -> None:
    answer = gate.post(f"/v1/routes/{route}/records", body, media_type)

    assert (answer.status, answer.json()["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"]


@pytest.mark.parametrize(
    ("charset", "status"),
    [("; charset=UTF-8", 200), (';CHARSET="us-ascii"', 200), ("; charset=ISO-8859-1", 415), ("; a=b; charset=x", 415)],
)
def test_text_is_utf_8_or_it_is_refused(gate: Gate, root: Path, charset: str, status: int) -> None:
    answer = gate.post(ORDERS, "grün\n".encode("latin-1"), f"text/plain{charset}")

    assert answer.status == status
    assert len(values(root)) == (status == 200)
    if status != 200:
        assert (answer.json()["code"], answer.json()["hint"]) == ("charset", "iconv -t UTF-8")


def test_the_hint_says_what_to_do_about_a_size_or_a_type(daemon: Daemon, tmp_path: Path) -> None:
    config = tmp_path / "gate.toml"
    config.write_text("[limits]\nrecord_max_bytes = 100\n")
    with Gate(daemon.root, "--config", config) as gate:
        for media_type in ("text/plain", "application/octet-stream"):
            answer = gate.post(ORDERS, b"x" * 101, media_type)
            assert (answer.status, "record_max_bytes in [limits]" in answer.json()["hint"]) == (413, True)
        answer = gate.post(ORDERS, b"x\n", "application/x-www-form-urlencoded")
        assert (answer.status, "'Content-Type: text/plain' --data-binary" in answer.json()["hint"]) == (415, True)


def test_a_request_outlives_a_daemon_that_is_killed(gate: Gate, daemon: Daemon, root: Path) -> None:
    """The request waits for the next daemon, and records that the first may have stored are stored once."""
    gate.post(ORDERS, b"first\n")
    daemon.process.send_signal(signal.SIGSTOP)
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.append(gate.post(ORDERS, b"second\n").status))
    asking.start()
    daemon.kill()
    daemon.start_again()
    asking.join()

    assert answers == [200]
    assert values(root) == [b"first", b"second"]
