"""A drain without workers after one with workers, and vice versa: no record is lost or processed again."""

from __future__ import annotations

import signal

from draining import Start, await_line, cursor, drain, drain_refusal
from jobs import ONCE, VALUES, Jobs
from logs import Built
from running import TIMEOUT_SECONDS, eventually


def test_a_drain_without_workers_waits_for_commands_of_workers(built: Built, jobs: Jobs, start: Start) -> None:
    """It refuses to process again records above the cursor that workers have done."""
    jobs.hold(1, 2)
    first = start(*jobs.arguments(built.root.path, "--workers", 2))
    jobs.await_running(1, 2)
    first.kill()
    second = start(*jobs.arguments(built.root.path, "--exit-at-end"))
    await_line(second, "waits for the command that an earlier wald-drain has left running")
    jobs.fail(1)
    jobs.let_go(1, 2)
    assert second.wait(TIMEOUT_SECONDS) == 9
    code, message, hint = drain_refusal(*jobs.arguments(built.root.path, "--exit-at-end"))

    assert code == 9
    assert message == (
        "route a: workers of group processed have processed records above the cursor, 0, which would be processed again"
    )
    assert "feed a --group processed --workers 1 --exit-at-end -- sh " in hint
    jobs.mend(1)
    assert drain(*jobs.arguments(built.root.path, "--workers", 1, "--exit-at-end")).returncode == 0
    assert jobs.processed == ONCE
    built.lines("a", [b"more"])
    assert drain(*jobs.arguments(built.root.path, "--exit-at-end")).returncode == 0
    assert jobs.processed == ONCE | {"more": 1}


def test_a_drain_without_workers_goes_on_where_they_are_through(built: Built, jobs: Jobs, start: Start) -> None:
    """It does so even if the cursor was behind when the workers were killed."""
    jobs.hold(9)
    first = start(*jobs.arguments(built.root.path, "--workers", 1))
    jobs.await_running(9)
    first.kill()
    first.wait(TIMEOUT_SECONDS)
    jobs.fail(9)
    jobs.let_go(9)
    eventually(lambda: not jobs.running)
    jobs.mend(9)
    assert drain(*jobs.arguments(built.root.path, "--exit-at-end", "--batch-records", 1)).returncode == 0

    assert jobs.processed == ONCE
    assert cursor(built.root.path) == 20


def test_without_a_cursor_nothing_counts_that_workers_have_left(built: Built, jobs: Jobs, start: Start) -> None:
    """This applies to a drain without workers and to workers after it."""
    jobs.fail(1)
    first = start(*jobs.arguments(built.root.path, "--workers", 1))
    eventually(lambda: len(jobs.processed) == 19)
    first.send_signal(signal.SIGTERM)
    assert first.wait(TIMEOUT_SECONDS) == 0
    jobs.mend(1)
    built.root.cursor("a", "processed").unlink()
    assert drain(*jobs.arguments(built.root.path, "--exit-at-end")).returncode == 0

    assert jobs.processed == {value: 1 if value == "1" else 2 for value in VALUES}
    assert not (built.root.cursor_directory("a") / "processed.work").exists()


def test_workers_wait_for_the_command_of_a_drain_without(built: Built, jobs: Jobs, start: Start) -> None:
    jobs.hold(3)
    first = start(*jobs.arguments(built.root.path, "--batch-records", 5))
    jobs.await_running(3)
    first.kill()
    second = start(*jobs.arguments(built.root.path, "--workers", 3, "--exit-at-end"))
    await_line(second, "waits for the command that an earlier wald-drain has left running")
    jobs.let_go(3)

    assert second.wait(TIMEOUT_SECONDS) == 0
    assert jobs.processed == ONCE
