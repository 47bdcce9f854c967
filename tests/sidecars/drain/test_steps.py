"""The steps of a drain: one run of the command, its files, and what follows a try."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from damage import every_flip, every_truncation
from hypothesis import given
from hypothesis import strategies as st
from logs import Built

from wald.errors import InvalidInput, Locked, NotFound
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.format.records import Record
from wald.work.ownership import workers_of
from wald_drain.process import (
    LINE_BYTES,
    PAUSE_MAX_SECONDS,
    TRIES_WHOLE,
    UNKEPT,
    NextStep,
    StateFile,
    check_command,
    cursor_identity,
    encode_given,
    ending,
    last_run_in,
    next_step,
    padded,
    pause_seconds,
    runners_for,
    start_error,
    tries_of,
)
from wald_drain.redrive import _RECORDS_MAX, Handover, HandoverFile, _batches
from wald_drain.worker import stdin_of

FAILURES = (1, 2, 127, 255, -1, -9, -11, -64)


def test_the_step_after_a_try() -> None:
    """While drain stops, even the last try does not give up records: the next start begins with all tries."""
    cases = product((None, 1, 2, 5, 1000), (1, 2, 1000), (False, True), (0, os.EX_TEMPFAIL, *FAILURES))
    for tries, count, stopping, exit_code in cases:
        for number in range(1, (tries or 2000) + 1):
            expected = NextStep.RETRY
            if exit_code == 0:
                expected = NextStep.COMMIT
            elif stopping:
                expected = NextStep.LEAVE
            elif exit_code == os.EX_TEMPFAIL:
                expected = NextStep.LATER
            elif number == tries:
                expected = NextStep.GIVE_UP if count == 1 else NextStep.HALVE

            assert next_step(exit_code, number=number, tries=tries, count=count, stopping=stopping) is expected


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


def records(values: list[bytes]) -> list[Record]:
    return [Record("a", 3 * number, value, 7) for number, value in enumerate(values, start=1)]


@given(st.integers(0, 2 * _RECORDS_MAX + 1))
def test_batches_are_all_records_once_and_in_order(count: int) -> None:
    every = records([b"x"] * count)
    batches = list(_batches(every))

    assert [record for batch in batches for record in batch] == every
    assert all(len(batch) == _RECORDS_MAX for batch in batches[:-1])
    assert all(0 < len(batch) <= _RECORDS_MAX for batch in batches)


def test_raw_is_each_value_and_a_newline() -> None:
    """Values are passed unchanged, including one without a trailing newline."""
    given_records = [Record("a", 1, b"one\r", 7), Record("a", 2, b"\xff\n\0", 7, terminated=False)]

    assert stdin_of(given_records, "raw") == b"one\r\n\xff\n\0\n"


MORE_THAN_A_PIPE_HOLDS = b"line\n" * 1_000_000
Attempt = Callable[[list[str], bytes, dict[str, str]], int | None]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[StateFile]:
    built = Built(tmp_path / "log")
    built.lines("a", [b"one"])
    with StateFile(built.root, "a", "g", 1, Disk()) as made:
        yield made


@pytest.fixture
def attempt(file: StateFile) -> Attempt:
    """A run for record 1; the result is None if its keeper was killed."""

    def run(command: list[str], stdin: bytes, variables: dict[str, str]) -> int | None:
        assert file.lock()
        file.begin(7, [1], 1)
        with runners_for(command, 1) as (runner,):
            runner.run(7, file.descriptor, stdin, variables)
        outcome = file.outcome(7)
        if outcome is None:
            file.renew()
            return None
        exit_code, error = outcome
        if error:
            raise start_error(command, error)
        return exit_code

    return run


@pytest.mark.parametrize(
    ("script", "exit_code"),
    [
        ("exit 0", 0),
        ("exit 3", 3),
        ("kill -SEGV $$", -signal.SIGSEGV),
        ("exec false", 1),
        ("nosuch-command", 127),
        # It may stop reading.
        ("head -1 > /dev/null", 0),
        ("exec 0<&-; exit 4", 4),
        # SIGPIPE, which Python ignores, has its default action.
        ("kill -PIPE $$; exit 0", -signal.SIGPIPE),
        # systemd, for example, signals all processes of a unit: the keeper continues.
        ("kill -TERM $PPID; kill -INT $PPID; exit 3", 3),
    ],
)
def test_the_exit_code_comes_back(attempt: Attempt, script: str, exit_code: int) -> None:
    assert attempt(["sh", "-c", script], MORE_THAN_A_PIPE_HOLDS, {}) == exit_code


def test_a_command_has_all_of_stdin_and_our_environment(
    attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OURS", "here")
    script = f'cat > {tmp_path / "got"}; echo "$OURS $WALD_TRY" > {tmp_path / "environment"}'

    assert attempt(["sh", "-c", script], MORE_THAN_A_PIPE_HOLDS, {"WALD_TRY": "2"}) == 0
    assert (tmp_path / "got").read_bytes() == MORE_THAN_A_PIPE_HOLDS
    assert (tmp_path / "environment").read_text() == "here 2\n"


def test_it_has_a_session_of_its_own_and_so_has_its_keeper(attempt: Attempt, tmp_path: Path) -> None:
    """Ctrl-C in the terminal of drain and a hangup of that terminal do not reach them."""
    script = f"ps -o sid= -p $$ > {tmp_path / 'got'}; ps -o sid= -p $PPID >> {tmp_path / 'got'}"

    assert attempt(["sh", "-c", script], b"", {}) == 0
    sessions = [*map(int, (tmp_path / "got").read_text().split()), os.getsid(0)]
    assert len(set(sessions)) == 3, sessions


def test_missing_command_is_found_out_before_it_runs(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a program")
    for name in ("nosuch-command", str(tmp_path / "nosuch"), str(tmp_path / "data"), str(tmp_path), ""):
        with pytest.raises(InvalidInput, match="cannot be run"):
            check_command([name])
    check_command(["sh", "-c", "no such argument is looked at"])


def test_what_cannot_be_run_says_so_and_has_processed_nothing(
    file: StateFile, attempt: Attempt, tmp_path: Path
) -> None:
    (tmp_path / "script").write_text("echo no first line\n")
    (tmp_path / "script").chmod(0o755)
    for name, why in (("script", "Exec format error"), ("nosuch", "No such file")):
        with pytest.raises(InvalidInput, match=f"{name}: cannot be run: {why}"):
            attempt([str(tmp_path / name)], b"", {})
    run = file.last_run()
    assert run is not None
    assert (run.is_started, run.is_processed) == (False, False)


def test_a_cursor_file_is_not_the_one_whose_inode_it_got(tmp_path: Path) -> None:
    path = tmp_path / "g.cursor"
    assert cursor_identity(path) == (0, 0)
    path.touch()
    before = cursor_identity(path)
    os.utime(path, ns=(0, 0))
    after = cursor_identity(path)

    assert before[0] == after[0]
    assert before != after


def test_an_error_of_the_machine_is_not_the_commands(attempt: Attempt) -> None:
    with pytest.raises(OSError, match="Argument list too long"):
        attempt(["true", "x" * 10_000_000], b"", {})
    assert subprocess.run(["true"], check=False).returncode == 0


def test_stdin_cannot_be_changed(attempt: Attempt, tmp_path: Path) -> None:
    """Another run, or a background process of another run, may write to its own stdin."""
    script = f"(echo more >&0; : > /dev/stdin) 2> {tmp_path / 'errors'}; cat > {tmp_path / 'got'}"

    assert attempt(["sh", "-c", script], b"one\n", {}) == 0
    assert (tmp_path / "got").read_bytes() == b"one\n"
    assert (tmp_path / "errors").read_text().count("not permitted") >= 1


def test_a_command_without_its_keeper_is_waited_for(file: StateFile, attempt: Attempt, tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    reported: list[str] = []

    def report(line: str) -> None:
        reported.append(line)
        threading.Thread(target=go.write_text, args=("go\n",)).start()

    assert attempt(["sh", "-c", f"kill -KILL $PPID; read go < {go}"], b"", {}) is None
    assert file.wait(threading.Event(), report, UNKEPT)
    assert len(reported) == 1
    assert reported[0].startswith("waits for the command whose keeper was killed: process ")


def test_waiting_is_reported_once(file: StateFile, tmp_path: Path) -> None:
    class ThirdLook(threading.Event):
        """Event that is set once it has been checked three times."""

        looks = 0

        def wait(self, timeout: float | None = None) -> bool:
            self.looks += 1
            return self.looks == 3

    reported: list[str] = []
    with StateFile(Root(tmp_path / "log"), "a", "g", 1, Disk()) as command:
        assert command.lock()
        assert not file.wait(ThirdLook(), reported.append)

    assert len(reported) == 1


def test_a_file_that_cannot_be_opened_again_can_be_closed(file: StateFile) -> None:
    file.path.unlink()
    file.path.mkdir()
    with pytest.raises(OSError, match=r"g\.command-1"):
        file.renew()
    assert file.outcome(7) is None


HANDOVER = Handover(10, 11, 20, "exit 3 after 5 tries", 5, "dead_letter", 1_795_255_200_000_000_000)
LINE = (
    b'{"after": 10, "first": 11, "last": 20, "reason": "exit 3 after 5 tries", "tries": 5, '
    b'"dead_letter": "dead_letter", "at_ns": 1795255200000000000, "head": 0, "crc": "%s"}\n'
)


@pytest.fixture
def built(tmp_path: Path) -> Built:
    log = Built(tmp_path / "log")
    log.lines("a", [b"one"])
    return log


def test_the_line_has_every_field() -> None:
    assert HANDOVER.encoded() == LINE % b"e099fb41"
    assert Handover.decode(LINE % b"e099fb41") == HANDOVER
    assert HANDOVER.position == 20
    now = replace(HANDOVER, head=450)
    assert Handover.decode(now.encoded()) == now
    assert now.position == 450


def test_a_torn_or_other_line_says_nothing_and_a_changed_one_nothing_else() -> None:
    line = HANDOVER.encoded()
    assert {Handover.decode(torn) for torn in every_truncation(line[:-1])} == {None}
    assert {Handover.decode(changed) for changed in every_flip(line)} <= {None, HANDOVER}
    for other in [b"null", b"[1]", b"7", b"{}", b'{"crc": "e099fb41"}', b"[" * 100_000]:
        assert Handover.decode(other) is None


def test_what_was_begun_is_there_until_it_ends(built: Built) -> None:
    """A crash left a torn line, which is replaced."""
    (built.root.cursor_directory("a") / "g.drain").write_bytes(HANDOVER.encoded()[:40])
    with HandoverFile(built.root, "a", "g", Disk()) as file:
        assert file.begun() is None
        file.begin(HANDOVER)
    with HandoverFile(built.root, "a", "g", Disk()) as file:
        assert file.begun() == HANDOVER
        file.end()
    with HandoverFile(built.root, "a", "g", Disk()) as file:
        assert file.begun() is None
    with pytest.raises(NotFound):
        HandoverFile(built.root, "nosuch", "g", Disk())
    assert not built.root.route("nosuch").exists()


def test_one_drain_per_route_and_group(built: Built) -> None:
    built.lines("b", [b"two"])
    with HandoverFile(built.root, "a", "g", Disk()):
        with pytest.raises(Locked, match="this process already works on route a for group g"):
            HandoverFile(built.root, "a", "g", Disk())
        for route, group in (("a", "h"), ("b", "g")):
            with HandoverFile(built.root, route, group, Disk()) as file:
                assert file.begun() is None
    with HandoverFile(built.root, "a", "g", Disk()) as file:
        assert file.begun() is None


SEQUENCES = [300, 301, 302, 320]
GIVEN = encode_given(7, SEQUENCES, 1)


def outcome(run: int, exit_code: int, error: int) -> bytes:
    return padded({"run": run, "exit_code": exit_code, "error": error})


DONE = outcome(7, 0, 0)


def processed_in(content: bytes) -> list[int]:
    run = last_run_in(content)
    return run.sequences if run is not None and run.is_processed else []


def state_file(built: Built, worker: int, group: str = "g") -> StateFile:
    return StateFile(built.root, "a", group, worker, Disk())


def test_what_a_command_has_processed_and_that_anything_else_says_nothing() -> None:
    assert len(DONE) == LINE_BYTES
    whole = DONE + GIVEN
    assert processed_in(whole) == processed_in(whole + b"the rest of a longer line\n") == SEQUENCES
    for content in [
        *(b"", DONE, DONE + b"[" * 100_000, bytes(LINE_BYTES) + GIVEN, b"null\n".rjust(LINE_BYTES) + GIVEN),
        *(outcome(*values) + GIVEN for values in ((7, 1, 0), (7, -9, 0), (7, 0, 2), (6, 0, 0))),
        *every_truncation(whole[:-1]),
    ]:
        assert processed_in(content) == []
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
    with state_file(built, 3) as opened:
        opened.begin(7, SEQUENCES, 1)
        os.pwrite(opened.descriptor, DONE, 0)
        assert (opened.outcome(7), opened.outcome(8)) == ((0, 0), None)
        assert opened.last_run() == (SEQUENCES, 1, True, (0, 0), None)
        opened.settle()
        assert opened.last_run() is None
        opened.begin(8, [1], 1)
        assert opened.last_run() == ([1], 1, False, None, None)


def test_a_file_stays_while_a_command_has_its_lock(built: Built) -> None:
    with state_file(built, 3) as command, state_file(built, 3) as opened:
        assert command.lock()
        opened.remove()
        assert opened.path.exists()
    with state_file(built, 3) as opened:
        opened.remove()
        assert not opened.path.exists()


def test_workers_are_found_by_their_files(built: Built) -> None:
    assert workers_of(built.root.cursor_directory("a"), "g") == []
    for worker, group in ((12, "g"), (2, "g"), (3, "h"), (4, "g.command-2"), (5, "xg")):
        state_file(built, worker, group).close()
    (built.root.cursor_directory("a") / "g.command").touch()
    (built.root.cursor_directory("a") / "g.command-x").touch()

    assert workers_of(built.root.cursor_directory("a"), "g") == [2, 12]
