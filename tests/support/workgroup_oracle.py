"""Oracle that checks a :class:`History` against the promises of ``docs/work.md``. It is independent of the code.

A call took effect at some moment between its beginning and its end; a call without an end may have had no effect. A
promise counts as broken only if every choice of these moments breaks it.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from workgroup_history import NEVER, Call, Given, History, Letter

_NS = 1_000_000_000
_ROUNDING_NS = 1_000_000
_SHOWN = 5


class _Delivery(NamedTuple):
    given: Given
    call: Call


class _Facts:
    """Observations of each record."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.deliveries: dict[int, list[_Delivery]] = defaultdict(list)
        self.of: dict[int, list[Call]] = defaultdict(list)
        self.releases = [call for call in history.calls if call.kind == "release"]
        for call in history.calls:
            for given in call.given:
                self.deliveries[given.sequence].append(_Delivery(given, call))
            for sequence in call.sequences:
                self.of[sequence].append(call)
        for found in self.deliveries.values():
            found.sort(key=lambda each: (each.call.life, each.given.tries, each.call.began_ns))
        self.letters: dict[int, list[Letter]] = defaultdict(list)
        for letter in history.letters:
            self.letters[letter.origin].append(letter)
        self.route = sorted(self.deliveries.keys() | history.sent.keys())
        self.done_ns = {sequence: self._perhaps_done_ns(sequence) for sequence in self.route}

    def delivered(self) -> list[tuple[int, list[_Delivery]]]:
        return [(sequence, found) for sequence in self.route if (found := self.deliveries[sequence])]

    def acks(self, sequence: int) -> list[Call]:
        return [call for call in self.of[sequence] if call.kind == "ack"]

    def _perhaps_done_ns(self, sequence: int) -> int:
        """Earliest time at which it may be done."""
        begun = [call.began_ns for call in self.acks(sequence)]
        if self.letters[sequence] and self.deliveries[sequence]:  # another delivery would have increased the tries
            begun.append(max(each.call.began_ns for each in self.deliveries[sequence]))
        return min(begun, default=NEVER)

    def first(self, sequence: int) -> _Delivery | None:
        found = self.deliveries[sequence]
        return min(found, key=lambda each: each.call.began_ns) if found else None


def judge(history: History) -> list[str]:
    """Return every broken promise in words, with a limit for each kind."""
    facts = _Facts(history)
    found = []
    for promise in PROMISES:
        broken = [f"{promise.__name__.strip('_')}: {words}" for words in promise(facts)]
        found += broken[:_SHOWN] + ([f"… and {len(broken) - _SHOWN} more"] if len(broken) > _SHOWN else [])
    return found


def _acknowledged_is_never_delivered_again(facts: _Facts) -> Iterator[str]:
    for sequence, deliveries in facts.delivered():
        done = min((call.ended_ns for call in facts.acks(sequence)), default=NEVER)
        for given, call in deliveries:
            if call.began_ns >= done:
                yield f"{sequence} was given to {call.worker} with try {given.tries}"


def _tries_never_go_down(facts: _Facts) -> Iterator[str]:
    for sequence, deliveries in facts.delivered():
        first = deliveries[0]
        if first.given.tries > 1 + first.call.life:
            yield f"{sequence} came first with try {first.given.tries}"
        for before, after in pairwise(deliveries):
            lives = after.call.life - before.call.life
            step = after.given.tries - before.given.tries
            if not (0 if lives else 1) <= step <= 1 + lives:
                yield f"{sequence}: try {before.given.tries}, then {after.given.tries}, {lives} owners later"
            if before.call.began_ns >= after.call.ended_ns:
                yield f"{sequence}: try {before.given.tries} came after {after.given.tries}"
        if facts.history.max_tries < deliveries[-1].given.tries:
            yield f"{sequence} was delivered {deliveries[-1].given.tries} times, and should have been given up"


def _one_worker_at_a_time(facts: _Facts) -> Iterator[str]:
    for sequence, deliveries in facts.delivered():
        for before, after in pairwise(deliveries):
            if before.call.life != after.call.life or _may_be_over(facts, before, after.call.ended_ns):
                continue
            if not any(
                _may_be_over(facts, companion, after.call.ended_ns) for companion in _earlier_of_its_key(facts, before)
            ):
                yield f"{sequence} was with {before.call.worker}, and was given to {after.call.worker}"


def _may_be_over(facts: _Facts, delivery: _Delivery, at_ns: int) -> bool:
    """True if the lease of the delivery may have ended before ``at_ns``."""
    sequence, call = delivery.given.sequence, delivery.call
    until = call.began_ns + int(call.seconds * _NS)
    for other in facts.of[sequence]:
        if other.worker != call.worker or other.ended_ns < call.began_ns or other.began_ns > at_ns:
            continue
        if other.kind == "extend" and other.ended_ns < NEVER:
            until = other.began_ns + int(other.seconds * _NS)
        elif other.kind in ("ack", "nack"):
            return True
    taken = any(
        other.worker == call.worker and other.began_ns < at_ns and other.ended_ns > call.began_ns
        for other in facts.releases
    )
    return taken or until <= at_ns


def _earlier_of_its_key(facts: _Facts, delivery: _Delivery) -> list[_Delivery]:
    """Return the earlier deliveries of the same key to the same worker by the same owner."""
    if facts.history.order != "key" or delivery.given.key is None:
        return []
    return [
        _Delivery(given, delivery.call)
        for given in delivery.call.given
        if given.key == delivery.given.key and given.sequence < delivery.given.sequence
    ]


def _first_in_the_order_of_the_log(facts: _Facts) -> Iterator[str]:
    earliest = NEVER
    for sequence in reversed(facts.route):
        first = facts.first(sequence)
        if first is None:
            continue
        free = not first.given.due_ns and (facts.history.order == "log" or first.given.key is None)
        if free and first.given.tries == 1 and first.call.began_ns > earliest:
            yield f"{sequence} was first delivered after a later one had been"
        earliest = min(earliest, first.call.ended_ns)


def _a_key_comes_in_its_order(facts: _Facts) -> Iterator[str]:
    if facts.history.order != "key":
        return
    keys: dict[str, list[int]] = defaultdict(list)
    for sequence in facts.route:
        if (deliveries := facts.deliveries[sequence]) and deliveries[0].given.key is not None:
            keys[deliveries[0].given.key].append(sequence)
    for sequences in keys.values():
        latest = 0  # when all before this one may have been done
        for place, sequence in enumerate(sequences):
            for _, call in facts.deliveries[sequence]:
                if latest <= call.ended_ns:
                    continue
                beside = {given.sequence for given in call.given[: _place_in(call, sequence)]}
                open_before = [s for s in sequences[:place] if facts.done_ns[s] > call.ended_ns and s not in beside]
                if open_before:
                    yield f"{sequence} was given to {call.worker} while {open_before[:3]} of its key were open"
            latest = max(latest, facts.done_ns[sequence])


def _place_in(call: Call, sequence: int) -> int:
    return [given.sequence for given in call.given].index(sequence)


def _not_before_it_is_due(facts: _Facts) -> Iterator[str]:
    for sequence, deliveries in facts.delivered():
        delays = [call for call in facts.of[sequence] if call.kind == "nack" and call.seconds and call.ended_ns < NEVER]
        for given, call in deliveries:
            dues = [(given.due_ns, 0)] if given.due_ns else []
            for nack in delays:
                if nack.ended_ns <= call.began_ns:
                    wall = nack.began_ns + facts.history.base_ns + min(_offsets(facts, nack.began_ns, nack.ended_ns))
                    dues.append((wall + int(nack.seconds * _NS), nack.began_ns))
            if any(_latest_wall_ns(facts, since, call.ended_ns) < due - _ROUNDING_NS for due, since in dues):
                yield f"{sequence} was given to {call.worker} before it was due"


def _offsets(facts: _Facts, since_ns: int, until_ns: int) -> list[int]:
    """Return the possible errors of the wall clock in a span of time."""
    offsets = facts.history.offsets
    before = [each.by_ns for each in offsets if each.since_ns <= since_ns][-1:] or [0]
    return before + [each.by_ns for each in offsets if since_ns < each.since_ns <= until_ns]


def _latest_wall_ns(facts: _Facts, since_ns: int, until_ns: int) -> int:
    """Return the latest time that the wall clock may have shown in a span of time."""
    ends = [each.since_ns for each in facts.history.offsets if since_ns < each.since_ns <= until_ns] + [until_ns]
    return max(end + by for end, by in zip(ends, _offsets(facts, since_ns, until_ns), strict=True)) + (
        facts.history.base_ns
    )


def _given_up_exactly_once(facts: _Facts) -> Iterator[str]:
    for origin in {letter.origin for letter in facts.history.letters}:
        letters, deliveries = facts.letters[origin], facts.deliveries[origin]
        if len(letters) > 1:
            yield f"{origin} is there {len(letters)} times"
        if not deliveries:
            continue
        letter, last = letters[0], deliveries[-1]
        if letter.number != last.given.number:
            yield f"{origin}: its dead letter holds another record"
        if letter.tries < facts.history.max_tries or letter.tries < last.given.tries:
            yield f"{origin}: given up after {last.given.tries} tries, and its dead letter says {letter.tries}"
        reasons = [call for call in facts.of[origin] if call.kind == "nack" and call.reason]
        said = [call for call in reasons if call.ended_ns < NEVER]
        if said and letter.reason not in {call.reason for call in reasons if call.began_ns >= said[-1].began_ns}:
            yield f"{origin}: given up because of {said[-1].reason!r}, and its dead letter says {letter.reason!r}"


def _the_cursor_is_the_ack_floor(facts: _Facts) -> Iterator[str]:
    cursor = 0
    for look in facts.history.looks:
        if look.cursor < cursor:
            yield f"the cursor moved back from {cursor} to {look.cursor}"
        yield from _open(facts, cursor, look.cursor, look.at_ns, "is behind the cursor")
        cursor = max(cursor, look.cursor)


def _reclaimed_only_what_is_done(facts: _Facts) -> Iterator[str]:
    for look in facts.history.looks:
        for first, last in look.reclaimed:
            yield from _open(facts, first - 1, last, look.at_ns, "was reclaimed")


def _open(facts: _Facts, above: int, until: int, at_ns: int, what: str) -> Iterator[str]:
    low, high = bisect_left(facts.route, above + 1), bisect_left(facts.route, until + 1)
    for sequence in facts.route[low:high]:
        acked = any(call.began_ns <= at_ns for call in facts.acks(sequence))
        if not acked and not any(letter.seen_ns <= at_ns for letter in facts.letters[sequence]):
            yield f"{sequence} {what}, and was neither acknowledged nor given up"


def _the_window_holds(facts: _Facts) -> Iterator[str]:
    place = 0
    calls = sorted((call for call in facts.history.calls if call.given), key=lambda call: call.ended_ns)
    for call in calls:
        while place < len(facts.route) and facts.done_ns[facts.route[place]] <= call.ended_ns:
            place += 1
        newest = max(given.sequence for given in call.given)
        if place < len(facts.route) and newest - (facts.route[place] - 1) > facts.history.window:
            yield f"{newest} was delivered while {facts.route[place]} was open"


def _all_come_to_an_end(facts: _Facts) -> Iterator[str]:
    if not facts.history.done:
        return
    for sequence, number in facts.history.sent.items():
        deliveries = facts.deliveries[sequence]
        if not deliveries:
            yield f"{sequence} was never delivered"
        elif deliveries[0].given.number != number:
            yield f"{sequence} is record {number}, and {deliveries[0].given.number} was delivered"
        elif facts.done_ns[sequence] == NEVER:
            yield f"{sequence} was neither acknowledged nor given up"


PROMISES: list[Callable[[_Facts], Iterator[str]]] = [
    _acknowledged_is_never_delivered_again,
    _tries_never_go_down,
    _one_worker_at_a_time,
    _first_in_the_order_of_the_log,
    _a_key_comes_in_its_order,
    _not_before_it_is_due,
    _given_up_exactly_once,
    _the_cursor_is_the_ack_floor,
    _reclaimed_only_what_is_done,
    _the_window_holds,
    _all_come_to_an_end,
]
