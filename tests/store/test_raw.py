"""Scanning a raw segment: whatever is damaged, the batches around it are found, and nothing that was never written."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from damage import peak_bytes
from sample_segments import LOG_ID, TIME_NS, batch, control_batch, joined, segment, segment_header

import wald.segments.raw_scan as raw_module
from wald.format.batch import HEADER, ParseOutcome
from wald.format.log_state import LogState
from wald.segments.raw_scan import (
    FIRST_BATCH,
    SEQUENCES_REPEAT,
    WINDOW_BYTES,
    DamagedBytes,
    RawFile,
    ScannedBatch,
    SegmentEnd,
)

PAYLOADS = [b"one\ntwo\n", b"\n", b"three\n" * 9, b"four" * 30 + b"\n", b"WBAT" * 16 + b"\n", b"last\n"]
SMALL, OFFSETS = segment(PAYLOADS)
ENDS = [*OFFSETS[1:], len(SMALL)]
SPARE = bytes(512)  # as if preallocated

Damage = Callable[[bytes, int], bytes]


def flip(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1 << position % 8]) + data[position + 1 :]


def zero(data: bytes, position: int) -> bytes:
    return data[:position] + bytes(len(data[position : position + 24])) + data[position + 24 :]


def garbage(data: bytes, position: int) -> bytes:
    noise = bytes((position * 31 + i * 97) % 255 + 1 for i in range(len(data[position : position + 40])))
    return data[:position] + noise + data[position + 40 :]


def lost_page(data: bytes, position: int) -> bytes:
    """Zero a page that starts at a batch, as if it had not reached the disk."""
    return data[:position] + bytes(len(data[position : position + 300])) + data[position + 300 :]


@contextmanager
def opened(data: bytes, *, limit: int | None = None) -> Iterator[RawFile]:
    """A file in memory: some of these tests make thousands of them."""
    descriptor = os.memfd_create("segment")
    try:
        os.write(descriptor, data)
        yield RawFile(descriptor, limit=limit)
    finally:
        os.close(descriptor)


def scan(raw: RawFile, *, start: int = FIRST_BATCH) -> tuple[list[ScannedBatch], list[DamagedBytes], SegmentEnd]:
    batches: list[ScannedBatch] = []
    gaps: list[DamagedBytes] = []
    *found, tail = raw.scan(start=start)
    assert isinstance(tail, SegmentEnd)
    for item in found:
        assert not isinstance(item, SegmentEnd)
        if isinstance(item, DamagedBytes):
            gaps.append(item)
        else:
            batches.append(item)
    return batches, gaps, tail


@pytest.fixture(params=[WINDOW_BYTES, 256], ids=["one-window", "many-windows"])
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second makes a small segment span many windows, so that their edges fall everywhere."""
    monkeypatch.setattr(raw_module, "WINDOW_BYTES", request.param)


@pytest.mark.usefixtures("window")
@pytest.mark.parametrize("spare", [b"", SPARE], ids=["cut", "preallocated"])
def test_a_whole_segment_is_its_batches(spare: bytes) -> None:
    with opened(SMALL + spare) as raw:
        batches, gaps, tail = scan(raw)

        assert raw.header().log_id == LOG_ID
        assert [found.offset for found in batches] == OFFSETS
        assert [found.route for found in batches] == [""] + ["web"] * len(PAYLOADS)
        assert [raw.payload(found) for found in batches[1:]] == PAYLOADS
        assert gaps == []
        assert tail == SegmentEnd(len(SMALL), ParseOutcome.END, "", 0)


@pytest.mark.usefixtures("window")
@pytest.mark.parametrize(("damage", "spare"), [(flip, b""), (zero, SPARE), (garbage, b""), (lost_page, SPARE)])
def test_damage_anywhere_costs_the_batches_it_touches_and_no_other(damage: Damage, spare: bytes) -> None:
    """At every byte of a small segment. Only the control batch is not looked for again once it is behind damage."""
    for position in range(FIRST_BATCH, len(SMALL)):
        data = damage(SMALL, position)
        good = [data[start:end] == SMALL[start:end] for start, end in zip(OFFSETS, ENDS, strict=True)]
        last_good = max((i for i, whole in enumerate(good) if whole), default=-1)
        with opened(data + spare) as raw:
            batches, gaps, tail = scan(raw)
            payloads = [raw.payload(found) for found in batches if not found.header.is_control]

        assert [found.offset for found in batches] == [at for at, whole in zip(OFFSETS, good, strict=True) if whole]
        assert payloads == [payload for payload, whole in zip(PAYLOADS, good[1:], strict=True) if whole]
        hidden = [byte for gap in gaps for byte in range(gap.offset, gap.offset + gap.length)]
        bad = [i for i, whole in enumerate(good) if not whole and i < last_good]
        assert hidden == [byte for i in bad for byte in range(OFFSETS[i], ENDS[i])]
        assert tail.offset == (ENDS[last_good] if last_good >= 0 else FIRST_BATCH)
        rest = data[tail.offset :].rstrip(b"\0")
        assert tail.garbage_bytes == len(rest)
        if not rest:
            assert tail.outcome is ParseOutcome.END
        elif rest.startswith(b"WBAT") and damage is not flip:
            assert tail.outcome in (ParseOutcome.DAMAGED, ParseOutcome.TORN)


@pytest.mark.usefixtures("window")
@pytest.mark.parametrize("spare", [b"", SPARE], ids=["cut", "preallocated"])
def test_a_truncation_anywhere_leaves_the_batches_before_it(spare: bytes) -> None:
    """In a preallocated file the missing bytes read as zeros, so torn and damaged batches look the same."""
    for length in range(FIRST_BATCH, len(SMALL)):
        whole = [at for at, end in zip(OFFSETS, ENDS, strict=True) if end <= length]
        reached = max((end for end in ENDS if end <= length), default=FIRST_BATCH)
        with opened(SMALL[:length] + spare) as raw:
            batches, gaps, tail = scan(raw)

        rest = SMALL[reached:length].rstrip(b"\0")
        complete = bool(spare) and (SMALL[:length] + spare).startswith(SMALL[: ENDS[len(whole)]])
        if complete:  # only zeros of its padding were cut off
            assert len(batches) == len(whole) + 1
            continue
        assert [found.offset for found in batches] == whole
        assert gaps == []
        assert (tail.offset, tail.garbage_bytes) == (reached, len(rest))
        if not rest:
            assert tail.outcome is ParseOutcome.END
        elif not spare:
            assert tail.outcome is ParseOutcome.TORN
        else:
            assert tail.outcome is ParseOutcome.DAMAGED


def test_what_is_behind_the_limit_does_not_exist_and_a_file_that_became_shorter_ends_the_scan() -> None:
    for number, end in enumerate(ENDS):
        with opened(SMALL, limit=end) as raw:
            batches, gaps, tail = scan(raw)
            assert raw.read(end - 4, 100) == SMALL[end - 4 : end]

        assert (len(batches), gaps) == (number + 1, [])
        assert tail == SegmentEnd(end, ParseOutcome.END, "", 0)
    for length in range(0, len(SMALL), 5):
        with opened(SMALL[:length], limit=len(SMALL) + (64 << 20)) as raw:
            batches, gaps, tail = scan(raw)
            assert (len(batches), gaps) == (sum(end <= length for end in ENDS), [])
            assert tail.outcome is not ParseOutcome.WHOLE


def test_a_scan_that_starts_anywhere_finds_the_next_batch() -> None:
    """A stale index may point anywhere."""
    with opened(SMALL) as raw:
        for start in range(FIRST_BATCH, len(SMALL)):
            batches, _, _ = scan(raw, start=start)
            aligned = [at for at in OFFSETS if at >= start and (at > OFFSETS[0] or at == start)]
            assert [found.offset for found in batches] == aligned


def test_batches_at_every_window_edge_are_found() -> None:
    """The first batch ends so that the next header begins before, at and behind the end of the window."""
    for short in range(-8, 136, 8):
        payload = bytes(WINDOW_BYTES - 64 - 8 - short - 1) + b"\n"
        data, offsets = segment([payload, b"next\n", b"x" * (WINDOW_BYTES + 999) + b"\n", b"end\n"])
        with opened(data) as raw:
            batches, gaps, tail = scan(raw)
            assert [found.offset for found in batches] == offsets
            assert (gaps, tail.offset) == ([], len(data))


def framed(*parts: bytes) -> bytes:
    """A raw segment of these batches."""
    return segment_header() + joined([control_batch(LogState(1, TIME_NS)), *parts])


def test_a_record_that_looks_like_a_batch_is_never_one() -> None:
    """A producer may send segments as records: they stay content, even if the batch around them is damaged."""
    forged = batch(b"forged\n", base=2)
    outer = batch(b"x" * 7 + b"\n" + forged + b"\n", count=1)
    inner = outer.index(forged)
    after = batch(b"good\n", base=3)
    start = len(framed())
    assert (start + inner) % 8 == 0  # else it would not be looked at

    with opened(framed(outer, after)) as raw:
        assert [found.offset for found in scan(raw)[0]] == [FIRST_BATCH, start, start + len(outer)]
    for position in {64, 72, inner - 1, len(outer) - 9}:
        damaged = flip(outer, position)
        with opened(framed(damaged, after)) as raw:
            batches, gaps, _ = scan(raw)
            assert [found.header.base_sequence for found in batches] == [1, 3]
            assert gaps == [DamagedBytes(start, len(outer), "the body's checksum is wrong")]
    for length in range(HEADER.size, len(outer)):
        with opened(framed(outer)[: start + length]) as raw:
            batches, gaps, tail = scan(raw)
            assert (len(batches), gaps, tail.outcome) == (1, [], ParseOutcome.TORN)


def test_memory_stays_constant() -> None:
    """A batch larger than the window, a lying length, zeros and damage: never more than a few windows are held."""
    large = batch(b"x" * (8 << 20) + b"\n")
    data = framed(flip(large, 1 << 20), batch(b"after\n", base=2), batch(b"y" * (4 << 20) + b"\n", base=3)) + bytes(
        4 << 20
    )
    with opened(data) as raw:
        assert [len(found) for found in scan(raw)[:2]] == [3, 1]
    with opened(data) as raw:
        assert peak_bytes(lambda: scan(raw)) < 4 * WINDOW_BYTES


def test_a_batch_whose_sequences_were_given_out_before_is_damage() -> None:
    """A disk wrote a block twice or to the wrong place; no record may be read twice."""
    first, second, third = batch(b"a\nb\n"), batch(b"c\n", base=3), batch(b"d\n", base=4)
    with opened(framed(first, second, first, third)) as raw:
        batches, gaps, _ = scan(raw)
    assert [found.header.base_sequence for found in batches] == [1, 1, 3, 4]
    assert [(gap.length, gap.reason) for gap in gaps] == [(len(first), SEQUENCES_REPEAT)]

    with opened(framed(first, second, second)) as raw:
        batches, gaps, tail = scan(raw)
    assert [found.header.base_sequence for found in batches] == [1, 1, 3]
    assert (gaps, tail.outcome, tail.garbage_bytes) == ([], ParseOutcome.DAMAGED, len(second.rstrip(b"\0")))
