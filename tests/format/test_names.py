"""Names: what may name a route, and that a segment's name says exactly one thing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wald.errors import InvalidInput
from wald.format.names import (
    Kind,
    SegmentName,
    check_group,
    check_route,
    cursor_name,
    is_route,
    parse_cursor_name,
    parse_segment_name,
    segment_name,
)

ILLEGAL = [
    *("", ".", "..", "../x", "a/b", "/a", "a/", ".hidden", "-a", "_a", "a b", " a", "a ", "a\n", "\n", "a\0", "\0"),
    *("a\tb", "caf\u00e9", "\u0661", "\uff41", "a\udcff", "a*", "a:b", "a\\b", "a=b", "x" * 128, "x" * 200),
]
LEGAL = ["a", "A", "0", "web", "a.b", "a..b", "a-b_c.d", "x" * 127, "in", "9.cursor"]


def test_an_illegal_name_is_refused_in_one_line() -> None:
    for name in ILLEGAL:
        for check in (check_route, check_group):
            with pytest.raises(InvalidInput) as caught:
                check(name)
            assert "\n" not in caught.value.message
            assert len(caught.value.message) < 250
            assert caught.value.message.isprintable()
            assert caught.value.hint
        assert not is_route(name)
        assert parse_cursor_name(cursor_name(name)) is None


def test_a_legal_name_is_itself() -> None:
    for name in LEGAL:
        assert check_route(name) == check_group(name) == name
        assert is_route(name)
        assert parse_cursor_name(cursor_name(name)) == name
        assert len(cursor_name(name) + ".4194304.tmp") <= 255


@settings(max_examples=200, deadline=None)
@given(name=st.text(max_size=12))
def test_a_name_that_is_accepted_stays_in_its_directory(name: str) -> None:
    if is_route(name):
        assert name.isascii()
        assert not {"/", "\0", "\n", " "} & set(name)
        assert not name.startswith(".")


@settings(max_examples=100, deadline=None)
@given(base=st.integers(0, (1 << 64) - 1), kind=st.sampled_from(Kind))
def test_a_segment_name_comes_back(base: int, kind: Kind) -> None:
    name = segment_name(base, kind)
    assert parse_segment_name(name) == SegmentName(base, kind)


def test_other_names_are_neither_segments_nor_cursors() -> None:
    ends = ("", ".wal\n", ".wal.tmp", ".wal.idx.released", ".zst", ".WAL")
    digits = (
        "",
        "1",
        "000000000000000000001",
        "-0000000000000000001",
        "\u0660" * 19 + "\u0661",
        "18446744073709551616",
    )
    for name in [*(f"{1:020}{end}" for end in ends), *(f"{number}.wal" for number in digits), "", "spare.tmp"]:
        assert parse_segment_name(name) is None
    for name in ["cursor", ".cursor", "a.cursor.tmp", "a.cursor.17.tmp", "a.CURSOR", "in", "retired"]:
        assert parse_cursor_name(name) is None
