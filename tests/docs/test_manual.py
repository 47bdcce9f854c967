"""Manual pages and shell completion, generated from the commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import programs
import pytest
from pages import ROOT

from wald.settings import Retention, RouteConfig, RouteLimits, reference

PROGRAMS = sorted(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"])


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("share")
    subprocess.run([sys.executable, ROOT / "scripts/make-manual", directory], check=True)
    return directory


def shown(page: Path) -> str:
    """Return a page as ``man`` shows it, in one line."""
    man = [programs.program("man"), "--warnings", "-l", str(page)]
    done = subprocess.run(man, env=os.environ | {"MANWIDTH": "4000"}, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return " ".join(done.stdout.split())


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_has_a_page_with_every_command_and_option(share: Path, program: str) -> None:
    text = shown(share / f"man/man1/{program}.1")
    section = (ROOT / "docs/cli.md").read_text().partition(f"\n## {program}\n")[2].partition("\n## ")[0]
    options = re.findall(r"^\| `(-[^`]+)`", section.replace("\\|", "|"), re.MULTILINE)
    commands = re.findall(r"^#+ (.+)$", section, re.MULTILINE)

    assert options
    assert [each for each in options + commands if each not in text] == []


def test_the_page_of_the_settings_has_all_of_them(share: Path) -> None:
    text = shown(share / "man/man5/wald.toml.5")

    settings = reference() + reference(Retention) + reference(RouteConfig) + reference(RouteLimits)
    assert [each.name for each in settings if f" {each.name} = {each.default}".rstrip(" =") not in text] == []
