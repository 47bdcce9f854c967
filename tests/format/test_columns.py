"""Records as columns and as JSON, and the header ``wald.not-before``."""

import json
import struct
from typing import Any

import pyarrow as pa
import pytest
from damage import every_flip, every_truncation, peak_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from wald.format.records import (
    NOT_BEFORE,
    BadColumns,
    BinaryColumn,
    Column,
    DecodedColumns,
    Record,
    decode_columns,
    encode_columns,
    first_headers,
    not_before,
    with_first_headers,
    with_not_before,
)

ENTRY = st.none() | st.binary(max_size=20)
TIME = st.integers(-(1 << 63), (1 << 63) - 1)
ROWS = st.lists(st.tuples(st.binary(max_size=20), ENTRY, ENTRY, TIME), max_size=40)
SMALL = encode_columns([b"one", b"", b"three"], keys=[b"k", None, b""], times_ns=[1, 2, 3], headers=[None, b"{}", None])


def model(columns: DecodedColumns) -> list[Any]:
    times, keys, headers = columns.times, columns.keys, columns.headers
    return [
        columns.values.to_list(),
        keys and keys.to_list(),
        headers and headers.to_list(),
        None if times is None else times.cast("q").tolist(),
    ]


def to_arrow(column: BinaryColumn, count: int) -> list[bytes | None]:
    """The column as pyarrow sees it: its own checks run over the very buffers."""
    buffers = [None if part is None else pa.py_buffer(part) for part in (column.validity, column.offsets, column.data)]
    made = pa.Array.from_buffers(pa.binary(), count, buffers)
    made.validate(full=True)
    listed: list[bytes | None] = made.to_pylist()
    return listed


@settings(max_examples=100, deadline=None)
@given(rows=ROWS, present=st.integers(0, 7))
def test_records_come_back_and_arrow_reads_the_same(rows: list[Any], present: int) -> None:
    values, keys, headers, times = ([row[i] for row in rows] for i in range(4))
    payload = encode_columns(
        values,
        keys=keys if present & Column.KEYS else None,
        headers=headers if present & Column.HEADERS else None,
        times_ns=times if present & Column.TIMES else None,
    )

    decoded = decode_columns(payload)

    assert len(payload) % 8 == 0
    assert decoded.count == len(rows)
    expected = [
        values,
        keys if present & Column.KEYS else None,
        headers if present & Column.HEADERS else None,
        times if present & Column.TIMES else None,
    ]
    assert model(decoded) == expected
    assert to_arrow(decoded.values, len(rows)) == values
    if decoded.keys is not None:
        assert to_arrow(decoded.keys, len(rows)) == keys
    if decoded.headers is not None:
        assert to_arrow(decoded.headers, len(rows)) == headers
    if decoded.times is not None:
        array = pa.Array.from_buffers(pa.timestamp("ns"), len(rows), [None, pa.py_buffer(decoded.times)])
        assert array.cast(pa.int64()).to_pylist() == times


def test_every_truncation_is_refused() -> None:
    for data in every_truncation(SMALL):
        with pytest.raises(BadColumns):
            decode_columns(data)


def test_every_flipped_bit_is_refused_or_well_formed() -> None:
    """Columns have no checksum, as the batch has one; accepted columns must at least be safe to read."""
    for data in every_flip(SMALL):
        try:
            decoded = decode_columns(data)
        except BadColumns:
            continue
        to_arrow(decoded.values, decoded.count)
        model(decoded)


@settings(max_examples=100, deadline=None)
@given(
    data=st.binary(max_size=120)
    | st.builds(
        lambda n, c, rest: struct.pack("<II", n, c) + rest,
        *[
            st.integers(0, 9),
            st.integers(0, 8),
            st.lists(st.integers(0, 3), max_size=30).map(lambda v: struct.pack(f"<{len(v)}i", *v)),
        ],
    )
)
def test_any_bytes_are_columns_or_bad_columns(data: bytes) -> None:
    try:
        decoded = decode_columns(data)
    except BadColumns:
        return
    assert len(to_arrow(decoded.values, decoded.count)) == decoded.count
    assert len(model(decoded)[0]) == decoded.count


def test_columns_that_do_not_fit_say_why() -> None:
    for payload, reason in [
        (b"", "too short"),
        (struct.pack("<II", 0xFFFFFFFF, 0), "cannot hold"),
        (struct.pack("<II", 0xFFFFFFFF, 7) + bytes(1000), "cannot hold"),
        (struct.pack("<II", 0, 8) + bytes(8), "unknown column"),
        (struct.pack("<II", 1, 0) + struct.pack("<ii", 1, 1) + bytes(8), "start at 0"),
        (struct.pack("<II", 1, 0) + struct.pack("<ii", 0, -1), "not sorted"),
        (struct.pack("<II", 3, 0) + struct.pack("<iiii", 0, 8, 4, 8) + bytes(8), "not sorted"),
        (struct.pack("<II", 1, 0) + struct.pack("<ii", 0, 0x7FFFFFFF), "runs past the end"),
        (struct.pack("<II", 1, 0) + struct.pack("<ii", 0, 0) + bytes(8), "follow the last column"),
        (struct.pack("<II", 1, 1) + bytes(4), "runs past the end"),
        (struct.pack("<II", 2, 2) + bytes(8), "runs past the end"),
    ]:
        with pytest.raises(BadColumns, match=reason):
            decode_columns(payload)


@pytest.mark.parametrize("place", [1, (1 << 14) - 1, 1 << 14, (1 << 14) + 1, 40_000])
def test_one_offset_that_goes_backwards_is_found_wherever_it_is(place: int) -> None:
    """Offsets are checked a piece at a time: no step may fall between two pieces."""
    count = 40_000
    offsets = list(range(count + 1))
    offsets[place - 1] = offsets[place] + 1 if place < count else offsets[place]
    offsets[place] = offsets[place - 1] - 1
    payload = struct.pack("<II", count, 0) + struct.pack(f"<{count + 1}i", *offsets)
    with pytest.raises(BadColumns, match="not sorted"):
        decode_columns(payload + bytes(4) + bytes(count))


def test_many_records_come_back_in_little_memory() -> None:
    """A producer may send half a gigabyte of offsets; the daemon checks them in constant memory."""
    for count in ((1 << 14) - 1, 1 << 14, (1 << 14) + 1):
        values = [b"%d" % i for i in range(count)]
        assert decode_columns(encode_columns(values)).values.to_list() == values
    payload = encode_columns([b""] * 300_000)
    assert peak_bytes(lambda: decode_columns(payload)) < 1 << 20


@settings(max_examples=100, deadline=None)
@given(rows=ROWS.filter(bool), present=st.integers(0, 7), headers=st.binary(max_size=20))
def test_the_first_record_gets_other_headers_and_nothing_else_changes(
    rows: list[Any], present: int, headers: bytes
) -> None:
    columns = [[row[i] for row in rows] for i in range(4)]
    payload = encode_columns(
        columns[0],
        keys=columns[1] if present & Column.KEYS else None,
        headers=columns[2] if present & Column.HEADERS else None,
        times_ns=columns[3] if present & Column.TIMES else None,
    )
    before = model(decode_columns(payload))
    after = model(decode_columns(changed := with_first_headers(payload, headers)))

    assert after.pop(2) == [headers, *(before.pop(2) or [None] * len(rows))[1:]]
    assert after == before
    assert first_headers(changed) == headers
    assert first_headers(payload) == (columns[2][0] if present & Column.HEADERS else None)


@settings(max_examples=100, deadline=None)
@given(
    value=st.binary(max_size=20),
    key=st.none() | st.binary(max_size=20),
    headers=st.none() | st.binary(max_size=20),
    time_ns=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
    terminated=st.booleans(),
)
def test_any_record_is_one_line_of_json(
    value: bytes, key: bytes | None, headers: bytes | None, time_ns: int | None, terminated: bool
) -> None:
    text = Record("web", 7, value, 5, key, time_ns, headers, terminated).to_json()

    assert "\n" not in text
    reported = json.loads(text.encode(), parse_constant=pytest.fail)
    assert reported["sequence"] == 7
    assert (reported["value"].encode() if "value" in reported else bytes.fromhex(reported["value_hex"])) == value
    if key is not None:
        assert (reported["key"].encode() if "key" in reported else bytes.fromhex(reported["key_hex"])) == key
    assert ("event_time_ns" in reported) == (time_ns is not None)
    assert ("terminated" in reported) == (not terminated)


def test_headers_are_shown_whatever_a_producer_sent() -> None:
    for headers, shown in [
        (b'{"a":"b"}', {"headers": {"a": "b"}}),
        (b"{}", {"headers": {}}),
        (b"not json", {"headers": "not json"}),
        (b'{"a":1}', {"headers": '{"a":1}'}),
        (b'{"a":NaN}', {"headers": '{"a":NaN}'}),
        (b'{"a":"\\ud800"}', {"headers": '{"a":"\\ud800"}'}),
        (b"\xff", {"headers_hex": "ff"}),
        (b"[" * 100_000, {"headers": "[" * 100_000}),
    ]:
        reported = json.loads(Record("web", 7, b"", 5, headers=headers).to_json().encode())
        assert {name: value for name, value in reported.items() if name.startswith("headers")} == shown


LIMIT = 1 << 63


def test_a_time_comes_back_beside_other_headers() -> None:
    for due_ns in (1, -1, 1_700_000_000_000_000_000, LIMIT - 1, -LIMIT):
        assert not_before(json.dumps(with_not_before({"h": "ü"}, due_ns)).encode()) == due_ns
    assert with_not_before({"h": "1", NOT_BEFORE: "1"}, 2) == {"h": "1", NOT_BEFORE: "2"}


def test_headers_without_such_a_time_delay_nothing() -> None:
    for headers in [
        None,
        b"",
        b"{}",
        b'{"h": "wald.not-before"}',
        b'{"wald.not-before": "soon"}',
        b'{"wald.not-before": ""}',
        b'{"wald.not-before": null}',
        b'{"wald.not-before": ["1"]}',
        b'{"wald.not-before": 1e999}',
        b'{"wald.not-before": "%d"}' % LIMIT,
        b'{"wald.not-before": "%d"}' % (-LIMIT - 1),
        b'{"wald.not-before": "%s"}' % (b"9" * 5000),
        b'["wald.not-before"]',
        b'"wald.not-before"',
        b'{"wald.not-before": "\xff"}',
        b'{"wald.not-before": ' + b"[" * 100_000,
    ]:
        assert not_before(headers) == 0
