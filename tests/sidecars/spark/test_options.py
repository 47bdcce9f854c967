"""Options are validated before any data is read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wald.errors import InvalidInput
from wald.format.names import SEQUENCE_MAX
from wald.setting_types import MIB
from wald_spark.checkpoint import BadOffsets, Offsets, Position, decode_offsets, encode_offsets, is_offsets
from wald_spark.options import (
    PARTITION_BYTES,
    STREAM_OPTIONS,
    Limits,
    Options,
    StreamOptions,
    parse_options,
    parse_stream_options,
)


def parsed(**given: str) -> Options:
    return parse_options({"path": "/log", **given})


def test_without_options_everything_is_read_and_nothing_may_be_missing() -> None:
    options = parsed()
    assert (options.paths, options.routes, options.first, options.from_ns) == (("/log",), None, None, None)
    assert options.active
    assert not options.tolerance.damage
    assert not options.tolerance.loss
    assert options.partition_bytes == PARTITION_BYTES


def test_routes_are_named_one_by_one_or_in_a_list() -> None:
    cases: list[tuple[dict[str, str], set[str]]] = [
        ({"route": "a"}, {"a"}),
        ({"routes": "a, b"}, {"a", "b"}),
        ({"route": "a", "routes": "b,c"}, {"a", "b", "c"}),
    ]
    for value, routes in cases:
        assert parsed(**value).routes == frozenset(routes)


def test_a_time_is_iso_8601_or_milliseconds() -> None:
    for value, nanoseconds in [
        ("1970-01-01T00:00:01Z", 1_000_000_000),
        ("1970-01-01T01:00:01.5+01:00", 1_500_000_000),
        ("1700000000123", 1_700_000_000_123_000_000),
    ]:
        assert parsed(startingTimestamp=value).from_ns == nanoseconds
        assert parsed(endingTimestamp=value).until_ns == nanoseconds


def test_a_time_without_a_zone_is_in_the_one_that_was_named() -> None:
    for value, zone, nanoseconds in [
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
        assert parsed(startingTimestamp=value, timeZone=zone).from_ns == nanoseconds


def test_a_table_is_refused_with_the_view_that_works() -> None:
    """Spark passes a table's options when the table is created, but not when it is read."""
    with pytest.raises(InvalidInput, match="a table cannot be of format wald") as refused:
        parsed(owner="me", provider="wald", location="file:/log")
    assert "CREATE TEMPORARY VIEW" in refused.value.hint


def test_modes_sizes_and_paths() -> None:
    """Names are case-insensitive, and Spark adds options of its own."""
    options = parsed(mode="permissive", FAILONDATALOSS="FALSE", maxBytesPerPartition="8MiB", includeActive="false")
    assert options.tolerance.damage
    assert options.tolerance.loss
    assert options.partition_bytes == 8 << 20
    assert not options.active
    assert not options.tolerance.partial
    assert parsed(partial="TRUE").tolerance.partial
    assert (parsed(STARTINGSEQUENCE="7").first, parsed(startingSequence="7", endingsequence="9").last) == (7, 9)
    assert parsed(damagePath="file:///tmp/damage").tolerance.report == "/tmp/damage"
    assert parse_options({"paths": '["/a", "/b,c"]'}).paths == ("/a", "/b,c")
    assert parse_options({"path": "/log", "spark.some.thing": "1"}).paths == ("/log",)


def test_what_cannot_be_right_is_refused_with_its_name() -> None:
    for value, words in [
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
        # The source does not know the session's time zone; assuming UTC returned twice the rows in New York.
        ({"startingTimestamp": "1970-01-01T00:00:01"}, "names no time zone"),
        ({"startingTimestamp": "1970-01-02"}, "names no time zone"),
        ({"partial": "some"}, "partial must be"),
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
            parsed(**value)
        assert words in refused.value.message
        assert refused.value.hint


def test_options_of_streams_and_of_kafka_lead_to_those_of_queries() -> None:
    for name, hint in [
        ("startingSequnce", "did you mean startingSequence?"),
        ("endingOffsets", "endingSequence"),
        ("endingOffsets", "availableNow=True"),
        ("startingOffsets", "startingSequence"),
        ("maxRecordsPerTrigger", "readStream"),
    ]:
        with pytest.raises(InvalidInput, match=f"unknown option '{name.lower()}'") as refused:
            parsed(**{name: "latest"})
        assert hint in refused.value.hint


LOG = "0123456789abcdef" * 2
AS_UUID = "01234567-89ab-cdef-0123-456789abcdef"


def parse(**given: str) -> StreamOptions:
    return parse_stream_options({name.lower(): value for name, value in given.items()})


def test_a_stream_begins_where_its_options_say() -> None:
    assert parse() == parse(startingOffsets="earliest") == StreamOptions("earliest", {}, Limits())
    assert parse(startingOffsets="Latest").starting == "latest"
    assert parse(startingOffsets=f'{{"{LOG}": 251}}').first == {LOG: 251}
    assert parse(startingOffsets=f'{{"{AS_UUID}": 1}}').first == {LOG: 1}  # spelled as in log.json
    assert parse(maxRecordsPerTrigger="500", maxBytesPerTrigger="64MiB").limits == Limits(500, 64 * MIB)


def test_what_cannot_be_is_refused() -> None:
    for name, value in [
        ("startingOffsets", "newest"),
        ("startingOffsets", "251"),
        ("startingOffsets", "[1]"),
        ("startingOffsets", '{"me": 251}'),
        ("startingOffsets", f'{{"{LOG}": 0}}'),
        ("startingOffsets", f'{{"{LOG}": "latest"}}'),
        ("startingOffsets", f'{{"{LOG}": 1.5}}'),
        ("maxRecordsPerTrigger", "0"),
        ("maxRecordsPerTrigger", "many"),
        ("maxBytesPerTrigger", "0"),
        ("maxBytesPerTrigger", "1 parsec"),
    ]:
        with pytest.raises(InvalidInput, match=name) as caught:
            parse(**{name: value})
        assert name in caught.value.hint
        assert name in STREAM_OPTIONS


def test_what_only_queries_have_is_refused() -> None:
    for name in ["startingSequence", "endingTimestamp", "includeActive"]:
        with pytest.raises(InvalidInput, match=f"a stream has no {name}"):
            parse(**{name: "1"})


WHOLE = encode_offsets(Offsets({LOG: Position(3, 7)}, frozenset(["a"])))
STARTS = st.just((0, "")) | st.tuples(st.integers(1, 1 << 32), st.text(max_size=3))
POSITIONS = st.builds(
    lambda one, other, start: Position(min(one, other), max(one, other), *start),
    st.integers(0, SEQUENCE_MAX),
    st.integers(0, SEQUENCE_MAX),
    STARTS,
)
LOGS = st.dictionaries(st.binary(min_size=16, max_size=16).map(bytes.hex), POSITIONS, max_size=4)
ROUTES = st.none() | st.frozensets(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True), max_size=3)


@settings(max_examples=50, deadline=None)
@given(offsets=st.builds(Offsets, LOGS, ROUTES))
def test_offsets_come_back_from_text(offsets: Offsets) -> None:
    assert decode_offsets(json.loads(json.dumps(encode_offsets(offsets)))) == offsets


def test_equal_offsets_are_equal_as_text() -> None:
    """Spark compares the text: a stream that has not moved must not look as if it had."""
    one = Offsets({"00" * 16: Position(0, 1), LOG: Position(3, 7)}, frozenset("abc"))
    other = Offsets({LOG: Position(3, 7), "00" * 16: Position(0, 1)}, frozenset("cba"))
    assert json.dumps(encode_offsets(one)) == json.dumps(encode_offsets(other))


def test_impossible_offsets_are_refused() -> None:
    cases: list[tuple[dict[str, object], str]] = [
        ({"version": 2}, "version 2"),
        ({"version": True, "logs": []}, "same logs"),
        ({"logs": {}}, "same logs"),
        ({"logs": {LOG: 2}}, "cannot be at 2 after 3"),
        ({"logs": {LOG: -1}, "began": {LOG: -1}}, "not a sequence"),
        ({"logs": {LOG: "7"}}, "not a sequence"),
        ({"logs": {LOG: True}}, "not a sequence"),
        ({"logs": {LOG: SEQUENCE_MAX + 1}}, "not a sequence"),
        ({"logs": {"me": 7}, "began": {"me": 3}}, "log 'me'"),
        ({"starts": {"me": [1, "x"]}}, "other logs"),
        ({"starts": {LOG: [1]}}, "not a start"),
        ({"starts": {LOG: [-1, "x"]}}, "not a sequence"),
        ({"routes": "a"}, "not a list of routes"),
        ({"routes": ["../a"]}, "not a list of routes"),
        ({"routes": [1]}, "not a list of routes"),
    ]
    for change, words in cases:
        with pytest.raises(BadOffsets, match=words):
            decode_offsets(WHOLE | change)


def test_offsets_of_other_sources_are_refused() -> None:
    cases: list[object] = [None, 7, [], "{}", {}, {"logOffset": 0}, {"version": 1, "logs": {}, "routes": None}]
    for content in cases:
        assert not is_offsets(content)
        with pytest.raises(BadOffsets):
            decode_offsets(content)
    assert is_offsets(WHOLE | {"version": 2, "more": 1})
