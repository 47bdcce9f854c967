"""Lines of a ledger, their chain, the index of a part, and sets of spans with their run lengths."""

import base64
import json
import random
import struct
from array import array
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
import zstandard
from crc32c import crc32c
from damage import every_flip
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wald.format.ledger_lines import (
    _FOOTER,
    _MAGIC,
    GENESIS,
    INDEX_FRAME_MAGIC,
    BadLine,
    BadPart,
    PartIndex,
    RawJson,
    decode_entry,
    decode_ledger,
    decode_part_index,
    digest,
    encode_entry,
    encode_part_index,
    parse_raw_json,
)
from wald.format.spans import BadRunLengths, Span, Spans, pack, run_lengths, spans_of, unpack

SCALARS = st.none() | st.booleans() | st.integers() | st.text(st.characters(), max_size=10)
KEYS = st.text(max_size=6).filter(lambda key: key not in ("append", "crc", "prev"))  # which are the ledger's own
ENTRIES = st.lists(st.dictionaries(KEYS, SCALARS, max_size=4), max_size=5)


def is_whole(line: bytes) -> bool:
    try:
        return bool(decode_entry(line))
    except BadLine:
        return False


def ledger(entries: list[dict[str, Any]]) -> bytes:
    data, prev = b"", GENESIS
    for entry in entries:
        line = encode_entry(entry, prev)
        data, prev = data + line, digest(line)
    return data


THREE = ledger([{"event": "cut", "base": n} for n in (1, 2, 3)])


@settings(max_examples=100, deadline=None)
@given(entries=ENTRIES)
def test_entries_come_back(entries: list[dict[str, Any]]) -> None:
    """Text with lone surrogates too, which is how Python holds a path that is not UTF-8."""
    data = ledger(entries)
    decoded = decode_ledger(data)

    assert decoded.entries == entries
    assert decoded.broken_lines == []
    assert decoded.complete_bytes == len(data)
    assert ledger([*entries, {"event": "next"}]) == data + encode_entry({"event": "next"}, decoded.tip)


def test_json_text_goes_into_a_line_as_the_value_would() -> None:
    routes = [{"route": "ä", "cursors": {"processed": 7}}]
    text = RawJson('[{"route":"ä","cursors":{"processed":7}}]')
    entry = {"event": "reclaimed", "base": 1, "routes": text, "boot": "b"}

    assert encode_entry(entry, GENESIS, 5) == encode_entry(entry | {"routes": routes}, GENESIS, 5)
    assert parse_raw_json(entry) == entry | {"routes": routes}


@pytest.mark.parametrize("group", ["processed", "a]b", 'a}]"', "}]", '},"routes":[{'])
def test_a_line_without_its_lists_of_routes_has_all_the_rest(group: str) -> None:
    """Whatever the names in the lists are; those with brackets may stop a list from being left out."""
    routes = [{"route": "a", "cursors": {group: 7}}, {"route": "b", "cursors": {}}]
    entry = {"event": "shrunk", "base": 1, "routes": [["a", 1]], "dropped": routes, "lost": {"b": 2}, "boot": "b"}
    entry["long"] = "x" * 1024  # of short lines nothing is left out
    line = encode_entry(entry | {"why": 'of "routes":[{"route"}]'}, GENESIS)
    (brief,), (whole,) = decode_ledger(line, with_routes=False).entries, decode_ledger(line).entries

    assert brief.pop("dropped") in ([], routes)
    assert whole.pop("dropped") == routes
    assert brief == whole
    plain = encode_entry(entry | {"dropped": routes[1:]}, GENESIS)
    assert [each["dropped"] for each in decode_ledger(plain + plain, with_routes=False).entries] == [[], []]


@settings(max_examples=50, deadline=None)
@given(entries=ENTRIES)
def test_lines_decode_at_once_as_they_do_one_by_one(entries: list[dict[str, Any]]) -> None:
    """All are decoded at once unless one is damaged, as the last one here."""
    data = ledger(entries)
    decoded, one_by_one = decode_ledger(data), decode_ledger(data + b"{}\n")
    assert one_by_one.entries == decoded.entries
    assert one_by_one.broken_lines == [(len(entries) + 1, "not a ledger line")]


def test_every_damaged_line_is_named() -> None:
    for flipped in every_flip(THREE):
        lines = flipped.split(b"\n")[:-1]
        bad = {number for number, line in enumerate(lines, start=1) if not is_whole(line)}
        decoded = decode_ledger(flipped)

        assert decoded.broken_lines  # also of the last line, which no other one has a digest of, and of its newline
        assert len(decoded.entries) == len(lines) - len(bad)
        assert bad <= {number for number, _ in decoded.broken_lines}


@pytest.mark.parametrize("pair", [(b'{"a":[1', b'2],"prev":""'), (b'{"prev":1},{"prev":2', b'{"prev":3')])
def test_lines_that_are_only_json_together_are_no_lines(pair: tuple[bytes, bytes]) -> None:
    sealed = [each + b',"crc":"%08x"}\n' % crc32c(each) for each in pair]
    assert (1, "not a ledger line") in decode_ledger(b"".join(sealed)).broken_lines


def test_a_truncated_ledger_is_its_whole_lines_and_no_broken_one() -> None:
    ends = [i + 1 for i, byte in enumerate(THREE) if byte == 0x0A]
    for length in range(len(THREE) + 1):
        decoded = decode_ledger(THREE[:length])
        assert len(decoded.entries) == sum(end <= length for end in ends)
        assert decoded.complete_bytes == max((end for end in ends if end <= length), default=0)
        assert decoded.broken_lines == []


def test_a_missing_line_is_reported() -> None:
    for missing in (0, 1):
        lines = THREE.splitlines(keepends=True)
        del lines[missing]
        broken = decode_ledger(b"".join(lines)).broken_lines
        assert broken == [(missing + 1, "does not follow the line before it")]


def test_a_line_that_is_none_is_reported_with_its_number() -> None:
    wrong = [b"", b"null", b"[]", b"5", b"{}", b'"prev"', b"\xff", b"{"]
    for line in [*wrong, b"[" * 100_000, b'{"prev":' + b"9" * 5000 + b"}"]:
        decoded = decode_ledger(THREE + line + b"\n")

        assert decoded.broken_lines == [(4, "not a ledger line")]
        assert len(decoded.entries) == 3


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=100))
def test_no_bytes_raise(data: bytes) -> None:
    decoded = decode_ledger(data)
    assert decoded.complete_bytes == data.rfind(b"\n") + 1
    assert len(decoded.entries) + len(decoded.broken_lines) >= data.count(b"\n")


HEAD = b'{"line": 1, "lines": 1, "prev": "", "tip": "", '


def test_an_index_with_what_the_previous_part_is_about_comes_back() -> None:
    index = PartIndex(11, 0, GENESIS, GENESIS, before=(1, 250))
    index.add(80, 100, [{"event": "reclaimed", "base": 5, "last": 9, "at": 7}, {"event": "seen", "at": 3}], "ff")
    index.add(40, 50, [{"event": "seen"}], "ee")

    assert decode_part_index(encode_part_index(index)) == index
    assert [tuple(frame)[2:-1] for frame in index.frames] == [(2, 5, 9, 3, 7), (1, 1 << 64, -1, (1 << 63) - 1, -1)]
    assert (index.lines, index.span, [frame.prev for frame in index.frames]) == (3, (5, 9), [GENESIS, "ff"])


def test_wrong_content_is_damage() -> None:
    frames = (b'"frames": [[]], "before": null}', b'"frames": [], "before": [1]}', b'"frames": []}')
    for text in (b"[" * 200_000, *(HEAD + each for each in frames), b"[]", b"{}"):
        footer = _FOOTER.pack(len(text), crc32c(text), _MAGIC)
        with pytest.raises(BadPart, match="not that of a ledger part"):
            decode_part_index(struct.pack("<II", INDEX_FRAME_MAGIC, len(text) + len(footer)) + text + footer)


numbers = st.integers(1, 40)


given_spans = st.lists(st.tuples(numbers, numbers), max_size=8)


"""Any that last < first are empty."""


def members(spans: Iterable[Span]) -> set[int]:
    return {number for first, last in spans for number in range(first, last + 1)}


@example([(5, 5), (3, 4)], 3, 5)
@given(given_spans, numbers, numbers)
def test_spans_are_a_set_of_sequences(added: list[Span], first: int, last: int) -> None:
    spans, expected, within = Spans(added), members(added), set(range(first, last + 1))

    assert members(spans) == expected
    assert all(begin <= end for begin, end in spans)
    assert all(one[1] + 1 < other[0] for one, other in pairwise(spans))
    assert list(Spans(spans)) == list(spans)
    assert {number for number in range(42) if number in spans} == expected
    assert spans.overlaps(first, last) == bool(within & expected)
    assert spans.covers(first, last) == (within <= expected)
    assert members(spans.gaps(first, last)) == within - expected
    assert spans.count(first, last) == len(within & expected)


@given(given_spans)
def test_run_lengths_are_spans(added: list[Span]) -> None:
    spans = list(Spans(added))
    lengths = run_lengths(spans, 1)

    assert list(spans_of(lengths, 1)) == spans
    assert list(spans_of(unpack(pack(lengths), len(members(spans))), 1)) == spans


@pytest.mark.parametrize("turns", [[], [0, 2], [3, 1] * 32, [1, 1] * 5000, [0, 1, 2**40, 5] * 100])
def test_what_is_packed_comes_back(turns: list[int]) -> None:
    packed = json.loads(json.dumps(pack(array("Q", turns))))

    assert unpack(packed, sum(turns[1::2])).tolist() == turns
    assert isinstance(packed, list) == (len(turns) <= 64)


def test_routes_that_take_turns_cost_no_two_numbers_a_record() -> None:
    """In turn nearly nothing; at random less than a byte and a half."""
    dice = random.Random(1)
    regular, chance = [1, 1] * 50_000, [dice.choice((1, 1, 1, 2, 3)) for _ in range(100_000)]

    assert len(pack(regular)) < 1000
    assert len(pack(chance)) < 1.5 * sum(chance[1::2])


def test_what_are_no_turns_is_refused() -> None:
    for stored in [None, 7, "*", "AAAA", [1], [1, "x"], [-1, 1], [1, 2**64]]:
        with pytest.raises(BadRunLengths):
            unpack(stored, 5)


def test_a_bomb_is_not_decompressed() -> None:
    bomb = base64.b64encode(zstandard.ZstdCompressor().compress(bytes(1 << 24))).decode()
    with pytest.raises(BadRunLengths, match="more numbers than records"):
        unpack(bomb, 100)
