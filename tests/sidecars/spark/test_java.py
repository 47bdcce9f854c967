"""scripts/java chooses a Java, or names the package to install if it finds none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "java"


def found_with(java_home: Path) -> subprocess.CompletedProcess[str]:
    """Run the script with a PATH without other programs, so that it cannot install anything."""
    env = {"JAVA_HOME": os.fspath(java_home), "PATH": os.fspath(java_home)}
    return subprocess.run([sys.executable, SCRIPT], env=env, capture_output=True, text=True, check=False)


def java_that_says(version: str, home: Path) -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{version}' >&2\n")
    program.chmod(0o755)
    return home


@pytest.mark.parametrize(
    ("says", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "21" 2023-09-19 LTS', 21),
        ('openjdk version "26-ea" 2026-03-17', 26),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "25.0.1" 2025-10-21', 25),
    ],
)
def test_the_java_of_java_home_comes_first(tmp_path: Path, says: str, version: int) -> None:
    """JAVA_HOME wins over any other installation."""
    home = java_that_says(says, tmp_path / "jdk")

    done = found_with(home)
    assert (done.returncode, done.stdout) == (0, f"Java {version} in {home}\n")


@pytest.mark.parametrize("says", ['java version "1.8.0_392"', 'openjdk version "11.0.2" 2019-01-15', "no Java at all"])
def test_one_that_is_too_old_is_passed_over(tmp_path: Path, says: str) -> None:
    """The script chooses another Java or names the package to install; it succeeds either way."""
    home = java_that_says(says, tmp_path / "jdk")

    done = found_with(home)
    assert done.returncode == 0
    assert str(home) not in done.stdout
    assert done.stdout.startswith("Java ") or "apt install default-jre-headless" in done.stderr
