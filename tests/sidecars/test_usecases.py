"""The scripts of two use cases find what they promise, notice what is wrong, and leave no file behind."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import programs
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Working directory of the script; its path is short, because it contains a Unix socket."""
    programs.program("jq")
    programs.program("zstd")
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def run_script(name: str, scratch: Path, path: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PATH": path, "TMPDIR": str(scratch)}
    done = subprocess.run([SCRIPTS / name], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert list(scratch.iterdir()) == []  # the script removes its files
    return done


@pytest.mark.parametrize(
    ("name", "checks", "warnings"),
    [
        ("usecase-cold-storage.sh", 17, []),
        ("usecase-smpte-timecode.sh", 11, [" group slave is new on route smpte"]),
    ],
)
def test_a_script_finds_all_that_it_checks(scratch: Path, name: str, checks: int, warnings: list[str]) -> None:
    done = run_script(name, scratch, PATH)

    assert done.returncode == 0, done.stdout
    assert [line.split(":")[1] for line in done.stderr.splitlines() if not line.startswith("  hint: ")] == warnings
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["ok"] * checks


@pytest.mark.parametrize(
    ("name", "program", "wrong", "failed"),
    [
        (
            "usecase-cold-storage.sh",
            "wald-archive",
            'wald-archive "$@" | if [ $1 = restore ]; then sed s/0500/0501/; else cat; fi',
            ["FAILED  restored, byte for byte", "FAILED  and is restored when the log no longer has it"],
        ),
        (
            "usecase-smpte-timecode.sh",
            "wald",
            'if [ $1 = read ]; then wald "$@" | sed 300d; else exec wald "$@"; fi',
            [
                "FAILED  coverage: the slave got every frame, each as it was sent",
                "FAILED  coverage: 750 different frames",
            ],
        ),
    ],
)
def test_a_script_notices_what_is_wrong(
    scratch: Path, tmp_path: Path, name: str, program: str, wrong: str, failed: list[str]
) -> None:
    (tmp_path / program).write_text(f'#!/bin/sh\nPATH="{PATH}"\n{wrong}\n')
    (tmp_path / program).chmod(0o755)
    done = run_script(name, scratch, os.pathsep.join([str(tmp_path), PATH]))

    assert done.returncode == 1
    assert [line for line in done.stdout.splitlines() if not line.startswith("ok ")] == failed
