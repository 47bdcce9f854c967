"""History of a work group as its observers recorded it: calls, dead letters, reads of the log, changes of the clock.

Times are ns of CLOCK_MONOTONIC. The owner writes a line before and after each call, so a call without an end is one
whose owner died: it may have taken effect or not.
"""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

NEVER = 1 << 63


class Given(NamedTuple):
    """A delivered record.

    Attributes:
        number: identity of the record at the producer.
        due_ns: the time in its header, by the wall clock; 0: none.
    """

    sequence: int
    tries: int
    key: str | None = None
    due_ns: int = 0
    number: int = -1


@dataclass(slots=True)
class Call:
    """A call of a method of the group.

    Attributes:
        life: the number of the owner that was asked.
        kind: "lease", "ack", "nack", "extend" or "release".
        ended_ns: time of the return; :data:`NEVER` if it did not return.
        sequences: the records of the call, without the refused ones.
        seconds: of the lease, or of the delay.
        given: the records that a lease returned.
    """

    life: int
    kind: str
    worker: str
    began_ns: int
    ended_ns: int = NEVER
    sequences: tuple[int, ...] = ()
    seconds: float = 0.0
    reason: str = ""
    given: tuple[Given, ...] = ()


class Letter(NamedTuple):
    """A dead letter.

    Attributes:
        origin: the sequence of the record that was given up.
        number: of its value, as in :class:`Given`.
        seen_ns: time at which it was found.
    """

    origin: int
    tries: int
    reason: str
    number: int
    seen_ns: int


class Look(NamedTuple):
    """State of the log once all records found in it were done; the cursor was read first.

    Attributes:
        cursor: of the group.
        reclaimed: the ranges of records of the route in deleted segments.
    """

    at_ns: int
    cursor: int
    reclaimed: tuple[tuple[int, int], ...] = ()


class Offset(NamedTuple):
    """Error of the owners' wall clock since a time; during the change it may be the old or the new one."""

    since_ns: int
    by_ns: int


@dataclass
class History:
    """All observations.

    Attributes:
        sent: the number of each record that the daemon has acknowledged to the producer.
        base_ns: difference of the correct wall clock and CLOCK_MONOTONIC.
        done: True if the run waited for all records at the end.
    """

    order: str
    window: int
    max_tries: int
    calls: list[Call] = field(default_factory=list)
    letters: list[Letter] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    offsets: list[Offset] = field(default_factory=list)
    sent: dict[int, int] = field(default_factory=dict)
    base_ns: int = field(default_factory=lambda: time.time_ns() - time.monotonic_ns())
    done: bool = True


class Notes:
    """File of lines that survive a SIGKILL of the writer."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, **fields: Any) -> None:
        os.write(self._descriptor, json.dumps(fields).encode() + b"\n")


def notes(path: Path) -> Iterable[dict[str, Any]]:
    """Yield the complete lines of such a file."""
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def calls_of(life: int, path: Path) -> list[Call]:
    """Return the notes of the owner with this number."""
    calls: dict[int, Call] = {}
    for note in notes(path):
        if "kind" in note:
            calls[note["call"]] = Call(
                life,
                note["kind"],
                note["worker"],
                note["at_ns"],
                sequences=tuple(note.get("sequences", ())),
                seconds=note.get("seconds", 0.0),
                reason=note.get("reason", ""),
            )
            continue
        call = calls[note["call"]]
        call.ended_ns = note["at_ns"]
        call.given = tuple(Given(*given) for given in note.get("given", ()))
        refused = set(note.get("refused", ()))
        call.sequences = tuple(sequence for sequence in call.sequences if sequence not in refused)
    return list(calls.values())
