"""Several workers: a failing record does not block others, and each record is processed or given up once."""

import json
import signal
from pathlib import Path

import pytest
from contents import records
from damage import flip_bit
from draining import Start, cursor, drain, drain_refusal
from endpoint import free_address, get, samples_of
from jobs import ONCE, VALUES, Jobs
from logs import Built
from running import TIMEOUT_SECONDS, Daemon, eventually, output_of

import wald
from wald.format.names import Kind
from wald.retention.cursors import new_group_warning


@pytest.fixture
def sent(daemon: Daemon) -> Path:
    """The same records in the log of a running daemon."""
    output_of("route", "add", "a", "--root", daemon.root)
    output_of("append", "a", "--root", daemon.root, stdin="".join(f"{value}\n" for value in VALUES).encode())
    return daemon.root


def dead(root: Path) -> list[str]:
    log = wald.open(root)
    return [record.value.decode() for record in records(root, "dead_letter")] if "dead_letter" in log.routes() else []


def test_commands_run_at_the_same_time_in_one_process(built: Built, jobs: Jobs, start: Start) -> None:
    """The group keeps no file of a worker."""
    jobs.hold(*VALUES)
    process = start(*jobs.arguments(built.root.path, "--workers", 4, "--exit-at-end"))
    jobs.await_running(1, 2, 3, 4)

    assert sorted(line.worker for line in jobs.running.values()) == [1, 2, 3, 4]
    assert {line.values for line in jobs.running.values()} == {("1",), ("2",), ("3",), ("4",)}
    code, message, _ = drain_refusal(*jobs.arguments(built.root.path, "--workers", 2))
    assert (code, "another process works on route a for group processed" in message) == (5, True)
    jobs.let_go(*VALUES)
    assert process.wait(TIMEOUT_SECONDS) == 0
    assert jobs.processed == ONCE
    assert cursor(built.root.path) == 20
    files = built.root.cursor_directory("a").glob("processed.*")
    assert {path.name.removeprefix("processed.") for path in files} == {"cursor", "drain", "work"}


def test_a_new_group_is_reported(built: Built, jobs: Jobs) -> None:
    news = new_group_warning(built.root, "a", "g", with_workers=True)
    done = drain(*jobs.arguments(built.root.path, "--workers", 2, "--group", "g", "--exit-at-end"))

    assert (done.returncode, done.stderr.decode()) == (0, f"wald-drain: {news}\n")


def test_a_command_gets_so_many_records(built: Built, jobs: Jobs) -> None:
    done = drain(*jobs.arguments(built.root.path, "--workers", 1, "--batch-records", 8, "--exit-at-end"))

    assert (done.returncode, done.stderr) == (0, b"")
    assert [len(line.values) for line in jobs.lines if line.begins] == [8, 8, 4]


def test_a_record_that_fails_stops_no_other(built: Built, jobs: Jobs, start: Start) -> None:
    """This holds even for as many failing records as workers."""
    jobs.fail(3, 4)
    process = start(*jobs.arguments(built.root.path, "--workers", 2))
    others = set(VALUES) - {"3", "4"}
    eventually(lambda: set(jobs.processed) == others)
    eventually(lambda: len(jobs.tries(3)) > 2 and len(jobs.tries(4)) > 2)
    process.send_signal(signal.SIGTERM)

    assert process.wait(TIMEOUT_SECONDS) == 0
    assert cursor(built.root.path) == 2
    jobs.mend(3, 4)
    assert drain(*jobs.arguments(built.root.path, "--workers", 2, "--exit-at-end")).returncode == 0
    assert jobs.processed == ONCE
    assert cursor(built.root.path) == 20


@pytest.mark.parametrize("batch", [1, 6])
def test_a_record_is_given_up_after_its_own_tries(sent: Path, jobs: Jobs, batch: int) -> None:
    """Records of the same batch are not given up, and trying it alone adds no further tries."""
    jobs.fail(7, 9)
    options = ("--workers", 3, "--batch-records", batch, "--tries", 3, "--exit-at-end")
    done = drain(*jobs.arguments(sent, *options))

    assert done.returncode == 10
    assert b"2 records of a given up" in done.stderr
    assert (jobs.tries(7), jobs.tries(9)) == ([1, 2, 3], [1, 2, 3])
    assert jobs.processed == {value: 1 for value in VALUES if value not in ("7", "9")}
    assert sorted(dead(sent)) == ["7", "9"]
    headers = json.loads(records(sent, "dead_letter")[0].headers or b"")
    assert (headers["wald.reason"], headers["wald.tries"]) == ("exit 1 after 3 tries", "3")
    assert cursor(sent) == 20


def test_later_is_no_try(sent: Path, jobs: Jobs, start: Start) -> None:
    jobs.fail(5, code=75)
    process = start(*jobs.arguments(sent, "--workers", 2, "--tries", 1, "--exit-at-end"))
    eventually(lambda: len(jobs.tries(5)) > 2)
    jobs.mend(5)

    assert process.wait(TIMEOUT_SECONDS) == 0
    assert set(jobs.tries(5)) == {1}
    assert jobs.processed == ONCE
    assert dead(sent) == []


def test_a_batch_may_come_later(built: Built, jobs: Jobs, start: Start) -> None:
    """It stays complete, and other batches are processed in the meantime."""
    jobs.fail(1, code=75)
    process = start(*jobs.arguments(built.root.path, "--workers", 2, "--batch-records", 5, "--exit-at-end"))
    eventually(lambda: len(jobs.processed) == 15)
    jobs.mend(1)

    assert process.wait(TIMEOUT_SECONDS) == 0
    assert {len(line.values) for line in jobs.lines} == {5}
    assert jobs.processed == ONCE


def test_the_tries_go_on_after_a_restart(sent: Path, jobs: Jobs, start: Start) -> None:
    """A try that fails while drain is stopping does not count. A restart with fewer tries does not retry the record."""
    jobs.fail(1)
    process = start(*jobs.arguments(sent, "--workers", 1))
    eventually(lambda: jobs.tries(1)[:2] == [1, 2])
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_SECONDS) == 0
    before = jobs.tries(1)
    assert b"; last returned with: exit 1\n" in output_of("group", "show", "a", "processed", "--root", sent)
    process = start(*jobs.arguments(sent, "--workers", 1))
    eventually(lambda: len(jobs.tries(1)) > len(before) + 1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_SECONDS) == 0
    after = jobs.tries(1)
    assert after == sorted(after)
    assert after[len(before)] >= before[-1]
    assert drain(*jobs.arguments(sent, "--workers", 1, "--exit-at-end", "--tries", 2)).returncode == 10

    assert jobs.tries(1) == after
    (letter,) = records(sent, "dead_letter")
    assert int(json.loads(letter.headers or b"")["wald.tries"]) in (after[-1], after[-1] - 1)


def test_the_order_of_a_key_is_kept(root: Path, jobs: Jobs, start: Start) -> None:
    """One record per key runs at a time; a failing record blocks only its key."""
    built = Built(root)
    values = [f"{key}{number}" for number in range(5) for key in "xyz"]
    built.columns("a", [each.encode() for each in values], keys=[each[:1].encode() for each in values])
    jobs.fail("y1")
    options = ("--workers", 3, "--order", "key", "--exit-at-end")
    process = start(*jobs.arguments(built.root.path, *options))
    eventually(lambda: set(jobs.processed) == {"y0", *(each for each in values if each[0] != "y")})
    eventually(lambda: len(jobs.tries("y1")) > 2)
    jobs.mend("y1")

    assert process.wait(TIMEOUT_SECONDS) == 0
    at_work: set[str] = set()
    done: list[str] = []
    for line in jobs.lines:
        (value,) = line.values
        if line.begins:
            assert value[0] not in at_work
            at_work.add(value[0])
            continue
        at_work.discard(value[0])
        done += [value] * (line.number == 0)
    assert {key: [each for each in done if each[0] == key] for key in "xyz"} == {
        key: [f"{key}{number}" for number in range(5)] for key in "xyz"
    }


@pytest.mark.parametrize("given_up", [False, True])
def test_a_batch_keeps_the_order_of_a_key(daemon: Daemon, jobs: Jobs, start: Start, given_up: bool) -> None:
    """Records after the failing one are not processed before it, even in the same batch."""
    lines = "".join(f'{{"key": "{each[0]}", "value": "{each}"}}\n' for each in ("x1", "y1", "x2", "y2", "x3"))
    output_of("route", "add", "a", "--root", daemon.root)
    output_of("append", "a", "--jsonl", "--root", daemon.root, stdin=lines.encode())
    jobs.fail("x2")
    options = ("--workers", 2, "--batch-records", 5, "--order", "key", "--exit-at-end")
    process = start(*jobs.arguments(daemon.root, *options, *(("--tries", 2) if given_up else ())))
    eventually(lambda: len(jobs.tries("x2")) >= 2)
    if not given_up:
        assert "x3" not in jobs.processed
        jobs.mend("x2")

    assert process.wait(TIMEOUT_SECONDS) == (10 if given_up else 0)
    done = [value for line in jobs.lines if not line.begins and not line.number for value in line.values]
    assert [each for each in done if each[0] == "x"] == (["x1", "x3"] if given_up else ["x1", "x2", "x3"])
    assert [each for each in done if each[0] == "y"] == ["y1", "y2"]
    assert dead(daemon.root) == (["x2"] if given_up else [])


def test_a_worker_that_pauses_ends_with_a_signal(built: Built, jobs: Jobs, start: Start) -> None:
    jobs.fail(*VALUES)
    process = start(*jobs.arguments(built.root.path, "--workers", 2, "--batch-records", 10))
    eventually(lambda: len(jobs.lines) > 4)
    process.send_signal(signal.SIGTERM)

    assert process.wait(TIMEOUT_SECONDS) == 0
    assert cursor(built.root.path) == 0


def test_new_records_are_processed(sent: Path, jobs: Jobs, start: Start) -> None:
    process = start(*jobs.arguments(sent, "--workers", 2))
    eventually(lambda: jobs.processed == ONCE)
    output_of("append", "a", "--root", sent, stdin=b"more\n")
    eventually(lambda: jobs.processed["more"] == 1)
    process.send_signal(signal.SIGTERM)

    assert process.wait(TIMEOUT_SECONDS) == 0


def test_an_operator_may_pass_over_what_fails(sent: Path, jobs: Jobs, start: Start) -> None:
    """The workers keep running."""
    jobs.fail(1)
    process = start(*jobs.arguments(sent, "--workers", 2, "--exit-at-end"))
    eventually(lambda: len(jobs.processed) == 19)
    output_of("cursor", "skip", "a", "1", "--why", "it has teeth", "--root", sent)

    assert process.wait(TIMEOUT_SECONDS) == 0
    assert cursor(sent) == 20
    assert jobs.processed == {value: 1 for value in VALUES if value != "1"}


def test_a_batch_that_is_put_off_ends_when_it_is_passed_over(sent: Path, jobs: Jobs, start: Start) -> None:
    jobs.fail(1, code=75)
    process = start(*jobs.arguments(sent, "--workers", 1, "--batch-records", 5, "--exit-at-end"))
    eventually(lambda: len(jobs.lines) > 2)
    output_of("cursor", "set", "a", "5", "--root", sent)

    assert process.wait(TIMEOUT_SECONDS) == 0
    assert jobs.processed == dict.fromkeys(VALUES[5:], 1)


def samples(address: str) -> dict[tuple[str, ...], float]:
    """Return the value of each metric of drain; empty until its endpoint listens."""
    try:
        return samples_of(get(address, "/metrics")[1])
    except OSError:
        return {}


def test_metrics_count_what_all_workers_do(sent: Path, jobs: Jobs, start: Start) -> None:
    address = free_address()
    jobs.fail(3)
    process = start(*jobs.arguments(sent, "--workers", 3, "--metrics", address))
    eventually(lambda: len(jobs.processed) == 19)
    eventually(lambda: samples(address).get(("wald_drain_records_total", "a", "processed")) == 19)
    eventually(lambda: samples(address)["wald_drain_failing_seconds", "a", "processed"] > 0.3)
    found = samples(address)
    assert found["wald_drain_runs_total", "a", "processed", "success"] == 19
    assert found["wald_drain_runs_total", "a", "processed", "failure"] >= 1
    jobs.mend(3)
    eventually(lambda: samples(address)["wald_drain_failing_seconds", "a", "processed"] == 0)
    process.send_signal(signal.SIGTERM)

    assert process.wait(TIMEOUT_SECONDS) == 0


def damage_after(built: Built, *behind: bytes) -> None:
    """Append a damaged record and others after it."""
    for value in (b"damaged", *behind):
        built.lines("a", [value])
    flip_bit(built.path(1, Kind.RAW), b"damaged")


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
        "--order needs --workers",
    )
    assert drain_refusal("nosuch", "--root", root, "--workers", 2, "--", "true")[0] == 3
    script = jobs.folder / "script"
    script.write_text("echo no first line\n")
    script.chmod(0o755)
    code, message, _ = drain_refusal("a", "--root", root, "--workers", 2, "--exit-at-end", "--", script)
    assert (code, message) == (2, f"{script}: cannot be run: Exec format error")
