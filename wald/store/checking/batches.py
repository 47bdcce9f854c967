"""What is wrong with a whole batch: with its payload, and with its place behind the batches before it."""

from __future__ import annotations

from collections.abc import Iterator

from stringzilla import count as count_bytes

from wald.format import columns
from wald.format.batch import BatchHeader, Encoding, Flag
from wald.format.peers import BadPeer, decode_peer
from wald.format.state import BadControl, LogState, decode_state
from wald.store.checking.opening import Opening

_CONTINUES = int(Flag.CONTINUES)  # enums are slow
_ENDS_WITHOUT_NEWLINE = int(Flag.CONTINUED | Flag.UNTERMINATED)


def batch_wrong(
    header: BatchHeader, route: str, payload: memoryview, before: LogState, opening: Opening
) -> Iterator[str]:
    """Compare a batch with its payload, and with the state at the end of the batch before it.

    Args:
        opening: of the segment; gets the state that a control batch has.
    """
    if header.is_dropped:
        yield from _order_wrong(header, route, before)
    elif header.is_state:
        yield from _control_wrong(header, payload, before, opening)
    elif header.is_control:
        yield from _peer_wrong(header, payload, before)
    else:
        yield from payload_wrong(header, payload)
        yield from _order_wrong(header, route, before)
    if header.append_time_ns < before.append_time_ns:
        yield "its append time is before that of the batch before it"


def payload_wrong(header: BatchHeader, payload: memoryview) -> Iterator[str]:
    """Compare what the header says of the payload with the payload."""
    if header.encoding == Encoding.COLUMNS:
        try:
            count = columns.decode(payload).count
        except columns.BadColumns as error:
            yield f"the columns do not decode: {error}"
            return
    else:
        newlines = count_bytes(payload, b"\n") if payload else 0
        count = newlines + bool(header.flags & _ENDS_WITHOUT_NEWLINE) - bool(header.flags & _CONTINUES)
    if count != header.count:
        yield f"the header counts {header.count} records, the payload has {count}"


def _order_wrong(header: BatchHeader, route: str, before: LogState) -> Iterator[str]:
    if header.base_sequence != before.next_sequence:
        yield f"begins with record {header.base_sequence}; {before.next_sequence} is due"
    begun = before.open_records.get(route)
    if begun is not None and header.continues_sequence != begun:
        yield f"record {begun} of route {route} has not ended, and this batch does not continue it"


def _control_wrong(header: BatchHeader, payload: memoryview, before: LogState, opening: Opening) -> Iterator[str]:
    try:
        state = decode_state(payload)
    except BadControl as error:
        yield f"the control state does not decode: {error}"
        return
    opening.add_control(state)
    if header.count or state.next_sequence != header.base_sequence:
        yield f"the control state goes on with record {state.next_sequence}, the batch with {header.base_sequence}"
    for route, last in before.routes.items():
        if last > state.routes.get(route, 0):
            yield f"the control state has record {state.routes.get(route, 0)} as route {route}'s last; {last} is"
    for route, sequence in before.open_records.items():
        if state.open_records.get(route) != sequence:
            yield f"the control state does not know that record {sequence} of route {route} has not ended"


def _peer_wrong(header: BatchHeader, payload: memoryview, before: LogState) -> Iterator[str]:
    try:
        decode_peer(payload)
    except BadPeer as error:
        yield f"the batch that introduces peer {header.peer} does not decode: {error}"
    if header.count or header.base_sequence != before.next_sequence:
        yield f"the batch that introduces peer {header.peer} has records, or is out of order"
