"""The verdict on a try: every exit code, every try, running or stopping."""

from __future__ import annotations

import itertools

import pytest

from sidecars.drain.verdict import PAUSE_MAX_SECONDS, Verdict, ending, judge, pause_seconds, reason

FAILURES = (1, 2, 127, 255, -1, -9, -11, -64)
TRIES = (1, 2, 5, 1000)


@pytest.mark.parametrize(("tries", "stopping"), list(itertools.product(TRIES, (False, True))))
def test_success_commits_whatever_else(tries: int, stopping: bool) -> None:
    for number in range(1, tries + 1):
        assert judge(0, number=number, tries=tries, stopping=stopping) is Verdict.COMMIT


@pytest.mark.parametrize(("exit_code", "tries"), list(itertools.product(FAILURES, TRIES)))
def test_failure_is_tried_again_until_the_last_try(exit_code: int, tries: int) -> None:
    verdicts = [judge(exit_code, number=number, tries=tries, stopping=False) for number in range(1, tries + 1)]

    assert verdicts == [Verdict.RETRY] * (tries - 1) + [Verdict.GIVE_UP]


@pytest.mark.parametrize(("exit_code", "tries"), list(itertools.product(FAILURES, TRIES)))
def test_failure_while_stopping_leaves_the_records(exit_code: int, tries: int) -> None:
    """Not even the last try gives them up: the next start has all of its tries."""
    for number in range(1, tries + 1):
        assert judge(exit_code, number=number, tries=tries, stopping=True) is Verdict.LEAVE


def test_pauses_double_from_a_tenth_of_a_second_to_half_a_minute() -> None:
    assert [pause_seconds(number) for number in range(1, 5)] == [0.1, 0.2, 0.4, 0.8]
    assert [pause_seconds(number) for number in (9, 10, 1000)] == [25.6, PAUSE_MAX_SECONDS, PAUSE_MAX_SECONDS]


def test_endings_have_words() -> None:
    assert [ending(exit_code) for exit_code in (1, 255, -9, -40)] == [
        "exit 1",
        "exit 255",
        "killed by SIGKILL",
        "killed by signal 40",
    ]


def test_reasons_have_words() -> None:
    assert reason(3, 5) == "exit 3 after 5 tries"
    assert reason(-11, 1) == "killed by SIGSEGV after 1 try"
