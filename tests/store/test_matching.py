"""Pattern search, compared with a look at every record."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import Built

from wald.format.batch import BatchHeader, Encoding
from wald.reading import pattern as patterns
from wald.reading.assembler import Batch
from wald.reading.pattern import BadPattern, Matcher

PIECES = [b"ab", b"aB", b"b", b"\n", b".", b"error", b"Error", b"\x00", b"\xff", b""]
PATTERNS = [
    b"ab", b"^b", b"b$", b"^$", b"a.", b"error|ab", b"(?i)ERROR", b"(?i:E)rror", b"e+rror", b"(er)ror", b"(er)?ror",
    b"[^a]b", b"\\x00", b"a(?!b)", b"b(?=\\Z)", b"\\bb", b"(?s)a.*b", b"", b"(?x) a b", b"er{2}or", b"(?:e|a)rror",
]  # fmt: skip


def batch(values: list[bytes], *, terminated: bool = True) -> Batch:
    payload = b"\n".join(values) + b"\n" * terminated
    header = BatchHeader(0, len(payload), 7, 5, 0, 0, len(values), 1, Encoding.LINES, 0, 1)
    return Batch("a", 7, 6 + len(values), memoryview(payload), terminated, header, 1, 64)


lines = st.lists(st.lists(st.sampled_from([piece for piece in PIECES if piece != b"\n"])).map(b"".join), min_size=1)


@pytest.mark.parametrize("lines_searched", [1, 1 << 30])  # by their places in the batch wherever possible, or never
@settings(max_examples=100, deadline=None)
@given(
    values=lines,
    pattern=st.sampled_from(PATTERNS) | st.lists(st.sampled_from(PIECES)).map(b"".join).map(re.escape),
    ignore_case=st.booleans(),
    invert=st.booleans(),
    terminated=st.booleans(),
)
def test_it_finds_what_a_look_at_every_record_finds(
    lines_searched: int, values: list[bytes], pattern: bytes, ignore_case: bool, invert: bool, terminated: bool
) -> None:
    compiled = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    expected = [(7 + i, value) for i, value in enumerate(values) if (compiled.search(value) is None) == invert]

    matcher = Matcher(pattern, ignore_case=ignore_case, invert=invert)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patterns, "_LINES_SEARCHED", lines_searched)
        found = list(matcher.matching_records(batch(values, terminated=terminated)))

    assert [(record.sequence, record.value) for record in found] == expected
    assert [record.terminated for record in found] == [terminated or n < 6 + len(values) for n, _ in expected]


def test_a_fixed_string_is_found_as_it_is() -> None:
    found = Matcher(b"a.[", fixed=True).matching_records(batch([b"ab[", b"xa.[x", b"A.["]))

    assert [record.value for record in found] == [b"xa.[x"]


def test_values_of_columns_are_searched_and_may_hold_newlines(tmp_path: Path) -> None:
    log = Built(tmp_path / "log")
    log.columns("a", [b"one\ntwo", b"three", b""], keys=[b"two", None, None])
    (found,) = log.log.batches("a")

    assert [record.sequence for record in Matcher(b"^two|\ntwo").matching_records(found)] == [1]
    assert [record.value for record in Matcher(b"^$").matching_records(found)] == [b""]


def test_what_is_no_regular_expression_is_refused() -> None:
    with pytest.raises(BadPattern, match="missing \\)"):
        Matcher(b"(")
