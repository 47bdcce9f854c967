"""Posted records are in the log once answered, in each format and compression; errors name the cause."""

import gzip
import json
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import zstandard
from contents import values
from gating import JSON, NDJSON, ORDERS, TEXT, Gate, serving
from running import Daemon, eventually

import wald

BYTES = "application/octet-stream"
LIMIT = 100
VALUES = [b'{"price": 1.10, "id":12345678901234567890123}', b"[1, 2]", b"null", b"1E5", b'{"value": "a"}']
Stored = Callable[[], list[bytes]]


def test_the_records_of_a_body_are_stored_in_the_way_of_its_media_type(shared: Gate, stored: Stored) -> None:
    binary = bytes(range(256)) * 1000
    for media_type, body, expected in (
        (TEXT, b"one\ntwo\n", [b"one", b"two"]),
        (TEXT, b"one\ntwo", [b"one", b"two"]),
        (BYTES, binary, [binary]),
        *(
            (each, b'{"value": "a"}\n{"value": "b"}\n', [b"a", b"b"])
            for each in ("application/ndjson", "application/jsonl", NDJSON)
        ),
        # White space between objects is skipped, and JSON is stored unchanged.
        (NDJSON, b"\n".join(b'{"value": %s}\n \r' % each for each in VALUES) + b"\n\n", VALUES),
    ):
        answer = shared.post(ORDERS, body, media_type)
        said = answer.json()
        assert (answer.status, said["count"]) == (200, len(expected))
        assert said["last"] == said["first"] + said["count"] - 1
        assert stored() == expected


def test_objects_have_keys_headers_and_times(gate: Gate) -> None:
    sent = [
        {"value": "a", "key": "k", "headers": {"from": "web"}, "time": "2026-11-21T10:00:00Z"},
        {"value_base64": "/wo=", "not_before": 1795471200000000000},
    ]
    answer = gate.post(ORDERS, b"".join(json.dumps(each).encode() + b"\n" for each in sent), NDJSON)

    assert answer.json() == {"first": 1, "last": 2, "count": 2}
    first, second = wald.open(gate.root).records("orders")
    assert (first.value, first.key, first.headers) == (b"a", b"k", b'{"from":"web"}')
    assert first.event_time_ns == 1795255200 * 10**9
    assert second.value == b"\xff\n"
    assert b"1795471200000000000" in (second.headers or b"")


def test_a_json_document_is_one_object_or_an_array_of_them_or_nothing_is_stored(shared: Gate, stored: Stored) -> None:
    for body, expected in (
        (b' {\n "value": "a",\r\n "key": "k"\n}\n', [b"a"]),
        (b'[\n  {"value": "a"},\n  {"value": {"n":\n1.10}}\n]', [b"a", b'{"n": 1.10}']),
    ):
        headers = {"Content-Type": JSON, "Content-Encoding": "x-gzip"}
        assert shared.ask("POST", ORDERS, gzip.compress(body), headers).json()["count"] == len(expected)
        assert stored() == expected
    invalid = (b"[]", b"", b'{"value": 1} {"value": 2}', b'[{"value": 1}', b'[{"value": NaN}]', b"[" * 100_000)
    for body in invalid:
        assert shared.post(ORDERS, body, JSON).status == 400, body[:50]
    assert shared.post(ORDERS, b'{"value": "' + b"x" * (4 << 20) + b'"}', JSON).status == 413
    assert stored() == []


def test_with_as_value_each_json_value_is_the_value_of_a_record(shared: Gate, stored: Stored) -> None:
    for media_type, body in (
        (NDJSON, b"\n".join([*VALUES, b' "text"\r', b" ", b""])),
        (JSON, b"[" + b",\n".join([*VALUES, b'"text"']) + b"]"),
    ):
        answer = shared.post(f"{ORDERS}?as=value", body, media_type).json()
        assert answer["count"] == 6
        assert stored() == [*VALUES, b"text"]
        records = shared.get(f"{ORDERS}?from={answer['first']}").lines()
        assert not any({"key", "headers", "event_time_ns"} & record.keys() for record in records)


def test_an_invalid_line_is_named_and_the_lines_before_it_are_stored(shared: Gate, stored: Stored) -> None:
    for query, line, detail in (
        ("", b'{"value": [Infinity]}', "the body:2: not JSON (Infinity is not a JSON value)"),
        ("", b'{"valeu": "b"}', "the body:2: unknown field 'valeu'"),
        ("?as=value", b'1, "key": "x"', "the body:2: not JSON (Extra data: column 2)"),
        ("?as=value", b'{"a": 1}} ', "the body:2: not JSON (Extra data: column 9)"),
        ("?as=value", b"NaN", "the body:2: not JSON (NaN is not a JSON value)"),
        ("?as=value", b"text", "the body:2: not JSON (Expecting value: column 1)"),
        ("?as=value", b'"\\ud800"', "the body:2: value contains half of a surrogate pair"),
    ):
        first = b"1" if query else b'{"value": "1"}'
        answer = shared.post(f"{ORDERS}{query}", b"%b\n%b\n%b\n" % (first, line, first), NDJSON)
        said = answer.json()
        assert (answer.status, said["stored"]["count"]) == (400, 1)
        assert said["detail"].startswith(detail), line
        assert stored() == [b"1"]


def test_a_compressed_body_is_decompressed(shared: Gate, stored: Stored) -> None:
    lines = [b"line %d" % number for number in range(100_000)]
    for encoding, compress in (("gzip", gzip.compress), ("zstd", zstandard.compress)):
        headers = {"Content-Type": TEXT, "Content-Encoding": encoding}
        answer = shared.ask("POST", ORDERS, compress(b"\n".join(lines)), headers)
        assert answer.json()["count"] == len(lines)
        assert stored() == lines


def test_refused_bodies_are_not_stored(shared: Gate, stored: Stored) -> None:
    for path, media_type, body, status, code in (
        ("nowhere/records", TEXT, b"x\n", 404, "not-found"),
        ("%2e%2e/records", TEXT, b"x\n", 400, "invalid"),
        ("orders/records", "text/html", b"x\n", 415, "media-type"),
        ("orders/records", TEXT, b"", 400, "invalid"),
        ("orders/records", NDJSON, b"\n\n", 400, "invalid"),
        ("orders/records?as=value", TEXT, b"1\n", 400, "invalid"),
        ("orders/records?as=value", BYTES, b"1\n", 400, "invalid"),
    ):
        answer = shared.post(f"/v1/routes/{path}", body, media_type)
        assert (answer.status, answer.json()["code"]) == (status, code), path
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["detail"]
    form = shared.post(ORDERS, b"x\n", "application/x-www-form-urlencoded")
    assert (form.status, "'Content-Type: text/plain' --data-binary" in form.json()["hint"]) == (415, True)
    assert stored() == []


def test_text_in_other_charsets_than_utf_8_is_refused(shared: Gate, stored: Stored) -> None:
    for charset, status in (
        ("; charset=UTF-8", 200),
        (';CHARSET="us-ascii"', 200),
        ("; charset=ISO-8859-1", 415),
        ("; a=b; charset=x", 415),
    ):
        answer = shared.post(ORDERS, "grün\n".encode("latin-1"), f"text/plain{charset}")
        assert answer.status == status
        assert len(stored()) == (status == 200)
        if status != 200:
            assert (answer.json()["code"], answer.json()["hint"]) == ("charset", "iconv -t UTF-8")


def test_a_request_outlives_a_daemon_that_is_killed(gate: Gate, daemon: Daemon) -> None:
    """The request waits for the next daemon, and records that the first may have stored are stored once."""
    gate.post(ORDERS, b"first\n")
    daemon.process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(gate.post, ORDERS, b"second\n")
        eventually(lambda: gate.metric('wald_gate_connections{state="busy"}') == 2)
        daemon.kill()
        daemon.start_again()
        assert answer.result().status == 200
    assert gate.metric("wald_gate_repeated_requests_total") >= 1
    assert values(gate.root, "orders") == [b"first", b"second"]


def test_a_record_longer_than_the_limit_is_refused_however_its_body_is_split_and_one_as_long_is_stored(
    root: Path,
) -> None:
    with serving(root, config=f"[limits]\nrecord_max_bytes = {LIMIT}\n") as strict:
        lengths = (LIMIT + 1, 1000, 131_071, 131_072, 131_073, 200_000)
        befores, ends = (b"", b"a\n", b"%s\n" % (b"b" * LIMIT) * 3), (b"", b"\n", b"\nc\n")
        for length, before, end in product(lengths, befores, ends):
            answer = strict.post(ORDERS, before + b"x" * length + end)
            assert (answer.status, answer.json()["code"]) == (413, "too-large"), (length, before, end)
            assert "record_max_bytes in [limits]" in answer.json()["hint"]
        for media_type in (NDJSON, BYTES):
            assert strict.post(ORDERS, b'{"value": "%s"}' % (b"x" * LIMIT), media_type).status == 413
        headers = {"Content-Type": TEXT, "Idempotency-Key": "one"}
        assert strict.ask("POST", ORDERS, b"x" * (LIMIT + 1), headers).status == 413
        lines = [b"", b"y", b"x" * LIMIT, b"", b"z" * (LIMIT - 1)] * 1000 + [b"x" * LIMIT]
        for end in (b"", b"\n"):
            said = strict.post(ORDERS, b"\n".join(lines) + end).json()
            records = wald.open(strict.root).records("orders", start=said["first"], stop=said["last"])
            assert [record.value for record in records] == lines
