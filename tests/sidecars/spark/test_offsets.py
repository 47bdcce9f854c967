"""Offsets of streams survive encoding, equal ones have equal text, and anything else raises BadOffsets."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wald.format.names import SEQUENCE_MAX
from wald_spark.offsets import BadOffsets, Offsets, Position, decode_offsets, encode_offsets, is_offsets

LOG = "0123456789abcdef" * 2
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
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
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(BadOffsets, match=words):
        decode_offsets(WHOLE | change)


@pytest.mark.parametrize(
    "content", [None, 7, [], "{}", {}, {"logOffset": 0}, {"version": 1, "logs": {}, "routes": None}]
)
def test_offsets_of_other_sources_are_refused(content: object) -> None:
    assert not is_offsets(content)
    with pytest.raises(BadOffsets):
        decode_offsets(content)


def test_those_of_a_newer_version_are_ours() -> None:
    assert is_offsets(WHOLE | {"version": 2, "more": 1})
