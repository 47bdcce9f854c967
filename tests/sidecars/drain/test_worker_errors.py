"""Errors that stop a drain with workers: damage, a full disk, another process, invalid options."""

from __future__ import annotations

import signal

import pytest
from draining import Start, cursor, drain, drain_refusal
from jobs import ONCE, VALUES, Jobs
from logs import Built
from running import TIMEOUT_SECONDS, eventually

from wald.format.names import Kind


def damage_after(built: Built, *behind: bytes) -> None:
    """Append a damaged record and others after it."""
    for value in (b"damaged", *behind):
        built.lines("a", [value])
    content = bytearray(built.path(1, Kind.RAW).read_bytes())
    content[content.index(b"damaged")] ^= 1
    built.path(1, Kind.RAW).write_bytes(content)


def test_damage_ends_it_after_all_before_it(built: Built, jobs: Jobs, start: Start) -> None:
    """Pending retries are finished first; the cursor stays before the damage."""
    damage_after(built, b"behind")
    jobs.fail(20)
    process = start(*jobs.arguments(built.root.path, "--workers", 2))
    eventually(lambda: len(jobs.tries(20)) > 2)
    jobs.mend(20)

    assert process.wait(TIMEOUT_SECONDS) == 4
    assert jobs.processed == ONCE
    assert cursor(built.root.path) == 20


def test_damage_waits_for_what_is_with_a_command(built: Built, jobs: Jobs, start: Start) -> None:
    """The command may still fail, and then its record is retried."""
    damage_after(built, b"behind")
    jobs.hold(20)
    jobs.fail(20)
    process = start(*jobs.arguments(built.root.path, "--workers", 2))
    eventually(lambda: len(jobs.processed) == 19)
    jobs.let_go(20)
    eventually(lambda: len(jobs.tries(20)) > 2)
    jobs.mend(20)

    assert process.wait(TIMEOUT_SECONDS) == 4
    assert jobs.processed == ONCE


@pytest.mark.parametrize("workers", [(), ("--workers", 2)])
def test_damage_at_the_end_is_not_the_end(built: Built, jobs: Jobs, workers: tuple[object, ...]) -> None:
    """This applies even if nothing after the damage is readable."""
    damage_after(built)
    done = drain(*jobs.arguments(built.root.path, *workers, "--exit-at-end"))

    assert done.returncode == 4, done.stderr
    assert jobs.processed == ONCE
    assert cursor(built.root.path) == 20


def test_errors_say_what_to_do(built: Built, jobs: Jobs) -> None:
    root = built.root.path
    assert drain_refusal("a", "--root", root, "--order", "key", "--", "true")[:2] == (
        2,
        "--order is for several workers",
    )
    assert drain_refusal("nosuch", "--root", root, "--workers", 2, "--", "true")[0] == 3
    script = jobs.folder / "script"
    script.write_text("echo no first line\n")
    script.chmod(0o755)
    code, message, _ = drain_refusal("a", "--root", root, "--workers", 2, "--exit-at-end", "--", script)
    assert (code, message) == (2, f"{script}: cannot be run: Exec format error")


def test_one_process_works_for_a_group(built: Built, jobs: Jobs, start: Start) -> None:
    jobs.hold(*VALUES)
    first = start(*jobs.arguments(built.root.path, "--workers", 2))
    jobs.await_running(1, 2)
    code, message, _ = drain_refusal(*jobs.arguments(built.root.path, "--workers", 2))

    assert code == 5
    assert "another process works on route a for group processed" in message
    first.send_signal(signal.SIGTERM)
    jobs.let_go(*VALUES)
    assert first.wait(TIMEOUT_SECONDS) == 0
