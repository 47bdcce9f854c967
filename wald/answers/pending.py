"""What of a work group is with workers, waits or is being given up, as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from wald.answers.fields import time_fields
from wald.format.work import DeadRecord
from wald.work.snapshot import Out, Waiting


def pending_fields(
    out: Iterable[Out], waiting: Iterable[Waiting], dead: Iterable[DeadRecord], count: int | None
) -> Iterator[Mapping[str, object]]:
    """An object for each run of records that are alike.

    Args:
        count: how many of each kind; None: all.
    """
    yield from islice(map(_out_fields, out), count)
    yield from islice(map(_waiting_fields, waiting), count)
    yield from islice(map(_dead_fields, dead), count)


def _out_fields(each: Out) -> Mapping[str, object]:
    """What a worker has, in JSON."""
    fields = {"kind": "out", "first": each.first, "last": each.last, "consumer": each.worker}
    return fields | time_fields("until", each.until_ns) | {"tries": each.tries}


def _waiting_fields(each: Waiting) -> Mapping[str, object]:
    """What waits, in JSON."""
    fields: dict[str, object] = {"kind": "waiting", "first": each.first, "last": each.last}
    return fields | time_fields("due", each.due_ns) | {"tries": each.tries, "reason": each.reason}


def _dead_fields(each: DeadRecord) -> Mapping[str, object]:
    """What is being given up, in JSON."""
    fields: dict[str, object] = {"kind": "giving-up", "sequence": each.sequence}
    more = {"tries": each.tries, "reason": each.reason, "dead_letter_route": each.route}
    return fields | time_fields("since", each.at_ns) | more
