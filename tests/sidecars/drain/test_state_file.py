"""State file of a worker: its batch counts as processed if both lines are intact and belong to the same run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from damage import every_flip, every_truncation
from logs import Built

from wald.files.disk import Disk
from wald.work.ownership import workers_of
from wald_drain.state_file import LINE_BYTES, StateFile, encode_given, last_run_in, padded

SEQUENCES = [300, 301, 302, 320]
GIVEN = encode_given(7, SEQUENCES, 1)
DONE = padded({"run": 7, "exit_code": 0, "error": 0})


def outcome(run: int, exit_code: int, error: int) -> bytes:
    return padded({"run": run, "exit_code": exit_code, "error": error})


def processed_in(content: bytes) -> list[int]:
    run = last_run_in(content)
    return run.sequences if run is not None and run.is_processed else []


@pytest.fixture
def built(root: Path) -> Built:
    log = Built(root)
    log.lines("a", [b"one"])
    return log


def file(built: Built, worker: int, group: str = "g") -> StateFile:
    return StateFile(built.root, "a", group, worker, Disk())


def test_what_a_command_has_processed() -> None:
    assert len(DONE) == LINE_BYTES
    assert processed_in(DONE + GIVEN) == SEQUENCES
    assert processed_in(DONE + GIVEN + b"the rest of a longer line\n") == SEQUENCES


def test_anything_else_says_nothing() -> None:
    for content in [
        b"",
        DONE,
        bytes(LINE_BYTES) + GIVEN,
        outcome(7, 1, 0) + GIVEN,
        outcome(7, -9, 0) + GIVEN,
        outcome(7, 0, 2) + GIVEN,
        outcome(6, 0, 0) + GIVEN,
        b"null\n".rjust(LINE_BYTES) + GIVEN,
        DONE + b"[" * 100_000,
    ]:
        assert processed_in(content) == []


def test_half_a_line_and_a_changed_one_say_nothing() -> None:
    whole = DONE + GIVEN
    assert {tuple(processed_in(torn)) for torn in every_truncation(whole[:-1])} == {()}
    assert {tuple(processed_in(changed)) for changed in every_flip(whole)} <= {(), tuple(SEQUENCES)}


def test_a_run_that_has_not_ended_says_which_try_it_was() -> None:
    given = encode_given(8, [5], 3)
    assert last_run_in(DONE + given) == ([5], 3, False, None, None)
    assert last_run_in(padded({"run": 8, "started": True}) + given) == ([5], 3, True, None, None)
    assert last_run_in(outcome(8, -9, 0) + given) == ([5], 3, True, (-9, 0), None)
    assert last_run_in(outcome(8, 0, 2) + given) == ([5], 3, False, (0, 2), None)
    assert last_run_in(outcome(8, 0, 0) + encode_given(8, [5], 3, (9, 17))) == ([5], 3, True, (0, 0), (9, 17))
    assert last_run_in(DONE) is None


def test_a_settled_run_is_not_processed_again(built: Built) -> None:
    with file(built, 3) as opened:
        opened.begin(7, SEQUENCES, 1)
        os.pwrite(opened.descriptor, DONE, 0)
        assert (opened.outcome(7), opened.outcome(8)) == ((0, 0), None)
        assert opened.last_run() == (SEQUENCES, 1, True, (0, 0), None)
        opened.settle()
        assert opened.last_run() is None
        opened.begin(8, [1], 1)
        assert opened.last_run() == ([1], 1, False, None, None)


def test_a_file_stays_while_a_command_has_its_lock(built: Built) -> None:
    with file(built, 3) as command, file(built, 3) as opened:
        assert command.lock()
        opened.remove()
        assert opened.path.exists()
    with file(built, 3) as opened:
        opened.remove()
        assert not opened.path.exists()


def test_workers_are_found_by_their_files(built: Built) -> None:
    assert workers_of(built.root.cursor_directory("a"), "g") == []
    for worker, group in ((12, "g"), (2, "g"), (3, "h"), (4, "g.command-2"), (5, "xg")):
        file(built, worker, group).close()
    (built.root.cursor_directory("a") / "g.command").touch()
    (built.root.cursor_directory("a") / "g.command-x").touch()

    assert workers_of(built.root.cursor_directory("a"), "g") == [2, 12]
