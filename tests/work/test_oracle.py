"""The oracle of the torture: correct histories pass, and each kind of broken promise is found."""

from __future__ import annotations

import pytest
from workgroup_history import NEVER, Call, Given, History, Letter, Look, Offset
from workgroup_oracle import judge

SECOND = 1_000_000_000
WALL = 1_000_000 * SECOND


def history(*calls: Call, order: str = "log", sent: tuple[int, ...] | None = None) -> History:
    """Return a history in which every sent record was delivered; the number of a record is its sequence."""
    known = {given.sequence for call in calls for given in call.given} if sent is None else sent
    found = History(order, 10, 3, base_ns=WALL, sent={sequence: sequence for sequence in known})
    found.calls += calls
    return found


def lease(at: int, worker: str, *given: Given, life: int = 0, seconds: float = 100, ended: int = -1) -> Call:
    """Return a lease call that starts at ``at`` and takes a second."""
    ended_ns = (at + 1 if ended < 0 else ended) * SECOND
    return Call(life, "lease", worker, at * SECOND, ended_ns, seconds=seconds, given=given)


def call(kind: str, at: int, worker: str, *sequences: int, life: int = 0, seconds: float = 0, ended: int = -1) -> Call:
    ended_ns = NEVER if ended == NEVER else (at + 1 if ended < 0 else ended) * SECOND
    return Call(life, kind, worker, at * SECOND, ended_ns, sequences, seconds)


def record(sequence: int, tries: int = 1, key: str | None = None, due: int = 0) -> Given:
    return Given(sequence, tries, key, due and WALL + due * SECOND, sequence)


def nack(at: int, worker: str, sequence: int, *, reason: str = "", life: int = 0) -> Call:
    return Call(life, "nack", worker, at * SECOND, (at + 1) * SECOND, (sequence,), reason=reason)


def letter(origin: int, tries: int = 3, reason: str = "broken", number: int = -1, seen: int = 50) -> Letter:
    return Letter(origin, tries, reason, origin if number < 0 else number, seen * SECOND)


GIVEN_UP = (
    lease(0, "a", record(1)),
    nack(2, "a", 1, reason="odd"),
    lease(4, "a", record(1, 2)),
    nack(6, "a", 1, reason="odd"),
    lease(8, "a", record(1, 3)),
    nack(10, "a", 1, reason="broken"),
)


def kinds(found: History) -> set[str]:
    return {words.split(":")[0] for words in judge(found)}


def test_a_history_in_which_all_goes_well_passes() -> None:
    found = history(
        lease(0, "a", record(1), record(2), record(3, due=0)),
        lease(2, "b", record(4)),
        call("ack", 4, "a", 1, 2),
        nack(5, "a", 3),
        call("nack", 6, "b", 4, seconds=3),
        lease(8, "b", record(3, 2)),
        lease(10, "a", record(4, 2)),
        call("ack", 12, "a", 4),
        call("ack", 12, "b", 3),
    )
    found.looks += [Look(9 * SECOND, 2), Look(20 * SECOND, 4, ((1, 4),))]
    assert judge(found) == []


def test_a_record_that_was_given_up_passes() -> None:
    found = history(*GIVEN_UP)
    found.letters.append(letter(1))
    found.looks.append(Look(60 * SECOND, 1))
    assert judge(found) == []


def test_what_a_call_may_have_done_is_no_fault() -> None:
    """Calls in doubt: an unanswered acknowledgement, one concurrent with a delivery, and a restart of the owner."""
    found = history(
        lease(0, "a", record(1), record(2), record(3)),
        call("ack", 2, "a", 1, ended=NEVER),
        lease(10, "a", record(1, 2), record(2, 1), record(3, 2), life=1),
        call("ack", 12, "a", 2, life=1, ended=20),
        lease(14, "b", record(2, 2), seconds=100, life=2),
        call("ack", 30, "b", 1, 2, 3, life=2),
    )
    assert judge(found) == []


@pytest.mark.parametrize("life", [0, 1])
def test_a_delivery_of_what_was_acknowledged_is_found(life: int) -> None:
    found = history(lease(0, "a", record(1)), call("ack", 2, "a", 1), lease(4, "b", record(1, 2), life=life))
    assert "acknowledged_is_never_delivered_again" in kinds(found)


@pytest.mark.parametrize(
    ("first", "second", "life"),
    [(1, 1, 0), (2, 1, 1), (1, 3, 0), (1, 4, 1), (2, 2, 0)],
    ids=["not counted", "less after a start", "counted twice", "counted by nothing", "too many at first"],
)
def test_tries_that_do_not_fit_are_found(first: int, second: int, life: int) -> None:
    found = history(
        lease(0, "a", record(1, first)),
        nack(2, "a", 1),
        lease(4, "b", record(1, second), life=life),
        call("ack", 6, "b", 1, life=life),
    )
    assert "tries_never_go_down" in kinds(found)


def test_a_delivery_beyond_the_most_tries_is_found() -> None:
    found = history(*GIVEN_UP, lease(12, "a", record(1, 4)), call("ack", 14, "a", 1))
    assert kinds(found) == {"tries_never_go_down"}


def test_a_record_at_two_workers_is_found() -> None:
    found = history(lease(0, "a", record(1)), lease(4, "b", record(1, 2)), call("ack", 6, "b", 1))
    assert kinds(found) == {"one_worker_at_a_time"}


@pytest.mark.parametrize(
    "between",
    [
        nack(2, "a", 1),
        call("release", 2, "a"),
        call("extend", 2, "a", 1, seconds=1),
        call("nack", 2, "a", 1, ended=NEVER),
    ],
    ids=["given back", "released", "extended by less", "perhaps given back"],
)
def test_a_record_that_came_back_may_be_at_another(between: Call) -> None:
    found = history(lease(0, "a", record(1)), between, lease(4, "b", record(1, 2)), call("ack", 6, "b", 1))
    assert judge(found) == []


def test_a_lease_that_was_extended_holds_longer() -> None:
    calls = [lease(0, "a", record(1), seconds=5), lease(10, "b", record(1, 2)), call("ack", 16, "b", 1)]
    assert judge(history(*calls)) == []
    assert kinds(history(*calls, call("extend", 2, "a", 1, seconds=50))) == {"one_worker_at_a_time"}


def test_what_another_worker_gives_back_is_not_its_own() -> None:
    found = history(lease(0, "a", record(1)), nack(2, "b", 1), lease(4, "b", record(1, 2)), call("ack", 6, "b", 1))
    assert kinds(found) == {"one_worker_at_a_time"}


def test_a_first_delivery_out_of_order_is_found() -> None:
    found = history(lease(0, "a", record(2)), lease(4, "b", record(1)), call("ack", 6, "a", 2), call("ack", 6, "b", 1))
    assert kinds(found) == {"first_in_the_order_of_the_log"}


def test_a_record_with_a_time_or_behind_its_key_may_be_overtaken() -> None:
    late = (lease(0, "a", record(2)), lease(4, "b", record(1, due=3)), call("ack", 6, "a", 2), call("ack", 6, "b", 1))
    assert judge(history(*late)) == []


@pytest.mark.parametrize("worker", ["a", "b"])
def test_a_record_before_an_open_one_of_its_key_is_found(worker: str) -> None:
    """The earlier record may be with another worker, or in another lease of the same worker."""
    calls = (
        lease(0, "a", record(1, key="k")),
        lease(2, worker, record(2, key="k")),
        call("ack", 4, "a", 1),
        call("ack", 4, worker, 2),
    )
    assert kinds(history(*calls, order="key")) == {"a_key_comes_in_its_order"}
    assert judge(history(*calls)) == []


def test_a_record_that_comes_again_after_a_later_one_of_its_key_is_found() -> None:
    found = history(
        lease(0, "a", record(1, key="k"), record(2, key="k")),
        nack(2, "a", 1),
        lease(4, "b", record(2, 2, key="k")),
        lease(6, "b", record(1, 2, key="k")),
        call("ack", 8, "b", 1, 2),
        order="key",
    )
    assert kinds(found) == {"a_key_comes_in_its_order"}


def test_a_key_in_its_order_passes() -> None:
    found = history(
        lease(0, "a", record(1, key="k"), record(2, key="k"), record(3)),
        nack(2, "a", 1),
        lease(4, "b", record(1, 2, key="k"), record(2, 2, key="k")),
        call("ack", 6, "b", 1),
        call("ack", 8, "a", 3),
        call("ack", 8, "b", 2),
        lease(10, "a", record(4, key="k")),
        call("ack", 12, "a", 4),
        order="key",
    )
    assert judge(found) == []


def test_a_record_before_its_time_is_found() -> None:
    calls = (lease(4, "a", record(1, due=10)), call("ack", 6, "a", 1))
    assert kinds(history(*calls)) == {"not_before_it_is_due"}
    ahead = history(*calls)
    ahead.offsets += [Offset(2 * SECOND, 20 * SECOND), Offset(3 * SECOND, 0)]  # the clock was ahead for some time
    assert judge(ahead) == []


@pytest.mark.parametrize("life", [0, 1])
def test_a_record_before_its_delay_is_over_is_found(life: int) -> None:
    calls = [
        lease(0, "a", record(1)),
        call("nack", 2, "a", 1, seconds=20),
        lease(4, "b", record(1, 2), life=life),
        call("ack", 6, "b", 1, life=life),
    ]
    assert kinds(history(*calls)) == {"not_before_it_is_due"}
    behind = history(*calls)
    behind.offsets += [Offset(0, -30 * SECOND), Offset(4 * SECOND, 0)]  # it was corrected in between
    assert judge(behind) == []


@pytest.mark.parametrize(
    "letters",
    [
        [letter(1), letter(1)],
        [letter(1, number=2)],
        [letter(1, tries=2)],
        [letter(1, reason="odd")],
    ],
    ids=["twice", "another record", "too few tries", "an older reason"],
)
def test_a_wrong_dead_letter_is_found(letters: list[Letter]) -> None:
    found = history(*GIVEN_UP)
    found.letters += letters
    assert kinds(found) == {"given_up_exactly_once"}


@pytest.mark.parametrize(
    "look",
    [Look(3 * SECOND, 1), Look(9 * SECOND, 2)],
    ids=["too early", "a record that was not acknowledged"],
)
def test_a_cursor_in_front_of_an_open_record_is_found(look: Look) -> None:
    found = history(lease(0, "a", record(1), record(2)), call("ack", 4, "a", 1), call("ack", 20, "a", 2))
    found.looks.append(look)
    assert kinds(found) == {"the_cursor_is_the_ack_floor"}


def test_a_cursor_that_moves_back_is_found() -> None:
    found = history(lease(0, "a", record(1)), call("ack", 2, "a", 1))
    found.looks += [Look(4 * SECOND, 1), Look(5 * SECOND, 0)]
    assert kinds(found) == {"the_cursor_is_the_ack_floor"}


def test_a_dead_letter_that_is_not_there_yet_is_found() -> None:
    found = history(*GIVEN_UP)
    found.letters.append(letter(1, seen=50))
    found.looks.append(Look(40 * SECOND, 1))
    assert kinds(found) == {"the_cursor_is_the_ack_floor"}


def test_an_open_record_that_was_reclaimed_is_found() -> None:
    found = history(lease(0, "a", record(1), record(2)), call("ack", 2, "a", 1), call("ack", 20, "a", 2))
    found.looks.append(Look(4 * SECOND, 1, ((1, 2),)))
    assert kinds(found) == {"reclaimed_only_what_is_done"}


def test_a_delivery_beyond_the_window_is_found() -> None:
    calls = [lease(0, "a", record(1)), lease(2, "a", record(11)), call("ack", 4, "a", 11)]
    assert kinds(history(*calls, call("ack", 6, "a", 1))) == {"the_window_holds"}
    assert judge(history(*calls, call("ack", 1, "a", 1))) == []


@pytest.mark.parametrize(
    "found",
    [
        history(lease(0, "a", record(1)), call("ack", 2, "a", 1), sent=(1, 2)),
        history(lease(0, "a", record(1))),
        history(lease(0, "a", record(1)._replace(number=7)), call("ack", 2, "a", 1)),
    ],
    ids=["never delivered", "never done", "another record"],
)
def test_a_record_that_was_lost_is_found(found: History) -> None:
    if found.calls[0].given[0].number == 7:
        found.sent = {1: 1}
    assert kinds(found) == {"all_come_to_an_end"}
