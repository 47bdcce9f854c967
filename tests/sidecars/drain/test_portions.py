"""Portions: everything once and in order, never more than asked for, in both forms."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from wald.format.records import Record
from wald_drain.portions import Portion, StdinFormat, portions


def records(values: list[bytes]) -> list[Record]:
    return [Record("a", 3 * number, value, 7) for number, value in enumerate(values, start=1)]


@given(st.lists(st.binary(max_size=40), max_size=60), st.integers(1, 20), st.integers(1, 200))
def test_portions_are_all_records_once_and_in_order(values: list[bytes], records_max: int, bytes_max: int) -> None:
    given_records = records(values)
    taken = list(portions(given_records, records_max=records_max, bytes_max=bytes_max))

    assert [record for portion in taken for record in portion.records] == given_records
    for portion in taken:
        sizes = [len(record.value) for record in portion.records]
        assert portion.count <= records_max
        assert sum(sizes[:-1]) < bytes_max
    for portion in taken[:-1]:
        assert portion.count == records_max or sum(len(record.value) for record in portion.records) >= bytes_max


def test_a_record_above_the_limit_goes_alone() -> None:
    taken = list(portions(records([b"x" * 100, b"y"]), records_max=10, bytes_max=50))

    assert [portion.count for portion in taken] == [1, 1]


def test_no_records_make_no_portion() -> None:
    assert list(portions([], records_max=10)) == []


def test_portion_knows_its_ends() -> None:
    portion = Portion(records([b"x", b"y", b"z"]))

    assert (portion.first, portion.last, portion.count) == (3, 9, 3)


def test_raw_is_each_value_and_a_newline() -> None:
    """Values come as they are, whatever is in them, also one whose line had no end."""
    portion = Portion([Record("a", 1, b"one\r", 7), Record("a", 2, b"\xff\n\0", 7, terminated=False)])

    assert portion.encoded(StdinFormat.RAW) == b"one\r\n\xff\n\0\n"


def test_json_is_what_wald_read_writes() -> None:
    portion = Portion([Record("a", 1, b"one", 7, key="ключ".encode()), Record("a", 2, b"\xff", 7)])
    lines = portion.encoded(StdinFormat.JSON).decode().splitlines()

    assert lines == [record.to_json() for record in portion.records]
    assert [json.loads(line).get("key") for line in lines] == ["ключ", None]
