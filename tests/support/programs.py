"""Find the system programs that tests use as oracles, or skip the test.

`.ci/run` installs them and lets no test be skipped; `.ci/bare` hides them. A run that skipped a test ends with the
packages to install.
"""

import os
import re
import shutil
from pathlib import Path

import pytest

_TABLE = Path(__file__).parents[2] / ".ci" / "programs"
PACKAGES = dict(line.split()[:2] for line in _TABLE.read_text().splitlines() if not line.startswith("#"))
"""The Debian package of each program."""


def program(name: str) -> str:
    """Return the path of a program; without it, skip the test."""
    found = shutil.which(name)
    if found is None:
        lack(missing(name))
    return str(found)


def missing(*names: str) -> str:
    """Return the command that installs the missing ones of these programs; "" if all are installed."""
    packages = sorted({PACKAGES[name] for name in names if shutil.which(name) is None})
    return " ".join(["apt-get install", *packages]) if packages else ""


def lack(reason: str) -> None:
    """Skip the running test; in CI, where everything is installed, fail it."""
    if os.environ.get("CI") and "SKIPPED_TO" not in os.environ:
        pytest.fail(f"CI must have it: {reason}")
    pytest.skip(f"needs {reason}")


def require_of_shell(commands: str) -> None:
    """Skip the test if these shell commands run a program that is not installed."""
    words = re.findall(r"(?:^|[|;&({]|--)\s*([\w.-]+)", commands, re.MULTILINE)
    if reason := missing(*PACKAGES.keys() & set(words)):
        lack(reason)


def packages_of(reasons: list[str]) -> list[str]:
    """Return the packages that these reasons for skipping name, each once."""
    named = [re.search(r"apt-get install (.*)", reason) for reason in reasons]
    return sorted({package for found in named if found for package in found[1].split()})
