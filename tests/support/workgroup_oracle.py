"""Calls of a work group as its owners noted them, and a check of what must hold among processes that die.

Times are ns of CLOCK_MONOTONIC. An owner writes a line before and after each call, so a call without an end is one
whose owner died: it may have taken effect or not. A call took effect at some moment between its beginning and its end;
a promise counts as broken only if every choice of these moments breaks it. ``tests/work/test_model.py`` checks what a
single owner decides: window, due times, cursor; ``test_giving_up.py`` the reasons.
"""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

NEVER = 1 << 63
_NS = 1_000_000_000
_SHOWN = 5


class Given(NamedTuple):
    """A delivered record; ``number`` is its identity at the producer."""

    sequence: int
    tries: int
    key: str | None
    number: int


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
    given: tuple[Given, ...] = ()


class Letter(NamedTuple):
    """A dead letter: the sequence of the record that was given up, and its number."""

    origin: int
    tries: int
    number: int


class Notes:
    """File of lines that survive a SIGKILL of the writer."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, **fields: Any) -> None:
        os.write(self._descriptor, json.dumps(fields).encode() + b"\n")


def calls_of(life: int, path: Path) -> list[Call]:
    """Return the notes of the owner with this number."""
    calls: dict[int, Call] = {}
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            continue
        note = json.loads(line)
        number, at_ns = note.pop("call"), note.pop("at_ns")
        if "kind" in note:
            calls[number] = Call(life, began_ns=at_ns, **note)
            continue
        call = calls[number]
        call.ended_ns = at_ns
        call.given = tuple(Given(*given) for given in note.get("given", ()))
        call.sequences = tuple(each for each in call.sequences if each not in note.get("refused", ()))
    return list(calls.values())


class _Delivery(NamedTuple):
    given: Given
    call: Call


@dataclass
class History:
    """All observations; ``sent`` has the number of each record that the daemon has acknowledged to the producer."""

    order: str
    max_tries: int
    calls: list[Call] = field(default_factory=list)
    letters: list[Letter] = field(default_factory=list)
    sent: dict[int, int] = field(default_factory=dict)

    def judge(self) -> list[str]:
        """Return every broken promise in words, with a limit for each kind."""
        self._deliveries: dict[int, list[_Delivery]] = defaultdict(list)
        self._of: dict[int, list[Call]] = defaultdict(list)
        for call in self.calls:
            for given in call.given:
                self._deliveries[given.sequence].append(_Delivery(given, call))
            for sequence in call.sequences:
                self._of[sequence].append(call)
        for deliveries in self._deliveries.values():
            deliveries.sort(key=lambda each: (each.call.life, each.given.tries, each.call.began_ns))
        self._releases = [call for call in self.calls if call.kind == "release"]
        given_up = {letter.origin for letter in self.letters}
        self._perhaps_done_ns: dict[int, int] = {}  # the earliest time at which it may be done
        for sequence, deliveries in self._deliveries.items():
            begun = [call.began_ns for call in self._acks(sequence)]
            if sequence in given_up:  # another delivery would have increased the tries
                begun.append(max(each.call.began_ns for each in deliveries))
            self._perhaps_done_ns[sequence] = min(begun, default=NEVER)
        promises: list[Callable[[], Iterator[str]]] = [
            self.acknowledged_is_never_delivered_again,
            self.tries_never_go_down,
            self.one_worker_at_a_time,
            self.a_key_comes_in_its_order,
            self.given_up_exactly_once,
            self.all_come_to_an_end,
        ]
        return [f"{promise.__name__}: {words}" for promise in promises for words in list(promise())[:_SHOWN]]

    def acknowledged_is_never_delivered_again(self) -> Iterator[str]:
        for sequence, deliveries in self._deliveries.items():
            done = min((call.ended_ns for call in self._acks(sequence)), default=NEVER)
            for given, call in deliveries:
                if call.began_ns >= done:
                    yield f"{sequence} was given to {call.worker} with try {given.tries}"

    def tries_never_go_down(self) -> Iterator[str]:
        for sequence, deliveries in self._deliveries.items():
            if deliveries[0].given.tries > 1 + deliveries[0].call.life:
                yield f"{sequence} came first with try {deliveries[0].given.tries}"
            for before, after in pairwise(deliveries):
                lives, step = after.call.life - before.call.life, after.given.tries - before.given.tries
                if not (0 if lives else 1) <= step <= 1 + lives or before.call.began_ns >= after.call.ended_ns:
                    yield f"{sequence}: try {before.given.tries}, then {after.given.tries}, {lives} owners later"
            if self.max_tries < deliveries[-1].given.tries:
                yield f"{sequence} was delivered {deliveries[-1].given.tries} times, and should have been given up"

    def one_worker_at_a_time(self) -> Iterator[str]:
        for sequence, deliveries in self._deliveries.items():
            for before, after in pairwise(deliveries):
                together = [before]  # with an earlier record of its key, a record comes back
                if self.order == "key" and before.given.key is not None:
                    together += [
                        _Delivery(given, before.call)
                        for given in before.call.given
                        if given.key == before.given.key and given.sequence < sequence
                    ]
                over = before.call.life != after.call.life
                if not over and not any(self._may_be_over(each, after.call.ended_ns) for each in together):
                    yield f"{sequence} was with {before.call.worker}, and was given to {after.call.worker}"

    def a_key_comes_in_its_order(self) -> Iterator[str]:
        keys: dict[str, list[int]] = defaultdict(list)
        for sequence in sorted(self._deliveries) if self.order == "key" else ():
            if (key := self._deliveries[sequence][0].given.key) is not None:
                keys[key].append(sequence)
        for sequences in keys.values():
            latest = 0  # when all before this one may have been done
            for sequence in sequences:
                for _, call in self._deliveries[sequence]:
                    if latest <= call.ended_ns:
                        continue
                    beside = [given.sequence for given in call.given]
                    beside = beside[: beside.index(sequence)]
                    before = [each for each in sequences if each < sequence and each not in beside]
                    if any(self._perhaps_done_ns[each] > call.ended_ns for each in before):
                        yield f"{sequence} was given to {call.worker} while an earlier one of its key was open"
                latest = max(latest, self._perhaps_done_ns[sequence])

    def given_up_exactly_once(self) -> Iterator[str]:
        for origin in {letter.origin for letter in self.letters}:
            letters = [letter for letter in self.letters if letter.origin == origin]
            if len(letters) > 1:
                yield f"{origin} is there {len(letters)} times"
            if not (deliveries := self._deliveries.get(origin)):
                continue
            last = deliveries[-1].given
            if letters[0].number != last.number:
                yield f"{origin}: its dead letter holds another record"
            if letters[0].tries < max(self.max_tries, last.tries):
                yield f"{origin}: given up after {last.tries} tries, and its dead letter says {letters[0].tries}"

    def all_come_to_an_end(self) -> Iterator[str]:
        for sequence, number in self.sent.items():
            if not (deliveries := self._deliveries.get(sequence)):
                yield f"{sequence} was never delivered"
            elif deliveries[0].given.number != number:
                yield f"{sequence} is record {number}, and {deliveries[0].given.number} was delivered"
            elif self._perhaps_done_ns[sequence] == NEVER:
                yield f"{sequence} was neither acknowledged nor given up"

    def _acks(self, sequence: int) -> list[Call]:
        return [call for call in self._of[sequence] if call.kind == "ack"]

    def _may_be_over(self, delivery: _Delivery, at_ns: int) -> bool:
        """Return True if the lease of the delivery may have ended before ``at_ns``."""
        call = delivery.call
        until = call.began_ns + int(call.seconds * _NS)
        for other in (*self._of[delivery.given.sequence], *self._releases):
            if other.worker != call.worker or other.ended_ns < call.began_ns or other.began_ns > at_ns:
                continue
            if other.kind != "extend":
                return True
            if other.ended_ns < NEVER:
                until = other.began_ns + int(other.seconds * _NS)
        return until <= at_ns
