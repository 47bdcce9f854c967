"""Small batches and raw segments as bytes, for tests that read or damage them."""

import struct
from collections.abc import Sequence
from typing import Any

from crc32c import crc32c
from hypothesis import strategies as st

from wald.format.batch import (
    HEADER,
    TRAILER,
    BatchHeader,
    Encoding,
    Flag,
    checksum_body,
    encode_batch,
    padded,
    route_prefix,
    seed,
)
from wald.format.log_state import LogState, Peer, encode_peer, encode_state, peer_number
from wald.format.segment import SegmentHeader, encode_segment_header

LOG_ID = bytes(range(16))
TIME_NS = 1_700_000_000_000_000_000
SALT = 0x5EA5A17


def batch(
    payload: bytes = b"one\ntwo\n", *, base: int = 1, route: bytes = b"web", at: int = 0, **changes: Any
) -> bytes:
    """Return one batch for position ``at`` of a segment; the default count is the number of newlines."""
    prefix = route_prefix(route)
    reported = {
        "body_checksum": checksum_body(prefix, [payload], len(payload)),
        "payload_bytes": len(payload),
        "base_sequence": base,
        "append_time_ns": TIME_NS + base,
        "producer_id": 0,
        "producer_sequence": 0,
        "count": payload.count(b"\n"),
        "epoch": 3,
        "encoding": Encoding.LINES,
        "flags": 0,
        "route_bytes": len(route),
    }
    return b"".join(encode_batch(BatchHeader(**(reported | changes)), prefix, [payload], seed(SALT, at)))


BATCHES = st.builds(
    batch,
    st.binary(max_size=100),
    base=st.integers(0, (1 << 64) - 1),
    route=st.from_regex(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    append_time_ns=st.integers(0, (1 << 63) - 1),
    epoch=st.integers(0, (1 << 32) - 1),
    producer_id=st.integers(0, (1 << 64) - 1),
    producer_sequence=st.integers(0, (1 << 64) - 1),
    flags=st.sampled_from([0, 1, 2, 3, 4, 5]),
    encoding=st.sampled_from([Encoding.LINES, Encoding.COLUMNS]),
)


def crafted(body: bytes = b"", **changes: Any) -> bytes:
    """Return a batch with any header fields and valid checksums."""
    reported = {
        "body_checksum": crc32c(body),
        "payload_bytes": 0,
        "base_sequence": 1,
        "append_time_ns": 1,
        "producer_id": 0,
        "producer_sequence": 0,
        "count": 0,
        "epoch": 1,
        "encoding": 1,
        "flags": 0,
        "route_bytes": 0,
        "peer": 0,
    }
    fields = struct.pack("<IIQqQQIIBBHI", *(reported | changes).values())
    return b"WBAT" + struct.pack("<I", crc32c(fields, seed(SALT, 0))) + fields + body


def control_batch(state: LogState) -> bytes:
    """Return the first batch of a segment."""
    payload = encode_state(state)
    base = state.next_sequence
    return batch(payload, base=base, route=b"", count=0, encoding=Encoding.CONTROL, flags=Flag.CONTROL)


def segment_header(base: int = 1, **changes: Any) -> bytes:
    """Return the start of a segment."""
    return encode_segment_header(SegmentHeader(LOG_ID, base, 3, TIME_NS, SALT, **changes))


def joined(batches: Sequence[bytes], *, start: int = 64, salt: int = SALT) -> bytes:
    """Return consecutive batches encoded for their positions after ``start``."""
    data = b""
    for each in batches:
        data += moved(each, start + len(data), salt=salt)
    return data


def moved(data: bytes, at: int, *, salt: int = SALT) -> bytes:
    """Encode a batch of position 0 for another position; a damaged body stays damaged, and other bytes stay."""
    if len(data) < HEADER.size or crc32c(data[8 : HEADER.size], seed(SALT, 0)) != int.from_bytes(data[4:8], "little"):
        return data
    _, _, _, length, *_, route_bytes, _ = HEADER.unpack_from(data)
    here = seed(salt, at)
    end: int = HEADER.size + padded(route_bytes) + padded(length) + TRAILER.size
    checked = data[8 : HEADER.size]
    reported = end.to_bytes(4, "little")
    trailer = reported + crc32c(reported, here).to_bytes(4, "little")
    header = data[:4] + crc32c(checked, here).to_bytes(4, "little") + checked
    return header + data[HEADER.size : end - TRAILER.size] + trailer + data[end:]


def peer_batch(peer: Peer, *, number: int, base: int = 1) -> bytes:
    """Return the batch that introduces ``peer``."""
    payload = encode_peer(peer)
    encoding, flags = Encoding.CONTROL, Flag.CONTROL
    return batch(payload, base=base, route=b"", count=0, peer=number, encoding=encoding, flags=flags)


def segment(
    payloads: Sequence[bytes], *, base: int = 1, route: bytes = b"web", peer: Peer | None = None, **changes: Any
) -> tuple[bytes, list[int]]:
    """Return a raw segment with a batch for each of ``payloads`` after its control batch, and their offsets."""
    batches = [control_batch(LogState(base, TIME_NS, {route.decode(): base - 1}))]
    opening = segment_header(base, **changes)
    number = peer_number(len(opening) + len(batches[0])) if peer is not None else 0
    if peer is not None:
        batches.append(peer_batch(peer, number=number, base=base))
    for payload in payloads:
        batches.append(batch(payload, base=base, route=route, peer=number))
        base += payload.count(b"\n")
    offsets, end = [], len(opening)
    for part in batches:
        offsets.append(end)
        end += len(part)
    return opening + joined(batches), offsets
