"""A full disk, or a record too large for a dead letter, stops a drain without losing or repeating a record."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from contents import values
from draining import InProcess, Start, await_line, cursor, drain
from full_disk import fill, small_file_system
from jobs import Jobs
from logs import Built
from running import TIMEOUT_SECONDS, Daemon, output_of

import wald
from wald.client.producer import Producer
from wald.errors import InvalidInput

LARGE = b"x" * 200_000
SMALL_LIMIT = {"WALD_REQUEST_MAX_BYTES": "128KiB"}


@pytest.fixture
def limited(daemon: Daemon) -> Daemon:
    """Records 1 to 4 on route a; the daemon would no longer accept the third."""
    with Producer(daemon.root) as producer:
        producer.command("ROUTE", "ADD", "a")
        producer.publish("a", b"one\ntwo\n" + LARGE + b"\nfour\n")
        producer.flush()
    restart(daemon, SMALL_LIMIT)
    return daemon


def restart(daemon: Daemon, env: dict[str, str]) -> None:
    daemon.stop()
    daemon.env = {name: value for name, value in daemon.env.items() if name not in SMALL_LIMIT} | env
    daemon.start_again()


def test_a_record_above_the_limit_of_the_daemon_ends_drain_until_it_can_be_sent_or_is_skipped(
    limited: Daemon, tmp_path: Path
) -> None:
    def feed(group: str, *command: object) -> tuple[int, str]:
        words = ["a", "--root", limited.root, "--exit-at-end", "--tries", 1, "--group", group, "--", *command]
        done = drain(*words)
        return done.returncode, done.stderr.decode()

    def cursor(group: str) -> int:
        return wald.open(limited.root).cursor("a", group).effective

    got = tmp_path / "got"
    for group in ("g", "h"):
        for _ in range(2):  # the second start finds the record given up in the journal
            code, errors = feed(group, "false")
            assert code == 2, errors
            assert "a 3: cannot be a dead letter: the payload has" in errors
            assert f"cursor set a 3 --group {group}" in errors
            assert "retrying every second" not in errors
            assert cursor(group) == 2
    output_of("cursor", "set", "a", "3", "--group", "g", "--root", limited.root)
    code, errors = feed("g", "sh", "-c", f"[ $WALD_FIRST = 4 ] && touch {got}")
    assert (code, got.exists()) == (0, True), errors
    restart(limited, {})
    assert feed("h", "false")[0] == 10
    assert values(limited.root, "dead_letter") == [b"one", b"two"] * 2 + [LARGE, b"four"]
    assert cursor("h") == 4


def test_workers_continue_while_the_daemon_refuses_a_dead_letter(limited: Daemon, start: Start) -> None:
    words = ["a", "--root", limited.root, "--exit-at-end", "--tries", 1, "--workers", 1, "--", "false"]
    waiting = start(*words)
    await_line(waiting, "a 3: cannot become a dead letter: the payload has")
    restart(limited, {})
    assert waiting.wait(TIMEOUT_SECONDS) == 10
    assert sorted(values(limited.root, "dead_letter")) == sorted([b"one", b"two", LARGE, b"four"])


def test_what_no_daemon_takes_is_not_begun(limited: Daemon, tmp_path: Path) -> None:
    """The records before it are given up, and each start tries the command with the large record again."""
    inside = InProcess(limited.root)
    for _ in range(2):
        with pytest.raises(InvalidInput, match="a 3: cannot be a dead letter: more than 131072 bytes") as refused:
            inside.run("false", letter_max_bytes=131_072)
        assert "cursor set a 3 --group processed" in refused.value.hint
        assert values(limited.root, "dead_letter") == [b"one", b"two"]
        assert wald.open(limited.root).cursor("a").effective == 2
    assert [line for line in inside.reported if line.startswith("a 3: exit 1")]

    got = tmp_path / "got"
    inside.run("sh", "-c", f"cat > {got}", letter_max_bytes=131_072)
    assert got.read_bytes() == LARGE + b"\nfour\n"
    assert wald.open(limited.root).cursor("a").effective == 4


VALUES = [str(number) for number in range(1, 251)]  # enough for the journal to outgrow its preallocation


def values_for(options: tuple[object, ...]) -> list[str]:
    return VALUES if "--workers" in options else VALUES[:40]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path / "disk", 16 << 20) as at:
        yield at


@pytest.fixture
def on_disk(disk: Path, options: tuple[object, ...]) -> Built:
    """Records 1 to 250 on route a, or 40 without workers, each with its sequence as value."""
    log = Built(disk / "log")
    log.lines("a", [value.encode() for value in values_for(options)])
    return log


@pytest.fixture(params=[("--workers", 2), ("--batch-records", 1)], ids=["workers", "one"])
def options(request: pytest.FixtureRequest) -> tuple[object, ...]:
    found: tuple[object, ...] = request.param
    return found


@pytest.fixture
def waiting(
    on_disk: Built, disk: Path, jobs: Jobs, start: Start, options: tuple[object, ...]
) -> subprocess.Popen[bytes]:
    """A wald-drain on a disk that became full before its last records."""
    jobs.hold(1, 2)  # all workers, so that some records remain when the disk is full
    process = start(*jobs.arguments(on_disk.root.path, *options, "--exit-at-end"))
    jobs.await_running(1)
    fill(disk / "filling")
    jobs.let_go(1, 2)
    await_line(process, "No space left on device")
    return process


def test_it_continues_once_there_is_room(
    on_disk: Built, disk: Path, jobs: Jobs, waiting: subprocess.Popen[bytes], options: tuple[object, ...]
) -> None:
    (disk / "filling").unlink()

    assert waiting.wait(TIMEOUT_SECONDS) == 0
    assert jobs.processed == dict.fromkeys(values_for(options), 1)
    assert cursor(on_disk.root.path) == len(values_for(options))


def test_a_signal_ends_the_wait_for_room(
    on_disk: Built, disk: Path, jobs: Jobs, waiting: subprocess.Popen[bytes], options: tuple[object, ...]
) -> None:
    """Records processed before the signal are not processed again by the next start."""
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(TIMEOUT_SECONDS) in (0, 7)  # 7: it was writing to the disk at that moment
    (disk / "filling").unlink()
    assert drain(*jobs.arguments(on_disk.root.path, *options, "--exit-at-end")).returncode == 0

    assert jobs.processed == dict.fromkeys(values_for(options), 1)
    assert cursor(on_disk.root.path) == len(values_for(options))
