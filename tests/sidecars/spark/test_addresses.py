"""Jobs read and write directories only: they refuse any other URL and create nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import programs
import pytest
from logs import Built
from running import refused

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


PROGRAMS = ["export", "compact", "audit"]
PACKAGES = ["pyspark", "pyarrow", "numpy", "pandas"]


def without(package: str, program: str, *arguments: object) -> subprocess.CompletedProcess[bytes]:
    """Run a program in a Python that cannot import ``package``."""
    script = f"import sys; sys.modules[{package!r}] = None; from wald_spark.{program}.command import main; main()"
    line = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(line, capture_output=True, check=False, timeout=300)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_missing_package_is_named_with_the_extra_that_has_it(tmp_path: Path, program: str, package: str) -> None:
    if program == "audit":
        programs.program("java")
    built = Built(tmp_path / "log")
    built.lines("a", [b"one"])
    out = ("--out", tmp_path / "out") if program != "audit" else ()
    code, message, hint = refused(without(package, program, "--root", built.root.path, *out))

    assert (code, hint) == (3, "in a clone of wald: pip install '.[spark]'")
    assert f"there is no {package}" in message
    assert not (tmp_path / "out").exists()


def test_help_needs_no_package() -> None:
    for program in PROGRAMS:
        assert without("pyspark", program, "--help").returncode == 0


SCRIPT = Path(__file__).parents[3] / "scripts" / "java"


def found_with(says: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run the script with a Java that prints this, and a PATH without other programs, so that it installs nothing."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    program.chmod(0o755)
    env = {"JAVA_HOME": os.fspath(home), "PATH": os.fspath(home)}
    return subprocess.run([sys.executable, SCRIPT], env=env, capture_output=True, text=True, check=False)


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
    done = found_with(says, tmp_path / "jdk")
    assert (done.returncode, done.stdout) == (0, f"Java {version} in {tmp_path / 'jdk'}\n")


@pytest.mark.parametrize("says", ['java version "1.8.0_392"', 'openjdk version "11.0.2" 2019-01-15', "no Java at all"])
def test_one_that_is_too_old_is_passed_over(tmp_path: Path, says: str) -> None:
    """The script chooses another Java or names the package to install; it succeeds either way."""
    done = found_with(says, tmp_path / "jdk")
    assert done.returncode == 0
    assert str(tmp_path / "jdk") not in done.stdout
    assert done.stdout.startswith("Java ") or "apt install default-jre-headless" in done.stderr
