"""Stream options: accepted values, and hints for the rejected ones."""

from __future__ import annotations

import pytest

from wald.errors import InvalidInput
from wald.setting_types import MIB
from wald_spark.options import STREAM_OPTIONS, Limits, StreamOptions, parse_stream_options

LOG = "0123456789abcdef" * 2
AS_UUID = "01234567-89ab-cdef-0123-456789abcdef"


def parse(**given: str) -> StreamOptions:
    return parse_stream_options({name.lower(): value for name, value in given.items()})


def test_without_options_a_stream_reads_everything_there_is() -> None:
    assert parse() == StreamOptions("earliest", {}, Limits())


def test_a_stream_begins_where_its_options_say() -> None:
    assert parse(startingOffsets="Latest").starting == "latest"
    assert parse(startingOffsets="earliest") == parse()
    assert parse(startingOffsets=f'{{"{LOG}": 251}}').first == {LOG: 251}
    assert parse(startingOffsets=f'{{"{AS_UUID}": 1}}').first == {LOG: 1}  # spelled as in log.json


def test_limits_are_counts_and_sizes() -> None:
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


@pytest.mark.parametrize("name", ["startingSequence", "endingTimestamp", "includeActive"])
def test_what_only_queries_have_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"a stream has no {name}"):
        parse(**{name: "1"})
