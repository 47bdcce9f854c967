"""The reader of requests: whatever a stream holds and however it is cut, the same events come out of it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wald.format.protocol import (
    LINE_MAX_BYTES,
    Code,
    Command,
    ProtocolError,
    Publish,
    RequestReader,
    encode_publish,
)

HELD_MAX_BYTES = 40  # payloads up to this are awaited whole, larger ones are taken in parts
REQUEST_MAX_BYTES = 5000

Taken = tuple[str, object, bytes]
"""An event as a test compares it: its kind, what it says, and the payload that was taken with it."""


def read(reader: RequestReader, data: bytes, taken: list[Taken]) -> None:
    """Feed ``data`` as the daemon does, and take what comes of it; payloads of the route ``no`` are skipped."""
    buffer = bytearray(b"before" + reader.leftover + data + b"after PUB web 5\n")
    reader.feed(buffer, len(b"before"), len(buffer) - len(b"after PUB web 5\n"))
    while take_payload(reader, taken) and (event := reader.next_event()) is not None:
        if isinstance(event, ProtocolError):
            taken.append(("error", (event.code, event.message, event.payload_bytes), b""))
            continue
        taken.append(("request", event, b""))
        if isinstance(event, Publish) and event.route == b"no":
            reader.skip_payload()
    assert reader.release() <= len(buffer) - len(b"after PUB web 5\n")


def take_payload(reader: RequestReader, taken: list[Taken]) -> bool:
    """Take what has come of an announced payload; False if more of it has to come."""
    if reader.payload_bytes is None:
        return True
    kind, event, before = taken[-1]
    assert isinstance(event, Publish)
    assert reader.next_event() is None
    if event.payload_bytes > HELD_MAX_BYTES:
        taken[-1] = kind, event, before + bytes(reader.read_part())
        return reader.payload_bytes is None
    payload = reader.read_payload()
    if payload is not None:
        taken[-1] = kind, event, bytes(payload)
    return payload is not None


def events(chunks: Iterable[bytes]) -> tuple[list[Taken], RequestReader]:
    reader = RequestReader(REQUEST_MAX_BYTES)
    taken: list[Taken] = []
    for chunk in chunks:
        read(reader, chunk, taken)
        assert len(reader.leftover) <= LINE_MAX_BYTES + HELD_MAX_BYTES
        assert not (reader.closed and reader.leftover)
    return taken, reader


def cut(stream: bytes, places: Iterable[int]) -> list[bytes]:
    ends = sorted({min(place, len(stream)) for place in places} | {0, len(stream)})
    return [stream[start:end] for start, end in pairwise(ends)]


def publish(route: bytes, payload: bytes) -> bytes:
    return encode_publish(Publish(route, len(payload))) + payload


REQUESTS = st.one_of(
    st.builds(publish, st.sampled_from([b"web", b"no"]), st.binary(max_size=HELD_MAX_BYTES)),
    st.builds(publish, st.sampled_from([b"web", b"no"]), st.binary(max_size=3 * HELD_MAX_BYTES)),
    st.sampled_from(
        [b"PING\n", b"HEAD\r\n", b"ROUTE ADD x\n", b"\n", b"GET /\n", b"PUB web 0\n", b"PUB web 5 x=y\n12345"]
    ),
    st.just(b"PUB web 6000\n" + b"p" * 6000),
)
STREAMS = st.lists(REQUESTS, max_size=8).map(b"".join) | st.binary(max_size=200)
PLACES = st.lists(st.integers(0, 7000), max_size=20)


@settings(max_examples=300, deadline=None)
@given(stream=STREAMS | st.tuples(STREAMS, st.binary(max_size=2000)).map(b"".join), places=PLACES)
def test_any_cut_gives_the_same_events(stream: bytes, places: list[int]) -> None:
    """A stream that comes in one piece, in pieces, or byte by byte is read alike, and ends in the same state."""
    whole, at_once = events([stream])
    pieces, by_pieces = events(cut(stream, places))
    single, by_bytes = events(stream[at : at + 1] for at in range(len(stream)))

    assert whole == pieces == single
    assert at_once.closed == by_pieces.closed == by_bytes.closed
    assert at_once.leftover == by_pieces.leftover == by_bytes.leftover
    assert at_once.unfinished == by_pieces.unfinished == by_bytes.unfinished


@settings(max_examples=500, deadline=None)
@given(
    chunks=st.lists(
        st.binary(max_size=300) | st.sampled_from([b"PUB ", b"web ", b"9\n", b"\n", b"x" * 600]), max_size=30
    )
)
def test_any_bytes_give_events_or_one_last_error(chunks: list[bytes]) -> None:
    """Nothing is raised; after an error from which it cannot go on the reader gives nothing more and keeps nothing."""
    taken, reader = events(chunks)
    last = [number for number, (kind, said, _) in enumerate(taken) if kind == "error" and said[2] is None]  # type: ignore[index]

    assert reader.closed == bool(last)
    assert last in ([], [len(taken) - 1])


def test_many_requests_of_one_read() -> None:
    """What comes together is read in order, without a copy of its payloads."""
    taken, reader = events([b"PUB a 2\nx\nPING\nPUB b 3\nyz\n"])

    assert taken == [
        ("request", Publish(b"a", 2), b"x\n"),
        ("request", Command("PING"), b""),
        ("request", Publish(b"b", 3), b"yz\n"),
    ]
    assert not reader.unfinished


def test_payloads_are_views_of_what_was_fed() -> None:
    """A payload is not copied: it lies where it was received."""
    buffer = bytearray(b"PUB a 2\nx\n")
    reader = RequestReader()
    reader.feed(buffer, 0, len(buffer))
    reader.next_event()
    payload = reader.read_payload()

    assert payload is not None
    assert payload.obj is buffer


def test_a_request_is_announced_before_its_payload() -> None:
    """So it can be refused at once, or its payload spooled, however large it is."""
    reader = RequestReader()
    reader.feed(b"PUB a 1000000\nxy", 0, 16)

    assert reader.next_event() == Publish(b"a", 1000000)
    assert reader.read_payload() is None
    assert bytes(reader.read_part()) == b"xy"
    assert reader.payload_bytes == 999998
    assert (reader.release(), reader.leftover, reader.unfinished) == (16, b"", True)


def test_a_line_without_an_end_is_the_last() -> None:
    """Where the next request would begin cannot be known."""
    taken, reader = events([b"PING\n" + b"x" * LINE_MAX_BYTES, b"PING\n"])

    assert [kind for kind, _, _ in taken] == ["request", "error"]
    assert taken[1][1] == (Code.BAD_REQUEST, f"no newline in {LINE_MAX_BYTES} bytes", None)
    assert reader.closed


@pytest.mark.parametrize("line", [b"PUB web 6000\n", b"PUB web 6 what=ever\n"])
def test_the_payload_of_a_bad_request_is_passed_over(line: bytes) -> None:
    """The next request is read although this one was refused, wherever its payload is cut."""
    payload = b"p" * int(line.split()[2])
    taken, reader = events([line + payload[:3], payload[3:], b"PING\n"])

    assert [kind for kind, _, _ in taken] == ["error", "request"]
    assert not reader.unfinished
