"""The oracle of the torture: correct histories pass, and each kind of broken promise is found."""

import pytest
from workgroup_oracle import NEVER, Call, Given, History, Letter

SECOND = 1_000_000_000


def history(*calls: Call, order: str = "log", sent: tuple[int, ...] = (), letters: tuple[Letter, ...] = ()) -> History:
    """Return a history in which every sent record was delivered; the number of a record is its sequence."""
    known = {given.sequence for call in calls for given in call.given}.union(sent)
    return History(order, 3, list(calls), list(letters), {sequence: sequence for sequence in known})


def lease(at: int, worker: str, *given: Given, life: int = 0, seconds: float = 100) -> Call:
    """Return a lease call that starts at ``at`` and takes a second."""
    return Call(life, "lease", worker, at * SECOND, (at + 1) * SECOND, seconds=seconds, given=given)


def call(kind: str, at: int, worker: str, *sequences: int, life: int = 0, seconds: float = 0, ended: int = -1) -> Call:
    ended_ns = NEVER if ended == NEVER else (at + 1 if ended < 0 else ended) * SECOND
    return Call(life, kind, worker, at * SECOND, ended_ns, sequences, seconds)


def ack(at: int, worker: str, *sequences: int, life: int = 0) -> Call:
    return call("ack", at, worker, *sequences, life=life)


def nack(at: int, worker: str, sequence: int) -> Call:
    return call("nack", at, worker, sequence)


def record(sequence: int, tries: int = 1, key: str | None = None) -> Given:
    return Given(sequence, tries, key, sequence)


ONE, AGAIN = record(1), record(1, 2)
LEASED = lease(0, "a", ONE)
GIVEN_UP = (
    *(LEASED, nack(2, "a", 1), lease(4, "a", AGAIN), nack(6, "a", 1)),
    *(lease(8, "a", record(1, 3)), nack(10, "a", 1)),
)
SHORT = (lease(0, "a", ONE, seconds=5), lease(10, "b", AGAIN), ack(16, "b", 1))
KEYED = (lease(0, "a", record(1, key="k")), ack(4, "a", 1))


def tried(first: int, second: int, life: int) -> History:
    calls = (lease(0, "a", record(1, first)), nack(2, "a", 1), lease(4, "b", record(1, second), life=life))
    return history(*calls, ack(6, "b", 1, life=life))


FINE = {
    "all goes well": history(
        *(lease(0, "a", ONE, record(2), record(3)), lease(2, "b", record(4)), ack(4, "a", 1, 2), nack(5, "a", 3)),
        *(call("nack", 6, "b", 4, seconds=3), lease(8, "b", record(3, 2)), lease(10, "a", record(4, 2))),
        *(ack(12, "a", 4), ack(12, "b", 3)),
    ),
    "given up": history(*GIVEN_UP, letters=(Letter(1, 3, 1),)),
    "a lease expires": history(*SHORT),
    "a worker is released": history(LEASED, call("release", 2, "a"), lease(4, "b", AGAIN), ack(6, "b", 1)),
    "calls in doubt": history(  # one unanswered, one beside a delivery, and one before a restart of the owner
        *(lease(0, "a", ONE, record(2), record(3)), call("ack", 2, "a", 1, ended=NEVER)),
        *(lease(10, "a", AGAIN, record(2, 1), record(3, 2), life=1), call("ack", 12, "a", 2, life=1, ended=20)),
        *(lease(14, "b", record(2, 2), life=2), ack(30, "b", 1, 2, 3, life=2)),
    ),
    "a key in its order": history(
        *(lease(0, "a", record(1, key="k"), record(2, key="k"), record(3)), nack(2, "a", 1)),
        *(lease(4, "b", record(1, 2, key="k"), record(2, 2, key="k")), ack(6, "b", 1), ack(8, "a", 3)),
        *(ack(8, "b", 2), lease(10, "a", record(4, key="k")), ack(12, "a", 4)),
        order="key",
    ),
}
AFTER, TRIES, ONCE = "acknowledged_is_never_delivered_again", "tries_never_go_down", "one_worker_at_a_time"
KEY, END, LETTER = "a_key_comes_in_its_order", "all_come_to_an_end", "given_up_exactly_once"
WRONG = [
    *((AFTER, history(LEASED, ack(2, "a", 1), lease(4, "b", AGAIN, life=life))) for life in (0, 1)),
    *((TRIES, tried(*given)) for given in ((1, 1, 0), (2, 1, 1), (1, 3, 0), (1, 4, 1), (2, 2, 0))),
    (TRIES, history(*GIVEN_UP, lease(12, "a", record(1, 4)), ack(14, "a", 1))),
    (ONCE, history(LEASED, lease(4, "b", AGAIN), ack(6, "b", 1))),
    (ONCE, history(*SHORT, call("extend", 2, "a", 1, seconds=50))),
    (ONCE, history(LEASED, nack(2, "b", 1), lease(4, "b", AGAIN), ack(6, "b", 1))),
    *(
        (KEY, history(*KEYED, lease(2, each, record(2, key="k")), ack(4, each, 2), order="key"))
        for each in "ab"  # the earlier record is in another lease of the same worker, or with another one
    ),
    (
        KEY,
        history(
            *(lease(0, "a", record(1, key="k"), record(2, key="k")), nack(2, "a", 1)),
            *(lease(4, "b", record(2, 2, key="k")), lease(6, "b", record(1, 2, key="k")), ack(8, "b", 1, 2)),
            order="key",
        ),
    ),
    *(
        (LETTER, history(*GIVEN_UP, letters=letters))
        for letters in ((Letter(1, 3, 1), Letter(1, 3, 1)), (Letter(1, 3, 2),), (Letter(1, 2, 1),))
    ),
    (END, history(LEASED, ack(2, "a", 1), sent=(1, 2))),
    (END, history(LEASED)),
    (END, history(lease(0, "a", ONE._replace(number=7)), ack(2, "a", 1))),
]


@pytest.mark.parametrize("name", FINE)
def test_a_correct_history_passes(name: str) -> None:
    assert FINE[name].judge() == []


@pytest.mark.parametrize(("promise", "found"), WRONG, ids=[promise for promise, _ in WRONG])
def test_a_broken_promise_is_found(promise: str, found: History) -> None:
    broken = {words.split(":")[0] for words in found.judge()}
    assert promise in broken
    assert broken == {promise} or promise in (AFTER, TRIES)
