"""Journal lines of work groups: encoding is reversible, and any other line raises BadWork."""

from collections.abc import Mapping

import pytest
from damage import every_flip, every_truncation
from hypothesis import given, settings
from hypothesis import strategies as st

from wald.format.ledger_lines import encode_line
from wald.format.work import (
    PAGE_RECORDS,
    BadWork,
    Commit,
    DeadRecord,
    FailureReason,
    JournalLine,
    JournalPage,
    JournalStart,
    WorkerLease,
    decode_work,
    encode_work,
)

SEQUENCES = st.integers(1, 1 << 63)
PAIRS = st.lists(st.tuples(SEQUENCES, SEQUENCES), max_size=5)
HELD = st.lists(st.builds(WorkerLease, st.text(min_size=1), SEQUENCES, PAIRS), max_size=3)
DEAD = st.lists(
    st.builds(DeadRecord, SEQUENCES, st.integers(0, 255), st.text(), SEQUENCES, st.just("dead"), SEQUENCES), max_size=2
)
WHY = st.lists(st.builds(FailureReason, st.text(), st.integers(0, 1 << 40), PAIRS), max_size=2)
LINES = (
    st.builds(
        JournalStart, st.binary(min_size=16, max_size=16), st.just("orders"), st.just("billing"), SEQUENCES, SEQUENCES
    )
    | st.builds(
        lambda number, tries, due: JournalPage(number * PAGE_RECORDS, tries, due),
        st.integers(0, 1 << 50),
        st.lists(st.integers(0, 255), min_size=PAGE_RECORDS, max_size=PAGE_RECORDS).map(bytes),
        PAIRS,
    )
    | st.builds(
        Commit, done=PAIRS, extended=HELD, returned=PAIRS, reasons=WHY, read=PAIRS, due=PAIRS, leased=HELD, dead=DEAD
    )
)
SAMPLE = encode_work(Commit(leased=[WorkerLease("w", 9, [(5, 7)])], done=[(1, 2)]), 100).rstrip(b"\n")


@settings(max_examples=100)
@given(LINES, st.integers(0, 1 << 40))
def test_a_line_comes_back(line: JournalLine, synced: int) -> None:
    encoded = encode_work(line, synced)
    assert encoded.endswith(b"\n")
    assert encoded.count(b"\n") == 1
    assert decode_work(encoded) == (line, synced)


def test_a_page_shows_its_holes() -> None:
    tries = bytes([255] * 100 + [0, 1, 10, 36, 61, 62, 254] + [255] * 21)
    encoded = encode_work(JournalPage(256, tries), 0)
    assert b'"records": "' + b"." * 100 + b"01Aaz++" + b"." * 21 + b'"' in encoded
    assert b'"more": [361, 62, 362, 254]' in encoded


def test_a_damaged_line_is_none() -> None:
    for damaged in (*every_truncation(SAMPLE), *every_flip(SAMPLE)):
        with pytest.raises(BadWork):
            decode_work(damaged)


def test_a_line_that_wald_does_not_write_is_none() -> None:
    lines: list[Mapping[str, object]] = [
        {"work": 2, "log": "00" * 16, "route": "r", "group": "g", "floor": 0, "end": 1},
        {"work": 1, "log": "not hex", "route": "r", "group": "g", "floor": 0, "end": 1},
        {"work": 1, "route": "r", "group": "g", "floor": 0, "end": 1},
        *({"page": number, "records": text} for number, text in [(256, "." * 127), (250, "." * 128), (256, "!" * 128)]),
        {"page": 256, "records": "." * 128, "more": [1000, 70]},
        *({"done": done} for done in ([1], ["1", "2"], 5)),
        {"done": [1, 2], "later": 1},
        *({"dead": dead} for dead in ({"sequence": 1}, [{"sequence": 1}])),
        *({"out": out} for out in ([["w"]], [["w", 5, 1]], "w")),
        *({"why": why} for why in ([["exit 1"]], [["exit 1", 1, 1]])),
    ]
    for fields in lines:
        with pytest.raises(BadWork):
            decode_work(encode_line({**fields, "synced": 0}))
