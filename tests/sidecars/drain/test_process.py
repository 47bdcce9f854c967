"""One run of the command: only its exit code counts."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from logs import Built

from wald.errors import InvalidInput
from wald.files.disk import Disk
from wald.files.layout import Root
from wald_drain.process import check_command, runners_for, start_error
from wald_drain.state_file import UNKEPT, StateFile, cursor_identity

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
    ],
)
def test_the_exit_code_comes_back(attempt: Attempt, script: str, exit_code: int) -> None:
    assert attempt(["sh", "-c", script], b"", {}) == exit_code


def test_stdin_is_all_of_it(attempt: Attempt, tmp_path: Path) -> None:
    script = f"cat > {tmp_path / 'got'}"

    assert attempt(["sh", "-c", script], MORE_THAN_A_PIPE_HOLDS, {}) == 0
    assert (tmp_path / "got").read_bytes() == MORE_THAN_A_PIPE_HOLDS


@pytest.mark.parametrize(("script", "exit_code"), [("head -1 > /dev/null", 0), ("exec 0<&-; exit 4", 4), ("exit 5", 5)])
def test_a_command_may_leave_off_reading(attempt: Attempt, script: str, exit_code: int) -> None:
    assert attempt(["sh", "-c", script], MORE_THAN_A_PIPE_HOLDS, {}) == exit_code


def test_the_environment_is_ours_and_more(attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "here")
    script = f'echo "$OURS $WALD_TRY" > {tmp_path / "got"}'

    assert attempt(["sh", "-c", script], b"", {"WALD_TRY": "2"}) == 0
    assert (tmp_path / "got").read_text() == "here 2\n"


def test_it_has_a_session_of_its_own_and_so_has_its_keeper(attempt: Attempt, tmp_path: Path) -> None:
    """Ctrl-C in the terminal of drain and a hangup of that terminal do not reach them."""
    script = f"ps -o sid= -p $$ > {tmp_path / 'got'}; ps -o sid= -p $PPID >> {tmp_path / 'got'}"

    assert attempt(["sh", "-c", script], b"", {}) == 0
    sessions = [*map(int, (tmp_path / "got").read_text().split()), os.getsid(0)]
    assert len(set(sessions)) == 3, sessions


def test_a_broken_pipe_kills_it_as_it_would_in_a_shell(attempt: Attempt) -> None:
    """SIGPIPE, which Python ignores, has its default action in the command."""
    script = "kill -PIPE $$; exit 0"

    assert attempt(["sh", "-c", script], b"", {}) == -signal.SIGPIPE


def test_a_signal_does_not_end_its_keeper(attempt: Attempt) -> None:
    """systemd, for example, signals all processes of a unit."""
    assert attempt(["sh", "-c", "kill -TERM $PPID; kill -INT $PPID; exit 3"], b"", {}) == 3


def test_missing_command_is_found_out_before_it_runs(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a program")
    for name in ("nosuch-command", str(tmp_path / "nosuch"), str(tmp_path / "data"), str(tmp_path), ""):
        with pytest.raises(InvalidInput, match="cannot be run"):
            check_command([name])
    check_command(["sh", "-c", "no such argument is looked at"])


def test_what_cannot_be_run_says_so(attempt: Attempt, tmp_path: Path) -> None:
    (tmp_path / "script").write_text("echo no first line\n")
    (tmp_path / "script").chmod(0o755)

    with pytest.raises(InvalidInput, match="script: cannot be run: Exec format error"):
        attempt([str(tmp_path / "script")], b"", {})
    with pytest.raises(InvalidInput, match="nosuch: cannot be run: No such file"):
        attempt([str(tmp_path / "nosuch")], b"", {})


def test_a_command_that_could_not_be_started_has_processed_nothing(file: StateFile, attempt: Attempt) -> None:
    with pytest.raises(InvalidInput, match="cannot be run"):
        attempt(["nosuch-command"], b"", {})
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
