"""One run of the command: its exit code is all that counts."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from sidecars.drain.attempt import attempt, check_command
from wald.errors import InvalidInput

MORE_THAN_A_PIPE_HOLDS = b"line\n" * 1_000_000


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
def test_the_exit_code_comes_back(script: str, exit_code: int) -> None:
    assert attempt(["sh", "-c", script], b"", {}) == exit_code


def test_stdin_is_all_of_it(tmp_path: Path) -> None:
    script = f"cat > {tmp_path / 'got'}"

    assert attempt(["sh", "-c", script], MORE_THAN_A_PIPE_HOLDS, {}) == 0
    assert (tmp_path / "got").read_bytes() == MORE_THAN_A_PIPE_HOLDS


@pytest.mark.parametrize(("script", "exit_code"), [("head -1 > /dev/null", 0), ("exec 0<&-; exit 4", 4), ("exit 5", 5)])
def test_a_command_may_leave_off_reading(script: str, exit_code: int) -> None:
    assert attempt(["sh", "-c", script], MORE_THAN_A_PIPE_HOLDS, {}) == exit_code


def test_the_environment_is_ours_and_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "here")
    script = f'echo "$OURS $WALD_TRY" > {tmp_path / "got"}'

    assert attempt(["sh", "-c", script], b"", {"WALD_TRY": "2"}) == 0
    assert (tmp_path / "got").read_text() == "here 2\n"


def test_it_has_a_session_of_its_own(tmp_path: Path) -> None:
    """So Ctrl-C in the terminal of drain does not reach it."""
    script = f"ps -o sid= -p $$ > {tmp_path / 'got'}"

    assert attempt(["sh", "-c", script], b"", {}) == 0
    assert int((tmp_path / "got").read_text()) != os.getsid(0)


def test_a_broken_pipe_kills_it_as_it_would_in_a_shell() -> None:
    """SIGPIPE, which Python ignores, is what it always is."""
    script = "kill -PIPE $$; exit 0"

    assert attempt(["sh", "-c", script], b"", {}) == -signal.SIGPIPE


def test_missing_command_is_found_out_before_it_runs(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a program")
    for name in ("nosuch-command", str(tmp_path / "nosuch"), str(tmp_path / "data"), str(tmp_path), ""):
        with pytest.raises(InvalidInput, match="cannot be run"):
            check_command([name])
    check_command(["sh", "-c", "no such argument is looked at"])


def test_what_cannot_be_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("echo no first line\n")
    (tmp_path / "script").chmod(0o755)

    with pytest.raises(InvalidInput, match="script: cannot be run: Exec format error"):
        attempt([str(tmp_path / "script")], b"", {})
    with pytest.raises(InvalidInput, match="nosuch: cannot be run: No such file"):
        attempt([str(tmp_path / "nosuch")], b"", {})


def test_an_error_of_the_machine_is_not_the_commands() -> None:
    with pytest.raises(OSError, match="Argument list too long"):
        attempt(["true", "x" * 10_000_000], b"", {})
    assert subprocess.run(["true"], check=False).returncode == 0
