"""Records: any record can be shown as JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wald.format.records import Record


@settings(max_examples=200, deadline=None)
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
