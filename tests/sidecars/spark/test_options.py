"""Options are validated before any data is read."""

from __future__ import annotations

import pytest

from wald.errors import InvalidInput
from wald_spark.options import PARTITION_BYTES, Options, parse_options


def parsed(**given: str) -> Options:
    return parse_options({"path": "/log", **given})


def test_without_options_everything_is_read_and_nothing_may_be_missing() -> None:
    options = parsed()
    assert (options.paths, options.routes, options.first, options.from_ns) == (("/log",), None, None, None)
    assert options.active
    assert not options.tolerance.damage
    assert not options.tolerance.loss
    assert options.partition_bytes == PARTITION_BYTES


def test_names_are_case_insensitive() -> None:
    assert parsed(STARTINGSEQUENCE="7", endingsequence="9").first == 7
    assert parsed(startingSequence="7", endingsequence="9").last == 9


@pytest.mark.parametrize(
    ("given", "routes"),
    [
        ({"route": "a"}, {"a"}),
        ({"routes": "a, b"}, {"a", "b"}),
        ({"route": "a", "routes": "b,c"}, {"a", "b", "c"}),
    ],
)
def test_routes_are_named_one_by_one_or_in_a_list(given: dict[str, str], routes: set[str]) -> None:
    assert parsed(**given).routes == frozenset(routes)


@pytest.mark.parametrize(
    ("given", "nanoseconds"),
    [
        ("1970-01-01T00:00:01Z", 1_000_000_000),
        ("1970-01-01T01:00:01.5+01:00", 1_500_000_000),
        ("1700000000123", 1_700_000_000_123_000_000),
    ],
)
def test_a_time_is_iso_8601_or_milliseconds(given: str, nanoseconds: int) -> None:
    assert parsed(startingTimestamp=given).from_ns == nanoseconds
    assert parsed(endingTimestamp=given).until_ns == nanoseconds


def test_a_time_without_a_zone_is_in_the_one_that_was_named() -> None:
    for given, zone, nanoseconds in [
        ("1970-01-01T00:00:01", "UTC", 1_000_000_000),
        ("1970-01-02", "UTC", 86_400_000_000_000),
        ("19700102", "UTC", 86_400_000_000_000),
        ("1970-01-01T00:00:01", "America/New_York", 18_001_000_000_000),
        ("1970-01-01T00:00:01Z", "America/New_York", 1_000_000_000),
        ("1700000000123", "America/New_York", 1_700_000_000_123_000_000),
        ("1970-01-01T02:00:01", "+02:00", 1_000_000_000),
        ("1969-12-31T18:30:01", "UTC-5:30", 1_000_000_000),
        ("1970-01-01T02:00:01", "GMT+2", 1_000_000_000),
    ]:
        assert parsed(startingTimestamp=given, timeZone=zone).from_ns == nanoseconds


@pytest.mark.parametrize("given", ["1970-01-01T00:00:01", "1970-01-02"])
def test_a_time_that_names_no_zone_is_not_taken_for_any(given: str) -> None:
    """The source does not know the session's time zone; assuming UTC returned twice the rows in New York."""
    with pytest.raises(InvalidInput, match="names no time zone"):
        parsed(startingTimestamp=given)


def test_a_table_is_refused_with_the_view_that_works() -> None:
    """Spark passes a table's options when the table is created, but not when it is read."""
    with pytest.raises(InvalidInput, match="a table cannot be of format wald") as refused:
        parsed(owner="me", provider="wald", location="file:/log")
    assert "CREATE TEMPORARY VIEW" in refused.value.hint


def test_several_paths_come_as_json() -> None:
    assert parse_options({"paths": '["/a", "/b,c"]'}).paths == ("/a", "/b,c")


def test_modes_and_sizes() -> None:
    options = parsed(mode="permissive", failOnDataLoss="FALSE", maxBytesPerPartition="8MiB", includeActive="false")
    assert options.tolerance.damage
    assert options.tolerance.loss
    assert options.partition_bytes == 8 << 20
    assert not options.active


def test_what_cannot_be_right_is_refused_with_its_name() -> None:
    for given, words in [
        ({"startingSequnce": "1"}, "unknown option 'startingsequnce'"),
        ({"startingSequence": "0"}, "startingSequence must be"),
        ({"startingSequence": "-1"}, "startingSequence must be"),
        ({"endingSequence": "1.5"}, "endingSequence must be"),
        ({"startingTimestamp": "1700000000"}, "startingTimestamp must be a time, or milliseconds"),
        ({"startingSequence": "9", "endingSequence": "8"}, "9 to 8 is empty"),
        ({"startingTimestamp": "2026-11-21Z", "endingTimestamp": "2026-11-21Z"}, "startingTimestamp must be a time"),
        ({"startingTimestamp": "2026-11-21T00Z", "endingTimestamp": "2026-11-21T00Z"}, "is not after"),
        ({"startingTimestamp": "2026-11-21", "timeZone": "Mars/Olympus"}, "timeZone must be the name"),
        ({"startingTimestamp": "2026-11-21", "timeZone": "../etc"}, "timeZone must be the name"),
        ({"startingTimestamp": "2026-11-21", "timeZone": "+24:00"}, "timeZone must be the name"),
        ({"damagePath": "s3://lake/damage"}, "s3://lake/damage: a URL, but a directory is needed"),
        ({"startingTimestamp": "tomorrow"}, "startingTimestamp must be a time"),
        ({"endingTimestamp": "-5"}, "endingTimestamp must be a time"),
        ({"route": "../x"}, "x"),
        ({"routes": "a,,b"}, ""),
        ({"routes": ""}, ""),
        ({"mode": "DROPMALFORMED"}, "mode must be"),
        ({"includeActive": "yes"}, "includeActive must be"),
        ({"failOnDataLoss": "1"}, "failOnDataLoss must be"),
        ({"maxBytesPerPartition": "many"}, "maxBytesPerPartition must be"),
        ({"maxBytesPerPartition": "1"}, "maxBytesPerPartition must be"),
        ({"maxValueBytes": "3GiB"}, "maxValueBytes must be"),
        ({"paths": "/a"}, "paths must be"),
        ({"paths": "[1]"}, "paths must be"),
    ]:
        with pytest.raises(InvalidInput) as refused:
            parsed(**given)
        assert words in refused.value.message
        assert refused.value.hint


def test_a_misspelt_option_is_reported_with_the_nearest() -> None:
    with pytest.raises(InvalidInput) as refused:
        parsed(startingSequnce="1")
    assert refused.value.hint == "did you mean startingSequence?"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("endingOffsets", "endingSequence"),
        ("endingOffsets", "availableNow=True"),
        ("startingOffsets", "startingSequence"),
        ("maxRecordsPerTrigger", "readStream"),
    ],
)
def test_options_of_streams_and_of_kafka_lead_to_those_of_queries(name: str, hint: str) -> None:
    with pytest.raises(InvalidInput, match=f"unknown option '{name.lower()}'") as refused:
        parsed(**{name: "latest"})
    assert hint in refused.value.hint


def test_a_file_url_for_reports_is_a_path() -> None:
    assert parsed(damagePath="file:///tmp/damage").tolerance.report == "/tmp/damage"


def test_what_spark_itself_adds_does_not_matter() -> None:
    assert parse_options({"path": "/log", "spark.some.thing": "1"}).paths == ("/log",)
