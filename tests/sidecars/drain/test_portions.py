"""Portions: the records of one run of the command, in both formats; and batches for redrive."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from wald.format.records import Record
from wald_drain.redrive import _RECORDS_MAX, _batches
from wald_drain.worker import Portion


def records(values: list[bytes]) -> list[Record]:
    return [Record("a", 3 * number, value, 7) for number, value in enumerate(values, start=1)]


@given(st.integers(0, 2 * _RECORDS_MAX + 1))
def test_batches_are_all_records_once_and_in_order(count: int) -> None:
    every = records([b"x"] * count)
    batches = list(_batches(every))

    assert [record for batch in batches for record in batch] == every
    assert all(len(batch) == _RECORDS_MAX for batch in batches[:-1])
    assert all(0 < len(batch) <= _RECORDS_MAX for batch in batches)


def test_portion_knows_its_ends() -> None:
    portion = Portion(records([b"x", b"y", b"z"]))

    assert (portion.first, portion.last, portion.count) == (3, 9, 3)


def test_raw_is_each_value_and_a_newline() -> None:
    """Values are passed unchanged, including one without a trailing newline."""
    portion = Portion([Record("a", 1, b"one\r", 7), Record("a", 2, b"\xff\n\0", 7, terminated=False)])

    assert portion.encoded("raw") == b"one\r\n\xff\n\0\n"


def test_json_is_what_wald_read_writes() -> None:
    portion = Portion([Record("a", 1, b"one", 7, key="ключ".encode()), Record("a", 2, b"\xff", 7)])
    lines = portion.encoded("json").decode().splitlines()

    assert lines == [record.to_json() for record in portion.records]
    assert [json.loads(line).get("key") for line in lines] == ["ключ", None]
