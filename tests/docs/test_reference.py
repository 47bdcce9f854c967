"""Statements of the reference that a program can check: commands, settings, codes, promises."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from pages import PAGES, ROOT, blocks, rows, section, without_blocks
from running import Daemon, output_of

from wald import errors
from wald.format.protocol import Code

OVERVIEW = rows("docs/cli.md", "# Commands")
PROGRAMS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"])


def words_of(usage: str) -> list[str]:
    """Return the program and the commands at the start of a usage."""
    return re.findall(r"[a-z-]+", re.split(r" [A-Z\[]| --", usage.strip("`"))[0])


def options(text: str, *, before: str = "") -> set[str]:
    return set(re.findall(before + r"(--[a-z-]+)", text, re.MULTILINE))


def test_every_program_that_is_installed_is_in_the_overview() -> None:
    assert {words_of(row[0])[0] for row in OVERVIEW} == PROGRAMS


def test_every_command_of_wald_is_in_the_overview() -> None:
    shown = output_of("--help").decode().partition("Write and read:")[2]
    listed = {name for names in re.findall(r"^  ([a-z, ]+)  ", shown, re.MULTILINE) for name in names.split(", ")}
    listed = {name.strip() for name in listed} - {name.removeprefix("wald-") for name in PROGRAMS} - {""}

    assert {words_of(row[0])[1] for row in OVERVIEW if words_of(row[0])[0] == "wald"} == listed


def test_every_command_that_has_a_section_is_in_the_overview() -> None:
    """The sections are generated from click; a command with subcommands is only a group."""
    headings = re.findall(r"^##+ (wald.*)$", section("docs/cli.md", "## Who may do what"), re.MULTILINE)
    commands = [each for each in headings if not any(other.startswith(f"{each} ") for other in headings)]

    assert sorted(" ".join(words_of(row[0])) for row in OVERVIEW) == sorted(commands)


def lines(text: str) -> list[str]:
    """Return the command lines of a block, with continuation lines joined and without comments and user prefix."""
    return [re.sub(r"\s+#.*|runuser -u wald -- ", "", line) for line in text.replace("\\\n", " ").splitlines()]


def test_every_option_it_uses_exists() -> None:
    """This includes blocks that are not run because they need a cluster, and commands within a sentence."""
    known = {program: options(section("docs/cli.md", f"## {program}").split("\n## ")[0]) for program in PROGRAMS}
    for page in PAGES:
        given = [line for block in blocks(page) if block.language in ("sh", "console") for line in lines(block.text)]
        given += re.findall(r"`(wald[ -][^`]*)`", without_blocks(page).replace("\n", " "))
        unknown = []
        for line in given:
            for call in re.split(r"[|;&]+", line):
                found = re.search(r"(?<![\w/.-])(wald(?:-[a-z]+)?)(?= (?!--? ))(.*)", call)
                if found is not None and found[1] in known:
                    ours = re.split(r" -- ", found[2])[0] if found[1] == "wald-drain" else found[2]
                    others = options(ours, before="(?<= )") - known[found[1]]
                    unknown += [(line, option) for option in others - {"--root", "--help", "--version"}]

        assert unknown == [], page


def test_exit_codes_are_those_of_the_errors() -> None:
    named = {int(code): name for code, name, _ in rows("docs/cli.md", "## Exit codes") if name}
    everywhere: list[type[errors.WaldError]] = [errors.WaldError, *errors.WaldError.__subclasses__()]
    classes = [each for each in everywhere if each.__module__ == errors.__name__]  # other errors do not exit a command

    assert named == {each.exit_code: each.__name__ for each in classes}


def test_every_exit_code_has_advice() -> None:
    codes = {int(code) for code, _, _ in rows("docs/cli.md", "## Exit codes")} - {0}
    headings = re.findall(r"^### (\d+)(?: and (\d+))?", PAGES["docs/troubleshooting.md"], re.MULTILINE)

    assert {int(code) for heading in headings for code in heading if code} == codes


def test_error_codes_are_those_of_the_protocol() -> None:
    assert sorted(row[0].strip("`") for row in rows("docs/protocol.md", "## Errors")) == sorted(Code)


def test_stat_answers_what_it_says(tmp_path: Path) -> None:
    with Daemon(tmp_path / "log") as daemon:
        answered = json.loads(daemon.ask("STAT").removeprefix("OK "))
    listed = {name for row in rows("docs/monitoring.md", "## STAT") for name in re.findall(r"`(\w+)`", row[0])}

    assert listed == answered.keys()


def test_every_promise_names_what_holds_it() -> None:
    promises = rows("docs/guarantees.md", "## Promises")

    assert [int(row[0]) for row in promises] == list(range(1, 18))
    assert [row[0] for row in promises if "`tests/" not in row[2]] == []


def test_the_readme_promises_nothing_else() -> None:
    promises = {row[1] for row in rows("docs/guarantees.md", "## Promises")}
    short = re.findall(
        r"^\d+\. (.*?\.)$", section("README.md", "## Promises").split("\n## ")[0].replace("\n   ", " "), re.MULTILINE
    )

    assert short
    assert [promise for promise in short if not any(each.startswith(promise.rstrip(".")) for each in promises)] == []


def test_the_readme_is_as_fast_as_the_benchmarks() -> None:
    """Every number of the README table is in the tables of the page."""
    numbers = re.findall(r"\d[\d.,]*\d", " ".join(" ".join(row[1:]) for row in rows("README.md", "## How fast")))

    assert len(numbers) > 8
    assert [number for number in numbers if f" {number} " not in PAGES["docs/benchmarks.md"]] == []
