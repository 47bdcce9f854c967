"""Small batches and raw segments as bytes, for tests that read or damage them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wald.format import control
from wald.format.batch import Encoding, Flag, encode, route_prefix
from wald.format.segment import SegmentHeader, encode_header

LOG_ID = bytes(range(16))
TIME_NS = 1_700_000_000_000_000_000


def batch(payload: bytes = b"one\ntwo\n", *, base: int = 1, route: bytes = b"web", **changes: Any) -> bytes:
    """One batch; a count that is not given is that of the newlines."""
    told = {"count": payload.count(b"\n"), "append_time_ns": TIME_NS + base, "epoch": 3} | changes
    parts = encode(
        route_prefix(route),
        [payload],
        payload_bytes=len(payload),
        base_sequence=base,
        route_bytes=len(route),
        **told,
    )
    return b"".join(parts)


def control_batch(state: control.State) -> bytes:
    """The first batch of a segment."""
    payload = control.encode(state)
    base = state.next_sequence
    return batch(payload, base=base, route=b"", count=0, encoding=Encoding.CONTROL, flags=Flag.CONTROL)


def segment(payloads: Sequence[bytes], *, base: int = 1, route: bytes = b"web") -> tuple[bytes, list[int]]:
    """A raw segment with a batch for each of ``payloads`` behind its control batch, and where each batch begins."""
    parts = [
        encode_header(SegmentHeader(LOG_ID, base, 3, TIME_NS)),
        control_batch(control.State(base, TIME_NS, {route.decode(): base - 1})),
    ]
    for payload in payloads:
        parts.append(batch(payload, base=base, route=route))
        base += payload.count(b"\n")
    offsets, end = [], 0
    for part in parts:
        offsets.append(end)
        end += len(part)
    return b"".join(parts), offsets[1:]
