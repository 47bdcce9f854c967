"""The step after a try: every exit code, every try, running or stopping."""

from __future__ import annotations

import os

import pytest

from wald_drain.retry import (
    PAUSE_MAX_SECONDS,
    TRIES_WHOLE,
    NextStep,
    ending,
    next_step,
    pause_seconds,
    reason,
    tries_of,
)

FAILURES = (1, 2, 127, 255, -1, -9, -11, -64)
TRIES = (1, 2, 5, 1000, None)
COUNTS = (1, 2, 1000)


def numbers(tries: int | None) -> range:
    """Return the try numbers; 2,000 of them if tries are unlimited."""
    return range(1, (tries or 2000) + 1)


@pytest.mark.parametrize("tries", TRIES)
def test_success_commits_whatever_else(tries: int | None) -> None:
    for stopping in (False, True):
        for count in COUNTS:
            steps = {next_step(0, number=n, tries=tries, count=count, stopping=stopping) for n in numbers(tries)}
            assert steps == {NextStep.COMMIT}


@pytest.mark.parametrize("tries", TRIES)
def test_failure_is_tried_again_until_the_last_try(tries: int | None) -> None:
    """After the last try, a single record is given up and a batch is halved; with unlimited tries, neither happens."""
    for exit_code in FAILURES:
        for count in COUNTS:
            steps = [
                next_step(exit_code, number=number, tries=tries, count=count, stopping=False)
                for number in numbers(tries)
            ]
            last = NextStep.GIVE_UP if count == 1 else NextStep.HALVE
            assert steps[:-1] == [NextStep.RETRY] * (len(steps) - 1)
            assert steps[-1] is (NextStep.RETRY if tries is None else last)


@pytest.mark.parametrize("tries", TRIES)
def test_failure_while_stopping_leaves_the_records(tries: int | None) -> None:
    """Even the last try does not give them up: the next start begins with all tries."""
    for exit_code in (*FAILURES, os.EX_TEMPFAIL):
        for number in numbers(tries):
            assert next_step(exit_code, number=number, tries=tries, count=1, stopping=True) is NextStep.LEAVE


@pytest.mark.parametrize("tries", TRIES)
def test_later_is_never_a_last_try(tries: int | None) -> None:
    for count in COUNTS:
        for number in numbers(tries):
            step = next_step(os.EX_TEMPFAIL, number=number, tries=tries, count=count, stopping=False)
            assert step is NextStep.LATER


def test_a_batch_is_tried_a_few_times_and_its_halves_once() -> None:
    """Only a single record gets the configured number of tries."""
    assert [tries_of(1, halved=halved, tries=tries) for halved in (False, True) for tries in (None, 7)] == [None, 7] * 2
    assert [tries_of(9, halved=False, tries=tries) for tries in (None, 7, 1)] == [TRIES_WHOLE, TRIES_WHOLE, 1]
    assert [tries_of(9, halved=True, tries=tries) for tries in (None, 7, 1)] == [1, 1, 1]


def test_pauses_double_from_a_tenth_of_a_second_to_half_a_minute() -> None:
    assert [pause_seconds(number) for number in range(1, 5)] == [0.1, 0.2, 0.4, 0.8]
    assert [pause_seconds(number) for number in (9, 10, 10**9)] == [25.6, PAUSE_MAX_SECONDS, PAUSE_MAX_SECONDS]


def test_endings_have_words() -> None:
    assert [ending(exit_code) for exit_code in (1, 255, -9, -40)] == [
        "exit 1",
        "exit 255",
        "killed by SIGKILL",
        "killed by signal 40",
    ]


def test_reasons_have_words() -> None:
    assert reason("exit 3", 5) == "exit 3 after 5 tries"
    assert reason(ending(-11), 1) == "killed by SIGSEGV after 1 try"
