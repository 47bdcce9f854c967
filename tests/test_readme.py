"""The README tells the truth where a program can check it: commands, settings, exit codes, the names of files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from archives import archive
from logs import Built

from wald import errors
from wald.config import reference
from wald.format.protocol import Code
from wald_archive.codecs import Codec
from wald_archive.sizes import Records

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table below ``heading``, without its own heading."""
    section = README.split(f"\n{heading}\n", 1)[1]
    found = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert found is not None
    lines = found[0].splitlines()[2:]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def options(text: str, *, before: str = "") -> set[str]:
    return set(re.findall(before + r"(--[a-z-]+)", text, re.MULTILINE))


COMMANDS = rows("## Commands")
SIDECARS = rows("### Beside the daemon")


@pytest.mark.parametrize("usage", [row[0] for row in COMMANDS])
def test_every_command_exists_with_its_options(usage: str) -> None:
    """``wald X --help`` succeeds, and knows every option that the table gives X, and the table every one it knows."""
    words = re.findall(r"[a-z-]+", re.split(r" [A-Z\[]", usage.strip("`"))[0])[1:]
    told = next(row for row in COMMANDS if row[0] == usage)

    done = subprocess.run([sys.executable, "-m", "wald", *words, "--help"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert options(done.stdout.split("Settings,")[0], before="^  (?:-h, )?") - {"--help", "--root"} == options(told[2])


@pytest.mark.parametrize("usage", [row[0] for row in SIDECARS])
def test_every_sidecar_exists_with_its_options(usage: str) -> None:
    """As for the commands of ``wald``; "ROUTE…" is what the program is given without a word of its own."""
    program, *words = re.findall(r"[a-z-]+", re.split(r" [A-Z\[]| --", usage.strip("`"))[0])
    told = next(row for row in SIDECARS if row[0] == usage)
    name = program.removeprefix("wald-")
    module = f"wald_{name}" if (ROOT / "sidecars" / f"wald_{name}").is_dir() else f"wald_spark.{name}"

    done = subprocess.run([sys.executable, "-m", module, *words, "--help"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    listed = options(done.stdout, before="^  (?:-h, )?") - {"--help", "--root", "--version"}
    assert listed == options(told[2])


def test_every_program_that_is_installed_is_in_a_table() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]

    assert {row[0].strip("`").split()[0] for row in [*COMMANDS, *SIDECARS]} == set(scripts)


def test_every_command_is_in_the_table() -> None:
    done = subprocess.run([sys.executable, "-m", "wald", "--help"], capture_output=True, text=True, check=True)
    listed = set(re.findall(r"^  ([a-z]+)  ", done.stdout.split("Commands:")[1], re.MULTILINE))

    assert {row[0].split()[1].strip("`") for row in COMMANDS} == listed


def test_settings_are_those_of_the_daemon() -> None:
    expected = []
    for each in reference():
        name = f"`{each.name}`{' *' if each.reloadable else ''}"
        expected.append([name, f"`{each.default}`" if each.default else "", each.bounds, each.meaning])

    assert rows("## Settings") == expected


def test_exit_codes_are_those_of_the_errors() -> None:
    named = {int(code): name for code, name, _ in rows("### Exit codes") if name}
    classes: list[type[errors.WaldError]] = [errors.WaldError, *errors.WaldError.__subclasses__()]

    assert named == {each.exit_code: each.__name__ for each in classes}


def test_error_codes_are_those_of_the_protocol() -> None:
    told = re.search(r"The codes: (.*?)\.\n", README, re.DOTALL)

    assert told is not None
    assert sorted(re.findall(r"`([a-z-]+)`", told[1])) == sorted(Code)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:tests|wald|scripts)/[\w/.-]+)`", README))))
def test_every_file_it_names_is_there(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_make_target_it_names_is_there() -> None:
    targets = set(re.findall(r"^([a-z0-9.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

    assert set(re.findall(r"^make ([a-z0-9.-]+)", README, re.MULTILINE)) <= targets


def test_every_promise_names_what_holds_it() -> None:
    promises = rows("## Promises")

    assert [int(row[0]) for row in promises] == list(range(1, 15))
    assert [row[0] for row in promises if "`tests/" not in row[2]] == []


def shell_lines(heading: str) -> list[str]:
    """What is to be typed in the first block below ``heading``."""
    block = README.split(f"\n{heading}\n", 1)[1].split("\n```\n", 2)[1]
    return [line.rstrip() for line in block.splitlines()]


def typed(line: str, *, at: Path, root: Path) -> str:
    """What a shell prints for a line of the README."""
    env = os.environ | {"WALD_ROOT": str(root)}
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], cwd=at, env=env, capture_output=True, check=False)
    assert done.returncode == 0, f"{line}: {done.stderr.decode()}"
    return done.stdout.decode(errors="replace")


def test_a_log_can_be_read_without_wald_as_it_says(tmp_path: Path) -> None:
    built = Built(tmp_path / "log")
    built.lines("access", [b"one", b"two"])
    built.cut()
    built.columns("access", [b"line two of it"], keys=[b"key"])
    built.cut()
    built.seal()
    built.log.set_cursor("access", 3)
    lines = shell_lines("## Without wald")
    head, cursor, sealed, whole, digest, found = (typed(line, at=tmp_path, root=built.root.path) for line in lines)

    assert head == built.root.head.read_text()
    assert cursor == built.root.cursor("access", "processed").read_text()
    assert whole == ""
    assert [digest.split()[0], 2] == [json.loads(sealed.splitlines()[0])["sha256"], len(sealed.splitlines())]
    assert found.count("two") == 2


def test_an_archive_can_be_read_without_wald_as_it_says(tmp_path: Path) -> None:
    """Two bags, with text and with JSON in them: every digest is checked, and every record comes, in order."""
    built = Built(tmp_path / "log")
    for number in range(2):
        built.lines("audit", [b"line %d" % number, b"and another"])
        built.columns("audit", [b"value"], keys=[b"key %d" % number])
        archive(built, tmp_path / "cold", "audit", size=Records(2), codec=Codec.GZ)
    checking, reading = shell_lines("## Cold storage")[-2:]
    checked = typed(checking, at=tmp_path, root=built.root.path).splitlines()
    told = typed(reading, at=tmp_path, root=built.root.path).splitlines()

    assert [line.partition(": ")[2] for line in checked] == ["OK"] * 4
    assert [line if line[0] != "{" else json.loads(line)["key"] for line in told] == [
        "line 0",
        "and another",
        "key 0",
        "line 1",
        "and another",
        "key 1",
    ]
