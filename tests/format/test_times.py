"""Times that people type: which moment each means, also where the clock changes, and what is no time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from wald.format.times import moment, nanoseconds, utc


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose clock is an hour before UTC, in summer two."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def meant(text: str, now: str) -> str:
    """In UTC, where it is ``now`` in the zone of the machine."""
    return utc(nanoseconds(moment(text, datetime.fromisoformat(now).astimezone())), 6).replace(".000000", "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
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
    ],
)
def test_a_time_is_what_people_mean(berlin: None, text: str, expected: str) -> None:
    assert meant(text, "2026-11-21T10:30:00") == expected


@pytest.mark.parametrize(
    ("now", "text", "expected"),
    [
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
    ],
)
def test_days_are_those_of_the_calendar_and_hours_those_of_the_clock(
    berlin: None, now: str, text: str, expected: str
) -> None:
    """A day may have 23 hours or 25; "24h" always has 24."""
    assert meant(text, now) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "5", "250", "٥m", "5x", "m", "-", "--5m", "-1h ago", "5mago", "1h30m", "+1h", "1e3s"),
        *("25:00", "14", "14:0", "4pm", "tomorrow", "Today", "yesterday noon", "2023-02-29", "2026-13-01"),
        *("2026-11-21T10:00:61Z", "99999999d", "0001-01-01T00:00:00+01:00", "9999-12-31T23:59:59-01:00"),
    ],
)
def test_what_is_no_time_is_refused(berlin: None, text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        moment(text, datetime(2026, 11, 21, 9, 30, tzinfo=UTC))


def test_hours_ago_do_not_depend_on_the_zone_of_now() -> None:
    """Where ``now`` knows the rules of its zone, too, in which Python counts hours by the calendar."""
    from zoneinfo import ZoneInfo

    now = datetime(2026, 3, 29, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    assert utc(nanoseconds(moment("12h", now))) == "2026-03-28T22:00:00Z"
