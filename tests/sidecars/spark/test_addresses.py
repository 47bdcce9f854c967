"""Jobs read and write directories only: they refuse any other URL and create nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from logs import Built

from wald.errors import InvalidInput, NotFound

COMMANDS = {
    "export": ("--root", "--out"),
    "compact": ("--root", "--out"),
    "audit": ("--root",),
}


def command(name: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that never reaches Spark."""
    line = [sys.executable, "-m", f"wald_spark.{name}", *words]
    env = {name: value for name, value in os.environ.items() if name != "WALD_ROOT"}
    return subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name, options in COMMANDS.items() for option in options]
)
def test_a_url_of_something_else_is_refused_and_makes_nothing(tmp_path: Path, name: str, option: str) -> None:
    here = tmp_path / "here"
    here.mkdir()
    given = {option: str(tmp_path / option.strip("-")) for option in COMMANDS[name]} | {option: "s3://lake/tables"}
    Built(tmp_path / "root")
    done = command(name, *(word for pair in given.items() for word in pair), cwd=here)

    assert done.returncode == InvalidInput.exit_code
    assert "s3://lake/tables: a URL, but a directory is needed" in done.stderr
    assert list(here.iterdir()) == []
    assert not (tmp_path / "out" / "_wald").exists()


@pytest.mark.parametrize("name", ["export", "compact"])
def test_a_file_url_is_a_path(tmp_path: Path, name: str) -> None:
    """An empty log gives the job nothing to do, so no Spark is needed."""
    root = Built(tmp_path / "root").root.path
    done = command(name, "--root", f"file://{root}", "--out", f"file://{tmp_path}/out", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "nothing to" in done.stdout
    assert (tmp_path / "out" / "_wald").is_dir()
    assert not (tmp_path / "file:").exists()


def test_an_archive_that_is_to_be_audited_has_to_be_there(tmp_path: Path) -> None:
    root = Built(tmp_path / "root").root.path
    done = command("audit", "--root", str(root), "--archive", str(tmp_path / "nothing"), cwd=tmp_path)

    assert done.returncode == NotFound.exit_code
    assert "no bags" in done.stderr
