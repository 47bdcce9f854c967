"""Times that people type, including those around clock changes, and times in data."""

import struct
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from wald.client.payloads import encode_values, json_payloads
from wald.errors import InvalidInput
from wald.format.records import decode_columns
from wald.format.times import nanoseconds, parse_time, timestamp_ns, utc

NOON_NS = 1_795_255_200 * 10**9


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose clock is an hour before UTC, in summer two."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def meant(text: str, now: str) -> str:
    """Return a time in UTC, for ``now`` in the machine's zone."""
    return utc(nanoseconds(parse_time(text, datetime.fromisoformat(now).astimezone())), 6).replace(".000000", "")


def test_a_time_is_what_people_mean(berlin: None) -> None:
    for text, expected in [
        ("now", "2026-11-21T09:30:00Z"),
        ("5m", "2026-11-21T09:25:00Z"),
        ("-5m", "2026-11-21T09:25:00Z"),
        ("5m ago", "2026-11-21T09:25:00Z"),
        ("5 m ago", "2026-11-21T09:25:00Z"),
        ("1.5h", "2026-11-21T08:00:00Z"),
        ("30s", "2026-11-21T09:29:30Z"),
        ("0s", "2026-11-21T09:30:00Z"),
        ("2d", "2026-11-19T09:30:00Z"),
        ("1w", "2026-11-14T09:30:00Z"),
        ("today", "2026-11-20T23:00:00Z"),
        ("yesterday", "2026-11-19T23:00:00Z"),
        ("yesterday 14:00", "2026-11-20T13:00:00Z"),
        ("today 09:00:30", "2026-11-21T08:00:30Z"),
        ("14:00", "2026-11-21T13:00:00Z"),
        ("14:00:00.25", "2026-11-21T13:00:00.250000Z"),
        ("2026-11-21", "2026-11-20T23:00:00Z"),
        ("2026-11-21T10:00", "2026-11-21T09:00:00Z"),
        ("2026-11-21 10:00:00", "2026-11-21T09:00:00Z"),
        ("2026-11-21T10:00:00Z", "2026-11-21T10:00:00Z"),
        ("2026-11-21T10:00:00.123456789Z", "2026-11-21T10:00:00.123456Z"),
        ("2026-11-21T10:00:00-05:30", "2026-11-21T15:30:00Z"),
        ("2028-02-29", "2028-02-28T23:00:00Z"),
        (" now ", "2026-11-21T09:30:00Z"),
    ]:
        assert meant(text, "2026-11-21T10:30:00") == expected


def test_days_are_those_of_the_calendar_and_hours_those_of_the_clock(berlin: None) -> None:
    """A day may have 23 hours or 25; "24h" always has 24."""
    for now, text, expected in [
        # In the night to 29 March 2026 the clock goes from 02:00 to 03:00; to 25 October from 03:00 to 02:00.
        ("2026-03-29T12:00:00", "today", "2026-03-28T23:00:00Z"),
        ("2026-03-29T12:00:00", "12h", "2026-03-28T22:00:00Z"),
        ("2026-03-30T12:00:00", "yesterday", "2026-03-28T23:00:00Z"),
        ("2026-03-30T12:00:00", "yesterday 12:00", "2026-03-29T10:00:00Z"),
        ("2026-03-30T12:00:00", "today", "2026-03-29T22:00:00Z"),
        ("2026-03-30T12:00:00", "2d", "2026-03-28T10:00:00Z"),
        ("2026-03-29T12:00:00", "02:30", "2026-03-29T00:30:00Z"),
        ("2026-10-25T12:00:00", "02:30", "2026-10-25T00:30:00Z"),
        ("2026-10-25T12:00:00", "2026-10-25T02:30+01:00", "2026-10-25T01:30:00Z"),
        ("2026-10-25T12:00:00", "24h ago", "2026-10-24T11:00:00Z"),
        ("2026-10-26T00:10:00", "yesterday", "2026-10-24T22:00:00Z"),
        ("2026-01-01T00:00:30", "yesterday", "2025-12-30T23:00:00Z"),
        ("2028-03-01T00:10:00", "yesterday 23:59", "2028-02-29T22:59:00Z"),
    ]:
        assert meant(text, now) == expected


def test_what_is_no_time_is_refused(berlin: None) -> None:
    for text in [
        *("", "5", "250", "٥m", "5x", "m", "-", "--5m", "-1h ago", "5mago", "1h30m", "+1h", "1e3s"),
        *("25:00", "14", "14:0", "4pm", "tomorrow", "Today", "yesterday noon", "2023-02-29", "2026-13-01"),
        *("2026-11-21T10:00:61Z", "99999999d", "0001-01-01T00:00:00+01:00", "9999-12-31T23:59:59-01:00"),
    ]:
        with pytest.raises(ValueError, match=r"."):
            parse_time(text, datetime(2026, 11, 21, 9, 30, tzinfo=UTC))


def test_hours_ago_do_not_depend_on_the_zone_of_now() -> None:
    """If ``now`` knows its zone's rules, Python subtracts hours by the calendar."""
    from zoneinfo import ZoneInfo

    now = datetime(2026, 3, 29, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    assert utc(nanoseconds(parse_time("12h", now))) == "2026-03-28T22:00:00Z"


@pytest.mark.usefixtures("berlin")
def test_a_time_in_data_has_a_zone_and_all_its_digits() -> None:
    for text, expected_ns in [
        ("2026-11-21T10:00:00Z", NOON_NS),
        ("2026-11-21t10:00:00z", NOON_NS),
        ("2026-11-21 10:00:00+00:00", NOON_NS),
        ("2026-11-21T10:00:00-00:00", NOON_NS),
        ("2026-11-21T10:00:00.5Z", NOON_NS + 500_000_000),
        ("2026-11-21T10:00:00.1234567899Z", NOON_NS + 123_456_789),
        ("2026-11-21T04:30:00-05:30", NOON_NS),
        ("2026-11-22T00:00:00+14:00", NOON_NS),
        ("2026-11-21T09:59:60Z", NOON_NS),
        ("2016-12-31T23:59:60Z", 1_483_228_800 * 10**9),
        ("2017-01-01T00:59:60+01:00", 1_483_228_800 * 10**9),
        ("1969-12-31T23:59:59.999999999Z", -1),
        ("2028-02-29T00:00:00Z", 1_835_395_200 * 10**9),
    ]:
        assert timestamp_ns(text) == expected_ns


def test_what_is_no_time_in_data_is_refused() -> None:
    for text in [
        *("2026-11-21T10:00:00", "2026-11-21 10:00:00", "2026-11-21", "2026-11-21T10:00Z", "2026-11-21T10Z"),
        *("2026-W47-6", "2026-W47-6T10:00:00Z", "20261121T100000Z", "2026-325T10:00:00Z", "2026-11-21Z"),
        *("2026-11-21T10:00:00,5Z", "2026-11-21T10:00:00.Z", "2026-11-21T10:00:00+0100", "2026-11-21T10:00:00+01"),
        *("2026-11-21T24:00:00Z", "2026-11-21T10:60:00Z", "2026-11-21T10:00:61Z", "2026-02-29T10:00:00Z"),
        *("2026-11-21T10:00:00+24:00", "2026-11-21T10:00:00Z ", "2026-11-21T10:00:00 Z", "２026-11-21T10:00:00Z"),
        *(
            "0001-01-01T00:00:00+01:00",
            "0000-01-01T00:00:00Z",
            "now",
            "",
            "10:00:00Z",
            "1700000000",
            "2026-11-21T10:00:00Europe/Berlin",
            "2026-11-21T10:00:00+01:00:30",
        ),
    ]:
        with pytest.raises(ValueError, match="is not like 2026-11-21T10:00:00Z, with a zone"):
            timestamp_ns(text)


def test_a_number_in_another_unit_than_nanoseconds_is_refused_everywhere() -> None:
    for number in [1, 1_795_255_200, 1_795_255_200_000, 1_795_255_200_000_000, 10**17]:
        line = b'{"value": "x", "time": %d}\n' % number
        with pytest.raises(InvalidInput, match=r"stdin:1: time .* write the time like 2026-11-21T10:00:00Z"):
            list(json_payloads(line, "stdin", 1, None))
        with pytest.raises(InvalidInput, match="write the time like 2026-11-21T10:00:00Z"):
            list(encode_values(["x"], times=[number]))


def test_other_numbers_are_nanoseconds() -> None:
    for number in [0, -1, -(1 << 63), 10**17 + 1, NOON_NS, (1 << 63) - 1]:
        (payload,) = json_payloads(b'{"value": "x", "time": %d}\n' % number, "stdin", 1, None)
        (sent,) = encode_values(["x"], times=[number])
        assert payload == sent
        assert rows(payload) == [(b"x", None, number)]


def rows(payload: bytes) -> list[tuple[object, object, object]]:
    """Value, key and time of each record."""
    columns = decode_columns(memoryview(payload))
    nothing = [None] * columns.count
    times = struct.unpack(f"<{columns.count}q", columns.times) if columns.times is not None else nothing
    keys = columns.keys.to_list() if columns.keys is not None else nothing
    return list(zip(columns.values.to_list(), keys, times, strict=True))


def test_records_without_a_time_stay_between_those_with_one() -> None:
    times = [None, NOON_NS, datetime(2026, 11, 21, 10, tzinfo=UTC), None, None]
    payloads = list(encode_values(list("abcde"), times=times, keys=[None, "k", None, "l", None]))
    assert [row for each in payloads for row in rows(each)] == [
        (b"a", None, None),
        (b"b", b"k", NOON_NS),
        (b"c", None, NOON_NS),
        (b"d", b"l", None),
        (b"e", None, None),
    ]
