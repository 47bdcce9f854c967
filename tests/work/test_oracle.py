"""The oracle of the torture: correct histories pass, and each kind of broken promise is found."""

import pytest
from workgroup_history import NEVER, Call, Given, History, Letter, Look, Offset
from workgroup_oracle import judge

SECOND = 1_000_000_000
WALL = 1_000_000 * SECOND


def history(
    *calls: Call,
    order: str = "log",
    sent: tuple[int, ...] | None = None,
    letters: tuple[Letter, ...] = (),
    looks: tuple[Look, ...] = (),
    offsets: tuple[Offset, ...] = (),
) -> History:
    """Return a history in which every sent record was delivered; the number of a record is its sequence."""
    known = {given.sequence for call in calls for given in call.given} if sent is None else sent
    found = History(order, 10, 3, base_ns=WALL, sent={sequence: sequence for sequence in known})
    found.calls += calls
    found.letters += letters
    found.looks += looks
    found.offsets += offsets
    return found


def lease(at: int, worker: str, *given: Given, life: int = 0, seconds: float = 100) -> Call:
    """Return a lease call that starts at ``at`` and takes a second."""
    return Call(life, "lease", worker, at * SECOND, (at + 1) * SECOND, seconds=seconds, given=given)


def call(kind: str, at: int, worker: str, *sequences: int, life: int = 0, seconds: float = 0, ended: int = -1) -> Call:
    ended_ns = NEVER if ended == NEVER else (at + 1 if ended < 0 else ended) * SECOND
    return Call(life, kind, worker, at * SECOND, ended_ns, sequences, seconds)


def ack(at: int, worker: str, *sequences: int, life: int = 0) -> Call:
    return call("ack", at, worker, *sequences, life=life)


def record(sequence: int, tries: int = 1, key: str | None = None, due: int = 0) -> Given:
    return Given(sequence, tries, key, due and WALL + due * SECOND, sequence)


def nack(at: int, worker: str, sequence: int, *, reason: str = "", life: int = 0) -> Call:
    return Call(life, "nack", worker, at * SECOND, (at + 1) * SECOND, (sequence,), reason=reason)


def letter(tries: int = 3, reason: str = "broken", number: int = 1, seen: int = 50) -> Letter:
    """Return a dead letter of record 1."""
    return Letter(1, tries, reason, number, seen * SECOND)


ONE, AGAIN = record(1), record(1, 2)
LEASED = lease(0, "a", ONE)
TWO = (lease(0, "a", ONE, record(2)), ack(20, "a", 2))
GIVEN_UP = (
    LEASED,
    nack(2, "a", 1, reason="odd"),
    lease(4, "a", AGAIN),
    nack(6, "a", 1, reason="odd"),
    lease(8, "a", record(1, 3)),
    nack(10, "a", 1, reason="broken"),
)
SHORT = (lease(0, "a", ONE, seconds=5), lease(10, "b", AGAIN), ack(16, "b", 1))
KEYED = (lease(0, "a", record(1, key="k")), ack(4, "a", 1))
EARLY = (lease(4, "a", record(1, due=10)), ack(6, "a", 1))
BEYOND = (LEASED, lease(2, "a", record(11)), ack(4, "a", 11))


def delayed(life: int) -> tuple[Call, ...]:
    return (LEASED, call("nack", 2, "a", 1, seconds=20), lease(4, "b", AGAIN, life=life), ack(6, "b", 1, life=life))


def tried(first: int, second: int, life: int) -> History:
    calls = (lease(0, "a", record(1, first)), nack(2, "a", 1), lease(4, "b", record(1, second), life=life))
    return history(*calls, ack(6, "b", 1, life=life))


FINE = {
    "all goes well": history(
        lease(0, "a", ONE, record(2), record(3, due=0)),
        lease(2, "b", record(4)),
        ack(4, "a", 1, 2),
        nack(5, "a", 3),
        call("nack", 6, "b", 4, seconds=3),
        lease(8, "b", record(3, 2)),
        lease(10, "a", record(4, 2)),
        ack(12, "a", 4),
        ack(12, "b", 3),
        looks=(Look(9 * SECOND, 2), Look(20 * SECOND, 4, ((1, 4),))),
    ),
    "given up": history(*GIVEN_UP, letters=(letter(),), looks=(Look(60 * SECOND, 1),)),
    "calls in doubt": history(  # one unanswered, one beside a delivery, and one before a restart of the owner
        lease(0, "a", ONE, record(2), record(3)),
        call("ack", 2, "a", 1, ended=NEVER),
        lease(10, "a", AGAIN, record(2, 1), record(3, 2), life=1),
        call("ack", 12, "a", 2, life=1, ended=20),
        lease(14, "b", record(2, 2), life=2),
        ack(30, "b", 1, 2, 3, life=2),
    ),
    "a key in its order": history(
        lease(0, "a", record(1, key="k"), record(2, key="k"), record(3)),
        nack(2, "a", 1),
        lease(4, "b", record(1, 2, key="k"), record(2, 2, key="k")),
        ack(6, "b", 1),
        ack(8, "a", 3),
        ack(8, "b", 2),
        lease(10, "a", record(4, key="k")),
        ack(12, "a", 4),
        order="key",
    ),
}
ANOTHER = history(lease(0, "a", ONE._replace(number=7)), ack(2, "a", 1))
TRIES, CURSOR, END = "tries_never_go_down", "the_cursor_is_the_ack_floor", "all_come_to_an_end"
WRONG = [
    *(
        ("acknowledged_is_never_delivered_again", history(LEASED, ack(2, "a", 1), lease(4, "b", AGAIN, life=life)))
        for life in (0, 1)
    ),
    *((TRIES, tried(*given)) for given in ((1, 1, 0), (2, 1, 1), (1, 3, 0), (1, 4, 1), (2, 2, 0))),
    (TRIES, history(*GIVEN_UP, lease(12, "a", record(1, 4)), ack(14, "a", 1))),
    ("one_worker_at_a_time", history(LEASED, lease(4, "b", AGAIN), ack(6, "b", 1))),
    ("one_worker_at_a_time", history(*SHORT, call("extend", 2, "a", 1, seconds=50))),
    ("one_worker_at_a_time", history(LEASED, nack(2, "b", 1), lease(4, "b", AGAIN), ack(6, "b", 1))),
    (
        "first_in_the_order_of_the_log",
        history(lease(0, "a", record(2)), lease(4, "b", ONE), ack(6, "a", 2), ack(6, "b", 1)),
    ),
    *(
        ("a_key_comes_in_its_order", history(*KEYED, lease(2, each, record(2, key="k")), ack(4, each, 2), order="key"))
        for each in "ab"  # the earlier record is in another lease of the same worker, or with another one
    ),
    (
        "a_key_comes_in_its_order",
        history(
            lease(0, "a", record(1, key="k"), record(2, key="k")),
            nack(2, "a", 1),
            lease(4, "b", record(2, 2, key="k")),
            lease(6, "b", record(1, 2, key="k")),
            ack(8, "b", 1, 2),
            order="key",
        ),
    ),
    ("not_before_it_is_due", history(*EARLY)),
    *(("not_before_it_is_due", history(*delayed(life))) for life in (0, 1)),
    *(
        ("given_up_exactly_once", history(*GIVEN_UP, letters=letters))
        for letters in ((letter(), letter()), (letter(number=2),), (letter(tries=2),), (letter(reason="odd"),))
    ),
    *((CURSOR, history(*TWO, ack(4, "a", 1), looks=(look,))) for look in (Look(3 * SECOND, 1), Look(9 * SECOND, 2))),
    (CURSOR, history(LEASED, ack(2, "a", 1), looks=(Look(4 * SECOND, 1), Look(5 * SECOND, 0)))),
    (CURSOR, history(*GIVEN_UP, letters=(letter(seen=50),), looks=(Look(40 * SECOND, 1),))),
    ("reclaimed_only_what_is_done", history(*TWO, ack(2, "a", 1), looks=(Look(4 * SECOND, 1, ((1, 2),)),))),
    ("the_window_holds", history(*BEYOND, ack(6, "a", 1))),
    (END, history(LEASED, ack(2, "a", 1), sent=(1, 2))),
    (END, history(LEASED)),
    (END, ANOTHER),
]


@pytest.mark.parametrize("name", FINE)
def test_a_correct_history_passes(name: str) -> None:
    assert judge(FINE[name]) == []


@pytest.mark.parametrize(("promise", "found"), WRONG, ids=[promise for promise, _ in WRONG])
def test_a_broken_promise_is_found(promise: str, found: History) -> None:
    assert promise in {words.split(":")[0] for words in judge(found)}
    if promise not in ("acknowledged_is_never_delivered_again", TRIES):
        assert {words.split(":")[0] for words in judge(found)} == {promise}
