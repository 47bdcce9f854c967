"""Transfers that the last life of the daemon announced and did not carry out: their bytes are in pipe and log.

They are looked for before this life writes anything: what stands at an announced place then is what was announced. In
the log they are found in whichever form their segment has, for a FIFO may be unreadable for more than one life.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from wald.daemon.transfers import Transfers
from wald.errors import Damaged
from wald.format.parsing import Whole
from wald.format.transfers import Transfer
from wald.store.files.directory import Root
from wald.store.segments.view import View, read_view


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A transfer to be finished when its pipe is opened: the slot that tells of it, and what the log holds of it."""

    slot: int
    payload: bytes


def unfinished_transfers(root: Root, transfers: Transfers, slots: int, *, log_id: bytes) -> dict[int, Unfinished]:
    """Those that the first ``slots`` slots tell of, by the inode of their pipe."""
    found = {}
    for slot in range(slots):
        told = transfers.told(slot)
        if told is not None and not told[1]:
            payload = _written(root, told[0], log_id)
            if payload is not None:
                found[told[0].inode] = Unfinished(slot, payload)
    return found


def _written(root: Root, transfer: Transfer, log_id: bytes) -> bytes | None:
    """The payload at the place that was announced; None if no such batch was written, or it is gone."""
    try:
        return _payload(read_view(root, log_id).including_released(), transfer)
    except Damaged:
        return None


def _payload(view: View, transfer: Transfer) -> bytes | None:
    for segment in view.segments:
        if segment.base_sequence == transfer.segment:
            with closing(view.open(segment)) as opened:
                met = next(opened.batches(transfer.position, None), None)
                if isinstance(met, Whole) and (met.position, met.route) == (transfer.position, transfer.route):
                    return bytes(met.payload)
    return None
