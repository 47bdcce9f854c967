"""How far the log is durable, and what became of a record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wald.answers.fields import ledger_fields, segment_fields, time_fields
from wald.files.layout import Root
from wald.format.head import Head

if TYPE_CHECKING:
    from wald.reading.lookup import Whereabouts


def head_fields(root: Root, head: Head) -> dict[str, object]:
    """The head as ``wald head --json`` has it."""
    from wald.files.disk import Disk
    from wald.writing.run_reports import no_daemon_message

    return {
        "sequence": head.sequence,
        "segment": head.segment,
        "position": head.position,
        "epoch": head.epoch,
        **time_fields("at", head.at_ns),
        "no_daemon": no_daemon_message(root, Disk()),
    }


def where_fields(found: Whereabouts) -> dict[str, object]:
    """What became of a record, as ``wald where --json`` has it."""
    return {
        "sequence": found.sequence,
        "state": found.state.value,
        "message": found.message,
        "durable": found.durable,
        "route": found.route,
        **time_fields("append_time", found.append_time_ns),
        **segment_fields(found.segment),
        "position": found.position,
        "processed": found.processed,
        "bundle": found.bundle,
        "member": found.member,
        "reclaimed": found.reclaimed and ledger_fields(found.reclaimed),
    }
